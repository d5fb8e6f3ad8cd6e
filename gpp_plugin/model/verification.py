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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import NotedWrites, refuse_lost_device, undone_writes
from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.carried_state import (
    attribute_of,
    begins_empty,
    changed_attributes,
    held_by,
    initial_values,
)
from gpp_plugin.capture.tracing.clean import copied
from gpp_plugin.capture.tracing.meta_copy import set_modes
from gpp_plugin.capture.tracing.outside import hidden_process_group, noted_accesses, watched_generators
from gpp_plugin.capture.tracing.torch_export import Call, loss_and_outputs, split_batch
from gpp_plugin.errors import CaptureError, first_line
from gpp_plugin.ir.block_graph import CARRIED, is_carried
from gpp_plugin.ir.profile import BlockCost
from gpp_plugin.launch import free_memory_bytes
from gpp_plugin.model.graph.captured_part import CapturedPart
from gpp_plugin.model.graph.module_trial import (
    HALF,
    Place,
    SameDraws,
    copy_model,
    random_values,
    stage_arguments,
)
from gpp_plugin.model.graph.probe import LARGEST_ERROR, Survey, last_sample, mixes_packed_rows
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.random_streams import restored_streams
from gpp_plugin.runtime.stage_module import build_stage_function

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
    lists = [part.model.get_submodule(path) for path in _outer(layer_lists)]
    left_out = [layer for layers in lists for layer in list(layers.children())[LAYERS_COMPARED:]]
    removed = sum(p.numel() for layer in left_out for p in layer.parameters())
    if removed:
        total = sum(p.numel() for p in part.model.parameters())
        sizes.append(_Size(num_samples=min(unit, 2), is_whole=False, share=1.0 - removed / total))
    return sizes


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
    return 0.5 * free_memory_bytes()


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


# A captured graph against the module it was made of: the loss, outputs, every gradient and what the forward writes.
#
# Both run once on the same weights and rows, in float32. Dropout is off in both: what it draws is replaced by its mean,
# and any other operator that draws begins at the same place in both, so that the order of draws does not matter.

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 2e-6
"""Relative errors of a loss, and of a gradient or an output by the norm of the tensor."""
LEAST_SCALE = 1e-3
"""Share of the largest gradient's norm below which a gradient counts as rounding: a key's bias has one of zero."""

aten = torch.ops.aten
_LOSS, _STATE = "loss", "state "


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is not the same in graph and module.

    Args:
        what: "loss", "output logits[3, 0]", "gradient of head.weight[1, 5]", "norm of the gradient of head.weight".
        graph, module: the two values there, nan where there is none.
        error: relative.
    """

    what: str
    graph: float
    module: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a graph is from its module.

    Args:
        num_gradients: that were compared.
        errors: of the loss, each output, gradient and buffer, by what it is.
        differences: beyond tolerance; the loss and outputs first, then gradients in the order of the module.
    """

    num_gradients: int
    errors: Mapping[str, float]
    differences: tuple[Difference, ...]

    @property
    def loss_error(self) -> float:
        """Return the relative error of the loss; 0 where there is none."""
        return self.errors.get(_LOSS, 0.0)

    @property
    def gradient_error(self) -> float:
        """Return the largest error of all else."""
        return max((error for what, error in self.errors.items() if what != _LOSS), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What one forward and backward gave; no gradient where the backward did not come by.

    Args:
        left: what the forward left behind: all buffers, parameters that it wrote, what attributes carry.
        changed: attributes that it read before it wrote them, and left otherwise, which the graph does not carry.
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    left: dict[str, Tensor]
    changed: tuple[str, ...] = ()


def in_float32(captured: CapturedGraph) -> CapturedGraph:
    """Return a capture in half precision whose operators name float32 where they named its type."""
    half = getattr(torch, captured.analysis.dtype or "float32")
    if half not in HALF:
        return captured
    graph = copied(captured.graph.nodes)

    def widened(argument: Any) -> Any:
        return torch.float32 if argument is half else argument

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, widened)
        node.kwargs = fx.node.map_aggregate(node.kwargs, widened)
    constants = {
        name: value.float() if value.dtype is half else value for name, value in captured.constants.items()
    }
    return dataclasses.replace(captured, graph=graph, constants=constants)


