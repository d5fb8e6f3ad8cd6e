"""Stages that are the user's own modules run again as a whole before their backward (Chen et al., 2016).

Such a stage is one segment. It keeps what it received and its buffers, and holds for one micro-batch at a time what
its forward made; that costs a forward more. Nothing is gained with one micro-batch in flight, whose backward follows
its forward, or where what is kept instead is as large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gpp_plugin.ir.memory_plan import MemoryPlan, RecomputedSegment
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.plan.judge import judge_us
from gpp_plugin.plan.memory_breakdown import memory_breakdown
from gpp_plugin.plan.registry import PlanRequest, rank_limit
from gpp_plugin.plan.validate import validate_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRecompute:
    """What a stage drops if it runs again, and what it keeps for that beside what it keeps anyway.

    Args:
        dropped_bytes_per_sample, dropped_bytes_fixed: of one micro-batch on one rank.
        held_bytes_per_sample, held_bytes_fixed: received tensors that the plain backward does not read, and buffers.
    """

    dropped_bytes_per_sample: float
    dropped_bytes_fixed: float
    held_bytes_per_sample: float
    held_bytes_fixed: float

    def memory_plan(self, stage: Stage) -> MemoryPlan | None:
        """Return the stage's plan with its only segment; None where nothing is gained."""
        local = stage.local_batch_size
        dropped = round(self.dropped_bytes_per_sample * local + self.dropped_bytes_fixed)
        held = round(self.held_bytes_per_sample * local + self.held_bytes_fixed)
        if stage.in_flight == 1 or dropped <= held:
            return None
        segment = RecomputedSegment(
            blocks=stage.blocks, tensors=(), bytes=dropped, held_bytes=held, recompute_us=stage.forward_us
        )
        return MemoryPlan(recomputed=(segment,), working_bytes=dropped)


def recompute_given(
    plan: PipelinePlan,
    request: PlanRequest,
    known: Mapping[str, WholeRecompute],
    *,
    only_where_needed: bool = False,
) -> PipelinePlan:
    """Return the plan with its stages recomputed.

    Args:
        known: stage -> what recomputing it does; other stages stay as they are.
        only_where_needed: leave alone the stages that fit without, and those that it does not make smaller; the plan
            may be one that does not fit.

    Raises:
        PlanInfeasible: a stage does not fit even so.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    stages = tuple(
        stage
        if only_where_needed and stage.memory_bytes <= min(rank_limit(request, rank) for rank in stage.ranks)
        else _recomputed(stage, costs, known.get(stage.name))
        for stage in plan.stages
    )
    changed = dataclasses.replace(plan, stages=stages)
    parts = memory_breakdown(changed, request.profile, zero_stage=request.zero_stage)
    stages = tuple(
        old
        if new is old or (only_where_needed and part.total >= old.memory_bytes)
        else dataclasses.replace(new, memory_bytes=part.total)
        for old, new, part in zip(plan.stages, stages, parts, strict=True)
    )
    changed = dataclasses.replace(plan, stages=stages)
    if plan.mode == "sync":
        changed = dataclasses.replace(changed, iteration_us=judge_us(changed, costs))
    if not only_where_needed:
        validate_plan(
            changed,
            request.graph,
            profile=request.profile,
            cluster=request.cluster,
            memory_limit_bytes=request.memory_limit_bytes,
            zero_stage=request.zero_stage,
        )
    return changed


def _recomputed(stage: Stage, costs: CostModel, known: WholeRecompute | None) -> Stage:
    memory = None if known is None else known.memory_plan(stage)
    if memory is None:
        return stage
    backward_us = costs.stage_times(costs.indices(stage.blocks), stage.local_batch_size)[1]
    return dataclasses.replace(stage, memory=memory, backward_us=backward_us + memory.added_us)
