"""`gpp simulate`: predicts the timeline of a plan, task by task and message by message; or decoding, without a plan."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from gpp_plugin.api import format_timeline, load_plan, save, simulate, simulate_ahead, simulate_async
from gpp_plugin.commands.command_parser import add_width, axis_of
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import output_path, to_plain
from gpp_plugin.ir.step_cost import TENSOR_SUMS
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.plan.cluster_files import cluster_names, read_cluster
from gpp_plugin.plan.costs.estimate import prices_on
from gpp_plugin.report.plan_text import NO_COST, cost_cluster, cost_object, format_cost
from gpp_plugin.report.timeline_chart import summarize_timeline
from gpp_plugin.report.units import fill_text, format_ms, format_table, printable
from gpp_plugin.simulate.timeline_metrics import Overlap, timeline_overlap

BENCHMARKS = "gpp_benchmarks"


def _decoding() -> Any:
    """Return the simulator of decode serving, which is no part of this package."""
    return importlib.import_module(f"{BENCHMARKS}._decode_figures")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp simulate`."""
    parser.add_argument("plan", type=Path, nargs="?", help="a plan, as gpp plan writes it")
    parser.add_argument(
        "--cluster",
        help=f"links messages take: a file, or one of {', '.join(cluster_names())} (the plan's own)",
    )
    parser.add_argument("--out", type=output_path, help="write the timeline there")
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="also say what computing hides of messages, reductions, gathers, tensor sums and swap's copies",
    )
    add_width(parser)
    parser.add_argument(
        "--decode",
        action="store_true",
        help="no plan: decoding by data, tensor and cache parallelism, Figures 4.1 to 4.5 of the thesis",
    )
    if importlib.util.find_spec(BENCHMARKS) is not None:
        _decoding().add_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the predicted timeline.

    Raises:
        GppError: the plan cannot be read, has no predicted times, or its schedule is unsafe.
    """
    if args.decode:
        if args.plan is not None or args.cluster is not None or args.out is not None or args.overlap:
            raise ConfigError("--decode simulates no plan; leave PLAN, --cluster, --out and --overlap out")
        if importlib.util.find_spec(BENCHMARKS) is None:
            raise ConfigError(
                f"--decode: the simulator of decode serving is in {BENCHMARKS}, which is not installed; the wheel of "
                "gpp_plugin and `pip install -e .` of a checkout bring it"
            )
        found: dict[str, Any] = _decoding().run(args)
        return found
    if args.plan is None:
        raise ConfigError("give a plan, as gpp plan writes it, or --decode")
    if getattr(args, "figure", None) or getattr(args, "set", None):
        raise ConfigError("--figure and --set go with --decode")
    plan = load_plan(args.plan)
    # All zeros would simulate to an empty picture; a plan written by hand may lack times.
    if not any(stage.forward_us for stage in plan.stages):
        raise ConfigError(f"{args.plan}: its stages have no forward_us; make the plan with gpp plan")
    given = None if args.cluster is None else read_cluster(args.cluster, num_devices=plan.num_ranks)
    prices = prices_on(plan, given)
    if args.overlap and prices.cluster is None:
        raise ConfigError("--overlap needs --cluster: without links nothing takes time on its way")
    said, figures = "", dict[str, Any]()
    if plan.mode == "async":  # some mini-batches, from an empty pipeline to an empty one
        windows = simulate_async(plan, args.cluster)
        timeline, whole = windows.timeline, windows.plan
        names = ("num_windows", "steady_us", "fill_us", "drain_us")
        figures = {name: max(getattr(windows, name), 0) for name in names}
        said = (
            f"{windows.num_windows} mini-batches of an asynchronous plan: {format_ms(windows.steady_us)} ms each while "
            f"the pipeline is full, {format_ms(figures['fill_us'])} ms to fill it, {format_ms(figures['drain_us'])} ms "
            "to drain it"
        )
    else:
        timeline, whole = simulate(plan, args.cluster), plan
        ahead = simulate_ahead(plan, args.cluster)
        if ahead is not None:
            figures = {"look_ahead_us": ahead.steady_us}
            said = (
                f"frozen_prefetch: {format_ms(ahead.steady_us)} ms a mini-batch, not {format_ms(ahead.whole_us)} ms, "
                f"while the frozen stages {printable(', '.join(ahead.stages))} run the forwards of the next one"
            )
    print(format_timeline(timeline, plan, **axis_of(args)))
    if said:
        print(fill_text(said, indent="  "))
    if prices is (plan.cost and plan.cost.prices):
        print(format_cost(plan))
    elif plan.cost is not None:
        where = prices.cluster.name if prices.cluster is not None else "no links"
        made = f"on {cost_cluster(plan.cost)}, for which the plan was made, a step takes"
        print(fill_text(f"simulated on {where}; {made} {format_ms(plan.cost.step_us)} ms", indent="  "))
    else:
        print(NO_COST)
    if args.out is not None:
        save(timeline, args.out)
        print(f"timeline written to {args.out}")
    summary = dataclasses.asdict(summarize_timeline(timeline)) | figures
    rows = [to_plain(event) for event in timeline.events]
    overlap = {} if not args.overlap or prices.cluster is None else _overlap(whole, timeline, prices.cluster)
    return {"rows": rows, "summary": summary, "cost": cost_object(plan), **overlap}


def _overlap(plan: PipelinePlan, timeline: Timeline, cluster: Cluster) -> dict[str, Any]:
    """Print what is hidden behind computing, and return it."""
    found = timeline_overlap(plan, timeline, cluster)
    # sums of tensor ranks are inside of tasks: the ledger has them, of the rank that computes most
    for term in () if plan.cost is None else plan.cost.collectives:
        if term.kind == TENSOR_SUMS and term.total_us > 0:
            own = Overlap(kind=term.kind, count=0, travel_us=term.total_us, hidden_us=term.hidden_us)
            found = (*found, own)
    rows = []
    for each in found:
        times = [format_ms(us) for us in (each.travel_us, each.hidden_us)]
        rows.append([each.kind, str(each.count or "one rank"), *times, f"{each.share:.1%}"])
    print(format_table(["on its way", "number", "ms", "ms hidden", "share"], rows, left=1))
    return {"overlap": [{**to_plain(each), "share": each.share} for each in found]}