def compare_capture(
    captured: CapturedGraph, clone: nn.Module, arguments: Mapping[str, Any], *, call: Call
) -> Comparison:
    """Run a capture and the module it was made of, and compare.

    Args:
        captured: in float32 or wider.
        clone: as of `copy_model`; it stays as it is, and so do the parameters that it shares with the user's module.
        arguments: what was traced, with values, on the clone's device: tensors that take a gradient are other stages'.
        call: how the module is called with them.
    """
    has_draws = any(node.is_random for node in captured.op_graph.nodes)

    @contextmanager
    def alike() -> Iterator[None]:
        with ExitStack() as around:
            around.enter_context(hidden_process_group())
            around.enter_context(watched_generators(clone))
            around.enter_context(restored_streams(captured.device))
            if has_draws:
                around.enter_context(SameDraws(captured.device))
            yield

    state = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
    carried = [p for p in captured.op_graph.parameters if is_carried(p.name)]
    state |= {name: value.to(captured.device) for name, value in initial_values(clone, carried).items()}

    def run(rows: Mapping[str, Any], module: nn.Module | None = None) -> _Outcome:
        """Run the graph, or a copy of the module."""
        with alike(), undone_writes(dict(clone.named_parameters())) as writes, torch.enable_grad():
            if module is None:
                return _run_graph(captured, clone, rows, state, writes)
            return _run_module(captured, module, rows, call, writes)

    own = copy_model(clone, device=captured.device)
    graph, module = run(arguments), run(arguments, own)
    found = _compare(graph, module, {})
    if module.changed or any(each.structure and each.tensors for each in captured.analysis.carried):
        # What is saved for the next forward shows in the next one, on other values. What the graph does not carry is
        # a cache where that forward leaves it alone.
        rows = _other_rows(arguments)
        graph, module = run(rows), run(rows, own)
        second = [
            dataclasses.replace(difference, what=f"{difference.what} of a second forward")
            for difference in _compare(graph, module, {}).differences
        ]
        second += [
            Difference(what=f"{_STATE}{name}", graph=math.nan, module=math.nan, error=math.inf)
            for name in module.changed
        ]
        differences = [*found.differences, *second]
        differences.sort(key=lambda difference: not difference.what.startswith(_STATE))
        return dataclasses.replace(found, differences=tuple(differences))
    if not found.differences:
        return found
    # Sums on a GPU come in any order, and a model may be far from well conditioned: what the module is off from itself
    # when it runs again is no difference of the graph.
    again = run(arguments, copy_model(clone, device=captured.device))
    return _compare(graph, module, _compare(again, module, {}).errors)


def _run_graph(
    captured: CapturedGraph,
    clone: nn.Module,
    arguments: Mapping[str, Any],
    state: dict[str, Tensor],
    writes: NotedWrites,
) -> _Outcome:
    """Run all of the graph as the code of one stage: that is what generates code in training."""
    op_graph = captured.op_graph
    names = {} if op_graph.loss is None else {_LOSS: op_graph.loss}
    names |= {f"output {name}": node for name, node in op_graph.outputs.items()}
    function = build_stage_function(captured, [n.name for n in op_graph.nodes], list(names.values()))
    if function.choice is not None:
        function.choice.use(inputs_of_ones(arguments))
    own = {**dict(clone.named_parameters()), **state}
    leaves = {name: _leaf(own[name]) for name in function.tensors}
    leaves_of = {key: _leaf(arguments[key]) for key in (*function.batch_inputs, *function.received)}
    with writes:
        results = function.call(
            *leaves.values(), *(leaves_of[key] for key in (*function.batch_inputs, *function.received))
        )
    state.update({name: leaf.detach() for name, leaf in leaves.items() if name in state})
    left = {name: value.clone() for name, value in state.items()} | writes.values()
    trained = {
        name: leaves.get(name) for name, parameter in clone.named_parameters() if parameter.requires_grad
    }
    received = {key: leaves_of.get(key) for key in op_graph.received if arguments[key].requires_grad}
    return _outcome(dict(zip(names, results, strict=True)), trained | received, left)


