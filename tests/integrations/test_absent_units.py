"""Units that lack a branch, on ranks: losses, gradients, AdamW steps and evaluations equal one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import absent_jobs as jobs
from tests.ranks import run_kept_ranks


def check(answer: dict[str, Any], *, is_exact: bool = True) -> None:
    assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6 if is_exact else 1e-3)
    assert answer["errors"]
    assert max(answer["errors"].values()) < 2e-6
    assert answer["left"] == 0
    if is_exact:
        assert all(apart < 1e-5 for apart in answer["weights"].values())
        assert answer["evaluated"] == pytest.approx(answer["wanted_evaluated"], rel=2e-6)
        assert answer["logits"] and all(apart < 1e-5 for apart in answer["logits"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_towers_of_which_units_lack_one(ranks: int) -> None:
    answers = run_kept_ranks(jobs.train_absent, ranks, {"data_parallel": 1}, 0, ("blr", "lll", "rbr"))
    for answer in answers:
        check(answer)
    assert answers[0]["weights"]
    assert answers[0]["moved"][0]
    assert not any(name.startswith("right.") for name in (*answers[0]["moved"][0], *answers[0]["reached"][1]))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_whose_units_lack_a_tower_that_others_have(zero: int) -> None:
    # of two data-parallel ranks the second one's units have no right input; then nobody's have
    answers = run_kept_ranks(jobs.train_absent, 2, {"data_parallel": 2}, zero, ("blbl", "llll", "rrbb"))
    for answer in answers:
        check(answer, is_exact=zero == 0)
    first, second = answers[0]["moved"]
    assert first
    assert not any(name.startswith("right.") for name in first)
    assert any(name.startswith("right.") for name in second)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_engines_own_loader_gives_packed_units_that_lack_an_input(ranks: int) -> None:
    answers = run_kept_ranks(jobs.load_absent, ranks, {"data_parallel": 1})
    for answer in answers:
        assert answer["losses"] == pytest.approx(answer["wanted"], rel=1e-6)
        assert answer["errors"]
        assert max(answer["errors"].values()) < 2e-6
        assert 0 < answer["lacking"] < 12
