"""What ranks run in the tests of memory optimization through the engine."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from gpp_plugin.errors import PlanInfeasible, RuntimeFailure
from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.models import build


class _Lines(logging.Handler):
    """Keeps what the package logs about memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("memory: "):
            self.lines.append((record.levelname, text))


def train_with(
    name: str, blocks: list[dict[str, Any]], dropout: float = 0.0, zero: int = 0
) -> list[dict[str, Any]]:
    """Train two steps of a small model under each block; return losses, gradients and the memory report."""
    answers = []
    log = logging.getLogger("gpp_plugin.engine.memory_watch")
    log.setLevel(logging.INFO)
    for block in blocks:
        lines = _Lines()
        log.addHandler(lines)
        model, make_batch = build(name, layers=1 if name == "t5" else 2, dropout=dropout)
        batches = [make_batch(B, seed) for seed in range(2)]
        sharding = {"zero_optimization": {"stage": zero}}
        engine = make_engine(model, batches[0], config_of(block={"stages": 2, **block}, **sharding))
        engine.retain_gradients()
        torch.manual_seed(7 + engine.global_rank)
        losses = [float(engine.train_batch(data_iter=iter([batches[0]])))]
        gradients = {key: gradient.clone() for key, gradient in engine.gradients.items()}
        losses.append(float(engine.train_batch(data_iter=iter([batches[1]]))))
        answers.append(
            {
                "losses": losses,
                "gradients": gradients,
                "plan": engine.plan,
                "report": engine.memory_report(),
                "lines": lines.lines,
            }
        )
        log.removeHandler(lines)
        engine.destroy()
    return answers


def train_misinformed(name: str, planned: int) -> list[tuple[str, str]]:
    """Train a step after the plan's figure for its fullest stage was changed; return what was logged."""
    lines = _Lines()
    log = logging.getLogger("gpp_plugin.engine.memory_watch")
    log.addHandler(lines)
    model, make_batch = build(name)
    batch = make_batch(B, 0)
    engine = make_engine(model, batch, config_of(block={"planner": "uniform", "stages": 2, "slicing": "off"}))
    memory = list(engine.plan.memory)
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].activations)
    in_flight = engine.plan.stages[fullest].in_flight
    memory[fullest] = dataclasses.replace(memory[fullest], activations=planned * in_flight)
    engine._memory._plan = dataclasses.replace(engine.plan, memory=tuple(memory))
    level = log.level
    log.setLevel(logging.INFO)
    engine.train_batch(data_iter=iter([batch]))
    log.setLevel(level)
    log.removeHandler(lines)
    return lines.lines


def refusal(block: dict[str, Any]) -> str:
    """Return what initialize says of a plan that cannot be."""
    model, make_batch = build("two_branch")
    try:
        make_engine(model, make_batch(B, 0), config_of(block={"stages": 2, **block}))
    except PlanInfeasible as error:
        return str(error)
    return ""


def destroy() -> tuple[int, int, int, str]:
    """Return the process groups before, with and after an engine, and what it says to another step."""
    import torch.distributed as dist

    def count() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = count()
    model, make_batch = build("two_branch")
    batch = make_batch(B, 0)
    engine = make_engine(model, batch, config_of(block={"stages": 2}))
    engine.train_batch(data_iter=iter([batch]))
    engine.eval_batch(iter([batch]))
    during = count()
    engine.destroy()
    engine.destroy()
    try:
        engine.train_batch(data_iter=iter([batch]))
    except RuntimeFailure as error:
        return before, during, count(), str(error)
    return before, during, count(), ""


def train_with_optimizers() -> dict[str, tuple[int, int]]:
    """Train a step with several optimizers; return what is predicted and what is found of each on this rank."""
    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    cases: dict[str, tuple[dict[str, Any], Any]] = {
        "momentum in bf16": ({"optimizer": momentum, "bf16": {"enabled": True}}, None),
        "the user's Adagrad": ({}, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)),
        "ZeRO 1": ({"zero_optimization": {"stage": 1}}, None),
    }
    answers = {}
    model, make_batch = build("two_branch", layers=3)
    batch = make_batch(B, 0)
    for name, (changes, given) in cases.items():
        config = config_of(block={"planner": "uniform", "stages": 2, "slicing": "off"}, **changes)
        if given is not None:
            del config["optimizer"]
        engine = make_engine(model, batch, config, **({} if given is None else {"optimizer": given}))
        engine.train_batch(data_iter=iter([batch]))
        mine = engine.memory_report().ranks[engine.global_rank]
        answers[name] = mine.predicted.optimizer, mine.held.optimizer
        engine.destroy()
        model, _ = build("two_branch", layers=3)
    return answers
