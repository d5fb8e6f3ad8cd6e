"""A captured part of a stage graph: cut into stages of its own, and what one of them holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.integrations.preparation import Setting, plan_request
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.fixed import FixedStage
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.pipeline import Lane
from gpp_plugin.stage_graph.part import owner_of_block


def cut_part(
    graph: BlockGraph,
    profile: Profile,
    *,
    name: str,
    ranks: Sequence[int],
    num_stages: int | None,
    micro_batch_size: int | None,
    config: GraphPipelineConfig,
    setting: Setting,
    smallest_local_batch: int,
) -> list[FixedStage]:
    """Return the stages that a planner cuts a captured part into, on its own ranks.

    What they swap and recompute follows when the whole graph says how many micro-batches they hold.

    Args:
        num_stages: exactly that many; None leaves it to the planner.

    Raises:
        PlanError, PlanInfeasible: the part cannot be cut so.
    """
    blocks = tuple(block.name for block in graph.blocks)
    if num_stages == 1 or (num_stages is None and len(ranks) == 1):
        return [FixedStage(name=name, blocks=blocks, ranks=tuple(ranks), micro_batch_size=micro_batch_size)]
    request = plan_request(
        graph,
        config,
        setting,
        profile,
        {} if micro_batch_size is None else {"*": micro_batch_size},
        smallest_local_batch=smallest_local_batch,
    )
    request = dataclasses.replace(
        request,
        num_ranks=len(ranks),
        num_stages=num_stages,
        data_parallel=None,
        cluster=dataclasses.replace(
            request.cluster, devices=tuple(request.cluster.devices[rank] for rank in ranks)
        ),
    )
    plan = make_plan(config.planner, request)
    return [
        FixedStage(
            name=name,
            is_piece=len(plan.stages) > 1,
            blocks=stage.blocks,
            ranks=tuple(ranks[rank] for rank in stage.ranks),
            micro_batch_size=micro_batch_size,
        )
        for stage in plan.stages
    ]


def names_held(name: str, lane: Lane, sample_batch: Batch) -> tuple[str, ...]:
    """Return what this rank's stage of the captured part ``name`` holds.

    What no block of the part reads must still be in files: it rests on the part's last stage.
    """
    graph, op_graph = lane.reference.block_graph, lane.reference.analysis.op_graph
    own = set(lane.plan.stages[lane.stage_index].blocks)
    names = [*lane.prepare(sample_batch).tensors]
    names += [n for block in graph.blocks if block.name in own for n in block.parameters]
    mine = {block.name for block in graph.blocks if owner_of_block(block.name) == name}
    last = max(i for i, stage in enumerate(lane.plan.stages) if not mine.isdisjoint(stage.blocks))
    if last == lane.stage_index:
        used = {n for block in graph.blocks for n in block.parameters}
        names += [
            p.name
            for p in op_graph.parameters
            if p.name.startswith(f"{name}.") and p.name not in used and (p.is_persistent or not p.is_buffer)
        ]
    return tuple(dict.fromkeys(names))
