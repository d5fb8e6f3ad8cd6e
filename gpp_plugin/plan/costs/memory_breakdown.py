"""What a plan's memory is predicted to be filled with, stage by stage: the terms of `memory_formula` one by one.

Their sums are the plan's own figures. Beside them: what messages hold on their way (`under_way_bytes`), what stages
hold of the mini-batch itself (`with_inputs`: every row that one of their tasks will read, from its start to its end),
and what autograd keeps if a plan is kept to, with how far what was counted is from it (`expected_counts`,
`differences`).

Planners cut a model without messages in mind. Where a plan's ranks have no room for them, it is planned again with so
much less memory (`plan_beside_messages`).

Source: this project
Tests: tests/plan/test_memory_breakdown.py, tests/plan/test_inputs.py, tests/integrations/test_memory.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.memory_plan import MemoryBreakdown, joined_breakdown
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import InputCost, Profile
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.plan.costs.memory_formula import sharded_bytes, shared_out, stashed_bytes, unreduced_bytes
from gpp_plugin.plan.costs.tensor_costs import sharded_profile
from gpp_plugin.plan.request import PlanRequest, rank_limit
from gpp_plugin.schedule.messages import under_way_bytes

MOST_PLANS = 3
"""Plans that are made of one request so that messages fit beside all else."""


def memory_breakdown(
    plan: PipelinePlan,
    profile: Profile,
    *,
    graph: BlockGraph | None = None,
    zero_stage: int = 0,
    more_samples: float = 1.0,
) -> tuple[MemoryBreakdown, ...]:
    """Return the bytes of one rank of each stage at its peak.

    Args:
        profile: of the graph the plan was made for.
        graph: that graph; None: tensor ranks divide nothing of the profile's costs.
        zero_stage: what the ranks of a stage share out among themselves.
        more_samples: samples of a micro-batch over those that are planned, where units have others.
    """
    of_tensor = {
        tensor: profile if graph is None else sharded_profile(profile, graph, tensor)
        for tensor in {stage.tensor for stage in plan.stages}
    }
    return tuple(
        dataclasses.replace(
            _of_stage(stage, plan.num_versions(index), of_tensor[stage.tensor], zero_stage, more_samples),
            messages=under_way_bytes(plan, index, more_samples=more_samples),
        )
        for index, stage in enumerate(plan.stages)
    )


def with_breakdown(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a finished plan that says what fills its ranks, so that each can compare what it really holds.

    It says too of which stages the ranks hold parts of the parameters, whatever the plan's own request was.
    """
    parts = memory_breakdown(plan, request.profile, graph=request.graph, zero_stage=request.zero_stage)
    stages = tuple(
        dataclasses.replace(stage, sharded_bytes=part.weights + part.gathered if part.gathered else 0)
        for stage, part in zip(plan.stages, parts, strict=True)
    )
    limits = [min(rank_limit(request, rank) for rank in stage.ranks) for stage in plan.stages]
    memory = tuple(dataclasses.replace(part, limit=limit) for part, limit in zip(parts, limits, strict=True))
    return dataclasses.replace(plan, stages=stages, memory=memory)


def plan_beside_messages(request: PlanRequest, make: Callable[[PlanRequest], PipelinePlan]) -> PipelinePlan:
    """Return what is made of a request, or of one with less memory, so that messages under way fit as well.

    Args:
        make: makes a plan, each time of the same stages or of a planner's.
    """
    # A rank of 100 MB, a plan that holds 90 and 25 of messages: 15 too many, so the second one is made for 85 MB. Where
    # that one holds 80, and 30 of messages as it has more edges, 10 are too many, and the third is made for 75.
    plan = first = make(request)
    taken = 0
    for _ in range(MOST_PLANS - 1):
        over = _excess_bytes(plan, request)
        if over <= 0:
            return plan
        taken += over
        ranks = {rank for stage in plan.stages for rank in stage.ranks}
        limit = min(rank_limit(request, rank) for rank in ranks) - taken
        try:
            plan = make(dataclasses.replace(request, memory_limit_bytes=limit))
        except PlanInfeasible:
            break
    if _excess_bytes(plan, request) <= 0:
        return plan
    over = _excess_bytes(first, request)
    note = f"messages on their way may take {over} bytes more than a rank has; lower micro_batch_sizes if it runs out"
    return dataclasses.replace(first, notes=(*first.notes, note))


def _excess_bytes(plan: PipelinePlan, request: PlanRequest) -> int:
    """Return the most bytes by which a rank that fits exceeds its limit with its messages; 0 where none does."""
    parts = memory_breakdown(plan, request.profile, graph=request.graph, zero_stage=request.zero_stage)
    found = 0
    for rank in {rank for stage in plan.stages for rank in stage.ranks}:
        own = joined_breakdown([parts[stage] for stage in plan.stages_of_rank(rank)])
        over = own.total + own.messages - rank_limit(request, rank)
        # a rank that exceeds it without messages is a plan that was given, and is for the validator
        found = max(found, over if over <= own.messages else 0)
    return found


