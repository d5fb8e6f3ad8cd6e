"""Processes of other ranks, as those on their host find them: alive, stopped or gone.

Source: this project
Tests: tests/runtime/test_failure_board.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process as others of its host find it; ``space`` tells hosts, and containers' numbers of processes, apart."""

    space: str
    pid: int
    start: str

    @classmethod
    def own(cls) -> RankProcess:
        """Return this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
        except OSError:  # no such files: others know this rank by its beats alone
            space = ""
        state = stat_of(os.getpid())
        return cls(space, os.getpid(), "" if state is None else state[1])

    def state(self) -> str:
        """Return ``alive``, ``stopped`` or ``dead``; of a process on this host."""
        found = stat_of(self.pid)
        if found is None or found[1] != self.start or found[0] in "ZX":
            return "dead"
        return "stopped" if found[0] in "Tt" else "alive"


def stat_of(pid: int) -> tuple[str, str] | None:
    """Return a process's state and when it was started; None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # pid (name, which may hold blanks and brackets) state ppid ...: the start is the 22nd field, the state the third
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
