"""Training with one sample a loss unit, and evaluating one sample, against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capture.test_one_sample import batch_of, llama
from tests.integrations.engine_jobs import config_of, make_engine, steps
from tests.ranks import run_kept_ranks
from tests.reference import train_reference

B = 4


def train_one_at_a_time() -> dict[str, Any]:
    """Loss units of one sample, and evaluation of one sample and of three."""
    config = config_of(train_batch_size=B, train_micro_batch_size_per_gpu=1, block={"stages": 2})
    engine = make_engine(llama(), batch_of(B), config)
    before = {size: float(engine.eval_batch(iter([batch_of(size)]))) for size in (1, 3)}
    return {"eval": before, "losses": steps(engine, [batch_of(B)] * 3)}


def test_batches_of_one_sample() -> None:
    reference = train_reference(llama(), [batch_of(B)] * 3, unit=1)
    model = llama().eval()
    for answer in run_kept_ranks(train_one_at_a_time, 2):
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-6)
        for size, loss in answer["eval"].items():
            with torch.no_grad():
                assert loss == pytest.approx(float(model(**batch_of(size)).loss), rel=1e-6), size
