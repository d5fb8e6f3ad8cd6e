"""What ranks run of a package that adds a planner, a schedule and a transport."""

from __future__ import annotations

import sys
from typing import Any

STEPS = 3


def train(target: str, configs: list[str]) -> list[dict[str, Any]]:
    """Train a small model under each configuration file, with the package of ``target`` installed."""
    sys.path.insert(0, target)  # as the interpreter would have it from PYTHONPATH

    import deepspeed

    import gpp_plugin
    from gpp_plugin.plugins import look_again
    from tests.integrations.engine_jobs import B
    from tests.models import build

    look_again()
    answers = []
    for config in configs:
        model, make_batch = build("gpt2")
        batches = [make_batch(B, seed) for seed in range(STEPS)]
        wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=batches[0])
        engine = deepspeed.initialize(model=wrapped, config=config)[0]
        losses = [float(engine.train_batch(data_iter=iter([batch]))) for batch in batches]
        answers.append(
            {
                "losses": losses,
                "planner": engine.plan.planner,
                "stages": [len(stage.blocks) for stage in engine.plan.stages],
                "schedules": {stage.schedule for stage in engine.plan.stages},
                "sent": getattr(sys.modules.get("gpp_stranger.transport"), "SENT", 0),
            }
        )
        engine.destroy()
    return answers
