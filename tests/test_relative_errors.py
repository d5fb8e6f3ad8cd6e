"""The one definition of a relative error, and that nothing divides by a norm beside it."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from gpp_plugin.relative_errors import gradient_errors, loss_difference, relative_error, tensor_error

ROOT = Path(__file__).parent.parent
NORMS = {"norm", "vector_norm", "matrix_norm"}


def test_losses_that_are_no_numbers_are_infinitely_far_apart() -> None:
    assert loss_difference([2.0, 1.01], [2.0, 1.0]) == pytest.approx(0.01)
    for bad in (math.nan, math.inf):
        assert loss_difference([2.0, bad], [2.0, 1.0]) == math.inf
        assert loss_difference([2.0, 1.0], [2.0, bad]) == math.inf


def test_a_loss_of_zero_is_a_loss() -> None:
    assert loss_difference([0.0], [0.0]) == 0.0
    assert loss_difference([1.0], [0.0]) > 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_zeros_equal_zeros_and_nothing_else(dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    assert tensor_error(zeros, zeros) == 0.0
    assert tensor_error(ones, zeros) == math.inf
    assert tensor_error(zeros, ones) == 1.0
    assert tensor_error(ones, zeros, least=3**0.5) == pytest.approx(1.0)
    assert tensor_error(zeros * math.nan, zeros) == tensor_error(zeros, zeros * math.nan) == math.inf
    assert tensor_error(torch.ones(0), torch.ones(0)) == 0.0


def test_what_is_no_number_is_infinitely_far_off() -> None:
    assert relative_error(math.nan, 1.0) == relative_error(math.inf, 1.0) == math.inf
    assert relative_error(math.nan, math.nan, least=1.0) == math.inf


def test_a_gradient_counts_on_either_side() -> None:
    wanted = {"a": torch.ones(4), "zero": torch.zeros(2)}
    assert gradient_errors(wanted, wanted) == {"a": 0.0, "zero": 0.0}
    assert gradient_errors({}, wanted) == {"a": 1.0, "zero": 0.0}
    found = {**wanted, "zero": torch.ones(2), "more": torch.ones(2)}
    assert gradient_errors(found, wanted) == {  # a thousandth of a's norm of 2 is what small ones are compared by
        "a": 0.0, "zero": pytest.approx(2**0.5 / 2e-3), "more": pytest.approx(2**0.5 / 2e-3)
    }  # fmt: skip
    assert gradient_errors(found, wanted, least=0.0)["zero"] == math.inf


def is_norm(node: ast.expr) -> bool:
    """Say whether an expression is a norm, or the float of one, with nothing that keeps it from being zero."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id == "float":
        return is_norm(node.args[0])
    along = any(
        keyword.arg in ("dim", "keepdim") for keyword in node.keywords
    )  # rows are normalised, not compared
    return isinstance(node.func, ast.Attribute) and node.func.attr in NORMS and not along


def test_nothing_divides_by_a_norm_that_may_be_zero() -> None:
    assert is_norm(ast.parse("float(wanted.norm())", mode="eval").body)
    assert not is_norm(ast.parse("wanted.norm().clamp(min=1.0)", mode="eval").body)
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("gpp_plugin", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "norm(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and is_norm(node.right)
    ]
    assert not found, f"use gpp_plugin.relative_errors: {found}"
