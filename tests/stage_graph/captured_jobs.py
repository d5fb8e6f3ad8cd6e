"""What each rank runs in the tests of captured parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gpp_plugin
from tests.integrations.async_jobs import held_by_stages
from tests.stage_graph.captured import (
    build_across,
    build_among,
    build_lengths,
    build_normed,
    build_within,
    caption_batch,
    lengths_batch,
    normed_batch,
)
from tests.stage_graph.graphs import B, U
from tests.stage_graph.jobs import run_in_double, steps
from tests.stage_graph.mixed import build_mixed, mixed_batch

OFF = {"recompute": "off", "swap": "off"}
FULL = {"recompute": "full"}
NUM_BATCHES = 5


def train_captions() -> dict[str, Any]:
    """One mini-batch in double precision with memory as it is, and run again or swapped."""
    found = {
        "across, full, backwards in parts": _double(
            build_across(), caption_batch(), memory=FULL, schedule="zero_bubble"
        ),
        "among": _double(build_among(), caption_batch(), memory=FULL),
        "within": _double(build_within(), caption_batch(), memory=OFF),
        "mixed, full, in halves": _double(build_mixed(), mixed_batch(), memory=FULL, slicing=1),
    }
    most = max(found["within"]["needs"].values())
    for way in ("recompute", "swap"):
        found[f"within, {way}"] = _within_less(most, way)
    return found


def _within_less(most: int, way: str) -> dict[str, Any]:
    """Run the graph with less memory than its quickest plan needs, so much less that no other cut helps either."""
    for part in (0.8, 0.7, 0.6, 0.5):
        memory = {**OFF, way: "auto", "limit_gb": part * most * 1e-9}
        found = _double(build_within(), caption_batch(), memory=memory)
        if found["saves"]:
            break
    return found


def _double(graph: gpp_plugin.StageGraph, batch: dict[str, Tensor], **block: Any) -> dict[str, Any]:
    return run_in_double(graph, batch, B, {"schedule": "1f1b", "slicing": "off", **block}, count=True)


def _engine(
    graph: gpp_plugin.StageGraph, batch: dict[str, Tensor], block: dict[str, Any], **changes: Any
) -> Any:
    import deepspeed

    config = {
        "train_batch_size": len(next(iter(batch.values()))),
        "train_micro_batch_size_per_gpu": U,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "steps_per_print": 1000,
        "graph_pipeline": {"comm_timeout_s": 60, **block},
        **changes,
    }
    wrapped = gpp_plugin.GraphPipelineModule(graph, sample_batch=batch)
    return deepspeed.initialize(model=wrapped, config=config)[0]


def train_statistics() -> dict[str, Any]:
    """A part that mixes samples, on data-parallel ranks; as it is, and run again."""
    found = {}
    for way, memory in (("plain", OFF), ("again", FULL)):
        engine = _engine(build_normed(), normed_batch(0), {"memory": memory}, zero_optimization={"stage": 2})
        found[way] = {
            "losses": steps(engine, [normed_batch(seed) for seed in range(3)]),
            "tensors": {
                name: tensor.detach().clone()
                for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers())
            },
            "differences": engine.memory_report().differences,
            "recomputed": [stage.name for stage in engine.plan.stages if stage.memory is not None],
        }
        engine.destroy()
    return found


def train_asynchronously() -> dict[str, Any]:
    """Captured stages that step after every micro-batch, and run again before each backward."""
    engine = _engine(build_mixed(), mixed_batch(), {"memory": FULL, "mode": "async"})
    found = {
        "losses": steps(engine, [mixed_batch(seed) for seed in range(NUM_BATCHES)]),
        "stages": held_by_stages(engine),
        "recomputed": [stage.name for stage in engine.plan.stages if stage.memory is not None],
    }
    engine.flush()
    found["tensors"] = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def train_lengths(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Train a graph of two captured parts on rows of another length each step; count what was exported on the way."""
    import torch

    batches = [lengths_batch(length) for length in lengths]
    exports: list[int] = []
    export = torch.export.export

    def counting(*args: Any, **kwargs: Any) -> Any:
        exports.append(1)
        return export(*args, **kwargs)

    engine = _engine(build_lengths(), batches[0], {"verify": False}, optimizer=_NO_STEPS)
    torch.export.export = counting
    found = []
    try:
        for batch in batches:
            engine.retain_gradients()
            loss = float(engine.train_batch(data_iter=iter([batch])))
            found.append((loss, {name: g.clone() for name, g in engine.gradients.items()}, len(exports)))
    finally:
        torch.export.export = export
    engine.destroy()
    return {"steps": found}


_NO_STEPS = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
