"""Blocks and analytic costs of a model that is planned without being trained: by name, by file, or as a module.

What `gpp plan` and `gpp_plugin.api` take: a model of the library (pure Python, a paper's dimensions), a HuggingFace
configuration (built on the meta device, no weights), or a module of the user's with a batch. Nothing is run: costs come
from operator counts and the speed of the cluster's first device. Training measures them instead (`profile.measure`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.profile import Profile
from gpp_plugin.library.analytic_models import profile_model
from gpp_plugin.library.paper_graphs import MODELS, build_model
from gpp_plugin.plan.costs.memory_breakdown import with_inputs

if TYPE_CHECKING:  # names and library models are planned without torch
    from torch import nn  # noqa: TID251 - for its type only

CONFIG_DIR = Path(__file__).resolve().parents[1] / "models"
"""HuggingFace configurations that come with the package."""


def config_names() -> list[str]:
    """Return the names of the HuggingFace configurations that come with the package."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def library_model(
    name: str, sizes: Mapping[str, int | str], device: Device, *, mini_batch: int, granularity: str | None
) -> tuple[BlockGraph, Profile]:
    """Return a library model and its costs on ``device``.

    Args:
        sizes: dimensions that differ from the paper's.
        granularity: ``sub_layer`` where the model has such blocks; ``layer`` and None leave the model's own.

    Raises:
        PlanError: the model has no such size.
    """
    changed = dict(sizes)
    if granularity not in (None, "layer"):
        changed.setdefault("granularity", granularity)
    model = build_model(name, **changed)
    return model.graph, profile_model(model, device, largest=mini_batch)


def config_path(name: str | Path) -> Path:
    """Return the HuggingFace configuration that ``name`` means: a file, its directory, or one of `config_names`.

    Raises:
        ConfigError: there is none; one line with the nearest name.
    """
    if Path(name).exists():
        return Path(name)
    names = [*config_names(), *MODELS]
    if str(name) not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"model {str(name)!r}: no such file, configuration or library model{hint} (known: {', '.join(names)})"
        )
    return CONFIG_DIR / f"{name}.json"


def huggingface_model(path: Path, *, loss_unit: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a HuggingFace model on the meta device, and a batch of one loss unit for it.

    Args:
        length: tokens of a text.

    Raises:
        ConfigError: the file is no configuration of a model that the installed transformers knows.
    """
    from gpp_plugin.integrations.huggingface.hf_models import (
        build_on_meta,
        make_example_batch,
        read_hf_config,
    )

    model = build_on_meta(read_hf_config(path))
    return model, make_example_batch(model, num_samples=loss_unit, length=length)


def captured_model(
    model: nn.Module, batch: Mapping[str, Any], device: Device, *, mini_batch: int, granularity: str
) -> tuple[BlockGraph, Profile]:
    """Return the blocks of a module and their costs on ``device``.

    Args:
        batch: one loss unit of what it is trained on.

    Raises:
        CaptureError: the module cannot be captured.
    """
    from gpp_plugin.capture.coarsen import coarsen
    from gpp_plugin.capture.export import capture_model
    from gpp_plugin.profile.analytic_costs import analytic_profile, default_sample_counts

    captured = capture_model(model, batch)
    graph = coarsen(captured, granularity=granularity)
    profile = analytic_profile(
        graph, device, sample_counts=default_sample_counts(mini_batch), op_graph=captured.op_graph
    )
    inputs = captured.op_graph.inputs
    return graph, with_inputs(profile, graph, inputs, mini_batch=mini_batch, dtype="float32")
