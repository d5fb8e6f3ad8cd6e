"""What the blocks of a captured part cost, a plain model's or one part's of a stage graph: profiled where they are not
stored; other numbers of samples are traced only then.

Source: this project
Tests: tests/integrations/test_preparation.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.tracing.sample_batches import resize_batch
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.profile import Profile
from gpp_plugin.model.graph.captured_part import CapturedPart, PartView
from gpp_plugin.model.graph.module_trial import Place, stage_arguments
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.profile.measure import BLOCK_REPEATS, NODE_REPEATS, profile_blocks
from gpp_plugin.report.progress import Step, step
from gpp_plugin.runtime.batches import Batch

logger = logging.getLogger(__name__)


class _Captures:
    """A part at the numbers of samples to profile; traced when a profile that is not stored asks for one.

    A model may not allow the smallest ones (BatchNorm trains on no single sample): `impossible` has them then.
    """

    def __init__(self, part: CapturedPart, batch: Batch, survey: Survey, counts: Sequence[int]) -> None:
        self._part = part
        self._batch = batch
        self._shapes = survey.shapes.tensors
        self._analysis: Analysis = survey.analyses[part.stage.name]
        self._captures: dict[int, CapturedGraph] = {}
        self.counts = counts
        self.impossible: list[int] = []
        self.base = self._at(self._analysis.op_graph.num_samples)

    def at(self, count: int) -> CapturedGraph:
        """Return the part at ``count`` samples; all are traced before the first is timed.

        Raises:
            CaptureError: some are not possible.
        """
        for wanted in [n for n in self.counts if n not in self._captures]:
            try:
                self._at(wanted)
            except CaptureError as error:
                logger.info("%d samples at a time are not possible: %s", wanted, error)
                self.impossible.append(wanted)
        if self.impossible:
            raise CaptureError(f"{self.impossible} samples at a time are not possible")
        return self._captures[count]

    def _at(self, count: int) -> CapturedGraph:
        arguments = self._part.arguments(self._batch, self._shapes, count)
        self._captures[count] = self._part.capture_again(self._analysis, arguments)
        return self._captures[count]


def profile_part(
    part: CapturedPart,
    place: Place,
    batch: Batch,
    survey: Survey,
    *,
    counts: Sequence[int],
    optimizer_bytes: float,
    cache_dir: str | None,
    with_split: bool,
) -> Profile:
    """Return the costs of a part's blocks, under the whole graph's names of them.

    Numbers of samples that the module cannot do are left out: the planner gives no rank fewer samples than the
    smallest that works. With counts 1, 2 and 8, and BatchNorm, which trains on no single sample, the first attempt
    fails before anything is timed and the second has 2 and 8.

    Args:
        counts: numbers of samples to time it at, increasing.
        optimizer_bytes, cache_dir, with_split: as of `Measuring`.

    Raises:
        CaptureError: the module cannot be captured where it must be.
        ProfileError: a block cannot be run.
    """
    # the capture at one loss unit is there already; the others are made by `captures.at`, which `profile_blocks` calls
    # only when its store has no profile under this key: a second start exports nothing here
    captures = _Captures(part, batch, survey, counts)
    module, graph = part.model, part.local_graph(captures.base)
    state: dict[str, Any] = dict(module.named_parameters()) | dict(module.named_buffers())

    def profile_at(counts: Sequence[int]) -> Profile:
        with step("profile blocks") as tell:
            return profile_blocks(
                captures.base,
                graph,
                model_state=state,
                batch=_rows(part, place, batch, survey, max(counts)),
                capture_at=captures.at,
                sample_counts=counts,
                threads=torch.get_num_threads(),
                repeats=NODE_REPEATS if part.granularity == "node" else BLOCK_REPEATS,
                optimizer_bytes_per_parameter=optimizer_bytes,
                cache_dir=cache_dir,
                with_split=with_split,
                progress=lambda done, total, name: _tell_progress(tell, done, total, name),
            )

    try:
        profile = profile_at(counts)
    except CaptureError:
        # nothing was timed yet: all counts are captured before the first block runs
        if not captures.impossible:
            raise
        captures.counts = [n for n in counts if n not in captures.impossible]
        captures.impossible = []
        profile = profile_at(captures.counts)
    return profile if part.stage.is_alone else _renamed(profile, part.view(captures.base))


def _rows(part: CapturedPart, place: Place, batch: Batch, survey: Survey, count: int) -> dict[str, Any]:
    """Return what the part is profiled on: real rows of the batch, and random ones of what other stages make."""
    stage = part.stage
    # a plain model, or a part that reads the batch alone: its own rows, so that ids and masks are what they will be
    if not stage.received:
        return resize_batch(batch, count)
    rows = stage_arguments(
        stage, batch, count, place, tensors=survey.shapes.tensors, values=survey.values, largest=count
    )
    return part.as_traced({name: tensor.detach() for name, tensor in rows.items()})


def _renamed(profile: Profile, view: PartView) -> Profile:
    """Return a profile of a capture's own blocks with the whole graph's names of them."""
    called = {local: name for name, local in view.local_blocks.items()}

    def renamed(blocks: Sequence[str]) -> tuple[str, ...]:
        return tuple(called[block] for block in blocks)

    return dataclasses.replace(
        profile,
        costs=tuple(dataclasses.replace(cost, block=called[cost.block]) for cost in profile.costs),
        shared=tuple(dataclasses.replace(s, blocks=renamed(s.blocks)) for s in profile.shared),
        tied=tuple(dataclasses.replace(t, blocks=renamed(t.blocks)) for t in profile.tied),
    )


def _tell_progress(tell: Step, done: int, total: int, name: str) -> None:
    tell.update(done, total)
    logger.info("profiling: %d of %d blocks, %s", done, total, name)
