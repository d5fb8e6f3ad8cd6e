"""A captured graph as one of a stage's context ranks computes it: on its part of the positions of all samples.

Every tensor of the stage is cut (a rank has its positions, rows or heads) or whole (all have the same). Operators run
on what `ContextPart` says. What is held otherwise is changed in front of them:

    captured                            rank 0 of 2
    ids [2, 5]                          ids [2, 5]                 a batch is whole
                                        i = own(ids)               [2, 2]; backward: zeros elsewhere
    x = embedding(table, ids)           x = embedding(table, i)    [2, 2, 32] and [2, 3, 32]
    q = view(.., [2, 5, 4, 8])          q = view(.., [2, 2, 4, 8])
                                        e = exchanged(q)           [2, 5, 2, 8]: all positions, half of the heads
    a = attention(q, k, v)              a = attention(e, ..)
                                        b = exchanged(a)           and back
    y = select(x, 1, 0)                 g = gathered(x)            [2, 5, 32]; backward: reduce-scatter
                                        y = select(g, 1, 0)
    loss = cross_entropy(z, labels)     loss = cross_entropy(z, own(labels)), summed over the ranks

Of what is cut a rank's gradient is that of its part. Of what is whole, parameters too, it is a summand: those of all
context ranks together are the gradient. So parameters need nothing but the sum that data-parallel ranks make. What
crosses the border of a stage has its whole gradient there: `entered` sums that of a received tensor, `left` takes an
equal share of that of what is sent.

Of keys and values with fewer heads than ranks, each head is repeated before it is exchanged.

Operators keep their names; what is put between them is marked (`ADDED`) and belongs to the block of its neighbour.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3; sums at the borders: this project
Tests: tests/runtime/test_context_ranks.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gpp_plugin.capture.axis_rules import FLATTENS, is_part
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.find_regions import sizes_of_part
from gpp_plugin.capture.tracing.clean import ADDED
from gpp_plugin.capture.tracing.symbolic_sizes import argument_of
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import HEADS, ROWS, ContextCut, ContextPart, ShardedRegion
from gpp_plugin.ir.block_graph import OpNode
from gpp_plugin.runtime.tensor_ranks import (
    EXCHANGED,
    GRADIENT,
    GRADIENT_EXCHANGED,
    GRADIENT_PARTS,
    PARTS,
    RESULT,
    TensorOperator,
    TensorRanks,
)

aten = torch.ops.aten

STANDS_FOR = "stands for"
"""Marks what was put in with the operator whose result it is, held in another way."""
IN_CONTEXT = "in context"
"""Marks an operator whose result is a part of the context ranks'."""


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, axis: int, length: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        return ranks.begin_gather(part, axis, length, PARTS)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total, wait = ctx.ranks.begin_scatter(gradient, ctx.axis, GRADIENT_PARTS)
        wait()
        return total, None, None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, axes: tuple[int, int], length: int) -> Tensor:
        ctx.ranks, ctx.axes, ctx.length = ranks, axes[::-1], part.shape[axes[1]]
        return ranks.begin_exchange(part, axes, length, EXCHANGED)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        found = ctx.ranks.begin_exchange(gradient, ctx.axes, ctx.length, GRADIENT_EXCHANGED)()
        return found, None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(summand, RESULT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient, GRADIENT), None


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient, GRADIENT), None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, size: int) -> Tensor:
        ctx.size = size
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None


def own(ranks: TensorRanks, axis: int) -> TensorOperator:
    """Return what takes a rank's part of a whole tensor, of rows that of each of ``samples``."""

    def take(whole: Tensor, samples: int | None) -> Tensor:
        # in memory of its own, so that the whole need not be kept; its gradient is filled up with zeros
        at, tensor = _apart(whole, axis, samples)
        part = tensor.narrow(at, *ranks.positions(tensor.shape[at])).clone(
            memory_format=torch.contiguous_format
        )
        return part if samples is None else part.flatten(axis, at)

    return TensorOperator("context_own", take)


