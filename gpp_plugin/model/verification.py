"""Before training: is each capture its module? On as many samples, and as many layers, as time and memory allow.

A captured part is compared with its module on its first rank (`compare_capture`), in at most a fifth of the time that
start-up has taken with it. Where the sample batch is too much for that, or for the rank's memory, fewer samples are
taken, then two layers of each list of repeated layers; both are traced anew for it. What could not be compared is said,
and why.

Source: this project
Tests: tests/stage_graph/test_verification.py, tests/stage_graph/test_packed_rows.py
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import refuse_lost_device
from gpp_plugin.capture.tracing.carried_state import begins_empty
from gpp_plugin.capture.tracing.outside import hidden_process_group
from gpp_plugin.capture.tracing.torch_export import Call
from gpp_plugin.errors import CaptureError, first_line
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.model.compare_capture import (
    HALF,
    Comparison,
    Difference,
    compare_capture,
    copy_model,
    in_float32,
)
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.module_trial import Place, stage_arguments
from gpp_plugin.model.graph.probe import Survey
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.random_streams import restored_streams

# Does a model separate samples that lie in one row? Found out by running the last of them alone.
#
# Samples are distinguished by ``position_ids`` that restart (`gpp_plugin.data.flatten`). A model that ignores them
# simply attends from each sample to those before it, without a word: the loss falls, and is that of another model.
#
#     row      a b c d e     positions 0 1 2 0 1
#     alone          d e     positions       0 1        the same outputs for d and e, if the model takes such rows

POSITIONS, MASK, LABELS, LOGITS, LOSS = "position_ids", "attention_mask", "labels", "logits", "loss"
LARGEST_ERROR = 1e-4
"""Of outputs by their norm: above rounding of other lengths, and far below what attending to others changes."""

_MASKED = 1e18
"""Logits of at least this size are masked ones, -inf or the least number of a type: their squares have no sum."""


def last_sample(arguments: Mapping[str, Any]) -> int | None:
    """Return where the last sample of the first row begins; None where rows are not known to hold several samples."""
    positions = arguments.get(POSITIONS)
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.is_floating_point():
        return None
    if arguments.get(MASK) is not None:  # positions beside a mask are those of padded rows
        return None
    begins = (positions[0].diff() < 0).nonzero().flatten()
    return int(begins[-1]) + 1 if len(begins) else None


def mixes_packed_rows(module: nn.Module, arguments: Mapping[str, Any], *, call: Call) -> float | None:
    """Return by how much a sample's outputs differ between a row of several samples and a row of its own.

    None where rows hold one sample each, or nothing can be compared.

    Args:
        module: that may be run without harm (`copy_model`).
        call: how it is called.
    """
    begin = last_sample(arguments)
    if begin is None:
        return None
    length = arguments[POSITIONS].shape[1]
    row = {key: _first_row(value, begin=0, length=length) for key, value in arguments.items()}
    if isinstance(row.get(LABELS), Tensor):  # of the last sample alone, so that losses are of the same tokens
        row[LABELS][:, : begin + 1] = -100
    alone = {key: _first_row(value, begin=begin, length=length) for key, value in row.items()}
    was_training = module.training
    module.eval()  # no dropout
    try:
        with torch.no_grad(), hidden_process_group(), restored_streams(arguments[POSITIONS].device):
            packed, single = (_compared(call(module, inputs)) for inputs in (row, alone))
    finally:
        module.train(was_training)
    if packed is None or single is None:
        return None
    if packed.ndim > 1 and packed.shape[1] == length:
        packed = packed[:, begin:]
    if packed.shape != single.shape:
        return None
    is_number = single.abs() < _MASKED
    if not torch.equal(packed.abs() < _MASKED, is_number):
        return math.inf
    packed, single = packed[is_number], single[is_number]
    return float((packed - single).norm() / single.norm().clamp_min(1e-30))


def _first_row(value: Any, *, begin: int, length: int) -> Any:
    """Return the tokens from ``begin`` on of the first row, of what has a value a token; all else as it is."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
        return value
    return value[:1, begin:].detach().clone()


def _compared(returned: Any) -> Tensor | None:
    """Return the logits of what a model returned, or its loss."""
    for name in (LOGITS, LOSS):
        value = returned.get(name) if isinstance(returned, Mapping) else getattr(returned, name, None)
        if isinstance(value, Tensor):
            return value.float()
    return None


