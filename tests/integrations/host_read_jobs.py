"""What ranks run in the test that nothing reads the device within a step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tests.host_reads import HostReads
from tests.integrations.engine_jobs import B, config_of, make_engine
from tests.integrations.test_stage_engine import PRECISIONS, allow_fp16
from tests.models import build


def read_while_training(
    name: str, zero: int, precision: str, block: dict[str, Any], spoil: bool = False
) -> dict[str, list[str]]:
    """Train three mini-batches; return what the host read in the last two, in tasks, for the steps, for the losses.

    Args:
        spoil: read a gradient behind each backward.
    """
    allow_fp16()
    model, make_batch = build(name, layers=1 if name == "t5" else 2, dropout=0.1)
    batches = [make_batch(B, seed) for seed in range(3)]
    config = config_of(
        zero_optimization={"stage": zero}, gradient_clipping=0.5, **PRECISIONS[precision], block=block
    )
    engine = make_engine(model, batches[0], config)
    engine.train_batch(
        data_iter=iter(batches[:1])
    )  # the first one compiles, counts and finds out what is saved
    tasks, step = HostReads(), HostReads()
    runner = engine._rank_runner
    executor, hooks, updater = runner._executor, runner.stage_runners[0]._hooks, engine.stage_engine.updater
    run, take, apply = executor.run, hooks.step, updater.apply
    states = contextlib.ExitStack()

    def watched_run(*args: Any, **options: Any) -> Any:
        with states:
            states.enter_context(tasks.watching())
            return run(*args, **options)

    def watched_step() -> Any:
        states.close()  # the last task is done
        with states:
            states.enter_context(step.watching())
            return take()

    def unwatched_apply(*args: Any, **options: Any) -> None:
        states.close()  # optimizers count their steps in tensors of the host
        apply(*args, **options)

    executor.run, hooks.step, updater.apply = watched_run, watched_step, unwatched_apply
    if spoil:
        accumulate = hooks.accumulate

        def reading() -> None:
            accumulate()
            assert all(bool(torch.isfinite(p).all()) for p in engine.module.parameters())

        hooks.accumulate = reading
    for batch in batches[1:]:
        engine.train_batch(data_iter=iter([batch]))
    memory = engine.plan.stages[engine.stage_engine.stage_index].memory
    return {
        "tasks": tasks.found,
        "step": step.found,
        "moved": []
        if memory is None
        else [t.name for t in memory.swapped] + [str(r) for r in memory.recomputed],
    }
