"""Meetings of all ranks: what is told arrives, and where one rank misses the others say who waited for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Late:
    """A collective that ends right after a look of a wait has timed out."""

    def __init__(self, ends: str) -> None:
        self.says = ["Operation timed out!", ends]

    def wait(self, timeout: object) -> None:
        if text := self.says.pop(0):
            raise RuntimeError(text)

    def is_completed(self) -> bool:
        return True


def test_what_comes_while_a_look_times_out_has_come() -> None:
    group: Any = None
    wait_for(Late(""), what="it", who="rank 0", group=group, limit_s=5)
    with pytest.raises(CommTimeout, match="closed by peer"):
        wait_for(Late("Connection closed by peer"), what="it", who="rank 0", group=group, limit_s=5)
