"""What each rank runs in the tests of captured parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gpp_plugin
from tests.capture.graphs import counted_exports
from tests.integrations.engine_jobs import config_of, make_engine, steps
from tests.stage_graph.captured import (
    build_across,
    build_among,
    build_lengths,
    build_mixed,
    build_normed,
    build_within,
    caption_batch,
    lengths_batch,
    make_language,
    mixed_batch,
    normed_batch,
)
from tests.stage_graph.graphs import B
from tests.stage_graph.jobs import run_in_double

OFF = {"recompute": "off", "swap": "off"}
FULL = {"recompute": "full"}


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
    changes = {"train_batch_size": len(next(iter(batch.values()))), **changes}
    return make_engine(graph, batch, config_of(block={"verify": True, **block}, **changes))


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


def train_lengths(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Train a graph of two captured parts on rows of another length each step; count what was exported on the way."""
    batches = [lengths_batch(length) for length in lengths]
    no_steps = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
    engine = _engine(build_lengths(), batches[0], {"verify": False}, optimizer=no_steps)
    found = []
    with counted_exports() as exports:
        for batch in batches:
            engine.retain_gradients()
            (loss,) = steps(engine, [batch])
            found.append((loss, {name: g.clone() for name, g in engine.gradients.items()}, len(exports)))
    engine.destroy()
    return {"steps": found}


def evaluate_named() -> dict[str, Any]:
    """Return what evaluations of a part with names of its own answer, and those of the plain model, with and without
    labels.
    """
    found: dict[str, Any] = {}
    for spelling in ("plain", "captured"):
        model = make_language().float()
        batch = {key: rows for key, rows in caption_batch().items() if key != "pixels"}
        graph = gpp_plugin.StageGraph("named", losses=["text.error"])
        graph.capture(
            "text",
            model,
            inputs={"input_ids": "ids", "labels": "labels"},
            outputs={"loss": "error", "logits": "scores"},
            ranks=[0, 1],
            stages=2,
            reported=["scores"],
        )
        given: Any = graph
        if spelling == "plain":
            given, batch = model, {"input_ids": batch["ids"], "labels": batch["labels"]}
        name = "scores" if spelling == "captured" else "logits"
        engine = make_engine(given, batch, config_of(block={"stages": 2}))
        losses = steps(engine, [batch, batch])
        loss, scores = engine.eval_batch(iter([batch]), return_logits=True, outputs=(name,))
        unlabelled = engine.eval_batch(iter([batch]), compute_loss=False, outputs=(name,))
        plain = engine.eval_batch(iter([batch]), compute_loss=False)  # the module's own name of it
        found[spelling] = [losses, float(loss), scores, unlabelled, plain, sorted(engine.module.state_dict())]
        engine.destroy()
    return found
