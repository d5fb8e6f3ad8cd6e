"""Runs the first forwards of any schedule in two halves."""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind


def halve_forwards(schedule: StageSchedule, num_sliced: int, *, joins_last: bool = False) -> StageSchedule:
    """Return ``schedule`` with the forwards of its first micro-batches in halves, one behind the other.

    Args:
        num_sliced: how many; more than there are means all.
        joins_last: what the halves of the last of them make leaves in one message.

    >>> from gpp_plugin.schedule.gpipe import gpipe_schedule
    >>> " ".join(map(str, halve_forwards(gpipe_schedule(0, 2), 1).tasks))
    '0F0a 0F0b 0F1 0B0 0B1'
    """
    tasks: list[Task] = []
    num_halved = 0
    for task in schedule.tasks:
        if task.kind is TaskKind.FORWARD and task.micro_batch < num_sliced:
            tasks += (dataclasses.replace(task, half=0), dataclasses.replace(task, half=1))
            num_halved += 1
        else:
            tasks.append(task)
    joined = (num_halved - 1,) if joins_last and num_halved else ()
    return dataclasses.replace(schedule, tasks=tuple(tasks), joined=joined)
