"""Predicted throughput of every planner's plans: the shape of GraphPipe's Figures 6, 7 and 9 and Table A.3.

Baselines are run as the systems they stand for run them: as a chain, each stage after the one before it
(`plan.baselines.chain_costs`). They have our cost of links, our micro-batch sizes and our micro-batches in flight.
Their stages are exchanged between nodes as ours are (`plan.machines.exchanges`). ``throughput_as_graph`` is what their
stages reach in our runtime, without that order; it is None where the model itself was put in a line. Two rows are ours
with less. ``chain`` is what `auto` makes of the model put in a line (`plan.baselines.best_chain`). ``one-size`` is
what it makes of the graph with the best single micro-batch size for all stages. So three columns say what ours gains:

    over baseline   over the best plan of others' planners
    over chain      over the best chain of our own tools: what the graph alone is worth
    over one size   over ours without a micro-batch size of its own for each stage

With ``--share-ranks`` ours, chains as well, may also interleave stages and put branches on the ranks of others
(`plan.refine`), where that is shorter, under 1F1B like all rows. ``uniform``, which is Megatron's, may interleave as
Megatron does (arXiv 2104.04473, section 2.2), by the same search; the other baselines know neither. A rival that found
no plan in time is named: the best of the others is not the best.

Times follow the efficiency curve of `library.analytic_models` (tile and wave quantisation), the links those of the
cluster description.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gpp_benchmarks._options import add_option
from gpp_benchmarks._paper import PAPER_DEVICES, PAPER_MODELS, paper_request, searched
from gpp_plugin.compare.simulated import best_chain, block_orders, in_order
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.baselines.chain_costs import as_sequential
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.heterogeneous_devices import exchange_stages
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, batch_rules
from gpp_plugin.report.rows_text import LINES, RowsChart, format_rows

OURS = ("graphpipe", "auto")
BASELINES = ("uniform", "pipedream", "piper", "dapple")
JUDGES_GRAPHS = ("uniform",)
"""Baselines that weigh their candidates as graphs; they are asked about the model in a line."""
INTERLEAVES = ("uniform",)
"""Baselines that may hold several stages a rank with `--share-ranks`."""
CHAIN, ONE_SIZE = "chain", "one-size"
FIGURES = ("6", "7", "7-right", "9", "A.3")
RATIOS = ("over_best_baseline", "over_best_chain", "over_one_size")
EFFICIENCY = (
    "a matrix product's share of the device's peak by its tiles: partly filled tiles and the last, partly filled wave "
    "over the processors cost as whole ones (NVIDIA, Matrix Multiplication Background User's Guide, tile and wave "
    "quantization; library/analytic_models.py), times the device's efficiency in the cluster description, plus its "
    "launch time"
)
"""Where the times of small micro-batches come from."""
PAPER_AT_32 = (1.25, 1.61)
PAPER_AT_EQUAL_MICRO_BATCH = (1.12, 1.40)
SIZES_OF_FIGURE_7 = (1, 2, 4, 8, 16)
BEHIND = 1.0 - 1e-6
"""Ratios below it are said to be behind: rounding apart, any."""
CHART = RowsChart(
    kind=LINES,
    x=("devices",),
    y="throughput",
    series=("planner",),
    panels=("figure", "model"),
    y_label="samples a second",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--figures", list(FIGURES), "what to run", choices=FIGURES)
    add_option(parser, "--models", list(PAPER_MODELS), "of figures 6 and 9")
    add_option(parser, "--devices", list(PAPER_DEVICES), "numbers of devices")
    add_option(parser, "--planners", [*OURS, *BASELINES, CHAIN, ONE_SIZE], "planners to run")
    parser.add_argument(
        "--share-ranks",
        action="store_true",
        help="let ours, the best chain and one size too, interleave stages and colocate branches",
    )
    add_option(parser, "--limit", 60.0, "seconds a search may take")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a cell and planner, its ratios to what ours is compared with, and a summary a cell."""
    rows: list[dict[str, Any]] = []
    for figure, name, request in _cells(args):
        rows += _cell(args, figure, name, request)
    cells = _gains(rows)
    print(format_rows(cells))
    for cell in cells:
        for planner, why in cell["not_compared"].items():
            print(f"{cell['model']} on {cell['devices']}: {planner} is not among the compared: {why}")
    return {"rows": rows, "cells": cells, "summary": _summary(cells, max(args.devices))}


