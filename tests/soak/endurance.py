"""What stays of long training: memory, threads and descriptors, over steps and over engines.

python -m tests.soak endurance              2,000 steps, and 50 engines in one process, on two ranks
python -m tests.soak endurance --steps 500 --engines 20

The steps have six lengths, a checkpoint every 50 (of which two stay) and an evaluation every 25. After the first quarter
memory may grow by 2 %; threads and descriptors are as many as there were.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

MOST_GROWTH = 0.02
RANKS = 2
LIMIT_S = 7200.0
LENGTHS = (8, 12, 16, 10, 14, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds."""

    rss: int
    threads: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        """Look at this process."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            rss=pages * os.sysconf("SC_PAGE_SIZE"),
            threads=len(os.listdir("/proc/self/task")),
            descriptors=len(os.listdir("/proc/self/fd")),
        )


def train_long(steps: int, directory: str) -> list[Held]:
    """Train; return what is held after each twentieth of the steps."""
    import torch

    from tests.integrations.engine_jobs import B, config_of, make_engine
    from tests.models import build

    def batch(number: int) -> dict[str, Any]:
        ids = torch.randint(
            3, 60, (B, LENGTHS[number % len(LENGTHS)]), generator=torch.Generator().manual_seed(number)
        )
        return {"input_ids": ids, "labels": ids.clone()}

    model, _ = build("gpt2")
    block = {"stages": RANKS, "verify": False, "checkpoint": {"keep_last": 2}}
    engine = make_engine(model, batch(0), config_of(block=block))
    held = []
    for step in range(1, steps + 1):
        engine.train_batch(iter([batch(step)]))
        if step % 25 == 0:
            engine.eval_batch(iter([batch(step)]))
        if step % 50 == 0:
            engine.save_checkpoint(directory)
        if step % max(steps // 20, 1) == 0:
            held.append(Held.now())
    engine.destroy()
    return held


def make_many(engines: int) -> list[Held]:
    """Make engines one after the other, train two steps with each, and return what is held after each."""
    from tests.integrations.engine_jobs import B, config_of, make_engine, steps
    from tests.models import build

    held = []
    for seed in range(engines):
        model, make_batch = build("two_branch")
        sample = make_batch(B, seed)
        engine = make_engine(model, sample, config_of(block={"stages": RANKS, "verify": False}))
        steps(engine, [sample, make_batch(B, seed + 1)])
        engine.destroy()
        del engine, model
        held.append(Held.now())
    return held


def judge(name: str, ranks: list[list[Held]]) -> list[str]:
    """Print what each rank held, and return what of it grew."""
    wrong = []
    for rank, held in enumerate(ranks):
        first, last = held[len(held) // 4], held[-1]
        growth = last.rss / first.rss - 1.0
        most = {
            what: max(getattr(each, what) for each in held[len(held) // 4 :]) - getattr(first, what)
            for what in ("threads", "descriptors")
        }
        is_wrong = growth > MOST_GROWTH or any(more > 0 for more in most.values())
        line = (
            f"{name} rank {rank}: {first.rss / 1e6:.1f} MB after a quarter, {last.rss / 1e6:.1f} at the end "
            f"({100 * growth:+.2f} %); threads {first.threads}, at most {most['threads']:+d}; descriptors "
            f"{first.descriptors}, at most {most['descriptors']:+d}"
        )
        print(f"  {'WRONG' if is_wrong else 'ok   '} {line}", flush=True)
        wrong += [line] if is_wrong else []
    return wrong


def main(arguments: list[str]) -> int:
    """Run both; return 1 where anything grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak endurance")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=50)
    options = parser.parse_args(arguments)
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        parts: list[tuple[str, int, Callable[..., Any], tuple[Any, ...]]] = [
            ("steps", options.steps, train_long, (options.steps, directory)),
            ("engines", options.engines, make_many, (options.engines,)),
        ]
        for name, count, run, given in parts:
            if count:
                wrong += judge(f"{count} {name}", run_ranks(run, RANKS, *given, timeout_s=LIMIT_S))
    return int(bool(wrong))
