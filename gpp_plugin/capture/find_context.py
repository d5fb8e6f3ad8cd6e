"""Find what of a captured graph context ranks can compute on their parts of the positions (`ContextPart`).

    x ─ own ─► norm, linear ─► q, k, v of its positions ─ exchanged ─► attention of its heads ─ exchanged ─► linear ...

1. A cut begins at every linear operator whose operand has positions: the first axis that is not the samples', or rows
   made of both. From there it is followed through all readers by `axis_rules`.
2. Attention takes in all positions of its heads. Heads stay cut until an operator cannot compute on them.
3. Backwards: an operator that is whole, and whose readers all read it in one and the same cut, is cut so itself.
4. What has no rule reads whole tensors, and its result is whole.

Any choice of these is exact, as tensors are made whole, or put in parts, where an operator wants them otherwise; so
nothing depends on what an axis means, but for what is sent.

Source: DeepSpeed-Ulysses (arXiv 2309.14509)
Tests: tests/capture/test_context.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gpp_plugin.capture.axis_rules import (
    AxisCut,
    NeedsParts,
    NotSharded,
    OperandReads,
    Rule,
    argument,
    context_rule_of,
    flattened,
    is_part,
    rule_of,
    shape_of,
)
from gpp_plugin.capture.find_regions import as_linear
from gpp_plugin.capture.layout_rules import Rows, State, Whole
from gpp_plugin.capture.tracing.clean import (
    module_path,
    updates_alone,
    written_arguments,
    written_for_others,
)
from gpp_plugin.ir.analysis import (
    HEADS,
    MAX_DEGREE,
    POSITIONS,
    ROWS,
    ContextCut,
    ContextPart,
    Sharding,
    WholeLinear,
    has_gradient,
)
from gpp_plugin.ir.block_graph import Block, BlockSharding, OpGraph, OpNode

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_ATTENTION = aten.scaled_dot_product_attention.default
_REPEATS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.contiguous.default,
    aten.unsqueeze.default, aten.expand.default, aten.repeat_interleave.self_int, aten.transpose.int,
    aten.permute.default, aten.clone.default,
)  # fmt: skip
"""Operators between groups of keys and the heads that read them."""
MAX_REPEATS = 6
_TURNS = (aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default)
_DROPS = (_ATTENTION, aten.dropout.default, aten.feature_dropout.default)
"""Operators that draw random numbers, for each element that they read."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a tensor is cut: by heads, or by positions (rows have those of several samples, one behind the other)."""

    is_heads: bool
    axis: int
    parts: tuple[int, ...]

    def as_data(self) -> ContextCut:
        kind = HEADS if self.is_heads else ROWS if len(self.parts) > 1 else POSITIONS
        return ContextCut(kind=kind, axis=self.axis)


@dataclass(slots=True, kw_only=True)
class _Part:
    """An operator on parts: how its result is cut (None: summands), and what it reads in parts."""

    result: _Cut | None
    operands: dict[fx.Node, _Cut]
    sums: str = ""
    heads: int = 0
    groups: dict[fx.Node, int] = field(default_factory=dict)


class _Reads(OperandReads):
    """What one operator reads: any operand may be had whole, or in parts."""

    __slots__ = ()

    def get(self, operand: object) -> AxisCut | None:
        return self.cuts.get(operand)  # type: ignore[call-overload]

    def whole(self, operand: object) -> None:
        if isinstance(operand, fx.Node):
            if operand in self.sliced or operand in self.cuts:
                raise NotSharded("reads parts where it takes a whole")
            self.wholes[operand] = None

    def cut(self, operand: fx.Node, cut: AxisCut) -> None:
        known = self.cuts.get(operand) or self.sliced.get(operand)
        if known is not None and (known.axis, known.parts) != (cut.axis, cut.parts):
            raise NotSharded("reads parts of unlike axes")
        if operand in self.wholes:
            raise NotSharded("reads parts where it takes a whole")
        self.sliced[operand] = cut


