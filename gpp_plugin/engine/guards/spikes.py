"""Numbers of training that leave their usual range: losses and gradient norms, told by what the last steps had.

    the last losses   2.1 2.0 2.2 1.9 2.1 ...   median 2.1, usual distance from it 0.1 (their median, times 1.48)
    the next one      3.0                       9 deviations above: a spike

Median and median distance do not move with a few spikes among the last ones, as mean and variance would. A range that
is narrower than a hundredth of the median is taken for that: a loss that hardly moves is no alarm.

Source: median absolute deviation, Hampel, JASA 69 (1974) 383
Tests: tests/integrations/test_repetition.py
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 100
"""Steps whose numbers are the usual ones."""
LEAST = 20
"""Steps before which nothing is a spike."""
SPIKE = 8.0
"""Deviations above the median from which a number is one: of normal noise one in 10^15."""

_NORMAL = 1.4826  # of normal noise the deviation is so many median distances
_LEAST_RANGE = 0.01


class Spikes:
    """The last numbers of one kind."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def _look(self, value: float) -> float | None:
        """Return how many deviations a number is above the usual ones, where that makes it a spike; else None."""
        if len(self._last) < LEAST or not math.isfinite(value):
            return None
        middle = median(self._last)
        distance = _NORMAL * median(abs(each - middle) for each in self._last)
        above = (value - middle) / max(distance, _LEAST_RANGE * abs(middle), 1e-12)
        return above if above > SPIKE else None

    def note(self, value: float) -> float | None:
        """Take a number for one of the last, unless it is not finite; return its deviations if it is a spike."""
        found = self._look(value)
        if math.isfinite(value):
            self._last.append(value)
        return found
