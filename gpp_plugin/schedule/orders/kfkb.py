"""kFkB: k forwards, then k backwards, after a warm-up; 1F1B is its k of 1.

Source: GraphPipe (arXiv 2406.17145), section 6, footnote 2 (kFkB); PipeDream-flush (arXiv 2006.09503); DAPPLE
    (arXiv 2007.01045)
Tests: tests/schedule/test_schedules.py
"""

from __future__ import annotations

from collections.abc import Mapping

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.plugins import Schedule


def kfkb_schedule(stage: int, micro_batches: int, *, k: int, num_in_flight: int) -> StageSchedule:
    """Return the kFkB order of one stage: ``num_in_flight`` forwards, then k backwards and k forwards in turn.

    The paper's definition leaves the warm-up open; a multiple of k keeps the groups of forwards
    and backwards aligned, but Table 2 gives others too, and the last group may be short.

    Args:
        num_in_flight: most micro-batches held; at least ``k``. More than there are means all.

    Raises:
        ValueError: a count is below 1, or ``num_in_flight`` is below ``k``.

    >>> order = kfkb_schedule(0, 4, k=2, num_in_flight=2)
    >>> " ".join(map(str, order.tasks))
    '0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3'
    """
    if micro_batches < 1 or k < 1:
        raise ValueError(f"stage {stage}: {micro_batches} micro-batches and k = {k}; both must be at least 1")
    if num_in_flight < min(k, micro_batches):
        raise ValueError(
            f"stage {stage}: {k}F{k}B runs {k} forwards before a backward, so {num_in_flight} micro-batches in "
            f"flight are too few; allow {k} or lower k"
        )
    # Four micro-batches, three held. With k = 1 (1F1B) and k = 2; the steady part continues until forwards run out, and
    # the cool-down is the backwards left:
    #
    #     1F1B   F0 F1 F2 | B0 F3 | B1 B2 B3             2F2B   F0 F1 F2 | B0 B1 F3 | B2 B3
    #
    # A group of backwards is never longer than what is held (``forward - backward``), nor of forwards than what is
    # left.
    held = min(num_in_flight, micro_batches)
    tasks = [Task(stage=stage, kind=TaskKind.FORWARD, micro_batch=m) for m in range(held)]
    forward, backward = held, 0
    while backward < micro_batches:
        group = min(k, forward - backward)
        for micro_batch in range(backward, backward + group):
            tasks.append(Task(stage=stage, kind=TaskKind.BACKWARD, micro_batch=micro_batch))
        backward += group
        group = min(k, micro_batches - forward)
        for micro_batch in range(forward, forward + group):
            tasks.append(Task(stage=stage, kind=TaskKind.FORWARD, micro_batch=micro_batch))
        forward += group
    return StageSchedule(stage=stage, tasks=tuple(tasks), num_in_flight=held)


def one_f_one_b_schedule(stage: int, micro_batches: int, *, num_in_flight: int) -> StageSchedule:
    """Return the 1F1B order of one stage: kFkB with k = 1.

    Args:
        num_in_flight: most micro-batches held; more than there are means all.

    Raises:
        ValueError: a count is below 1.

    >>> order = one_f_one_b_schedule(0, 4, num_in_flight=2)
    >>> " ".join(map(str, order.tasks))
    '0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3'
    """
    return kfkb_schedule(stage, micro_batches, k=1, num_in_flight=num_in_flight)


class KfKb(Schedule):
    """kFkB as a stage's schedule, with the stage's own k; 1F1B where that is 1."""

    takes_turns = True

    def order(self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]) -> StageSchedule:
        """Return ``in_flight`` forwards, then k backwards and k forwards in turn."""
        stage = plan.stages[index]
        return kfkb_schedule(index, plan.num_micro_batches(index), k=stage.k, num_in_flight=stage.in_flight)


ONE_F_ONE_B = KfKb()
