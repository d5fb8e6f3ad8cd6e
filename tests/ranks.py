"""Runs a function on several gloo ranks of this machine, with a deadline, and returns their results."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "deepspeed", "gpp_plugin", "tests.models"])


class RanksFailed(AssertionError):
    """Some ranks raised; the message holds what each of them said."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call ``function(*args)`` on ``num_ranks`` processes and return what each returned, in rank order.

    The launcher's environment variables are set; the function joins the process group itself (or lets
    `deepspeed.initialize` do it). Processes that outlive the deadline are ended.
    """
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        processes = [
            _CONTEXT.Process(target=_run_one, args=(function, args, rank, num_ranks, port, directory))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        failed = False
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline and not failed:
            time.sleep(0.02)
            failed = any(process.exitcode not in (None, 0) for process in processes)
        if failed:  # give the others a moment to say what they saw
            until = min(deadline, time.monotonic() + 10.0)
            while any(process.is_alive() for process in processes) and time.monotonic() < until:
                time.sleep(0.02)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        results, errors = [], []
        for rank in range(num_ranks):
            path = Path(directory, f"{rank}.pickle")
            kind, value = pickle.loads(path.read_bytes()) if path.exists() else ("error", "no result")
            results.append(value)
            if kind == "error":
                errors.append(f"--- rank {rank}{' (still running, ended)' if rank in late else ''}\n{value}")
        if errors:
            raise RanksFailed("\n".join(errors))
        return results


def _run_one(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, num_ranks: int, port: int, directory: str
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    code = 0
    try:
        answer: tuple[str, Any] = ("result", function(*args))
    except BaseException:
        answer = ("error", traceback.format_exc())
        code = 1
    path = Path(directory, f"{rank}.pickle")
    path.with_suffix(".part").write_bytes(pickle.dumps(answer))
    path.with_suffix(".part").rename(path)
    os._exit(code)  # a process group that lost a rank must not be torn down politely
