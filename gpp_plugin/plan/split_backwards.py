"""Zero bubble on a plan: what its order leaves pending counts, and stages swap and recompute where it does not fit.

A micro-batch of a split backward is in flight until its weight gradient is made (W). Up to its input gradient (I) it
holds what its forward saved; from there on also the gradients that arrived at operators with parameters, which W reads.
So a stage of c micro-batches in flight, p of them pending at a time, needs what c whole backwards need, and p times
these gradients. How many are pending only the order says:

    F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3        in flight 3 (before W0), pending 2 (behind I1)

A stage that does not fit is fitted into what those gradients leave of its rank (`memory.fitting`). That makes both
parts of its backward longer (`with_part_times`), which may change the order, and with it what is pending: so orders
are made again, at most `ROUNDS` times, and the plan counts with the last.

Source: Zero Bubble (arXiv 2401.10241), section 2 (what W keeps); this project (with swap and recompute)
Tests: tests/plan/test_schedules.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.schedule import StageSchedule, TaskKind
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.request import PlanRequest, rank_limit
from gpp_plugin.plan.selection import memory_excess
from gpp_plugin.plugins import find_schedule
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.orders.gpipe import forward_only_stages

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


logger = logging.getLogger(__name__)

ROUNDS = 3
"""Orders that are made of one plan at most."""


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


def fitted_split(
    plan: PipelinePlan, request: PlanRequest, costs: CostModel, fitter: StageFitter | None
) -> PipelinePlan | None:
    """Return a plan of split backwards with the memory its order needs, and memory plans where stages need them.

    None where it does not fit, or cannot run with its in-flight counts.

    Args:
        plan: its stages have ranks of their own; memory plans it has are made anew.
        fitter: makes stages fit; None: such plans are left out.
    """
    forward_only = forward_only_stages(plan)
    plain = without_memory_plans(plan, costs)
    current = with_part_times(plain, costs)
    for _ in range(ROUNDS):
        try:
            schedules = build_schedules(current, forward_only_stages=forward_only)
        except (ScheduleError, PlanError) as error:
            logger.debug("split backwards: %s", error)
            return None
        counted = with_pending(current, costs, schedules)
        if memory_excess(request, counted)[0] <= 0:
            return counted
        if fitter is None:
            return None
        stages = [
            _fitted(stage, pending.pending, request, costs, fitter)
            for stage, pending in zip(plain.stages, counted.stages, strict=True)
        ]
        current = with_part_times(dataclasses.replace(plan, stages=tuple(stages)), costs)
    return None


def without_memory_plans(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan whose stages swap and recompute nothing, with what they take and need so."""
    return dataclasses.replace(plan, stages=tuple(_plain(stage, costs) for stage in plan.stages))


def _plain(stage: Stage, costs: CostModel) -> Stage:
    need = costs.memory_of(stage, stage.in_flight)
    backward = stage.backward_us - (stage.memory.added_us if stage.memory is not None else 0.0)
    return dataclasses.replace(stage, memory=None, pending=0, memory_bytes=need, backward_us=backward)


def _fitted(stage: Stage, pending: int, request: PlanRequest, costs: CostModel, fitter: StageFitter) -> Stage:
    """Return the stage fitted into what ``pending`` micro-batches leave of its ranks."""
    limit = min(rank_limit(request, rank) for rank in stage.ranks) - pending_bytes(stage, costs, pending)
    return fitter.fitted_stage(stage, limit=limit)