def gathered(ranks: TensorRanks, axis: int) -> TensorOperator:
    """Return what makes a whole of the ranks' parts of a length."""

    def gather(part: Tensor, length: int | None, samples: int | None) -> Tensor:
        at, tensor = _apart(part, axis, samples)
        whole: Tensor = _Gathered.apply(tensor, ranks, at, _length(part, ranks, axis, length))  # type: ignore[no-untyped-call]
        return whole if samples is None else whole.flatten(axis, at)

    return TensorOperator("context_gathered", gather)


def exchanged(ranks: TensorRanks, axes: tuple[int, int]) -> TensorOperator:
    """Return what changes the axis along which a tensor is cut, from the first one, of a length, to the second."""

    def exchange(part: Tensor, length: int | None) -> Tensor:
        found: Tensor = _Exchanged.apply(part, ranks, axes, _length(part, ranks, axes[0], length))  # type: ignore[no-untyped-call]
        return found

    return TensorOperator("context_exchanged", exchange)


def entered(ranks: TensorRanks) -> TensorOperator:
    """Return what a whole tensor of another stage is read through: its gradient is summed."""
    return TensorOperator("context_entered", lambda whole: _Entered.apply(whole, ranks))  # type: ignore[no-untyped-call]


def left(ranks: TensorRanks) -> TensorOperator:
    """Return what a whole tensor leaves a stage through: each rank goes on with a share of its gradient."""
    return TensorOperator("context_left", lambda whole: _Left.apply(whole, ranks.size))  # type: ignore[no-untyped-call]


def summed(call: Callable[..., Tensor], ranks: TensorRanks) -> TensorOperator:
    """Return an operator whose result is the sum of the ranks' results."""
    return TensorOperator(
        "context_summed",
        lambda *args, **kwargs: _Summed.apply(call(*args, **kwargs), ranks),  # type: ignore[no-untyped-call]
        around=lambda other: summed(other, ranks),
    )


