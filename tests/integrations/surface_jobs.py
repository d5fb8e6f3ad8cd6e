"""What each rank runs in the tests of the engine's surface; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build


def ask() -> dict[str, Any]:
    """What a user asks of an engine on two ranks of one stage, before and after a step."""
    model, make_batch = build("gpt2")
    engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 1}))
    applied = [engine.was_step_applied()]
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    steps(engine, [make_batch(B, 0)])
    applied.append(engine.was_step_applied())
    engine.zero_grad()
    after = engine.state_dict()
    changed = any(not torch.equal(before[name], value) for name, value in after.items())
    engine.load_state_dict(before)
    restored = all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    return {
        "names": [name for name, _ in engine.named_parameters()],
        "count": len(list(engine.parameters())),
        "state": engine.state_dict(),
        "changed": changed,
        "restored": restored,
        "applied": applied,
        "positions": (engine.get_data_parallel_rank(), engine.get_model_parallel_rank()),
        "batch": engine.get_batch_info(),
        "mom": engine.get_mom(),
        "optimizer": engine.optimizer_params(),
        "scheduler": engine.scheduler_params(),
        "dynamic": engine.dynamic_loss_scale(),
        "drop_last": engine.dataloader_drop_last(),
        "training": engine.training,
    }
