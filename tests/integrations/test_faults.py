"""A rank that fails is named by all that survive it, with where it was; nobody waits longer than the limit.

The whole table (60 faults, 16 stops) is in `tests/soak`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from gpp_plugin.runtime.ranks import failure_board
from gpp_plugin.runtime.ranks import job_board as job_board_module
from gpp_plugin.runtime.ranks.failure_board import HERE, place_of
from gpp_plugin.runtime.ranks.job_board import engine_call, job_board
from gpp_plugin.runtime.ranks.placement_of_ranks import join_ranks
from tests.fault_job import FaultSettings
from tests.fault_runs import can_make_hosts, run_job
from tests.faults import Fault
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of
from tests.models import build
from tests.ranks import open_test_board, run_kept_ranks

LIMIT_S = 6.0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(kind="kill", rank=1, at="instruction:", skip=9), "its process is gone without a word"),
        (Fault(kind="raise", rank=2, at="instruction:", skip=4), "failed first, in train_batch at "),
        (Fault(kind="kill", rank=2, at="waits_for:the plan"), "its process is gone without a word"),
        (
            Fault(kind="memory", rank=0, at="call:save_checkpoint"),
            "in save_checkpoint: MemoryError: injected",
        ),
        (
            Fault(kind="kill", rank=1, at="call:save_checkpoint"),
            "last heard of in save_checkpoint: its process",
        ),
        (Fault(kind="kill", rank=0, at="call:eval_batch"), "last heard of in eval_batch: its process"),
    ],
    ids=lambda value: f"{value.kind} {value.at}" if isinstance(value, Fault) else "",
)
def test_who_failed_first_is_what_all_survivors_say(fault: Fault, expected: str, tmp_path: Path) -> None:
    settings = FaultSettings(directory=str(tmp_path), fault=asdict(fault), block={"stages": 3})
    ended = run_job(settings, 3)
    for rank, each in enumerate(ended):
        if rank != fault.rank:
            assert each.code == 1, each  # it was not killed at the end of the wait
            assert each.last_line.startswith(f"gpp_plugin: rank {fault.rank}"), each.said[-1500:]
            assert "failed first" in each.last_line and expected in each.last_line, each.said[-1500:]


@pytest.mark.parametrize("at", ["instruction:", "call:eval_batch"])
def test_a_stopped_rank_is_named_when_the_limit_has_passed(at: str, tmp_path: Path) -> None:
    fault = Fault(kind="stop", rank=1, at=at, skip=0)
    block = {"stages": 3, "comm_timeout_s": LIMIT_S}
    ended = run_job(FaultSettings(directory=str(tmp_path), fault=asdict(fault), block=block, steps=1), 3)
    for rank in (0, 2):
        assert ended[rank].code == 1 and ended[rank].seconds <= LIMIT_S + 5, ended[rank]
        assert "its process is stopped (SIGSTOP" in ended[rank].last_line, ended[rank].said[-1500:]


def test_a_rank_that_sleeps_is_named_where_ranks_do_not_wait_for_each_other_to_begin(tmp_path: Path) -> None:
    fault = Fault(kind="sleep", rank=1, at="script:step 2")
    block = {"stages": 2, "comm_timeout_s": LIMIT_S, "mode": "async"}
    first, _ = run_job(FaultSettings(directory=str(tmp_path), fault=asdict(fault), block=block), 2)
    assert first.code == 1 and first.last_line.startswith("gpp_plugin: rank 1"), first
    assert "outside of the engine's calls: it did not come to train_batch" in first.last_line


def test_a_rank_that_saves_alone_ends_at_the_limit(tmp_path: Path) -> None:
    settings = FaultSettings(
        directory=str(tmp_path),
        block={"stages": 2, "comm_timeout_s": LIMIT_S},
        steps=1,
        rank_zero_only="save",
    )
    first, second = run_job(settings, 2)
    assert (first.code, second.code) == (1, None), first
    assert (
        first.last_line.startswith("gpp_plugin: rank 1")
        and "outside of the engine's calls" in first.last_line
    )


@pytest.mark.skipif(not can_make_hosts(), reason="name spaces and links between them need root")
@pytest.mark.parametrize("at", ["script:step 1", "waits_for:the loss", "call:save_checkpoint"])
def test_hosts_that_lose_each_other_end_by_the_limit_and_name_the_other_ones_rank(
    at: str, tmp_path: Path
) -> None:
    fault = Fault(kind="cut", rank=1, at=at)
    block = {"stages": 2, "comm_timeout_s": LIMIT_S}
    ended = run_job(FaultSettings(directory=str(tmp_path), fault=asdict(fault), block=block), 2, way="hosts")
    for rank, each in enumerate(ended):
        assert each.code == 1 and each.seconds <= LIMIT_S + 5.0, each
        assert each.last_line.startswith(f"gpp_plugin: rank {1 - rank} "), each.said[-1500:]
        assert "nothing was heard of it" in each.last_line, each.said[-1500:]


@pytest.mark.parametrize("bad", ["dataset", "collate_fn", "iterator", "evaluation", "hook", "callback"])
def test_code_of_the_user_that_fails_on_one_rank_is_in_the_last_line_of_all(bad: str, tmp_path: Path) -> None:
    uses_loader = bad in ("dataset", "collate_fn")
    settings = FaultSettings(directory=str(tmp_path), block={"stages": 2}, bad=bad, uses_loader=uses_loader)
    for each in run_job(settings, 2):
        assert each.code == 1 and "rank 1 " in each.last_line, each.said[-1500:]
        assert "rank 0" not in each.last_line, each.said[-1500:]
        assert "is broken (fault_job.py:" in each.last_line, each.said[-1500:]


def fail_in_training(kind: str) -> tuple[str, str]:
    """Train until rank 1 fails in a hook of a parameter; return what is said here, and who failed first."""
    model, make_batch = build("two_branch")
    engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 2}))
    if engine.global_rank == 1:
        calls = itertools.count(kind == "trial")  # it is tried before the step, when it may only look
        hook = lambda gradient: break_down(kind) if next(calls) else None  # noqa: E731
        next(engine.module.parameters()).register_hook(hook)
    said = said_of(lambda: engine.train_batch(data_iter=iter([make_batch(B, 1)])))
    board = job_board()
    assert board is not None
    return said, str(board.first)


def break_down(kind: str) -> None:
    raise MemoryError("no room") if kind == "memory" else ValueError("this hook is broken")


@pytest.mark.parametrize("kind", ["trial", "hook", "memory"])
def test_what_fails_in_a_step_on_one_rank_is_told_by_all_with_its_line(kind: str) -> None:
    text = "MemoryError: no room" if kind == "memory" else "ValueError: this hook is broken"
    place = f"(test_faults.py:{break_down.__code__.co_firstlineno + 1}, in break_down)"
    for rank, (said, first) in enumerate(run_kept_ranks(fail_in_training, 2, kind)):
        assert f"{text} {place}" in said or (kind, rank, said) == ("trial", 1, text), (rank, said)
        if kind == "trial":
            assert first == "None" and "failed first" not in said, "nothing has run, and all may go on"
        else:
            assert first.startswith("rank 1 (stage ") and f"{text} {place}" in first, (rank, first)


def enter_phases() -> list[str]:
    """Enter calls and phases one after the other on rank 1; return where rank 0 finds it, no beat of which comes."""
    failure_board.BEAT_S, before = 600.0, failure_board.BEAT_S
    open_test_board(limit_s=60.0)
    board, found = job_board(), []
    assert board is not None
    board._look_for_deaths()  # as the thread does twice a second: the others' processes are known

    def look() -> None:
        dist.barrier()
        if board.rank == 0:
            found.append(place_of(board._facts_of(1)[1]))
        dist.barrier()

    with contextlib.ExitStack() as stack:
        if board.rank == 1:
            stack.enter_context(engine_call("save_checkpoint", is_fatal=lambda: False))
        look()
        if board.rank == 1:
            stack.enter_context(HERE.during("the manifest"))
            HERE.waits_for = "the sums"
        look()
        HERE.waits_for = ""
    look()
    if board.rank == 1:
        with contextlib.suppress(StopIteration), engine_call("train_batch", is_fatal=lambda: False):
            raise StopIteration
    look()
    job_board_module.close_board()
    failure_board.BEAT_S = before
    return found


def test_where_a_rank_is_is_known_before_its_next_beat() -> None:
    found, _ = run_kept_ranks(enter_phases, 2)
    assert found == [
        "in save_checkpoint",
        "in save_checkpoint, the manifest, waiting for the sums",
        "outside of the engine's calls",
        "outside of the engine's calls (its last call raised StopIteration, in train_batch)",
    ]


def capture_for_long(settings: FaultSettings) -> None:
    """Be in a call with Python's standard error redirected, as a capture is, while rank 1 ends."""
    if join_ranks("cpu").rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    with engine_call("initialize", is_fatal=lambda: True), contextlib.redirect_stderr(io.StringIO()):
        time.sleep(60)


def test_a_rank_that_is_ended_while_it_captures_says_why(tmp_path: Path) -> None:
    first, _ = run_job(FaultSettings(directory=str(tmp_path)), 2, job=capture_for_long)
    assert first.code == 1 and first.last_line.startswith("gpp_plugin: rank 1 failed first"), first
