"""What a plan's memory is predicted to be filled with, stage by stage: the terms of `memory_formula` one by one.

Their sums are the plan's own figures.

Source: this project
Tests: tests/integrations/test_memory.py
"""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.memory_plan import MemoryBreakdown
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.costs.memory_formula import shared_out, stashed_bytes, unreduced_bytes
from gpp_plugin.plan.request import PlanRequest, rank_limit


def memory_breakdown(
    plan: PipelinePlan, profile: Profile, *, zero_stage: int = 0
) -> tuple[MemoryBreakdown, ...]:
    """Return the bytes of one rank of each stage at its peak.

    Args:
        profile: of the graph the plan was made for.
        zero_stage: what the ranks of a stage share out among themselves.
    """
    return tuple(
        _of_stage(stage, plan.num_versions(index), profile, zero_stage)
        for index, stage in enumerate(plan.stages)
    )


def with_breakdown(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a finished plan that says what fills its ranks, so that each can compare what it really holds."""
    parts = memory_breakdown(plan, request.profile, zero_stage=request.zero_stage)
    limits = [min(rank_limit(request, rank) for rank in stage.ranks) for stage in plan.stages]
    memory = tuple(dataclasses.replace(part, limit=limit) for part, limit in zip(parts, limits, strict=True))
    return dataclasses.replace(plan, memory=memory)


def _of_stage(stage: Stage, num_versions: int, profile: Profile, zero_stage: int) -> MemoryBreakdown:
    by_block = profile.by_block()
    costs = [by_block[name] for name in stage.blocks]
    local = stage.local_batch_size
    again = profile.counted_again(stage.blocks)
    weights = sum(c.parameter_bytes for c in costs) - again[0]
    shared, shared_fixed = profile.kept_with_others(stage.blocks)
    kept = shared * local + shared_fixed
    kept += sum(c.saved_bytes_per_sample * local + c.saved_bytes_fixed for c in costs)
    working = 0
    if stage.memory is not None:
        kept -= stage.memory.swapped_bytes + stage.memory.recomputed_bytes
        working = stage.memory.working_bytes
    gradients = sum(c.gradient_bytes for c in costs) - again[1]
    optimizer = sum(c.optimizer_bytes for c in costs) - again[2]
    transient = max((c.transient_bytes_per_sample * local for c in costs), default=0.0)
    # What is kept is what the stage's own memory plan leaves: that much makes room for whole gradients.
    transient += unreduced_bytes(gradients, kept, degree=stage.degree, zero_stage=zero_stage)
    own_gradients, own_optimizer = shared_out(
        gradients, optimizer, degree=stage.degree, zero_stage=zero_stage
    )
    return MemoryBreakdown(
        stage=stage.name,
        weights=weights,
        stashed_weights=stashed_bytes(gradients, num_versions),
        gradients=int(own_gradients),
        optimizer=int(own_optimizer),
        activations=round(stage.in_flight * kept),
        working=working,
        transient=round(transient),
        inputs=round(profile.input_bytes(stage.blocks, stage.degree)),
    )
