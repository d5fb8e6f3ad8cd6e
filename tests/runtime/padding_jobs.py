"""What each rank runs in the tests of padding; importable by the processes that run it."""

from __future__ import annotations

from typing import Any

from gpp_benchmarks._attention_models import Size, build_family

UNIT = 2
SIZE = Size(width=16, layers=2, length=8, samples=8)


def config_of(**block: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SIZE.samples,
        "train_micro_batch_size_per_gpu": UNIT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 1000,
        "graph_pipeline": {"stages": 2, "comm_timeout_s": 60, **block},
    }


def train(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train each job in turn: a family, captured with one padding, on mini-batches of several."""
    import deepspeed
    import torch

    import gpp_plugin
    from gpp_plugin.runtime.stage_module import MaskChoice
    from tests.runtime.jobs import use_device

    use_device("cpu")
    answers = []
    use = MaskChoice.use
    for job in jobs:
        model, make_batch = build_family(job["family"], SIZE)
        wrapped = gpp_plugin.GraphPipelineModule(model, sample_batch=make_batch(job["captured"]))
        if job.get("keeps_masks"):
            MaskChoice.use = lambda choice, ones: use(choice, ())  # type: ignore[method-assign]
        try:
            engine, *_ = deepspeed.initialize(model=wrapped, config=config_of(**job.get("block", {})))
            engine.retain_gradients()
            losses, windows = [], []
            gradients: dict[str, torch.Tensor] = {}
            for padding in job["paddings"]:
                losses.append(float(engine.train_batch(data_iter=iter([make_batch(padding)]))))
                gradients = gradients or {name: g.clone() for name, g in engine.gradients.items()}
                windows.append(engine._rank_runner.num_running)
            answers.append(
                {
                    "losses": losses,
                    "gradients": gradients,
                    "windows": windows,
                    "num_shapes": len(engine._rank_runner.stage_runners[0]._compiled),
                    "has_memory": [s.memory is not None for s in engine.plan.stages],
                }
            )
        finally:
            MaskChoice.use = use  # type: ignore[method-assign]
    return answers
