"""AutoPipe's comparisons (its Tables III and IV, Figure 13): balance and predicted step of each planner.

Activation checkpointing as in the paper (a block keeps its input), 3090s with 100 Gb/s between nodes.
AutoPipe plans on attention and feed-forward blocks; the others on whole layers, as the originals do.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from gpp_plugin.bench._paper import time_limit
from gpp_plugin.errors import PlanError
from gpp_plugin.library.analytic import profile_model
from gpp_plugin.library.graphs import build_model
from gpp_plugin.plan.clusters import read_cluster
from gpp_plugin.plan.registry import PlanRequest, make_plan

CASES = (
    ("gpt2_345m", 4, 4, 128),
    ("gpt2_345m", 4, 32, 512),
    ("gpt2_345m", 8, 32, 512),
    ("gpt2_1p3b", 4, 16, 512),
    ("gpt2_1p3b", 8, 16, 512),
    ("gpt2_1p3b", 16, 16, 512),
)
"""Model, devices, micro-batch size, mini-batch."""
PLANNERS = ("autopipe", "auto", "uniform", "pipedream", "piper", "dapple")
PAPER = {"balance": (2.73, 12.7), "step": (1.02, 1.30)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), help="planners to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a search may take")
    parser.add_argument("--stages", type=int, default=None, help="ask every planner for that many stages")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a case and planner: deviation of stage times and predicted step over AutoPipe's."""
    rows: list[dict[str, Any]] = []
    for model, devices, micro_batch, mini_batch in CASES:
        cell = [_row(args, model, devices, micro_batch, mini_batch, planner) for planner in args.planners]
        ours = next((r for r in cell if r["planner"] == "autopipe" and r["step_us"]), None)
        for row in cell:
            if ours is not None and row["step_us"] is not None:
                row["step_over_autopipe"] = row["step_us"] / ours["step_us"]
                spread = ours["deviation_us"]
                row["deviation_over_autopipe"] = row["deviation_us"] / spread if spread else None
        rows += cell
    return {"rows": rows, "paper": PAPER}


def _row(
    args: argparse.Namespace, model: str, devices: int, micro_batch: int, mini_batch: int, planner: str
) -> dict[str, Any]:
    granularity = "sublayer" if planner in ("autopipe", "auto") else "layer"
    library_model = build_model(model, granularity=granularity)
    cluster = read_cluster("rtx3090_100g", num_devices=devices)
    request = PlanRequest(
        graph=library_model.graph,
        profile=profile_model(library_model, cluster.devices[0], largest=micro_batch, recompute=True),
        cluster=cluster,
        num_ranks=devices,
        mini_batch=mini_batch,
        loss_unit=1,
        micro_batch_sizes={"*": micro_batch},
        num_stages=args.stages,
    )
    row: dict[str, Any] = {
        "model": model,
        "devices": devices,
        "micro_batch": micro_batch,
        "mini_batch": mini_batch,
        "planner": planner,
        "granularity": granularity,
        "stages": None,
        "deviation_us": None,
        "step_us": None,
        "status": "ok",
    }
    try:
        with time_limit(args.limit):
            plan = make_plan(planner, request)
    except TimeoutError:
        return {**row, "status": f"timeout after {args.limit:g} s"}
    except PlanError as error:
        return {**row, "status": str(error)}
    times = [(s.forward_us + s.backward_us) / s.micro_batch_size for s in plan.stages]
    row["stages"] = len(plan.stages)
    row["deviation_us"] = statistics.pstdev(times)
    row["step_us"] = plan.iteration_us
    return row
