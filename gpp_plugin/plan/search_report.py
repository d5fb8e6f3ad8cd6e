"""What a planner says of its own search: where it is, and what it left out for want of time.

Limits on time are counts (tasks simulated, items of a table), so that a request gives the same plan on any machine.
Where one is met, the plan's notes say what was not searched.

Source: this project
Tests: tests/plan/test_auto.py
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


REJECTED, LEFT_OUT = "rejected: ", "not searched, for want of time: "
"""What notes of a plan begin with: stages that were evaluated and not taken, and what was not searched."""


class SearchReport:
    """Collects what one planner's search rejects, and what it leaves out."""

    def __init__(self) -> None:
        self._left_out: dict[str, None] = {}
        self._rejected: dict[str, None] = {}

    def begin(self, phase: str) -> None:
        """Publish what is searched now (`searching`)."""
        logger.debug("%s", phase)

    def leave_out(self, what: str) -> None:
        """Take down what is not searched; once, however often it is met."""
        self._left_out[what] = None

    def reject(self, what: str, why: str) -> None:
        """Note what was evaluated and not taken, and why."""
        self._rejected[f"{REJECTED}{what}: {why}"] = None

    def has_left_out(self, what: str) -> bool:
        """Return whether that was not searched."""
        return what in self._left_out

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was rejected and left out, as the notes of a plan."""
        left_out = (f"{LEFT_OUT}{'; '.join(self._left_out)}",) if self._left_out else ()
        return (*self._rejected, *left_out)


class _Listener(logging.Handler):
    """Passes phases on."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show the phase that a search has come to."""
        self._show(record.getMessage())


@contextlib.contextmanager
def searching(show: Callable[[str], None]) -> Iterator[None]:
    """Show what is searched at each moment of the block, on the rank that searches."""
    handler, level, propagates = _Listener(show), logger.level, logger.propagate
    # these messages stay on where they were turned on, and appear nowhere else
    logger.propagate = propagates and logger.isEnabledFor(logging.DEBUG)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
