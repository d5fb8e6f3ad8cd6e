"""The board: the first failure is everyone's, the dead and the silent are told apart, and nothing is made up."""

from __future__ import annotations

import multiprocessing
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout, ConfigError
from gpp_plugin.runtime.ranks import failure_board, job_board
from gpp_plugin.runtime.ranks.failure_board import HERE, FailureBoard, FirstFailure, SeenRank
from gpp_plugin.runtime.ranks.job_board import is_broken_connection, mark_shared


def make_boards(num_ranks: int) -> list[FailureBoard]:
    store = dist.HashStore()
    return [
        FailureBoard(store, rank=rank, num_ranks=num_ranks, epoch=1, limit_s=5.0) for rank in range(num_ranks)
    ]


def close(boards: list[FailureBoard]) -> None:
    for board in boards:
        board.close()


def test_the_first_failure_is_what_every_rank_finds() -> None:
    boards = make_boards(3)
    first = FirstFailure(rank=2, stage="text", where="in train_batch at 2F0", why="ValueError: boom")
    later = FirstFailure(
        rank=1, stage="vision", where="in train_batch at 1F0", why="CommTimeout: nothing came"
    )
    assert boards[2].post(first) == first
    assert boards[1].post(later) == first
    assert boards[0].find() == first
    assert str(first) == "rank 2 (stage 'text') failed first, in train_batch at 2F0: ValueError: boom"
    close(boards)


def test_the_thread_finds_a_failure_that_nobody_asked_for() -> None:
    boards = make_boards(2)
    boards[1].post(FirstFailure(rank=1, stage="", where="in destroy", why="KeyError: 1"))
    deadline = time.monotonic() + 60
    while boards[0].first is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert boards[0].first is not None and boards[0].first.rank == 1
    close(boards)


def test_where_all_live_a_rank_outside_of_the_engine_s_calls_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_board, "SETTLING_S", 0.1)
    boards = make_boards(3)
    seen = [
        SeenRank(rank=rank, state="alive", facts={"stage": "text", "call": call})
        for rank, call in ((1, "train_batch"), (2, ""))
    ]
    monkeypatch.setattr(boards[0], "look", lambda: seen)
    assert boards[0].find() is None, "this one is in no call either"
    monkeypatch.setattr(HERE, "call", "train_batch")
    assert str(boards[0].find()) == (
        "rank 2 (stage 'text') failed first, outside of the engine's calls: it did not come to train_batch, which every "
        "rank calls"
    )
    close(boards)


def test_what_the_board_s_thread_meets_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else publishes this rank's beats, or ends it where it is stuck."""
    monkeypatch.setattr(failure_board, "BEAT_S", 0.05)
    boards = make_boards(2)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("what is written there is no JSON")

    monkeypatch.setattr(boards[0], "_read_first", fail)
    assert failed.wait(60)
    number = boards[0]._number
    monkeypatch.undo()
    deadline = time.monotonic() + 60
    while boards[0]._number < number + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert boards[0]._number >= number + 3
    close(boards)


class SilentStore:
    """A store whose host is lost, once it is: no question to it returns."""

    def __init__(self) -> None:
        self.is_lost, self._store = threading.Event(), dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        if self.is_lost.is_set():
            threading.Event().wait(60)
        return getattr(self._store, name)


@pytest.mark.parametrize("holder", [0, None])
def test_a_store_that_does_not_answer_is_waited_for_once(
    holder: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_board, "ANSWER_S", 0.3)
    store = SilentStore()
    facts = {"num_ranks": 2, "epoch": 1, "limit_s": 5.0, "holder": holder, "neighbours": (1,)}
    board = FailureBoard(store, rank=1, **facts)
    store.is_lost.set()
    started = time.monotonic()
    first = board.find()  # as a wait does that broke off
    board.find()
    assert time.monotonic() - started < 8.0, "a silent rank is waited for longer, each time"
    assert first is not None and first.rank == 0 and "nothing was heard of" in first.why
    assert board.post(FirstFailure(rank=1, stage="", where="", why="")) == first
    monkeypatch.setattr(failure_board, "close_connections", lambda: None)
    board.close()


def test_a_store_that_is_gone_means_its_rank_is() -> None:
    boards = make_boards(2)
    close(boards)
    boards[1]._lose_store()
    assert boards[1].first is not None
    assert boards[1].first.rank == 0
    assert "its process is gone without a word" in str(boards[1].first)
    boards[0]._lose_store()
    assert boards[0].first is None


