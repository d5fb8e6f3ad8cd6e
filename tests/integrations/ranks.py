"""Runs a function on several gloo ranks; the server process imports torch and DeepSpeed once for all of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["gpp_plugin.integrations.stage_engine", "tests.integrations.ranks"])


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0
) -> list[Any]:
    """Return what ``function(rank, *args)`` returned on every rank; raise what it raised on the first that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_work, args=(function, rank, world_size, port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    try:
        while len(answers) + len(failures) < world_size:
            try:
                rank, ok, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                silent = sorted(set(range(world_size)) - set(answers) - set(failures))
                raise AssertionError(
                    f"ranks {silent} gave no answer in {timeout_s} s; failed: {failures}"
                ) from None
            (answers if ok else failures)[rank] = value
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
    if failures:
        rank = min(failures)
        raise AssertionError(f"rank {rank} failed:\n{failures[rank]}")
    return [answers[rank] for rank in range(world_size)]


def _work(
    function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    try:
        results.put((rank, True, function(rank, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        dist.destroy_process_group()
