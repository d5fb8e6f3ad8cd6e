"""From a plan to the task order of each stage, made by the schedule that the stage names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.plugins import SCHEDULES, find_schedule
from gpp_plugin.schedule.messages import check_divisibility
from gpp_plugin.schedule.orders.gpipe import forward_only_schedule
from gpp_plugin.schedule.orders.interleaved import interleaved_schedules
from gpp_plugin.schedule.orders.slicer import halve_forwards
from gpp_plugin.schedule.orders.stage_order import sinks_first
from gpp_plugin.schedule.orders.table_2 import compute_in_flight


def build_schedules(
    plan: PipelinePlan, *, forward_only_stages: frozenset[int] = frozenset()
) -> tuple[StageSchedule, ...]:
    """Return the task order of every stage, from its ``schedule``, ``k`` and ``in_flight``.

    Args:
        forward_only_stages: indices of stages through which no gradient flows; they run no backwards.

    Raises:
        ScheduleError: a schedule is unknown, or does not fit the stage's ``in_flight``.
        PlanError: micro-batches do not divide the mini-batch, ranks do not divide a micro-batch, or the
            stages depend on each other in a circle.
    """
    # From the sinks, because a greedy order is made against the orders of the stages behind. Zero bubble orders its
    # stages together, so they have 1F1B until all others are known; stages that share ranks take turns; halves are
    # laid over whatever order came out.
    built: dict[int, StageSchedule] = {}
    for index in sinks_first(plan):
        if index in forward_only_stages:
            held = _checked_stage(plan, index).in_flight
            built[index] = forward_only_schedule(index, plan.num_micro_batches(index), num_in_flight=held)
        else:
            built[index] = build_stage_schedule(plan, index, built)
    trained = [index for index in range(len(plan.stages)) if index not in forward_only_stages]
    for name in dict.fromkeys(plan.stages[index].schedule for index in trained):
        own = [index for index in trained if plan.stages[index].schedule == name]
        try:
            built.update(find_schedule(name).together(plan, own, built))
        except ValueError as error:
            raise ScheduleError(str(error)) from error
    if plan.shares_ranks:
        built = interleaved_schedules(plan, built)
    return with_slices(plan, [built[index] for index in range(len(plan.stages))])


def with_slices(plan: PipelinePlan, schedules: Sequence[StageSchedule]) -> tuple[StageSchedule, ...]:
    """Return ``schedules``, all of whole forwards, with the first forwards of each stage in halves as the plan says.

    Raises:
        ScheduleError: a stage's samples cannot be halved.
    """
    sliced = list(schedules)
    for number, stage in enumerate(plan.stages):
        count, samples = stage.num_sliced, stage.local_batch_size
        if count < 0 or (count and samples % 2):
            raise ScheduleError(
                f"stage {stage.name!r}: num_sliced is {count} with {samples} samples a rank; "
                "only even numbers of samples run in halves: set it to 0"
            )
        if count:
            sliced[number] = halve_forwards(schedules[number], count, joins_last=stage.joins_last_slice)
    return tuple(sliced)


def build_stage_schedule(
    plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]
) -> StageSchedule:
    """Return the order of one stage without halves, from the schedules of at least all stages behind it.

    Raises:
        ScheduleError: its schedule is unknown, or does not fit its ``in_flight``.
        PlanError: micro-batches do not divide the mini-batch, or ranks a micro-batch.
    """
    stage = _checked_stage(plan, index)
    if stage.schedule not in SCHEDULES:
        raise ScheduleError(
            f"stage {stage.name!r}: no schedule {stage.schedule!r}; the schedules are {sorted(SCHEDULES.names())}"
        )
    try:
        return find_schedule(stage.schedule).order(plan, index, behind)
    except ValueError as error:
        raise ScheduleError(f"stage {stage.name!r}: {error}") from error


def _checked_stage(plan: PipelinePlan, index: int) -> Stage:
    check_divisibility(plan, index)
    stage = plan.stages[index]
    if stage.in_flight < 1:
        raise ScheduleError(f"stage {stage.name!r}: in_flight is {stage.in_flight}; at least 1 is needed")
    return stage


def forward_schedules(plan: PipelinePlan) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in evaluation: forwards only.

    Nothing is saved for a backward there, so `Stage.in_flight` has no meaning; a stage runs in front of
    its consumers as far as 1F1B would if gradients came back over every edge, which cannot stop.

    Raises:
        PlanError: micro-batches do not divide the mini-batch, or ranks a micro-batch.
    """
    samples = [0] * len(plan.stages)
    schedules: dict[int, StageSchedule] = {}
    for index in sinks_first(plan):
        check_divisibility(plan, index)
        size = plan.stages[index].micro_batch_size
        wanted = [
            compute_in_flight(
                k_x=1, b_x=size, k_y=1, b_y=plan.stages[edge.dst].micro_batch_size, i_y=samples[edge.dst]
            )
            for edge in plan.edges
            if edge.src == index
        ]
        samples[index] = min(max([size, *wanted]), plan.mini_batch)
        schedules[index] = forward_only_schedule(
            index, plan.num_micro_batches(index), num_in_flight=samples[index] // size
        )
    return tuple(schedules[index] for index in range(len(plan.stages)))
