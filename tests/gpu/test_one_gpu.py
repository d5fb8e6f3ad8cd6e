"""What one device shows: equality, memory, speed; also where there are more devices, on the first of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import checks
from tests.gpu.lab import Lab
from tests.runtime.test_equality import JOBS, job
from tests.runtime.test_regressions import THREE_RANKS

# Each job has a limit of its own (`Lab.run`), with records of what hangs; pytest's would only end the tests.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]
FAMILIES = ("gpt2", "clip", "llava", "whisper", "t5", "bert", "siglip", "dlrm")


def test_one_rank_equals_the_plain_model(lab: Lab) -> None:
    checks.equality(lab, 1, [job(name, stages=1) for name in FAMILIES], "8 families on 1 rank")


def test_four_ranks_that_share_it_equal_the_plain_model(lab: Lab) -> None:
    tasks = [job(name, stages=3 if name in ("gpt2", "bert") else 4) for name in FAMILIES]
    checks.equality(lab, 4, tasks, "8 families on 4 ranks of one device")


def test_odd_edges_on_three_ranks(lab: Lab) -> None:
    checks.equality(lab, 3, list(THREE_RANKS.values()), "odd edges on 3 ranks of one device")


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_swap_and_recompute(lab: Lab, num_ranks: int) -> None:
    checks.less_memory(lab, num_ranks)


def test_no_task_reads_the_device(lab: Lab) -> None:
    checks.no_reads(lab, 1)


def test_training_fits_what_is_predicted(lab: Lab) -> None:
    checks.capped_memory(lab, 1)


def test_captured_code_is_as_fast_as_eager_modules(lab: Lab) -> None:
    checks.captured_over_eager(lab, rounds=3 if lab.is_dry else 12)


def test_bench_swap(lab: Lab) -> None:
    checks.bench_swap(lab, *(["--steps", "2"] if lab.is_dry else []))


def test_bench_memory(lab: Lab) -> None:
    few: list[Any] = ["--models", "gpt2", "--plans", "none"] if lab.is_dry else []
    checks.bench_memory(lab, *few)


def test_demo(lab: Lab) -> None:
    checks.demo(lab)


@pytest.mark.parametrize("name", sorted(set(JOBS) - {"two ranks"}))
def test_the_jobs_of_the_cpu_tests(lab: Lab, name: str) -> None:
    num_ranks, tasks = JOBS[name]
    checks.equality(lab, num_ranks, tasks, f"{name}: its jobs on {num_ranks} ranks of one device")
