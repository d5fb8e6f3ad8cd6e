"""The first tier, `make test-gpu ARGS=--quick`: what one device shows within nine minutes, what matters most first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import checks
from tests.gpu.lab import Lab
from tests.runtime.test_equality import job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(0)]


def test_quick_one_rank_over_nccl(lab: Lab) -> None:
    checks.bound_default_group(lab)


def test_quick_equality(lab: Lab) -> None:
    checks.equality(lab, 1, [job(name, stages=1) for name in ("gpt2", "clip", "t5")], "3 families on 1 rank")


def test_quick_swap_and_recompute(lab: Lab) -> None:
    checks.less_memory(lab, 1)


def test_quick_two_ranks_share_it(lab: Lab) -> None:
    tasks = [job("gpt2", stages=2), job("clip", stages=2)]
    checks.equality(lab, 2, tasks, "2 families on 2 ranks of one device")


def test_quick_sanitizer(lab: Lab) -> None:
    variables = {} if lab.is_dry else {"TORCH_CUDA_SANITIZER": "1"}  # it needs a CUDA build
    checks.equality(lab, 1, [job("gpt2", stages=1)], "under the sanitizer", environment=variables)


def test_quick_demo(lab: Lab) -> None:
    checks.demo(lab)


def test_quick_bench_swap(lab: Lab) -> None:
    checks.bench_swap(lab, "--steps", "2", *(["--layers", "2"] if lab.is_dry else []))


def test_quick_bench_memory(lab: Lab) -> None:
    few: list[Any] = ["--models", "gpt2", "--plans", "none"]
    checks.bench_memory(lab, *few)


def test_quick_captured_code(lab: Lab) -> None:
    checks.captured_over_eager(lab, rounds=1 if lab.is_dry else 4)
