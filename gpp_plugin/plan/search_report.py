"""What a planner says of its own search: where it is, and what it left out for want of time.

Limits on time are counts (tasks simulated, items of a table), so that a request gives the same plan on any machine.
Where one is met, the plan's notes say what was not searched.

Source: this project
Tests: tests/plan/test_search_report.py
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

QUIET_SECONDS = 3.0
"""Searches that take less tell nothing; others a line whenever so many seconds have gone by."""


class SearchReport:
    """Collects what one planner's search leaves out."""

    def __init__(self) -> None:
        self._left_out: dict[str, None] = {}

    def begin(self, phase: str) -> None:
        """Tell who listens (`shown_progress`) what is searched now."""
        logger.debug("%s", phase)

    def leave_out(self, what: str) -> None:
        """Take down what is not searched; once, however often it is met."""
        self._left_out[what] = None

    def has_left_out(self, what: str) -> bool:
        """Return whether that was not searched."""
        return what in self._left_out

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was left out, as the notes of a plan."""
        return (f"not searched, for want of time: {'; '.join(self._left_out)}",) if self._left_out else ()


class _Progress(logging.Handler):
    """Passes phases on where the last one told is some time ago."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell
        self._start = self._last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell the phase that a long search has come to."""
        now = time.monotonic()
        if now - self._last >= QUIET_SECONDS:
            self._last = now
            self._tell(f"planning for {now - self._start:.0f} s: {record.getMessage()}")


@contextlib.contextmanager
def shown_progress(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass the progress of long searches to ``tell``, line by line."""
    handler, level, propagates = _Progress(tell), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
