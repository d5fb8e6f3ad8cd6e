"""A sample of `gpp bench exactness`: random plans and schedules give the gradients of one process, delays or not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gpp_benchmarks._exactness_ranks import Case, CaseResult, draw_cases, run_cases_here
from gpp_benchmarks._linear_stages import (
    FP32_LIMIT,
    GradientError,
    LinearHooks,
    starts_nearby,
    tensor_errors,
    worst_error,
)
from gpp_benchmarks.exactness import FP64_LIMIT, _failure
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors

SAMPLE = 20


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sample_equals_one_process(num_ranks: int) -> None:
    cases = draw_cases(SAMPLE, seed=5000 * num_ranks, delayed_every=3)
    results = run_kept_ranks(run_cases_here, num_ranks, cases)[0]
    assert [result.seed for result in results] == [case.seed for case in cases]
    assert [line for line in map(_failure, results) if line] == []
    assert {result.family for result in results} == {
        "1f1b",
        "gpipe",
        "kfkb",
        "greedy",
        "sliced",
        "zero_bubble",
        "mixed",
        "async",
        "look_ahead",
    }
    assert sum(result.is_equal_delayed is True for result in results) >= 6


def run_with_wrong_gradients(cases: Sequence[Case]) -> list[CaseResult]:
    """Run cases whose last rank makes its gradients a little too large, and other ones when delayed."""
    plain = LinearHooks.step
    steps = iter(range(1000))

    def step(hooks: LinearHooks) -> None:
        for gradient in hooks._sums.values():
            gradient.mul_(1 + 1e-9 * next(steps))
        plain(hooks)

    LinearHooks.step = step  # type: ignore[method-assign]
    try:
        return run_cases_here(cases)
    finally:
        LinearHooks.step = plain  # type: ignore[method-assign]


def test_a_wrong_gradient_is_found() -> None:
    case = Case(seed=1, family="1f1b", has_delays=True)
    result = run_kept_ranks(run_with_wrong_gradients, 2, [case])[0][0]
    assert FP64_LIMIT < result.fp64_error < FP32_LIMIT
    assert _failure(result) is not None


@pytest.mark.parametrize(
    ("error", "rounding", "is_wrong"),
    [
        (9e-6, 1e-7, False),
        (2.1e-5, 1e-7, True),
        (2.1e-5, 1.5e-5, False),
        (7e-5, 1.5e-5, True),
        (2e-5, float("inf"), True),
        (float("inf"), 1e-6, True),
    ],
)
def test_single_precision_is_judged_by_one_process_own_rounding(
    error: float, rounding: float, is_wrong: bool
) -> None:
    result = CaseResult(
        seed=1,
        family="1f1b",
        shares_ranks=False,
        stages=2,
        fp64_error=0.0,
        fp32_error=error,
        fp32_rounding=rounding,
        is_equal_delayed=None,
    )
    assert (_failure(result) is not None) is is_wrong


def test_a_wider_limit_is_of_the_tensor_that_needs_it() -> None:
    """Rounding of one tensor does not excuse an error of another."""
    exact = [{"rounded": torch.ones(1).double(), "wrong": torch.ones(1).double()}]
    plain = [{"rounded": torch.full((1,), 1 + 2e-5), "wrong": torch.ones(1)}]
    found = {0: {"rounded": torch.full((1,), 1 + 6e-5), "wrong": torch.full((1,), 1 + 3e-5)}}
    worst = worst_error(found, [(plain, exact)])
    assert worst.error == pytest.approx(3e-5, rel=0.01) and worst.rounding == 0.0
    assert max(worst, GradientError(4e-5, 2e-5), key=GradientError.excess) == worst


def test_rounding_is_the_largest_of_those_near_by() -> None:
    """One process may be right by luck where it starts, and is not one step of rounding away."""
    exact = [{"a": torch.ones(1).double()}]
    lucky, unlucky = [{"a": torch.ones(1)}], [{"a": torch.full((1,), 1 + 2e-5)}]
    found = {0: {"a": torch.full((1,), 1 + 6e-5)}}
    assert worst_error(found, [(lucky, exact)]).rounding == 0.0
    assert worst_error(found, [(lucky, exact), (unlucky, exact)]).rounding == pytest.approx(2e-5, rel=0.01)
    given, *near = starts_nearby([{"a": torch.tensor([3.0, -2.0])}])
    for start in near:
        moved = (start[0]["a"] / given[0]["a"] - 1).abs()
        assert start[0]["a"].dtype == torch.float32 and 0 < float(moved.max()) <= 2**-22


@pytest.mark.parametrize("ours", [float("nan"), float("inf"), 1.0])
def test_what_is_no_number_is_no_agreement(ours: float) -> None:
    one, other = torch.ones(2), torch.ones(3)
    wanted = [{"b": one if ours == 1.0 else torch.full((2,), ours), "a": other}]
    found = {0: {"b": torch.full((2,), ours), "a": other}}
    assert max(tensor_errors(found, wanted).values()) == (0.0 if ours == 1.0 else float("inf"))
    errors = gradient_errors(found[0], {"b": one, "a": other})
    assert max(errors.values()) == (0.0 if ours == 1.0 else float("inf"))
