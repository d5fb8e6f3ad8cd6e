"""From each rank's measured events to one Timeline."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Sequence

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.timeline import Event, Timeline
from gpp_plugin.runtime.meeting import Meeting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When this rank left a common barrier, by its own clock, and whose clock that is."""

    host: str
    barrier_us: float


def start_clock(meeting: Meeting) -> Clock:
    """Meet all ranks and note the time; collective.

    Raises:
        CommTimeout: a rank did not come.
    """
    meeting.meet("the start of a timeline")
    return Clock(host=socket.gethostname(), barrier_us=time.perf_counter_ns() / 1e3)


def gather_timeline(
    events: Sequence[Event], clock: Clock, *, plan: PipelinePlan, meeting: Meeting
) -> Timeline | None:
    """Return the events of all ranks on rank 0 (None elsewhere); collective.

    Ranks of one host share its monotonic clock; others are aligned at the barrier.

    Raises:
        CommTimeout: a rank did not come.
    """
    gathered = meeting.gather_on_first((clock, list(events)), "the end of a timeline")
    if gathered is None:
        return None
    first = gathered[0][0]
    aligned: list[Event] = []
    for other, own in gathered:
        shift = 0.0 if other.host == first.host else first.barrier_us - other.barrier_us
        aligned += [dataclasses.replace(e, start_us=e.start_us + shift, end_us=e.end_us + shift) for e in own]
    base = min((e.start_us for e in aligned), default=0.0)
    shifted = (
        dataclasses.replace(e, start_us=e.start_us - base, end_us=e.end_us - base)
        for e in sorted(aligned, key=lambda e: (e.start_us, e.rank))
    )
    return Timeline(source="measured", plan=fingerprint(plan), events=tuple(shifted))
