"""Faults of ranks at every phase: who is named, when all have ended, what a disagreement is refused with.

python -m tests.soak faults            all tables, with their counts
python -m tests.soak faults stops --first 4
python -m tests.soak faults stops --only hosts

faults          kill -9, TERM, an exception, MemoryError at phases and instructions of 4 ranks: all end within 15 s
                (before joining by the limit and 5 s), and every survivor names the rank that failed first
code            kill -9, TERM, INT, ValueError, MemoryError in data, model, hooks and the script's own code: the same; the
                error of the rank is in all last lines, its own included
stops           SIGSTOP at every phase, before joining included; sleep in the script's own code; calls of rank 0 alone; a
                network that is lost between two hosts: the living end by the limit and 5 s, and name who did not come
features        kill, exception and SIGSTOP where weights are gathered (ZeRO 3), tensor ranks sum, tokens are generated
disagreements   one rank with another configuration, version, seed, weights or mode: refused on all, the key named
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tests.fault_job import FaultSettings
from tests.fault_runs import Ended, can_make_hosts, run_job
from tests.faults import Fault

RANKS = 4
LIMIT_S = 8.0
ENDS_IN_S = 15.0
JOINING_S = 30.0
"""How long ranks wait for one that has not joined, of which nobody knows more than that."""

BEFORE_JOINING = ("doing:configuration",)

PLACES = (
    ("doing:configuration", 0),
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

USERS = ("dataset", "collate_fn", "iterator", "evaluation", "hook", "callback", "model")
"""Code of the user's that may fail (`FaultSettings.bad`)."""

SCRIPT = ("initialize", "step 0", "step 1", "save", "evaluation", "load", "step", "end")
"""What a script is about to do, outside of the engine's calls."""

CUT = (
    "doing:plan",
    "call:train_batch",
    "instruction:",
    "waits_for:the loss",
    "script:save",
    "call:save_checkpoint",
)
CUT += ("call:eval_batch", "call:load_checkpoint", "call:destroy")
WAYS = ("", "plain", "torchrun", "deepspeed")
TWO = {"ranks": 2}
NOWHERE = "nowhere:"
STOPS = ("stop", "sleep", "alone", "cut")
ERRORS = {"raise": "Injected: injected", "memory": "MemoryError: injected", "INT": "KeyboardInterrupt"}

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


def code() -> Iterator[Case]:
    """Yield what ends rank 1 in code of the user's, on two ranks; every third under a launcher."""
    for number, (kind, bad) in enumerate(
        itertools.product(("raise", "memory", "kill", "TERM", "INT"), USERS)
    ):
        way = {2: "torchrun", 5: "deepspeed"}.get(number % 6, "")
        changes = {"bad": bad, "bad_kind": kind, "uses_loader": bad in ("dataset", "collate_fn"), "way": way}
        yield Fault(kind=kind, rank=1, at=NOWHERE), {**changes, **TWO}


def stops() -> Iterator[Case]:
    """Yield what stops a rank, which may live on."""
    for number, (at, skip) in enumerate((("start:", 0), *PLACES)):
        yield Fault(kind="stop", rank=1 if at == "start:" else _rank_of(number, at), at=at, skip=skip), {}
    for number, name in enumerate(SCRIPT):
        yield Fault(kind="sleep", rank=number % 2, at=f"script:{name}"), {"way": WAYS[number % 4], **TWO}
    for number, (name, others_go_on) in enumerate(
        itertools.product(("save", "evaluation", "load"), (False, True))
    ):
        alone = {"rank_zero_only": name, "others_go_on": others_go_on, "way": WAYS[number % 4]}
        yield Fault(kind="alone", rank=1, at=NOWHERE), {**alone, **TWO}
    for way in ("plain", "torchrun", "deepspeed"):
        yield Fault(kind="stop", rank=1, at="instruction:", skip=9), {"way": way, **TWO}
    for at in CUT if can_make_hosts() else ():
        yield Fault(kind="cut", rank=int(at not in ON_RANK_ZERO), at=at), {"way": "hosts", **TWO}


def features() -> Iterator[Case]:
    """Yield faults where ranks do what not every job does."""
    cases = [
        (c, kind, p) for c, places in FEATURES.values() for kind in ("kill", "raise", "stop") for p in places
    ]
    for number, (changes, kind, (at, skip)) in enumerate(cases):
        yield Fault(kind=kind, rank=1 + number % (RANKS - 1), at=at, skip=skip), changes


