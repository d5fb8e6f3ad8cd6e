"""Frozen branches that run ahead: every bit is as without, whatever happens between two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import ahead_jobs as jobs
from tests.ranks import run_kept_ranks

CLIP, LLAVA = "clip text_model", "llava model.vision_tower"


def check(answers: list[dict[int, dict[str, Any]]], looked: list[bool]) -> None:
    for answer in answers:
        without, ahead = answer[0], answer[1]
        assert not any(without["looked"]) and ahead["looked"] == looked
        assert ahead["losses"] == without["losses"] and ahead["steps"] == without["steps"]
        for one, other in zip(ahead["gradients"], without["gradients"], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        for name, parameter in ahead["parameters"].items():
            assert torch.equal(parameter, without["parameters"][name]), name


ALWAYS = [False, True, True, True, True, True]
TO_THE_END = [False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("kind", "stages", "ranks", "options"),
    [
        (LLAVA, LLAVA, 2, {}),
        (LLAVA, "llava on two", 4, {"zero": 1}),
        (LLAVA, "llava on two", 4, {"zero": 2}),
        (LLAVA, "llava branch of two", 3, {"lengths": (10, 8, 8, 9, 10, 8)}),
        (CLIP, CLIP, 3, {"zero": 1}),
    ],
)
def test_bits_are_the_same_on_a_callers_iterator(
    kind: str, stages: str, ranks: int, options: dict[str, Any]
) -> None:
    check(run_kept_ranks(jobs.train_both, ranks, kind, stages, options, timeout_s=200), TO_THE_END)
