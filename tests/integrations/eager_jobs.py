"""What each rank runs in the tests of modules that are kept whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.eager_models import Parts, as_graph, build_eager
from tests.integrations.engine_jobs import make_engine
from tests.runtime.jobs import Job, make_batches, make_config


def train_eager(jobs: list[Job], directory: str) -> list[dict[str, Any]]:
    """Train each job; return losses, the first step's gradients, the plan, and where its weights were written."""
    answers = []
    for number, job in enumerate(jobs):
        model, make_batch = build_eager(job["model"])
        batches = make_batches(make_batch, job)
        if isinstance(model, Parts):
            model = as_graph(model)
        engine = make_engine(model, batches[0], make_config(job))
        engine.retain_gradients()
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for batch in batches:
            losses.append(float(engine.train_batch(data_iter=iter([batch]))))
            gradients = gradients or {name: g.clone() for name, g in engine.gradients.items()}
        weights = Path(directory) / str(number)
        engine.save_pretrained(weights)
        dist.barrier()
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "plan": engine.plan,
                "eager": engine._rank_runner.reference.analysis.eager,
                "weights": str(weights),
            }
        )
    return answers
