"""Predicted throughput of every planner's plans: the shape of GraphPipe's Figures 6, 7 and 9 and Table A.3.

Baselines are run as the systems they stand for run them: as a chain, each stage after the one before it
(`plan.baselines.chain_costs`); ``throughput_as_graph`` is what their stages reach in our runtime, without that order.
Times follow the efficiency curve of `library.gemm` (tile and wave quantisation), the links those of the
cluster description.
"""

from __future__ import annotations

import argparse
from typing import Any

from gpp_benchmarks._paper import PAPER_DEVICES, PAPER_MODELS, paper_request, time_limit
from gpp_plugin.errors import PlanError
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.baselines.chain_costs import as_sequential
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.judge import judge_us
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest

OURS = ("graphpipe", "auto")
BASELINES = ("uniform", "pipedream", "piper", "dapple")
EFFICIENCY = (
    "a matrix product's share of the device's peak by its tiles: partly filled tiles and the last, partly filled wave "
    "over the processors cost as whole ones (NVIDIA, Matrix Multiplication Background User's Guide, tile and wave "
    "quantization; library/gemm.py), times the device's efficiency in the cluster description, plus its launch time"
)
"""Where the times of small micro-batches come from."""
PAPER_AT_32 = (1.25, 1.61)
PAPER_AT_EQUAL_MICRO_BATCH = (1.12, 1.40)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--figures",
        nargs="+",
        default=["6", "7", "9", "A.3"],
        choices=["6", "7", "9", "A.3"],
        help="what to run",
    )
    parser.add_argument(
        "--devices", nargs="+", type=int, default=list(PAPER_DEVICES), help="numbers of devices (%(default)s)"
    )
    parser.add_argument(
        "--planners", nargs="+", default=[*OURS, *BASELINES], help="planners to run (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a search may take (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a cell: figure, model, devices, planner, throughput and its ratio to the best baseline."""
    rows: list[dict[str, Any]] = []
    if "6" in args.figures:
        for model in PAPER_MODELS:
            for devices in args.devices:
                rows += _cell(args, "6", model, paper_request(model, devices))
    if "7" in args.figures:
        for branches in (2, 4, 8, 16):
            for devices in (d for d in args.devices if d <= 16):
                uno = build_model("candle_uno", branches=branches)
                request = paper_request(uno, devices, mini_batch=1024 * devices)
                rows += _cell(args, "7", f"candle_uno x{branches}", request)
    if "9" in args.figures:
        for model in PAPER_MODELS:
            rows += _equal_micro_batch(args, model, max(args.devices))
    if "A.3" in args.figures:
        for devices in args.devices:
            rows += _cell(args, "A.3", "transformer", paper_request("transformer", devices))
    return {"rows": rows, "summary": _summary(rows, max(args.devices))}


def _cell(args: argparse.Namespace, figure: str, model: str, request: PlanRequest) -> list[dict[str, Any]]:
    rows = [_row(figure, model, request, planner, args.limit) for planner in args.planners]
    return _with_ratios(rows)


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rivals = [r["throughput"] for r in rows if r["planner"] in BASELINES and r["throughput"]]
    for row in rows:
        is_known = row["throughput"] is not None and bool(rivals)
        row["over_best_baseline"] = row["throughput"] / max(rivals) if is_known else None
    pipedream = next((r["throughput"] for r in rows if r["planner"] == "pipedream"), None)
    for row in rows:
        row["over_pipedream"] = row["throughput"] / pipedream if pipedream and row["throughput"] else None
    return rows


def _equal_micro_batch(args: argparse.Namespace, model: str, devices: int) -> list[dict[str, Any]]:
    """Return Figure 9's ablation: GraphPipe at the micro-batch size that PipeDream chose."""
    base = paper_request(model, devices)
    try:
        plan = make_plan("pipedream", base)
    except PlanError:
        return []
    size = max(stage.micro_batch_size for stage in plan.stages)
    request = paper_request(model, devices, micro_batch_size=size)
    rows = [_row("9", model, request, planner, args.limit) for planner in ("graphpipe", "auto")]
    rows.append(_row("9", model, base, "pipedream", args.limit))
    return _with_ratios(rows)


def _row(figure: str, model: str, request: PlanRequest, planner: str, limit: float) -> dict[str, Any]:
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
        "status": "ok",
    }
    try:
        with time_limit(limit):
            plan = make_plan(planner, request)
    except TimeoutError:
        return {**row, "status": f"timeout after {limit:g} s"}
    except PlanError as error:
        return {**row, "status": str(error)}
    costs = CostModel(request.graph, request.profile, request.cluster)
    run_as = plan if planner in OURS else as_sequential(plan, costs)
    row["throughput"] = request.mini_batch / judge_us(run_as, costs) * 1e6
    row["throughput_as_graph"] = request.mini_batch / judge_us(plan, costs) * 1e6
    row["depth"] = run_as.depth
    row["micro_batch_sizes"] = sorted({stage.micro_batch_size for stage in plan.stages})
    return row


def _summary(rows: list[dict[str, Any]], largest: int) -> dict[str, Any]:
    ours = [r for r in rows if r["planner"] in OURS and r["over_best_baseline"] and r["figure"] != "9"]
    best: dict[tuple[str, str, int], float] = {}
    for row in ours:
        cell = (row["figure"], row["model"], row["devices"])
        best[cell] = max(best.get(cell, 0.0), row["over_best_baseline"])
    at_largest = [r for r in rows if r["devices"] == largest and r["planner"] in OURS and r["over_pipedream"]]
    return {
        "cells": len(best),
        "cells_behind_a_baseline": [list(cell) for cell, ratio in best.items() if ratio < 0.995],
        "over_pipedream_at_largest": sorted(
            {round(r["over_pipedream"], 3) for r in at_largest if r["figure"] == "6"}
        ),
        "paper_at_32": PAPER_AT_32,
        "equal_micro_batch": sorted(
            {round(r["over_pipedream"], 3) for r in at_largest if r["figure"] == "9"}
        ),
        "paper_at_equal_micro_batch": PAPER_AT_EQUAL_MICRO_BATCH,
        "efficiency_of_micro_batches": EFFICIENCY,
    }
