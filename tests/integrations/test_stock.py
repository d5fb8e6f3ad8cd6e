"""DeepSpeed's own engine on the linearised capture: the losses of plain single-process training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations import stock_jobs
from tests.ranks import run_ranks
from tests.reference import train_reference
from tests.runtime import jobs


def job(model: str, *, mini_batch: int = 8, unit: int = 2, zero: int = 0, **more: Any) -> jobs.Job:
    config = more.pop("config", {})
    lengths = more.pop("lengths", ())
    return {
        "model": model, "mini_batch": mini_batch, "unit": unit, "zero": zero, "block": more, "config": config,
        "lengths": lengths,
    }  # fmt: skip


JOBS = {
    2: [job("clip"), job("t5"), job("gpt2")],
    4: [job("clip"), job("t5"), job("gpt2"), job("t5", stages=2, zero=1)],
}


@pytest.mark.parametrize("num_ranks", sorted(JOBS))
def test_losses_equal_single_process(num_ranks: int) -> None:
    tasks = JOBS[num_ranks]
    answers = run_ranks(stock_jobs.train, num_ranks, tasks, timeout_s=60 + 60 * len(tasks))
    for index, one in enumerate(tasks):
        mine = [answer[index] for answer in answers]
        assert all(answer["is_deepspeed"] for answer in mine)
        assert all(answer["losses"] == mine[0]["losses"] for answer in mine)
        stages = one["block"].get("stages", num_ranks)
        assert [degree for _, degree in mine[0]["stages"]] == [num_ranks // stages] * stages
        assert mine[0]["micro_batches"] == one["mini_batch"] // one["unit"] // (num_ranks // stages)
        model, make_batch = jobs.build_model(one)
        reference = train_reference(model, jobs.make_batches(make_batch, one), unit=one["unit"])
        assert mine[0]["losses"] == pytest.approx(reference.losses, rel=1e-5)
