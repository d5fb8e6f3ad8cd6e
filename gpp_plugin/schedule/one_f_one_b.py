"""1F1B: after a warm-up, one backward and one forward in turn (PipeDream-flush, DAPPLE)."""

from __future__ import annotations

from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.kfkb import kfkb_schedule


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
