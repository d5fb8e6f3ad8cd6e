"""Pipelined training equals single-process training: losses and every gradient, over loss units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from gpp_plugin.relative_errors import loss_difference
from tests.ranks import run_kept_ranks, run_ranks
from tests.reference import assert_near, train_reference
from tests.runtime import jobs
from tests.tiers import some

FIRST_LOSS, LATER_LOSSES = 1e-6, 1e-5


def job(model: str, *, mini_batch: int = 8, unit: int = 2, zero: int = 0, **block: Any) -> jobs.Job:
    return {"model": model, "mini_batch": mini_batch, "unit": unit, "zero": zero, "block": block}


def check(one: jobs.Job, answers: list[dict[str, Any]]) -> None:
    """Compare what all ranks returned for one job with the single process."""
    model, make_batch = jobs.build_model(one)
    device = one.get("device", "cpu")
    plain = train_reference(model, jobs.make_batches(make_batch, one), unit=one["unit"], device=device)
    compare(answers, plain.losses, plain.gradients, lambda: jobs.exact_gradients(one))


def check_each(
    named: Mapping[str, jobs.Job], num_ranks: int, run: Callable[..., Any] = run_ranks
) -> list[list[dict[str, Any]]]:
    """Run jobs on ranks and compare each with the single process; return what the ranks returned for each."""
    per_rank = run(jobs.train, num_ranks, list(named.values()), timeout_s=240)
    found = [list(of_job) for of_job in zip(*per_rank, strict=True)]
    for (name, one), answers in zip(named.items(), found, strict=True):
        try:
            check(one, answers)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return found


def compare(
    answers: list[dict[str, Any]],
    losses: list[float],
    gradients: dict[str, Tensor],
    exact: Callable[[], dict[str, Tensor]],
    *,
    slack: float = 1.0,
) -> tuple[float, float]:
    """Compare what all ranks returned with losses and gradients of the single process.

    Args:
        exact: returns the gradients of double precision, where single precision does not reproduce itself.
        slack: bounds are wider by this; on a device, kernels and their rounding differ with the size of a batch.

    Returns:
        The largest relative difference of a loss, and the largest error of a gradient.
    """
    found = answers[0]["losses"]
    assert all(answer["losses"] == found for answer in answers), "ranks disagree on the loss"
    assert found[0] == pytest.approx(losses[0], rel=slack * FIRST_LOSS)
    assert found == pytest.approx(losses, rel=slack * LATER_LOSSES)
    covered: set[str] = set()
    worst = 0.0
    for answer in answers:
        covered |= set(answer["gradients"])
        worst = max(worst, assert_near(answer["gradients"], gradients, exact=exact, slack=slack))
    assert covered == set(gradients), "some parameters are on no stage"
    return loss_difference(found, losses), worst


JOBS: dict[str, tuple[int, list[jobs.Job]]] = {
    name: (4, [job(name, stages=stages, zero=zero) for stages, zero in ((2, 0), (3, 0), (4, 0), (2, 1))])
    for name in ("clip", "siglip", "llava", "whisper", "t5", "gpt2", "dlrm")
}
JOBS["clip"][1].append(job("clip", unit=8, stages=3, micro_batch_sizes={"loss": "full"}))
JOBS["clip"][1].append(job("clip", stages=3, micro_batch_sizes="search"))
JOBS["two ranks"] = (
    2,
    [job(name, stages=2) for name in ("clip", "t5", "gpt2", "dlrm", "two_branch", "multi_sink")]
    + [job("gpt2", stages=1, zero=1), job("gpt2", stages=2, schedule="gpipe")],
)


@pytest.mark.parametrize("name", sorted(JOBS))
def test_training_equals_single_process(name: str) -> None:
    num_ranks, tasks = JOBS[name][0], some(JOBS[name][1], every=3)
    named = {f"job {number}": one for number, one in enumerate(tasks)}
    for one, answers in zip(tasks, check_each(named, num_ranks, run_kept_ranks), strict=True):
        if isinstance(one["block"]["stages"], int):
            assert len(answers[0]["stages"]) == one["block"]["stages"]


CLIP: jobs.Job = {**job("clip", stages=2, verify=False), "steps": 3}


@pytest.fixture(scope="module")
def clip() -> list[dict[str, Any]]:
    """What each of two ranks returned of CLIP."""
    return [answers[0] for answers in run_kept_ranks(jobs.train, 2, [CLIP])]


def test_clip_on_two_ranks_equals_single_process(clip: list[dict[str, Any]]) -> None:
    check(CLIP, clip)


def test_each_of_two_ranks_has_a_stage_of_its_own(clip: list[dict[str, Any]]) -> None:
    assert [len(answer["stages"]) for answer in clip] == [2, 2]
    assert not set(clip[0]["gradients"]) & set(clip[1]["gradients"])