def strike(make_cases: Callable[[], Iterator[Case]], cases: slice, only: str) -> tuple[int, list[str]]:
    """Run some cases, those alone whose kind or way is ``only`` (empty: all); return how many, and what went wrong."""
    wrong, number = [], 0
    for fault, changes in itertools.islice(make_cases(), cases.start, cases.stop):
        if only not in ("", fault.kind, changes.get("way")):
            continue
        number += 1
        is_stop = fault.kind in STOPS
        ends_in_s = LIMIT_S + 5.0 if is_stop else JOINING_S + 5.0 if fault.at in BEFORE_JOINING else ENDS_IN_S
        ended = _run(fault, **changes, comm_timeout_s=LIMIT_S if is_stop else JOINING_S)
        stays = fault.kind in ("stop", "sleep") or (fault.kind == "alone" and not changes["others_go_on"])
        judged = [each for rank, each in enumerate(ended) if rank != fault.rank or not stays]
        late = [round(e.seconds, 1) for e in judged if not e.code or e.seconds > ends_in_s]
        silent = _not_naming(fault, ended, has_launcher=changes.get("way") in ("torchrun", "deepspeed"))
        _tell(fault, changes, ended, bool(late or silent), silent)
        if late or silent:
            codes = [each.code for each in ended]
            wrong.append(f"{dict(changes)}, {fault}: late {late}, not naming it {silent}, ended with {codes}")
    return number, wrong


def disagreements(cases: slice, only: str) -> tuple[int, list[str]]:
    """Run some disagreements; return how many, and what went wrong."""
    wrong = []
    names = [name for name in DISAGREEMENTS[cases] if only in ("", name)]
    for number, name in enumerate(names):
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
    return len(names), wrong


def _run(
    fault: Fault,
    *,
    block: Mapping[str, Any] | None = None,
    comm_timeout_s: float = JOINING_S,
    way: str = "",
    ranks: int = RANKS,
    **job: Any,
) -> list[Ended]:
    own = {"comm_timeout_s": comm_timeout_s, **(block or {"stages": ranks})}
    with tempfile.TemporaryDirectory() as directory:
        given = None if fault.at == NOWHERE else asdict(fault)
        settings = FaultSettings(directory=directory, fault=given, steps=2, block=own, **job)
        return run_job(settings, ranks, way=way)


def _not_naming(fault: Fault, ended: list[Ended], *, has_launcher: bool) -> list[int]:
    """Return the ranks whose last line does not name who failed first, and with which error.

    On each of two hosts that have lost each other that is the other one's rank. Where two ranks make different calls
    it is either. A launcher ends ranks by a TERM when one has failed: of its ranks one has the line.
    """
    wrong = []
    for rank, each in enumerate(ended):
        failed = 1 - rank if fault.kind == "cut" else fault.rank
        is_named = re.search(
            f"rank {failed}|rank" if fault.kind == "alone" else f"rank {failed}", each.last_line
        )
        has_error = re.search(ERRORS.get(fault.kind, "fail|did not come"), each.last_line)
        is_own = rank == fault.rank and fault.kind != "cut"
        is_judged = not is_own or fault.kind in ("raise", "memory", "INT")
        if is_judged and not (has_error and (is_named or is_own)):  # its own error needs no name
            wrong.append(rank)
    said = [each for each in ended if each.last_line.startswith("gpp_plugin: ")]
    return [] if has_launcher and said and len(wrong) < len(ended) else wrong


def _tell(
    fault: Fault, changes: Mapping[str, Any], ended: list[Ended], is_wrong: bool, silent: list[int]
) -> None:
    witness = next(each for rank, each in enumerate(ended) if rank != fault.rank)
    what = " ".join(
        str(changes[key]) for key in ("bad", "rank_zero_only", "others_go_on", "way") if changes.get(key)
    )
    print(
        f"  {'WRONG' if is_wrong else 'ok   '} {fault.kind} rank {fault.rank} at {fault.at} {fault.skip} {what}: last after "
        f"{max((e.seconds for e in ended if e.code is not None), default=-1.0):.1f} s: "
        f"{(ended[silent[0]] if silent else witness).last_line[:220]}",
        flush=True,
    )


TABLES = {
    "faults": functools.partial(strike, faults),
    "code": functools.partial(strike, code),
    "stops": functools.partial(strike, stops),
    "features": functools.partial(strike, features),
    "disagreements": disagreements,
}


def main(arguments: list[str]) -> int:
    """Run the tables that are named, or all; print their counts; return 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak faults")
    parser.add_argument("table", nargs="*", choices=[*TABLES, []], help="which tables; all of them if none")
    parser.add_argument("--first", type=int, help="so many of each table")
    parser.add_argument("--after", type=int, default=0, help="without so many at the beginning")
    parser.add_argument(
        "--only", default="", help="of these a kind (cut), a way (torchrun), or a disagreement"
    )
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.table or TABLES:
        print(f"{name}:", flush=True)
        cases = slice(options.after, None if options.first is None else options.after + options.first)
        count, wrong = TABLES[name](cases, options.only)
        failed += len(wrong)
        print(f"{name}: {count - len(wrong)} of {count} as they should be", flush=True)
        for line in wrong:
            print(f"  {line}")
    return int(failed > 0)
