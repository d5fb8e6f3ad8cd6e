"""Frozen branches that run ahead: mini-batches with and without, in turn, on emulated stages, against the simulation.

A frozen tower stands before trained stages. Processes, messages and the executor are real, compute is delays. Without
look-ahead every mini-batch begins with the tower alone; with it the tower runs the next one meanwhile. A row
has the medians of both, how much faster that is, and what the simulation says.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan, with_frozen_first
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.rehearse.rehearsal import make_ahead, scale_times
from gpp_plugin.simulate.async_prediction import predict_ahead

TABLE = ()
"""The table that is printed has every column (`gpp_plugin.report.rows_text`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=7, help="mini-batches of each kind (%(default)s)")
    parser.add_argument(
        "--scale-time", type=float, default=1.0, help="multiply 20 ms forwards, 40 ms backwards (%(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="stages, a rank each (%(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a plan.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    if args.rounds < 1 or args.scale_time <= 0 or min(args.ranks) < 2:
        raise ConfigError("--rounds and --scale-time must be above 0, --ranks at least 2")
    return {"rows": [row for num_ranks in args.ranks for row in _rows(args, num_ranks)]}


def plans(num_ranks: int) -> list[PipelinePlan]:
    """Return chains whose first stage is frozen: as long as the others' forwards, and as their whole micro-batches."""
    links = chain_links(num_ranks)
    found = []
    for name, forward_us in (("short tower", 20e3), ("long tower", 60e3)):
        times = [forward_us, *[20e3] * (num_ranks - 1)]
        for count in (4, 8):
            plan = emulated_plan(
                f"{name}, {num_ranks} stages, {count} micro-batches",
                links,
                num_micro_batches=count,
                forward_us=times,
            )
            found.append(with_frozen_first(plan))
    return found


def _rows(args: argparse.Namespace, num_ranks: int) -> list[dict[str, Any]]:
    from gpp_plugin.compare.alternated_benchmarks import Contest, run_contests

    found = [scale_times(plan, args.scale_time) for plan in plans(num_ranks)]
    predicted = [predict_ahead(plan) for plan in found]
    for plan in found:
        make_ahead(plan)  # proven before a process starts
    outcomes = run_contests(
        [Contest(name=p.model, plans={"whole": p, "ahead": p}, ahead=("ahead",)) for p in found],
        num_ranks=num_ranks,
        rounds=args.rounds,
        seconds=sum(p.whole_us + p.steady_us for p in predicted if p is not None) / 1e6,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    rows = []
    for plan, times in zip(found, predicted, strict=True):
        assert times is not None, "the first stage is frozen"
        whole, ahead = (statistics.median(outcomes[plan.model].times_ms[name]) for name in ("whole", "ahead"))
        rows.append(
            {
                "plan": plan.model,
                "whole_ms": whole,
                "ahead_ms": ahead,
                "faster": whole / ahead,
                "simulated": times.whole_us / times.steady_us,
            }
        )
    return rows
