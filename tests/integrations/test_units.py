"""Mini-batches of units of unlike lengths and numbers of samples equal one process that runs them one by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import unit_jobs as jobs
from tests.ranks import run_kept_ranks


@pytest.fixture(scope="module")
def of_counts() -> list[dict[str, Any]]:
    """Return what each rank found of mini-batches of other numbers of samples and lengths each."""
    return run_kept_ranks(jobs.train_counts, 2, [(2, 3, 5), (7, 2, 6), (3, 8, 11)], {"stages": 2})


def check(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert answer["errors"]
        assert max(answer["errors"].values()) < 2e-6


def test_units_of_any_number_of_samples_equal_one_process(of_counts: list[dict[str, Any]]) -> None:
    check(of_counts)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_unlike_lengths_are_cut_unevenly_among_tensor_ranks(name: str) -> None:
    """Texts of 8, 7 and 3 tokens, then of 7, 6 and 2: two ranks have 3 and 4 of 7 positions, 1 and 2 of 3."""
    block = {"stages": 1, "data_parallel": 1, "tensor_parallel": 2}
    check(run_kept_ranks(jobs.train_counts, 2, [(2, 3, 5), (3, 1, 2)], block, name, (0, 1, 5)))


def test_unlike_lengths_cross_from_context_ranks_in_parts() -> None:
    """Texts of 8, 7 and 3 tokens, then of 7, 6 and 2: of 3 and 2 positions some of four context ranks have none."""
    stages = [
        {"modules": ["transformer"], "ranks": [0, 1, 2, 3], "context": 4},
        {"modules": ["*"], "ranks": [4]},
    ]
    block = {"plan": {"stages": stages}}
    check(run_kept_ranks(jobs.train_counts, 5, [(2, 3, 5), (3, 1, 2)], block, "gpt2", (0, 1, 5)))


def test_units_of_any_number_of_samples_share_one_capture(of_counts: list[dict[str, Any]]) -> None:
    for answer in of_counts:
        assert answer["exports"] == (2, 0), (
            "the second number of samples by itself, the third and all others by symbols"
        )
