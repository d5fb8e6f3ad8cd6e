"""`gpp plan`: makes a plan for a model, without its weights, on a cluster that need not be there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from gpp_plugin.api import USUAL_LENGTH, format_plan, make_request, plan_for, save
from gpp_plugin.commands.command_parser import (
    add_keys,
    add_size,
    add_width,
    columns_of,
    command_names,
    list_of,
    plan_choices,
    plan_keys,
    read_sizes,
)
from gpp_plugin.compare.compare_settings import CHAIN, GRAPH, PLAIN, STOCK
from gpp_plugin.compare.simulated import plain_line, simulate_mode, simulated_row
from gpp_plugin.config.block import PlanOptions
from gpp_plugin.config.key_names import name_of, place_of, setting_of, use_names
from gpp_plugin.config.reader import read_options
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import Alternative, PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, output_path, to_plain
from gpp_plugin.ir.tensors import element_bytes
from gpp_plugin.library.named_models import config_names, config_path, layer_shape
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.baselines.data_parallel import PLAIN as PLAIN_PLANNER
from gpp_plugin.plan.baselines.stock_chain import STOCK as STOCK_PLANNER
from gpp_plugin.plan.cluster_files import cluster_names
from gpp_plugin.plan.costs.long_context import LayerShape, on_paper
from gpp_plugin.plan.edge_transports import NATIVE
from gpp_plugin.plan.memory.fitting import memory_advice
from gpp_plugin.plan.request import BAND, STEP_ERROR, PlanRequest, limit_gb
from gpp_plugin.report.plan_text import (
    cost_object,
    edge_rows,
    format_breakdown,
    format_edges,
    format_on_paper,
    rank_table,
    stage_rows,
)
from gpp_plugin.report.progress import searching, step
from gpp_plugin.report.units import fill_text, format_bytes, format_table, printable

LONG_SECONDS = 5.0
"""Planning that takes longer is not done again for a chain, unless `--against` names it."""
CHAINED = ("auto", "graphpipe")
"""Planners that make the best chain where they made the plan; `auto` makes it for others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp plan`."""
    parser.add_argument(
        "model",
        help="a HuggingFace config.json or its directory, a configuration that comes with gpp "
        f"({', '.join(config_names())}), or a library model ({', '.join(MODELS)})",
    )
    add_keys(parser, plan_keys(), names={"cluster": cluster_names()})
    parser.add_argument("--memory-report", action="store_true", help="show what fills each stage's memory")
    add_size(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="show too how the plan was found: stages that were not taken and why, schedules, micro-batches in flight",
    )
    parser.add_argument(
        "--against",
        type=list_of([PLAIN, STOCK, CHAIN, "none"]),
        metavar="A,...",
        help=f"baselines, simulated: {PLAIN}, data parallelism without a pipeline, of any ZeRO stage; {STOCK}, "
        f"DeepSpeed's own 1F1B; {CHAIN}, the best that our planner makes of the model in a line; or none "
        f"({PLAIN},{STOCK},{CHAIN}; without {CHAIN} where planning has taken longer than {LONG_SECONDS:g} s)",
    )
    parser.add_argument(
        "--on-paper",
        action="store_true",
        help="show what is not built: context parallelism (ring attention) and expert parallelism of a HuggingFace "
        "model's layer, by ranks, beside tensor ranks",
    )
    parser.add_argument("--out", type=output_path, help="write the plan there")
    add_width(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the plan and what it is predicted to cost.

    Raises:
        ConfigError: an option is wrong.
        PlanError: no plan fulfils the options.
    """
    with use_names(command_names(args)):
        return _run(args, read_options(args.keys))


def _run(args: argparse.Namespace, options: PlanOptions) -> dict[str, Any]:
    # The order in which a job plans too, so that a plan made here is the one that training would make
    # from the same costs: partition (planner), then order and slices (schedule_plan), then transports,
    # then what fills memory.
    #
    #   model --capture or library--> graph, profile --planner--> stages --schedule--> plan --> text, file
    #
    # A HuggingFace model is built on the meta device and its costs are analytic, of the cluster's first
    # device: no weights, no such device, and about the time of one export.
    with step("capture"):
        layer = _layer(args.model, options) if args.on_paper else None
        request = _request(args)
    start = time.perf_counter()
    with step("plan") as progress, searching(progress.note):
        plan = plan_for(request, **plan_choices(options))
    seconds = time.perf_counter() - start
    against, lines = _against(args.against, options, request, plan, seconds)
    if first := plain_line(against):
        print(fill_text(first) + "\n")
    print(format_plan(plan, width=columns_of(args), is_explained=args.explain))
    if lines:
        print("\n" + "\n".join(lines))
    if options.p2p != NATIVE and plan.edges:
        print(f"\n{format_edges(plan, options.p2p)}")
    parts = plan.memory
    if args.memory_report:
        print(f"\n{format_breakdown(parts)}\n\n{format_table(*rank_table(plan))}")
        for line in memory_advice(plan, zero_stage=plan.zero_stage, allowed=request.memory_optimization):
            print(fill_text(printable(line), indent="  "))
    papers = [] if layer is None else _on_paper(layer, request)
    # 64 samples in 80,000 us are 800 a second.
    throughput = plan.mini_batch / plan.iteration_us * 1e6 if plan.iteration_us else 0.0
    dtype = request.cluster.devices[0].dtype
    whose = "" if options.dtype is not None else f" (the cluster's; {name_of('dtype')} says another)"
    print()
    print(
        fill_text(
            f"{len(request.graph.blocks)} blocks planned on {request.cluster.name} in {seconds:.2f} s; costs: "
            f"{request.profile.source}, of {request.profile.device} in {dtype}{whose}; "
            f"{throughput:.1f} samples/s predicted"
        )
    )
    chosen = f"; of plans within {BAND:.1%} of the shortest the simplest is taken" if request.band else ""
    print(fill_text(f"predicted steps are off by up to about {STEP_ERROR:.0%} (gpp bench published){chosen}"))
    if args.out is not None:
        save(plan, args.out)
        print(f"plan written to {args.out}")
    return {
        "rows": stage_rows(plan),
        "against": against,
        "alternatives": [to_plain(each) for each in plan.alternatives],
        "edges": edge_rows(plan, options.p2p),
        "model": plan.model,
        "planner": plan.planner,
        "plan": fingerprint(plan),
        "num_stages": len(plan.stages),
        "depth": plan.depth,
        "num_ranks": plan.num_ranks,
        "iteration_us": plan.iteration_us,
        "error": STEP_ERROR,
        "band": request.band,
        "dtype": dtype,
        "mini_batch": plan.mini_batch,
        "loss_unit": plan.loss_unit,
        "seconds": seconds,
        "samples_per_s": throughput,
        "memory": [{**to_plain(part), "total": part.total} for part in parts],
        "cost": cost_object(plan),
        "on_paper": papers,
    }


def _layer(model: str, options: PlanOptions) -> LayerShape:
    """Return a layer of the model at its longest text.

    Raises:
        ConfigError: nothing is known of the model's layers.
    """
    if model in MODELS:
        raise ConfigError(f"--on-paper: is for HuggingFace models; {model} is a library model")
    longest = USUAL_LENGTH if options.lengths is None else options.lengths.max
    assert isinstance(longest, int)
    return layer_shape(config_path(model), length=longest)


def _on_paper(layer: LayerShape, request: PlanRequest) -> list[dict[str, Any]]:
    """Print and return what context and expert parallelism would take on 2, 4, 8, ... ranks that one link joins."""
    device, link = request.cluster.devices[0], request.cluster.links[0]
    ranks = [2**power for power in range(1, min(request.num_ranks, link.span).bit_length())]
    rows = on_paper(layer, ranks, device, link, element_bytes=element_bytes(device.dtype))
    print(f"\n{format_on_paper(layer, rows)}")
    return [to_plain(row) for row in rows]


def _against(
    modes: Sequence[str] | None,
    options: PlanOptions,
    request: PlanRequest,
    plan: PipelinePlan,
    seconds: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows of the baselines, the plan last, and the lines that show them.

    Args:
        modes: the baselines; None where the user leaves them to us.
    """
    # In mode async a step is another thing, and a plan of a single rank, or of DeepSpeed's own, has nothing beside it.
    if plan.mode == "async" or plan.planner == STOCK_PLANNER or request.num_ranks == 1:
        return [], []
    has_chain = options.planner in CHAINED
    is_long = modes is None and has_chain and seconds > LONG_SECONDS
    if modes is None:
        modes = [PLAIN, STOCK] if is_long or not has_chain else [PLAIN, STOCK, CHAIN]
    modes = [mode for mode in modes if mode != "none"]
    if not modes:
        return [], []

    def make_chain(line: PlanRequest) -> PipelinePlan:
        # a chain of another planner's is no best one
        planner = options.planner if has_chain else "auto"
        schedule = options.schedule if has_chain else "auto"
        return plan_for(line, planner=planner, schedule=schedule, slicing=options.slicing)

    rows = []
    with step("plan the baselines") as progress, searching(progress.note):
        for mode in modes:
            progress.note(mode)
            rows.append(simulate_mode(mode, request, make_chain))
    rows.append(simulated_row(GRAPH, plan, request))
    lines = [format_against(rows, plan.alternatives)]
    lines += [
        fill_text(f"{row['mode']} cannot run this: {row['refused']}") for row in rows if "refused" in row
    ]
    if is_long:
        lines.append(f"(the best chain takes as long to plan again: --against {PLAIN},{STOCK},{CHAIN})")
    return rows, lines


def format_against(rows: Sequence[dict[str, Any]], alternatives: Sequence[Alternative] = ()) -> str:
    """Return the table of simulated modes: how many times as fast this plan, the last row, is as each.

    Args:
        alternatives: of this plan, which follow it.
    """
    us = rows[-1]["iteration_ms"]
    lines = []
    shown = (row for mode in rows for row in (mode, mode.get("open")) if row is not None)
    for row in shown:
        name = {
            PLAIN: (row.get("what") or PLAIN_PLANNER) + (f" (with {row['with']})" if row.get("with") else ""),
            STOCK: "stock DeepSpeed 1F1B",
            CHAIN: "the best chain",
            GRAPH: "this plan",
        }[row["mode"]]
        if "refused" in row:
            lines.append([name, *["-"] * 4])
            continue
        fits = "" if row["fits"] else " (too much)"
        ratio = "" if row["mode"] == GRAPH else f"{row['iteration_ms'] / us:.2f} x as fast" if us else "-"
        step_ms = f"{row['iteration_ms']:.1f}"
        lines.append([name, str(row["stages"]), step_ms, format_bytes(row["peak_bytes"]) + fits, ratio])
    least = rows[-1].get("peak_bytes", 0)
    for each in alternatives:
        is_smaller, least = each.peak_bytes < least, min(each.peak_bytes, least)
        way = (
            setting_of("memory.limit_gb", float(limit_gb(each.peak_bytes)))
            if is_smaller
            else setting_of("stages", each.num_stages)
        )
        step_ms, ratio = f"{each.iteration_us / 1e3:.1f}", f"{each.iteration_us / 1e3 / us:.2f} x as fast"
        lines.append([f"or, {way}", str(each.num_stages), step_ms, format_bytes(each.peak_bytes), ratio])
    return format_table(["simulated", "stages", "ms a step", "fullest rank", "this plan is"], lines)


def _request(args: argparse.Namespace) -> PlanRequest:
    """Return the input of planners.

    Raises:
        ConfigError: an option is wrong.
    """
    if args.size and args.model not in MODELS:
        raise ConfigError("--size: is for library models; edit the HuggingFace configuration instead")
    lengths = [path for path in args.keys if path.startswith("lengths")]
    if args.model in MODELS and lengths:
        raise ConfigError(
            f"{place_of(lengths[0])}: is for HuggingFace models; {args.model} has sizes: --size NAME=VALUE"
        )
    return make_request(args.model, sizes=read_sizes(args.size), **args.keys)
