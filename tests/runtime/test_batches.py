"""Collecting mini-batches from the user's batches: what does not fit together is refused."""

from __future__ import annotations

import pytest
import torch

from gpp_plugin.engine.loading.rank_shard import Share
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.runtime.batches import UnitBatch, arrange_units, batch_checksum, join_batches

ROWS = torch.arange(4.0)


def test_batches_are_joined_by_rows() -> None:
    joined = join_batches([{"a": ROWS, "flag": True}, {"a": -ROWS, "flag": True}])
    assert joined["a"].tolist() == [0, 1, 2, 3, 0, -1, -2, -3] and joined["flag"] is True


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"a": ROWS, "flag": False}, "flag has values"),
        ({"a": ROWS, "flag": True, "b": ROWS}, "unlike keys"),
        ({"flag": True}, "unlike keys"),
        ({"a": ROWS[:, None], "flag": True}, "a has shapes"),
    ],
)
def test_batches_that_do_not_fit_are_refused(second: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        join_batches([{"a": ROWS, "flag": True}, second])


def test_checksums_of_many_ranks_are_compared_exactly() -> None:
    """As the engine does: n sum(c^2) == (sum c)^2 in fp64, whatever the number of ranks."""
    checksums = [float(batch_checksum({"a": torch.full((3,), float(seed))})) for seed in range(200)]
    assert len(set(checksums)) > 190
    for checksum in checksums:
        total = squares = 0.0
        for _ in range(1000):
            total, squares = total + checksum, squares + checksum * checksum
        assert squares * 1000 == total * total


def test_a_rank_keeps_the_units_at_its_places_in_the_chosen_order() -> None:
    units = [{"x": torch.full((1, length), float(length))} for length in (3, 9, 5, 7)]

    def heaviest_first(sizes: list[dict[str, int]]) -> list[int]:
        return sorted(range(len(sizes)), key=lambda number: -sizes[number]["x"])

    def kept(rank: int) -> UnitBatch:
        places = tuple(SampleRange(first_sample=place, num_samples=1) for place in (rank, rank + 2))
        share = Share(
            rank=rank, mini_batch=4, samples=places, keys=None, dtype=None, units=4, order=heaviest_first
        )
        return share.keep_units(units)

    whole = arrange_units(units, heaviest_first)
    assert whole.given == (1, 3, 2, 0)
    assert [unit["x"].shape[1] for unit in whole.units] == [9, 7, 5, 3]
    assert arrange_units(units, None).given is None
    for rank, here in ((0, [9, 5]), (1, [7, 3])):
        own = kept(rank)
        assert [unit["x"].shape[1] for unit in own.units] == [9, 7, 5, 3], "shapes of all are known"
        assert [unit["x"].shape[1] for unit in own.units if not unit["x"].is_meta] == here
        assert (own.given, own.checksum) == (whole.given, batch_checksum(whole))
