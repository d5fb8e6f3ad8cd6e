"""Waits for other processes that end by what these do, and not by how busy the machine is.

A limit counts the time in which processes stand still: as long as they use the processor they are waited for, up to ten
times the limit. A limit that the product promises is not waited for like this.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.processor_time import Family

MOST_TIMES = 10.0
WORK_SHARE = 0.02
"""Of one core: ranks that wait for each other wake up some hundred times a second, which is no work."""
LOOK_S = 1.0


class Patience:
    """Whether a wait for processes is over.

    Args:
        limit_s: how long they may stand still, in seconds; ten times this is the most they get.
        used_s: returns their processor seconds so far.
        clock: seconds of the wall.
    """

    def __init__(
        self, limit_s: float, used_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = limit_s
        self._used_s = used_s
        self._clock = clock
        self._start = self._still_since = self._looked = clock()
        self._before_s: float | None = None

    def is_over(self) -> bool:
        """Return whether they stood still for the limit, or had ten times as long."""
        now = self._clock()
        if self._before_s is None:
            self._before_s = self._used_s()
        elif now - self._looked >= min(LOOK_S, self.limit_s / 10):
            self._looked = now
            used = self._used_s()
            if used - self._before_s >= WORK_SHARE * self.limit_s:
                self._before_s, self._still_since = used, now
        return now - self._still_since > self.limit_s or now - self._start > MOST_TIMES * self.limit_s


def communicate(process: subprocess.Popen[Any], *, limit_s: float, input: Any = None) -> tuple[Any, Any]:
    """Return what a process prints.

    Raises:
        subprocess.TimeoutExpired: it, and all it started, stood still for ``limit_s``; it is still there.
    """
    patience = Patience(limit_s, Family(process.pid).used_s)
    while True:
        try:
            return process.communicate(input, timeout=min(LOOK_S, limit_s))
        except subprocess.TimeoutExpired as error:
            if patience.is_over():
                raise subprocess.TimeoutExpired(process.args, limit_s, error.output, error.stderr) from None
            input = None  # what is left of it is still being sent


def run_program(
    command: Sequence[Any],
    *,
    timeout: float,
    check: bool = False,
    capture_output: bool = False,
    input: Any = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do as `subprocess.run`; its ``timeout`` counts while the program stands still."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with subprocess.Popen(command, **options) as process:
        try:
            printed, said = communicate(process, limit_s=timeout, input=input)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, printed, said)
    if check:
        done.check_returncode()
    return done