SHARE = 0.25
"""Of the time before it: a fifth of the time with it."""
LEAST_S = 1.0
"""It may take this long in any case: a process that imports torch and DeepSpeed has taken five times as long."""
RUNS = 3.0
"""Forwards and backwards that a comparison takes, with the copies around them: graph and module, and some more."""
SECONDS_A_NUMBER = 1e-8
"""To draw one weight."""
LAYERS_COMPARED = 2
"""Layers of each list that are compared where all of them are too many: the second one follows another layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """What of start-up has passed on this rank.

    Args:
        began: when, by `time.monotonic`.
        tracing_s: how long all captures took.
        num_samples: samples of the captures.
    """

    began: float
    tracing_s: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """What may be compared: so many samples, of all layers or of a few.

    Args:
        share: of the model's operators, by which time and memory are estimated.
    """

    num_samples: int
    is_whole: bool
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.num_samples} samples" + (
            "" if self.is_whole else f", {LAYERS_COMPARED} layers of each list"
        )


def verify_part(
    part: CapturedPart,
    place: Place,
    batch: Batch,
    survey: Survey,
    costs: Sequence[BlockCost],
    start_up: StartUp,
) -> tuple[bool, str]:
    """Compare a part's capture with its module on this rank; return whether that was possible, and what to log.

    Raises:
        CaptureError: the capture is not the module; names what differs first, the two values, and how to continue.
    """
    # Three sizes at most are looked at, in this order; of a part at 64 samples with 32 layers:
    #
    #   64 samples, the capture that was planned with     no tracing
    #   16, 4 or 2 samples, all layers                    the first that time allows; one trace
    #    2 samples, 2 layers of each list                 one small capture
    analysis = survey.analyses[part.stage.name]
    unit = analysis.op_graph.num_samples
    allowed = max(SHARE * (time.monotonic() - start_up.began), LEAST_S)
    free = _free_bytes(place.device)
    reasons: list[str] = []
    is_on_meta = any(p.is_meta for p in part.model.parameters())
    for size in _sizes(unit, part, analysis.layer_lists):
        seconds, needed = _seconds(size, part, costs, start_up), _bytes(size, part, costs)
        if seconds > allowed or needed > free:
            reasons.append(
                f"{size}: {seconds:.1f} s of {allowed:.1f} s allowed, {needed / 1e9:.2f} GB of {free / 1e9:.2f} free"
            )
            continue
        began = time.monotonic()
        try:
            found = _compare_at(size, part, place, batch, survey)
        except Exception as error:  # of the module outside a trace: its graph may train all the same
            refuse_lost_device(error)
            reasons.append(f"{size}: {type(error).__name__}: {first_line(error)}")
            allowed -= time.monotonic() - began
            continue
        finally:
            if place.device.type == "cuda":
                torch.cuda.empty_cache()  # what training then finds is as if nothing had been compared
        if found.differences:
            raise CaptureError(_refusal(part, found, size))
        _check_packed_rows(part, place, batch, survey, size)
        now = time.monotonic()
        return True, (
            f"verified: the capture's results and {found.num_gradients} gradients are those of "
            f"{type(part.model).__name__} (off by {found.loss_error:.1e} and {found.gradient_error:.1e} at most; {size}"
            f"{', on made-up weights' if is_on_meta else ''}), {now - began:.2f} s of {now - start_up.began:.2f} s"
        )
    empty = [state.name for state in analysis.carried if begins_empty(part.model, state)]
    if empty:
        raise CaptureError(
            f"{type(part.model).__name__} holds nothing in {empty[0]} before its first forward, and whether zeros are "
            f"the same could not be tried ({'; '.join(reasons)}); let it begin with a tensor or a number"
        )
    return (
        False,
        f"not verified: {type(part.model).__name__} was not compared with its capture ({'; '.join(reasons)}); of what "
        "its forward leaves behind attributes and gradient flags were looked at, and no values",
    )


def _sizes(unit: int, part: CapturedPart, layer_lists: Sequence[str]) -> list[_Size]:
    """Return what may be compared, the most first."""
    fewer = [n for n in (unit // 4, unit // 16, 2) if 2 <= n < unit]
    sizes = [_Size(num_samples=n, is_whole=True) for n in dict.fromkeys((unit, *fewer))]
    removed = sum(p.numel() for path in _removed(part.model, layer_lists) for p in path.parameters())
    if removed:
        total = sum(p.numel() for p in part.model.parameters())
        sizes.append(_Size(num_samples=min(unit, 2), is_whole=False, share=1.0 - removed / total))
    return sizes


def _removed(model: nn.Module, layer_lists: Sequence[str]) -> list[nn.Module]:
    """Return the repeated layers that are left out of a small comparison."""
    lists = [model.get_submodule(path) for path in _outer(layer_lists)]
    return [layer for layers in lists for layer in list(layers.children())[LAYERS_COMPARED:]]


def _outer(layer_lists: Sequence[str]) -> list[str]:
    """Return the lists that are in no other one: a T5 layer is a list of different parts, and stays whole."""
    return [path for path in layer_lists if not any(path.startswith(f"{other}.") for other in layer_lists)]


def _seconds(size: _Size, part: CapturedPart, costs: Sequence[BlockCost], start_up: StartUp) -> float:
    """Return what a comparison will take: runs, random weights for a model on meta, and tracing where it is anew."""
    n = size.num_samples
    is_known = size.is_whole and n == start_up.num_samples
    one = sum(cost.forward_us_for(n) + cost.backward_us_for(n) for cost in costs) / 1e6
    drawn = sum(p.numel() for p in part.model.parameters() if p.is_meta)
    # a capture is three traces and what is found out about them; one of few layers is a capture of its own
    tracing = 0.0 if is_known else start_up.tracing_s * (0.5 if size.is_whole else 1.0)
    return size.share * (RUNS * one + SECONDS_A_NUMBER * drawn + tracing)


def _bytes(size: _Size, part: CapturedPart, costs: Sequence[BlockCost]) -> float:
    """Return what a comparison holds at its peak: new copies of weights, two sets of gradients, what backwards keep."""
    parameters = list(part.model.parameters())
    copied = sum(4 * p.numel() for p in parameters if p.is_meta or p.dtype in HALF)
    gradients = sum(2 * 4 * p.numel() for p in parameters if p.requires_grad)
    saved = sum(c.saved_bytes_per_sample * size.num_samples + c.saved_bytes_fixed for c in costs)
    return size.share * (copied + gradients + 2 * saved)


def _free_bytes(device: torch.device) -> float:
    """Return what may be taken now: half of what a host has free, which others may request too; most of a GPU's."""
    if device.type == "cuda":
        return 0.9 * float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            known = dict(line.split(":", 1) for line in lines)
        return 0.5 * 1024 * float(known["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # no Linux: it is unknown
        return float("inf")


def _compare_at(size: _Size, part: CapturedPart, place: Place, batch: Batch, survey: Survey) -> Comparison:
    """Return a comparison at one size."""
    analysis = survey.analyses[part.stage.name]
    used = part if size.is_whole else _with_few_layers(part, place, analysis.layer_lists)
    shapes = survey.shapes.tensors
    traced = used.arguments(batch, shapes, size.num_samples)
    captured = (
        used.capture_again(analysis, traced) if size.is_whole else used.capture(traced, is_training=True)
    )
    arguments = _arguments(used, place, batch, survey, size.num_samples)
    clone = copy_model(used.model, device=place.device, dtype=_comparing_dtype(place.dtype))

    def compare(graph: CapturedGraph) -> Comparison:
        return compare_capture(graph, clone, arguments, call=used.call)

    found = compare(in_float32(captured))
    if not found.differences or place.dtype not in HALF:
        return found
    # A model may have constants that are rounded to half precision while it is traced, and that it reads in full in
    # float32: traced in float32 it is held against itself alone.
    wide = _like(used, place, used.model)
    return compare(wide.capture(wide.arguments(batch, shapes, size.num_samples), is_training=True))


def _check_packed_rows(part: CapturedPart, place: Place, batch: Batch, survey: Survey, size: _Size) -> None:
    """Refuse a module that mixes samples which lie in one row.

    Raises:
        CaptureError: it does.
    """
    if not part.stage.is_alone or last_sample(batch) is None:
        return
    used = part
    if not size.is_whole:
        used = _with_few_layers(part, place, survey.analyses[part.stage.name].layer_lists)
    clone = copy_model(used.model, device=place.device, dtype=_comparing_dtype(place.dtype))
    error = mixes_packed_rows(clone, _arguments(used, place, batch, survey, size.num_samples), call=used.call)
    if error is not None and not error <= LARGEST_ERROR:
        raise CaptureError(
            f"{type(part.model).__name__} mixes samples that lie in one row: the last one of the sample has other "
            f"outputs alone (off by {error:.1e}), so it makes nothing of position_ids that begin anew; pad samples, or "
            'give an attention_mask; "graph_pipeline": {"verify": false} trains it all the same'
        )


def _arguments(
    part: CapturedPart, place: Place, batch: Batch, survey: Survey, num_samples: int
) -> dict[str, Any]:
    """Return what is traced, with values: rows of the batch, constants, random numbers for what other stages make."""
    arguments = part.arguments(batch, survey.shapes.tensors, num_samples)
    wide = dataclasses.replace(place, dtype=_comparing_dtype(place.dtype))
    rows = part.as_traced(
        stage_arguments(
            part.stage, batch, num_samples, wide, tensors=survey.shapes.tensors, values=survey.values,
            largest=num_samples,
        )
    )  # fmt: skip
    constants = {key: value for key, value in arguments.items() if not isinstance(value, Tensor)}
    found = {}
    for name, value in rows.items():
        is_half = value.dtype in HALF
        found[name] = value.detach().float().requires_grad_(value.requires_grad) if is_half else value
    return {**found, **constants}


def _comparing_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _with_few_layers(part: CapturedPart, place: Place, layer_lists: Sequence[str]) -> CapturedPart:
    """Return the part of a module with the first layers of each list only, the same tensors as the user's."""
    memo: dict[int, Any] = {id(t): t for t in (*part.model.parameters(), *part.model.buffers())}
    model = copy.deepcopy(part.model, memo)
    for path in _outer(layer_lists):
        layers = model.get_submodule(path)
        names = list(layers._modules)
        for name in names[LAYERS_COMPARED:]:
            del layers._modules[name]
        # HuggingFace counts layers from the end by its configuration (LLaVA reads the last but one of its tower)
        owners = [model.get_submodule(path[:end]) for end in range(len(path)) if end == 0 or path[end] == "."]
        for owner in reversed(owners):
            config: Any = getattr(owner, "config", None)
            if getattr(config, "num_hidden_layers", None) == len(names):
                config.num_hidden_layers = min(len(names), LAYERS_COMPARED)
                break
    return _like(part, place, model)


def _like(part: CapturedPart, place: Place, model: nn.Module) -> CapturedPart:
    """Return a part that is called as this one and computes in what comparisons compute in."""
    return CapturedPart(
        dataclasses.replace(part.stage, spec=dataclasses.replace(part.stage.spec, make=model)),
        dtype=_comparing_dtype(place.dtype),
        device=place.device,
        granularity=part.granularity,
        called={},
    )


def _refusal(part: CapturedPart, found: Comparison, size: _Size) -> str:
    first, number = found.differences[0], len(found.differences)
    look = (
        "let it begin with a tensor or number in place of None, keep a registered buffer (a module in a list as "
        "nn.ModuleList), or write it in every forward"
        if first.what.startswith("state ")
        else "look there for a custom autograd.Function, values read in Python, or code that checks if it is traced"
    )
    where = "" if part.stage.is_alone else f"stage {part.stage.name!r}: "
    gradient = next((d for d in found.differences if "gradient" in d.what), first)
    also = f", {_described(gradient)}" if gradient is not first else ""
    return (
        f"{where}the capture of {type(part.model).__name__} is not the model: {_described(first)}{also} ({number} of "
        f"its loss, gradients and buffers differ on {size}, in float32 without dropout); {look}; "
        '"graph_pipeline": {"verify": false} trains it all the same'
    )


def _described(difference: Difference) -> str:
    if math.isnan(difference.graph) and math.isnan(difference.module):
        return f"each forward leaves another {difference.what} for the next one, which the graph does not"
    graph, module = (
        "absent" if math.isnan(value) else f"{value:.9g}" for value in (difference.graph, difference.module)
    )
    return f"{difference.what} is {graph} in the graph and {module} in the module (off by {difference.error:.1e})"
