"""What each rank runs in the tests of a plain model and the same model as a graph of one captured part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpp_plugin
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.runtime.rank_programs import make_programs
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build
from tests.stage_graph.captured import caption_batch, make_language

NUM_STEPS = 5
NUM_RANKS = 4
MODEL = "clip"
WAYS: dict[str, dict[str, Any]] = {
    "zero 0": {"block": {"stages": 2}},
    "zero 1": {"block": {"stages": 2}, "zero_optimization": {"stage": 1}},
    "recompute": {"block": {"stages": 3, "memory": {"recompute": "full"}}},
    "async": {"block": {"stages": 4, "mode": "async"}},
}


def as_graph(model: Any, *, num_ranks: int) -> gpp_plugin.StageGraph:
    """Return the model as one captured part, which is not told to ask for a loss, and reads the batch in any order."""
    graph = gpp_plugin.StageGraph("whole")
    keys = ["pixel_values", "input_ids", "attention_mask"]
    graph.capture("clip", model, inputs=keys, outputs=["loss"], ranks=range(num_ranks))
    return graph


def train_both(directory: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by way and spelling, what was planned, what came of it, and of a checkpoint of the other spelling."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for way, changes in WAYS.items():
        found[way] = {}
        for spelling in ("plain", "captured"):
            found[way][spelling] = _train(way, changes, spelling, directory)
        for spelling, other in (("plain", "captured"), ("captured", "plain")):
            engine, batches = _engine(changes, spelling, directory)
            if way != "async":  # weights that are under way are none of a checkpoint
                engine.load_checkpoint(f"{directory}/{way}/{other}")
                found[way][spelling]["continued"] = steps(engine, batches[-1:])
            engine.destroy()
    return found


def _engine(changes: dict[str, Any], spelling: str, directory: str) -> tuple[Any, list[dict[str, Any]]]:
    model, make_batch = build(MODEL)
    batches = [make_batch(B, seed) for seed in range(NUM_STEPS + 1)]
    block = {"profile_dir": f"{directory}/profiles", **changes["block"]}
    given = model if spelling == "plain" else as_graph(model, num_ranks=NUM_RANKS)
    return make_engine(given, batches[0], config_of(**{**changes, "block": block})), batches


def _train(way: str, changes: dict[str, Any], spelling: str, directory: str) -> dict[str, Any]:
    engine, batches = _engine(changes, spelling, directory)
    is_async = way == "async"
    engine.retain_gradients(not is_async)
    losses, gradients = [], []
    for batch in batches[:-1]:
        losses += steps(engine, [batch])
        gradients.append({} if is_async else {name: g.clone() for name, g in engine.gradients.items()})
    if is_async:
        engine.flush()
    found: dict[str, Any] = {
        "plan": dumps(engine.plan),
        "programs": "" if is_async else [dumps(p) for p in make_programs(engine.plan, engine._reference)],
        "losses": losses,
        "gradients": gradients,
        "weights": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
    }
    engine.save_checkpoint(f"{directory}/{way}/{spelling}")
    engine.save_pretrained(f"{directory}/{way}/{spelling}-export")
    if not is_async:
        found["next"] = steps(engine, batches[-1:])
        found["evaluated"] = float(engine.eval_batch(iter(batches[:1])))
    engine.destroy()
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files of an export."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


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