def _cells(args: argparse.Namespace) -> Iterable[tuple[str, str, PlanRequest]]:
    """Yield figure, model and request of every cell."""
    if "6" in args.figures:
        for model in args.models:
            for devices in args.devices:
                yield "6", model, paper_request(model, devices)
    if "7" in args.figures:
        for branches in (2, 4, 8, 16):
            for devices in (d for d in args.devices if d <= 16):
                uno = build_model("candle_uno", branches=branches)
                yield "7", f"candle_uno x{branches}", paper_request(uno, devices, mini_batch=1024 * devices)
    if "7-right" in args.figures:
        two = build_model("mmt", branches=2)
        for size in SIZES_OF_FIGURE_7:
            yield "7-right", f"mmt x2 at {size}", paper_request(two, 8, micro_batch_size=size)
    if "9" in args.figures:
        for model in args.models:
            yield from _equal_micro_batch(model, max(args.devices))
    if "A.3" in args.figures:
        for devices in args.devices:
            yield "A.3", "transformer", paper_request("transformer", devices)


def _equal_micro_batch(model: str, devices: int) -> Iterable[tuple[str, str, PlanRequest]]:
    """Yield Figure 9's ablation: every planner at the micro-batch size that PipeDream chose."""
    try:
        plan = make_plan("pipedream", paper_request(model, devices))
    except PlanError:
        return
    size = max(stage.micro_batch_size for stage in plan.stages)
    yield "9", f"{model} at {size}", paper_request(model, devices, micro_batch_size=size)


def _cell(args: argparse.Namespace, figure: str, model: str, request: PlanRequest) -> list[dict[str, Any]]:
    rows = []
    for planner in args.planners:
        search, count = _search(planner, request, may_share=args.share_ranks)
        rows.append(_row(figure, model, request, planner, search, args.limit * count))
        print(_row_text(rows[-1]), file=sys.stderr, flush=True)
    return with_ratios(rows)


def _search(planner: str, request: PlanRequest, *, may_share: bool) -> tuple[Callable[[], PipelinePlan], int]:
    """Return what makes the plan, and how many searches that is."""
    if may_share and (planner not in BASELINES or planner in INTERLEAVES):
        request = dataclasses.replace(request, virtual_stages=None, colocate=planner not in BASELINES)
    if planner == CHAIN:
        return functools.partial(best_chain, request, make=functools.partial(_shared, "auto")), len(
            block_orders(request.graph)
        )
    if planner == ONE_SIZE:
        return functools.partial(plan_with_one_size, request), len(batch_rules(request).sizes_to_try)
    return functools.partial(_plan, planner, request), 1


def _plan(planner: str, request: PlanRequest) -> PipelinePlan:
    if planner in JUDGES_GRAPHS:
        request = in_order(request, block_orders(request.graph)[0])
    return _shared(planner, request)


def _shared(planner: str, request: PlanRequest) -> PipelinePlan:
    # which leaves a plan as it is that may not; other schedules would be an advantage of their own
    return share_ranks(make_plan(planner, request), request, schedule="1f1b")


def plan_with_one_size(request: PlanRequest, *, planner: str = "auto") -> PipelinePlan:
    """Return the quickest plan all stages of which have the same micro-batch size, whichever that is.

    Raises:
        PlanInfeasible: there is none.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    bounds = {size: _least_us(request, costs, size) for size in batch_rules(request).sizes_to_try}
    best, problem = None, None
    # those likely to win first: they spare the search of sizes that cannot
    for size in sorted(bounds, key=lambda size: bounds[size] * (1 + size / request.mini_batch)):
        if best is not None and bounds[size] >= best.iteration_us:
            continue
        try:
            plan = _plan(planner, dataclasses.replace(request, micro_batch_sizes={"*": size}))
        except PlanInfeasible as error:
            problem = error
            continue
        best = plan if best is None or plan.iteration_us < best.iteration_us else best
    if best is None:
        raise problem or PlanInfeasible("no micro-batch size divides the mini-batch; change train_batch_size")
    return best


def _least_us(request: PlanRequest, costs: CostModel, size: int) -> float:
    """Return a time that no plan of that micro-batch size goes below: all its work, perfectly shared out.

    Every block is taken at the number of samples a rank that suits it best.
    """
    degrees = [d for d in range(1, request.num_ranks + 1) if size % d == 0]
    work = np.min([np.add(*costs.block_times(size / d)) * d / size for d in degrees], axis=0).sum()
    return float(work * request.mini_batch / request.num_ranks)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a cell, each with its throughput over the best baseline, the best chain, and one size."""

    def best_of(names: Iterable[str]) -> float | None:
        found = [row["throughput"] for row in rows if row["planner"] in names and row["throughput"]]
        return max(found, default=None)

    rivals = dict(
        zip(
            (*RATIOS, "over_pipedream"),
            map(best_of, (BASELINES, (CHAIN,), (ONE_SIZE,), ("pipedream",))),
            strict=True,
        )
    )
    for row in rows:
        for name, throughput in rivals.items():
            is_known = throughput is not None and row["throughput"] is not None
            row[name] = row["throughput"] / throughput if is_known else None
    return rows


