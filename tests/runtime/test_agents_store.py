"""Ranks that an elastic agent starts again read nothing that the ranks before have left in its store."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from gpp_plugin.errors import CommTimeout
from gpp_plugin.runtime.ranks.job_board import store_of_start


def start(store: dist.Store, num_ranks: int, *, first_late: bool = False) -> list[dist.Store]:
    """Start ranks as threads; rank 0 first, or after the others have looked at what is there."""

    def one(rank: int) -> dist.Store:
        if (rank == 0) == first_late:
            time.sleep(0.2)
        return store_of_start(store, rank=rank, num_ranks=num_ranks, timeout_s=10)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


def test_every_start_has_keys_of_its_own() -> None:
    agents = dist.HashStore()
    for number, (num_ranks, first_late) in enumerate(
        [(3, False), (3, True), (2, True), (1, False), (3, True)]
    ):
        stores = start(agents, num_ranks, first_late=first_late)
        assert not stores[-1].check(["failed"]), "of the start before"
        stores[0].set("failed", str(number))
        assert all(store.get("failed") == str(number).encode() for store in stores)


def test_a_start_that_some_ranks_did_not_live_to_see_is_nobodys() -> None:
    agents = dist.HashStore()
    with pytest.raises(CommTimeout, match="rank 0 of 3 .* rank 1 and rank 2 did not come"):
        store_of_start(agents, rank=0, num_ranks=3, timeout_s=0.2)
    with pytest.raises(CommTimeout, match="rank 1 of 3 .* rank 2 did not come"):
        store_of_start(agents, rank=1, num_ranks=3, timeout_s=0.2)
    assert len(start(agents, 3, first_late=True)) == 3
