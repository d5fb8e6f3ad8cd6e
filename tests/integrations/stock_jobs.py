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
