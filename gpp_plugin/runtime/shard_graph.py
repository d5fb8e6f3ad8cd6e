"""A captured graph as one of a stage's tensor ranks computes it.

A graph has regions on a rank's own parts, and sums where they end. Between regions, operators that treat positions
alike compute on a part of them (`SequencePart`):

    captured                            rank 0 of 2
    x [2, 5, 32]                        x in parts of 2 and 3 positions
    h = norm(x)                         h = norm(x)                on its part; the weight's gradient: once a step
                                        s = shared(h, 5)           the whole; backward: the sum at each rank's positions
    q = linear(h, wq)                   q = linear(s, wq)          wq is this rank's rows
    v = view(q, [2, 5, 4, 8])           v = view(q, [2, 5, 2, 8])
    o = linear(a, wo, bo)               p = linear(a, wo)          wo is this rank's columns
                                        t = scattered(p)           the sum at its positions
                                        o = add(t, bo)
    y = select(o, 1, 0)                 g = gathered(o, 5)         for what no rule allows on parts
                                        y = select(g, 1, 0)

Where what is read is whole (a stage's input), `own_positions` takes the part. A tensor that several regions read, or
others too, is made whole once. So is what leaves the stage. A gathered input of linear operators is not kept for their
weights' gradients: its parts are, and are gathered again.

Operators keep their names; what is put between them is marked (`ADDED`) and belongs to the block of its neighbour.

Source: Megatron-LM (arXiv 1909.08053), section 3; sequence parallelism (arXiv 2205.05198), section 4.2.2
Tests: tests/runtime/test_shard_graph.py, tests/integrations/test_captured_tensor.py
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gpp_plugin.capture.axis_rules import flattened
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.find_regions import as_linear, bias_of, sizes_of_part
from gpp_plugin.capture.layouts import is_random
from gpp_plugin.capture.tracing.clean import ADDED
from gpp_plugin.capture.tracing.symbolic_sizes import argument_of
from gpp_plugin.ir.analysis import SequencePart, ShardedRegion, TensorShard, sequence_in, without_half_cut
from gpp_plugin.ir.block_graph import OpNode
from gpp_plugin.runtime.context_ranks import IN_CONTEXT, STANDS_FOR
from gpp_plugin.runtime.tensor_ranks import (
    TensorOperator,
    TensorRanks,
    cross_entropy,
    drawn,
    embedded,
    gathered,
    joined,
    linear,
    own_positions,
    scattered,
    seeded,
    shared,
    summed,
)

aten = torch.ops.aten


def shard_graph(
    captured: CapturedGraph,
    regions: Sequence[ShardedRegion],
    ranks: TensorRanks,
    own: Sequence[str],
    *,
    sequence: Sequence[SequencePart] = (),
    outputs: Sequence[str] = (),
    context: TensorRanks | None = None,
    together: TensorRanks | None = None,
) -> tuple[CapturedGraph, dict[str, str], tuple[str, ...]]:
    """Return a capture whose regions compute on this rank's parts, what was put in, and where outputs are whole.

    Of each operator that was put in, the operator of the capture whose block it belongs to.

    Args:
        regions: those that are shared out; everything else is computed whole, or on parts of its positions.
        own: the operators that the rank computes.
        sequence: those outside of regions that compute on parts of the positions.
        outputs: operators whose results leave the stage.
        context: the context ranks, of a capture that is cut for one of them.
        together: all ranks of the same samples, where those are more than the tensor ranks.

    A parameter that is held in parts (`TensorRanks.parts`) and that nobody reads so here is joined: an evaluation may
    request a tensor inside of what was a region in training, a unit that lacks inputs has operators of its own. What is
    held whole is never cut.

    Raises:
        CaptureError: an operator's sizes are not what they were when the regions were found.
    """
    if ranks.parts is not None:
        held = ranks.parts
        fit = [r for r in regions if all(held.get(shard.name) == shard for shard in r.parameters)]
        regions = without_half_cut(regions, fit)
    parts = sequence_in(sequence, own, regions)
    writer = _Writer(captured, regions, ranks, frozenset(own), parts, frozenset(outputs))
    writer.context, writer.together = context, together or ranks
    graph = writer.write()
    # what of an operator that was put in is read is known of the operators beside it
    added = [OpNode(name=n, target="added", inputs=(), module="", output=None) for n in writer.added]
    op_graph = dataclasses.replace(captured.op_graph, nodes=(*captured.op_graph.nodes, *added))
    found = dataclasses.replace(captured, graph=graph, op_graph=op_graph)
    return found, writer.added, tuple(writer.whole_name(name) for name in outputs)


class _Writer:
    """Copies a graph node by node, and puts in what tensor ranks need."""

    def __init__(
        self,
        captured: CapturedGraph,
        regions: Sequence[ShardedRegion],
        ranks: TensorRanks,
        own: frozenset[str],
        sequence: Sequence[SequencePart],
        outputs: frozenset[str],
    ) -> None:
        self._captured = captured
        self._ranks = ranks
        self._region_of = {name: i for i, region in enumerate(regions) for name in region.operators}
        self._results = {result.name: result for region in regions for result in region.results}
        self._sums = {name for region in regions for name in region.sums}
        self._losses = {name for region in regions for name in region.losses}
        self._parameters = {shard.name: shard for region in regions for shard in region.parameters}
        self._shared = [frozenset(region.shared) for region in regions]
        self._sliced = [{shard.name: shard for shard in region.sliced} for region in regions]
        self._names = {**captured.inputs, **captured.parameters}
        # what context ranks hold in another way is read, and cut, as what it is made of
        for node in captured.graph.nodes:
            if STANDS_FOR in node.meta:
                source = node.meta[STANDS_FOR]
                self._names[node.name] = self._names.get(source, source)
        cut = {shard.name for region in regions for shard in region.parameters}
        self._joined = {name: shard for name, shard in (ranks.parts or {}).items() if name not in cut}
        self._own = own
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._whole: dict[fx.Node, fx.Node] = {}
        self._in_region: dict[tuple[int, fx.Node], fx.Node] = {}
        self._of_weights: dict[fx.Node, fx.Node] = {}
        self._number: fx.Node | None = None
        self._sequence = {part.name: part for part in sequence}
        self._joins = {part.joins: part for part in sequence if part.joins}
        self._outputs = outputs
        self._own_positions: dict[fx.Node, fx.Node] = {}
        self._gathered_by: dict[fx.Node, int | None] = {
            node: self._region_that_gathers(node)
            for node in captured.graph.nodes
            if node.name in self._sequence
        }
        self.added: dict[str, str] = {}
        self.context: TensorRanks | None = None
        self.together = ranks

    def _region_that_gathers(self, node: fx.Node) -> int | None:
        """Return the only region that reads the whole of an operator's result, which is in parts; None: several do.

        Or operators that all ranks run alike do, or nothing does (-1).
        """
        if node.name in self._outputs:
            return None
        found = set[int | None]()
        for user in node.users:
            if user.name not in self._own or user.name in self._sequence:
                continue
            readers = [user]
            if user.name not in self._region_of and flattened(user) is node:
                readers = [each for each in user.users if each.name in self._own]
                readers = readers if user.name not in self._outputs else [user]
            source = user if readers != [user] else node
            for reader in readers:
                region = self._region_of.get(reader.name)
                shards, is_shared = {}, False
                if region is not None:
                    shards, is_shared = self._sliced[region], source.name in self._shared[region]
                found.add(region if is_shared and source.name not in shards else None)
        return None if len(found) > 1 else next(iter(found), -1)

    def whole_name(self, name: str) -> str:
        """Return what the copy calls the whole of an operator's result."""
        whole = {node.name: copy.name for node, copy in self._whole.items()}
        return whole.get(name, name)

    def write(self) -> fx.Graph:
        """Return the copy."""
        for place, node in enumerate(self._captured.graph.nodes):
            copy = self._copies[node] = self._copy(node, place)
            assert copy.name == node.name, f"{node.name} became {copy.name}"
            shard = self._joined.get(self._captured.parameters.get(node.name, ""))
            readers = [user for user in node.users if user.name in self._own] if shard is not None else []
            if shard is not None and readers:
                whole = joined(self._ranks, shard)
                self._whole[node] = self._add(whole, (copy,), readers[0], f"tensor_{node.name}_joined", node)
            if self._gathered_by.get(node, -1) is None:
                part = self._sequence[node.name]
                made = gathered(self._ranks, part.axis)
                args = (copy, argument_of(node.meta["val"].shape[part.axis]))
                self._whole[node] = self._add(made, args, node, f"tensor_{node.name}_whole", node)
        return self._graph

    def _copy(self, node: fx.Node, place: int) -> fx.Node:
        # Outside of regions a node is copied as it is, unless it draws: then it draws what all ranks draw. Inside it
        # reads what the region has of its operands (`_operand`), and takes the sizes of its part (`_local`).
        region = self._region_of.get(node.name)
        is_random_here = node.op == "call_function" and node.name in self._own and is_random(node)
        part = self._sequence.get(node.name)
        if part is not None and part.joins:
            return self._positions_of_sum(node, part)
        gathering = self._flat_region(node) if region is None else None
        if gathering is not None:
            return self._flat(gathering, node)
        if region is None and part is None and not is_random_here:
            return self._graph.node_copy(node, self._read)
        number = self._drawn(node) if is_random_here else None

        def operand(source: fx.Node) -> fx.Node:
            if part is not None:
                return self._at_positions(part, source, node)
            return self._read(source) if region is None else self._operand(region, source, node)

        if node.name in self._sums:
            return self._summed(node, operand)
        args: Any = fx.map_arg(node.args, operand)
        kwargs: Any = fx.map_arg(node.kwargs, operand)
        shard = self._results.get(node.name)
        target: Any = node.target
        if node.name in self._losses:
            logits: Any = node.args[0]
            columns = self._results[self._names.get(logits.name, logits.name)]
            target = cross_entropy(self._ranks, self._first_of(columns))
            if isinstance(node.target, TensorOperator) and node.target.around is not None:
                target = node.target.around(target)  # of the losses of a context rank's positions
        if shard is not None:
            args = sizes_of_part(node, shard.axis, self._ranks.size, args)
        if number is not None:
            assert callable(target)
            device = self._captured.device
            is_part = shard is not None or part is not None
            context = self.context if IN_CONTEXT in node.meta else None
            target = seeded(target, self._ranks, device, place=place, is_part=is_part, context=context)
            args = (number, *args)
        if node in self._of_weights:
            place = next(i for i, each in enumerate(node.args) if str(each) not in self._captured.parameters)
            target, args = linear(target, place), (self._of_weights[node], *args)
        copy = self._graph.create_node(node.op, target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _read(self, source: fx.Node) -> fx.Node:
        return self._whole.get(source) or self._copies[source]

    # ---- what is put in ------------------------------------------------------------------------

    def _add(
        self, target: Any, args: tuple[Any, ...], beside: fx.Node, name: str, value: fx.Node | None
    ) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, {}, name=name)
        node.meta = {} if value is None else {k: v for k, v in value.meta.items() if k == "val"}
        node.meta[ADDED] = True
        self.added[node.name] = beside.name
        return node

    def _operand(self, region: int, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return what an operator of a region reads in the place of another's result."""
        copy = self._read(source)
        name = self._names.get(source.name, source.name)
        shard = self._sliced[region].get(name)
        is_shared = name in self._shared[region]
        if shard is None and not is_shared:
            return copy
        # Once a region: q, k and v read one copy of the hidden states, whose gradients are added up here, by autograd,
        # before they are summed over the ranks: one all-reduce for the three.
        if (region, source) not in self._in_region:
            base = f"tensor_{source.name}_{region}"
            if is_shared and self._gathered_by.get(source, -1) == region:
                copy = self._share(region, source, self._copies[source], reader, base, positions=source)
            elif is_shared:
                copy = self._share(region, source, copy, reader, base)
            if shard is not None:
                copy = self._part(shard, copy, reader, base, source)
            self._in_region[region, source] = copy
        return self._in_region[region, source]

    def _share(
        self,
        region: int,
        source: fx.Node,
        copy: fx.Node,
        beside: fx.Node,
        base: str,
        *,
        positions: fx.Node | None = None,
    ) -> fx.Node:
        # ``positions``: the operator whose result is in parts, of which the region reads the whole
        own = (user for user in source.users if self._region_of.get(user.name) == region)
        found = (as_linear(user, self._captured.parameters) for user in own)
        linears = [
            f for f in found if f and f.operand is source and self._names[f.weight.name] in self._parameters
        ]
        given = [None if n is None else self._read(n) for f in linears for n in (f.weight, f.bias)]
        axis, length = 0, None
        if positions is not None:
            axis = self._sequence[positions.name].axis
            length = argument_of(positions.meta["val"].shape[axis])
        columns, is_flat = tuple(f.columns for f in linears), positions not in (None, source)
        target = shared(self._ranks, columns, axis=axis, is_flat=is_flat)
        made = self._add(target, (copy, length, *given), beside, f"{base}_sharing", None)
        for number, each in enumerate(linears, start=1):
            name = f"{base}_weights_{number}"
            self._of_weights[each.node] = self._add(operator.getitem, (made, number), beside, name, None)
        if is_flat:
            last = self._graph.create_node("call_function", operator.getitem, (made, 0), name=source.name)
            last.meta = dict(source.meta)
            return last
        return self._add(operator.getitem, (made, 0), beside, f"{base}_shared", source)

    # ---- parts of positions ----------------------------------------------------------------------

    def _at_positions(self, part: SequencePart, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return what an operator that computes on parts of the positions reads in the place of a result."""
        name = self._names.get(source.name, source.name)
        if name not in part.operands:
            if name not in part.shared:
                return self._read(source)
            key = -1, source
            if key not in self._in_region:
                base = f"tensor_{source.name}_alike"
                made = self._add(
                    shared(self._ranks), (self._read(source), None), reader, f"{base}_sharing", None
                )
                self._in_region[key] = self._add(operator.getitem, (made, 0), reader, base, source)
            return self._in_region[key]
        if source.name in self._sequence:
            return self._copies[source]
        if source not in self._own_positions:
            target = own_positions(self._ranks, part.operands[name])
            args = (self._read(source),)
            self._own_positions[source] = self._add(target, args, reader, f"tensor_{source.name}_own", source)
        return self._own_positions[source]

    def _flat_region(self, node: fx.Node) -> int | None:
        """Return the region that alone reads rows which an operator makes of parts of positions."""
        source = flattened(node) if node.op == "call_function" and node.name in self._own else None
        if source is None or node.name in self._outputs:
            return None
        region = self._gathered_by.get(source, -1)
        return None if region is None or region < 0 else region

    def _flat(self, region: int, node: fx.Node) -> fx.Node:
        source: Any = node.args[0]
        base, copy = f"tensor_{node.name}_{region}", self._copies[source]
        made = self._share(region, node, copy, node, base, positions=source)
        self._in_region[region, node] = made
        return made

    def _positions_of_sum(self, node: fx.Node, part: SequencePart) -> fx.Node:
        """Return the sum of a region's results at this rank's positions, with the bias added there."""
        region = self._region_of[part.joins]
        source = node if node.name == part.joins else node.all_input_nodes[0]
        product = self._copies.get(source)
        if product is None:
            product = self._product(node, lambda each: self._operand(region, each, node), name="")
        else:
            args = (product, *node.args[1:])
            product = self._add(node.target, args, node, f"tensor_{node.name}_product", node)
        bias = bias_of(source)
        total = scattered(self._ranks, part.axis)
        if bias is None:
            last = self._graph.create_node("call_function", total, (product,), {}, name=node.name)
        else:
            whole = self._add(total, (product,), node, f"tensor_{node.name}_sum", node)
            args = (whole, self._read(bias))
            last = self._graph.create_node("call_function", aten.add.Tensor, args, {}, name=node.name)
        last.meta = dict(node.meta)
        return last

    def _part(
        self, shard: TensorShard, whole: fx.Node, reader: fx.Node, base: str, value: fx.Node
    ) -> fx.Node:
        # context ranks may have left a part of the heads
        size = value.meta["val"].shape[shard.axis]
        if size != sum(shard.parts):
            parts = tuple(part * size // sum(shard.parts) for part in shard.parts)
            shard = dataclasses.replace(shard, parts=parts)
        rows = shard.rows(self._ranks.position, self._ranks.size)
        pieces = [
            self._add(
                aten.slice.Tensor,
                (whole, shard.axis, first, first + count),
                reader,
                f"{base}_part_{i}",
                value,
            )
            for i, (first, count) in enumerate(rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return self._add(aten.cat.default, (pieces, shard.axis), reader, f"{base}_parts", value)

    def _drawn(self, reader: fx.Node) -> fx.Node:
        if self._number is None:
            self._number = self._add(drawn(self.together), (), reader, "tensor_drawn", None)
        return self._number

    def _summed(self, node: fx.Node, operand: Any) -> fx.Node:
        """Return the sum of the ranks' products, with the bias added once."""
        # A bias is whole, and is added behind the sum: before it, each rank would add it once.
        if node.name in self._joins:  # its one reader sums
            return self._product(node, operand, name=node.name)
        product = self._product(node, operand, name="")
        bias = bias_of(node)
        total = summed(self._ranks)
        if bias is None:
            last = self._graph.create_node("call_function", total, (product,), {}, name=node.name)
        else:
            whole = self._add(total, (product,), node, f"tensor_{node.name}_sum", node)
            last = self._graph.create_node(
                "call_function", aten.add.Tensor, (whole, operand(bias)), {}, name=node.name
            )
        last.meta = dict(node.meta)
        return last

    def _product(self, node: fx.Node, operand: Any, *, name: str) -> fx.Node:
        """Return this rank's summand of the result of a region; under a name of its own by default."""
        target: Any = node.target
        if target is aten.embedding.default:
            table: Any = node.args[0]
            first = self._first_of(self._parameters[self._names[table.name]])
            args = (operand(table), operand(node.args[1]), *node.args[2:])
            target, suffix = embedded(first), "own"
        else:
            left, weight = node.args[1:] if target is aten.addmm.default else node.args[:2]
            args, suffix = (operand(left), operand(weight)), "product"
            target = aten.mm.default if target is aten.addmm.default else target
        if not name:
            return self._add(target, args, node, f"tensor_{node.name}_{suffix}", node)
        made = self._graph.create_node("call_function", target, args, {}, name=name)
        made.meta = dict(node.meta)
        return made

    def _first_of(self, shard: TensorShard) -> int:
        """Return the first row, or column, that this rank has of what is cut into one part a rank."""
        return shard.rows(self._ranks.position, self._ranks.size)[0][0]
