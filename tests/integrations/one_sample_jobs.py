"""What each rank runs in the tests of batches of one sample; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

from tests.capture.test_one_sample import batch_of, llama
from tests.integrations.engine_jobs import config_of, make_engine, steps

B = 4


def train_one_at_a_time() -> dict[str, Any]:
    """Loss units of one sample, and evaluation of one sample and of three."""
    config = config_of(train_batch_size=B, train_micro_batch_size_per_gpu=1, block={"stages": 2})
    engine = make_engine(llama(), batch_of(B), config)
    before = {size: float(engine.eval_batch(iter([batch_of(size)]))) for size in (1, 3)}
    return {"eval": before, "losses": steps(engine, [batch_of(B)] * 3)}