def _of_stage(
    stage: Stage, num_versions: int, profile: Profile, zero_stage: int, more_samples: float
) -> MemoryBreakdown:
    by_block = profile.by_block()
    costs = [by_block[name] for name in stage.blocks]
    local = stage.local_batch_size * more_samples
    again = profile.counted_again(stage.blocks)
    weights = sum(c.parameter_bytes for c in costs) - again[0]
    shared, shared_fixed = profile.kept_with_others(stage.blocks)
    kept = shared * local + shared_fixed
    kept += sum(c.saved_bytes_per_sample * local + c.saved_bytes_fixed for c in costs)
    working = 0
    if stage.memory is not None:
        kept -= (stage.memory.swapped_bytes + stage.memory.recomputed_bytes) * more_samples
        working = round(stage.memory.working_bytes * more_samples)
    gradients = sum(c.gradient_bytes for c in costs) - again[1]
    optimizer = sum(c.optimizer_bytes for c in costs) - again[2]
    transient = max((c.transient_bytes_per_sample * local for c in costs), default=0.0)
    # What is kept is what the stage's own memory plan leaves: that much makes room for whole gradients.
    transient += unreduced_bytes(gradients, kept, degree=stage.degree, zero_stage=zero_stage)
    transient += stage.pending * sum(c.pending_bytes_per_sample * local for c in costs)
    own_gradients, own_optimizer = shared_out(
        gradients, optimizer, degree=stage.degree, zero_stage=zero_stage
    )
    sharded = sharded_bytes(weights, degree=stage.degree, zero_stage=zero_stage)
    gathered = dataclasses.replace(stage, sharded_bytes=sharded).gathered_bytes
    return MemoryBreakdown(
        stage=stage.name,
        weights=weights - gathered,
        gathered=gathered,
        stashed_weights=stashed_bytes(gradients, num_versions),
        gradients=int(own_gradients),
        optimizer=int(own_optimizer),
        activations=round(stage.in_flight * kept),
        working=working,
        transient=round(transient),
        inputs=round(profile.input_bytes(stage.blocks, stage.degree) * more_samples),
    )


def with_inputs(
    profile: Profile, graph: BlockGraph, inputs: Iterable[TensorSpec], *, mini_batch: int, dtype: str
) -> Profile:
    """Return a profile that knows the batches which plans are made for.

    Args:
        inputs: the model's, by batch key.
        mini_batch: samples of a step.
        dtype: floats are cast to it.
    """
    found = []
    for spec in inputs:
        if spec.dtype.startswith(("float", "bfloat")):
            spec = dataclasses.replace(spec, dtype=dtype)
        readers = tuple(block.name for block in graph.blocks if spec.name in block.inputs)
        if readers:
            has_samples = spec.layout.kind is LayoutKind.BATCH
            found.append(
                InputCost(blocks=readers, bytes=spec.bytes_for(mini_batch), is_shared_out=has_samples)
            )
    return dataclasses.replace(profile, inputs=tuple(found))


TOLERANCE = 0.02
LEAST_BYTES = 1024
"""Differences below this are of single small tensors, whatever share of a small stage they are."""


def expected_counts(plan: PipelinePlan, stage: int) -> MemoryCounts | None:
    """Return what one rank of a stage keeps, swaps and recomputes; None where the plan predicts nothing."""
    if not plan.memory:
        return None
    memory, in_flight = plan.stages[stage].memory, plan.stages[stage].in_flight
    activations = plan.memory[stage].activations
    return MemoryCounts(
        held_bytes=round(activations / in_flight),
        swapped_bytes=memory.swapped_bytes if memory is not None else 0,
        recomputed_bytes=sum(segment.bytes for segment in memory.recomputed) if memory is not None else 0,
        peak_held_bytes=activations,
        stashed_bytes=plan.memory[stage].stashed_weights,
    )


def differences(
    plan: PipelinePlan, stage: int, counted: MemoryCounts, *, only_more: bool = False
) -> list[str]:
    """Return a phrase for every count that is off by more than `TOLERANCE`; none where nothing is predicted.

    Args:
        only_more: leave out what holds less memory than is planned.
    """
    expected = expected_counts(plan, stage)
    if expected is None:
        return []
    found = []
    for name, what in (
        ("held_bytes", "holds"),
        ("swapped_bytes", "swaps"),
        ("recomputed_bytes", "recomputes"),
        ("peak_held_bytes", "holds at most"),
        ("stashed_bytes", "stashes"),
    ):
        planned, seen = getattr(expected, name), getattr(counted, name)
        if abs(seen - planned) > max(TOLERANCE * planned, LEAST_BYTES):
            if only_more and seen < planned and name in ("held_bytes", "peak_held_bytes", "stashed_bytes"):
                continue
            of = "" if name in ("peak_held_bytes", "stashed_bytes") else " a micro-batch"
            found.append(f"{what} {seen} bytes{of} where {planned} are planned")
    return found
