"""Resumes after a death where ranks hold weights in parts: the next ten losses are those of a job without a fault.

python -m tests.soak resumes            every setup, precision and fault, three jobs each

The first job trains through; the second saves, trains on and loses a rank; the third, of new processes and other first
weights, loads and goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fault_runs import run_job
from tests.faults import Fault

RANKS = 4
SAVED_AFTER, COMPARED = 3, 10
SETUPS: dict[str, tuple[dict[str, Any], int]] = {
    "ZeRO 3": ({"stages": 2, "data_parallel": 2}, 3),
    "tensor ranks": ({"stages": 2, "tensor_parallel": 2}, 0),
    "tensor ranks, ZeRO 3": ({"stages": 1, "data_parallel": 2, "tensor_parallel": 2}, 3),
}
"""Block of the configuration and ZeRO stage."""

MORE: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
FAULTS = {
    "kill in a step": ("kill", "instruction:", 9),
    "exception at the step": ("raise", "instruction:step", 1),
    "kill in the next save": ("kill", "call:save_checkpoint", 0),
}
"""Kind, place, and how often that is passed before, behind the save."""


@dataclass(frozen=True, kw_only=True)
class ResumeSettings:
    """One job.

    Args:
        loads: go on from what is saved; else from the beginning.
        steps: until it ends; it saves after `SAVED_AFTER`, and behind the last one.
    """

    directory: str
    setup: str
    precision: str
    is_behind: bool
    loads: bool
    steps: int
    fault: dict[str, Any] | None = None


def train_on(settings: ResumeSettings) -> None:
    """Train on every rank; rank 0 writes the losses by their step, where nothing is to happen."""
    import torch

    from tests.faults import inject
    from tests.integrations.engine_jobs import B, config_of, make_engine, steps
    from tests.models import build

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    block, zero = SETUPS[settings.setup]
    more = {**MORE[settings.precision], "zero_optimization": {"stage": zero}}
    block = {**block, "checkpoint": {"async_save": settings.is_behind}}
    model, make_batch = build("gpt2", seed=int(settings.loads), dropout=0.1)
    torch.manual_seed(0)
    engine = make_engine(model, make_batch(B, 0), config_of(block=block, **more))
    saved = f"{settings.directory}/saved"
    if settings.loads:
        engine.load_checkpoint(saved)
        assert engine.global_steps == SAVED_AFTER, engine.global_steps
    losses = {}
    for step in range(engine.global_steps, settings.steps):
        losses[step] = steps(engine, [make_batch(B, step)])[0]
        if step + 1 == SAVED_AFTER and not settings.loads:
            engine.save_checkpoint(saved)
            engine._files.wait()
            if settings.fault is not None:
                inject(Fault(**settings.fault), rank=rank)
    if rank == 0 and settings.fault is None:
        (Path(settings.directory) / f"losses{int(settings.loads)}.json").write_text(json.dumps(losses))
    if settings.fault is not None:
        engine.save_checkpoint(saved)
    engine.destroy()


def what_is_wrong(setup: str, precision: str, fault: str, *, number: int) -> str:
    """Run the three jobs of a case; return what is wrong, if anything is."""
    kind, at, skip = FAULTS[fault]
    strikes = asdict(Fault(kind=kind, rank=number % RANKS, at=at, skip=skip))
    until = SAVED_AFTER + COMPARED
    with tempfile.TemporaryDirectory() as directory:
        given = {
            "directory": directory,
            "setup": setup,
            "precision": precision,
            "is_behind": bool(number % 2),
        }
        jobs = (
            ResumeSettings(**given, loads=False, steps=until),
            ResumeSettings(**given, loads=False, steps=SAVED_AFTER + 2, fault=strikes),
            ResumeSettings(**given, loads=True, steps=until),
        )
        for job in jobs:
            ended = run_job(job, RANKS, limit_s=200.0, job=train_on)
            codes = [each.code for each in ended]
            if (None in codes) or (job.fault is None and any(codes)) or (job.fault and not any(codes)):
                return f"ended with {codes}: {[each.last_line[:200] for each in ended]}"
        through, resumed = (json.loads((Path(directory) / f"losses{n}.json").read_text()) for n in (0, 1))
        found = list(resumed.values())
        if len(found) != COMPARED or found != list(through.values())[SAVED_AFTER:]:
            return f"{found}, without a fault {list(through.values())[SAVED_AFTER:]}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Run the cases; print each and the counts; return 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak resumes")
    parser.add_argument("--first", type=int, help="so many cases")
    options = parser.parse_args(arguments)
    cases = list(itertools.product(SETUPS, MORE, FAULTS))[: options.first]
    wrong = 0
    for number, case in enumerate(cases):
        said = what_is_wrong(*case, number=number)
        wrong += bool(said)
        print(f"  {'WRONG' if said else 'ok   '} {', '.join(case)}{': ' if said else ''}{said}", flush=True)
    print(f"resumes: {len(cases) - wrong} of {len(cases)}, next {COMPARED} losses bit-equal", flush=True)
    return int(wrong > 0)
