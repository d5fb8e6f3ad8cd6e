"""Collectives of all ranks: what is broadcast arrives, and none is waited for without slices."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpp_plugin
from gpp_plugin.engine.stage_groups import broadcast_in_place
from gpp_plugin.errors import CommTimeout
from gpp_plugin.runtime.messages import sockets
from gpp_plugin.runtime.ranks import collectives as collectives_module
from gpp_plugin.runtime.ranks.collectives import Collectives, wait_for
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import engine_call
from tests.ranks import open_test_board, run_kept_ranks


def make(timeout_s: float) -> Collectives:
    rank = dist.get_rank()
    return Collectives(
        group=dist.new_group(backend="gloo"), who=f"rank {rank}, stage 'text'", timeout_s=timeout_s
    )


def call_all() -> list[object]:
    rank = dist.get_rank()
    collectives = make(60.0)
    collectives.barrier("the start")
    return [
        collectives.sum(torch.tensor([float(rank)]), "a sum").item(),
        collectives.gather(rank, "a gathering"),
        collectives.gather_on_first(rank, "a gathering"),
        collectives.broadcast(rank, source=1, what="news"),
    ]


def test_all_ranks_have_what_each_gives() -> None:
    assert run_kept_ranks(call_all, 3) == [
        [3.0, [0, 1, 2], [0, 1, 2] if rank == 0 else None, 1] for rank in range(3)
    ]


def test_a_single_rank_waits_for_nobody() -> None:
    collectives = Collectives(group=None, who="rank 0", timeout_s=0.0)
    collectives.barrier("the end")
    assert collectives.sum(torch.ones(2), "a sum").tolist() == [1.0, 1.0]
    assert (collectives.gather(5, "it"), collectives.gather_on_first(5, "it")) == ([5], [5])
    assert collectives.broadcast(5, source=0, what="it") == 5


class LateWork:
    """A collective that ends between a wait that came to its end and the question whether it has ended."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def is_completed(self) -> bool:
        return True

    def wait(self, limit: object = None) -> None:
        self.waits += 1
        if self.waits == 1 or self.error:
            raise RuntimeError(self.error or "Operation timed out!")


def test_what_ends_just_after_a_wait_has_ended_well() -> None:
    work = LateWork()
    wait_for(work, what="a sum", who="rank 0", group=None, limit_s=5.0)  # type: ignore[arg-type]
    assert work.waits == 2
    late = LateWork("Operation timed out!")  # of the group's own limit
    with pytest.raises(CommTimeout, match="broke off .Operation timed out!"):
        wait_for(late, what="a sum", who="rank 0", group=None, limit_s=5.0)  # type: ignore[arg-type]
    assert late.waits == 2


CALLS = {
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
}
CALLS |= {"recv", "reduce", "reduce_scatter_tensor", "scatter", "send"}
WITHOUT = {"device_memory.py"}
"""Waits as torch does, while devices are measured."""
NO_JOB = {"compare", "demo", "doctor", "rehearse", "transport_trial.py"}
"""Rooms whose commands start ranks of their own."""


def test_no_wait_of_a_job_is_torch_s_own() -> None:
    """Its limits are half an hour, and it names nobody."""
    root, found = Path(gpp_plugin.__file__).parent, set()
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] in NO_JOB:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.removeprefix("dist.") in CALLS and name.startswith("dist."):
                assert isinstance(node, ast.Call)
                if "async_op" not in [keyword.arg for keyword in node.keywords]:
                    found.add(path.name)
    assert found == WITHOUT, found


def share_without_one() -> str:
    """Share a weight of rank 1 with all ranks; it comes when the others have given up."""
    open_test_board(limit_s=1.0)
    store, weight = dist.distributed_c10d._get_default_store(), torch.zeros(3)
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 1:
        store.wait(["given up"])
    else:
        with pytest.raises(CommTimeout) as error, engine_call("initialize", is_fatal=lambda: False):
            broadcast_in_place(weight, source=1, group=group)
        store.set("given up", "1")
        return str(error.value)
    broadcast_in_place(weight, source=1, group=group)
    return ""


def test_a_rank_that_does_not_come_to_share_weights_is_named() -> None:
    said, _ = run_kept_ranks(share_without_one, 2)
    assert "waited for the other ranks at the first weights of a stage's ranks (limit 1 s)" in said, said
    assert "rank 1 failed first, outside of the engine's calls: it did not come to" in said, said


def test_what_the_thread_that_looks_at_messages_meets_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that is gone meanwhile: other waits are still to be ended."""
    monkeypatch.setattr(collectives_module, "SLICE_S", 0.05)
    board: Any = SimpleNamespace(first="rank 2 failed first")
    monkeypatch.setattr(collectives_module, "job_board", lambda: board)
    watch, closed = collectives_module._MessageWatch(), []

    def fail() -> None:
        closed.append("first")
        raise ValueError("this group is gone")

    facts: Any = {"what": "a message", "group": None, "limit_s": 0.0}
    waits = [
        collectives_module._Waiting(**facts, hang_up=hang_up)
        for hang_up in (fail, lambda: closed.append("second"))
    ]
    with watch.over(waits[0]):
        thread, deadline = watch._thread, time.monotonic() + 30
        while not closed and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        with watch.over(waits[1]):
            while "second" not in closed and time.monotonic() < deadline:
                time.sleep(0.01)
        assert thread is not None and watch._thread is thread and thread.is_alive()
    assert "second" in closed


def load_for_long() -> str:
    """Wait on rank 0 for a rank that is at work, longer than for one that is."""
    open_test_board(limit_s=0.5)
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group(backend="gloo")
    collectives = Collectives(group=group, who="rank 0", timeout_s=1.5)
    with engine_call("train_batch", is_fatal=lambda: False):
        if dist.get_rank() == 0:
            with pytest.raises(CommTimeout) as error:
                collectives.barrier("the mini-batch that every rank loads")
            store.set("gone on", "1")
            return str(error.value)
        with HERE.during("loading data"):
            store.wait(["gone on"])
        collectives.barrier("the mini-batch that every rank loads")
    return ""


def test_a_rank_that_is_at_work_for_too_long_is_named() -> None:
    said, _ = run_kept_ranks(load_for_long, 2)
    assert " s rank 1 failed first, in train_batch, loading data: it did not come to" in said, said


def test_who_gives_up_closes_the_connections_by_a_rank_that_is_not_gone(monkeypatch):
    """A receive from a rank that is gone fails at once, and closes nothing: rank 0 of four waited twice its limit."""
    tried = []

    class Late:
        def wait(self, limit):
            tried.append("late")
            raise RuntimeError("timed out")

    def irecv(tensor, other, *, group, tag):
        tried.append(other)
        if other == 1:
            raise RuntimeError("connection closed by peer")
        return Late()

    monkeypatch.setattr(sockets.dist, "irecv", irecv)
    sockets.hang_up(object(), [1, 2, 3])
    assert tried == [1, 2, "late", 3, "late"]
