"""Collecting mini-batches from the user's batches: what does not fit together is refused."""

from __future__ import annotations

import pytest
import torch

from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.batches import batch_checksum, join_batches

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
