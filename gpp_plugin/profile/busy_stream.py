"""Times on a device in a busy stream: what work takes there, and not what its launches take on the host.

A kernel of 5 us that takes the host 8 us to launch is timed as 8 us where the device waits for the host, and takes 5 us
in a training step, in which the host is ahead. So the device is held before the first mark, for as long as the host
needs to queue everything behind it:

    host     hold | m0 | launches of a | m1 | launches of b | m2
    device   hold ................................. | m0 | a | m1 | b | m2

A lap counts as busy where the host had queued its end before the device reached its beginning; laps that are not busy
have launches in them, and count only where no run has a busy one (code that reads the device from the host).

Source: this project
Tests: tests/profile/test_busy_stream.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_HOLD_US = 50_000.0
"""A hold beyond this would cost more than it shows: queues are full long before (about a thousand launches)."""
MARGIN = 1.5
"""How much longer the device is held than the host took to queue everything the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A mark in a stream: when the host had queued it, and when the device reached it, on one clock."""

    host_us: float
    device_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """The time between two marks; ``is_busy``: the device never waited for the host in it."""

    us: float
    is_busy: bool


def laps_between(stamps: Sequence[Stamp]) -> list[Lap]:
    """Return the time on the device between each mark and the next.

    >>> late, early = Stamp(host_us=9.0, device_us=10.0), Stamp(host_us=3.0, device_us=10.0)
    >>> begin = Stamp(host_us=1.0, device_us=5.0)
    >>> [laps_between([begin, end])[0].is_busy for end in (late, early)]
    [False, True]
    """
    return [
        Lap(us=end.device_us - begin.device_us, is_busy=end.host_us <= begin.device_us)
        for begin, end in zip(stamps, stamps[1:], strict=False)
    ]


def typical_laps(runs: Sequence[Sequence[Lap]]) -> list[Lap]:
    """Return the median of each lap over runs: of those in which it was busy, else of all.

    Args:
        runs: the same laps in each.
    """
    # runs of two laps, in us, * for busy: [9 4*] [6* 4*] [6* 5*] are 6* and 4*; [9 4*] [8 4*] are 8.5 and 4*
    typical = []
    for column in zip(*runs, strict=True):
        busy = [lap.us for lap in column if lap.is_busy]
        typical.append(Lap(us=statistics.median(busy or [lap.us for lap in column]), is_busy=bool(busy)))
    return typical


class HeadStart:
    """How long to hold a device so that the host is ahead, learnt from run to run of the same code."""

    def __init__(self) -> None:
        self.hold_us = 0.0
        self._margin = MARGIN

    def learn(self, stamps: Sequence[Stamp]) -> None:
        """Take in a run that was made with this hold."""
        # The first run (kernels are loaded, caches filled) queues slowly; so the hold follows the last run, down too.
        # A run that was held for as long as it took to queue, and has laps that were not busy all the same, was
        # disturbed on the host, or is longer than the queue: the margin grows.
        queueing_us = stamps[-1].host_us - stamps[0].host_us
        if self.hold_us >= queueing_us and not all(lap.is_busy for lap in laps_between(stamps)):
            self._margin *= 2
        self.hold_us = min(self._margin * queueing_us, LONGEST_HOLD_US)


def clock_of(device_type: str) -> dict[str, str]:
    """Return what a stored profile's key says of how times were taken; nothing on a CPU, whose profiles stay valid."""
    return {"clock": "busy stream"} if device_type == "cuda" else {}
