"""Schedules with emulated compute: iteration times beside the bound, DeepSpeed and torch.

Every task is a delay (forward 20 ms, backward 40 ms), so that ranks overlap on any number of cores; processes,
messages and the executor are real. The optimizer step is left out for all runtimes. Parts of it (--what):

  chain        a plain chain at 4 and at 8 ranks, beside DeepSpeed's PipelineEngine and torch's Schedule1F1B
  graphs       multi-branch graphs at 8 ranks, beside stock DeepSpeed on the same stages in a line
  slicing      AutoPipe's sliced warm-up: start-up and iteration, measured and simulated
  zero-bubble  1F1B and zero bubble on a five-stage diamond: idle over planned compute
  interleaved  a chain on 8 ranks with 1, 2 and 4 stages a rank, which share out these delays
  colocated    a vision tower on ranks of its own, and on those of the language model it feeds

``simulated_speedup`` is of the plans' times alone; ``calibrated_speedup`` grants both runtimes the host time they
had on the plain chain of eight ranks in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpp_benchmarks._emulated_graphs import (
    bound_us,
    branch_links,
    chain_links,
    emulated_plan,
    linear_bytes,
    linear_plan,
)
from gpp_benchmarks._options import add_choices, add_option, add_real_time
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.report.rows_text import BARS, RowsChart

PARTS = ("chain", "graphs", "slicing", "zero-bubble", "interleaved", "colocated")
MICRO_BATCHES_PER_STAGE = 2
GRAPH_RANKS = 8
TABLE = ()
"""The table that is printed has every column (`gpp_plugin.report.rows_text`)."""
CHART = RowsChart(
    kind=BARS, x=("graph", "ranks"), y="iteration_ms", series=("runtime",), y_label="ms a mini-batch"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--what", PARTS, "parts to run (all)")
    add_option(parser, "--rounds", 7, "iterations of each contender")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8], help="lengths of the chain (4 8)")
    add_option(parser, "--forward-ms", 20.0, "of every stage")
    add_option(parser, "--backward-ms", 40.0, "of every stage")
    add_real_time(parser, "a contest runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a graph, runtime and number of ranks; times are medians of alternated rounds.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    if args.rounds < 1 or min(args.ranks) < 2 or min(args.forward_ms, args.backward_ms) <= 0:
        raise ConfigError("--rounds, --forward-ms and --backward-ms must be above 0, --ranks at least 2")
    from gpp_benchmarks._schedule_orders import (
        colocated_rows,
        interleaved_rows,
        slicing_rows,
        zero_bubble_rows,
    )
    from gpp_plugin.compare.alternated_benchmarks import run_alternated

    race = functools.partial(run_alternated, rounds=args.rounds, tell=_tell, is_real_time=args.real_time)
    times = {"forward_us": args.forward_ms * 1e3, "backward_us": args.backward_ms * 1e3}
    rows: list[dict[str, Any]] = []
    if "chain" in args.what:
        for num_ranks in args.ranks:
            count = MICRO_BATCHES_PER_STAGE * num_ranks
            chain = emulated_plan("chain", chain_links(num_ranks), num_micro_batches=count, **times)
            rows += _race([chain], num_ranks, ("deepspeed", "torch_1f1b"), race)
    if "graphs" in args.what:
        rows += _calibrated(_race(graphs(times), GRAPH_RANKS, ("deepspeed",), race), rows)
    of_orders = {
        "slicing": slicing_rows,
        "zero-bubble": zero_bubble_rows,
        "interleaved": interleaved_rows,
        "colocated": colocated_rows,
    }
    for part, rows_of in of_orders.items():
        if part in args.what:
            rows += rows_of(race, **times)
    return {"rows": rows}


def graphs(times: Mapping[str, Any]) -> list[PipelinePlan]:
    """Return the multi-branch graphs on eight ranks, with twice as many micro-batches as the chain is deep."""

    def plan(name: str, links: Sequence[tuple[int, int]], **options: Any) -> PipelinePlan:
        count = MICRO_BATCHES_PER_STAGE * GRAPH_RANKS
        return emulated_plan(name, links, num_micro_batches=count, **times, **options)

    joint = [*chain_links(3), *chain_links(3, 3), (2, 6), (5, 6)]
    cross_attention = [(3, decoder) for decoder in (5, 6, 7)]
    return [
        plan("two branches of 4", branch_links(2, 4, has_own_join=False)),
        # the last layers of both branches on both of their ranks, half of the samples each
        plan("two branches of 4, joint end", joint, degrees={6: 2}),
        plan("seven branches", branch_links(7, 1, has_own_join=True)),
        plan("mmt 4 x 2", branch_links(4, 2, has_own_join=False)),
        plan("t5", [*chain_links(8), *cross_attention]),
    ]


def _race(
    plans: Sequence[PipelinePlan], num_ranks: int, peers: tuple[str, ...], race: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Run plans and, in turn with each, its stages in a line on other runtimes; return their rows."""
    from gpp_plugin.compare.alternated_benchmarks import AlternatedBenchmark, Chain

    contests = []
    for plan in plans:
        first = plan.stages[0]
        stock = Chain(
            forward_us=(first.forward_us,) * num_ranks,
            backward_us=(first.backward_us,) * num_ranks,
            boundary_bytes=linear_bytes(plan),
            num_micro_batches=plan.num_micro_batches(0),
        )
        contests.append(
            AlternatedBenchmark(name=plan.model, plans={"gpp": plan}, chain=stock, runtimes=peers)
        )
    seconds = sum((1 + len(peers)) * bound_us(linear_plan(plan)) / 1e6 for plan in plans)
    outcomes = race(contests, num_ranks=num_ranks, seconds=seconds)
    return [row for plan in plans for row in _race_rows(plan, outcomes[plan.model].times_ms)]


def _race_rows(plan: PipelinePlan, times_ms: dict[str, list[float]]) -> list[dict[str, Any]]:
    from gpp_plugin.simulate.predict import predict_iteration_us

    stock = linear_plan(plan)
    simulated = {"gpp": predict_iteration_us(plan)}
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    stock_us = predict_iteration_us(stock)
    rows = []
    for name, times in times_ms.items():
        run_as = plan if name == "gpp" else stock
        bound_ms = bound_us(run_as) / 1e3
        simulated_ms = simulated.get(name, stock_us) / 1e3
        rows.append(
            {
                "graph": plan.model,
                "runtime": name,
                "ranks": plan.num_ranks,
                "depth": run_as.depth,
                "micro_batches": plan.num_micro_batches(0),
                "iteration_ms": medians[name],
                "fastest_ms": min(times),
                "bound_ms": bound_ms,
                "over_bound": medians[name] / bound_ms,
                "stock_ms": medians["deepspeed"],
                "speedup": medians["deepspeed"] / medians[name],
                "simulated_ms": simulated_ms,
                "simulated_speedup": stock_us / 1e3 / simulated_ms,
            }
        )
    return rows


def _calibrated(rows: list[dict[str, Any]], chain_rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the speed-up expected if each runtime loses on a graph what it lost on the plain chain of the same run.

    A simulation knows nothing of a runtime's host time; that of the peer makes a measured speed-up larger.
    """
    lost = {r["runtime"]: r["over_bound"] for r in chain_rows if r["ranks"] == GRAPH_RANKS}
    if not {"gpp", "deepspeed"} <= lost.keys():
        return rows
    return [
        {**row, "calibrated_speedup": row["simulated_speedup"] * lost["deepspeed"] / lost[row["runtime"]]}
        for row in rows
    ]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
