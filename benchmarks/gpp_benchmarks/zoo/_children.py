"""Each model in a process of its own, under a time limit, so that a crash or a hang is one row and no more.

Processes are forked from one that has imported torch and transformers and done nothing else: a model costs its own
seconds, not those of the imports.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from gpp_benchmarks.zoo._catalogue import BROKEN, CATALOGUE, ENDED
from gpp_benchmarks.zoo._trial import empty_row, one_line, try_model

_PRELOADED = ["torch", "transformers", "gpp_benchmarks.zoo._children"]


@dataclass(slots=True)
class _Child:
    """A process at work on a model, and the last thing it told."""

    name: str
    process: BaseProcess
    reader: Connection
    deadline: float
    phase: str = "start"


def rows_of(names: Sequence[str], *, jobs: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Try models, ``jobs`` at a time, and yield their rows as they come.

    Args:
        timeout_s: of each model; then its process is killed, and its row says in which phase it was.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting, running = list(names), dict[Connection, _Child]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = _start(context, waiting.pop(0), timeout_s)
                running[child.reader] = child
            soonest = min(child.deadline for child in running.values())
            for reader in wait(list(running), timeout=max(0.0, soonest - time.monotonic())):
                assert isinstance(reader, Connection)
                row = _read(running[reader])
                if row is not None:
                    yield _ended(running.pop(reader), row)
            for reader, child in list(running.items()):
                if time.monotonic() >= child.deadline:
                    line = f"took more than {timeout_s:g} s, in phase {child.phase!r}"
                    yield _ended(running.pop(reader), _row(child.name, line))
    finally:
        for child in running.values():
            _ended(child, {})


def _start(context: multiprocessing.context.ForkServerContext, name: str, timeout_s: float) -> _Child:
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_try_alone, args=(name, writer), daemon=True)
    process.start()
    writer.close()
    return _Child(name=name, process=process, reader=reader, deadline=time.monotonic() + timeout_s)


def _read(child: _Child) -> dict[str, Any] | None:
    """Return the row that a child sent, or what its end means; None where it only told its phase."""
    try:
        told = child.reader.recv()
    except EOFError:
        child.process.join(timeout=10)
        code = child.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return _row(child.name, f"its process ended with {how}, in phase {child.phase!r}")
    if isinstance(told, str):
        child.phase = told
        return None
    row: dict[str, Any] = told
    return row


def _row(name: str, line: str) -> dict[str, Any]:
    return empty_row(CATALOGUE[name]) | {"verdict": ENDED, "line": line}


def _ended(child: _Child, row: dict[str, Any]) -> dict[str, Any]:
    child.reader.close()
    if row.get("verdict") in (None, ENDED):
        child.process.kill()
    child.process.join(timeout=10)
    return row


def _try_alone(name: str, writer: Connection) -> None:
    """Try a model in this process and send its row; what models and torch print or warn of goes nowhere."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                row = try_model(CATALOGUE[name], writer.send)
            except Exception as error:  # one row, whatever it is
                row = _row(name, one_line(error)) | {"verdict": BROKEN}
    writer.send(row)
    writer.close()
