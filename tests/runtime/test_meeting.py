"""Meetings of all ranks: what is told arrives, and where one rank misses the others say who waited for what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout
from gpp_plugin.runtime.ranks.calls import engine_call
from gpp_plugin.runtime.ranks.meeting import Meeting
from gpp_plugin.runtime.ranks.waiting import wait_for
from gpp_plugin.runtime.ranks.whereabouts import OUTSIDE
from tests.ranks import open_test_board, run_kept_ranks

WAYS: dict[str, Callable[[Meeting], object]] = {
    "meet": lambda meeting: meeting.meet("the end"),
    "sum": lambda meeting: meeting.sum(torch.ones(1), "the loss of step 3"),
    "gather": lambda meeting: meeting.gather(1, "the memory report"),
    "gather on first": lambda meeting: meeting.gather_on_first(1, "the weights"),
    "tell": lambda meeting: meeting.tell(1, source=0, what="a new shape"),
}


def make(timeout_s: float) -> Meeting:
    rank = dist.get_rank()
    return Meeting(
        group=dist.new_group(backend="gloo"), who=f"rank {rank}, stage 'text'", timeout_s=timeout_s
    )


def tell_all() -> list[object]:
    rank = dist.get_rank()
    meeting = make(60.0)
    meeting.meet("the start")
    return [
        meeting.sum(torch.tensor([float(rank)]), "a sum").item(),
        meeting.gather(rank, "a gathering"),
        meeting.gather_on_first(rank, "a gathering"),
        meeting.tell(rank, source=1, what="news"),
    ]


def miss_each() -> dict[str, str]:
    """Return what this rank says of each meeting that rank 1 does not come to."""
    said = {}
    for way, attend in WAYS.items():
        meeting = make(0.5)
        open_test_board(limit_s=0.5)
        meeting.meet("the start")
        if dist.get_rank() != 1:
            with (
                pytest.raises(CommTimeout) as caught,
                engine_call("memory_report", is_fatal=lambda: False),
            ):
                attend(meeting)
            said[way] = str(caught.value)
        dist.barrier()  # rank 1 is there: it only stays away from this meeting
    return said


def test_all_ranks_learn_what_they_meet_for() -> None:
    assert run_kept_ranks(tell_all, 3) == [
        [3.0, [0, 1, 2], [0, 1, 2] if rank == 0 else None, 1] for rank in range(3)
    ]


def test_a_single_rank_waits_for_nobody() -> None:
    meeting = Meeting(group=None, who="rank 0", timeout_s=0.0)
    meeting.meet("the end")
    assert meeting.sum(torch.ones(2), "a sum").tolist() == [1.0, 1.0]
    assert (meeting.gather(5, "it"), meeting.gather_on_first(5, "it")) == ([5], [5])
    assert meeting.tell(5, source=0, what="it") == 5


def test_a_rank_that_misses_a_meeting_is_told_of_by_who_waits_at_which() -> None:
    said = run_kept_ranks(miss_each, 3)
    assert said[1] == {}
    occasions = dict(
        zip(
            WAYS,
            ("the end", "the loss of step 3", "the memory report", "the weights", "a new shape"),
            strict=True,
        )
    )
    for rank in (0, 2):
        assert said[rank].keys() == occasions.keys()
        for way, text in said[rank].items():
            expected = (
                f"rank {rank}, stage 'text' waited for the other ranks at {occasions[way]} (limit 0.5 s): "
            )
            assert text.startswith(expected), (way, text)
            assert f"rank 1 failed first, {OUTSIDE}: it did not come to {occasions[way]}" in text


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
