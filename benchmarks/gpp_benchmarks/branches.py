"""Three branches into one stage, with emulated compute: iteration times beside the bound and beside the simulator.

Three encoders of equal depth feed a language stage, one rank each, 1F1B over gloo; every task is a delay of 40 ms,
and processes, messages and the executor are real. Once every task takes that long, and once a time drawn
beforehand for each task, evenly between 20 % and 180 % of it: then the simulator, given the same program, the same
draws and messages that take no time, says how long it should take. The same graphs on megatron-core's multi-module
communicator run in turn with ours, under Megatron's 1F1B. The optimizer step is left out.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from gpp_benchmarks._emulated_graphs import bound_us, branch_links, emulated_plan
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.simulate.predict import predict_iteration_us

SYSTEMS = ("gpp", "megatron")
LARGEST_OVER_BOUND = 1.04
LARGEST_DIFFERENCE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--micro-batches", nargs="+", type=int, default=[8, 16], help="of an iteration (8 and 16)"
    )
    parser.add_argument("--branches", type=int, default=3, help="encoders (%(default)s)")
    parser.add_argument("--forward-ms", type=float, default=40.0, help="of every stage (%(default)s)")
    parser.add_argument("--backward-ms", type=float, default=40.0, help="of every stage (%(default)s)")
    parser.add_argument(
        "--jitter", type=float, default=0.8, help="a drawn time is off by at most this share (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="iterations of each contender (%(default)s)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(all)")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="real-time priority while a contest runs, for a machine with other work (needs root)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a system, number of micro-batches and kind of times, and whether ours keeps what is wanted.

    Raises:
        ConfigError: an option is wrong, or megatron-core is not installed.
        RuntimeFailure: a rank failed.
    """
    _check(args)
    from gpp_plugin.compare.alternated_benchmarks import Contest, run_contests

    cases = [_case(args, count) for count in args.micro_batches]
    contests = [
        Contest(
            name=f"{plan.model}, {count} micro-batches",
            plans={"even": plan, "drawn": plan},
            durations={"drawn": times},
            megatron=("even", "drawn") if "megatron" in args.systems else (),
        )
        for count, (plan, times) in zip(args.micro_batches, cases, strict=True)
    ]
    outcomes = run_contests(
        contests,
        num_ranks=args.branches + 1,
        rounds=args.rounds,
        seconds=2 * len(args.systems) * sum(bound_us(plan) for plan, _ in cases) / 1e6,
        tell=functools.partial(print, file=sys.stderr, flush=True),
        is_real_time=args.real_time,
    )
    rows = [
        row
        for contest, (plan, times) in zip(contests, cases, strict=True)
        for row in _rows(plan, times, outcomes[contest.name].times_ms)
    ]
    for row in rows:
        print(_line(row))
    verdicts = [_verdict(row) for row in rows if row["system"] == "gpp"]
    return {"rows": rows, "verdicts": verdicts}


def _check(args: argparse.Namespace) -> None:
    if (
        min(args.rounds, args.branches, *args.micro_batches) < 1
        or min(args.forward_ms, args.backward_ms) <= 0
    ):
        raise ConfigError("--rounds, --branches and --micro-batches must be at least 1, times above 0")
    if not 0 <= args.jitter < 1:
        raise ConfigError(f"--jitter {args.jitter:g}: give a share of at least 0 and below 1")
    if "gpp" not in args.systems:
        raise ConfigError("--systems megatron: add gpp, which is compared with")
    if "megatron" in args.systems:
        import torch

        from gpp_plugin.integrations.megatron.p2p import check_megatron_p2p

        check_megatron_p2p(torch.device("cpu"))


def _case(args: argparse.Namespace, num_micro_batches: int) -> tuple[PipelinePlan, dict[Any, float]]:
    plan = emulated_plan(
        f"{args.branches} branches",
        branch_links(args.branches, 1, has_own_join=True),
        num_micro_batches=num_micro_batches,
        forward_us=args.forward_ms * 1e3,
        backward_us=args.backward_ms * 1e3,
    )
    return plan, draw_times(plan, jitter=args.jitter, seed=args.seed)


def draw_times(plan: PipelinePlan, *, jitter: float, seed: int) -> dict[tuple[int, TaskKind, int], float]:
    """Return microseconds for every task, evenly drawn from 1 - ``jitter`` to 1 + ``jitter`` times the plan's."""
    draws = random.Random(seed)
    return {
        (index, kind, micro_batch): usual * draws.uniform(1 - jitter, 1 + jitter)
        for index, stage in enumerate(plan.stages)
        for kind, usual in ((TaskKind.FORWARD, stage.forward_us), (TaskKind.BACKWARD, stage.backward_us))
        for micro_batch in range(plan.num_micro_batches(index))
    }


def _rows(
    plan: PipelinePlan, times: Mapping[Any, float], times_ms: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    simulated_ms = {
        "even": predict_iteration_us(plan) / 1e3,
        "drawn": predict_iteration_us(plan, durations=times) / 1e3,
    }
    rows = []
    for contender, found in times_ms.items():
        system, _, kind = contender.rpartition(" ")
        iteration_ms = statistics.median(found)
        rows.append(
            {
                "graph": plan.model,
                "system": system or "gpp",
                "times": kind,
                "micro_batches": plan.num_micro_batches(0),
                "iteration_ms": iteration_ms,
                "fastest_ms": min(found),
                "slowest_ms": max(found),
                "bound_ms": bound_us(plan) / 1e3 if kind == "even" else None,
                "over_bound": iteration_ms * 1e3 / bound_us(plan) if kind == "even" else None,
                "simulated_ms": simulated_ms[kind],
                "over_simulated": iteration_ms / simulated_ms[kind],
                "over_gpp": iteration_ms / statistics.median(times_ms[kind]),
            }
        )
    return rows


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    is_even = row["times"] == "even"
    value = row["over_bound"] - 1.0 if is_even else abs(row["over_simulated"] - 1.0)
    limit = LARGEST_OVER_BOUND - 1.0 if is_even else LARGEST_DIFFERENCE
    return {
        "micro_batches": row["micro_batches"],
        "what": "over the bound" if is_even else "from the simulation",
        "value": value,
        "limit": limit,
        "holds": value <= limit,
    }


def _line(row: Mapping[str, Any]) -> str:
    reference = "bound" if row["times"] == "even" else "simulated"
    return (
        f"{row['micro_batches']:>3} micro-batches, {row['times']:<5} times, {row['system']:<8} "
        f"{row['iteration_ms']:8.1f} ms ({row['fastest_ms']:.1f} to {row['slowest_ms']:.1f}), "
        f"{reference} {row[reference + '_ms']:.1f}: {row['iteration_ms'] / row[reference + '_ms']:.3f} x; "
        f"{row['over_gpp']:.3f} x gpp"
    )
