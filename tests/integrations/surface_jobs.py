"""What each rank runs in the tests of the engine's surface; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build

ATTRIBUTES = (
    "world_size", "local_rank", "num_stages", "dp_world_size", "mp_world_size", "is_pipe_parallel",
    "is_data_parallel", "is_model_parallel", "pipeline_parallelism", "micro_batch_size", "micro_batches", "micro_steps",
)  # fmt: skip


def ask() -> dict[str, Any]:
    """What a user asks of an engine on two ranks of one stage, before and after a step."""
    model, make_batch = build("gpt2")
    engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 1}))
    applied = [engine.was_step_applied()]
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    losses = steps(engine, [make_batch(B, 0)])
    assert engine.agg_train_loss is not None
    last_loss = [float(engine.agg_train_loss)]
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
        "attributes": {name: getattr(engine, name) for name in ATTRIBUTES},
        "last_loss": last_loss,
        "losses": losses,
        "same_names": engine.param_names == {p: name for name, p in engine.named_parameters()},
    }