def find_context(
    graph: fx.Graph,
    *,
    parameters: Mapping[str, str],
    called: Mapping[str, str],
    layouts: Mapping[str, State],
    num_samples: int,
) -> tuple[tuple[ContextPart, ...], tuple[WholeLinear, ...]]:
    """Return the operators that context ranks compute on parts, and the linear ones and attention that stay whole.

    Args:
        graph: with the sizes of one batch, of ``num_samples`` samples.
        parameters: placeholder -> parameter (not buffers).
        called: placeholder -> how parameters, buffers and inputs are known.
        layouts: where samples lie, by name.
    """
    search = _Search(graph, parameters, layouts, num_samples)
    search.run()

    def name(node: fx.Node) -> str:
        return called.get(node.name, node.name)

    parts = []
    for node in graph.nodes:
        part = search.parts.get(node)
        if part is None:
            continue
        parts.append(
            ContextPart(
                name=node.name,
                result=part.result.as_data() if part.result is not None else None,
                operands={name(each): cut.as_data() for each, cut in part.operands.items()},
                sums=part.sums,
                heads=(part.heads,) if part.heads else (),
                groups={name(each): number for each, number in part.groups.items()},
            )
        )
    # of a scan that is written out, one operator stands for all of its kind
    first = {
        (module_path(node), node if node in search.linears else node.target): (node, why)
        for node, why in reversed(search.whole.items())
        if node not in search.parts
    }
    uncut = [WholeLinear(name=node.name, reason=why) for node, why in reversed(first.values())]
    return tuple(parts), tuple(uncut)


