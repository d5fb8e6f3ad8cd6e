"""Profiles of users' modules on disk: looked up before a stage is timed, kept after.

Source: this project
Tests: tests/stage_graph/test_module_cost.py
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Sequence
from typing import Any

import torch

from gpp_plugin.ir.profile import Profile
from gpp_plugin.profile.machine import describe_device, processor_name
from gpp_plugin.profile.store import CostStore
from gpp_plugin.stage_graph.identity import NotDescribed, describe_module
from gpp_plugin.stage_graph.module import GivenModule
from gpp_plugin.stage_graph.probe import Survey
from gpp_plugin.stage_graph.resolve import GraphStage
from gpp_plugin.stage_graph.trial import Place

logger = logging.getLogger(__name__)

FORM = "kept storages by number, split backwards compared"
"""What such profiles hold; older files hold something else."""


class StoredProfile:
    """The stored profile of one stage's module, if there can be one.

    Args:
        options: what else times depend on: how it is measured.
    """

    def __init__(
        self,
        stage: GraphStage,
        own: GivenModule,
        place: Place,
        survey: Survey,
        *,
        counts: Sequence[int],
        cache_dir: str | None,
        options: dict[str, Any],
    ) -> None:
        self._stage = stage.name
        self._store = CostStore(cache_dir)
        self._key: dict[str, Any] | None = None
        try:
            description = describe_module(own.given)
        except (NotDescribed, OSError) as error:
            logger.info(
                "stage %s: its profile is not stored, but measured each time: nothing tells one such module from "
                "another, as %s",
                stage.name,
                error,
            )
            return
        shapes = survey.shapes
        inputs = {keyword: shapes.tensors[node] for keyword, node in stage.received}
        inputs |= {keyword: shapes.inputs[key] for keyword, key in stage.batch_inputs}
        self._key = {
            "stage": stage.name,
            "module": description,
            "inputs": {keyword: dataclasses.asdict(spec) for keyword, spec in inputs.items()},
            "outputs": [list(node) for node in stage.nodes],
            "losses": list(stage.losses),
            "sharded": [list(stage.spec.sharded_inputs), list(stage.spec.sharded_outputs)],
            "grid": [len(stage.spec.ranks), stage.spec.tensor],
            "counts": list(counts),
            "dtype": str(place.dtype),
            "device": describe_device(place.device, torch.get_num_threads()),
            "processor": processor_name(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "form": FORM,
            **options,
        }

    def find(self) -> Profile | None:
        """Return it, or None."""
        if self._key is None:
            return None
        found = self._store.find(self._key)
        if found is not None:
            logger.info("stage %s: using the profile stored in %s", self._stage, self._store.path(self._key))
        return found

    def put(self, profile: Profile) -> None:
        """Keep a profile."""
        if self._key is not None:
            self._store.put(self._key, profile)
