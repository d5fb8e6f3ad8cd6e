"""Find the regions of a captured graph that tensor ranks can share out (`ShardedRegion`).

Every linear operator is tried as the beginning of one: its weight cut by columns, what is cut is followed through all
its readers by `axis_rules`, until linear operators whose weights are cut by rows have taken all of it in. Where an
operator on the way needs another operand cut too, the linear operators that make that operand begin the region as well
(keys and values beside queries, ``up`` beside ``gate``); where none make it, each rank reads its part of the whole
tensor (a bias by heads). Where a linear operator's result is split (queries, keys and values of one weight) it is
cut part by part. What cannot be proven so stays whole, and the operator that is in the way is named.

A cross entropy takes in the logits of a vocabulary. Where the weight that makes them is the embedding's too, both are
cut by rows, or none is: what reads a parameter whole keeps everybody from cutting it.

Where a model brings a plan of its own (HuggingFace's ``base_model_tp_plan``), the linear operators that it cuts by
columns are tried first and those that it cuts by rows last: of several ways to share out a model its own is found.

Source: this project
Tests: tests/capture/test_sharding.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from gpp_plugin.capture.axis_rules import (
    FLATTENS,
    AxisCut,
    NeedsParts,
    NotSharded,
    OperandReads,
    argument,
    flattened,
    is_part,
    position_rule_of,
    rule_of,
    shape_of,
)
from gpp_plugin.capture.tracing.clean import module_path, written_arguments
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import (
    SequencePart,
    ShardedRegion,
    Sharding,
    TensorShard,
    WholeLinear,
)

aten = torch.ops.aten

MAX_TRIALS = 16
"""How often a region begins anew with further linear operators, or with other parts."""
VOCABULARY_STEP = 16
"""What divides a vocabulary that is cut: another one would keep the whole model from degrees that divide all else."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear operator: what it reads, and where its weight has inputs and outputs.

    Args:
        columns, rows: axes of the weight: of what it makes, and of what it reads.
        bias: None where it has none.
    """

    node: fx.Node
    operand: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    columns: int
    rows: int


def as_linear(node: fx.Node, parameters: Collection[str]) -> Linear | None:
    """Return an operator as a linear one with parameters for weights; None of another."""
    if node.target is aten.linear.default:
        operand, weight, bias = node.args[0], node.args[1], argument(node, 2, "bias")
        columns, rows = 0, 1
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, operand, weight = node.args
        columns, rows = 1, 0
    elif node.target in (aten.matmul.default, aten.mm.default):
        (operand, weight), bias = node.args, None
        columns, rows = 1, 0
    else:
        return None
    if not isinstance(operand, fx.Node) or not isinstance(weight, fx.Node) or weight.name not in parameters:
        return None
    if len(weight.meta["val"].shape) != 2 or (isinstance(bias, fx.Node) and bias.name not in parameters):
        return None
    return Linear(node, operand, weight, bias if isinstance(bias, fx.Node) else None, columns, rows)


MAX_STEPS_BACK = 48
"""How many operators are looked through for the linear ones that make an operand."""


class _NeedsLinears(Exception):
    """Further linear operators must be cut by columns."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        super().__init__()
        self.nodes = tuple(nodes)


class _InTheWay(Exception):
    """An operator that cannot compute on parts."""

    def __init__(self, node: fx.Node, why: str) -> None:
        where = module_path(node)
        super().__init__(f"{node.target}{f' at {where}' if where else ''} ({node.name}) {why}")


