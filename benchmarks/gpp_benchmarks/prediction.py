"""The simulator against the clock: rehearsed plans, simulated again with the measured task and message times.

Sixteen different plans on two to eight ranks run with delays in place of compute; processes, messages and the
executor are real. A row compares the median measured iteration with the median simulated one, which is given the
time of every task, and the mean times of a message and of the host between two tasks, read off the same mini-batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gpp_benchmarks._emulated_graphs import (
    BACKWARD_US,
    FORWARD_US,
    branch_links,
    chain_links,
    emulated_plan,
    with_frozen_first,
    with_in_flight,
)
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.rehearse.measured_times import measure_times, predict_from
from gpp_plugin.rehearse.rehearsal import scale_times
from gpp_plugin.schedule.orders.gpipe import forward_only_stages
from gpp_plugin.simulate.predict import predict_iteration_us

LIMIT = 0.05
"""Largest difference of a simulated from a measured iteration."""
UNEVEN = (0.5, 1.0, 0.7, 1.3)
TABLE = ()
"""The table that is printed has every column (`gpp_plugin.report.rows_text`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=7, help="iterations of each plan (%(default)s)")
    parser.add_argument(
        "--scale-time", type=float, default=1.0, help="multiply 20 ms forwards, 40 ms backwards (%(default)s)"
    )
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="real-time priority while a contest runs, for a machine with other work (needs root)",
    )
    parser.add_argument("--plans", nargs="+", default=None, help="only plans whose names hold one of these")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a plan and the largest difference.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    if args.rounds < 1 or args.scale_time <= 0:
        raise ConfigError("--rounds and --scale-time must be above 0")
    by_ranks: dict[int, list[PipelinePlan]] = defaultdict(list)
    for plan in plans():
        if args.plans is None or any(part in plan.model for part in args.plans):
            by_ranks[plan.num_ranks].append(scale_times(plan, args.scale_time))
    if not by_ranks:
        raise ConfigError(f"--plans: none of {args.plans} is in {[plan.model for plan in plans()]}")
    rows = [row for num_ranks, found in sorted(by_ranks.items()) for row in _rows(args, found, num_ranks)]
    return {
        "rows": rows,
        "largest_difference": max(abs(row["difference"]) for row in rows),
        "limit": LIMIT,
    }


def _rows(args: argparse.Namespace, found: Sequence[PipelinePlan], num_ranks: int) -> list[dict[str, Any]]:
    from gpp_plugin.compare.alternated_benchmarks import Contest, run_contests

    seconds = sum(_planned_us(plan) for plan in found) / 1e6
    outcomes = run_contests(
        [Contest(name=plan.model, plans={"gpp": plan}, has_timelines=True) for plan in found],
        num_ranks=num_ranks,
        rounds=args.rounds,
        seconds=seconds,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
        is_real_time=args.real_time,
    )
    rows = []
    for plan in found:
        timelines = outcomes[plan.model].timelines["gpp"]
        times = measure_times(plan, timelines)
        measured = statistics.median(timeline.iteration_us for timeline in timelines)
        simulated = predict_from(plan, timelines)
        rows.append(
            {
                "plan": plan.model,
                "ranks": plan.num_ranks,
                "stages": len(plan.stages),
                "measured_ms": measured / 1e3,
                "simulated_ms": simulated / 1e3,
                "difference": simulated / measured - 1.0,
                "planned_ms": _planned_us(plan) / 1e3,
                "message_us": times.message_us,
                "host_us": statistics.median(times.host_us.values()),
            }
        )
    return rows


def _planned_us(plan: PipelinePlan) -> float:
    return predict_iteration_us(plan, forward_only_stages=forward_only_stages(plan))


def plans() -> list[PipelinePlan]:
    """Return the plans: shapes, degrees, micro-batches, schedules and uneven times."""
    uneven: dict[str, Any] = {
        "forward_us": [FORWARD_US * share for share in UNEVEN],
        "backward_us": [BACKWARD_US * share for share in UNEVEN],
    }
    chain = emulated_plan("chain of 4", chain_links(4), num_micro_batches=8)
    fan_in = [(0, 2), (1, 2), (2, 3)]
    encoder_decoder = [*chain_links(6), (2, 4), (2, 5)]
    return [
        emulated_plan("chain of 2", chain_links(2), num_micro_batches=8),
        chain,
        emulated_plan("chain of 4, uneven", chain_links(4), num_micro_batches=8, **uneven),
        _under(chain, "chain of 4, gpipe", schedule="gpipe"),
        _under(chain, "chain of 4, 2f2b", k=2),
        _under(chain, "chain of 4, greedy", schedule="greedy"),
        _under(chain, "chain of 4, zero bubble", schedule="zero_bubble"),
        _sliced(chain),
        with_frozen_first(emulated_plan("frozen branch", fan_in, num_micro_batches=8)),
        emulated_plan("chain of 8", chain_links(8), num_micro_batches=8),
        emulated_plan("two branches of 3", branch_links(2, 3, has_own_join=False), num_micro_batches=8),
        emulated_plan("fan-in of seven", branch_links(7, 1, has_own_join=True), num_micro_batches=8),
        emulated_plan("t5", encoder_decoder, num_micro_batches=8, message_bytes=1 << 18),
        emulated_plan("mixed degrees", fan_in, num_micro_batches=8, samples=6, degrees={0: 2, 1: 1, 2: 3, 3: 2}),
        emulated_plan("unequal b", fan_in, num_micro_batches=8, sizes={0: 4, 1: 1}, **uneven),
        emulated_plan(
            "unequal b, mixed degrees", fan_in, num_micro_batches=8, samples=4, sizes={0: 8, 1: 2},
            degrees={0: 4, 2: 2}, **uneven,
        ),
    ]  # fmt: skip


def _under(plan: PipelinePlan, name: str, **changes: Any) -> PipelinePlan:
    stages = tuple(dataclasses.replace(stage, **changes) for stage in plan.stages)
    return with_in_flight(dataclasses.replace(plan, model=name, stages=stages))


def _sliced(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with the first forward of every stage but the last in halves."""
    *others, last = plan.stages
    stages = (*(dataclasses.replace(stage, num_sliced=1) for stage in others), last)
    return dataclasses.replace(plan, model=f"{plan.model}, sliced", stages=stages)