def _row(
    figure: str,
    model: str,
    request: PlanRequest,
    planner: str,
    search: Callable[[], PipelinePlan],
    limit: float,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "figure": figure,
        "model": model,
        "devices": request.num_ranks,
        "mini_batch": request.mini_batch,
        "planner": planner,
        "throughput": None,
        "throughput_as_graph": None,
        "depth": None,
        "micro_batch_sizes": None,
        "seconds": None,
        "status": "",
    }
    begin = time.perf_counter()
    plan, row["status"] = searched(limit, search)
    if plan is None:
        return row
    row["seconds"] = time.perf_counter() - begin
    costs = CostModel(request.graph, request.profile, request.cluster)
    # the plan's graph is its own: that of a chain has edges of order
    is_in_line = planner in (CHAIN, *JUDGES_GRAPHS)
    run_as = as_sequential(plan, costs) if planner in BASELINES and not is_in_line else plan
    row["throughput"] = request.mini_batch / _placed_us(run_as, request, costs) * 1e6
    if not is_in_line:
        row["throughput_as_graph"] = request.mini_batch / _placed_us(plan, request, costs) * 1e6
    row["depth"] = run_as.depth
    row["micro_batch_sizes"] = sorted({stage.micro_batch_size for stage in plan.stages})
    return row


def _placed_us(plan: PipelinePlan, request: PlanRequest, costs: CostModel) -> float:
    """Return what a step takes with the plan's stages on the best nodes that are found: of every planner's plan."""
    timed = dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))
    return exchange_stages(timed, request).iteration_us


def _gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a cell: the best of ours, and what it gains over the best of each kind of rival."""
    by_cell: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault((row["figure"], row["model"], row["devices"]), []).append(row)
    cells = []
    for (figure, model, devices), members in by_cell.items():
        ours = [row for row in members if row["planner"] in OURS and row["throughput"]]
        if not ours:
            continue
        best = max(ours, key=lambda row: row["throughput"])
        rivals = [row for row in members if row["planner"] in BASELINES and row["throughput"]]
        cells.append(
            {
                "figure": figure,
                "model": model,
                "devices": devices,
                "planner": best["planner"],
                "throughput": best["throughput"],
                "baseline": max(rivals, key=lambda row: row["throughput"])["planner"] if rivals else None,
                **{name: best[name] for name in (*RATIOS, "over_pipedream")},
                "not_compared": {row["planner"]: row["status"] for row in members if not row["throughput"]},
            }
        )
    return cells


def _summary(cells: list[dict[str, Any]], largest: int) -> dict[str, Any]:
    def behind(ratio: str) -> list[list[Any]]:
        return [
            [cell["figure"], cell["model"], cell["devices"]]
            for cell in cells
            if cell[ratio] is not None and cell[ratio] < BEHIND
        ]

    def ratios(figure: str, ratio: str) -> list[float]:
        at_largest = [c for c in cells if c["figure"] == figure and c["devices"] == largest]
        return sorted(round(cell[ratio], 3) for cell in at_largest if cell[ratio] is not None)

    known = {name: [cell[name] for cell in cells if cell[name] is not None] for name in RATIOS}
    return {
        "cells": len(cells),
        "cells_behind_a_baseline": behind("over_best_baseline"),
        "cells_behind_a_chain": behind("over_best_chain"),
        "geometric_means": {
            name: statistics.geometric_mean(found) if found else None for name, found in known.items()
        },
        "at_largest": {name: ratios("6", name) for name in RATIOS},
        "over_pipedream_at_largest": ratios("6", "over_pipedream"),
        "paper_at_32": PAPER_AT_32,
        "equal_micro_batch": ratios("9", "over_pipedream"),
        "paper_at_equal_micro_batch": PAPER_AT_EQUAL_MICRO_BATCH,
        "efficiency_of_micro_batches": EFFICIENCY,
    }


def _row_text(row: dict[str, Any]) -> str:
    found = (
        f"{row['throughput']:.1f} samples/s in {row['seconds']:.1f} s" if row["throughput"] else row["status"]
    )
    return f"figure {row['figure']}, {row['model']} on {row['devices']}: {row['planner']}: {found}"
