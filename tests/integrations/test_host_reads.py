"""Nothing reads the device from the host between the first and the last task of a step; the step reads once.

The first mini-batch is left out: it compiles, is counted, and finds out what the stages' operators save. On a GPU
`torch.cuda.set_sync_debug_mode("error")` says the same of the real thing.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.host_reads import HostReads
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.integrations.test_stage_engine import PRECISIONS, allow_fp16
from tests.models import build
from tests.ranks import run_kept_ranks

CHAIN: dict[str, Any] = {"stages": 2}
ONE: dict[str, Any] = {"stages": 1}


def read_while_training(name: str, zero: int, precision: str, block: dict[str, Any]) -> dict[str, list[str]]:
    """Train three mini-batches; return what the host read in the last two, in tasks, for the steps, for the losses."""
    allow_fp16()
    model, make_batch = build(name, layers=1 if name == "t5" else 2, dropout=0.1)
    batches = [make_batch(B, seed) for seed in range(3)]
    config = config_of(
        zero_optimization={"stage": zero}, gradient_clipping=0.5, **PRECISIONS[precision], block=block
    )
    engine = make_engine(model, batches[0], config)
    steps(engine, batches[:1])  # the first one compiles, counts and finds out what is saved
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
    for batch in batches[1:]:
        engine.train_batch(data_iter=iter([batch]))
    return {"tasks": tasks.found, "step": step.found}


@pytest.mark.parametrize(
    ("num_ranks", "zero", "precision", "block"),
    [
        (1, 0, "fp32", ONE),
        (1, 1, "bf16+fp32", ONE),
        (2, 0, "fp32", ONE),
        (2, 0, "bf16+fp32", ONE),
        (2, 1, "fp16", ONE),
        (2, 2, "bf16+fp32", ONE),
        (2, 0, "fp16", CHAIN),
    ],
)
def test_tasks_read_nothing_and_a_step_once(num_ranks: int, zero: int, precision: str, block: Any) -> None:
    given = ("gpt2", zero, precision, block)
    for answer in run_kept_ranks(read_while_training, num_ranks, *given):
        assert answer["tasks"] == []
        assert len(answer["step"]) == 2, "one a step"
        assert all("stage_step.py" in where for where in answer["step"]), answer["step"]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: t.cpu(), lambda t: float(t[0]), lambda t: bool(t[0]),
        lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: torch.tensor([1.0], device=t.device),
        lambda t: t.to(t.device), lambda t: torch.equal(t, t), lambda t: t.numpy(), lambda t: range(3)[t[0].int()],
    ],
)  # fmt: skip
def test_what_counts_as_a_read(read: Any) -> None:
    reads = HostReads()
    with reads.watching():
        torch.ones(3).mul_(2).to(torch.bfloat16)[0:2].sum()
    assert reads.found == []
    with reads.watching():
        read(torch.ones(3))
    assert reads.found
