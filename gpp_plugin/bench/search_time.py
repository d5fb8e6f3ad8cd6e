"""How long each planner searches: the paper's models at 4 to 32 devices, and larger ones."""

from __future__ import annotations

import argparse
import time
from typing import Any

from gpp_plugin.bench._oracle import bottleneck_us
from gpp_plugin.bench._paper import PAPER_DEVICES, PAPER_MODELS, paper_request, time_limit
from gpp_plugin.errors import PlanError
from gpp_plugin.plan.registry import PlanRequest, make_plan

PLANNERS = ("graphpipe", "auto", "uniform", "pipedream", "autopipe", "piper", "dapple")
PAPER_RATIO = {
    ("mmt", "pipedream"): (21.4, 15.6, 14.7, 15.0),
    ("dlrm", "pipedream"): (19.3, 11.4, 9.9, 9.2),
    ("candle_uno", "pipedream"): (20.2, 11.8, 10.7, 10.4),
    ("mmt", "piper"): (440.5, 165.7, 101.3, 73.7),
}
"""Table 1: search time over GraphPipe's at 4, 8, 16, 32 devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--models", nargs="+", default=list(PAPER_MODELS), help="models of the library")
    parser.add_argument(
        "--devices", nargs="+", type=int, default=list(PAPER_DEVICES), help="numbers of devices"
    )
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), help="planners to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a search may take")
    parser.add_argument("--large", action="store_true", help="also MMT on 1,024 devices with graphpipe")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a model, number of devices and planner."""
    rows = []
    for model in args.models:
        for devices in args.devices:
            request = paper_request(model, devices)
            seconds: dict[str, float] = {}
            for planner in args.planners:
                row = time_search(model, request, planner, args.limit)
                seconds[planner] = row["seconds"]
                row["over_graphpipe"] = (
                    row["seconds"] / seconds["graphpipe"] if "graphpipe" in seconds else None
                )
                paper = PAPER_RATIO.get((model, planner))
                known = paper is not None and devices in PAPER_DEVICES
                row["paper_over_graphpipe"] = paper[PAPER_DEVICES.index(devices)] if paper and known else None
                rows.append(row)
    if args.large:
        rows.append(time_search("mmt", paper_request("mmt", 1024), "graphpipe", args.limit))
    return {"rows": rows}


def time_search(model: str, request: PlanRequest, planner: str, limit: float) -> dict[str, Any]:
    """Return the row of one search; ``status`` is ok, timeout, or why there is no plan."""
    row: dict[str, Any] = {
        "model": model,
        "devices": request.num_ranks,
        "planner": planner,
        "granularity": "block",
        "bottleneck_us_per_sample": None,
        "depth": None,
    }
    begin = time.perf_counter()
    try:
        with time_limit(limit):
            plan = make_plan(planner, request)
        row["bottleneck_us_per_sample"] = bottleneck_us(plan.stages)
        row["depth"] = plan.depth
        row["status"] = "ok"
    except TimeoutError:
        row["status"] = f"timeout after {limit:g} s"
    except PlanError as error:
        row["status"] = str(error)
    row["seconds"] = time.perf_counter() - begin
    return row
