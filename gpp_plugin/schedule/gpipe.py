"""GPipe: all forwards, then all backwards (Huang et al., 2019)."""

from __future__ import annotations

from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind


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
