"""Real-time priority while something is measured: other programs of the machine wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpp_plugin.errors import ConfigError


def check_priority() -> None:
    """Refuse real-time priority where this process may not have it.

    Raises:
        ConfigError: says so.
    """
    try:
        with real_time():
            pass
    except OSError as error:
        raise ConfigError(
            f"--real-time: this process may not have real-time priority ({error.strerror}); run it as root, or "
            "on a machine with nothing else to do"
        ) from error


@contextlib.contextmanager
def real_time() -> Iterator[None]:
    """Give all threads of this process, gloo's too, real-time priority for a while."""
    _set_policy(os.SCHED_RR, 1)
    try:
        yield
    finally:
        _set_policy(os.SCHED_OTHER, 0)


def _set_policy(policy: int, priority: int) -> None:
    # sched_setscheduler(2) sets one thread, not a process; threads that come later inherit from the one that
    # starts them. A thread that ends between the listing and the call is no error. SCHED_RR at priority 1,
    # the lowest of the real-time ones: still before every ordinary program, and ranks on one core take turns.
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(name), policy, os.sched_param(priority))