def _run_module(
    captured: CapturedGraph,
    clone: nn.Module,
    arguments: Mapping[str, Any],
    call: Call,
    writes: NotedWrites,
) -> _Outcome:
    op_graph = captured.op_graph
    keys, constants = split_batch(arguments)
    set_modes(clone, training=captured.is_training)
    leaves_of = {key: _leaf(arguments[key]) for key in keys}
    for parameter in clone.parameters():
        parameter.grad = None
    flags = {name: p.requires_grad for name, p in clone.named_parameters()}
    at = {name: p.data for name, p in clone.named_parameters()}
    before = held_by(clone, keep=_cloned)
    with writes:
        with noted_accesses(clone) as first:
            result = call(clone, {**leaves_of, **constants})
        has_loss, results = loss_and_outputs(
            result, type(clone).__name__, tuple(op_graph.outputs), leaves_of, needs_loss=False
        )
    after = held_by(clone, keep=_cloned)
    carried = {state.name: state for state in captured.analysis.carried if state.structure and state.tensors}
    changed = dict.fromkeys(n for n, p in clone.named_parameters() if p.requires_grad != flags.get(n))
    for name in changed_attributes(before, after, by_value=True):
        module, path, leaf = attribute_of(clone, name)
        attribute = f"{path}.{leaf}" if path else leaf
        if attribute not in carried and first.get((id(vars(module)), leaf), True):
            changed[attribute] = None
    names = [_LOSS] if has_loss else []
    names += [f"output {name}" for name in op_graph.outputs]
    trained: dict[str, Tensor | None] = {n: p for n, p in clone.named_parameters() if p.requires_grad}
    received: dict[str, Tensor | None] = {
        key: leaves_of[key] for key in op_graph.received if leaves_of[key].requires_grad
    }
    left = {name: _cloned(buffer) for name, buffer in clone.named_buffers()} | writes.values()
    for name, parameter in clone.named_parameters():
        if name in at and parameter.data_ptr() != at[name].data_ptr():  # ``self.weight.data = ...``
            left[name] = _cloned(parameter)
            parameter.data = at[name]
    for state in carried.values():
        path, _, leaf = state.name.rpartition(".")
        leaves = pytree.tree_leaves(vars(clone.get_submodule(path)).get(leaf))
        for tensor, value in zip(state.tensors, leaves, strict=False):
            dtype = getattr(torch, tensor.dtype)
            left[tensor.name] = torch.as_tensor(value, dtype=dtype, device=captured.device).detach().clone()
    versions = {name: buffer._version for name, buffer in clone.named_buffers()}
    found = _outcome(dict(zip(names, results, strict=True)), trained | received, left)
    # a hook, or a custom function, that writes when the backward comes: in a pipeline another forward may come before
    changed.update(dict.fromkeys(n for n, b in clone.named_buffers() if b._version != versions.get(n)))
    return dataclasses.replace(found, changed=tuple(changed))


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _other_rows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the same shapes whose rows are others: each sample takes the place of the next one."""
    found: dict[str, Any] = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.dim():
            places = torch.arange(len(value), device=value.device).sub(1).clamp(min=0)
            rows = value.detach()[places]
            found[key] = (0.75 * rows if value.is_floating_point() else rows).requires_grad_(
                value.requires_grad
            )
        else:
            found[key] = value
    return found


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor of its own for one run: buffers and inputs are written by some forwards."""
    if isinstance(tensor, nn.Parameter):
        return tensor.detach().requires_grad_(tensor.requires_grad)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _outcome(
    values: dict[str, Tensor], leaves: Mapping[str, Tensor | None], left: dict[str, Tensor]
) -> _Outcome:
    """Run the backward: from the loss, and from each output with a fixed random gradient."""
    # Not by `autograd.grad`, which a module that checkpoints its layers itself refuses.
    roots = {name: value for name, value in values.items() if value.requires_grad}
    seeds = [
        torch.ones_like(v) if n == _LOSS else random_values(n, v.shape, v.dtype, v.device)
        for n, v in roots.items()
    ]
    torch.autograd.backward(list(roots.values()), seeds)
    gradients = {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}
    return _Outcome(
        values={name: value.detach() for name, value in values.items()}, gradients=gradients, left=left
    )


