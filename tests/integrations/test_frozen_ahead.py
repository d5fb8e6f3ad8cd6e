"""Frozen branches that run ahead: every bit is as without, whatever happens between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import ahead_jobs as jobs
from tests.ranks import run_kept_ranks

CLIP, LLAVA, SMALL = "clip text_model", "llava model.vision_tower", "frozen_branch left"
TO_THE_END = [False, True, True, True, True, False]
"""The first mini-batch shows whether the branch may run ahead; after the last one there is none to run."""
ALWAYS = [False, True, True, True, True, True]
NEVER = [False] * 6


def check(answers: list[dict[int, dict[str, Any]]], looked: list[bool]) -> None:
    for answer in answers:
        without, ahead = answer[0], answer[1]
        assert without["looked"] == NEVER and ahead["looked"] == looked
        assert ahead["losses"] == without["losses"] and ahead["steps"] == without["steps"]
        for one, other in zip(ahead["gradients"], without["gradients"], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        for name, parameter in ahead["parameters"].items():
            assert torch.equal(parameter, without["parameters"][name]), name


def both(kind: str, stages: str, ranks: int, **options: Any) -> list[dict[int, dict[str, Any]]]:
    return run_kept_ranks(jobs.train_both, ranks, kind, stages, options, timeout_s=300)


@pytest.mark.parametrize(
    ("kind", "stages", "ranks", "options"),
    [
        (SMALL, SMALL, 2, {"zero": 1}),
        (LLAVA, LLAVA, 2, {"dropout_after": 0.1}),
        (LLAVA, "llava on two", 4, {"zero": 1}),
        (LLAVA, "llava on two", 4, {"zero": 2}),
        (LLAVA, "llava on two", 4, {"zero": 3}),
        (LLAVA, "llava branch of two", 3, {"lengths": (12, 10, 10, 11, 12, 10)}),
        (LLAVA, "llava, the tower on the language model's ranks", 2, {"dropout_after": 0.1, "zero": 1}),
        (
            LLAVA,
            "llava, the tower on the language model's ranks",
            2,
            {"lengths": (12, 10, 12, 10, 12, 10)},
        ),
        (CLIP, "clip, the text tower on both ranks", 2, {"zero": 2}),
        (CLIP, "clip, the text tower on both ranks", 2, {"zero": 3}),
    ],
)
def test_bits_are_the_same_on_a_callers_iterator(
    kind: str, stages: str, ranks: int, options: dict[str, Any]
) -> None:
    check(both(kind, stages, ranks, **options), TO_THE_END)


def test_bits_are_the_same_on_the_engines_own_loader_which_looks_ahead_by_default() -> None:
    answers = both(LLAVA, LLAVA, 2, own=True)
    check(answers, ALWAYS)
    language = answers[1][1]["report"].ranks[1]
    # 8 samples of 4 patches x 32 in fp32, one mini-batch between two calls and never more than two
    assert language.held.ahead == 8 * 4 * 32 * 4 and language.held.ahead <= language.prefetched_bytes
    assert language.prefetched_bytes <= 2 * language.held.ahead
    assert language.predicted_peak_bytes == sum(
        (language.predicted.total, language.predicted.messages, language.prefetched_bytes)
    )
    assert answers[0][1]["report"].ranks[0].prefetched_bytes == 0
    assert answers[0][0]["report"].ranks[1].prefetched_bytes == 0


@pytest.mark.parametrize(
    "what", ["evaluate", "load", "weights", "weights by hand", "other iterator", "trace"]
)
def test_what_happens_between_two_steps_finds_none_of_it(what: str, tmp_path: Path) -> None:
    check(both(LLAVA, LLAVA, 2, interrupt=what, directory=str(tmp_path)), TO_THE_END)


def test_a_branch_that_draws_random_numbers_stays_in_its_turn() -> None:
    check(both(LLAVA, LLAVA, 2, dropout=0.3), NEVER)


def test_loading_that_draws_random_numbers_has_the_same_bits_ahead() -> None:
    check(both(LLAVA, LLAVA, 2, own=True, draws=True), ALWAYS)
