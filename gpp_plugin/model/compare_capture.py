"""A captured graph against the module it was made of: the loss, outputs, every gradient and what the forward writes.

Both run once on the same weights and rows, in float32. Dropout is off in both: what it draws is replaced by its mean,
and any other operator that draws begins at the same place in both, so that the order of draws does not matter.

Source: this project
Tests: tests/stage_graph/test_verification.py
"""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.eager.trial_run import NotedWrites, undone_writes
from gpp_plugin.capture.mask_values import inputs_of_ones
from gpp_plugin.capture.tracing.carried_state import (
    attribute_of,
    changed_attributes,
    held_by,
    initial_values,
    without_history,
)
from gpp_plugin.capture.tracing.meta_copy import rebind_hooks, set_modes, switch_off_caches
from gpp_plugin.capture.tracing.outside import hidden_process_group, noted_accesses, watched_generators
from gpp_plugin.capture.tracing.torch_export import Call, LossWrapper, split_batch
from gpp_plugin.ir.block_graph import CARRIED, is_carried
from gpp_plugin.model.materialize import materialize_parameters
from gpp_plugin.runtime.random_streams import restored_streams, seed_streams_of
from gpp_plugin.runtime.stage_module import build_stage_function

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 2e-6
"""Relative errors of a loss, and of a gradient or an output by the norm of the tensor."""
LEAST_SCALE = 1e-3
"""Share of the largest gradient's norm below which a gradient counts as rounding: a key's bias has one of zero."""
HALF = (torch.bfloat16, torch.float16)

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


def copy_model(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a module that can be run without harm: parameters share memory, buffers do not.

    What is on the meta device gets random values, its buffers what the constructor gives them.

    Args:
        dtype: floating parameters become this type, buffers in half precision float32.

    Raises:
        CheckpointError: nothing gives a buffer of a meta module its value.
    """

    # As for tracing (`make_meta_copy`): what `deepcopy` finds in ``memo`` it does not copy, and ties stay ties.
    memo: dict[int, Any] = {**without_history(model)}
    for name, parameter in model.named_parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        value = (
            _random(name, parameter.shape, wanted, device)
            if parameter.is_meta
            else parameter.detach().to(device, wanted)
        )
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    buffers = dict(model.named_buffers())
    absent = [name for name, buffer in buffers.items() if buffer.is_meta]
    made = materialize_parameters(model, absent, device=device) if absent else {}
    for name, buffer in buffers.items():
        changed = torch.float32 if dtype is not None and buffer.dtype in HALF else buffer.dtype
        memo[id(buffer)] = made.get(name, buffer).detach().to(device, changed).clone()
    clone = copy.deepcopy(model, memo)
    rebind_hooks(clone, memo)
    # as for tracing: with a cache, which no training reads, transformers' masks would mix samples that lie in one row
    switch_off_caches(clone)
    return clone


def _random(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as initialisers give: norms near one, everything else of a size that keeps activations finite."""
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(0.02)
    return value.add_(1.0) if len(shape) == 1 and name.endswith("weight") else value


def in_float32(captured: CapturedGraph) -> CapturedGraph:
    """Return a capture in half precision whose operators name float32 where they named its type."""
    half = getattr(torch, captured.analysis.dtype or "float32")
    if half not in HALF:
        return captured
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def widened(argument: Any) -> Any:
        return torch.float32 if argument is half else argument

    for node in captured.graph.nodes:
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        copied.args = fx.node.map_aggregate(copied.args, widened)
        copied.kwargs = fx.node.map_aggregate(copied.kwargs, widened)
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
                around.enter_context(_SameDraws(captured.device))
            yield

    state = {name: buffer.detach().clone() for name, buffer in clone.named_buffers()}
    carried = [p for p in captured.op_graph.parameters if is_carried(p.name)]
    state |= {name: value.to(captured.device) for name, value in initial_values(clone, carried).items()}

    def run_graph(rows: Mapping[str, Any]) -> _Outcome:
        with alike(), undone_writes(dict(clone.named_parameters())) as writes, torch.enable_grad():
            return _run_graph(captured, clone, rows, state, writes)

    def run_module(copied: nn.Module, rows: Mapping[str, Any]) -> _Outcome:
        with alike(), undone_writes(dict(clone.named_parameters())) as writes, torch.enable_grad():
            return _run_module(captured, copied, rows, call, writes)

    own = copy_model(clone, device=captured.device)
    graph, module = run_graph(arguments), run_module(own, arguments)
    found = _compare(graph, module, {})
    if module.changed or any(each.structure and each.tensors for each in captured.analysis.carried):
        # What is saved for the next forward shows in the next one, on other values. What the graph does not carry is
        # a cache where that forward leaves it alone.
        rows = _other_rows(arguments)
        graph, module = run_graph(rows), run_module(own, rows)
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
    again = run_module(copy_model(clone, device=captured.device), arguments)
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
    wrapper = LossWrapper(clone, constants, tuple(op_graph.outputs), needs_loss=False, call=call)
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
        results = wrapper.results(result, leaves_of)
    after = held_by(clone, keep=_cloned)
    carried = {state.name: state for state in captured.analysis.carried if state.structure and state.tensors}
    changed = dict.fromkeys(n for n, p in clone.named_parameters() if p.requires_grad != flags.get(n))
    for name in changed_attributes(before, after, by_value=True):
        module, path, leaf = attribute_of(clone, name)
        attribute = f"{path}.{leaf}" if path else leaf
        if attribute not in carried and first.get((id(vars(module)), leaf), True):
            changed[attribute] = None
    names = [_LOSS] if wrapper.seen.has_loss else []
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
        torch.ones_like(v) if n == _LOSS else _random(n, v.shape, v.dtype, v.device) for n, v in roots.items()
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


class _SameDraws(TorchDispatchMode):
    """Operators draw the same wherever they are called: dropout keeps everything, others start at a seed of their own.

    Dropout on the CPU is a mask ``bernoulli(1 - p) / (1 - p)``; with the mean 1 - p for what is drawn it is ones.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args]
        seed_streams_of(self._device, zlib.crc32(f"{func}{shapes}".encode()))
        return func(*args, **(kwargs or {}))
