"""What each rank runs in the tests of lengths that change; importable by the processes that run it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from gpp_plugin.runtime.memory import module_policies
from tests.runtime import jobs


def make_batches(make_batch: Any, job: jobs.Job) -> list[dict[str, Any]]:
    """Return a job's mini-batches, the texts of each of another length, longer or shorter than the model's own."""
    batches = []
    for seed, length in enumerate(job["text_lengths"]):
        batch = make_batch(job["mini_batch"], seed)
        for key in job["texts"]:
            text = batch[key]
            # more of its end: an image's tokens are at the beginning
            longer = torch.cat([text, text[:, -5:]], dim=1)
            batch[key] = longer[:, : text.shape[1] + length].contiguous()
        batches.append(batch)
    return batches


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(job: jobs.Job) -> dict[str, Any]:
    """Train on texts of many lengths, evaluate each of them too, and count what was exported on the way."""
    import deepspeed

    import gpp_plugin

    warnings = _Warnings()
    logging.getLogger("gpp_plugin").addHandler(warnings)
    jobs.use_device("cpu")
    model, make_batch = jobs.build_model(job)
    batches = make_batches(make_batch, job)
    wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=batches[0])
    if "overrides" in job:
        job = jobs.with_saved_plan(job, deepspeed.initialize(model=wrapped, config=jobs.make_config(job))[0])
    engine, *_ = deepspeed.initialize(model=wrapped, config=jobs.make_config(job))
    exports: list[int] = []
    export = torch.export.export

    def counting(*args: Any, **kwargs: Any) -> Any:
        exports.append(1)
        return export(*args, **kwargs)

    torch.export.export = counting
    surveys: list[int] = []
    survey = module_policies.SurveyPass

    def surveying(*args: Any, **kwargs: Any) -> Any:
        surveys.append(1)
        return survey(*args, **kwargs)

    vars(module_policies)["SurveyPass"] = surveying
    losses, evaluated, gradients = [], [], []
    try:
        for batch in batches:
            engine.retain_gradients()
            losses.append(float(engine.train_batch(data_iter=iter([batch]))))
            gradients.append({name: g.cpu().clone() for name, g in engine.gradients.items()})
        trained = len(exports)
        for batch in batches if job.get("evaluates") else ():
            evaluated.append(float(engine.eval_batch(iter([batch]))))
    finally:
        torch.export.export = export
        vars(module_policies)["SurveyPass"] = survey
        logging.getLogger("gpp_plugin").removeHandler(warnings)
    return {
        "losses": losses,
        "evaluated": evaluated,
        "gradients": gradients,
        "exports": trained,
        "surveys": len(surveys),
        "evaluation_exports": len(exports) - trained,
        "stages": [stage.name for stage in engine.plan.stages],
        "memory": [stage.memory is not None for stage in engine.plan.stages],
        "warnings": warnings.lines,
    }