@dataclass(slots=True, kw_only=True)
class _Trial(OperandReads):
    """One attempt at a region.

    Args:
        begins: linear operators cut by columns, and their parts.
        linears: all linear operators of the graph.
        called: placeholder -> how parameters, buffers and inputs are known.
        needs_gradient: names of nodes and placeholders whose gradient is needed.
    """

    begins: Mapping[fx.Node, tuple[int, ...]]
    linears: Mapping[fx.Node, Linear]
    called: Mapping[str, str]
    needs_gradient: Collection[str]

    def run(self) -> None:
        """Follow what is cut through all its readers, in the graph's order.

        Raises:
            _InTheWay: an operator cannot compute on parts; `_NeedsLinears`, `NeedsParts`: another trial may.
        """
        # Nodes in order, from the first that begins the region to the last reader of anything that is cut: what lies
        # between and reads nothing that is cut is passed over. ``last`` moves on as readers are found:
        #
        #     q  view  k  view  v  view  attention  reshape  o | residual norm ...        begins q k v, ends with o
        node, last = min(self.begins), max(self.begins)
        while True:
            try:
                self._look_at(node)
            except NotSharded as error:
                raise _InTheWay(node, str(error)) from None
            for user in node.users if node in self.cuts or node in self.of_parts else ():
                if user.op != "call_function":
                    raise _InTheWay(node, "is a result of the model, which is whole")
                last = max(last, user)
            if node is last:
                return
            node = node.next

    def note_sliced(self, operand: fx.Node) -> None:
        """Refuse to read a part of what linear operators make that could begin the region too."""
        makers = [node for node in self._makers(operand) if node not in self.begins]
        if makers:
            raise _NeedsLinears(makers)

    def _makers(self, operand: fx.Node) -> list[fx.Node]:
        """Return the linear operators that make an operand, by operators that have rules."""
        # Backwards from the keys that attention reads beside cut queries: transpose, view, linear; the linear one is
        # what must begin the region too. A residual stream leads to many operators: after some steps it is abandoned,
        # and the trial continues as if no operator made the operand (each rank then reads its part of a whole tensor).
        found, pending, seen = [], [operand], {operand}
        while pending and len(seen) <= MAX_STEPS_BACK:
            node = pending.pop()
            if node in self.linears:
                found.append(node)
                continue
            if node.op != "call_function" or node in self.sums:
                continue
            try:
                is_part(node) or rule_of(node)
            except NotSharded:
                continue
            fresh = [source for source in node.all_input_nodes if source not in seen]
            seen.update(fresh)
            pending += fresh
        return found if len(seen) <= MAX_STEPS_BACK else []

    def _look_at(self, node: fx.Node) -> None:
        linear = self.linears.get(node)
        if node in self.begins:
            assert linear is not None
            if self.get(linear.operand) is not None:
                raise NotSharded("reads parts and would make parts")
            self._begin(linear, self.begins[node])
            return
        reads = [source for source in node.all_input_nodes if source in self.cuts or source in self.of_parts]
        if not reads:
            return
        if written_arguments(node):
            raise NotSharded("writes into its operand")
        if is_part(node):
            number: Any = node.args[1]
            self.cuts[node] = self.of_parts[reads[0]][number]
            return
        if linear is not None:
            self._take_in(linear)
            return
        if node.target is aten.cross_entropy_loss.default:
            self._take_logits(node)
            return
        found = rule_of(node)(node, self)
        if isinstance(found, AxisCut):
            self.cuts[node] = found
        else:
            self.of_parts[node] = list(found)

    def _begin(self, linear: Linear, parts: tuple[int, ...]) -> None:
        axis = len(shape_of(linear.node)) - 1
        self.cuts[linear.node] = cut = AxisCut(axis, parts, linear.node)
        self.cut(linear.weight, cut.at(linear.columns))
        if linear.bias is not None:
            self.cut(linear.bias, cut.at(0))
        self.whole(linear.operand)

    def _take_in(self, linear: Linear) -> None:
        """Have a linear operator read parts: of its features, then its results are summed; or of another axis."""
        found = self.get(linear.operand)
        if found is None:
            raise NotSharded("has parts for weights")
        if found.axis == len(shape_of(linear.operand)) - 1:
            self.cut(linear.weight, found.at(linear.rows))
            self.sums.append(linear.node)
            return
        self.whole(linear.weight)
        self.whole(linear.bias)
        self.cuts[linear.node] = found

    def _take_logits(self, node: fx.Node) -> None:
        """Have a cross entropy read parts of its classes."""
        logits, target = node.args[0], node.args[1]
        found, dims = self.get(logits), len(shape_of(logits))
        is_plain = argument(node, 2, "weight") is None and not argument(node, 5, "label_smoothing", 0.0)
        is_summed = argument(node, 3, "reduction", 1) in (1, 2)
        if found is None or found.axis != dims - 1 or len(found.parts) > 1:
            raise NotSharded("reads parts of what is no axis of classes")
        if not is_plain or not is_summed or dims != 2 or len(shape_of(target)) != 1:
            raise NotSharded("has weights, smoothed labels, no sum, or further axes")
        self.whole(target)
        self.losses.append(node)

    # ---- what came of it -----------------------------------------------------------------------

    def region(self) -> ShardedRegion:
        """Return the region.

        Raises:
            _InTheWay: nothing takes in what is cut.
        """
        first = min([*self.begins, *self.sums])
        if not self.sums and not self.losses:
            raise _InTheWay(first, "makes parts that no linear operator takes in")
        # 32 query heads, 8 groups, 11008 features: only what divides 8 divides all of them
        cuts = [*self.cuts.values(), *self.of_parameters.values(), *self.sliced.values()]
        size = math.gcd(*(part for cut in cuts for part in cut.parts))
        is_vocabulary = bool(self.losses) or not self.begins
        if is_vocabulary and size % VOCABULARY_STEP:
            pad = f"resize_token_embeddings(pad_to_multiple_of={VOCABULARY_STEP})"
            why = f"has a vocabulary of {size}, which {VOCABULARY_STEP} does not divide; {pad}"
            raise _InTheWay(first, why)
        if size < 2:
            raise _InTheWay(
                first, f"makes features that no number divides with what is made of them ({size})"
            )
        results = {**self.cuts, **{n: cuts[0].at(cuts[0].axis) for n, cuts in self.of_parts.items()}}
        read = [*self.wholes, *self.sliced]
        return ShardedRegion(
            size=size,
            results=tuple(_shard(node.name, cut) for node, cut in sorted(results.items())),
            parameters=tuple(_shard(self.parameters[n.name], cut) for n, cut in self.of_parameters.items()),
            sums=tuple(node.name for node in self.sums),
            losses=tuple(node.name for node in self.losses),
            shared=tuple(dict.fromkeys(self._name(n) for n in read if n.name in self.needs_gradient)),
            sliced=tuple(_shard(self._name(node), cut) for node, cut in self.sliced.items()),
        )

    def _name(self, node: fx.Node) -> str:
        return self.called.get(node.name, node.name)


