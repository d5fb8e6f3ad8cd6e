"""Runs a function on several gloo ranks of this machine, with a deadline, and returns their results."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import traceback
from collections.abc import Callable
from typing import Any

from gpp_plugin.launch import reserved_port
from tests.mutants import import_hook
from tests.processor_time import METER, Family
from tests.waits import Patience

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])
START_TIMEOUT_S = 120.0
LIMIT_S = 240.0
"""Of ranks that stand still (`tests.waits`): a hang fails before pytest's own limit."""
LAST_WORDS_S = 10.0
"""How long the other ranks may say what they saw after the first one failed."""


class RanksFailed(AssertionError):
    """Some ranks raised; the message holds what each of them said."""


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = LIMIT_S
) -> list[Any]:
    """Call ``function(*args)`` on ``num_ranks`` new processes and return what each returned, in rank order.

    The launcher's environment variables are set; the function joins the process group itself (or lets
    `deepspeed.initialize` do it). Processes that outlive the deadline are ended.
    """
    ranks = _Ranks(num_ranks, are_kept=False)
    try:
        return ranks.run(function, args, timeout_s)
    finally:
        ranks.end()


def run_kept_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = LIMIT_S
) -> list[Any]:
    """Do the same on ranks that live as long as the tests: starting four costs more than a small test.

    They have joined a process group. A function that fails may leave other ranks waiting, so the ranks
    are then ended and made anew.
    """
    ranks = _kept.get(num_ranks)
    if ranks is None:
        ranks = _start_kept(num_ranks)
    try:
        return ranks.run(function, args, timeout_s)
    except BaseException:
        del _kept[num_ranks]
        ranks.end()
        raise


def _start_kept(num_ranks: int) -> _Ranks:
    with METER.apart(f"the start of {num_ranks} kept ranks"):
        ranks = _kept[num_ranks] = _Ranks(num_ranks, are_kept=True)
        try:
            ranks.wait_until_joined()
        except BaseException:
            del _kept[num_ranks]
            ranks.end()
            raise
    return ranks


def _start_server() -> None:
    """Start the process that ranks are forked from, and wait until it has imported what they need."""
    global _has_server
    if not _has_server:
        with METER.apart("the start of the server of ranks"):
            first = _CONTEXT.Process(target=os.getpid)
            first.start()
            first.join()
        _has_server = True


class _Ranks:
    """Processes that run one function after the other, or one and no more."""

    def __init__(self, num_ranks: int, *, are_kept: bool) -> None:
        _start_server()
        self._port = contextlib.ExitStack()
        port = self._port.enter_context(reserved_port())
        self._answers = _CONTEXT.Queue()
        self._tasks = [_CONTEXT.Queue() for _ in range(num_ranks)]
        self._processes = [
            _CONTEXT.Process(
                target=_serve, args=(rank, num_ranks, port, are_kept, tasks, self._answers), daemon=True
            )
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self._processes:
            process.start()
        self._has_joined = not are_kept

    def wait_until_joined(self) -> None:
        if not self._has_joined:
            self._collect(START_TIMEOUT_S)
            self._has_joined = True

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for tasks in self._tasks:
            tasks.put((function, args, os.environ.get("PYTEST_CURRENT_TEST", "")))
        return self._collect(timeout_s)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(timeout=5)
        self._port.close()

    def _collect(self, timeout_s: float) -> list[Any]:
        family = Family(*(process.pid for process in self._processes if process.pid is not None))
        patience = Patience(timeout_s, family.used_s)
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while len(answers) + len(failed) < len(self._tasks) and not patience.is_over():
            has_died = any(process.exitcode not in (None, 0) for process in self._processes)
            try:
                rank, is_answer, value = self._answers.get(timeout=0.2)
            except queue.Empty:
                if has_died and not failed:
                    patience = Patience(LAST_WORDS_S, family.used_s)
                    failed.update(
                        {r: "died" for r, p in enumerate(self._processes) if p.exitcode not in (None, 0)}
                    )
                continue
            if is_answer:
                answers[rank] = pickle.loads(value)
            else:
                failed[rank] = value
                patience = Patience(LAST_WORDS_S, family.used_s)
        silent = set(range(len(self._tasks))) - set(answers) - set(failed)
        failed.update({rank: f"no answer, ended (limit {timeout_s:g} s without work)" for rank in silent})
        if failed:
            raise RanksFailed("\n".join(f"--- rank {rank}\n{failed[rank]}" for rank in sorted(failed)))
        return [answers[rank] for rank in range(len(self._tasks))]


_kept: dict[int, _Ranks] = {}
_has_server = False


@atexit.register
def end_kept_ranks() -> None:
    """End all ranks."""
    for ranks in _kept.values():
        ranks.end()
    _kept.clear()


def use_kernels() -> None:
    """Let torch compute on one thread with MKL-DNN, or as `python -m tests.soak kernels` says."""
    import torch

    torch.set_num_threads(int(os.environ.get("GPP_TEST_THREADS", "1")))
    torch._C._set_mkldnn_enabled(os.environ.get("GPP_TEST_MKLDNN") != "off")


def _serve(rank: int, num_ranks: int, port: int, is_kept: bool, tasks: Any, answers: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    from tests.shared_captures import share_captures

    use_kernels()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    if is_kept:
        share_captures()
        answers.put((rank, *_answer(_join, ())))
    while True:
        function, args, os.environ["PYTEST_CURRENT_TEST"] = tasks.get()
        import_hook.note("before the ranks' first test")
        answer = _answer(function, args)
        import_hook.note()
        answers.put((rank, *answer))
        vars(get_accelerator()).pop("is_fp16_supported", None)  # what `allow_fp16` of a test may have set
        if is_kept:
            _drop_groups()
        else:
            # Rank 0 holds the store that the others still read: all stay until `end` kills them together. A process
            # group that lost a rank must not be torn down politely.
            multiprocessing.parent_process().join()
            os._exit(0)


def open_test_board(*, limit_s: float) -> None:
    """Let the ranks of the default group know of each other's failures, as those of a job do; collective."""
    import torch.distributed as dist

    from gpp_plugin.runtime.ranks import job_board, placement_of_ranks

    placement_of_ranks.gather_placement("cpu")  # counts up the number of the board on all ranks
    job_board.open_board(
        dist.distributed_c10d._get_default_store(),
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        epoch=placement_of_ranks._last_call,
        limit_s=limit_s,
    )
    dist.barrier()


def _drop_groups() -> None:
    """Destroy the process groups a function left behind: each has threads that wake up a hundred times a second."""
    import gc

    import torch.distributed as dist
    from deepspeed.utils import groups as deepspeed_groups

    from gpp_plugin.runtime.ranks.job_board import close_board

    close_board()
    gc.collect()
    for name, value in vars(deepspeed_groups).items():
        if isinstance(value, dist.ProcessGroup) and value is not dist.group.WORLD:
            setattr(deepspeed_groups, name, None)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _join() -> None:
    import deepspeed

    from gpp_plugin.integrations.deepspeed.stage_optimizer import without_shared_memory_op

    with without_shared_memory_op():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:  # pickled here: tensors would otherwise be shared memory that goes with its process
        return True, pickle.dumps(function(*args))
    except BaseException:
        return False, traceback.format_exc()
