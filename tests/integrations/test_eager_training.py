"""Jobs with modules that run as they are equal one process: losses and gradients of three AdamW steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.eager_models import Parts, as_graph, build_eager
from tests.integrations.engine_jobs import check_training, make_engine, steps_and_gradients
from tests.ranks import run_kept_ranks
from tests.reference import train_reference
from tests.runtime.jobs import Job, make_batches, make_config
from tests.tiers import some


def job(model: str, *, zero: int = 0, **block: Any) -> Job:
    block = {"planner": "auto", "stages": 3, **block}
    return {"model": model, "mini_batch": 8, "unit": 4, "steps": 3, "zero": zero, "block": block}


ALL_TASKS: dict[str, Job] = {
    "gradient reversal": job("adversarial"),
    "a loop on values in every layer": job("routed"),
    "gradient reversal, ZeRO 1": job("adversarial", zero=1, stages=2),
    "recomputed": job("routed, one frozen", memory={"recompute": "full"}),
    "asked for": job("adversarial", eager=["encoder.*"]),
    "ViLT": job("vilt"),
    "Reformer": job("reformer"),
    "DETR": job("detr"),
    "parts of a graph": job("parts", stages="auto", eager=["body.layers.0"]),
}
TASKS = dict(some(ALL_TASKS.items(), every=4))


def train_eager(jobs: list[Job], directory: str) -> list[dict[str, Any]]:
    """Train each job and export it; return losses and the first step's gradients."""
    answers = []
    for number, job in enumerate(jobs):
        model, make_batch = build_eager(job["model"])
        batches = make_batches(make_batch, job)
        if isinstance(model, Parts):
            model = as_graph(model)
        engine = make_engine(model, batches[0], make_config(job))
        losses, gradients = steps_and_gradients(engine, batches)
        engine.save_pretrained(Path(directory) / str(number))
        dist.barrier()
        answers.append({"losses": losses, "gradients": gradients})
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    directory = str(tmp_path_factory.mktemp("weights"))
    per_rank = run_kept_ranks(train_eager, 3, list(TASKS.values()), directory, timeout_s=300)
    return {name: [found[i] for found in per_rank] for i, name in enumerate(TASKS)}


@pytest.mark.parametrize("name", TASKS)
def test_training_equals_one_process(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    one = TASKS[name]
    model, make_batch = build_eager(one["model"])
    batches = make_batches(make_batch, one)
    reference = train_reference(model, batches, unit=one["unit"])
    check_training(answers[name], reference, most=2e-6)
    for answer in answers[name]:
        assert answer["losses"] == answers[name][0]["losses"]
        assert answer["losses"][0] == pytest.approx(reference.losses[0], rel=1e-6)
