"""Interpret a captured graph on fake tensors: shapes, gradient flags, costs, storages, writes.

Source: this project
Tests: tests/runtime/test_float_inputs.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.capture.eager.opaque_call import OpaqueCall
from gpp_plugin.capture.eager.trial_run import FlopCount
from gpp_plugin.capture.tracing.clean import ADDED, written_arguments
from gpp_plugin.capture.tracing.meta_copy import MetaCopy
from gpp_plugin.capture.tracing.symbolic_sizes import tensors_in


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


@dataclass(slots=True)
class _Saved:
    """Bytes saved for backward, each storage charged to the node that first saves it."""

    free: set[int]
    bytes: int = 0
    counts: bool = True
    now: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    alive: list[torch.Tensor] = field(default_factory=list)

    def begin(self, *, counts: bool) -> None:
        """Start with the next node, whose bytes count or not."""
        self.bytes = 0
        self.counts = counts
        self.now = {}

    def pack(self, tensor: torch.Tensor) -> None:
        """Charge the storage of a tensor that autograd saves; it is never unpacked."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # the address of torch's own object: the same for all views of one memory
        # Parameters and inputs are there anyway; what several operators keep is in memory once, and charged to the
        # first of them. `alive` holds the tensors so that no later storage gets a freed one's address.
        if self.counts and key not in self.free:
            self.now[key] = storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.alive.append(tensor)
                self.bytes += storage.nbytes()


