"""Faults for tests: what happens to a rank, and where: kill, TERM, INT, stop, sleep, raise, run out of memory, delay, cut.

    Fault("kill", rank=2, at="instruction:2B1")     at an instruction of its program, by its text or the text's beginning
    Fault("stop", rank=1, at="doing:plan")          at a phase: what `RankStatus.during` says
    Fault("raise", rank=0, at="waits_for:the norm") when it begins to wait for something
    Fault("raise", rank=3, at="call:train_batch", skip=1)   at the second call of train_batch
    Fault("cut", rank=1, at="script:save")          in the script's own code, before it saves; its host is off the network

Nothing of it is in the package: it watches the attributes by which a rank says where it is (`HERE`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.runtime.ranks import failure_board

DELAY_S = 3.0
STRUCK = "GPP_TEST_STRUCK"
"""The variable that names a file which is there from when a fault has struck."""
LINK = "veth0"
"""What joins a host that `tests.fault_runs` makes to the other one."""


class Injected(RuntimeError):
    """What a fault raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to one rank at one place.

    Args:
        at: attribute of `RankStatus`, a colon, and what its new value begins with; behind a star, what it contains.
        skip: how often the place is passed before it happens.
    """

    kind: str
    rank: int
    at: str
    skip: int = 0

    def strike(self) -> None:
        """Let it happen to this process."""
        if STRUCK in os.environ:
            Path(os.environ[STRUCK]).touch()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind in ("TERM", "INT"):
            os.kill(os.getpid(), signal.SIGTERM if self.kind == "TERM" else signal.SIGINT)
            time.sleep(60)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind in ("delay", "sleep"):
            time.sleep(DELAY_S if self.kind == "delay" else 3600.0)
        elif self.kind == "cut":  # no packet comes or goes, and no connection is told
            subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
        elif self.kind == "memory":
            raise MemoryError("injected")
        else:
            raise Injected("injected")


def inject(fault: Fault, *, rank: int) -> None:
    """Let a fault happen to this process, if it is the rank's that it is for."""
    if rank != fault.rank:
        return
    watched, start = fault.at.split(":", 1)
    left = [fault.skip]

    class Watched(failure_board.RankStatus):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            text = str(value) if name == watched and value else ""
            if text and (start[1:] in text if start.startswith("*") else text.startswith(start)):
                left[0] -= 1
                if left[0] == -1:
                    fault.strike()

    failure_board.HERE.__class__ = Watched
