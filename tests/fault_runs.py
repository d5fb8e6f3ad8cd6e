"""Starts the ranks of a `fault_job` as a launcher does, and says how each of them ended, when, and what it said last."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gpp_plugin.launch import reserved_port
from tests.fault_job import FaultSettings

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank ended: ``code`` is None where it had to be killed; ``seconds`` after the first rank."""

    code: int | None
    said: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Return the last line of its output that is not torch's or Python's clearing up."""
        lines = [line for line in self.said.strip().splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_job(settings: FaultSettings, num_ranks: int, *, limit_s: float = 120.0) -> list[Ended]:
    """Run the job, and return how each rank ended; those that live at the limit are killed.

    A rank that is stopped is killed when all others have ended.
    """
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        files = [Path(settings.directory) / f"rank{rank}.txt" for rank in range(num_ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.fault_job", json.dumps(asdict(settings))],
                cwd=ROOT,
                env=_environment(rank, num_ranks, port),
                stdout=stack.enter_context(file.open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]
        ended: dict[int, float] = {}
        stopped = settings.fault["rank"] if settings.fault and settings.fault["kind"] == "stop" else None
        started = time.monotonic()
        try:
            while time.monotonic() - started < limit_s and len(ended) < num_ranks:
                for rank, process in enumerate(processes):
                    if rank not in ended and process.poll() is not None:
                        ended[rank] = time.monotonic()
                if set(range(num_ranks)) - set(ended) == {stopped}:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
    first = min(ended.values(), default=started)
    return [
        Ended(
            code=processes[rank].returncode if rank in ended else None,
            said=files[rank].read_text(errors="replace"),
            seconds=ended.get(rank, time.monotonic()) - first,
        )
        for rank in range(num_ranks)
    ]


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
