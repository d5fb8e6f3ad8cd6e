"""Faults of ranks at every phase: who is named, when all have ended, what a disagreement is refused with.

python -m tests.soak faults            all three tables, with their counts
python -m tests.soak faults stops --first 4

faults          kill -9, TERM, an exception, MemoryError at phases and instructions of 4 ranks: all end within 15 s
                (before joining by the limit and 5 s), and every survivor names the rank that failed first
stops           SIGSTOP at every phase, before joining included: the others end by the limit and 5 s, and name it
features        kill, exception and SIGSTOP where weights are gathered (ZeRO 3), tensor ranks sum, tokens are generated
disagreements   one rank with another configuration, version, seed, weights or mode: refused on all, the key named
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tests.fault_job import FaultSettings
from tests.fault_runs import Ended, run_job
from tests.faults import Fault

RANKS = 4
LIMIT_S = 8.0
ENDS_IN_S = 15.0
JOINING_S = 30.0
"""How long ranks wait for one that has not joined, of which nobody knows more than that."""

BEFORE_JOINING = ("call:deepspeed.initialize",)

PLACES = (
    ("call:deepspeed.initialize", 0),
    ("waits_for:a look at what each rank received", 0),
    ("doing:plan", 0),
    ("doing:making the stages", 0),
    ("doing:construction", 0),
    ("call:train_batch", 0),
    ("instruction:", 0),
    ("instruction:", 3),
    ("instruction:", 6),
    ("instruction:step", 0),
    ("waits_for:the norm", 1),
    ("waits_for:the loss", 1),
    ("call:save_checkpoint", 0),
    ("call:eval_batch", 0),
    ("call:load_checkpoint", 0),
    ("call:destroy", 0),
)
"""Where, and how often it is passed before."""

FEATURES: dict[str, tuple[dict[str, Any], tuple[tuple[str, int], ...]]] = {
    "ZeRO 3": (
        {"block": {"stages": 2, "data_parallel": 2}, "config": {"zero_optimization": {"stage": 3}}},
        (("instruction:gather", 0), ("waits_for:the gather", 1), ("instruction:free", 0)),
    ),
    "tensor ranks": (
        {"model": "gpt2", "block": {"stages": 2, "tensor_parallel": 2}},
        (("waits_for:*over the tensor ranks", 3), ("call:save_checkpoint", 0)),
    ),
    "generation": (
        {"model": "gpt2", "block": {"stages": 4}, "generates": True},
        (("call:generate", 0), ("waits_for:the next tensor of a generation", 2)),
    ),
}
"""What the ranks do -> changes of the job, and places of its own."""

ON_RANK_ZERO = ("doing:plan",)

DISAGREEMENTS = (
    "lr", "weight_decay", "optimizer", "scheduler", "clip", "precision", "zero", "batch", "mode", "granularity",
    "seed", "stages", "schedule", "slicing", "loss_mean", "bad_block", "weights", "frozen", "version",
    "compile", "tensor_parallel", "backends", "zero 3",
)  # fmt: skip


def _rank_of(number: int, at: str) -> int:
    return 0 if at in ON_RANK_ZERO else number % RANKS


Case = tuple[Fault, Mapping[str, Any]]
"""What strikes, and changes of the job that it strikes."""


def faults() -> Iterator[Case]:
    """Yield what ends a rank in a plain job."""
    for number, (kind, (at, skip)) in enumerate(
        itertools.product(("kill", "raise", "TERM", "memory"), PLACES)
    ):
        yield Fault(kind=kind, rank=_rank_of(number, at), at=at, skip=skip), {}


def stops() -> Iterator[Case]:
    """Yield what stops a rank, which may live on."""
    for number, (at, skip) in enumerate((("start:", 0), *PLACES)):
        yield Fault(kind="stop", rank=1 if at == "start:" else _rank_of(number, at), at=at, skip=skip), {}


def features() -> Iterator[Case]:
    """Yield faults where ranks do what not every job does."""
    cases = [
        (c, kind, p) for c, places in FEATURES.values() for kind in ("kill", "raise", "stop") for p in places
    ]
    for number, (changes, kind, (at, skip)) in enumerate(cases):
        yield Fault(kind=kind, rank=1 + number % (RANKS - 1), at=at, skip=skip), changes


def strike(make_cases: Callable[[], Iterator[Case]], count: int) -> list[str]:
    """Return what went wrong in as many cases."""
    wrong = []
    for fault, changes in itertools.islice(make_cases(), count):
        is_stop = fault.kind == "stop"
        ends_in_s = LIMIT_S + 5.0 if is_stop else JOINING_S + 5.0 if fault.at in BEFORE_JOINING else ENDS_IN_S
        ended = _run(fault, **changes, comm_timeout_s=LIMIT_S if is_stop else JOINING_S)
        judged = [each for rank, each in enumerate(ended) if rank != fault.rank or not is_stop]
        late = [each.seconds for each in judged if each.code is None or each.seconds > ends_in_s]
        silent = _not_naming(ended, fault.rank)
        _tell(fault, ended, bool(late or silent), silent)
        if late or silent:
            wrong.append(f"{dict(changes)}, {fault}: late {late}, not naming it {silent}")
    return wrong


def disagreements(count: int) -> list[str]:
    """Return what went wrong in as many disagreements."""
    wrong = []
    for number, name in enumerate(DISAGREEMENTS[:count]):
        with tempfile.TemporaryDirectory() as directory:
            settings = FaultSettings(
                directory=directory,
                odd=name,
                odd_rank=number % RANKS,
                block={"stages": RANKS, "comm_timeout_s": 20},
            )
            ended = run_job(settings, RANKS)
        last = [e.last_line for e in ended]
        is_fine = all(e.code == 1 and "ConfigError" in line for e, line in zip(ended, last, strict=True))
        print(f"  {'ok   ' if is_fine else 'WRONG'} {name}: {last[0][:200]}", flush=True)
        if not is_fine:
            wrong.append(f"{name}: {last}")
    return wrong


def _run(
    fault: Fault, *, block: Mapping[str, Any] | None = None, comm_timeout_s: float = JOINING_S, **job: Any
) -> list[Ended]:
    own = {"comm_timeout_s": comm_timeout_s, **(block or {"stages": RANKS})}
    with tempfile.TemporaryDirectory() as directory:
        settings = FaultSettings(directory=directory, fault=asdict(fault), steps=2, block=own, **job)
        return run_job(settings, RANKS)


def _not_naming(ended: list[Ended], failed: int) -> list[int]:
    """Return the survivors whose last line does not name the rank that failed first."""
    return [
        rank
        for rank, each in enumerate(ended)
        if rank != failed
        and not (
            f"rank {failed}" in each.last_line and any(w in each.last_line for w in ("fail", "did not come"))
        )
    ]


def _tell(fault: Fault, ended: list[Ended], is_wrong: bool, silent: list[int]) -> None:
    witness = next(each for rank, each in enumerate(ended) if rank != fault.rank)
    print(
        f"  {'WRONG' if is_wrong else 'ok   '} {fault.kind} rank {fault.rank} at {fault.at} {fault.skip}: last after "
        f"{max(e.seconds for e in ended if e.code is not None):.1f} s: "
        f"{(ended[silent[0]] if silent else witness).last_line[:220]}",
        flush=True,
    )


TABLES = {
    "faults": (functools.partial(strike, faults), 60),
    "stops": (functools.partial(strike, stops), 16),
    "features": (functools.partial(strike, features), 21),
    "disagreements": (disagreements, len(DISAGREEMENTS)),
}


def main(arguments: list[str]) -> int:
    """Run the tables that are named, or all; print their counts; return 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak faults")
    parser.add_argument("table", nargs="*", choices=[*TABLES, []], help="which tables; all of them if none")
    parser.add_argument("--first", type=int, help="so many of each table")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.table or TABLES:
        run, most = TABLES[name]
        count = min(most, options.first or most)
        print(f"{name}:", flush=True)
        wrong = run(count)
        failed += len(wrong)
        print(f"{name}: {count - len(wrong)} of {count} as they should be", flush=True)
        for line in wrong:
            print(f"  {line}")
    return int(failed > 0)
