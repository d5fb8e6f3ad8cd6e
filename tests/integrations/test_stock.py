"""DeepSpeed's own engine on the linearised capture: the losses of plain single-process training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations import stock_jobs
from tests.ranks import run_kept_ranks
from tests.reference import train_reference
from tests.runtime import jobs
from tests.runtime.jobs import by_hand


def job(model: str, *, mini_batch: int = 8, unit: int = 2, zero: int = 0, **more: Any) -> jobs.Job:
    config = more.pop("config", {})
    lengths = more.pop("lengths", ())
    return {
        "model": model, "mini_batch": mini_batch, "unit": unit, "zero": zero, "block": more, "config": config,
        "lengths": lengths,
    }  # fmt: skip


JOBS = {
    2: [job("clip")],  # T5 and GPT-2 on two ranks: below
    4: [job("clip"), job("t5"), job("gpt2"), job("t5", stages=2, zero=1)],
}


@pytest.mark.parametrize("num_ranks", sorted(JOBS))
def test_losses_equal_single_process(num_ranks: int) -> None:
    tasks = JOBS[num_ranks]
    answers = run_kept_ranks(stock_jobs.train, num_ranks, tasks, timeout_s=60 + 60 * len(tasks))
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


def test_graphs_that_are_no_chains() -> None:
    answers = run_kept_ranks(stock_jobs.train, 3, list(ODD.values()), timeout_s=240)[0]
    for (name, one), answer in zip(ODD.items(), answers, strict=True):
        model, make_batch = jobs.build_model(one)
        reference = train_reference(model, jobs.make_batches(make_batch, one), unit=one["unit"])
        assert answer["losses"] == pytest.approx(reference.losses, rel=1e-5), name


ODD = {
    "a tensor read by two stages, one a skip": by_hand("diamond", "stem", "up"),
    "views, int64, bool, no-gradient and mixed dtypes": by_hand("odd_edges", "stem", "middle"),
    "a stage without parameters": by_hand("no_parameters", "left+right", "interaction"),
    "an edge without a batch axis": by_hand("shared_bias", "bias", "first"),
    "a frozen stage": by_hand("frozen", "tower", "adapter"),
}


def test_lengths_schedule_clipping_evaluation_timeline_and_export(tmp_path: Path) -> None:
    answers, graph = (
        run_kept_ranks(stock_jobs.train_with_everything, 3, name, str(tmp_path / name), timeout_s=180)
        for name in ("stock_1f1b", "uniform")
    )
    first = answers[0]
    assert all(answer["losses"] == first["losses"] for answer in answers)
    assert all(answer["evaluated"] == first["evaluated"] for answer in answers)
    assert first["tasks"] == sorted(
        (rank, kind, i) for rank in range(3) for kind in ("forward", "backward") for i in range(4)
    )
    assert first["losses"] == pytest.approx(graph[0]["losses"], rel=1e-5)
    assert first["reloaded"] == pytest.approx(first["evaluated"], rel=1e-5)


@pytest.mark.parametrize(
    ("block", "config", "message"),
    [
        ({"schedule": "gpipe"}, {}, "graph_pipeline.schedule: 'gpipe', but stock_1f1b runs 1F1B"),
        ({"data_parallel": 2}, {"train_micro_batch_size_per_gpu": 8}, "does not divide the mini-batch of 8"),
    ],
)
def test_what_stock_deepspeed_cannot_do_is_said(
    block: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    assert all(message in answer for answer in run_kept_ranks(stock_jobs.refuse, 2, block, config))
