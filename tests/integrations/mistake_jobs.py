"""A user's mistakes that only the whole engine can see, as ranks make them; importable by their processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from gpp_plugin.ir.serialize import dumps
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.models import build


def make_mistakes() -> dict[str, str]:
    """Each mistake and what it says."""
    batch = build("two_branch")[1](B, 0)
    said: dict[str, str] = {}

    def start(**block: Any) -> Any:
        return make_engine(build("two_branch")[0], batch, config_of(block={"stages": 2, **block}))

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    engine = start(schedule="1f1b", planner="uniform")
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    attempt("no labels", lambda: steps(engine, [unlabelled]))
    attempt("more keys", lambda: steps(engine, [{**batch, "weight": torch.ones(B)}]))
    steps(engine, [batch])  # a refused batch does not end the training
    idle = make_engine(build("two_branch")[0], batch, config_of(optimizer={}, block={"stages": 2}))
    attempt("no optimizer", lambda: steps(idle, [batch]))
    attempt("two plans", lambda: start(plan={"stages": [{"modules": ["*"]}]}))
    ordered = {"stages": [{"modules": ["left"], "k": 1}, {"modules": ["*"]}]}
    attempt("slices", lambda: start(plan=ordered, slicing="on"))
    saved = json.loads(dumps(engine.plan))
    attempt("saved sizes", lambda: start(plan=saved, micro_batch_sizes=8))
    attempt("saved schedule", lambda: start(plan=saved, schedule="gpipe"))
    by_hand = {"stages": [{"name": "tower", "modules": ["left"]}, {"modules": ["*"]}]}
    named = start(plan=by_hand, micro_batch_sizes={"tower": B}, schedule="1f1b")
    said["named stage"] = f"ConfigError: none, {[s.micro_batch_size for s in named.plan.stages]}"
    attempt("weights", lambda: start(weights="nowhere"))
    attempt("module", lambda: start(micro_batch_sizes={"lefd": 4}))
    attempt("stage", lambda: start(micro_batch_sizes={"left.7": 4}))
    optimizer = {"type": "AdmaW", "params": {"lr": 1e-3}}
    attempt("optimizer", lambda: make_engine(build("two_branch")[0], batch, config_of(optimizer=optimizer)))
    scheduler = {"type": "WarmupLRR", "params": {}}
    attempt("scheduler", lambda: make_engine(build("two_branch")[0], batch, config_of(scheduler=scheduler)))
    attempt("trace", lambda: start(trace_path="/dev/null/trace.json"))
    return said