class _Search:
    """Finds the parts of one graph."""

    def __init__(
        self,
        graph: fx.Graph,
        parameters: Mapping[str, str],
        layouts: Mapping[str, State],
        num_samples: int,
    ) -> None:
        self.graph, self.parameters, self.layouts = graph, parameters, layouts
        self.num_samples, self.written = num_samples, written_for_others(graph)
        known = ((node, _linear_operand(node, parameters)) for node in graph.nodes)
        self.linears = {node: operand for node, operand in known if operand is not None}
        self.parts: dict[fx.Node, _Part] = {}
        self.whole: dict[fx.Node, str] = {}

    def run(self) -> None:
        """Follow cuts forwards, then backwards, and drop those that nobody gains by."""
        for node in self.graph.nodes:
            if self._is_free(node):
                self._look_at(node)
        for node in reversed(self.graph.nodes):
            if node not in self.parts and self._is_free(node):
                self._look_back(node)
        for node in self.graph.nodes:
            if is_part(node) and node.args[0] not in self.parts:
                self.parts.pop(node, None)
        self._drop_useless()

    def _is_free(self, node: fx.Node) -> bool:
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        return (
            node.op == "call_function"
            and node not in self.written
            and (not written_arguments(node) or updates_alone(node))
            and (not is_drawn or node.target in _DROPS)
        )

    # ---- forwards ------------------------------------------------------------------------------

    def _look_at(self, node: fx.Node) -> None:
        if is_part(node):
            self._take_part(node)
            return
        try:
            if node in self.linears:
                self._look_at_linear(node)
            elif not self._look_at_attention(node):
                self._follow(node)
        except (NotSharded, NeedsParts) as error:
            where = module_path(node)
            self.whole[node] = f"{node.target}{f' at {where}' if where else ''} ({node.name}) {error}"

    def _take_part(self, node: fx.Node) -> None:
        source = node.args[0]
        part = self.parts.get(source) if isinstance(source, fx.Node) else None
        if part is not None and part.result is not None:
            assert isinstance(source, fx.Node)
            self.parts[node] = _Part(result=part.result, operands={source: part.result}, heads=part.heads)

    def _state(self, node: fx.Node) -> _Cut | None:
        part = self.parts.get(node)
        return None if part is None else part.result

    def _look_at_linear(self, node: fx.Node) -> None:
        operand = self.linears[node]
        state = self._state(operand)
        if state is None or state.is_heads or state.axis == len(shape_of(operand)) - 1:
            state = self._begin(operand)
        self._apply(node, context_rule_of(node), {operand: state})

    def _begin(self, operand: fx.Node) -> _Cut:
        """Return where the positions of a linear operator's operand lie."""
        shape, layout = shape_of(operand), self.layouts.get(operand.name)
        own = layout.axis if isinstance(layout, Rows) else 0
        if len(shape) > 2:
            for axis, size in enumerate(shape[:-1]):
                if axis != own and size > 1:
                    return _Cut(False, axis, (size,))
            raise NotSharded("reads one position")
        source = _rows_of(operand)
        if source is not None:
            samples, length = shape_of(source)[:2]
            if length > 1:
                return _Cut(False, 0, (length,) * samples)
            raise NotSharded("reads one position")
        if isinstance(layout, Rows) and layout.outer > 1:
            raise NotSharded("reads rows of all samples of one position after the other")
        is_packed = isinstance(layout, Rows) and layout.axis == 0 and layout.rows > 1
        is_packed |= isinstance(layout, Whole) and shape[0] not in (1, self.num_samples)
        if len(shape) < 2 or not is_packed:
            raise NotSharded("reads one row of each sample")
        return _Cut(False, 0, (shape[0],))

    def _look_at_attention(self, node: fx.Node) -> bool:
        """Have attention, or the products that it is made of, read all positions of some heads."""
        if node.target is not _ATTENTION and not (node.target in _PRODUCTS and self._is_of_heads(node)):
            return False
        query = node.args[0]
        assert isinstance(query, fx.Node)
        axis = self._heads_axis(query)
        if axis is None:
            if node.target is _ATTENTION and self._state(query) is None:
                raise NotSharded("has no axis of heads, and queries of no positions")
            return False
        try:
            self._apply(node, rule_of(node), {query: _Cut(True, axis, (shape_of(query)[axis],))})
        except NotSharded:
            return False
        part = self.parts[node]
        for operand, cut in list(part.operands.items()):
            self._read_groups(operand, cut)
            number = shape_of(operand)[cut.axis]
            if node.target is _ATTENTION and operand in node.args[1:3] and number != shape_of(query)[axis]:
                part.groups[operand] = number
        return True

    def _is_of_heads(self, node: fx.Node) -> bool:
        # scores of queries and keys, both cut by positions; weights, cut by heads, and values; or all of them whole
        operands = [each for each in node.args[:2] if isinstance(each, fx.Node)]
        if len(operands) < 2 or any(
            each.name in self.parameters or len(shape_of(each)) < 3 for each in operands
        ):
            return False
        states = [self._state(each) for each in operands]
        if any(state is not None and state.is_heads for state in states):
            return True
        return len({state is None for state in states}) == 1

    def _heads_axis(self, query: fx.Node) -> int | None:
        shape, layout = shape_of(query), self.layouts.get(query.name)
        axis = len(shape) - 3
        if axis < 0 or shape[axis] < 2 or (isinstance(layout, Rows) and layout.axis == axis):
            return None
        return None if axis == 0 and isinstance(layout, Whole) else axis

    def _read_groups(self, operand: fx.Node, wanted: _Cut) -> None:
        """Have attention read groups of keys or values before they are repeated for the heads that share them."""
        # two groups [2, 2, 8, 8] ─ unsqueeze, expand, reshape ─► [2, 4, 8, 8]: what is exchanged is half the size
        size, chain, node = math.prod(shape_of(operand)), list[fx.Node](), operand
        while node.target in _REPEATS and len(node.users) == 1 and len(chain) < MAX_REPEATS:
            source = node.args[0]
            if not isinstance(source, fx.Node) or not self._is_free(node):
                return
            chain.append(node)
            node, shape = source, shape_of(source)
            axis = len(shape) - 3
            if (
                axis < 0
                or math.prod(shape) == size
                or math.prod(shape) * wanted.parts[0] != size * shape[axis]
            ):
                continue
            first = _Cut(True, axis, (shape[axis],))
            found = self._repeated(node, first, chain[::-1], wanted.parts[0])
            if found and found[chain[0]].result == wanted:
                self.parts |= found
                return

    def _repeated(
        self, source: fx.Node, cut: _Cut, chain: Sequence[fx.Node], heads: int
    ) -> dict[fx.Node, _Part]:
        """Return operators that repeat groups for so many heads, in order, as parts; empty where they cannot be."""
        found: dict[fx.Node, _Part] = {}
        for node in chain:
            try:
                made, _ = self._tried(node, rule_of(node), {source: cut})
            except (NotSharded, NeedsParts):
                return {}
            if not isinstance(made, AxisCut):
                return {}
            groups = {source: cut.parts[0]} if cut.parts[0] != heads else {}
            operands, result = {source: cut}, _Cut(True, made.axis, made.parts)
            found[node] = _Part(result=result, operands=operands, heads=heads, groups=groups)
            source, cut = node, result
        return found

    def _follow(self, node: fx.Node) -> None:
        """Have an operator compute on parts where it reads any.

        Raises:
            NotSharded, NeedsParts: it cannot.
        """
        reasons = list[Exception]()
        states = {each: state for each in node.all_input_nodes if (state := self._state(each)) is not None}
        for is_heads, rule_for in ((False, context_rule_of), (True, rule_of)):
            own = {each: state for each, state in states.items() if state.is_heads == is_heads}
            if node.target in (*_PRODUCTS, _ATTENTION) and not is_heads and node.args[0] in own:
                own = {each: state for each, state in own.items() if each is node.args[0]}
            try:
                if own:
                    self._apply(node, rule_for(node), own)
                    return
            except (NotSharded, NeedsParts) as error:
                if not is_heads and self._sum(node, own):
                    return
                reasons.append(error)
        if reasons:
            raise reasons[0]

    def _sum(self, node: fx.Node, states: Mapping[fx.Node, _Cut]) -> bool:
        """Take a sum over what is cut: of each rank's own, then of all."""
        operand = node.args[0]
        if node.target not in (aten.sum.default, aten.sum.dim_IntList) or operand not in states:
            return False
        assert isinstance(operand, fx.Node)
        self.parts[node] = _Part(result=None, operands={operand: states[operand]}, sums="sum")
        return True

    def _tried(
        self, node: fx.Node, rule: Rule, known: Mapping[fx.Node, _Cut]
    ) -> tuple[AxisCut | Sequence[AxisCut], _Reads]:
        reads = _Reads(
            parameters=self.parameters,
            cuts={each: AxisCut(cut.axis, cut.parts, each) for each, cut in known.items()},
        )
        return rule(node, reads), reads

    def _apply(self, node: fx.Node, rule: Rule, known: Mapping[fx.Node, _Cut]) -> None:
        """Have an operator compute on parts of what is known to be cut.

        Raises:
            NotSharded, NeedsParts: it cannot.
        """
        made, reads = self._tried(node, rule, known)
        cuts = [made] if isinstance(made, AxisCut) else list(made)
        is_heads = any(cut.is_heads for cut in known.values())
        results = {_Cut(is_heads, cut.axis, cut.parts) for cut in cuts}
        if len(results) != 1:
            raise NotSharded("makes parts of unlike axes")
        (result,) = results
        sizes = {size for cut in known.values() for size in cut.parts}
        read = {each: known[each] for each in node.all_input_nodes if each in known}
        read |= {each: _Cut(is_heads, cut.axis, cut.parts) for each, cut in reads.sliced.items()}
        if any(read.get(each) != self._state(each) for each in written_arguments(node)):
            raise NotSharded("writes into its operand, which is held otherwise")
        if set(result.parts) != sizes or (is_heads and len(result.parts) > 1):
            raise NotSharded("changes the sizes of what is cut")
        self.parts[node] = _Part(result=result, operands=read, heads=result.parts[0] if is_heads else 0)
        if node.target is aten.cross_entropy_loss.default:
            kind = argument(node, 3, "reduction", 1)
            if kind:
                self.parts[node] = _Part(result=None, operands=read, sums="mean" if kind == 1 else "sum")

    # ---- backwards -----------------------------------------------------------------------------

    def _look_back(self, node: fx.Node) -> None:
        """Cut an operator that all read in one and the same cut."""
        wanted = {self.parts[user].operands.get(node) if user in self.parts else None for user in node.users}
        if len(wanted) != 1:
            return
        (cut,) = wanted
        if cut is None:
            return
        if is_part(node):
            # all results of one operator: cut together, or not at all (see below)
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self.parts[node] = _Part(
                result=cut, operands={source: cut}, heads=cut.parts[0] if cut.is_heads else 0
            )
            return
        if any(user in self.parts and self.parts[user].groups.get(node) for user in node.users):
            return
        for known in self._operand_cuts(node, cut):
            try:
                self._apply(node, rule_of(node) if cut.is_heads else context_rule_of(node), known)
            except (NotSharded, NeedsParts):
                continue
            if self.parts[node].result == cut:
                self.whole.pop(node, None)
                return
            del self.parts[node]

    def _operand_cuts(self, node: fx.Node, cut: _Cut) -> Iterator[dict[fx.Node, _Cut]]:
        """Yield cuts of an operator's operands, one of each, that its result may be cut by."""
        for operand in node.all_input_nodes:
            if not isinstance(operand.meta.get("val"), torch.Tensor):
                continue
            shape = shape_of(operand)
            for axis, size in enumerate(shape):
                for parts in dict.fromkeys((cut.parts, cut.parts[:1])):
                    if size == sum(parts):
                        yield {operand: _Cut(cut.is_heads, axis, parts)}

    def _drop_useless(self) -> None:
        """Make whole again what is only read whole, and is made of wholes, or of less than it is."""
        # a scan reads exp(mul(times, rates)) at one position after the other: times, a sixteenth of it, are gathered
        for node in reversed(self.graph.nodes):
            chain, sources = list[fx.Node](), [node]
            while (
                len(sources) == 1 and _bytes(sources[0]) == _bytes(node) and self._is_light(sources[0], chain)
            ):
                chain.append(sources[0])
                sources = [each for each in self.parts[chain[-1]].operands if self._state(each) is not None]
            if chain and sum(map(_bytes, sources)) < _bytes(node):
                for each in chain:
                    del self.parts[each]

    def _is_light(self, node: fx.Node, readers: Sequence[fx.Node]) -> bool:
        """Return whether an operator on parts costs little, and nothing but some readers wants it in parts."""
        is_costly = node in self.linears or node.target is _ATTENTION or node.target in _PRODUCTS
        if node not in self.parts or self.parts[node].sums or is_costly or is_part(node):
            return False
        return all(
            user in readers or user not in self.parts or node not in self.parts[user].operands
            for user in node.users
        )


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _linear_operand(node: fx.Node, parameters: Mapping[str, str]) -> fx.Node | None:
    """Return what a linear operator reads, by a parameter or a transposed one; None of another."""
    linear = as_linear(node, parameters)
    if linear is not None or node.target not in (aten.matmul.default, aten.mm.default):
        return None if linear is None else linear.operand
    operand, weight = node.args[:2]
    is_turned = isinstance(weight, fx.Node) and weight.target in _TURNS
    is_own = is_turned and all(each.name in parameters for each in weight.all_input_nodes)  # type: ignore[union-attr]
    return operand if is_own and isinstance(operand, fx.Node) else None