def _shard(name: str, cut: AxisCut) -> TensorShard:
    return TensorShard(name=name, axis=cut.axis, parts=cut.parts)


def find_sharding(
    graph: fx.Graph,
    *,
    parameters: Mapping[str, str],
    called: Mapping[str, str],
    needs_gradient: Collection[str],
    styles: Mapping[str, str] = MappingProxyType({}),
) -> Sharding:
    """Return what of a captured graph tensor ranks can share out.

    Args:
        graph: with the sizes of one batch.
        parameters: placeholder -> parameter (not buffers).
        called: placeholder -> how parameters, buffers and inputs are known.
        needs_gradient: names of operators and placeholders whose results take a gradient.
        styles: the model's own plan: module path, with ``*`` for numbers -> ``colwise``, ``rowwise`` or the like.
    """
    # 1. Every linear operator that is in no region yet is tried as the beginning of one. Those that end regions are in
    #    one by the time they are met, as readers come after what they read (but see `_in_order`).
    # 2. Embeddings join those that share their weights with a head.
    # 3. A parameter that any reader takes whole is not cut: regions with it are dropped, which may make others
    #    lose theirs; so until nothing changes.
    known = ((node, as_linear(node, parameters)) for node in graph.nodes)
    linears = {node: linear for node, linear in known if linear is not None}
    make_trial = functools.partial(
        _Trial, linears=linears, parameters=parameters, called=called, needs_gradient=needs_gradient
    )
    found: list[tuple[ShardedRegion, _Trial]] = []
    whole: dict[fx.Node, str] = {}
    taken: set[fx.Node] = set()
    for node in _in_order(linears, styles):
        if node in taken:
            continue
        try:
            trial = _try(node, make_trial)
            region = trial.region()
        except _InTheWay as error:
            whole[node] = str(error)
            continue
        own = {*trial.cuts, *trial.of_parts, *trial.sums, *trial.losses}
        if not own.isdisjoint(taken):
            whole[node] = f"{node.target} ({node.name}) is in two regions"
            continue
        taken |= own
        found.append((region, trial))
    found += _embeddings(graph, found, make_trial, styles)
    regions = _without_half_cut(found, whole)
    divided = {name for region in regions for name in region.operators}
    left = tuple(WholeLinear(name=n.name, reason=why) for n, why in whole.items() if n.name not in divided)
    sequence = find_sequence_parts(graph, regions, parameters, called, needs_gradient)
    return Sharding(regions=tuple(regions), whole=left, sequence=sequence)


