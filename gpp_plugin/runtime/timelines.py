"""From each rank's measured events to one Timeline."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.timeline import Event, Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When this rank left a common barrier, by its own clock, and whose clock that is."""

    host: str
    barrier_us: float


def start_clock(group: dist.ProcessGroup | None) -> Clock:
    """Meet all ranks and note the time; collective."""
    if group is not None:
        dist.barrier(group=group)
    return Clock(host=socket.gethostname(), barrier_us=time.perf_counter_ns() / 1e3)


def gather_timeline(
    events: Sequence[Event], clock: Clock, *, plan: PipelinePlan, group: dist.ProcessGroup | None
) -> Timeline | None:
    """Return the events of all ranks on rank 0 (None elsewhere); collective.

    Ranks of one host share its monotonic clock; others are aligned at the barrier.
    """
    if group is None:
        gathered: list[tuple[Clock, list[Event]]] = [(clock, list(events))]
    else:
        is_first = dist.get_rank() == 0
        slots: list[tuple[Clock, list[Event]] | None] | None = (
            [None] * dist.get_world_size() if is_first else None
        )
        dist.gather_object((clock, list(events)), slots, dst=0, group=group)
        if slots is None:
            return None
        gathered = [slot for slot in slots if slot is not None]
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
