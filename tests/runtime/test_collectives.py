"""Collectives of all ranks: what is broadcast arrives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout
from gpp_plugin.runtime.ranks.collectives import Collectives, wait_for
from tests.ranks import run_kept_ranks


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