# Between two regions, operators that treat positions alike compute on parts of them (`SequencePart`).
#
#     o ─ reduce-scatter ─► [2, 5, 32] in parts of 2 and 3 positions ─► dropout, residual, norm ─ all-gather ─► up
#
# From the end of each region what is cut is followed through all its readers by `axis_rules`, along the second axis of
# three or more. An operator that no rule allows reads a whole, and so does what is behind it.


def joined_at(node: fx.Node) -> fx.Node | None:
    """Return where the result of a region has positions along its second axis: there, or in its one reader, a view."""
    # addmm [10, 32] of a GPT-2 is of no axis of positions: its view [2, 5, 32] is
    shape = shape_of(node)
    if len(shape) > 2:
        return node
    if len(shape) < 2 or len(node.users) != 1:
        return None
    (user,) = node.users
    if user.target not in FLATTENS[:3]:
        return None
    after = shape_of(user)
    return user if len(after) == 3 and after[-1] == shape[-1] else None


def find_sequence_parts(
    graph: fx.Graph,
    regions: Sequence[ShardedRegion],
    parameters: Mapping[str, str],
    called: Mapping[str, str],
    needs_gradient: Collection[str],
) -> tuple[SequencePart, ...]:
    """Return the operators outside of regions that compute on parts of the positions; arguments as `find_sharding`."""
    inside = {name for region in regions for name in region.operators}
    sums = {name for region in regions for name in region.sums}
    found: dict[fx.Node, tuple[AxisCut, OperandReads, fx.Node | None]] = {}
    cuts: dict[fx.Node, AxisCut] = {}
    joins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        end = joined_at(node) if node.name in sums else None
        if end is not None:
            joins[end] = node
    for node in graph.nodes:
        if node.op != "call_function" or any(node in written_arguments(user) for user in node.users):
            continue
        reads = OperandReads(parameters=parameters, cuts=cuts)
        try:
            if node in joins:
                cut = AxisCut(1, (shape_of(node)[1],), node)
                bias = bias_of(joins[node])
                reads.wholes |= {} if bias is None else {bias: None}
            elif node.name in inside or cuts.keys().isdisjoint(node.all_input_nodes):
                continue
            else:
                if written_arguments(node):
                    continue
                made = position_rule_of(node)(node, reads)
                if not isinstance(made, AxisCut) or reads.of_parameters:
                    continue
                cut = made
        except NotSharded:
            continue
        cuts[node] = cut
        found[node] = (cut, reads, joins.get(node))
    _drop_useless(found, parameters, needs_gradient)
    region_of = {name: i for i, region in enumerate(regions) for name in region.operators}
    read = [
        {called.get(n, n) for n in (*region.shared,)} - {shard.name for shard in region.sliced}
        for region in regions
    ]
    parts = []
    for node, own in found.items():
        whole = {
            (region, source.name) if region is not None and source.name in read[region] else None
            for source, region in _whole_readers(node, found, region_of)
        }
        (region_and_name,) = whole if len(whole) == 1 else (None,)
        part = _sequence_part(node, *own, parameters, called, needs_gradient)
        gathered = region_and_name[1] if region_and_name is not None else ""
        parts.append(dataclasses.replace(part, gathered=gathered, is_gathered=bool(whole) and not gathered))
    return tuple(parts)


def _whole_readers(
    node: fx.Node, parts: Collection[fx.Node], region_of: Mapping[str, int]
) -> Iterable[tuple[fx.Node, int | None]]:
    """Yield what operators read of a whole result (it, or rows made of it), and the region of each; None: in none."""
    for user in node.users:
        if user in parts:
            continue
        if user.name not in region_of and user.op == "call_function" and flattened(user) is node:
            for reader in user.users:
                yield user, region_of.get(reader.name)
        else:
            yield node, region_of.get(user.name)


