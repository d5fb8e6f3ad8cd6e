"""Samples that lie in one row train as they do one by one in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import unit_jobs as jobs
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "ranks", "block"),
    [("llama", 1, {}), ("gpt2", 2, {"stages": 2})],
)
def test_losses_and_gradients_equal_samples_one_by_one(name: str, ranks: int, block: dict[str, Any]) -> None:
    for answer in run_ranks(jobs.train_flattened, ranks, name, block):
        assert answer["rows"] > 2, "several samples in a row"
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert answer["errors"]
        assert max(answer["errors"].values()) < 2e-6
        assert "verified" in answer["log"]
