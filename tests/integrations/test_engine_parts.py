"""The engine's parts know no framework: training with another one than DeepSpeed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.integrations import engine_jobs
from tests.integrations import framework_jobs as jobs
from tests.models import build
from tests.ranks import run_ranks
from tests.reference import train_reference


def test_stages_step_together_with_any_framework(tmp_path: Path) -> None:
    model, make_batch = build("two_branch")
    norms: list[float] = []
    batches = [make_batch(engine_jobs.B, step) for step in range(4)]
    sgd = functools.partial(torch.optim.SGD, lr=jobs.RATE)
    clips = engine_jobs.clipping(sgd, jobs.Settings.gradient_clipping, norms)
    losses = train_reference(model, batches, unit=engine_jobs.U, make_optimizer=clips).losses
    answers = run_ranks(jobs.train_without_deepspeed, 2, "sync", str(tmp_path))
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-5)
        assert answer["norm"] == pytest.approx(norms[-1], rel=1e-4)
        assert answer["again"] == answer["losses"][2:], "a checkpoint is the engine's, whoever steps"
        assert answer["counted"] == (4, 4 * engine_jobs.B)
        assert answer["rule"] == "SGD"
        # a synchronous pipeline holds nothing between calls
        assert answer["flushed"] is None and answer["staleness"] == dict.fromkeys(answer["names"], 0)
    told = [value for name, value, _ in answers[0]["events"] if name == "Train/Samples/train_loss"]
    assert told == pytest.approx([*losses, *losses[2:]], rel=1e-5)
    assert not answers[1]["events"], "monitors are rank 0's"
