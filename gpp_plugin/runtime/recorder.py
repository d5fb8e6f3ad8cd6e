"""Notes when one rank did what, and joins the events of all ranks in one measured timeline.

Source: this project
Tests: tests/runtime/test_tensor_grids.py, tests/runtime/test_traces.py
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Message
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.timeline import Event, EventKind, Timeline
from gpp_plugin.runtime.messages.routes import Payload
from gpp_plugin.runtime.ranks.collectives import Collectives

Moment = float | torch.cuda.Event
"""Microseconds of this rank's clock; on CUDA a mark in the stream that computes, to be read when it is through."""


def spent_us(tasks: Sequence[tuple[Moment, Moment]]) -> float | None:
    """Return what tasks took together, by their starts and ends; None while the device has not come through them."""
    total = 0.0
    for start, end in tasks:
        if isinstance(start, float) or isinstance(end, float):
            total += end - start  # type: ignore[operator]
        elif not end.query():
            return None
        else:
            total += start.elapsed_time(end) * 1e3
    return total


class Recorder:
    """The events of one rank; while it is off only the starts and ends of its tasks are noted (`spent_us`).

    On CUDA nothing is waited for while a mini-batch runs, or its times would be others, and it might stop: a host that
    waits for its device in the midst of a program waits for messages too. Marks are put into the stream that computes
    and read at the end. So a receive lasts from where the stream waits for the message to where it goes on, and a send
    is noted where it is posted.

    Args:
        device: where the stage computes.
    """

    def __init__(self, *, rank: int, stage: int, device: torch.device) -> None:
        self._rank = rank
        self._stage = stage
        self._device, self._is_cuda = device, device.type == "cuda"
        self._events: list[Event] = []
        self._noted: list[tuple[dict[str, Any], Moment, Moment]] = []
        self._tasks: list[tuple[Moment, Moment]] = []
        self._first: tuple[torch.cuda.Event, float] | None = None
        self.is_on = False

    def start(self, events: list[Event], tasks: list[tuple[Moment, Moment]], *, is_on: bool) -> None:
        """Note the times of tasks in ``tasks``; if it is on, all else too, which `finish` puts into ``events``."""
        self._events, self._tasks, self.is_on = events, tasks, is_on
        self._noted.clear()
        if is_on and self._is_cuda:
            # Ties the stream's marks to the host's clock, before anything of the mini-batch is posted.
            mark = self._mark()
            mark.synchronize()
            self._first = mark, _host_us()

    def finish(self) -> None:
        """Read what was noted; waits for the stream that computes where it is on."""
        if not self.is_on:
            return
        if self._first is not None:
            self._mark().synchronize()
        for what, start, end in self._noted:
            self._events.append(
                Event(
                    rank=self._rank, stage=self._stage, start_us=self._us(start), end_us=self._us(end), **what
                )
            )
        self._noted.clear()

    def now(self) -> Moment:
        """Return this moment; 0 while nothing is noted."""
        return self.moment() if self.is_on else 0.0

    def moment(self) -> Moment:
        """Return this moment, whether it is on or not; on CUDA nothing is waited for."""
        return self._mark() if self._is_cuda else time.perf_counter_ns() / 1e3

    def _mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def _us(self, moment: Moment) -> float:
        if isinstance(moment, float) or self._first is None:
            return float(moment)  # type: ignore[arg-type]
        first, first_us = self._first
        return first_us + first.elapsed_time(moment) * 1e3

    def note(self, kind: EventKind, start: Moment) -> None:
        """Note what is done once a mini-batch, and ends now."""
        if self.is_on:
            self._noted.append(({"kind": kind}, start, self.moment()))

    def note_task(self, kind: EventKind, micro_batch: int, start: Moment, half: int | None = None) -> None:
        """Note a task that began at a `moment`, and ends now."""
        end = self.moment()
        self._tasks.append((start, end))
        if self.is_on:
            self._noted.append(({"kind": kind, "micro_batch": micro_batch, "half": half}, start, end))

    def note_message(
        self, kind: EventKind, message: Message, start: Moment, payloads: Sequence[Payload]
    ) -> None:
        """Note a message that has been posted (a send) or has come (a receive) by now."""
        if not self.is_on:
            return
        is_send = kind is EventKind.SEND
        what = {
            "kind": kind,
            "micro_batch": message.src_micro_batch if is_send else message.dst_micro_batch,
            "half": message.src_half if is_send else message.dst_half,
            "edge": message.edge,
            "peer": message.dst_rank if is_send else message.src_rank,
            "bytes": sum(payload.num_bytes for payload in payloads),
        }
        self._noted.append((what, start, self.now()))


def _host_us() -> float:
    return time.perf_counter_ns() / 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When this rank left a common barrier, by its own clock, and whose clock that is."""

    host: str
    barrier_us: float


def start_clock(collectives: Collectives) -> Clock:
    """Note the time when all ranks have come; collective.

    Raises:
        CommTimeout: a rank did not come.
    """
    collectives.barrier("the start of a timeline")
    return Clock(host=socket.gethostname(), barrier_us=_host_us())


def gather_timeline(
    events: Sequence[Event], clock: Clock, *, plan: PipelinePlan, collectives: Collectives
) -> Timeline | None:
    """Return the events of all ranks on rank 0 (None elsewhere); collective.

    Ranks of one host share its monotonic clock; others are aligned at the barrier.

    Raises:
        CommTimeout: a rank did not come.
    """
    # Clocks of two hosts differ by a constant that nobody knows; leaving one barrier is as near to one moment as
    # ranks get. Rank 0's host left it at 1,000 us of its clock and another at 5,000 of its own: there 4,000 are taken
    # off. At the end all times begin with 0 at the first event.
    gathered = collectives.gather_on_first((clock, list(events)), "the end of a timeline")
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
