"""What one capture of a model found out, as data: made once, on one rank, and carried on by every other.

With it another rank captures at the size of its own stage in one export, and gets the same names,
layouts and blocks.

What tensor ranks may share out of it are regions of operators between whole tensors (`ShardedRegion`):

    x whole ──► q, k, v by columns ──► heads, attention ──► o by rows ──sum──► whole
                each rank its heads    each rank its own    each rank a summand

A region begins with linear operators whose weights are cut by columns (their results' features) and ends with those
whose weights are cut by rows, whose results are summed over the ranks. Between the two every operator computes on a
part of one axis of its result, and as many parts as ranks are the whole. Nothing outside a region depends on it.

A vocabulary is shared out likewise: of an embedding each rank has some rows, and zeros for other tokens are summed; of
logits each rank has some columns, and a cross entropy needs the largest one, a sum and the label's of each row.

Source: Megatron-LM (arXiv 1909.08053), section 3
Tests: tests/capture/test_sharding.py
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpp_plugin.ir.block_graph import Block, BlockGraph, BlockSharding, OpGraph, OpNode
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec

PREPARED, RECORDED, WHOLE_UNITS = "prepared", "recorded", "whole units"
"""Means of a capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node of the captured torch graph, for graphs of other sizes to be held against.

    Args:
        op: ``placeholder``, ``get_attr``, ``call_function`` or ``output``.
        target: the operator (its name), or the placeholder's name; "" for the others.
        inputs: names of the nodes it reads.
        module: path of the module that called it.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """How a tensor is cut for the tensor ranks of a data position.

    Args:
        name: of an operator (whose result it is), an input, or a parameter.
        axis: along which it is cut.
        parts: sizes of what lies one behind the other along that axis, each of which is cut by itself: of a weight
            that makes queries, keys and values of 32 each ``(32, 32, 32)``; rank 1 of 2 holds the second half of each.
            Those of a parameter are equal.
    """

    name: str
    axis: int
    parts: tuple[int, ...]

    def rows(self, position: int, degree: int) -> tuple[tuple[int, int], ...]:
        """Return what one of ``degree`` ranks holds along the axis, as (first, how many) of each part.

        >>> TensorShard(name="qkv", axis=0, parts=(8, 4)).rows(1, 2)
        ((4, 4), (10, 2))
        """
        found, begin = [], 0
        for size in self.parts:
            own = size // degree
            found.append((begin + position * own, own))
            begin += size
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRegion:
    """Operators that compute on parts, from whole tensors to whole tensors.

    Args:
        size: a tensor degree is possible where it divides this: the largest number that divides all that is cut (heads,
            groups of keys and values, features).
        results: of its operators, those that ranks hold parts of.
        parameters: that are cut.
        sums: its last operators, whose results are summed over the ranks.
        losses: or cross entropies over what is cut, which sum three numbers a row.
        shared: whole tensors and parameters that it reads and whose gradient is summed over the ranks.
        sliced: of the whole tensors that it reads, those of which each rank reads its part.
    """

    size: int
    results: tuple[TensorShard, ...]
    parameters: tuple[TensorShard, ...]
    sums: tuple[str, ...]
    shared: tuple[str, ...]
    sliced: tuple[TensorShard, ...]
    losses: tuple[str, ...] = ()

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operators of the region."""
        return (*(result.name for result in self.results), *self.sums, *self.losses)

    def is_divided_by(self, degree: int) -> bool:
        """Return whether so many ranks can share it out."""
        return degree > 1 and self.size % degree == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """An operator between two regions that treats positions alike: a rank computes its part of the positions.

    Args:
        name: of the operator, whose result is cut.
        axis: of its result, along which positions lie.
        operands: what it reads parts of -> the axis of positions there; it reads all else whole.
        parameters: that it reads; each rank's gradient of them is of its own positions.
        shared: whole tensors that it reads and whose gradient is summed over the ranks.
        joins: the result of a region that it is, or is a view of; "" for none.
        gathered: what of it one region reads whole, and no other operator: itself, or rows made of it; "" for none.
        is_gathered: several regions read it whole, or operators that all ranks run alike do.
    """

    name: str
    axis: int
    operands: dict[str, int]
    parameters: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    joins: str = ""
    gathered: str = ""
    is_gathered: bool = False


POSITIONS, ROWS, HEADS = "positions", "rows", "heads"
"""How context ranks cut an axis: as evenly as can be; of every sample that it joins its positions; equally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCut:
    """How context ranks hold a tensor.

    Args:
        kind: ``positions``: each has a stretch of the axis, [2, 5, 32] in [2, 2, 32] and [2, 3, 32]. ``rows``: the axis
            joins samples and positions, [10, 32] in [4, 32] and [6, 32]. ``heads``: the axis has heads, or features
            made of them, in equal parts; of all positions.
        axis: which is cut.
    """

    kind: str
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """An operator that context ranks run on their parts.

    Args:
        name: of the operator.
        result: how its result is cut, or each of its results; None: it is whole, made of summands (``sums``).
        operands: what it reads in parts (operators, inputs, parameters), and how; it reads all else whole.
        sums: of each rank's result the whole is the ``sum``, or the ``mean`` over labels that count (cross entropy);
            "" where it is cut.
        heads: numbers that the context size must divide: of query heads, where it computes on parts of heads.
        groups: of what it reads by heads, how many there are where the context size need not divide them: groups of
            keys and values. With f = n / gcd(n, groups) each is held f times over: so an exchange repeats each f times
            in place, and n ranks have equal parts of groups * f; what is by heads already is so. Where groups are
            repeated for the heads that share them, how often (of `expand`, or `repeat_interleave`) is divided by f.
    """

    name: str
    result: ContextCut | None
    operands: dict[str, ContextCut]
    sums: str = ""
    heads: tuple[int, ...] = ()
    groups: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLinear:
    """A linear operator that stays whole, and the operator that is in the way."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What of a captured model can be shared out, and what cannot.

    Args:
        regions, whole, sequence: among tensor ranks.
        context, uncut: among context ranks: operators on parts; linear operators and attention that stay whole.
    """

    regions: tuple[ShardedRegion, ...] = ()
    whole: tuple[WholeLinear, ...] = ()
    sequence: tuple[SequencePart, ...] = ()
    context: tuple[ContextPart, ...] = ()
    uncut: tuple[WholeLinear, ...] = ()