class GoingStore:
    """A store that goes while it is asked: the question ends late, and with it comes a page of torch's."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.is_gone = threading.Event()
        self.pages = 0

    def check(self, keys: list[str]) -> bool:
        self.is_asked.set()
        self.is_gone.wait(5)
        time.sleep(0.2)
        self.pages += 1
        raise RuntimeError("Connection reset by peer")

    set = get = compare_set = check


def test_the_thread_finds_that_the_store_s_rank_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stuck in torch asks nobody, and is ended by what the thread knows."""
    monkeypatch.setattr(failure_board, "BEAT_S", 0.05)
    holder = multiprocessing.get_context("fork").Process(target=_sleep)
    holder.start()
    boards = make_boards(2)
    found, own = failure_board.stat_of(holder.pid or 0), failure_board.RankProcess.own()
    assert found is not None
    boards[1]._processes[0] = failure_board.RankProcess(own.space, holder.pid or 0, found[1])
    holder.kill()
    holder.join()
    deadline = time.monotonic() + 30
    while boards[1].first is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert boards[1].first is not None and boards[1].first.rank == 0
    assert "its process is gone" in boards[1].first.why
    close(boards)


def test_nothing_is_written_of_a_lost_store_once_the_board_is_closed() -> None:
    holder = multiprocessing.get_context("fork").Process(target=_sleep)
    holder.start()
    boards = make_boards(2)
    close(boards)
    found = failure_board.stat_of(holder.pid or 0)
    assert found is not None
    board, store = boards[1], GoingStore()
    own = failure_board.RankProcess.own()
    board._processes[0] = failure_board.RankProcess(own.space, holder.pid or 0, found[1])
    board._store = store
    asking = threading.Thread(target=board.find)
    asking.start()
    assert store.is_asked.wait(60)
    holder.kill()
    holder.join()
    store.is_gone.set()
    asking.join(5)
    assert board.first is not None and board.first.rank == 0
    board.close()
    assert store.pages == 1
    time.sleep(0.5)
    assert store.pages == 1


def _sleep() -> None:
    time.sleep(60)


def test_what_ranks_raise_together_is_nobody_s_failure(monkeypatch) -> None:
    monkeypatch.setattr(HERE, "stage", "")  # another test of this process may have built an engine
    boards = make_boards(2)
    monkeypatch.setattr(job_board, "_board", boards[1])
    shared = ConfigError("no such stage")
    mark_shared(shared)
    job_board.name_cause(shared, is_fatal=True)
    survived = ConfigError("no optimizer")
    job_board.name_cause(survived, is_fatal=False)
    assert boards[1].first is None
    fatal = ValueError("boom")
    job_board.name_cause(fatal, is_fatal=True)
    assert boards[1].first is not None and boards[1].first.why == "ValueError: boom"
    assert str(fatal) == "boom"
    assert "rank 1 failed first" in fatal.__notes__[0]
    other = CommTimeout("nothing came")
    monkeypatch.setattr(job_board, "_board", boards[0])
    job_board.name_cause(other, is_fatal=True)
    assert str(other) == f"nothing came; {boards[1].first}"
    close(boards)


def test_errors_of_connections_are_told_from_others() -> None:
    assert is_broken_connection(
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    )
    assert not is_broken_connection(RuntimeError("shapes do not match"))
    try:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            raise ConfigError("construction failed") from error
    except ConfigError as wrapped:
        assert is_broken_connection(wrapped)


@pytest.mark.parametrize(
    ("broken", "first", "closes"),
    [
        (False, None, False),
        (True, None, True),
        (False, "rank 1 is stopped", True),
        (True, "rank 1 is gone", True),
    ],
)
def test_a_rank_that_met_a_failure_closes_its_connections_when_it_ends(broken, first, closes, monkeypatch):
    """Torch's destructors would wait for what is pending on them; of a job that went well nothing is cut off."""
    ends = []
    board = SimpleNamespace(
        first=first, linger=lambda: ends.append("linger"), leave=lambda: ends.append("leave")
    )
    monkeypatch.setattr(job_board, "_board", board)
    monkeypatch.setattr(job_board, "_is_broken", broken)
    monkeypatch.setattr(job_board, "close_connections", lambda: ends.append("close"))
    job_board._leave()
    assert ends == ["linger", "leave", *["close"] * closes]


def test_calls_are_counted_from_the_beginning_of_a_job(monkeypatch) -> None:
    """Ranks of unequal pasts: one that waits in a call of another number is taken to be elsewhere."""
    monkeypatch.setattr(job_board, "_board", None)
    HERE.call, HERE.number = "deepspeed.initialize", 7
    job_board.open_board(SimpleNamespace(), rank=0, num_ranks=1, epoch=0, limit_s=1.0)
    assert (HERE.call, HERE.number) == ("deepspeed.initialize", 0)
    HERE.call = ""
