"""Blocks that share a trained parameter, planned as one block for mode async.

Stages that step after every micro-batch differ by as many updates as they hold micro-batches more. A parameter on two
of them would have two values at a time, and its gradient, the sum of both stages' for one micro-batch, is known to the
later stage only when the earlier one has run its backward: either would wait for the other across the pipeline, or
the copies would diverge. So the blocks that share one are in one stage, with all that lies on paths between them:
otherwise stages would depend on each other in a circle. What is left can still be many stages, where a model has
branches; of a chain whose first and last block share a parameter, one stage is left.

Those blocks are what is strongly connected in the graph of blocks if edges between blocks that share go both ways.

Source: this project
Tests: tests/plan/test_tied_blocks.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.make import stage_edges
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.stage_names import name_stages

UNTIE = (
    "untie it (Hugging Face: tie_word_embeddings=False, or, as T5 ignores that, a copy for one module: "
    "model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone()))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedBlocks:
    """A graph whose blocks are single blocks of another one, or several that share parameters.

    Args:
        members: joined block -> its blocks, in order.
        parameters: trained ones that several of those blocks share.
    """

    members: dict[str, tuple[str, ...]]
    parameters: tuple[str, ...]

    @property
    def name_of(self) -> dict[str, str]:
        """Return block -> joined block."""
        return {block: name for name, blocks in self.members.items() for block in blocks}

    def check_stages(self, num_stages: int | None) -> None:
        """Refuse more stages than there are joined blocks.

        Raises:
            PlanError: says which parameter joins how many blocks.
        """
        if num_stages is None or num_stages <= len(self.members) or not self.parameters:
            return
        largest = max(self.members.values(), key=len)
        count = sum(map(len, self.members.values()))
        raise PlanError(
            f"mode async: parameter {self.parameters[0]!r} is used by several blocks, which step together only in one "
            f"stage: {largest[0]!r} to {largest[-1]!r}, {len(largest)} of {count} blocks "
            f"with those between, which leaves {len(self.members)} for the {num_stages} requested stages; "
            f'{UNTIE}, lower stages, or set mode to "sync"'
        )


def join_tied_blocks(graph: BlockGraph, trained: Collection[str] | None = None) -> JoinedBlocks:
    """Return which blocks are in one stage in mode async.

    Args:
        trained: names of the parameters that are trained; None: all.
    """
    ties = {name: used for name, used in graph.tied.items() if trained is None or name in trained}
    digraph = nx.DiGraph()
    digraph.add_nodes_from(block.name for block in graph.blocks)
    digraph.add_edges_from((edge.src, edge.dst) for edge in graph.edges)
    for used in ties.values():
        for first, second in zip(used, used[1:], strict=False):
            digraph.add_edges_from([(first, second), (second, first)])
    position = {block.name: i for i, block in enumerate(graph.blocks)}
    condensed = nx.condensation(digraph)
    parts = {
        node: tuple(sorted(blocks, key=position.__getitem__)) for node, blocks in condensed.nodes("members")
    }
    order = nx.lexicographical_topological_sort(condensed, key=lambda node: position[parts[node][0]])
    return JoinedBlocks(members={parts[node][0]: parts[node] for node in order}, parameters=tuple(ties))


def joined_request(request: PlanRequest) -> tuple[PlanRequest, JoinedBlocks]:
    """Return a request for the graph whose blocks are joined, and how they are.

    Raises:
        PlanError: more stages are requested than are left.
    """
    frozen = {tie.blocks for tie in request.profile.tied if not tie.gradient_bytes}
    joined = join_tied_blocks(
        request.graph, [name for name, used in request.graph.tied.items() if used not in frozen]
    )
    joined.check_stages(request.num_stages)
    if len(joined.members) == len(request.graph.blocks):
        return request, joined
    graph = _joined_graph(request.graph, request.profile, joined)
    profile = _joined_profile(request.profile, joined, graph.fingerprint)
    return dataclasses.replace(request, graph=graph, profile=profile), joined


def parted(plan: PipelinePlan, request: PlanRequest, joined: JoinedBlocks) -> PipelinePlan:
    """Return a plan of joined blocks as one of the blocks of ``request``; what fills its memory is not worked out."""
    if len(joined.members) == len(request.graph.blocks):
        return plan
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    position = costs.index
    groups = [
        tuple(sorted((b for name in stage.blocks for b in joined.members[name]), key=position.__getitem__))
        for stage in plan.stages
    ]
    together = max(joined.members.values(), key=len)
    note = (
        f"{len(together)} blocks are in one stage, as {' and '.join(joined.parameters)} must be in mode async"
    )
    names = name_stages(request.graph, groups)
    return dataclasses.replace(
        plan,
        graph=costs.graph.fingerprint,
        stages=tuple(
            dataclasses.replace(stage, name=name, blocks=group, memory=None)
            for stage, name, group in zip(plan.stages, names, groups, strict=True)
        ),
        losses=tuple(names[index] for index in plan.loss_stages()) if plan.losses else (),
        edges=stage_edges(request.graph, groups, [s.context for s in plan.stages], costs=costs),
        notes=(*plan.notes, note),
    )


def _joined_graph(graph: BlockGraph, profile: Profile, joined: JoinedBlocks) -> BlockGraph:
    name_of = joined.name_of
    edges: dict[tuple[str, str, int | None, int | None], dict[str, None]] = {}
    for edge in graph.edges:
        src, dst = name_of[edge.src], name_of[edge.dst]
        if src != dst:
            axes = (edge.src_shard_axis, edge.dst_shard_axis)
            edges.setdefault((src, dst, *axes), {}).update(dict.fromkeys(edge.tensors))
    crossing = {tensor for tensors in edges.values() for tensor in tensors}
    return dataclasses.replace(
        graph,
        blocks=tuple(_joined_block(graph, profile, name, own) for name, own in joined.members.items()),
        edges=tuple(
            BlockEdge(src=src, dst=dst, tensors=tuple(tensors), src_shard_axis=a, dst_shard_axis=b)
            for (src, dst, a, b), tensors in edges.items()
        ),
        tensors={name: spec for name, spec in graph.tensors.items() if name in crossing},
        loss_block=None if graph.loss_block is None else name_of[graph.loss_block],
        more_losses=_once(name_of[name] for name in graph.more_losses),
        tied={
            name: users
            for name, used in graph.tied.items()
            if len(users := _once(name_of[block] for block in used)) > 1
        },
        saved=tuple(
            dataclasses.replace(
                tensor,
                made_by=name_of.get(tensor.made_by, ""),
                kept_by=_once(name_of[block] for block in tensor.kept_by),
            )
            for tensor in graph.saved
        ),
    )


def _joined_block(graph: BlockGraph, profile: Profile, name: str, members: Sequence[str]) -> Block:
    blocks = [graph.block(member) for member in members]
    again = profile.counted_again(members)
    return Block(
        name=name,
        nodes=tuple(node for block in blocks for node in block.nodes),
        parameters=_once(p for block in blocks for p in block.parameters),
        inputs=_once(key for block in blocks for key in block.inputs),
        parameter_bytes=sum(block.parameter_bytes for block in blocks) - again[0],
        trainable_bytes=sum(block.trainable_bytes for block in blocks) - again[1],
        flops=sum(block.flops for block in blocks),
        saved_bytes=sum(block.saved_bytes for block in blocks),
        is_coupled=any(block.is_coupled for block in blocks),
        is_trainable=any(block.is_trainable for block in blocks),
    )


def _joined_profile(profile: Profile, joined: JoinedBlocks, graph: str) -> Profile:
    name_of, costs = joined.name_of, profile.by_block()

    def still_shared(used: Iterable[str]) -> tuple[str, ...]:
        return _once(name_of[block] for block in used)

    return dataclasses.replace(
        profile,
        graph=graph,
        costs=tuple(
            _joined_cost(name, [costs[block] for block in own], profile.counted_again(own))
            for name, own in joined.members.items()
        ),
        shared=tuple(
            dataclasses.replace(storage, blocks=still_shared(storage.blocks))
            for storage in profile.shared
            if len(still_shared(storage.blocks)) > 1
        ),
        inputs=tuple(
            dataclasses.replace(entry, blocks=still_shared(entry.blocks)) for entry in profile.inputs
        ),
        tied=tuple(
            dataclasses.replace(tie, blocks=still_shared(tie.blocks))
            for tie in profile.tied
            if len(still_shared(tie.blocks)) > 1
        ),
    )


def _joined_cost(name: str, costs: Sequence[BlockCost], again: tuple[int, int, int]) -> BlockCost:
    if len(costs) == 1:
        return costs[0]
    samples = tuple(sorted({count for cost in costs for count in cost.samples}))
    return BlockCost(
        block=name,
        samples=samples,
        forward_us=tuple(sum(cost.forward_us_for(count) for cost in costs) for count in samples),
        backward_us=tuple(sum(cost.backward_us_for(count) for cost in costs) for count in samples),
        saved_bytes_per_sample=sum(cost.saved_bytes_per_sample for cost in costs),
        saved_bytes_fixed=sum(cost.saved_bytes_fixed for cost in costs),
        parameter_bytes=sum(cost.parameter_bytes for cost in costs) - again[0],
        gradient_bytes=sum(cost.gradient_bytes for cost in costs) - again[1],
        optimizer_bytes=sum(cost.optimizer_bytes for cost in costs) - again[2],
        transient_bytes_per_sample=max(cost.transient_bytes_per_sample for cost in costs),
        pending_bytes_per_sample=sum(cost.pending_bytes_per_sample for cost in costs),
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