def _compare(graph: _Outcome, module: _Outcome, noise: Mapping[str, float]) -> Comparison:
    """Return how far one outcome is from the other.

    Args:
        noise: of what the module is off from itself -> by how much.
    """
    gradients = {
        name: (graph.gradients.get(name), gradient)
        for name, gradient in module.gradients.items()
        if gradient is not None or graph.gradients.get(name) is not None
    }
    largest = max((_norm(wanted) for _, wanted in gradients.values() if wanted is not None), default=0.0)
    differences: list[Difference] = []
    errors: dict[str, float] = {}

    def look(what: str, found: Tensor | None, wanted: Tensor | None, tolerance: float, least: float) -> None:
        error = errors[what] = _error(found, wanted, least)
        if error > max(tolerance, 4 * noise.get(what, 0.0)):
            differences.append(_difference(what, found, wanted, error))

    for name, value in module.values.items():
        tolerance = LOSS_TOLERANCE if name == _LOSS else GRADIENT_TOLERANCE
        look(name, graph.values.get(name), value, tolerance, 0.0)
    for name, (found, wanted) in gradients.items():
        look(f"gradient of {name}", found, wanted, GRADIENT_TOLERANCE, LEAST_SCALE * largest)
    for name in dict.fromkeys((*module.left, *graph.left)):
        what = f"{_STATE}{name.replace(CARRIED, '')}" if is_carried(name) else f"buffer {name}"
        look(what, graph.left.get(name), module.left.get(name), GRADIENT_TOLERANCE, 0.0)
    # state that is another one is why results are
    differences.sort(key=lambda difference: not difference.what.startswith(_STATE))
    return Comparison(num_gradients=len(gradients), errors=errors, differences=tuple(differences))


def _error(found: Tensor | None, wanted: Tensor | None, least: float) -> float:
    """Return the norm of the difference over that of ``wanted``, or over ``least``; infinite where one is missing.

    A gradient of zeros is as good as none.
    """
    if found is None or wanted is None:
        only = wanted if found is None else found
        return 0.0 if only is None or _norm(only) == 0.0 else math.inf
    if found.shape != wanted.shape:
        return math.inf
    distance = float(torch.linalg.vector_norm(_elementwise(found, wanted)))
    error = distance / max(_norm(wanted), least, 1e-30)
    return error if math.isfinite(error) else math.inf


def _elementwise(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the difference; none where both are infinite, or no numbers, at the same place."""
    found, wanted = (t.to_dense() if t.is_sparse else t for t in (found, wanted))
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return (found.double() - wanted.double()).masked_fill_(same, 0.0)


def _norm(tensor: Tensor) -> float:
    """Return the norm; of the finite elements of a gradient that has others, which would hide all differences."""
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).double()
    norm = float(torch.linalg.vector_norm(tensor))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tensor[tensor.isfinite()]))


def _difference(what: str, found: Tensor | None, wanted: Tensor | None, error: float) -> Difference:
    """Return what differs with its two values: where they are most different, nan where there is none."""
    if found is None or wanted is None or found.shape != wanted.shape:
        norms = [math.nan if tensor is None else _norm(tensor) for tensor in (found, wanted)]
        return Difference(what=f"norm of the {what}", graph=norms[0], module=norms[1], error=error)
    furthest = int(_elementwise(found, wanted).abs().nan_to_num(math.inf, math.inf).argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(furthest), found.shape)]
    values = [float((t.to_dense() if t.is_sparse else t).reshape(-1)[furthest]) for t in (found, wanted)]
    return Difference(what=f"{what}{place if place else ''}", graph=values[0], module=values[1], error=error)