def _rows_of(node: fx.Node) -> fx.Node | None:
    """Return what the rows of an operand are made of: [2, 5, 32] of [10, 32]; None where they are not."""
    number = shape_of(node)[0]
    for _ in range(MAX_REPEATS):
        source = flattened(node) if node.op == "call_function" else None
        if source is not None:
            return source
        before = [
            each
            for each in node.all_input_nodes
            if isinstance(each.meta.get("val"), torch.Tensor) and shape_of(each)[:1] == (number,)
        ]
        if len(before) != 1 or len(shape_of(before[0])) != 2:
            return None
        node = before[0]
    return None


# What context ranks divide of each block, in numbers: shares of its costs, and the bytes that they send each other.

MAX_WITHOUT_HEADS = 64
"""The largest context size that is named for blocks of a model without heads: any divides them."""
_LOSS_SUM_BYTES = 16


def block_contexts(graph: OpGraph, sharding: Sharding, blocks: Sequence[Block]) -> tuple[BlockSharding, ...]:
    """Return what context ranks divide of blocks, and what they send each other, if all blocks are so divided.

    Args:
        graph: its sizes are those of the result.
    """
    # A block without heads can be divided by any number: it has the degrees of those that it reads parts of, or that
    # read its parts. So has one that computes nothing on parts, but makes wholes of them.
    parts = {part.name: part for part in sharding.context}
    home = {name: block.name for block in blocks for name in block.nodes}
    read = {node.name: node.inputs for node in graph.nodes}
    heads = {
        block.name: math.gcd(*(n for name in block.nodes if name in parts for n in parts[name].heads))
        for block in blocks
        if any(not parts.keys().isdisjoint((name, *read[name])) for name in block.nodes)
    }
    beside: dict[str, set[str]] = {name: set() for name in heads}
    for name in home:
        for source in read[name]:
            pair = home.get(name, ""), home.get(source, "")
            if source in parts and pair[0] != pair[1] and heads.keys() >= set(pair):
                beside[pair[0]].add(pair[1])
                beside[pair[1]].add(pair[0])
    degrees = {
        name: frozenset(d for d in range(2, min(size, MAX_DEGREE) + 1) if size % d == 0)
        for name, size in heads.items()
        if size
    }
    if not degrees:
        degrees = dict.fromkeys(heads, frozenset(range(2, MAX_WITHOUT_HEADS + 1)))
    missing = [name for name in heads if name not in degrees]
    while missing:
        near = {
            name: [degrees[other] for other in beside[name] if other in degrees]
            for name in missing
            if not degrees.keys().isdisjoint(beside[name])
        }
        every = [frozenset[int]().union(*degrees.values())]
        degrees |= {
            name: frozenset[int]().union(*found)
            for name, found in (near or dict.fromkeys(missing, every)).items()
        }
        missing = [name for name in missing if name not in degrees]
    make = _ContextCosts(graph, parts)
    return tuple(
        make.of(block, tuple(sorted(degrees[block.name]))) for block in blocks if degrees.get(block.name)
    )


