"""Mini-batches with padding and without train in turns, captured with either, as in a single process."""

from __future__ import annotations

from typing import Any

import pytest

from gpp_benchmarks._attention_models import build_family
from tests.ranks import run_ranks
from tests.reference import gradient_errors, train_reference
from tests.runtime import padding_jobs

ASYNC = {"mode": "async", "schedule": "1f1b"}
JOBS: list[dict[str, Any]] = [
    {"family": "llama", "captured": "none", "paddings": ["left", "none", "right"]},
    {"family": "llama", "captured": "left", "paddings": ["none", "right", "none", "left"]},
    {"family": "t5", "captured": "none", "paddings": ["right", "none"]},
    {
        "family": "llama", "captured": "none", "paddings": ["none", "left", "none", "left"],
        "block": {"memory": {"recompute": "full"}},
    },
    {
        "family": "llama", "captured": "left", "paddings": ["none", "left", "none"],
        "block": {"memory": {"recompute": "full"}},
    },
    {"family": "llama", "captured": "none", "paddings": ["none", "left"] * 3, "block": ASYNC},
    {
        "family": "llama", "captured": "none", "paddings": ["none", "left"] * 3, "block": ASYNC,
        "keeps_masks": True,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> list[list[dict[str, Any]]]:
    """Of each rank, of each job."""
    return run_ranks(padding_jobs.train, 2, JOBS, timeout_s=300)


@pytest.mark.parametrize("number", range(5))
def test_training_equals_a_single_process(answers: list[list[dict[str, Any]]], number: int) -> None:
    job = JOBS[number]
    model, make_batch = build_family(job["family"], padding_jobs.SIZE)
    batches = [make_batch(padding) for padding in job["paddings"]]
    reference = train_reference(model, batches, unit=padding_jobs.UNIT)
    found: dict[str, Any] = {}
    for rank in answers:
        assert rank[number]["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
        assert rank[number]["losses"] == pytest.approx(reference.losses, rel=1e-5)
        assert rank[number]["num_shapes"] == 1, "padding is no other shape: nothing is captured again"
        assert all(rank[number]["has_memory"]) == ("block" in job)
        found |= rank[number]["gradients"]
    assert found.keys() == reference.gradients.keys()
    assert max(gradient_errors(found, reference.gradients).values()) < 2e-6


def test_in_mode_async_padding_drains_nothing(answers: list[list[dict[str, Any]]]) -> None:
    for rank in answers:
        assert rank[5]["windows"] == [1, 2, 3, 4, 5, 6]
        assert rank[5]["losses"] == pytest.approx(rank[6]["losses"], rel=1e-5)