def averaged(call: Callable[..., Tensor], ranks: TensorRanks) -> TensorOperator:
    """Return a cross entropy whose result is the mean over the labels of all ranks."""

    def average(
        logits: Tensor,
        target: Tensor,
        weight: None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        assert weight is None and not label_smoothing and reduction == 1, "such a loss is not cut"
        # rank 0 has losses 2 and 4, rank 1 has 3 and a label that does not count: (6 + 3) / (2 + 1)
        precise = logits if logits.dtype == torch.float64 else logits.float()
        total = call(precise, target, None, 2, ignore_index).double()
        count = (target != ignore_index).sum().double()
        both: Tensor = _Summed.apply(torch.stack([total, count]), ranks)  # type: ignore[no-untyped-call]
        return (both[0] / both[1].detach()).to(logits.dtype)

    return TensorOperator("context_averaged", average, around=lambda other: averaged(other, ranks))


def _length(part: Tensor, ranks: TensorRanks, axis: int, length: int | None) -> int:
    """Return the length of the whole along an axis; None: of heads, of which tensor ranks may have a part each."""
    return part.shape[axis] * ranks.size if length is None else length


def _apart(tensor: Tensor, axis: int, samples: int | None) -> tuple[int, Tensor]:
    """Return the axis of positions, and a tensor that has one: of [10, 8] of 2 samples, 1 and [2, 5, 8]."""
    return (axis, tensor) if samples is None else (axis + 1, tensor.unflatten(axis, (samples, -1)))


# ---- the graph -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """How the ranks hold a tensor.

    Args:
        axis: which is cut; ``length`` of it, of the whole tensor; of rows the length of one sample.
        samples: of rows, how many there are one behind the other; None: no rows. Of heads of which tensor ranks take
            theirs, how many ranks these are.
        times: of groups of keys or values, how often each is there, until they are repeated for the heads that share
            them; ``repeats`` is the axis along which they are then.
    """

    axis: int
    length: Any
    samples: Any = None
    times: int = 1
    repeats: int | None = None
    is_heads: bool = False

    @property
    def key(self) -> tuple[int, bool]:
        """Return what alike tensors have in common; their lengths may be symbols, which nothing must ask for."""
        return self.axis, self.samples is None

    @property
    def given_length(self) -> Any:
        """Return the length as an argument of what changes it."""
        return None if self.is_heads and self.samples is None else argument_of(self.length)

    def size(self, ranks: TensorRanks) -> Any:
        """Return the size of a rank's part along the axis."""
        own = ranks.positions(self.length)[1]
        return own if self.samples is None else self.samples * own


def cut_graph(
    captured: CapturedGraph,
    parts: Sequence[ContextPart],
    ranks: TensorRanks,
    own: Sequence[str],
    *,
    outputs: Sequence[str] = (),
    arriving: Mapping[str, int] | None = None,
    leaving: Mapping[str, int] | None = None,
    regions: Sequence[ShardedRegion] = (),
    tensor: int = 1,
) -> tuple[CapturedGraph, dict[str, str], tuple[str, ...]]:
    """Return a capture whose operators compute on this rank's parts, what was put in, and what outputs are called.

    Of each operator that was put in and is of a block, the operator of the capture whose block it belongs to.

    Args:
        parts: what context ranks compute on parts; everything else is computed whole, by all of them.
        own: the operators of the stage's blocks.
        outputs: operators whose results leave the stage.
        arriving: what other stages make and is received in parts -> the axis of positions.
        leaving: the outputs that are handed on in parts -> the axis of positions.
        regions: what ``tensor`` ranks of these positions share out of the result.

    Raises:
        CaptureError: an operator's sizes are not what they were when its heads were found.
    """
    writer = _Writer(captured, parts, ranks, frozenset(own), arriving or {}, regions, tensor)
    graph = writer.write()
    names = tuple(writer.output(name, leaving or {}) for name in outputs)
    # operators that stages make for themselves are found by what is read, so those that were put in among them too
    copies = {node.name: node for node in graph.nodes}
    known = {node.name: node for node in captured.op_graph.nodes}

    def described(name: str, like: OpNode) -> OpNode:
        inputs = tuple(dict.fromkeys(n.name for n in copies[name].all_input_nodes))
        return OpNode(
            name=name,
            target="added",
            inputs=inputs,
            module="",
            output=None,
            is_replicable=like.is_replicable,
        )

    nodes = [
        dataclasses.replace(
            node, inputs=tuple(dict.fromkeys(n.name for n in copies[node.name].all_input_nodes))
        )
        if node.is_replicable
        else node
        for node in captured.op_graph.nodes
    ]
    nodes += [described(name, known[beside]) for name, beside in writer.added.items()]
    op_graph = dataclasses.replace(captured.op_graph, nodes=tuple(nodes))
    added = {name: beside for name, beside in writer.added.items() if beside in writer.own}
    return dataclasses.replace(captured, graph=graph, op_graph=op_graph), added, names


class _Writer:
    """Copies a graph node by node, and puts in what changes how tensors are held."""

    def __init__(
        self,
        captured: CapturedGraph,
        parts: Sequence[ContextPart],
        ranks: TensorRanks,
        own: frozenset[str],
        arriving: Mapping[str, int],
        regions: Sequence[ShardedRegion],
        tensor: int,
    ) -> None:
        self._captured, self._ranks, self.own = captured, ranks, own
        self._computed = captured.replicated_closure(own)
        self._parts = {part.name: part for part in parts if part.name in self._computed}
        self._arriving = arriving
        self._names = {**captured.inputs, **captured.parameters}
        known = {node.name: node.output for node in captured.op_graph.nodes}
        known |= {
            spec.name: spec for spec in captured.op_graph.inputs if spec.name in captured.op_graph.received
        }
        self._specs = known
        self._graph = fx.Graph()
        self._nodes = {node.name: node for node in captured.graph.nodes}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._held: dict[fx.Node, _Held] = {}
        self._forms: dict[tuple[fx.Node, Any], fx.Node] = {}
        self._tensor = tensor
        self._region_of = {name: i for i, region in enumerate(regions) for name in region.operators}
        self._sliced = {(i, shard.name) for i, region in enumerate(regions) for shard in region.sliced}
        self._made_for_slices = frozenset(self._making_slices())
        self.added: dict[str, str] = {}

    def write(self) -> fx.Graph:
        """Return the copy."""
        for node in self._captured.graph.nodes:
            if node.op == "call_function" and node.name in self._computed:
                copy = self._computing(node)
            else:
                copy = self._graph.node_copy(node, lambda source: self._copies[source])
                name = self._names.get(node.name, node.name)
                if name in self._arriving:
                    axis = self._arriving[name]
                    self._hold(node, copy, _Held(axis, node.meta["val"].shape[axis]))
            self._copies[node] = copy
            assert copy.name == node.name, f"{node.name} became {copy.name}"
        return self._graph

    def output(self, name: str, leaving: Mapping[str, int]) -> str:
        """Return what the copy calls an operator's result as it leaves the stage."""
        node = self._nodes[name]
        if name in leaving:
            axis = leaving[name]
            return self._form(node, _Held(axis, node.meta["val"].shape[axis]), 1, node).name
        whole = self._form(node, None, 1, node)
        value = node.meta["val"]
        spec = self._specs.get(name)
        if spec is None or not spec.requires_grad or not isinstance(value, Tensor):
            return whole.name
        return self._add(left(self._ranks), (whole,), node, f"context_{name}_left", node, value).name

    # ---- operators -------------------------------------------------------------------------------

    def _computing(self, node: fx.Node) -> fx.Node:
        part = self._parts.get(node.name)
        sources = node.all_input_nodes
        if is_part(node):  # one of several results is held as all of them are
            held = self._held.get(sources[0])
            copy = self._graph.node_copy(node, lambda source: self._copies[source])
            if held is not None:
                self._hold(node, copy, held)
            return copy
        samples = self._samples(sources)
        wanted = {source: self._wanted(part, source, samples, node) for source in sources}

        def operand(source: fx.Node) -> fx.Node:
            held, times = wanted[source]
            return self._form(source, held, times, node)

        args: Any = fx.map_arg(node.args, operand)
        kwargs: Any = fx.map_arg(node.kwargs, operand)
        if part is None:
            return self._call(node, node.target, args, kwargs)
        if part.result is None:
            made: Any = {"sum": summed, "mean": averaged}[part.sums]
            return self._call(node, made(node.target, self._ranks), args, kwargs)
        read = {source: how for source, (how, _) in wanted.items() if how is not None}
        held = self._result(node, part.result, read)
        times = max(how.times for how in read.values())
        if times > 1:
            held = self._repeating(node, held, times, list(read.values()))
        shapes = [self._own_shape(value, held) for value in _tensors(node)]
        args = self._own_sizes(node, args, part.result, shapes)
        if times > 1 and node.target is aten.repeat_interleave.self_int:
            args = (args[0], args[1] // times, *args[2:])
        copy = self._call(node, node.target, args, kwargs)
        self._hold(node, copy, held)
        return copy

    def _call(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        copy = self._graph.create_node("call_function", target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _hold(self, node: fx.Node, copy: fx.Node, held: _Held) -> None:
        self._held[node] = held
        value = node.meta["val"]
        own = [each.new_empty(self._own_shape(each, held)) for each in _tensors(node)]
        copy.meta = {
            **node.meta,
            "val": own[0] if isinstance(value, Tensor) else type(value)(own),
            IN_CONTEXT: True,
        }

    def _own_shape(self, value: Tensor, held: _Held) -> list[Any]:
        shape = list(value.shape)
        if isinstance(held.length, int) and held.is_heads and held.length % self._ranks.size:
            raise CaptureError(
                f"{held.length} heads are cut into {self._ranks.size}; set sequence_parallel to a number that "
                f"divides them"
            )
        shape[held.axis] = held.size(self._ranks)
        if held.repeats is not None:
            shape[held.repeats] //= held.times
        return shape

    def _result(self, node: fx.Node, cut: ContextCut, read: Mapping[fx.Node, _Held]) -> _Held:
        shape = _tensors(node)[0].shape
        if cut.kind != ROWS:
            if node.name in self._made_for_slices:
                return self._of_slices(cut.axis, shape[cut.axis])
            return _Held(cut.axis, shape[cut.axis], is_heads=cut.kind == HEADS)
        # rows of rows; or [2, 5, 8] with its positions along axis 1 becomes [10, 8], rows along axis 0
        rows = next((held for held in read.values() if held.samples is not None), None)
        if rows is not None:
            return _Held(cut.axis, rows.length, rows.samples)
        source, held = next(iter(read.items()))
        before = source.meta["val"].shape
        return _Held(cut.axis, held.length, math.prod(before[cut.axis : held.axis]))

    def _of_slices(self, axis: int, heads: Any) -> _Held:
        return _Held(axis, heads // self._tensor, self._tensor, is_heads=True)

    def _repeating(self, node: fx.Node, held: _Held, times: int, read: Sequence[_Held]) -> _Held:
        """Return how groups are held that have been repeated for the exchange, on their way to the heads."""
        # 2 groups for 8 heads, on 4 ranks: each group is there twice. [2, 2, 9, 8] on one rank is [2, 1, 9, 8], and
        # expanded from [2, 2, 1, 9, 8] to [2, 2, 4, 9, 8] it is [2, 1, 2, 9, 8]: a group for two heads
        number = next(how.length for how in read if how.times > 1) // times
        if held.length != number:
            return held
        repeats = next((how.repeats for how in read if how.times > 1), None)
        if node.target is aten.expand.default:
            repeats = held.axis + 1
        return dataclasses.replace(held, length=number * times, times=times, repeats=repeats)

    def _samples(self, sources: Sequence[fx.Node]) -> Any:
        """Return how many samples lie one behind the other in the rows that an operator reads."""
        known = [held for source in sources if (held := self._held.get(source)) and not held.is_heads]
        found = next((held.samples for held in known if held.samples is not None), None)
        if found is not None:
            return found
        # nothing is held in rows yet: labels [10] made of [2, 5]
        for source in sources:
            node: Any = source
            while isinstance(node, fx.Node) and node.op == "call_function":
                operand: Any = node.args[0] if node.args else None
                if node.target in FLATTENS:
                    before, after = operand.meta["val"].shape, node.meta["val"].shape
                    if len(before) > len(after):
                        return math.prod(before[: len(before) - len(after)])
                node = operand
        return None

    def _wanted(
        self, part: ContextPart | None, source: fx.Node, samples: Any, reader: fx.Node
    ) -> tuple[_Held | None, int]:
        """Return how an operator reads another's result, and how often each of its heads is repeated."""
        names = (self._names.get(source.name, source.name), source.name)
        cut = None if part is None else next((part.operands[n] for n in names if n in part.operands), None)
        if part is None or cut is None:
            return None, 1
        groups = next((part.groups[n] for n in names if n in part.groups), None)
        times = 1
        if part is not None and groups is not None:
            groups //= self._tensor if part.name in self._region_of else 1
            times = self._ranks.size // math.gcd(self._ranks.size, groups)
        length, held = source.meta["val"].shape[cut.axis], self._held.get(source)
        if cut.kind != ROWS:
            if held is not None and held.key == (cut.axis, True):
                return held, 1
            if cut.kind == HEADS and self._is_sliced(source, reader):
                return self._of_slices(cut.axis, length), 1
            return _Held(cut.axis, length * times, is_heads=cut.kind == HEADS, times=times), times
        if held is not None and held.samples is not None:
            return held, 1
        return _Held(cut.axis, length // samples, samples), 1

    def _own_sizes(
        self, node: fx.Node, args: tuple[Any, ...], cut: ContextCut, shapes: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        """Return an operator's arguments with the sizes that its part has."""
        sizes = list(map(argument_of, shapes[0]))
        if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            return (args[0], sizes, *args[2:])
        if node.target is aten.expand.default:
            own = [-1 if size == -1 else own for size, own in zip(args[1], sizes, strict=True)]
            return (args[0], own, *args[2:])
        if node.target is aten.unflatten.int:
            first = int(args[1]) % (len(sizes) - len(args[2]) + 1)
            return (args[0], args[1], sizes[first : first + len(args[2])], *args[3:])
        return sizes_of_part(node, cut.axis, self._ranks.size, args) if cut.kind == HEADS else args

    # ---- what is put in ----------------------------------------------------------------------------

    def _add(
        self,
        target: Any,
        args: tuple[Any, ...],
        beside: fx.Node,
        name: str,
        source: fx.Node,
        value: Tensor,
    ) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, {}, name=name)
        node.meta = {"val": value, ADDED: True, STANDS_FOR: source.name}
        self.added[node.name] = beside.name
        return node

    def _form(self, source: fx.Node, wanted: _Held | None, times: int, reader: fx.Node) -> fx.Node:
        """Return a tensor as an operator reads it; each form of it is made once."""
        held = self._held.get(source)
        is_alike = held.key == wanted.key if held and wanted else held is wanted
        if not isinstance(source.meta.get("val"), Tensor) or source.op == "get_attr":
            return self._copies[source]
        if is_alike and times == 1:
            return self._here(source, reader)
        key = source, None if wanted is None else (*wanted.key, times)
        if key not in self._forms:
            self._forms[key] = self._changed(source, held, wanted, times, reader)
        return self._forms[key]

    def _is_sliced(self, source: fx.Node, reader: fx.Node) -> bool:
        """Return whether each tensor rank takes its heads of what an operator reads, or of what it makes of it."""
        # of 8 heads on 2 x 2 ranks, tensor rank 1 has 4 to 7, and the first context rank 4 and 5 of them: of all heads
        # it has 0 and 1, 4 and 5, of which the tensor rank then takes its half
        name = self._names.get(source.name, source.name)
        is_read = (self._region_of.get(reader.name), name) in self._sliced
        return is_read or reader.name in self._made_for_slices

    def _making_slices(self) -> Iterator[str]:
        """Yield the operators outside of regions that make heads of which tensor ranks take theirs, the last first."""
        found = set[str]()
        for node in reversed(self._captured.graph.nodes):
            part = self._parts.get(node.name)
            is_by_heads = part is not None and part.result is not None and part.result.kind == HEADS
            if is_by_heads and node.name not in self._region_of:
                readers = [user.name for user in node.users if user.name in self._computed]
                if any(
                    (self._region_of.get(name), node.name) in self._sliced or name in found
                    for name in readers
                ):
                    found.add(node.name)
                    yield node.name

    def _here(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return a tensor as it is held."""
        spec = self._specs.get(source.name)
        is_own = source.name in self._computed or source in self._held
        if is_own or spec is None or not spec.requires_grad or reader is source:
            return self._copies[source]
        key = source, "entered"
        if key not in self._forms:
            args, name = (self._copies[source],), f"context_{source.name}_entered"
            value = source.meta["val"]
            self._forms[key] = self._add(entered(self._ranks), args, reader, name, source, value)
        return self._forms[key]

    def _changed(
        self, source: fx.Node, held: _Held | None, wanted: _Held | None, times: int, reader: fx.Node
    ) -> fx.Node:
        copy, base = self._here(source, reader), f"context_{source.name}"
        value: Tensor = copy.meta["val"]
        whole = list(source.meta["val"].shape)

        def put_in(target: Any, args: tuple[Any, ...], suffix: str, how: _Held | None) -> fx.Node:
            shape = list(whole)
            if how is not None:
                shape[how.axis] = how.size(self._ranks)
            return self._add(target, args, reader, f"{base}_{suffix}", source, value.new_empty(shape))

        if times > 1:
            assert wanted is not None
            whole[wanted.axis] *= times
            copy = put_in(aten.repeat_interleave.self_int, (copy, times, wanted.axis), f"{times}_times", held)
            base = f"{base}_{times}"
        if held is not None and wanted is not None and held.axis != wanted.axis:
            if held.samples is None and wanted.samples is None:
                made = exchanged(self._ranks, (held.axis, wanted.axis))
                args = (copy, held.given_length)
                return put_in(made, args, f"exchanged_{wanted.axis}", wanted)
        if held is not None:
            key = source, None if times == 1 else ("whole", times)
            if key not in self._forms:
                given = (copy, held.given_length, argument_of(held.samples))
                self._forms[key] = put_in(gathered(self._ranks, held.axis), given, "whole", None)
            copy = self._forms[key]
        if wanted is None:
            return copy
        suffix = f"{'own' if wanted.samples is None else 'rows'}_{wanted.axis}"
        args = (copy, argument_of(wanted.samples))
        return put_in(own(self._ranks, wanted.axis), args, suffix, wanted)


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta["val"]
    return [value] if isinstance(value, Tensor) else list(value)
