"""Sizes as formulas: what is one, their values, and for which batches symbols have values."""

from __future__ import annotations

import re

import pytest

from gpp_plugin.ir.size_formulas import Mismatch, SizeConditions, compile_formulas

KNOWN = SizeConditions(
    symbols={"s0": ("ids", 1), "s1": ("labels", 1)},
    shapes={"ids": ("4", "s0"), "mask": ("4", "s0"), "labels": ("4", "s1"), "images": ("2*s1", "3")},
    conditions=("s0 >= 2", "s0 <= 16", "s1 - 1 != 1"),
)


def test_formulas_are_evaluated_together() -> None:
    texts = [
        "4*s0",
        "(s0 // 2) + 1",
        "7",
        "max(s0, s1)",
        "s0 if s0 > s1 else s1",
        "math.ceil(s0 / 2)",
        "s0 <= s1",
    ]
    assert compile_formulas(("s0", "s1"), texts)(5, 3) == (20, 3, 7, 5, 5, 3, False)
    assert compile_formulas((), ["2"])() == (2,)
    assert compile_formulas(("s0",), [])(9) == ()


@pytest.mark.parametrize(
    "text",
    ["s2 + 1", "__import__('os')", "s0.real", "'a'", "[s0]", "lambda: 1", "math.inf", "s0 +", "open(1)"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no formula of"):
        compile_formulas(("s0",), [text])


def test_symbols_have_the_values_of_a_batch() -> None:
    solve = KNOWN.solver()
    assert solve({"ids": (4, 9), "mask": (4, 9), "labels": (4, 5), "images": (10, 3)}) == (9, 5)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"mask": (4, 8)}, r"axis 1 of mask is 8, not ids.shape\[1\] = 9"),
        ({"ids": (8, 9)}, "axis 0 of ids is 8, not 4 = 4"),
        ({"images": (11, 3)}, r"axis 0 of images is 11, not 2 \* labels.shape\[1\] = 10"),
        ({"ids": (4, 17), "mask": (4, 17)}, r"ids.shape\[1\] <= 16 does not hold"),
        ({"labels": (4, 2), "images": (4, 3)}, r"labels.shape\[1\] - 1 != 1 does not hold"),
        ({"labels": (4,)}, "another number of axes"),
    ],
)
def test_another_batch_is_told_apart_in_words(shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    given = {"ids": (4, 9), "mask": (4, 9), "labels": (4, 5), "images": (10, 3)}
    found = KNOWN.solver()({**given, **shapes})
    assert isinstance(found, Mismatch)
    assert re.search(reason, str(found)), str(found)
