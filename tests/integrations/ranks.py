"""Runs functions on gloo ranks that live as long as the tests do: starting four costs more than most tests."""

from __future__ import annotations

import atexit
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
START_TIMEOUT_S = 120.0


class RankPool:
    """Processes in one process group that run one function after the other, all of them at the same time."""

    def __init__(self, world_size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.results = CONTEXT.Queue()
        self.tasks = [CONTEXT.Queue() for _ in range(world_size)]
        self.processes = [
            CONTEXT.Process(target=_work, args=(rank, world_size, port, tasks, self.results), daemon=True)
            for rank, tasks in enumerate(self.tasks)
        ]
        for process in self.processes:
            process.start()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait for the ranks to have joined their process group."""
        if not self._ready:
            self._collect(START_TIMEOUT_S)
            self._ready = True

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Return every rank's answer; raise AssertionError with the first failure."""
        for tasks in self.tasks:
            tasks.put((function, args))
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(self.tasks):
            try:
                rank, ok, value = self.results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                silent = sorted(set(range(len(self.tasks))) - set(answers))
                raise AssertionError(f"ranks {silent} gave no answer in {timeout_s} s") from None
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            answers[rank] = value
        return [answers[rank] for rank in range(len(self.tasks))]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join(timeout=5)


_pools: dict[int, RankPool] = {}


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0
) -> list[Any]:
    """Return what ``function(rank, *args)`` returned on every rank; raise with what it raised on any.

    A function that fails may leave other ranks waiting, so the ranks are then ended and made anew.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = RankPool(world_size)
    try:
        pool.wait_until_ready()
        return pool.run(function, args, timeout_s)
    except BaseException:
        del _pools[world_size]
        pool.close()
        raise


@atexit.register
def close_pools() -> None:
    """End all ranks."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _work(rank: int, world_size: int, port: int, tasks: Any, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from gpp_plugin.integrations.native_ops import without_shared_memory_op

    torch.set_num_threads(1)
    with without_shared_memory_op():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    results.put((rank, True, None))
    while True:
        function, args = tasks.get()
        try:
            results.put((rank, True, function(rank, *args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
        vars(get_accelerator()).pop("is_fp16_supported", None)  # what `allow_fp16` of a test may have set