class _ContextCosts:
    """Adds up what context ranks divide of single blocks, and what they send each other there."""

    def __init__(self, graph: OpGraph, parts: Mapping[str, ContextPart]) -> None:
        self.graph, self.parts = graph, parts
        self.nodes = {node.name: node for node in graph.nodes}
        specs = [*graph.inputs, *(node.output for node in graph.nodes if node.output is not None)]
        self.bytes = {spec.name: spec.bytes_for(graph.num_samples) for spec in specs}
        self.bytes |= {name: p.bytes for p in graph.parameters for name in (p.name, *p.aliases)}
        self.readers: dict[str, list[str]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self.readers.setdefault(name, []).append(node.name)

    def of(self, block: Block, degrees: tuple[int, ...]) -> BlockSharding:
        """Return what is divided of a block."""
        own = [self.nodes[name] for name in block.nodes]
        cut = [node for node in own if node.name in self.parts]
        flops = sum(node.flops for node in cut)
        saved = sum(size for node in own for maker, size in node.keeps if self._keeps_part(node, maker))
        saved += sum(node.kept_inside_bytes for node in cut)
        summed = {
            node.name: _LOSS_SUM_BYTES if part.sums == "mean" else self.bytes[node.name]
            for node in cut
            if (part := self.parts[node.name]).sums
        }
        gathers, exchanges, groups = self._changes(own)
        outputs = [name for name in self.graph.outputs.values() if name in block.nodes and self._held(name)]
        gathers += [name for name in outputs if name not in gathers]
        inside = frozenset(block.nodes)
        with_gradient = [name for name in gathers if name not in outputs and self._has_gradient(name)]
        exchanged = [name for name in exchanges if self._has_gradient(name)]
        losses = [size for name, size in summed.items() if self._has_gradient(name)]
        return BlockSharding(
            block=block.name,
            degrees=degrees,
            flop_share=min(flops / block.flops, 1.0) if block.flops else 0.0,
            parameter_bytes=0,
            trainable_bytes=0,
            saved_share=min(saved / block.saved_bytes, 1.0) if block.saved_bytes else 0.0,
            forward_sums=len(summed),
            forward_sum_bytes=sum(summed.values()),
            backward_sums=len(losses),
            backward_sum_bytes=sum(losses),
            forward_gathers=len(gathers),
            forward_gather_bytes=sum(self.bytes[name] for name in gathers),
            backward_gathers=len(with_gradient),
            backward_gather_bytes=sum(self.bytes[name] for name in with_gradient),
            forward_exchanges=len(exchanges),
            forward_exchange_bytes=sum(self.bytes[name] for name in exchanges),
            backward_exchanges=len(exchanged),
            backward_exchange_bytes=sum(self.bytes[name] for name in exchanged),
            groups=math.gcd(*groups.values()),
            group_bytes=sum(self.bytes[name] for name in groups),
            twice_bytes=self._twice(cut),
            cut_results=tuple(
                node.name
                for node in cut
                if (held := self._held(node.name)) is not None
                and held.kind == POSITIONS
                and not inside.issuperset(self.readers.get(node.name, ()))
            ),
        )

    def _held(self, name: str) -> ContextCut | None:
        part = self.parts.get(name)
        return None if part is None else part.result

    def _has_gradient(self, name: str) -> bool:
        return has_gradient(self.graph, self.nodes, name)

    def _changes(self, own: Sequence[OpNode]) -> tuple[list[str], list[str], dict[str, int]]:
        """Return what a block gathers, and exchanges, tensor by tensor; of groups among these, how many there are."""
        # each form of a tensor is made once, however many read it
        gathers, exchanges = dict[tuple[str, ContextCut | None], None](), dict[tuple[str, ContextCut], None]()
        groups: dict[str, int] = {}
        for node in own:
            part = self.parts.get(node.name)
            for name in node.inputs:
                held, wanted = self._held(name), None if part is None else part.operands.get(name)
                if held is None or held == wanted or name not in self.bytes:
                    continue
                if (
                    wanted is None
                    or HEADS not in (held.kind, wanted.kind)
                    or ROWS in (held.kind, wanted.kind)
                ):
                    gathers[name, None] = None
                    continue
                exchanges[name, wanted] = None
                if part is not None and name in part.groups:
                    groups[name] = part.groups[name]
        return [name for name, _ in gathers], [name for name, _ in exchanges], groups

    def _keeps_part(self, node: OpNode, maker: str) -> bool:
        """Return whether a rank keeps its part alone of a storage that an operator keeps."""
        if node.name not in self.parts:
            return False
        operands = self.parts[node.name].operands
        read = [name for name in node.inputs if maker in (name, self._storage(name))]
        return all(name in operands for name in read) if read else self._held(node.name) is not None

    def _twice(self, cut: Sequence[OpNode]) -> int:
        """Return the bytes of what operators keep by heads and by positions: a storage counts once a further form."""
        forms: dict[str, set[ContextCut]] = {}
        sizes: dict[str, int] = {}
        for node in cut:
            for maker, size in node.keeps:
                part = self.parts[node.name]
                read = [part.operands.get(name) for name in node.inputs if maker == self._storage(name)]
                of_kinds = forms.setdefault(maker, set())
                of_kinds.update(form for form in read or [part.result] if form is not None)
                sizes[maker] = size
        return sum(
            sizes[maker] * (len({form.kind == HEADS for form in found}) - 1)
            for maker, found in forms.items()
            if found
        )

    def _storage(self, name: str) -> str:
        node = self.nodes.get(name)
        return name if node is None else node.storage or name
