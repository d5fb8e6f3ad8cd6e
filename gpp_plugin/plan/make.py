"""The one way from groups of blocks to a PipelinePlan: order, names, ranks, edges, in-flight, costs.

A plan that is made is changed here too: other ranks, what messages take, backwards in two parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import ModelGrid, PipelinePlan, Stage, StageEdge, sinks_first
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.schedule import StageSchedule, TaskKind
from gpp_plugin.ir.tensors import LayoutKind, even_ranges
from gpp_plugin.plan.costs.cost_model import CostModel, prefix_sums
from gpp_plugin.plan.request import BatchRules, PlanRequest
from gpp_plugin.plan.stage_names import name_stages
from gpp_plugin.plugins import find_schedule
from gpp_plugin.schedule.build import least_samples, plan_in_flight
from gpp_plugin.schedule.event_loop import MessageCosts
from gpp_plugin.schedule.messages import activation_bytes, gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """A stage as a planner decides it, before names and ranks.

    Args:
        blocks: names, in any order.
        degree: number of data-parallel ranks.
        name: from the user, or None.
        ranks: from the user or from `share_ranks`, or None: consecutive ranks in stage order.
        extra_in_flight: micro-batches held beyond what Table 2 needs, to hide communication.
        tensor, context: tensor-parallel and context-parallel size; the stage has ``degree`` x ``context`` x ``tensor``
            ranks.
    """

    blocks: tuple[str, ...]
    degree: int
    micro_batch_size: int
    k: int = 1
    name: str | None = None
    ranks: tuple[int, ...] | None = None
    extra_in_flight: int = 0
    tensor: int = 1
    context: int = 1

    @classmethod
    def of(cls, stage: Stage) -> StageDraft:
        """Return the draft of a plan's stage, on ranks that are still to be chosen."""
        return cls(
            blocks=stage.blocks,
            degree=stage.degree,
            micro_batch_size=stage.micro_batch_size,
            k=stage.k,
            tensor=stage.tensor,
            context=stage.context,
        )

    @property
    def grid(self) -> ModelGrid:
        """Return the context x tensor ranks that compute the same samples together."""
        return ModelGrid(self.context, self.tensor)

    @property
    def num_ranks(self) -> int:
        """Return all its ranks."""
        return self.degree * self.grid.size


def make_drafts(
    rules: BatchRules, groups: Iterable[Sequence[str]], degrees: Iterable[int], wish: int
) -> list[StageDraft] | None:
    """Return the drafts of these blocks on so many ranks each; None where one has no micro-batch size."""
    drafts = []
    for group, degree in zip(groups, degrees, strict=True):
        size = rules.micro_batch_size(group, degree, wish)
        if size is None:
            return None
        drafts.append(StageDraft(blocks=tuple(group), degree=degree, micro_batch_size=size))
    return drafts


