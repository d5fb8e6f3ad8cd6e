"""Resumes after a death where ranks hold weights in parts: the next ten losses are those of a job without a fault.

python -m tests.soak resumes            every setup, precision and fault, three jobs each
python -m tests.soak elastic            hosts of a job under torchrun that are lost (as root): what is left goes on

The first job trains through; the second saves, trains on and loses a rank; the third, of new processes and other first
weights, loads and goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fault_runs import ADDRESSES, ROOT, can_make_hosts, children, hosts, run_job
from tests.faults import LINK, Fault
from tests.processor_time import Family
from tests.waits import Patience

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


# ---- hosts of an elastic job ------------------------------------------------------------------------------------

LIMIT_S, RESTARTS_IN_S = 8.0, 15.0
"""``comm_timeout_s`` of the job, and how much later than that its ranks must have been started anew."""
QUICK = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How long torchrun waits for a host that may come, and for one that is silent; its own numbers are 30 s and 15 s."""
LOST: dict[str, tuple[int, tuple[tuple[int, ...], ...]]] = {
    "one of two": (2, ((1,),)),
    "three of four at once": (4, ((1, 2, 3),)),
    "three of four, one after the other": (4, ((3,), (2,), (1,))),
}
"""How many hosts, of one rank each, and which of them are lost together; the first one has torchrun's store."""


def train_elastically() -> None:
    """Be a rank of `what_is_lost`: the example, with a short limit."""
    example = runpy.run_path(str(ROOT / "examples" / "train_elastically.py"))
    example["CONFIG"]["graph_pipeline"]["comm_timeout_s"] = LIMIT_S
    example["main"]()


def what_is_lost(number: int, waves: Sequence[Sequence[int]]) -> tuple[list[float], str]:
    """Train on hosts that are lost; return after how many seconds each new start came, and what is wrong."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        inside = stack.enter_context(hosts(number))
        log = Path(directory) / "host0.txt"
        agents = []
        for host, command in enumerate(inside):
            torchrun = [
                str(Path(sys.executable).parent / "torchrun"),
                "--nnodes",
                f"1:{number}",
                "--max-restarts",
                "9",
            ]
            rendezvous = [
                "--rdzv-backend",
                "c10d",
                "--rdzv-id",
                "job",
                "--rdzv-endpoint",
                f"{ADDRESSES[0]}:29400",
            ]
            rendezvous += ["--rdzv-conf", f"{QUICK},is_host={int(not host)}", "--local-addr", ADDRESSES[host]]
            job = [
                "--module",
                "tests.soak.rank_resumes",
                "--steps",
                "1000000",
                "--every",
                "4",
                "--save",
                f"{directory}/s",
            ]
            agents.append(
                subprocess.Popen(
                    [*command, *torchrun, *rendezvous, *job],
                    stdout=stack.enter_context((Path(directory) / f"host{host}.txt").open("wb")),
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(ROOT),
                        "GLOO_SOCKET_IFNAME": LINK,
                    },
                )
            )
        family = Family(*(agent.pid for agent in agents))

        def ranks() -> set[str]:  # of the first host
            with contextlib.suppress(OSError, IndexError):  # it has none now
                return set(children(int(children(agents[0].pid)[0])))
            return set()

        def until(is_so: Callable[..., bool], *given: Any) -> bool:
            patience = Patience(200.0, family.used_s)
            while not is_so(*given) and not patience.is_over() and agents[0].poll() is None:
                time.sleep(0.05)
            return is_so(*given)

        def has_started(before: set[str]) -> bool:
            return bool(ranks() - before)

        def has_trained(left: int, come: str) -> bool:
            last = re.split(r"^start \d+: ", log.read_text(), flags=re.MULTILINE)[-1]
            return last.startswith(f"{left} ranks, from {come}") and last.count("\nstep ") > 6

        left, come = number, "the beginning"
        for wave in ((), *waves):
            before, lost_at = ranks(), time.monotonic()
            for host in wave:
                subprocess.run([*inside[host], "ip", "link", "set", LINK, "down"], check=True)
            left -= len(wave)
            if not until(has_started, before):
                return seconds, f"no new start: {log.read_text()[-2000:]}"
            if wave:
                seconds.append(time.monotonic() - lost_at)
            if not until(has_trained, left, come):
                return seconds, f"not {left} ranks from {come}: {log.read_text()[-2000:]}"
            come = "step "
    late = [each for each in seconds if each > LIMIT_S + RESTARTS_IN_S]
    return seconds, f"later than {LIMIT_S + RESTARTS_IN_S:g} s" if late else ""


def elastic(arguments: Sequence[str]) -> int:
    """Run the cases of `LOST`; print each and the counts; return 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak elastic")
    parser.add_argument("--first", type=int, help="so many cases")
    options = parser.parse_args(arguments)
    if not can_make_hosts():
        print("elastic: not run: name spaces and links between them need root")
        return 0
    cases, wrong = list(LOST.items())[: options.first], 0
    for name, (number, waves) in cases:
        seconds, said = what_is_lost(number, waves)
        wrong += bool(said)
        after = ", ".join(f"{each:.1f}" for each in seconds)
        print(f"  {'WRONG' if said else 'ok   '} {name}: new ranks after {after} s {said}", flush=True)
    print(
        f"elastic: {len(cases) - wrong} of {len(cases)} go on, started anew within {LIMIT_S + RESTARTS_IN_S:g} s"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    train_elastically()
