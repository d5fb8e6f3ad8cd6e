"""Runs a scenario of a patch on forked ranks: the packages that are patched are imported once, before."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

TIMEOUT_S = 60.0


def outcome_of(function: Callable[[int], None], num_ranks: int) -> str:
    """Call ``function(rank)`` on ranks with a launcher's variables; return "ok", or what those that failed said."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = [context.Process(target=_be_rank, args=(function, rank, results)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    said: list[str] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(said) < num_ranks and all(text == "ok" for text in said):
        is_over = not any(process.is_alive() for process in ranks)  # asked first: its last words come before
        if not results.empty():
            said.append(results.get())
        elif is_over:
            codes = [process.exitcode for process in ranks]
            said.append(f"exit codes {codes}" if any(codes) else "ok")
        elif time.monotonic() > deadline:
            said.append(f"had not ended after {TIMEOUT_S:.0f} s")
        else:
            time.sleep(0.02)
    for process in ranks:
        process.join(timeout=2.0)
        process.kill()
        process.join()
    while (
        not results.empty()
    ):  # whose wait ran out and who lost its connection by that: either may be heard first
        said.append(results.get())
    return "; ".join(text for text in said if text != "ok") or "ok"


def _be_rank(function: Callable[[int], None], rank: int, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        function(rank)
        said = "ok"
    except BaseException as error:
        said = f"rank {rank}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    results.put(said)
    results.close()
    results.join_thread()
    os._exit(said != "ok")
