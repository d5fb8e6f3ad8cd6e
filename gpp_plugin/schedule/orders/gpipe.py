"""GPipe: all forwards, then all backwards (Huang et al., 2019).

Source: GPipe (arXiv 1811.06965), section 2
Tests: tests/schedule/test_schedules.py
"""

from __future__ import annotations

from collections.abc import Mapping

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.plugins import Schedule


def forward_only_schedule(stage: int, micro_batches: int, *, num_in_flight: int) -> StageSchedule:
    """Return the forwards of one stage in order.

    Args:
        num_in_flight: most micro-batches run but not yet taken by every consumer.

    Raises:
        ValueError: a count is below 1.

    >>> " ".join(map(str, forward_only_schedule(2, 3, num_in_flight=1).tasks))
    '2F0 2F1 2F2'
    """
    if micro_batches < 1 or num_in_flight < 1:
        raise ValueError(
            f"stage {stage}: {micro_batches} micro-batches, {num_in_flight} in flight; both must be at least 1"
        )
    tasks = tuple(Task(stage=stage, kind=TaskKind.FORWARD, micro_batch=m) for m in range(micro_batches))
    return StageSchedule(stage=stage, tasks=tasks, num_in_flight=min(num_in_flight, micro_batches))


def gpipe_schedule(stage: int, micro_batches: int) -> StageSchedule:
    """Return the GPipe order of one stage: everything in flight, backwards in the order of forwards.

    Raises:
        ValueError: ``micro_batches`` is below 1.

    >>> " ".join(map(str, gpipe_schedule(0, 3).tasks))
    '0F0 0F1 0F2 0B0 0B1 0B2'
    """
    if micro_batches < 1:
        raise ValueError(f"stage {stage}: {micro_batches} micro-batches; at least one is needed")
    tasks = [Task(stage=stage, kind=TaskKind.FORWARD, micro_batch=m) for m in range(micro_batches)]
    tasks += [Task(stage=stage, kind=TaskKind.BACKWARD, micro_batch=m) for m in range(micro_batches)]
    return StageSchedule(stage=stage, tasks=tuple(tasks), num_in_flight=micro_batches)


class GPipe(Schedule):
    """GPipe as a stage's schedule: memory for all micro-batches, or none."""

    holds_all = True

    def order(self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]) -> StageSchedule:
        """Return all forwards, then all backwards."""
        stage, micro_batches = plan.stages[index], plan.num_micro_batches(index)
        if stage.in_flight < micro_batches:
            raise ScheduleError(
                f"stage {stage.name!r}: gpipe holds all {micro_batches} micro-batches, in_flight allows "
                f"{stage.in_flight}; use 1f1b or set in_flight to {micro_batches}"
            )
        return gpipe_schedule(index, micro_batches)


GPIPE = GPipe()
