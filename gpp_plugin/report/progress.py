"""Shows on a terminal the steps that take longer than two seconds; elsewhere nothing.

    with step("capture") as shown:
        for done, module in enumerate(modules):
            shown.update(done, len(modules))
            ...

A line stands on standard error for as long as the step lasts, with its time and, where the total is known, a bar; then
it is gone. Steps may lie within steps. Pipes, logs, notebooks and ranks but the first see nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

SECONDS = 2.0
"""Steps that take less are never seen."""
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")

P = ParamSpec("P")
T = TypeVar("T")


class Step:
    """One step that is under way; all calls are cheap, and without effect where nothing is shown."""

    def __init__(self, name: str, *, is_shown: bool) -> None:
        self._name, self._text = name, name
        self._done, self._total = 0, 0
        self._start = time.monotonic()
        self._line: int | None = None
        self._timer = threading.Timer(SECONDS, self._show) if is_shown else None
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def update(self, done: int, total: int) -> None:
        """Say how much of the step is done."""
        self._done, self._total = done, total
        self._refresh()

    def note(self, text: str) -> None:
        """Say what the step has come to."""
        self._text = f"{self._name}: {text}"
        self._refresh()

    def end(self) -> None:
        """Take the line away."""
        if self._timer is None:
            return
        self._timer.cancel()
        with _SCREEN.lock:
            self._timer = None  # a timer that fires at this moment finds it, and shows nothing
            if self._line is not None:
                _SCREEN.remove(self._line)
                self._line = None

    def _show(self) -> None:
        with _SCREEN.lock:
            if self._timer is not None:
                self._line = _SCREEN.add(self._start)
                self._refresh()

    def _refresh(self) -> None:
        with _SCREEN.lock:
            if self._line is not None:
                _SCREEN.change(self._line, self._text, self._done, self._total)


class _Screen:
    """The lines of all steps under way: rich draws them together, as a terminal has one place for such lines."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._progress: Any = None
        self._num_lines = 0

    def add(self, start: float) -> int:
        """Draw a line more, of a step that began at ``start``, and return its number."""
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                # what is printed on this terminal meanwhile is shown above the lines; into a pipe it is not changed
                redirect_stdout=sys.stdout.isatty(),
            )
            self._progress.start()
        self._num_lines += 1
        line: int = self._progress.add_task("", total=None)
        # drawn from another thread: found in `tasks` by number, since lines come and go
        next(task for task in self._progress.tasks if task.id == line).start_time = start
        return line

    def change(self, line: int, text: str, done: int, total: int) -> None:
        """Write a line anew."""
        self._progress.update(line, description=text, completed=done, total=total or None)

    def remove(self, line: int) -> None:
        """Take a line away, and the whole drawing with the last one."""
        self._progress.remove_task(line)
        self._num_lines -= 1
        if self._num_lines == 0:
            self._progress.stop()
            self._progress = None


_SCREEN = _Screen()


@contextlib.contextmanager
def step(name: str) -> Iterator[Step]:
    """Show ``name`` for as long as the block runs, from its third second on."""
    shown = Step(name, is_shown=_somebody_looks())
    try:
        yield shown
    finally:
        shown.end()


def shown_as(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that shows ``name`` while a function runs (`step`)."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with step(name):
                return function(*args, **kwargs)

        return run

    return decorate


def _somebody_looks() -> bool:
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    return rank == "0" and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


SEARCHES = "gpp_plugin.plan.request"
"""The logger on which planners say what they search."""


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
    logger = logging.getLogger(SEARCHES)
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
