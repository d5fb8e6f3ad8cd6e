"""A rank that fails is named by all that survive it, with where it was; nobody waits longer than the limit.

The whole table (60 faults, 16 stops) is in `tests/soak`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fault_job import FaultSettings, train
from tests.faults import Fault
from tests.ranks import RanksFailed, run_ranks

LIMIT_S = 6.0


def train_with(settings: FaultSettings) -> float:
    """Run the job; a failure says how long after the first rank's it came."""
    started = time.monotonic()
    try:
        train(settings)
    except BaseException as error:
        error.add_note(f"ENDED {time.monotonic() - started:.1f}")
        raise
    return time.monotonic() - started


def said_by(settings: FaultSettings, num_ranks: int = 3) -> dict[int, str]:
    """Return what each rank of a job that fails says."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train_with, num_ranks, settings, timeout_s=110)
    said = {}
    for part in str(caught.value).split("--- rank ")[1:]:
        rank, _, text = part.partition("\n")
        said[int(rank)] = text
    return said


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(kind="kill", rank=1, at="instruction:", skip=9), "its process is gone without a word"),
        (Fault(kind="raise", rank=2, at="instruction:", skip=4), "failed first, in train_batch at "),
        (Fault(kind="kill", rank=2, at="waits_for:the plan"), "its process is gone without a word"),
        (
            Fault(kind="memory", rank=0, at="call:save_checkpoint"),
            "in save_checkpoint: MemoryError: injected",
        ),
    ],
    ids=lambda value: f"{value.kind} {value.at}" if isinstance(value, Fault) else "",
)
def test_who_failed_first_is_what_all_survivors_say(fault: Fault, expected: str, tmp_path: Path) -> None:
    settings = FaultSettings(directory=str(tmp_path), fault=asdict(fault), block={"stages": 3})
    said = said_by(settings)
    survivors = [rank for rank in range(3) if rank != fault.rank]
    for rank in survivors:
        assert f"rank {fault.rank}" in said[rank] and "failed first" in said[rank], said[rank][-1500:]
        assert expected in said[rank], said[rank][-1500:]


@pytest.mark.parametrize("at", ["instruction:", "call:eval_batch"])
def test_a_stopped_rank_is_named_when_the_limit_has_passed(at: str, tmp_path: Path) -> None:
    fault = Fault(kind="stop", rank=1, at=at, skip=0)
    block = {"stages": 3, "comm_timeout_s": LIMIT_S}
    said = said_by(FaultSettings(directory=str(tmp_path), fault=asdict(fault), block=block, steps=1))
    for rank in (0, 2):
        assert "rank 1" in said[rank] and "its process is stopped (SIGSTOP" in said[rank], said[rank][-1500:]


def save_alone(directory: str) -> str:
    """Save on rank 0 alone; the others do something else."""
    from tests.integrations.engine_jobs import B, config_of, make_engine, steps
    from tests.models import build

    model, make_batch = build("two_branch")
    engine = make_engine(model, make_batch(B, 0), config_of(block={"stages": 3, "comm_timeout_s": 3}))
    steps(engine, [make_batch(B, 0)])
    said = ""
    if dist.get_rank() == 0:
        try:
            engine.save_checkpoint(directory)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    else:
        time.sleep(9)
    return said


def test_a_checkpoint_that_one_rank_saves_alone_says_who_did_not_come(tmp_path: Path) -> None:
    said = run_ranks(save_alone, 3, str(tmp_path))[0]
    assert said.startswith("CommTimeout: rank 0")
    assert "outside of the engine's calls" in said and "which every rank calls" in said, said
