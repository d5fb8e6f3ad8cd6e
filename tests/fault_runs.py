"""Runs the ranks of a `fault_job` as a launcher would, and says how each of them ended, when, and what it said last."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.launch import reserved_port
from tests.fault_job import train
from tests.processor_time import Family
from tests.ranks import _CONTEXT, _start_server
from tests.waits import Patience


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


def run_job(
    settings: Any, num_ranks: int, *, limit_s: float = 120.0, job: Callable[[Any], None] = train
) -> list[Ended]:
    """Run the job, and return how each rank ended; those that live at the limit are killed.

    A rank that is stopped, or sleeps beside one that saves alone, is killed when all others have ended.

    Args:
        settings: what ``job`` is called with on every rank; has a ``directory`` and a ``fault``.
    """
    _start_server()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        files = [Path(settings.directory) / f"rank{rank}.txt" for rank in range(num_ranks)]
        processes = [
            _CONTEXT.Process(
                target=_run_rank, args=(job, settings, rank, num_ranks, port, str(file)), daemon=True
            )
            for rank, file in enumerate(files)
        ]
        for process in processes:
            process.start()
        ended: dict[int, float] = {}
        stopped = settings.fault["rank"] if settings.fault and settings.fault["kind"] == "stop" else None
        if getattr(settings, "only_rank_zero_saves", False):
            stopped = 1
        started = time.monotonic()
        patience = Patience(limit_s, Family(*(process.pid for process in processes if process.pid)).used_s)
        try:
            while len(ended) < num_ranks and not patience.is_over():
                for rank, process in enumerate(processes):
                    if rank not in ended and process.exitcode is not None:
                        ended[rank] = time.monotonic()
                if set(range(num_ranks)) - set(ended) == {stopped}:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(timeout=5)
    first = min(ended.values(), default=started)
    return [
        Ended(
            code=processes[rank].exitcode if rank in ended else None,
            said=files[rank].read_text(errors="replace") if files[rank].exists() else "",
            seconds=ended.get(rank, time.monotonic()) - first,
        )
        for rank in range(num_ranks)
    ]


def _run_rank(
    job: Callable[[Any], None], settings: Any, rank: int, num_ranks: int, port: int, file: str
) -> None:
    """Run one rank as Python runs a script: what is not caught is printed, and what is to be done at the end is done."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    code = 0
    try:
        job(settings)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # the interpreter's own end, with all destructors