def bias_of(node: fx.Node) -> fx.Node | None:
    """Return the bias of a linear operator."""
    bias = None
    if node.target is aten.addmm.default:
        bias = node.args[0]
    elif node.target is aten.linear.default:
        bias = argument(node, 2, "bias")
    return bias if isinstance(bias, fx.Node) else None


def _drop_useless(
    found: dict[fx.Node, tuple[AxisCut, OperandReads, fx.Node | None]],
    parameters: Mapping[str, str],
    needs_gradient: Collection[str],
) -> None:
    """Leave out what reads no part, results of regions that nobody reads parts of, and half readers of parameters."""
    # The gradient of a norm's weight is of the rank's positions alone, and is summed once a step. If another operator
    # reads the weight whole, its gradient is the same on all ranks: such a sum would count it once a rank.
    while True:
        readers = {each: own[2] or each for each, own in found.items()}
        of_parameters = set(readers.values())
        bad = []
        for node, (_, reads, join) in found.items():
            trained = [n for n in reads.wholes if n.name in parameters and n.name in needs_gradient]
            is_half = any(not of_parameters.issuperset(n.users) for n in trained)
            is_read = join is None or any(user in found for user in node.users)
            has_parts = join is not None or not found.keys().isdisjoint(node.all_input_nodes)
            if is_half or not is_read or not has_parts:
                bad.append(node)
        for node in bad:
            del found[node]
        if not bad:
            return


def _sequence_part(
    node: fx.Node,
    cut: AxisCut,
    reads: OperandReads,
    join: fx.Node | None,
    parameters: Mapping[str, str],
    called: Mapping[str, str],
    needs_gradient: Collection[str],
) -> SequencePart:
    def name(each: fx.Node) -> str:
        return called.get(each.name, each.name)

    of_cuts = {each: reads.cuts[each] for each in node.all_input_nodes if each in reads.cuts}
    whole = [each for each in reads.wholes if each.name in needs_gradient]
    return SequencePart(
        name=node.name,
        axis=cut.axis,
        operands={} if join else {name(n): c.axis for n, c in {**of_cuts, **reads.sliced}.items()},
        parameters=tuple(parameters[each.name] for each in whole if each.name in parameters),
        shared=tuple(name(each) for each in whole if each.name not in parameters),
        joins=join.name if join else "",
    )


def _embeddings(
    graph: fx.Graph,
    found: Iterable[tuple[ShardedRegion, _Trial]],
    make_trial: Callable[..., _Trial],
    styles: Mapping[str, str],
) -> list[tuple[ShardedRegion, _Trial]]:
    """Return embeddings by rows: of a weight that a head cuts so too, or where the plan of the model says so."""
    # Tables of positions or token types stay whole: they are small, and their sum would cost an all-reduce of all
    # hidden states. A vocabulary's embedding has to be cut where its head is.
    heads = {node for _, trial in found for node, cut in trial.of_parameters.items() if cut.axis == 0}
    regions = []
    for node in graph.nodes:
        if node.target is not aten.embedding.default:
            continue
        trial, weight = make_trial(begins={}), node.args[0]
        is_planned = "embedding_rowwise" in styles.get(module_path(node), "")
        is_plain = not any(argument(node, place, "", False) for place in (3, 4)) and not node.kwargs
        if weight.name not in trial.parameters or not is_plain or not (is_planned or weight in heads):
            continue
        trial.of_parameters[weight] = AxisCut(0, (shape_of(weight)[0],), node)
        trial.sums.append(node)
        with contextlib.suppress(_InTheWay):
            regions.append((trial.region(), trial))
    return regions


def _in_order(linears: Iterable[fx.Node], styles: Mapping[str, str]) -> list[fx.Node]:
    """Return linear operators as a plan tries them: by columns, then those that it does not name, then by rows."""

    def place(node: fx.Node) -> int:
        style = styles.get(re.sub(r"\b\d+\b", "*", module_path(node)), "")
        return 0 if "colwise" in style else 2 if "rowwise" in style else 1

    return sorted(linears, key=place)


