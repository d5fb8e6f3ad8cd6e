"""What each rank runs in the tests of the stock engine; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

from tests.runtime import jobs


def train(tasks: list[jobs.Job]) -> list[dict[str, Any]]:
    """Train each job in turn with DeepSpeed's own engine; return losses and what it is."""
    import deepspeed
    from deepspeed.runtime.pipe.engine import PipelineEngine

    import gpp_plugin

    jobs.use_device("cpu")
    answers = []
    for job in tasks:
        model, make_batch = jobs.build_model(job)
        batches = jobs.make_batches(make_batch, job)
        wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=batches[0])
        config = jobs.make_config({**job, "block": {"planner": "stock_1f1b", **job["block"]}})
        engine, *_ = deepspeed.initialize(model=wrapped, config=config)
        losses = [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches]
        answers.append(
            {
                "losses": losses,
                "is_deepspeed": isinstance(engine, PipelineEngine),
                "stages": [(stage.name, stage.degree) for stage in engine.plan.stages],
                "micro_batches": engine.micro_batches,
            }
        )
    return answers


def train_with_everything(planner: str, directory: str) -> dict[str, Any]:
    """T5 on three ranks: lengths that change, evaluation between steps, clipping, a schedule, groups, an export."""
    import deepspeed
    import torch
    from transformers import T5ForConditionalGeneration

    import gpp_plugin
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
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=batches[0])
    engine, *_ = deepspeed.initialize(model=wrapped, config=jobs.make_config(one), model_parameters=groups)
    engine.record_timelines = True
    losses = []
    for batch in batches:
        losses.append(float(engine.train_batch(data_iter=iter([batch]))))
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
    import deepspeed

    import gpp_plugin

    jobs.use_device("cpu")
    one: jobs.Job = {
        "model": "gpt2", "mini_batch": 8, "unit": 2, "block": {"planner": "stock_1f1b", **block}, "config": config,
    }  # fmt: skip
    model, make_batch = jobs.build_model(one)
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=make_batch(8, 0))
    try:
        deepspeed.initialize(model=wrapped, config=jobs.make_config(one))
    except gpp_plugin.GppError as error:
        return str(error)
    return "no error"