class _StorageOwners:
    """Numbers storages in the order in which they appear, and notes the operator that made each."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.makers: dict[int, str] = {}

    def of(self, value: Any) -> frozenset[int]:
        """Return the numbers of the storages that the tensors of ``value`` lie in."""
        return frozenset(
            self._numbers.setdefault(t.untyped_storage()._cdata, len(self._numbers))
            for t in tensors_in(value)
        )

    def maker_of(self, value: Any, node: str) -> str:
        """Return who made the storage that ``node`` put its result into, "" where it is a new one."""
        other = ""
        for tensor in tensors_in(value):
            maker = self.makers.setdefault(tensor.untyped_storage()._cdata, node)
            other = maker if maker != node else ""
        return other


def annotate(
    graph: fx.Graph,
    meta_copy: MetaCopy,
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],
    *,
    received: Collection[str],
    training: bool,
    unread: Collection[str] = (),
) -> dict[str, Note]:
    """Run ``graph`` on fake tensors and return a note for each placeholder and operator.

    For ``x -> view -> linear(w, b) -> relu`` on x of 4 samples: the view has the storage of x and no FLOPs; linear has
    a new one, 2 * 4 * in * out FLOPs, reads the storages of x, w and b, and saves nothing but what is there anyway (x
    is an input, w a parameter); relu saves its own result, 4 * out * 4 bytes, charged to it.

    Args:
        tensors: placeholder name -> fake tensor.
        received: placeholders of what other stages make, which is not there anyway.
        training: record gradient flags and what is saved for backward.
        unread: operators that the code of a stage leaves out; they cost nothing.
    """
    tensors = {name: _in_mode(tensor, meta_copy) for name, tensor in tensors.items()}
    values: dict[fx.Node, Any] = {}
    notes: dict[str, Note] = {}
    costs = FlopCount()
    saved = _Saved(free={t.untyped_storage()._cdata for n, t in tensors.items() if n not in received})
    storages = _StorageOwners()
    hooks = saved_tensors_hooks(saved.pack, _no_backward)
    with meta_copy.mode, costs, torch.set_grad_enabled(training), hooks:
        for node in graph.nodes:
            if node.op == "output":
                continue
            # What a node reads and writes is looked up before it runs: an operator in place gives its result the
            # storage of its argument, so that afterwards the two could not be distinguished.
            args = fx.map_arg(node.args, lambda n: values[n])
            reads = storages.of([values[n] for n in node.all_input_nodes])
            writes = storages.of([values[n] for n in written_arguments(node)])
            costs.flops = 0.0
            saved.begin(counts=node.name not in unread)
            if node.op == "placeholder":
                values[node] = tensors[node.name]
            elif node.op == "get_attr":
                values[node] = attributes[str(node.target)]
                continue
            else:
                values[node] = node.target(*args, **fx.map_arg(node.kwargs, lambda n: values[n]))
            note = notes[node.name] = _note(node, values[node], reads, writes, storages.of(values[node]))
            note.requires_grad &= training
            flops = node.target.observed.flops if isinstance(node.target, OpaqueCall) else float(costs.flops)
            note.flops = 0.0 if node.name in unread else flops
            note.saved_bytes = saved.bytes
            if ADDED in node.meta:  # no operator of the capture: its saved tensors count as inside its reader
                continue
            note.storage = storages.maker_of(values[node], node.name)
            # only now: an operator that keeps its own result (relu) is itself the maker of what it keeps
            note.keeps, note.kept_inside_bytes = _by_maker(saved.now, storages.makers)
    # only now: ``logits = full(-inf); logits[:, :n] = found`` gives ``logits``, which is what others read, a gradient
    # that it was made without
    for node, value in values.items():
        if training and node.op == "call_function":
            notes[node.name].requires_grad = any(tensor.requires_grad for tensor in tensors_in(value))
    _forget_dead_ends(graph, notes)
    return notes


def written_placeholders(graph: fx.Graph, notes: Mapping[str, Note]) -> set[str]:
    """Return the placeholders that some operator writes into, through views as well."""
    writes = {storage for note in notes.values() for storage in note.writes}
    placeholders = (node.name for node in graph.nodes if node.op == "placeholder")
    return {name for name in placeholders if not writes.isdisjoint(notes[name].storages)}


def _forget_dead_ends(graph: fx.Graph, notes: Mapping[str, Note]) -> None:
    """Leave gradient flags to what a gradient of the graph's results comes to.

    An encoder whose output is looked up in a codebook (``argmax``) takes gradients that nobody makes: `requires_grad`
    says how a tensor was made, not who reads it, and in stages no gradient would be sent.
    """
    # Backwards from the results. Who reads memory that was written in place need not read the operator that wrote it.
    reached: set[fx.Node] = set()
    memory: set[int] = set()
    for node in reversed(list(graph.nodes)):
        note = notes.get(node.name)
        if node.op == "output":
            reached.update(node.all_input_nodes)
            memory.update(*(notes[source.name].storages for source in node.all_input_nodes))
        elif note is not None and note.requires_grad and (node in reached or note.writes & memory):
            reached.update(node.all_input_nodes)
            memory |= note.reads
        elif note is not None:
            note.requires_grad = False


def _in_mode(tensor: torch.Tensor, meta_copy: MetaCopy) -> torch.Tensor:
    """Return a fake tensor of the meta_copy's own mode: a view of another mode's would have another storage."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is meta_copy.mode:
        return tensor
    with meta_copy.mode:
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return own.requires_grad_(tensor.requires_grad)


def _no_backward(_: object) -> torch.Tensor:
    raise AssertionError("what is only looked at has no backward")


def _by_maker(saved: Mapping[int, int], makers: Mapping[int, str]) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the bytes saved of each node's results, and those of no node's."""
    # No node's: what an operator makes for its own backward alone (the mask of dropout, the statistics of a norm).
    keeps: dict[str, int] = {}
    inside = 0
    for key, num_bytes in saved.items():
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
    shapes = tuple(tuple(t.shape) for t in tensors)
    assert all(type(size) is int for shape in shapes for size in shape), f"{node.name} passed `refuse_values`"
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
    # Export calls modules "L['self'].model.encoder.layers.0@2": the wrapper's name, the model's in it, and a number
    # behind @ from a module's second call on. All three go, "" for what no module of the model's called.
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    path = path.removeprefix("L['self']").lstrip(".")
    path = re.sub(r"@\d+", "", path)
    return (
        path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else ""
    )
