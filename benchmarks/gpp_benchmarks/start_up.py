"""How long a job takes until it trains: import, capture, profile, plan, build, the first step; and where the time goes.

Two jobs of four ranks on this machine: the demo's CLIP (four stages, three branches of work) and a T5 of six layers in
four stages. Every rank imports what a training script imports, calls `deepspeed.initialize` and trains three steps. A
third one plans LLaVA-7B for eight GPUs from its configuration, on meta tensors, on one rank: from capture to plan.
Seconds are rank 0's, medians over the rounds: by the clock, and those that it worked itself, which another job on the
machine changes less; so is the most memory that it had. What `initialize` and the first step spend their time on is
sampled: a timer looks a hundred times a second in which package rank 0 is; a wait for another rank counts as waiting,
whatever it waits for. Profiles are not kept: every round profiles anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from gpp_benchmarks._start_up_ranks import PLANNED
from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import run_ranks

JOBS = ("clip", "t5", *PLANNED)
NUM_RANKS = 4
MOST_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS, help="what to start (all)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each job (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a job: seconds of every step towards training, and their parts."""
    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds}: give at least 1")
    rows = []
    for job in args.jobs:
        starts = [_start(job) for _ in range(args.rounds)]
        row = {"job": job, **_medians(starts)}
        print(_text(row), flush=True)
        rows.append(row)
    return {"rows": rows}


def _start(job: str) -> dict[str, Any]:
    """Return what rank 0 of one job measured."""
    found: dict[str, Any] = {}
    for event in run_ranks(
        "gpp_benchmarks._start_up_ranks",
        [json.dumps({"job": job})],
        num_ranks=1 if job in PLANNED else NUM_RANKS,
        timeout_s=MOST_SECONDS,
        environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    ):
        found = event["found"]
    return found


def _medians(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure; a part that a round did not see took no time there."""

    def medians(what: str) -> dict[str, float]:
        names = dict.fromkeys(name for start in starts for name in start[what])
        return {name: statistics.median(start[what].get(name, 0.0) for start in starts) for name in names}

    def total(steps: dict[str, float]) -> float:
        return sum(seconds for name, seconds in steps.items() if name != "third_step")

    steps, busy = medians("seconds"), medians("busy")
    return {
        "total_s": total(steps),
        "busy_s": total(busy),
        "peak_mb": statistics.median(start["peak_mb"] for start in starts),
        "seconds": steps,
        "busy_seconds": busy,
        "parts_s": medians("parts"),
        "busy_parts_s": medians("busy_parts"),
    }


def _text(row: dict[str, Any]) -> str:
    def listed(clock: dict[str, float], busy: dict[str, float]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {s:.2f} ({busy[name]:.2f})" for name, s in clock.items())

    spent = dict(sorted(row["parts_s"].items(), key=lambda item: -item[1]))
    what = "plan" if row["job"] in PLANNED else "end of the first step"
    return (
        f"{row['job']}: {row['total_s']:.2f} s to the {what}, of which rank 0 works {row['busy_s']:.2f}; "
        f"it has at most {row['peak_mb']:.0f} MB\n  {listed(row['seconds'], row['busy_seconds'])}\n"
        f"  of what follows the model: {listed(spent, row['busy_parts_s'])}"
    )
