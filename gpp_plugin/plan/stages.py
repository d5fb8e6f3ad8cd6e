"""The one way from groups of blocks to a PipelinePlan: order, names, ranks, edges, in-flight, costs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.plan.in_flight_local import plan_in_flight
from gpp_plugin.plan.registry import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """A stage as a planner decides it, before names and ranks.

    Args:
        blocks: names, in any order.
        degree: number of data-parallel ranks.
        name: given by the user, or None.
        ranks: given by the user, or None: consecutive ranks in stage order.
    """

    blocks: tuple[str, ...]
    degree: int
    micro_batch_size: int
    k: int = 1
    name: str | None = None
    ranks: tuple[int, ...] | None = None


def build_plan(
    request: PlanRequest,
    drafts: Sequence[StageDraft],
    *,
    planner: str,
    notes: Sequence[str] = (),
    costs: CostModel | None = None,
) -> PipelinePlan:
    """Return the plan of these stages, with its in-flight counts and predicted costs.

    Raises:
        PlanError: the stages depend on each other in a circle, or two have the same name.
    """
    graph = request.graph
    if costs is None:
        costs = CostModel(graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    position = costs.index
    order = order_stages(graph, [draft.blocks for draft in drafts])
    ordered = [
        dataclasses.replace(drafts[i], blocks=tuple(sorted(drafts[i].blocks, key=position.__getitem__)))
        for i in order
    ]
    names = name_stages(graph, ordered)
    ranks = assign_ranks(ordered)
    stages = []
    for draft, name, group in zip(ordered, names, ranks, strict=True):
        forward, backward = costs.stage_times(
            costs.indices(draft.blocks), draft.micro_batch_size / draft.degree
        )
        stages.append(
            Stage(
                name=name,
                blocks=draft.blocks,
                ranks=group,
                micro_batch_size=draft.micro_batch_size,
                in_flight=1,
                schedule=request.schedule,
                k=draft.k,
                forward_us=forward,
                backward_us=backward,
            )
        )
    plan = PipelinePlan(
        model=graph.model,
        graph=fingerprint(graph),
        planner=planner,
        mini_batch=request.mini_batch,
        loss_unit=request.loss_unit,
        stages=tuple(stages),
        edges=stage_edges(graph, [stage.blocks for stage in stages]),
        notes=tuple(notes),
    )
    return with_in_flight(plan, costs)


def with_in_flight(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan with in-flight counts from its sinks and the memory they lead to."""
    counts = plan_in_flight(plan)
    stages = tuple(
        dataclasses.replace(
            stage,
            in_flight=count,
            memory_bytes=costs.stage_memory(
                costs.indices(stage.blocks),
                degree=stage.degree,
                local=stage.local_batch_size,
                in_flight=count,
            ),
        )
        for stage, count in zip(plan.stages, counts, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


def stage_edges(graph: BlockGraph, groups: Sequence[Sequence[str]]) -> tuple[StageEdge, ...]:
    """Return the edges between groups of blocks: every tensor once per pair of stages."""
    stage_of = {block: i for i, blocks in enumerate(groups) for block in blocks}
    between: dict[tuple[int, int], dict[str, None]] = {}
    for edge in graph.edges:
        pair = (stage_of[edge.src], stage_of[edge.dst])
        if pair[0] != pair[1]:
            between.setdefault(pair, {}).update(dict.fromkeys(edge.tensors))
    return tuple(_stage_edge(graph, src, dst, tuple(between[src, dst])) for src, dst in sorted(between))


def _stage_edge(graph: BlockGraph, src: int, dst: int, names: tuple[str, ...]) -> StageEdge:
    specs = [graph.tensors[name] for name in names]
    batch = [spec for spec in specs if spec.layout.kind is LayoutKind.BATCH]
    whole = [spec for spec in specs if spec.layout.kind is not LayoutKind.BATCH]
    return StageEdge(
        src=src,
        dst=dst,
        batch_tensors=tuple(spec.name for spec in batch),
        whole_tensors=tuple(spec.name for spec in whole),
        gradient_tensors=tuple(spec.name for spec in specs if spec.requires_grad),
        bytes_per_sample=sum(s.bytes_for(s.num_samples) / s.num_samples for s in batch),
        bytes_fixed=float(sum(s.bytes_for(s.num_samples) for s in whole)),
        gradient_bytes_per_sample=sum(
            s.bytes_for(s.num_samples) / s.num_samples for s in batch if s.requires_grad
        ),
        gradient_bytes_fixed=float(sum(s.bytes_for(s.num_samples) for s in whole if s.requires_grad)),
    )


def order_stages(graph: BlockGraph, groups: Sequence[Sequence[str]]) -> list[int]:
    """Return a topological order of the groups, branch after branch.

    After a stage come its successors where they are ready, so that a branch is finished before the
    next one begins and neighbours in the order are neighbours in the graph.

    Raises:
        PlanError: a block is in no group, in two, or the groups depend on each other in a circle.
    """
    position = {block.name: i for i, block in enumerate(graph.blocks)}
    stage_of: dict[str, int] = {}
    for i, blocks in enumerate(groups):
        for block in blocks:
            if block not in position:
                raise PlanError(f"stage {i} names block {block!r}, which the model does not have")
            if block in stage_of:
                raise PlanError(f"block {block!r} is in two stages ({stage_of[block]} and {i}); keep one")
            stage_of[block] = i
    missing = [name for name in position if name not in stage_of]
    if missing:
        raise PlanError(f"{len(missing)} blocks are in no stage: {missing[:3]}; add them to one")
    first = [min(position[block] for block in blocks) for blocks in groups]
    quotient = nx.DiGraph()
    quotient.add_nodes_from(range(len(groups)))
    for edge in graph.edges:
        if stage_of[edge.src] != stage_of[edge.dst]:
            quotient.add_edge(stage_of[edge.src], stage_of[edge.dst])
    waiting = {stage: quotient.in_degree(stage) for stage in quotient}
    ready = sorted((s for s in quotient if waiting[s] == 0), key=first.__getitem__, reverse=True)
    order: list[int] = []
    while ready:
        stage = ready.pop()
        order.append(stage)
        freed = []
        for successor in quotient.successors(stage):
            waiting[successor] -= 1
            if waiting[successor] == 0:
                freed.append(successor)
        ready.extend(sorted(freed, key=first.__getitem__, reverse=True))
    if len(order) < len(groups):
        circle = [edge[0] for edge in nx.find_cycle(quotient)]
        blocks = [groups[s][0] for s in circle]
        raise PlanError(
            f"the stages of {' -> '.join([*blocks, blocks[0]])} depend on each other in a circle; "
            "move the blocks between them into one stage"
        )
    return order


def assign_ranks(drafts: Sequence[StageDraft]) -> list[tuple[int, ...]]:
    """Return each stage's ranks: the given ones, or the next free ones in stage order."""
    taken = {rank for draft in drafts if draft.ranks is not None for rank in draft.ranks}
    total = sum(draft.degree for draft in drafts)
    free = iter(rank for rank in range(total) if rank not in taken)
    return [
        draft.ranks if draft.ranks is not None else tuple(next(free) for _ in range(draft.degree))
        for draft in drafts
    ]


def name_stages(graph: BlockGraph, drafts: Sequence[StageDraft]) -> list[str]:
    """Return short unique names: the module that a stage's blocks share, numbered where it is cut.

    Stages that share no module component are told apart by it (``vision_model``, ``text_model``);
    those that do are numbered (``vision_model.0``). The stage with the loss is ``loss``.
    """
    names: dict[int, str] = {}
    for i, draft in enumerate(drafts):
        if draft.name is not None:
            names[i] = draft.name
        elif graph.loss_block is not None and graph.loss_block in draft.blocks:
            names[i] = "loss"
    paths = {
        i: [block.split("#")[0].split(".") for block in draft.blocks]
        for i, draft in enumerate(drafts)
        if i not in names
    }
    for members, label in _label_groups(paths, list(paths), 0, ""):
        for number, i in enumerate(members):
            names[i] = label if len(members) == 1 else f"{label}.{number}"
    result: list[str] = []
    for i in range(len(drafts)):
        name, number = names[i], 1
        while name in result:
            name, number = f"{names[i]}#{number}", number + 1
        result.append(name)
    return result


def _label_groups(
    paths: dict[int, list[list[str]]], members: list[int], depth: int, prefix: str
) -> list[tuple[list[int], str]]:
    """Split stages into groups that share a component at ``depth`` and label each group."""
    components = {
        i: Counter(path[depth] for path in paths[i] if len(path) > depth and _starts(path, prefix))
        for i in members
    }
    shared = nx.Graph()
    shared.add_nodes_from(members)
    for a in members:
        shared.add_edges_from(
            (a, b) for b in members if a < b and components[a].keys() & components[b].keys()
        )
    clusters = [sorted(cluster) for cluster in nx.connected_components(shared)]
    is_numbers = any(len(c) > 1 and all(key.isdigit() for key in c) for c in components.values())
    if prefix and (len(clusters) == 1 or is_numbers or not all(components.values())):
        return [(members, prefix)]
    labelled = []
    for cluster in sorted(clusters):
        total: Counter[str] = sum((components[i] for i in cluster), Counter())
        label = max(total, key=lambda key: (total[key], -len(key), key))
        name = f"{prefix}.{label}" if prefix else label
        if len(cluster) == 1:
            labelled.append((cluster, name))
        else:
            labelled.extend(_label_groups(paths, cluster, depth + 1, name))
    return labelled


def _starts(path: list[str], prefix: str) -> bool:
    return not prefix or path[: prefix.count(".") + 1] == prefix.split(".")
