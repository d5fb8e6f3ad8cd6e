"""From a plan to the task order of each stage: the registry of schedules."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.forward_only import forward_only_schedule
from gpp_plugin.schedule.gpipe import gpipe_schedule
from gpp_plugin.schedule.kfkb import kfkb_schedule

ScheduleMaker = Callable[[int, Stage, int], StageSchedule]
"""From (stage index, stage, number of its micro-batches) to its order."""


def _gpipe(index: int, stage: Stage, micro_batches: int) -> StageSchedule:
    if stage.in_flight < micro_batches:
        raise ScheduleError(
            f"stage {stage.name!r}: gpipe holds all {micro_batches} micro-batches, in_flight allows "
            f"{stage.in_flight}; use 1f1b or set in_flight to {micro_batches}"
        )
    return gpipe_schedule(index, micro_batches)


def _one_f_one_b(index: int, stage: Stage, micro_batches: int) -> StageSchedule:
    return kfkb_schedule(index, micro_batches, k=stage.k, num_in_flight=stage.in_flight)


SCHEDULES: MappingProxyType[str, ScheduleMaker] = MappingProxyType({"1f1b": _one_f_one_b, "gpipe": _gpipe})
"""Schedule names of `Stage.schedule`; ``1f1b`` with ``k`` above 1 is kFkB."""


def build_schedules(
    plan: PipelinePlan, *, forward_only_stages: frozenset[int] = frozenset()
) -> tuple[StageSchedule, ...]:
    """Return the task order of every stage, from its ``schedule``, ``k`` and ``in_flight``.

    Args:
        forward_only_stages: indices of stages through which no gradient flows; they run no backwards.

    Raises:
        ScheduleError: a schedule is unknown, or does not fit the stage's ``in_flight``.
        PlanError: micro-batches do not divide the mini-batch, or ranks a micro-batch.
    """
    schedules = []
    for index, stage in enumerate(plan.stages):
        check_divisibility(plan, index)
        micro_batches = plan.num_micro_batches(index)
        if stage.in_flight < 1:
            raise ScheduleError(f"stage {stage.name!r}: in_flight is {stage.in_flight}; at least 1 is needed")
        maker = SCHEDULES.get(stage.schedule)
        if maker is None:
            raise ScheduleError(
                f"stage {stage.name!r}: no schedule {stage.schedule!r}; the schedules are {sorted(SCHEDULES)}"
            )
        if index in forward_only_stages:
            schedules.append(forward_only_schedule(index, micro_batches, num_in_flight=stage.in_flight))
            continue
        try:
            schedules.append(maker(index, stage, micro_batches))
        except ValueError as error:
            raise ScheduleError(f"stage {stage.name!r}: {error}") from error
    return tuple(schedules)


def forward_schedules(plan: PipelinePlan) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in evaluation: forwards only.

    Raises:
        PlanError: micro-batches do not divide the mini-batch, or ranks a micro-batch.
    """
    for index in range(len(plan.stages)):
        check_divisibility(plan, index)
    return tuple(
        forward_only_schedule(index, plan.num_micro_batches(index), num_in_flight=stage.in_flight)
        for index, stage in enumerate(plan.stages)
    )


def check_divisibility(plan: PipelinePlan, index: int) -> None:
    """Refuse a stage whose micro-batches or ranks do not divide evenly.

    Raises:
        PlanError: says which number does not divide which.
    """
    stage = plan.stages[index]
    if stage.micro_batch_size < 1 or plan.mini_batch % stage.micro_batch_size:
        raise PlanError(
            f"stage {stage.name!r}: micro-batches of {stage.micro_batch_size} samples do not divide the "
            f"mini-batch of {plan.mini_batch}; choose a divisor"
        )
    if not stage.ranks or stage.micro_batch_size % stage.degree:
        raise PlanError(
            f"stage {stage.name!r}: {stage.degree} ranks do not divide a micro-batch of "
            f"{stage.micro_batch_size} samples; choose a multiple"
        )
