"""HuggingFace's Trainer on a graph of stages: the numbers of a plain Trainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import trainer_jobs as jobs
from tests.ranks import run_kept_ranks

COUNT = 36


def check_alike(found: list[Any], wanted: list[Any], *, tolerance: float = 1e-6) -> None:
    assert len(found) == len(wanted) == jobs.STEPS
    for (loss, norm, rate), (loss_2, norm_2, rate_2) in zip(found, wanted, strict=True):
        assert (
            abs(loss - loss_2) <= tolerance and abs(norm - norm_2) <= 1e-4 * max(norm, 1) and rate == rate_2
        )


@pytest.mark.parametrize("name", ["gpt2", "t5", "clip", "lora"])
def test_losses_are_those_of_trainer_in_one_process(name: str, tmp_path: Path) -> None:
    ranks = 2
    total = jobs.UNIT * jobs.ACCUMULATION * ranks
    configs = [jobs.config_of(0, stages=2), jobs.config_of(1, stages=1, data_parallel=2)]
    if name == "gpt2":
        configs.append(jobs.config_of(2, stages=1, data_parallel=2))
    answers = run_kept_ranks(jobs.train_on_ranks, ranks, name, str(tmp_path), configs, COUNT)
    plain = jobs.train_plain(name, str(tmp_path), total=total, count=COUNT)
    for found in answers:
        for losses in found:
            check_alike(losses, jobs.logged(plain))
