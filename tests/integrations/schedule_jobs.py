"""Every schedule through the engine, as ranks run it."""

from __future__ import annotations

from typing import Any

from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.models import build


def train_under(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train two steps of a small model under each block; return losses, gradients, and what was run.

    The model is GPT-2 and ZeRO off unless the block says otherwise; those keys are taken out.
    """
    answers = []
    for block in blocks:
        block = {"stages": 2, **block}
        model, make_batch = build(block.pop("model", "gpt2"))
        batches = [make_batch(B, seed) for seed in range(2)]
        zero = {"stage": block.pop("zero", 0)}
        engine = make_engine(model, batches[0], config_of(block=block, zero_optimization=zero))
        engine.retain_gradients()
        losses = [float(engine.train_batch(data_iter=iter([batches[0]])))]
        gradients = {name: gradient.clone() for name, gradient in engine.gradients.items()}
        losses.append(float(engine.train_batch(data_iter=iter([batches[1]]))))
        program = engine._rank_runner.stage_runners[0]._programs.main
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "stages": engine.plan.stages,
                "notes": engine.plan.notes,
                "iteration_us": engine.plan.iteration_us,
                "reductions": sum(i.kind.value == "reduce_data" for i in program.instructions),
                "tasks": [str(i.task)[1:] for i in program.instructions if i.task is not None],
            }
        )
    return answers
