"""A delay that stands for compute: as long as asked, without keeping a core busy."""

from __future__ import annotations

import time

SPIN_US = 200.0
"""The end of a delay is awaited by looking at the clock: a sleeping process is woken late."""


def wait_us(duration_us: float) -> None:
    """Return ``duration_us`` microseconds after the call, by sleeping and then a short spin."""
    end = time.perf_counter() + duration_us * 1e-6
    if duration_us > SPIN_US:
        time.sleep((duration_us - SPIN_US) * 1e-6)
    while time.perf_counter() < end:
        pass
