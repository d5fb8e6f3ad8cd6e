"""Mistakes that only the whole engine can see: one line, the same on every rank, before time is lost."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from gpp_plugin.ir.serialize import dumps
from tests.integrations.engine_jobs import B, config_of, make_engine, said_of, steps
from tests.models import build
from tests.ranks import run_ranks


def make_mistakes() -> dict[str, str]:
    """Return what each mistake is refused with."""
    import deepspeed

    _, make_batch = build("two_branch")
    batch = make_batch(B, 0)

    def start(changes: dict[str, Any] | None = None, /, **block: Any) -> Any:
        config = config_of(block={"stages": 2, **block}, **(changes or {}))
        return make_engine(build("two_branch")[0], batch, config)

    engine = start(schedule="1f1b", planner="uniform")
    refused_batches = {
        "no data": None,
        "short": iter([make_batch(3, 0)]),
        "no iterator": [batch],
        "no labels": iter([{key: value for key, value in batch.items() if key != "labels"}]),
        "more keys": iter([{**batch, "weight": torch.ones(B)}]),
    }
    said = {
        name: said_of(functools.partial(engine.train_batch, data)) for name, data in refused_batches.items()
    }
    steps(engine, [batch])  # a refused batch does not end the training
    idle = start({"optimizer": {}})
    saved = json.loads(dumps(engine.plan))
    ordered = {"stages": [{"modules": ["left"], "k": 1}, {"modules": ["*"]}]}
    mistakes: dict[str, Callable[[], Any]] = {
        **{name: getattr(engine, name) for name in ("forward", "backward", "step", "no_sync")},
        "no optimizer": lambda: steps(idle, [batch]),
        "too many": lambda: start(stages=9),
        "no sample": lambda: deepspeed.initialize(model=build("two_branch")[0], config=config_of()),
        "two plans": lambda: start(plan={"stages": [{"modules": ["*"]}]}),
        "slices": lambda: start(plan=ordered, slicing="on"),
        "saved sizes": lambda: start(plan=saved, micro_batch_sizes=8),
        "saved schedule": lambda: start(plan=saved, schedule="gpipe"),
        "weights": lambda: start(weights="nowhere"),
        "trace": lambda: start(trace_path="/dev/null/trace.json"),
    }
    said |= {name: said_of(mistake) for name, mistake in mistakes.items()}
    by_hand = {"stages": [{"name": "tower", "modules": ["left"]}, {"modules": ["*"]}]}
    named = start(plan=by_hand, micro_batch_sizes={"tower": B}, schedule="1f1b")
    said["named stage"] = f"none, {[s.micro_batch_size for s in named.plan.stages]}"
    return said


def test_a_mistake_gets_the_same_line_on_every_rank() -> None:
    first, second = run_ranks(make_mistakes, 2)
    assert first == second
    assert first.pop("named stage") == "none, [8, 2]"
    assert all(text and "\n" not in text for text in first.values()), first
    for name, wanted in {
        "forward": "train_batch", "no_sync": "train_batch", "no data": "training_data",
        "short": "train_batch_size=8", "no iterator": "iter(...)", "no labels": "lacks ['labels']",
        "more keys": "also has ['weight']", "no optimizer": "optimizer: missing",
        "too many": "stages: 9",
        "no sample": "sample_batch", "two plans": "graph_pipeline.stages: 2",
        "slices": "graph_pipeline.slicing: on, and graph_pipeline.plan slices nothing",
        "saved sizes": "graph_pipeline.micro_batch_sizes: 8 is requested for stage 'left",
        "saved schedule": "graph_pipeline.schedule: gpipe is requested, graph_pipeline.plan has 1f1b",
        "weights": "graph_pipeline.weights: 'nowhere'",
        "trace": "graph_pipeline.trace_path: /dev/null",
    }.items():  # fmt: skip
        assert wanted in first[name], (name, first[name])
    assert "6 blocks" in first["too many"] and "plan has 1" in first["two plans"]