def _try(node: fx.Node, make_trial: Callable[..., _Trial]) -> _Trial:
    begins: dict[fx.Node, tuple[int, ...]] = {node: (shape_of(node)[-1],)}
    # begins {q: (32,)}            attention: k and v are whole     -> again with k and v
    # begins {q, k, v}             all the way to o                 -> a region
    # begins {c_attn: (96,)}       split: 96 are 32, 32 and 32      -> again with parts (32, 32, 32)
    for _ in range(MAX_TRIALS):
        trial = make_trial(begins=begins)
        try:
            trial.run()
            return trial
        except _NeedsLinears as more:
            begins |= {other: (shape_of(other)[-1],) for other in more.nodes}
        except NeedsParts as split:
            # checkpoints have equal parts only (`saved_tensors.cut_shard`)
            if len(begins[split.origin]) > 1 or len(set(split.parts)) > 1:
                raise _InTheWay(split.origin, str(split)) from None
            begins[split.origin] = split.parts
    raise _InTheWay(node, "needs too many others to be cut with it")


def _without_half_cut(
    found: list[tuple[ShardedRegion, _Trial]], whole: dict[fx.Node, str]
) -> list[ShardedRegion]:
    """Return the regions whose parameters nobody reads whole, or cut in another way."""
    while True:
        cuts: dict[fx.Node, set[tuple[int, tuple[int, ...]]]] = {}
        readers: dict[fx.Node, set[fx.Node]] = {}
        for _, trial in found:
            for node, cut in trial.of_parameters.items():
                cuts.setdefault(node, set()).add((cut.axis, cut.parts))
                readers.setdefault(node, set()).update(trial.cuts, trial.of_parts, trial.sums, trial.losses)
        bad = {n for n, ways in cuts.items() if len(ways) > 1 or not readers[n].issuperset(n.users)}
        if not bad:
            return [region for region, _ in found]
        for _, trial in found:
            for node in bad.intersection(trial.of_parameters):
                reason = f"{trial.parameters[node.name]} is read whole by others too"
                whole[min([*trial.begins, *trial.sums])] = reason
        found = [each for each in found if bad.isdisjoint(each[1].of_parameters)]


# ---- sizes of parts --------------------------------------------------------------------------------

_SIZES_AT = {
    aten.view.default: 1,
    aten.reshape.default: 1,
    aten._unsafe_view.default: 1,
    aten.expand.default: 1,
}
"""Operators that take the sizes of their result, and the position of these among their arguments."""
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes)


def sizes_of_part(node: fx.Node, cut: int, degree: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an operator's arguments with the sizes that a part of its result has.

    Args:
        cut: the axis of its result that is divided into ``degree``.

    Raises:
        CaptureError: a size is not what it was when it was found to be divisible.
    """

    # 4 heads of 8 features on 2 ranks:
    #     view(q, [2, 8, 4, 8])     becomes 2 heads               view(a, [2, 8, 32])    16 features
    #     view(q, [2, 8, -1, 8])    finds out by itself: -1 stays   split(qkv, 32, 2)      splits every 16
    # A size that was left open (a length) never lies along the axis that is cut.
    def own(size: Any) -> Any:
        if not isinstance(size, int) or (size > 0 and size % degree):
            raise CaptureError(
                f"{node.target} ({node.name}) has size {size} where it is cut into {degree}; pad batches to one "
                "length, or set tensor_parallel to 1"
            )
        return size // degree if size > 0 else size

    if node.target in _SIZES_AT:
        place = _SIZES_AT[node.target]
        sizes = list(args[place])
        sizes[cut] = own(sizes[cut])
        return (*args[:place], sizes, *args[place + 1 :])
    if node.target is aten.unflatten.int:
        first = int(args[1]) % (len(shape_of(node)) - len(args[2]) + 1)
        if 0 <= cut - first < len(args[2]):
            sizes = list(args[2])
            sizes[cut - first] = own(sizes[cut - first])
            return (args[0], args[1], sizes, *args[3:])
    axis = int(argument(node, 2, "dim", 0)) if node.target in _SPLITS else None
    if axis is not None and axis % len(shape_of(node.all_input_nodes[0])) == cut:
        sizes = [own(size) for size in args[1]] if isinstance(args[1], (list, tuple)) else own(args[1])
        return (args[0], sizes, *args[2:])
    if node.target is aten.slice.Tensor and int(args[1]) % len(shape_of(node)) == cut:
        stops = [
            size // degree if isinstance(size, int) and abs(size) < 1 << 62 else size for size in args[2:4]
        ]
        return (*args[:2], *stops, *args[4:])
    return args