def build_plan(
    request: PlanRequest,
    drafts: Sequence[StageDraft],
    *,
    planner: str,
    notes: Sequence[str] = (),
    costs: CostModel | None = None,
    is_named: bool = True,
) -> PipelinePlan:
    """Return the plan of these stages, with its in-flight counts and predicted costs.

    Args:
        is_named: False leaves out the names, for candidates that are only compared.

    Raises:
        PlanError: the stages depend on each other in a circle, or two have the same name.
    """
    graph = request.graph
    if costs is None:
        costs = CostModel(graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    # One thing after another, as each needs what is before it: ranks follow the order of the stages, edges their
    # numbers, in-flight counts the edges (how far a stage is from its sink), and memory those counts. With drafts
    # {c}: 1 rank and {b, a}: 2 ranks of the chain a -> b -> c:
    #
    #     order       {a, b}, {c}          producers first, blocks in the model's order
    #     ranks       (0, 1), (2,)         in that order; edge 0 -> 1 with b's output
    #     in flight   2, 1                 1F1B with equal micro-batches
    ordered = _in_order(graph, drafts, costs)
    names = (
        name_stages(graph, [d.blocks for d in ordered], [d.name for d in ordered])
        if is_named
        else [str(i) for i in range(len(ordered))]
    )
    placed = zip(ordered, names, assign_ranks(ordered, request.rank_order), strict=True)
    stages = [_stage_of(draft, name, ranks, request.schedule, costs) for draft, name, ranks in placed]
    yielding = tuple(stage.name for stage in stages if not set(graph.loss_blocks).isdisjoint(stage.blocks))
    plan = PipelinePlan(
        model=graph.model,
        graph=graph.fingerprint,
        planner=planner,
        mini_batch=request.mini_batch,
        loss_unit=request.loss_unit,
        stages=tuple(stages),
        edges=stage_edges(graph, [s.blocks for s in stages], [s.context for s in stages], costs=costs),
        notes=tuple(notes),
        losses=yielding,
        zero_stage=request.zero_stage,
    )
    plan = with_in_flight(plan, costs, extra=[draft.extra_in_flight for draft in ordered])
    # unequal devices, and no rank that the user gave: then which stage is where may be changed for memory's sake
    is_mixed = len({device.memory_bytes for device in request.cluster.devices[: request.num_ranks]}) > 1
    return place_by_memory(plan, costs) if is_mixed and all(d.ranks is None for d in drafts) else plan


def _in_order(graph: BlockGraph, drafts: Sequence[StageDraft], costs: CostModel) -> list[StageDraft]:
    """Return the drafts producers first, each with its blocks in the order of the model."""
    ordered = []
    for i in order_stages(graph, [draft.blocks for draft in drafts], costs=costs):
        blocks = tuple(sorted(drafts[i].blocks, key=costs.index.__getitem__))
        is_sorted = blocks == drafts[i].blocks
        ordered.append(drafts[i] if is_sorted else dataclasses.replace(drafts[i], blocks=blocks))
    return ordered


def _stage_of(draft: StageDraft, name: str, ranks: tuple[int, ...], schedule: str, costs: CostModel) -> Stage:
    """Return the stage with its times; its in-flight count and memory follow from the whole plan."""
    local = draft.micro_batch_size / draft.degree
    costs = costs if draft.grid.size == 1 else costs.at_grid(draft.grid, ranks)
    forward, backward = costs.stage_times(costs.indices(draft.blocks), local, ranks)
    return Stage(
        name=name,
        blocks=draft.blocks,
        ranks=ranks,
        micro_batch_size=draft.micro_batch_size,
        in_flight=1,
        schedule=schedule,
        k=draft.k,
        forward_us=forward,
        backward_us=backward,
        tensor=draft.tensor,
        context=draft.context,
    )


def place_by_memory(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan with the stages that need most on the devices that have most, where ranks differ.

    The consecutive placement stays where it fits: neighbours stay neighbours.
    """
    devices = costs.cluster.devices
    fits = all(
        stage.memory_bytes <= devices[rank].memory_bytes for stage in plan.stages for rank in stage.ranks
    )
    if fits:
        return plan
    free = sorted(range(plan.num_ranks), key=lambda rank: (-devices[rank].memory_bytes, rank))
    placed: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(plan.stages)), key=lambda i: -plan.stages[i].memory_bytes):
        size = len(plan.stages[i].ranks)
        placed[i], free = tuple(sorted(free[:size])), free[size:]
    return with_ranks(plan, [placed[i] for i in range(len(plan.stages))], costs)


def with_ranks(plan: PipelinePlan, ranks: Sequence[tuple[int, ...]], costs: CostModel) -> PipelinePlan:
    """Return the plan with its stages on other ranks, and the times they take there.

    Args:
        ranks: by stage, as many as it has.
    """
    stages = []
    for stage, own in zip(plan.stages, ranks, strict=True):
        changes: dict[str, Any] = {}
        at, there = costs.on(stage), costs.on(dataclasses.replace(stage, ranks=own))
        if at is not there or costs.kinds_of(stage.ranks) != costs.kinds_of(own):
            rows, local = costs.indices(stage.blocks), stage.local_batch_size
            before, after = at.stage_times(rows, local, stage.ranks), there.stage_times(rows, local, own)
            # what memory optimization adds, and parts of tasks, are as much longer there as the whole task is
            slower = after[1] / before[1] if before[1] > 0 else 1.0
            changes = {
                "forward_us": after[0],
                "backward_us": stage.backward_us * slower,
                "half_forward_us": there.stage_times(rows, local / 2, own)[0]
                if stage.half_forward_us
                else 0.0,
                "input_gradient_us": stage.input_gradient_us * slower,
                "weight_gradient_us": stage.weight_gradient_us * slower,
            }
        stages.append(dataclasses.replace(stage, ranks=own, **changes))
    return dataclasses.replace(plan, stages=tuple(stages))


def with_in_flight(plan: PipelinePlan, costs: CostModel, *, extra: Sequence[int] = ()) -> PipelinePlan:
    """Return the plan with in-flight counts from its sinks and the memory they lead to.

    Args:
        extra: by stage, micro-batches to hold beyond those counts.
    """
    counts = list(plan_in_flight(plan))
    for i, more in enumerate(extra):
        counts[i] = min(counts[i] + more, plan.num_micro_batches(i))
    if any(extra):
        _raise_for_successors(plan, counts)
    stages = []
    for stage, count in zip(plan.stages, counts, strict=True):
        memory = costs.memory_of(stage, count)
        # Thousands of candidates pass here: `dataclasses.replace` would take several times as long.
        stages.append(
            Stage(
                name=stage.name,
                blocks=stage.blocks,
                ranks=stage.ranks,
                micro_batch_size=stage.micro_batch_size,
                in_flight=count,
                schedule=stage.schedule,
                k=stage.k,
                forward_us=stage.forward_us,
                backward_us=stage.backward_us,
                memory_bytes=memory,
                sharded_bytes=costs.on(stage).sharded_bytes(costs.indices(stage.blocks), stage.num_replicas),
                tensor=stage.tensor,
                context=stage.context,
            )
        )
    return dataclasses.replace(plan, stages=tuple(stages))


def _raise_for_successors(plan: PipelinePlan, counts: list[int]) -> None:
    """Raise in-flight counts to what successors wait for that hold more than Table 2 has them (`least_samples`)."""
    # Stage x of micro-batches of 2 before y of 4 with 15 in flight: 60 samples, so x holds 30; with one less its first
    # backward would wait for y's, y's for its forward 14, and that for x's forward 29, behind the backward. At equal
    # sizes more in flight towards the sources is enough, and nothing is raised.
    place = {index: number for number, index in enumerate(sinks_first(plan))}
    for edge in sorted(plan.edges, key=lambda edge: place[edge.src]):  # so successors have theirs
        x, y = plan.stages[edge.src], plan.stages[edge.dst]
        held = counts[edge.dst] * y.micro_batch_size
        needed = least_samples(k_x=x.k, b_x=x.micro_batch_size, k_y=y.k, b_y=y.micro_batch_size, i_y=held)
        most = plan.num_micro_batches(edge.src)
        counts[edge.src] = max(counts[edge.src], min(-(-needed // x.micro_batch_size), most))


def stage_edges(
    graph: BlockGraph,
    groups: Sequence[Sequence[str]],
    contexts: Sequence[int] | None = None,
    *,
    costs: CostModel | None = None,
) -> tuple[StageEdge, ...]:
    """Return the edges between groups of blocks: every tensor once per pair of stages.

    One edge a pair, or, where ranks of the same samples hold some of its tensors in parts, one for each way they are
    held.

    Args:
        contexts: context-parallel sizes of the stages; None: 1 each.
        costs: of the same graph; remembers edges from call to call.
    """
    # Of a chain a -> b -> c of context sizes 2, 1, 4 whose tensors have their positions along axis 1, a sends parts
    # along axis 1 to b, which has the whole (None), and b sends the whole to c, which takes parts of it.
    stage_of = {block: i for i, blocks in enumerate(groups) for block in blocks}
    sizes = contexts if contexts is not None and max(contexts, default=1) > 1 else [1] * len(groups)
    divisible = {each.block: each.degrees for each in graph.context}
    between: dict[tuple[int, int, _Axes], dict[str, None]] = {}
    for edge in graph.edges:
        src, dst = stage_of[edge.src], stage_of[edge.dst]
        if src == dst:
            continue
        for name in edge.tensors:
            axes = (edge.src_shard_axis, edge.dst_shard_axis)
            axis = graph.position_axes.get(name)
            if axis is not None:
                # what a block makes that this size does not divide is whole; a consumer holds all alike
                is_cut = sizes[src] > 1 and sizes[src] in divisible.get(edge.src, ())
                axes = (axis if is_cut else None, axis if sizes[dst] > 1 else None)
            between.setdefault((src, dst, axes), {})[name] = None
    known = costs.edge_cache if costs is not None else {}
    edges = []
    for src, dst, axes in sorted(between, key=lambda k: (k[0], k[1], [-1 if a is None else a for a in k[2]])):
        tensors = tuple(between[src, dst, axes])
        key = src, dst, tensors
        found = known.get(key)
        if found is None or (found.src_shard_axis, found.dst_shard_axis) != axes:
            # Stages change their numbers more often than what passes between them changes.
            same = known.get((0, 0, tensors))
            if same is None:
                same = known[0, 0, tensors] = _edge_of(graph, tensors)
            found = known[key] = dataclasses.replace(
                same, src=src, dst=dst, src_shard_axis=axes[0], dst_shard_axis=axes[1]
            )
        edges.append(found)
    return tuple(edges)


_Axes = tuple[int | None, int | None]
"""Shard axis at the producer and at the consumer."""


def _edge_of(graph: BlockGraph, names: tuple[str, ...]) -> StageEdge:
    specs = [graph.tensors[name] for name in names]
    batch = [spec for spec in specs if spec.layout.kind is LayoutKind.BATCH]
    whole = [spec for spec in specs if spec.layout.kind is not LayoutKind.BATCH]
    return StageEdge(
        src=0,
        dst=0,
        batch_tensors=tuple(spec.name for spec in batch),
        whole_tensors=tuple(spec.name for spec in whole),
        gradient_tensors=tuple(spec.name for spec in specs if spec.requires_grad),
        bytes_per_sample=sum((s.bytes_for(s.num_samples) / s.num_samples for s in batch), 0.0),
        bytes_fixed=float(sum(s.bytes_for(s.num_samples) for s in whole)),
        gradient_bytes_per_sample=sum(
            (s.bytes_for(s.num_samples) / s.num_samples for s in batch if s.requires_grad), 0.0
        ),
        gradient_bytes_fixed=float(sum(s.bytes_for(s.num_samples) for s in whole if s.requires_grad)),
    )


def order_stages(
    graph: BlockGraph, groups: Sequence[Sequence[str]], *, costs: CostModel | None = None
) -> list[int]:
    """Return a topological order of the groups, branch after branch.

    After a stage come its successors where they are ready, so that a branch is finished before the
    next one begins and neighbours in the order are neighbours in the graph.

    Raises:
        PlanError: a block is in no group, in two, or the groups depend on each other in a circle.
    """
    # Depth first: ``ready`` is a stack, with what became ready last on top, and among stages that became ready
    # together the one with the model's earlier block. Two branches a0 -> a1 and b0 -> b1 that ``join`` reads:
    #
    #     taken        a0        a1        b0        b1        join
    #     then ready   a1 b0     b0        b1        join                 so a0 a1 b0 b1 join, not a0 b0 a1 b1 join
    #
    # Which ranks are neighbours follows from this order, and messages between neighbours are the cheap ones.
    # ``waiting`` counts, for each stage, the stages before it that are not taken yet; what never gets to 0 is in a
    # circle, or behind one.
    position = costs.index if costs is not None else {block.name: i for i, block in enumerate(graph.blocks)}
    stage_of = _stages_of_blocks(groups, position)
    first = [min(position[block] for block in blocks) for blocks in groups]
    successors: list[set[int]] = [set() for _ in groups]
    waiting = [0] * len(groups)
    for edge in graph.edges:
        src, dst = stage_of[edge.src], stage_of[edge.dst]
        if src != dst and dst not in successors[src]:
            successors[src].add(dst)
            waiting[dst] += 1
    ready = sorted((s for s, count in enumerate(waiting) if count == 0), key=first.__getitem__, reverse=True)
    order: list[int] = []
    while ready:
        stage = ready.pop()
        order.append(stage)
        freed = []
        for successor in successors[stage]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                freed.append(successor)
        ready.extend(sorted(freed, key=first.__getitem__, reverse=True))
    if len(order) < len(groups):
        quotient = nx.DiGraph((a, b) for a, out in enumerate(successors) for b in out)
        circle = [groups[edge[0]][0] for edge in nx.find_cycle(quotient)]
        raise PlanError(
            f"the stages of {' -> '.join([*circle, circle[0]])} depend on each other in a circle; "
            "move the blocks between them into one stage"
        )
    return order


def _stages_of_blocks(groups: Sequence[Sequence[str]], blocks: Mapping[str, int]) -> dict[str, int]:
    """Return by block the one group it is in; ``blocks`` are all there are.

    Raises:
        PlanError: a block is in no group or in two, or there is none of that name.
    """
    stage_of: dict[str, int] = {}
    for i, names in enumerate(groups):
        for name in names:
            if name not in blocks:
                raise PlanError(f"stage {i} names block {name!r}, which the model does not have")
            if name in stage_of:
                raise PlanError(f"block {name!r} is in two stages ({stage_of[name]} and {i}); keep one")
            stage_of[name] = i
    missing = [name for name in blocks if name not in stage_of]
    if missing:
        raise PlanError(f"{len(missing)} blocks are in no stage: {missing[:3]}; add them to one")
    return stage_of


def assign_ranks(
    drafts: Sequence[StageDraft], rank_order: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Return each stage's ranks: the explicit ones, which stages may share, or the next free ones in stage order.

    Args:
        rank_order: in which ranks are taken; None: by their numbers.
    """
    # Ranks of one data position are consecutive. Where a stage of fewer ranks comes before one of more, its groups
    # would begin anywhere, and might lie in two nodes: then those of the most context x tensor ranks take ranks first.
    #
    #     sizes 1x1, 1x4, 1x2 in order     0 | 1 2 3 4 | 5 6      ranks 3 and 4 may be of two nodes of 4
    #     largest first                    6 | 0 1 2 3 | 4 5      groups of powers of two begin at multiples of them
    taken = {rank for draft in drafts if draft.ranks is not None for rank in draft.ranks}
    total = len(taken) + sum(draft.num_ranks for draft in drafts if draft.ranks is None)
    free = [rank for rank in rank_order or range(total) if rank not in taken]
    open_drafts = [i for i, draft in enumerate(drafts) if draft.ranks is None]
    start, is_aligned = 0, True
    for i in open_drafts:
        is_aligned = is_aligned and start % drafts[i].grid.size == 0
        start += drafts[i].num_ranks
    if not is_aligned:
        open_drafts.sort(key=lambda i: -drafts[i].grid.size)
    found = [draft.ranks or () for draft in drafts]
    start = 0
    for i in open_drafts:
        size = drafts[i].num_ranks
        found[i] = tuple(sorted(free[start : start + size]))
        start += size
    return found


# What messages between stages take, for orders that reckon with it (`StageEdge.message_us`).
#
#     micro-batches of 8 samples on 2 ranks, then of 8 on 4 ranks, 1 MB a sample: a message holds 2 samples, 2 MB; on a
#     link of 25 GB/s with 5 us latency it takes 85 us
#
# Ranks that share a link take turns on it; orders do not know that, the simulator that weighs them does.

LEAST_SHARE = 0.02
"""Of the shortest forward: messages that take less change no order worth simulating."""


def with_link_times(plan: PipelinePlan, cluster: Cluster) -> PipelinePlan:
    """Return the plan whose edges say what their messages take; as it is where that is next to nothing."""
    costs = MessageCosts(cluster)
    edges = tuple(_with_times(plan, edge, costs) for edge in plan.edges)
    shortest = min((stage.forward_us for stage in plan.stages if stage.forward_us > 0), default=0.0)
    if all(edge.message_us <= LEAST_SHARE * shortest for edge in edges):
        return plan
    return dataclasses.replace(plan, edges=edges)


def _with_times(plan: PipelinePlan, edge: StageEdge, costs: MessageCosts) -> StageEdge:
    if edge.is_order_only:
        return edge
    src, dst = plan.stages[edge.src], plan.stages[edge.dst]
    samples = min(src.local_batch_size, dst.local_batch_size)
    forward, backward = 0.0, 0.0
    # Ranks of both stages that have the same samples: of 2 and 4 ranks 0 with 0 and 1, 1 with 2 and 3. The dearest.
    count = max(src.degree, dst.degree)
    for place in range(count):
        sender = src.data_ranks(0)[place * src.degree // count]
        receiver = dst.data_ranks(0)[place * dst.degree // count]
        forward = max(forward, sum(costs.of(sender, receiver, activation_bytes(edge, samples, True))))
        if edge.gradient_tensors:
            back = costs.of(receiver, sender, gradient_bytes(edge, samples, True))
            backward = max(backward, sum(back))
    return dataclasses.replace(edge, message_us=forward, gradient_us=backward)


# Chains: a linear order of the blocks, and contiguous groups of it.


def linear_order(graph: BlockGraph) -> list[str]:
    """Return the blocks in a topological order that finishes a branch before it begins the next."""
    names = [block.name for block in graph.blocks]
    return [names[i] for i in order_stages(graph, [[name] for name in names])]


def layer_of(block: str) -> str | None:
    """Return the numbered layer a block belongs to (``h.3`` of ``h.3.attn``), or None."""
    parts = block.split("#")[0].split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return None


def layer_bounds(names: Sequence[str], num_stages: int = 1) -> list[int]:
    """Return where layers begin, and the number of operators: runs of operators of one numbered module.

    Operators outside such modules form layers of their own between them. Where there are fewer layers than
    stages every operator is one.

    >>> layer_bounds(["embed", "h.0.norm", "h.0.mlp", "h.1.norm", "head", "loss"])
    [0, 1, 3, 4, 6]
    """
    keys = [layer_of(name) for name in names]
    bounds = [i for i in range(len(names)) if i == 0 or keys[i] != keys[i - 1]]
    return [*bounds, len(names)] if len(bounds) >= num_stages else list(range(len(names) + 1))


def split_by_layers(order: Sequence[str], num_stages: int) -> list[list[str]]:
    """Cut the order so that every stage has the same number of layers (Megatron's rule).

    What lies before the first layer belongs to the first stage, what follows a layer to that layer's
    stage. Where the layers do not divide evenly the first stages get one more; where there are fewer
    layers than stages, blocks count as layers.
    """
    layers = list(dict.fromkeys(layer for layer in map(layer_of, order) if layer is not None))
    if len(layers) < num_stages:
        return _even(order, num_stages)
    stage_of_layer = {
        layer: stage for stage, group in enumerate(_even(layers, num_stages)) for layer in group
    }
    groups: list[list[str]] = [[] for _ in range(num_stages)]
    current = 0
    for block in order:
        layer = layer_of(block)
        if layer is not None:
            current = max(current, stage_of_layer[layer])
        groups[current].append(block)
    return groups if all(groups) else _even(order, num_stages)


def _even(items: Sequence[str], num_groups: int) -> list[list[str]]:
    return [[items[place] for place in group] for group in even_ranges(len(items), num_groups)]


def split_by_weight(weights: Sequence[float], num_groups: int) -> tuple[int, ...]:
    """Cut a chain into groups, none empty, with the smallest largest weight (AutoPipe, Algorithm 1; exact).

    >>> split_by_weight([1, 3, 1, 2, 3], 4)
    (0, 1, 2, 4, 5)
    """
    num = len(weights)
    prefix: list[float] = prefix_sums(np.array(weights)).tolist()
    best = [[float("inf")] * (num + 1) for _ in range(num_groups + 1)]
    cut = [[0] * (num + 1) for _ in range(num_groups + 1)]
    best[0][0] = 0.0
    for groups in range(1, num_groups + 1):
        for stop in range(groups, num + 1):
            for start in range(stop - 1, groups - 2, -1):
                last = prefix[stop] - prefix[start]
                if last > best[groups][stop]:
                    break
                value = max(best[groups - 1][start], last)
                if value < best[groups][stop]:
                    best[groups][stop], cut[groups][stop] = value, start
    cuts = [num]
    for groups in range(num_groups, 0, -1):
        cuts.append(cut[groups][cuts[-1]])
    return tuple(reversed(cuts))


# What parts of a stage's tasks take: half a forward, and a backward in two parts.
#
# Where a stage swaps or recomputes, each part of its backward needs what was saved, so segments run again in both,
# and what is on the host comes back twice: for the input gradient early, as for a whole backward, and for the weight
# gradient when it is read, with nothing to hide behind.
#
#     whole    B      = backward + again + what of the transfers does not hide
#     parts    I, W   = input + again + the same,  weight + again + the transfer back


def has_split_times(profile: Profile) -> bool:
    """Return whether the profile says what input and weight gradients take, each by itself."""
    # derived costs always do; measured ones where the two parts were timed
    return profile.source == "analytic" or any(
        (cost.split_factor, cost.input_share) != (1.0, 0.5) for cost in profile.costs
    )


def with_part_times(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan with what half a forward and a backward in two parts take, as the profile says."""
    stages = []
    for stage in plan.stages:
        blocks, local = costs.indices(stage.blocks), stage.local_batch_size
        own = costs.on(stage)
        input_us, weight_us = own.split_times(blocks, local, stage.ranks)
        if stage.memory is not None:
            rate = min(costs.cluster.devices[rank].host_bytes_per_s for rank in stage.ranks)
            input_us += stage.memory.added_us
            weight_us += stage.memory.recompute_us + stage.memory.swapped_bytes / rate * 1e6
        stages.append(
            dataclasses.replace(
                stage,
                half_forward_us=own.stage_times(blocks, local / 2, stage.ranks)[0],
                input_gradient_us=input_us,
                weight_gradient_us=weight_us,
            )
        )
    return dataclasses.replace(plan, stages=tuple(stages))


def most_pending(schedule: StageSchedule) -> int:
    """Return the most micro-batches at a time whose input gradient is made and whose weight gradient is not."""
    pending = most = 0
    for task in schedule.tasks:
        pending += (task.kind is TaskKind.INPUT_GRADIENT) - (task.kind is TaskKind.WEIGHT_GRADIENT)
        most = max(most, pending)
    return most


def with_pending(plan: PipelinePlan, costs: CostModel, schedules: Sequence[StageSchedule]) -> PipelinePlan:
    """Return the plan whose stages count the gradients that these orders leave pending, and no others."""
    pending = [most_pending(schedule) for schedule in schedules]
    needs = [
        stage.memory_bytes + pending_bytes(stage, costs, count) - pending_bytes(stage, costs, stage.pending)
        for stage, count in zip(plan.stages, pending, strict=True)
    ]
    return plan.with_each(pending=pending, memory_bytes=[max(need, 0) for need in needs])


def pending_bytes(stage: Stage, costs: CostModel, pending: int) -> int:
    """Return what ``pending`` micro-batches of a stage hold while they wait for their weight gradients."""
    return round(pending * costs.on(stage).pending_bytes(costs.indices(stage.blocks), stage.local_batch_size))


def splits_backwards(plan: PipelinePlan) -> bool:
    """Return whether a stage's schedule makes backwards in two parts."""
    return any(find_schedule(stage.schedule).splits_backward for stage in plan.stages)
