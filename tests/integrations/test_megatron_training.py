"""Graphs with Megatron stages train as one process does: losses, every gradient, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import megatron_train_jobs as jobs
from tests.ranks import run_kept_ranks
from tests.reference import gradient_errors

pytest.importorskip("megatron.core")

RUNS = [("small", 1), ("grid", 0), ("grid", 1), ("grid", 3), ("chunks", 0), ("sequence", 1), ("tied", 1)]


def num_ranks(name: str) -> int:
    layout = jobs.LAYOUTS[name]
    return len(layout.encoder) + sum(map(len, layout.language))


@pytest.mark.parametrize(("name", "zero"), RUNS)
def test_losses_and_every_gradient_are_one_process_s(name: str, zero: int) -> None:
    answers: list[dict[str, Any]] = run_kept_ranks(jobs.train, num_ranks(name), name, zero, timeout_s=240)
    wanted: dict[str, Tensor] = answers[0]["wanted"]
    norm = float(torch.stack([gradient.double().norm() for gradient in wanted.values()]).norm())
    covered = set()
    for answer in answers:
        assert answer["losses"] == pytest.approx(answers[0]["wanted losses"], rel=1e-5)
        assert answer["losses"][0] == pytest.approx(answers[0]["wanted losses"][0], rel=2e-6)
        assert answer["norm"] == pytest.approx(norm, rel=1e-6), "duplicates count once, shards all"
        errors = gradient_errors(answer["gradients"], wanted)
        assert max(errors.values(), default=0.0) < 2e-6, (name, answer["stage"], errors)
        covered |= set(answer["gradients"])
    assert covered == set(wanted)


@pytest.mark.parametrize(("name", "zero"), [("grid", 1), ("grid", 3), ("tied", 0)])
def test_checkpoints_resume_and_weights_gather_to_one_process_s(name: str, zero: int, tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = run_kept_ranks(
        jobs.resume, num_ranks(name), name, zero, str(tmp_path), timeout_s=240
    )
    assert all(answer["found"] == answer["expected"] for answer in answers)
    assert answers[0]["tag"].endswith("global_step2")
    state = {key: value for answer in answers for key, value in answer["whole"].items()}
    (evaluated,) = run_kept_ranks(jobs.evaluate_whole, 1, name, state)
    assert answers[0]["evaluated"] == pytest.approx(evaluated, rel=2e-6)
