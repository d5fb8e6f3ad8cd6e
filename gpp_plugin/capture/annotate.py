"""Interpret a captured graph on fake tensors: shapes, gradient flags, costs, storages, writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from gpp_plugin.capture.clean import written_arguments
from gpp_plugin.capture.shadow import Shadow
from gpp_plugin.errors import CaptureError

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True, kw_only=True)
class Note:
    """What the interpretation found of one node.

    Args:
        shapes, dtypes: of its tensors (one, or several for an operator that returns a tuple).
        storages: numbers of the storages its tensors lie in.
        reads, writes: storages of its arguments, and those it writes into.
        saved_bytes, keeps, kept_inside_bytes, storage: as of `OpNode`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    requires_grad: bool
    is_tuple: bool
    storages: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    flops: float = 0.0
    saved_bytes: int = 0
    keeps: tuple[tuple[str, int], ...] = ()
    kept_inside_bytes: int = 0
    storage: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a node with one tensor."""
        return self.shapes[0]


class _Costs(TorchDispatchMode):
    """Count floating-point operations of the operators below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif packet is _CPU_ATTENTION:
            self.flops += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif not func.is_view:
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            self.flops += first.numel() if isinstance(first, torch.Tensor) else 0
        return result


@dataclass(slots=True)
class _Saved:
    """Bytes kept for backward, each storage charged to the node that first saves it."""

    free: set[int]
    bytes: int = 0
    now: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    alive: list[torch.Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """Start with the next node."""
        self.bytes = 0
        self.now = {}

    def pack(self, tensor: torch.Tensor) -> None:
        """Charge the storage of a tensor that autograd saves; nobody asks for it again."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.free:
            self.now[key] = storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.alive.append(tensor)
                self.bytes += storage.nbytes()


def annotate(
    graph: fx.Graph,
    shadow: Shadow,
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],
    *,
    received: Collection[str],
    training: bool,
) -> dict[str, Note]:
    """Run ``graph`` on fake tensors and return a note for each placeholder and operator.

    Args:
        tensors: placeholder name -> fake tensor.
        received: placeholders of what other stages make, which is not there anyway.
        training: record gradient flags and what is kept for backward.

    Raises:
        CaptureError: an operator's result has a size that depends on values.
    """
    tensors = {name: _in_mode(tensor, shadow) for name, tensor in tensors.items()}
    values: dict[fx.Node, Any] = {}
    notes: dict[str, Note] = {}
    keys: dict[int, int] = {}
    costs = _Costs()
    saved = _Saved(free={t.untyped_storage()._cdata for n, t in tensors.items() if n not in received})
    makers: dict[int, str] = {}

    def storage(tensor: torch.Tensor) -> int:
        return keys.setdefault(tensor.untyped_storage()._cdata, len(keys))

    def storages(value: Any) -> frozenset[int]:
        leaves = torch.utils._pytree.tree_leaves(value)
        return frozenset(storage(t) for t in leaves if isinstance(t, torch.Tensor))

    hooks = saved_tensors_hooks(saved.pack, _no_backward)
    with shadow.mode, costs, torch.set_grad_enabled(training), hooks:
        for node in graph.nodes:
            if node.op == "output":
                continue
            args = fx.map_arg(node.args, lambda n: values[n])
            reads = storages([values[n] for n in node.all_input_nodes])
            writes = storages([values[n] for n in written_arguments(node)])
            costs.flops = 0.0
            saved.begin()
            if node.op == "placeholder":
                values[node] = tensors[node.name]
            elif node.op == "get_attr":
                values[node] = attributes[str(node.target)]
                continue
            else:
                kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
                values[node] = node.target(*args, **kwargs)
            notes[node.name] = _note(node, values[node], reads, writes, storages(values[node]))
            notes[node.name].requires_grad &= training
            notes[node.name].flops = float(costs.flops)
            notes[node.name].saved_bytes = saved.bytes
            for tensor in torch.utils._pytree.tree_leaves(values[node]):
                if isinstance(tensor, torch.Tensor):
                    maker = makers.setdefault(tensor.untyped_storage()._cdata, node.name)
                    notes[node.name].storage = maker if maker != node.name else ""
            notes[node.name].keeps, notes[node.name].kept_inside_bytes = _by_maker(saved.now, makers)
    return notes


def _in_mode(tensor: torch.Tensor, shadow: Shadow) -> torch.Tensor:
    """Return a fake tensor of the shadow's own mode: a view of another mode's would have another storage."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is shadow.mode:
        return tensor
    with shadow.mode:
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return own.requires_grad_(tensor.requires_grad)


def _no_backward(_: object) -> torch.Tensor:
    raise AssertionError("what is only looked at has no backward")


def _by_maker(kept: Mapping[int, int], makers: Mapping[int, str]) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the bytes kept of each node's results, and those of no node's."""
    keeps: dict[str, int] = {}
    inside = 0
    for key, num_bytes in kept.items():
        if key in makers:
            keeps[makers[key]] = keeps.get(makers[key], 0) + num_bytes
        else:
            inside += num_bytes
    return tuple(keeps.items()), inside


def _note(
    node: fx.Node, value: Any, reads: frozenset[int], writes: frozenset[int], storages: frozenset[int]
) -> Note:
    is_tuple = isinstance(value, (tuple, list))
    tensors = [t for t in value if isinstance(t, torch.Tensor)] if is_tuple else [value]
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        raise CaptureError(
            f"operator {node.target} ({node.name}) at {module_path(node) or 'the model itself'} yields a Python "
            f"number taken from a tensor; keep it a tensor"
        )
    shapes = tuple(tuple(t.shape) for t in tensors)
    if not all(type(size) is int for shape in shapes for size in shape):
        raise CaptureError(
            f"operator {node.target} ({node.name}) at {module_path(node) or 'the model itself'} makes a tensor "
            f"of shape {shapes[0]}, which depends on values (nonzero, boolean indexing, unique); use a mask or "
            "torch.where so that shapes are known beforehand"
        )
    return Note(
        shapes=shapes,
        dtypes=tuple(t.dtype for t in tensors),
        requires_grad=any(t.requires_grad for t in tensors),
        is_tuple=is_tuple,
        storages=storages,
        reads=reads,
        writes=writes,
    )


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that called ``node``; "" is the user's model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    path = path.removeprefix("L['self']").lstrip(".")
    path = re.sub(r"@\d+", "", path)
    return (
        path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else ""
    )
