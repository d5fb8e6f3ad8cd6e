"""The asynchronous engine as ranks run it."""

from __future__ import annotations

from typing import Any

from tests.integrations.engine_jobs import config_of, make_engine, steps
from tests.models import build

NUM_BATCHES = 20


def async_config(*, mini_batch: int, unit: int, block: dict[str, Any], **changes: Any) -> dict[str, Any]:
    sizes = {"train_batch_size": mini_batch, "train_micro_batch_size_per_gpu": unit}
    return config_of(**sizes, block={"mode": "async", **block}, **changes)


def held_by_stages(engine: Any) -> list[tuple[tuple[str, ...], int]]:
    """Return, of every stage, its parameters' names and how many micro-batches it holds."""
    from gpp_plugin.runtime.rank_programs import held_tensors

    names = held_tensors(engine.plan, engine._reference)
    return [(own, stage.in_flight) for own, stage in zip(names, engine.plan.stages, strict=True)]


def make(
    name: str, mini_batch: int, config: dict[str, Any], **given: Any
) -> tuple[Any, list[dict[str, Any]]]:
    model, make_batch = build(name)
    batches = [make_batch(mini_batch, seed) for seed in range(NUM_BATCHES)]
    return make_engine(model, batches[0], config, **given), batches


def train(name: str, mini_batch: int, config: dict[str, Any]) -> dict[str, Any]:
    """Train 20 mini-batches; return losses, what flushes returned, final parameters, and the stages."""
    engine, batches = make(name, mini_batch, config)
    losses, flushed = steps(engine, batches), float(engine.flush())
    versions = next(iter(engine._rank_runner.stage_runners[0]._codes.values())).versions
    return {
        "losses": losses,
        "flushed": flushed,
        "again": engine.flush(),
        "parameters": {n: p.detach().clone() for n, p in engine.module.named_parameters()},
        "stages": held_by_stages(engine),
        "staleness": engine.staleness,
        "versions": (versions.most_held, versions.staleness),
        "memory": engine.memory_report(),
        "stage": engine.stage_name,
        "has_loss": engine.plan.stage_of_rank(engine.global_rank) in engine.plan.loss_stages(),
        "steps": engine.global_steps,
    }


def resume(directory: str, config: dict[str, Any], name: str, mini_batch: int) -> dict[str, Any]:
    """Save in the middle and go on; a fresh engine that loads must go on the same."""
    engine, batches = make(name, mini_batch, config)
    before = steps(engine, batches[:4])
    engine.save_checkpoint(directory)
    engine.flush()
    expected = steps(engine, batches[4:9])
    other, _ = make(name, mini_batch, config)
    other.load_checkpoint(directory)
    found = steps(other, batches[4:9])
    weights = [e.module_state_dict() for e in (engine, other)]
    return {
        "expected": expected,
        "found": found,
        "same": all((weights[0][n] == weights[1][n]).all() for n in weights[0]),
        "steps": other.global_steps,
        "losses": before,
        "stages": held_by_stages(engine),
    }
