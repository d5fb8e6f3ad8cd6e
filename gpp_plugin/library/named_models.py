"""Blocks and analytic costs of a model that is planned without being trained: by name, by file, or as a module.

What `gpp plan` and `gpp_plugin.api` take: a model of the library (pure Python, a paper's dimensions), a HuggingFace
configuration (built on the meta device, no weights), or a module of the user's with a batch. Nothing is run: costs come
from operator counts and the speed of the cluster's first device. Training measures them instead (`profile.measure`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.tensors import TRAINING_DTYPES, TensorSpec, adam_bytes, element_bytes
from gpp_plugin.library.analytic_models import in_dtype, profile_model
from gpp_plugin.library.paper_graphs import MODELS, build_model
from gpp_plugin.plan.costs.long_context import LayerShape
from gpp_plugin.plan.costs.memory_formula import with_inputs
from gpp_plugin.plan.costs.planned_lengths import planned_profile

if TYPE_CHECKING:  # names and library models are planned without torch
    from torch import nn  # noqa: TID251 - for its type only

    from gpp_plugin.capture.captured_graph import CapturedGraph

CONFIG_DIR = Path(__file__).resolve().parents[1] / "models"
"""HuggingFace configurations that come with the package."""
UNIT_TOKENS = 4096
UNITS_A_DEVICE = 4


def config_names() -> list[str]:
    """Return the names of the HuggingFace configurations that come with the package."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def library_model(
    name: str, sizes: Mapping[str, int | str], device: Device, *, mini_batch: int, granularity: str | None
) -> tuple[BlockGraph, Profile]:
    """Return a library model and its costs on ``device``, trained in the type that its speed is in.

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
    profile = profile_model(model, device, largest=mini_batch, dtype=device.dtype)
    return model.graph if device.dtype == "fp32" else in_dtype(model.graph, device.dtype), profile


def config_path(name: str | Path) -> Path:
    """Return the HuggingFace configuration that ``name`` means: a file, its directory, or one of `config_names`.

    Raises:
        ConfigError: there is none; one line with the nearest name.
    """
    if os.path.exists(name):  # false, not an error, of what is too long for a name
        return Path(name)
    names = [*config_names(), *MODELS]
    if str(name) not in names:
        hint = nearest(str(name), names)
        raise ConfigError(
            f"model {str(name)!r}: no such file, configuration or library model{hint} (known: {', '.join(names)})"
        )
    return CONFIG_DIR / f"{name}.json"


def usual_loss_unit(path: Path, *, mini_batch: int, length: int, num_devices: int) -> int:
    """Return the samples of one loss that a HuggingFace model is planned with where nothing is said of it.

    A loss that compares samples (CLIP's) is of the whole mini-batch. Any other is a mean over what it is given, so that
    little of it at a time is as good: about `UNIT_TOKENS`, in units of which every device can have `UNITS_A_DEVICE`.

    Raises:
        ConfigError: the file is no configuration of a model that the installed transformers knows.
    """
    from gpp_plugin.integrations.huggingface.hf_models import compares_samples, read_hf_config

    if compares_samples(read_hf_config(path)):
        return mini_batch
    # 64 samples of 512 tokens on 4 devices: 8 samples are 4096 tokens, 4 leave 4 units for each device
    most = max(1, min(UNIT_TOKENS // length, mini_batch // (UNITS_A_DEVICE * num_devices)))
    return max(unit for unit in range(1, most + 1) if mini_batch % unit == 0)


def layer_shape(path: Path, *, length: int) -> LayerShape:
    """Return a layer of a HuggingFace configuration's text, for what is planned of it on paper.

    Raises:
        ConfigError: the file is no such configuration, or does not say how wide its attention is.
    """
    from gpp_plugin.integrations.huggingface.hf_models import read_hf_config

    config = read_hf_config(path).get_text_config(decoder=True)
    width, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    if not (isinstance(width, int) and isinstance(heads, int) and heads > 0):
        raise ConfigError(f"{path}: has no hidden_size and num_attention_heads; leave --on-paper out")
    head = getattr(config, "head_dim", None) or width // heads
    return LayerShape(
        length=length,
        width=width,
        query_width=heads * head,
        key_width=(getattr(config, "num_key_value_heads", None) or heads) * head,
        chosen_experts=getattr(config, "num_experts_per_tok", None) or 0,
    )


def huggingface_model(
    path: Path, *, loss_unit: int, lengths: Sequence[int], are_asked: bool = True
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a HuggingFace model on the meta device, and batches of one loss unit for it.

    Args:
        lengths: tokens of a text, of each batch, the longest last; a model may have places for fewer.
        are_asked: they are the user's, and refused where the model cannot be trained at the longest.

    Raises:
        ConfigError: the file is no configuration of a model that the installed transformers knows.
    """
    from gpp_plugin.integrations.huggingface.hf_models import (
        build_on_meta,
        make_example_batch,
        read_hf_config,
    )

    config = read_hf_config(path)
    try:
        model = build_on_meta(config)
        batches = [
            make_example_batch(
                model, num_samples=loss_unit, length=length, is_asked=are_asked and length == max(lengths)
            )
            for length in lengths
        ]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return model, batches


def captured_model(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    device: Device,
    *,
    mini_batch: int,
    granularity: str,
) -> tuple[BlockGraph, Profile]:
    """Return the blocks of a module and their costs on ``device``, trained in the type that its speed is in.

    Args:
        batches: loss units of what it is trained on: of the usual lengths, the mean of whose times is planned for, and
            last of the longest, whose bytes are. The blocks are those of the middle one of the usual lengths.

    Raises:
        CaptureError: the module cannot be captured.
    """
    import torch

    from gpp_plugin.capture.export import capture_model
    from gpp_plugin.capture.recapture import recapture
    from gpp_plugin.profile.analytic_costs import default_sample_counts

    # batches of the same lengths have one key
    keys = [tuple((k, tuple(getattr(v, "shape", ()))) for k, v in batch.items()) for batch in batches]
    *usual, longest = keys
    middle = (len(usual) - 1) // 2
    captured = capture_model(model, batches[middle], dtype=getattr(torch, TRAINING_DTYPES[device.dtype]))
    counts = default_sample_counts(mini_batch)
    known = {keys[middle]: _analytic(captured, device, counts, granularity)}
    for key, batch in zip(keys, batches, strict=True):
        if key not in known:
            again = recapture(model, captured.analysis, batch, granularity=granularity)
            known[key] = _analytic(again, device, counts, granularity)
    graph, inputs = known[keys[middle]].graph, known[longest].inputs
    profile = known[keys[middle]].profile
    if len(known) > 1:
        profile = planned_profile([known[key].profile for key in usual], _grown(known[longest], graph))
    return graph, with_inputs(
        profile, graph, inputs, mini_batch=mini_batch, dtype=TRAINING_DTYPES[device.dtype]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Analytic:
    """Blocks at some lengths, what they cost by the formulas, and the model's inputs there."""

    graph: BlockGraph
    profile: Profile
    inputs: tuple[TensorSpec, ...]


def _analytic(captured: CapturedGraph, device: Device, counts: Sequence[int], granularity: str) -> _Analytic:
    from gpp_plugin.capture.coarsen import coarsen
    from gpp_plugin.profile.analytic_costs import analytic_profile

    graph = coarsen(captured, granularity=granularity)
    profile = analytic_profile(
        graph,
        device,
        sample_counts=counts,
        optimizer_bytes_per_parameter=adam_bytes(device.dtype),
        element_bytes=element_bytes(device.dtype),
        op_graph=captured.op_graph,
    )
    return _Analytic(graph=graph, profile=profile, inputs=captured.op_graph.inputs)


def _grown(longest: _Analytic, graph: BlockGraph) -> Profile:
    """Return the longest texts' profile as one of the blocks of others: it knows how much larger tensors are."""

    def tensor_bytes(of: BlockGraph) -> dict[str, int]:
        crossing = {name: spec.bytes_for(of.num_samples) for name, spec in of.tensors.items()}
        return {**crossing, **{tensor.name: tensor.bytes for tensor in of.saved}}

    here, there = tensor_bytes(graph), tensor_bytes(longest.graph)
    growth = {
        name: there[name] / size for name, size in here.items() if size and there.get(name, size) != size
    }
    return dataclasses.replace(longest.profile, graph=graph.fingerprint, growth=growth)
