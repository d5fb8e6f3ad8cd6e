"""Jobs that the watchdog's own tests watch; those that need no torch import none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def start_a_child_and_hang(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    time.sleep(600)


def wait_for_nothing() -> None:
    """Receive on rank 0 what rank 1 never sends, which fails a little later."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.empty(3), src=1)
    time.sleep(2)
    raise ValueError("nothing was sent")
