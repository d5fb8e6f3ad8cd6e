"""Some hundred mutated files a reader; `make soak` feeds them with a hundred thousand."""

import pytest

from tests.soak.fuzz import TARGETS, Target, fuzz

COUNT = 60


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.name))
def test_documented_errors_only(target: Target) -> None:
    found = fuzz(target, COUNT, seed=1)
    assert not found.failures, found.failures[:3]
    assert sum(found.counts.values()) == COUNT and found.counts["refused"] > COUNT // 4
