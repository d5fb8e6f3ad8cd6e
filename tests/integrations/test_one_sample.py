"""Training with one sample a loss unit, and evaluating one sample, against the plain model."""

from __future__ import annotations

import pytest
import torch

from tests.capture.test_one_sample import batch_of, llama
from tests.integrations import one_sample_jobs as jobs
from tests.ranks import run_kept_ranks
from tests.reference import train_reference


def test_batches_of_one_sample() -> None:
    reference = train_reference(llama(), [batch_of(jobs.B)] * 3, unit=1)
    model = llama().eval()
    for answer in run_kept_ranks(jobs.train_one_at_a_time, 2):
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-6)
        for size, loss in answer["eval"].items():
            with torch.no_grad():
                assert loss == pytest.approx(float(model(**batch_of(size)).loss), rel=1e-6), size
