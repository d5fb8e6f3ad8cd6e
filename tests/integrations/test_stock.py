"""DeepSpeed's own engine on the linearised capture: the losses of plain single-process training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.engine_jobs import decay_groups, make_engine, said_of, steps
from tests.ranks import run_kept_ranks
from tests.reference import train_reference
from tests.runtime import jobs
from tests.runtime.jobs import by_hand


def train(tasks: list[jobs.Job]) -> list[dict[str, Any]]:
    """Train each job in turn with DeepSpeed's own engine; return losses and what it is."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    jobs.use_device("cpu")
    answers = []
    for job in tasks:
        model, make_batch = jobs.build_model(job)
        batches = jobs.make_batches(make_batch, job)
        config = jobs.make_config({**job, "block": {"planner": "stock_1f1b", **job["block"]}})
        engine = make_engine(model, batches[0], config)
        answers.append(
            {
                "losses": steps(engine, batches),
                "is_deepspeed": isinstance(engine, PipelineEngine),
                "stages": [(stage.name, stage.degree) for stage in engine.plan.stages],
                "micro_batches": engine.micro_batches,
            }
        )
    return answers


def train_with_everything(planner: str, directory: str) -> dict[str, Any]:
    """T5 on three ranks: lengths that change, evaluation between steps, clipping, a schedule, groups, an export."""
    import torch
    from transformers import T5ForConditionalGeneration

    from gpp_plugin.ir.timeline import EventKind

    jobs.use_device("cpu")
    one: jobs.Job = {
        "model": "t5", "mini_batch": 8, "unit": 2, "block": {"planner": planner}, "lengths": (8, 6, 8),
        "steps": 3,
        "config": {
            "gradient_clipping": 0.05,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3}},
            "wall_clock_breakdown": True,
        },
    }  # fmt: skip
    model, make_batch = jobs.build_model(one)
    batches = jobs.make_batches(make_batch, one)
    engine = make_engine(
        model, batches[0], jobs.make_config(one), model_parameters=decay_groups(model.parameters())
    )
    engine.record_timelines = True
    losses = []
    for batch in batches:
        losses += steps(engine, [batch])
        evaluated = float(engine.eval_batch(iter([batches[0]])))
    engine.save_pretrained(directory)
    answer = {"losses": losses, "evaluated": evaluated, "rank": engine.global_rank}
    if engine.global_rank == 0:
        tasks = [(e.rank, e.kind, e.micro_batch) for e in engine.last_timeline.events]
        answer["tasks"] = sorted(
            (rank, kind.value, micro_batch)
            for rank, kind, micro_batch in tasks
            if kind in (EventKind.FORWARD, EventKind.BACKWARD)
        )
        saved = T5ForConditionalGeneration.from_pretrained(directory).eval()
        with torch.no_grad():
            units = [{k: v[i : i + 2] for k, v in batches[0].items()} for i in range(0, 8, 2)]
            answer["reloaded"] = sum(float(saved(**unit).loss) for unit in units) / 4
    return answer


def refuse(block: dict[str, Any], config: dict[str, Any]) -> str:
    """Return what deepspeed.initialize says of a configuration that stock DeepSpeed cannot run."""
    jobs.use_device("cpu")
    one: jobs.Job = {
        "model": "gpt2", "mini_batch": 8, "unit": 2, "block": {"planner": "stock_1f1b", **block}, "config": config,
    }  # fmt: skip
    model, make_batch = jobs.build_model(one)
    return said_of(lambda: make_engine(model, make_batch(8, 0), jobs.make_config(one)))


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
    answers = run_kept_ranks(train, num_ranks, tasks, timeout_s=60 + 60 * len(tasks))
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
    answers = run_kept_ranks(train, 3, list(ODD.values()), timeout_s=240)[0]
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
        run_kept_ranks(train_with_everything, 3, name, str(tmp_path / name), timeout_s=180)
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
    assert all(message in answer for answer in run_kept_ranks(refuse, 2, block, config))