def position_axes(sharding: Sharding, tensors: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Return, of those of these tensors that context ranks make in parts of the positions, the axis of these.

    Rows and heads are left out: what context ranks hold so crosses between stages whole. So are patches of several
    samples one behind the other, as messages take samples from the same axis.
    """
    found = {}
    for part in sharding.context:
        spec = tensors.get(part.name)
        if spec is None or part.result is None or part.result.kind != POSITIONS:
            continue
        is_batch = spec.layout.kind is LayoutKind.BATCH and spec.layout.axis == part.result.axis
        if not is_batch:
            found[part.name] = part.result.axis
    return found


def regions_in(regions: Iterable[ShardedRegion], operators: Iterable[str]) -> tuple[ShardedRegion, ...]:
    """Return the regions whose operators are all among some."""
    known = frozenset(operators)
    return tuple(region for region in regions if known.issuperset(region.operators))


def sequence_in(
    parts: Iterable[SequencePart], operators: Iterable[str], regions: Iterable[ShardedRegion]
) -> tuple[SequencePart, ...]:
    """Return the operators among some that compute on parts of the positions where these regions are shared out."""
    known, sums = frozenset(operators), {name for region in regions for name in region.sums}
    return tuple(part for part in parts if part.name in known and (not part.joins or part.joins in sums))


def without_half_cut(
    regions: Iterable[ShardedRegion], chosen: Iterable[ShardedRegion]
) -> tuple[ShardedRegion, ...]:
    """Return those of the chosen regions whose parameters no other region cuts that is not chosen too.

    Args:
        regions: all of a capture; each reader of a parameter that one of them cuts is in one that cuts it.
    """
    # A weight is that of an embedding (region 0) and a head (1), which has a bias that region 2 reads too. Where 0 is
    # not chosen, its embedding reads the weight whole: so 1 cannot cut it, thus not the bias either, thus 2 cannot.
    everything, chosen = tuple(regions), tuple(chosen)
    while True:
        own = frozenset(chosen)
        whole = {shard.name for region in everything if region not in own for shard in region.parameters}
        fewer = tuple(r for r in chosen if whole.isdisjoint(shard.name for shard in r.parameters))
        if len(fewer) == len(chosen):
            return chosen
        chosen = fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor, or a number, of a state.

    Args:
        name: the buffer that holds it.
        number: the type of a Python number, ``int`` or ``float``; "" for a tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    number: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """What a forward leaves behind for the next one.

    Args:
        name: of a buffer that is assigned, or of a module's attribute.
        tensors: none where later forwards leave it as it is, so that it is no state.
        structure: of an attribute, how it is made of its tensors; "" for a buffer.
    """

    name: str
    tensors: tuple[StateTensor, ...] = ()
    structure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A captured model without its torch graph.

    Args:
        nodes: the torch graph's nodes in order.
        is_training: whether modules were in training mode.
        dtype: what floating parameters and inputs were cast to (torch's name of it); None left them.
        device_type: what the graph was captured for, ``cpu`` or ``cuda``; each rank has a device of its own.
        layer_lists: module paths whose children are repeated layers (module lists, long sequentials).
        clusters: groups of nodes that belong together: writers and readers of one storage, operators
            with several results and their parts, tensors that no batch axis can cut.
        unpadded: inputs that held ones only in the first capture's batch; costs are of attention without the masks
            that eager models leave out then.
        eager: modules (and loss functions) that stay whole and run as they are, by path.
        means: what tracing it took beyond an export: "prepared" where entries of the batch are made beforehand on the
            host, "recorded" where Python reads values of the batch, "whole units"
            where no axis is known to hold samples, so that all operators compute on whole loss units.
        sharding: what of it tensor ranks can share out.
        carried: what the forward leaves behind for the next one.
    """

    op_graph: OpGraph
    nodes: tuple[GraphNode, ...]
    is_training: bool
    dtype: str | None = None
    device_type: str = "cpu"
    layer_lists: tuple[str, ...] = ()
    clusters: tuple[tuple[str, ...], ...] = ()
    unpadded: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    means: tuple[str, ...] = ()
    sharding: Sharding = Sharding()
    carried: tuple[CarriedState, ...] = ()

    @property
    def reads_values(self) -> bool:
        """Return whether Python reads values of the batch."""
        return RECORDED in self.means

    @property
    def takes_whole_units(self) -> bool:
        """Return whether nothing is known of where samples lie."""
        return WHOLE_UNITS in self.means


# What tensor ranks divide of each block, in numbers: shares of its costs, and the bytes that the ranks sum.

MAX_DEGREE = 1024
_NUMBER_BYTES = 4


def block_shardings(graph: OpGraph, sharding: Sharding, blocks: Sequence[Block]) -> tuple[BlockSharding, ...]:
    """Return what is divided of those blocks that hold whole regions.

    Args:
        graph: its sizes are those of the result.
    """
    regions = sharding.regions
    inside = [region for block in blocks for region in regions_in(regions, block.nodes)]
    whole = without_half_cut(regions, inside)
    owned = {block.name: found for block in blocks if (found := regions_in(whole, block.nodes))}
    sizes = _together(owned)
    degrees = {
        name: tuple(d for d in range(2, min(size, MAX_DEGREE) + 1) if size % d == 0)
        for name, size in sizes.items()
        if size > 1
    }
    # A norm between layers has no region, and computes on parts of what those make that are divided.
    parts = {part.name: part for part in sharding.sequence}
    home = {name: block.name for block in blocks for name in block.nodes}
    for block in blocks:
        made = {
            home.get(n, "")
            for name in block.nodes
            if name in parts
            for n in parts[name].operands
            if n in parts
        }
        others = [frozenset(degrees.get(name, ())) for name in made - {block.name}]
        if block.name not in owned and others and (common := frozenset.intersection(*others)):
            degrees[block.name] = tuple(sorted(common))
    divided = [block for block in blocks if block.name in degrees]
    nodes = [name for block in divided for name in block.nodes]
    sequence = {part.name: part for part in sequence_in(sharding.sequence, nodes, whole)}
    sliced: set[str] = set()
    return tuple(
        _sharding(graph, block, owned.get(block.name, ()), degrees[block.name], sequence, sliced)
        for block in divided
    )


def context_of_stage(
    graph: BlockGraph, sharding: Sharding, plan: PipelinePlan, index: int
) -> tuple[ContextPart, ...]:
    """Return the operators of a stage that its context ranks compute on parts: of blocks that their number divides.

    And of what no block has, as each stage makes it for itself.
    """
    stage = plan.stages[index]
    divided = {own.block for own in graph.context if stage.context in own.degrees}
    whole = {name for block in graph.blocks if block.name not in divided for name in block.nodes}
    return tuple(part for part in sharding.context if part.name not in whole)


def why_undivided(sharding: Sharding, blocks: Iterable[Block], granularity: str) -> dict[str, str]:
    """Return block -> why it is not divided, of those of these with linear operators; names the operator in the way."""
    whole = {each.name: each.reason for each in sharding.whole}
    regions = {name for region in sharding.regions for name in region.operators}
    found = {}
    for block in blocks:
        reasons = [whole[name] for name in block.nodes if name in whole]
        if reasons:
            found[block.name] = reasons[0]
        elif regions_in(sharding.regions, block.nodes):
            found[block.name] = "it shares a parameter with blocks that no number divides along with it"
        elif not regions.isdisjoint(block.nodes):
            reason = f'operators that go together are in several blocks at granularity "{granularity}"'
            found[block.name] = reason
    return found


def why_uncut(sharding: Sharding, blocks: Iterable[Block]) -> dict[str, str]:
    """Return block -> why context ranks do not divide it, of those of these with linear operators or attention."""
    whole = {each.name: each.reason for each in sharding.uncut}
    found = {block.name: next((whole[name] for name in block.nodes if name in whole), "") for block in blocks}
    return {name: reason for name, reason in found.items() if reason}


def regions_of_stage(
    graph: BlockGraph, regions: Sequence[ShardedRegion], plan: PipelinePlan, index: int
) -> tuple[ShardedRegion, ...]:
    """Return the regions that a stage's tensor ranks share out: all of a block, if its degrees have the stage's.

    Not those with a parameter that others read whole, here or in a stage of another tensor size: all hold it whole.
    """
    # What stages of this size share out together, as they may hold the same parameter: each keeps what is its own.
    size, nodes = plan.stages[index].tensor, {block.name: block.nodes for block in graph.blocks}
    divided = {own.block for own in graph.sharding if size in own.degrees}
    together = {name for stage in plan.stages if stage.tensor == size for name in stage.blocks}
    inside = [region for name in together & divided for region in regions_in(regions, nodes[name])]
    whole = without_half_cut(regions, inside)
    own = divided.intersection(plan.stages[index].blocks)
    return tuple(
        region for block in graph.blocks if block.name in own for region in regions_in(whole, block.nodes)
    )


def sequence_of_stage(
    graph: BlockGraph, sharding: Sharding, plan: PipelinePlan, index: int
) -> tuple[SequencePart, ...]:
    """Return the operators of a stage that compute on parts of the positions: of blocks that its size divides."""
    # A norm that a block which is not divided reads too has its whole gradient there (`SequencePart.parameters`).
    stage, blocks = plan.stages[index], {block.name: block for block in graph.blocks}
    divided = {own.block for own in graph.sharding if stage.tensor in own.degrees}
    own = [blocks[name] for name in stage.blocks]
    nodes = [name for block in own if block.name in divided for name in block.nodes]
    whole = {name for block in own if block.name not in divided for name in block.parameters}
    regions = regions_of_stage(graph, sharding.regions, plan, index)
    found = sequence_in(sharding.sequence, nodes, regions)
    return tuple(part for part in found if whole.isdisjoint(part.parameters))


def _together(owned: Mapping[str, Sequence[ShardedRegion]]) -> dict[str, int]:
    """Return block -> what its degrees divide; the same for blocks that read the same cut parameter."""
    # Blocks 0 and 5 share a weight: one could be divided by 2 and 4, the other by 2 and 6; both by 2 then, as a stage
    # that holds both cuts the weight once.
    sizes = {block: math.gcd(*(region.size for region in regions)) for block, regions in owned.items()}
    holders: dict[str, list[str]] = {}
    for block, regions in owned.items():
        for region in regions:
            for parameter in region.parameters:
                holders.setdefault(parameter.name, []).append(block)
    is_changing = True
    while is_changing:
        is_changing = False
        for sharing in holders.values():
            common = math.gcd(*(sizes[block] for block in sharing))
            is_changing |= any(sizes[block] != common for block in sharing)
            sizes.update(dict.fromkeys(sharing, common))
    return sizes


def _sharding(
    graph: OpGraph,
    block: Block,
    regions: Sequence[ShardedRegion],
    degrees: tuple[int, ...],
    sequence: Mapping[str, SequencePart],
    sliced: set[str],
) -> BlockSharding:
    """Return what is divided of a block.

    Args:
        sequence: all operators of the graph that compute on parts of the positions.
        sliced: whole tensors that blocks before this one take parts of; this one's are added.
    """
    operators = {name for region in regions for name in region.operators}
    parts = {result.name for region in regions for result in region.results}
    parts.update(name for region in regions for name in region.losses)
    own_parts = [sequence[name] for name in block.nodes if name in sequence]
    results = frozenset(parts)
    parts.update(part.name for part in own_parts)
    cut = {parameter.name for region in regions for parameter in region.parameters}
    nodes = {node.name: node for node in graph.nodes}
    own = [nodes[name] for name in block.nodes]
    held = [p for p in graph.parameters if p.name in cut]
    gathered = {part.gathered for part in sequence.values() if part.gathered}
    saved = _kept_in_parts(own, nodes, sequence, results, parts, gathered)
    inside = sum(node.kept_inside_bytes for node in own if node.name in parts)
    joined = {part.joins for part in own_parts if part.joins}
    summed = [_bytes(graph, name) for region in regions for name in region.sums if name not in joined]
    for name in (name for region in regions for name in region.losses):
        logits = nodes[nodes[name].inputs[0]].output
        assert logits is not None
        label_bytes = logits.shape_for(graph.num_samples)[0] * _NUMBER_BYTES
        summed += [label_bytes, 2 * label_bytes]  # the largest logits; sums and the labels' logits
    shared = [_bytes(graph, name) for region in regions for name in region.shared if name not in gathered]
    shared += [_bytes(graph, name) for name in dict.fromkeys(n for p in own_parts for n in p.shared)]
    flops = sum(node.flops for node in own if node.name in operators or node.name in sequence)
    # A gated MLP: ``up`` and ``gate`` read the tensor whose gradient is summed, ``down`` what is cut: 2/3.
    trained = [p for p in graph.parameters if p.requires_grad and not p.is_buffer and len(p.shape) > 1]
    weights = {name for p in trained for name in (p.name, *p.aliases)}
    made = sum(node.flops for node in own if not weights.isdisjoint(node.inputs))
    beside = sum(
        nodes[result.name].flops
        for region in regions
        for result in region.results
        if not (weights & cut).isdisjoint(nodes[result.name].inputs)
        and not set(region.shared).isdisjoint(nodes[result.name].inputs)
    )
    forward = [_bytes(graph, part.joins) for part in own_parts if part.joins]
    backward = [_bytes(graph, p.joins) for p in own_parts if p.joins and has_gradient(graph, nodes, p.joins)]
    forward += [_bytes(graph, part.name) for part in own_parts if part.gathered or part.is_gathered]
    beside_bytes = []
    for region in regions:
        for name in gathered.intersection(region.shared):
            readers = [nodes[r.name] for r in region.results if name in nodes[r.name].inputs]
            is_trained = any(not (weights & cut).isdisjoint(node.inputs) for node in readers)
            beside_bytes += [_bytes(graph, name)] * (1 + is_trained)
    for part in own_parts:
        fresh = [name for name in part.operands if name not in sequence and name not in sliced]
        sliced.update(fresh)
        backward += [_bytes(graph, name) for name in fresh if has_gradient(graph, nodes, name)]
    inside_names = frozenset(block.nodes)
    outside = {name for node in graph.nodes if node.name not in inside_names for name in node.inputs}
    return BlockSharding(
        block=block.name,
        degrees=degrees,
        flop_share=min(flops / block.flops, 1.0) if block.flops else 0.0,
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=sum(p.bytes for p in held if p.requires_grad),
        saved_share=min((saved + inside) / block.saved_bytes, 1.0) if block.saved_bytes else 0.0,
        forward_sums=len(summed),
        forward_sum_bytes=sum(summed),
        backward_sums=len(shared),
        backward_sum_bytes=sum(shared),
        beside_share=min(beside / made, 1.0) if made else 0.0,
        forward_gathers=len(forward),
        forward_gather_bytes=sum(forward),
        backward_gathers=len(backward) + len(beside_bytes),
        backward_gather_bytes=sum(backward) + sum(beside_bytes),
        beside_gathers=len(beside_bytes),
        beside_gather_bytes=sum(beside_bytes),
        cut_results=tuple(p.name for p in own_parts if not p.is_gathered and p.name in outside),
    )


def has_gradient(graph: OpGraph, nodes: Mapping[str, OpNode], name: str) -> bool:
    """Return whether a gradient of an operator's result, of an input or of a parameter is made."""
    node = nodes.get(name)
    if node is not None:
        return node.output is not None and node.output.requires_grad
    return any(p.requires_grad and name in (p.name, *p.aliases) for p in graph.parameters)


def _kept_in_parts(
    own: Sequence[OpNode],
    nodes: Mapping[str, OpNode],
    sequence: Mapping[str, SequencePart],
    results: Collection[str],
    parts: Collection[str],
    gathered: Collection[str],
) -> int:
    """Return the bytes of what a block's operators keep of which each rank keeps its part.

    Args:
        results: of its regions; ``parts``: and its operators on parts of the positions.
        gathered: what one region alone reads whole of a tensor in parts.
    """
    # A storage is saved once, by however many: in parts where all keep them. A region keeps its results, and of what is
    # gathered for it alone the rank's part. Whole is what several read whole, and what another block makes for a
    # region: in another stage it would be received whole.
    inside, kept = {node.name for node in own}, dict[str, tuple[int, bool]]()
    for node in own:
        read = {*results, *(sequence[node.name].operands if node.name in sequence else gathered)}
        for maker, size in node.keeps:
            names = [n for n in node.inputs if maker in (n, nodes[n].storage if n in nodes else n)]
            is_part = read.issuperset(names) if names else node.name in parts
            is_part &= node.name in sequence or maker in inside
            kept[maker] = size, is_part and kept.get(maker, (0, True))[1]
    return sum(size for size, is_part in kept.values() if is_part)


def _bytes(graph: OpGraph, name: str) -> int:
    """Return the bytes of an operator's result, an input or a parameter, at the graph's number of samples."""
    for parameter in graph.parameters:
        if name in (parameter.name, *parameter.aliases):
            return parameter.bytes
    specs = [node.output for node in graph.nodes if node.name == name]
    specs += [spec for spec in graph.inputs if spec.name == name]
    spec = specs[0]
    assert spec is not None, f"{name} is one tensor"
    return spec.bytes_for(graph.num_samples)
