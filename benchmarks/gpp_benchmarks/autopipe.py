"""AutoPipe's comparisons (its Tables II to IV, Figure 13): balance and predicted step of each planner.

Rows of kind ``table 2`` are the paper's seven partitions of GPT-2 345M into four stages; of kind ``search``
the heuristic's partition beside the best of all; of kind ``planner`` what each planner makes of a case.

Activation checkpointing as in the paper (a block keeps its input), 3090s with 100 Gb/s between nodes.
AutoPipe plans on attention and feed-forward blocks; the others on whole layers, as the originals do.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from gpp_benchmarks._paper import time_limit
from gpp_plugin.errors import PlanError
from gpp_plugin.library.analytic_models import profile_model
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.baselines.autopipe import search_exact, search_heuristic, simulator_of
from gpp_plugin.plan.baselines.chain_costs import ChainCosts
from gpp_plugin.plan.batch_rules import batch_rules
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest

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
OURS = ("autopipe", "auto")
TABLE_2 = (
    (5, 7, 6, 6),
    (6, 6.5, 6.5, 5),
    (6, 7, 6, 5),
    (6.5, 6.5, 6.5, 4.5),
    (6.5, 6.5, 6, 5),
    (7, 5.5, 6, 5.5),
    (7, 6.5, 5.5, 5),
)
"""Layers of each stage; the fourth is the best."""
EXACT_LIMIT = 200_000
PAPER = {"balance": (2.73, 12.7), "step": (1.02, 1.30)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), help="planners to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a search may take (%(default)s)")
    parser.add_argument("--stages", type=int, default=None, help="ask every planner for that many stages")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a case and planner: deviation of stage times and predicted step over AutoPipe's."""
    rows = _table_2_rows() + _search_rows()
    for model, devices, micro_batch, mini_batch in CASES:
        cell = [_row(args, model, devices, micro_batch, mini_batch, planner) for planner in args.planners]
        ours = next((r for r in cell if r["planner"] == "autopipe" and r["step_us"]), None)
        for row in cell:
            if ours is not None and row["step_us"] is not None:
                row["step_over_autopipe"] = row["step_us"] / ours["step_us"]
                spread = ours["deviation_us"]
                row["deviation_over_autopipe"] = row["deviation_us"] / spread if spread else None
        rows += cell
    planned = [row for row in rows if row["kind"] == "planner"]
    behind = [
        [row["model"], row["devices"], row["micro_batch"], row["planner"]]
        for row in planned
        if row["planner"] not in OURS and (row.get("step_over_autopipe") or 1.0) < 0.995
    ]
    exact = [row["is_optimal"] for row in rows if row["kind"] == "search"]
    summary = {"quicker_than_autopipe": behind, "heuristic_is_optimal": all(exact), "paper": PAPER}
    return {"rows": rows, "summary": summary}


def _table_2_rows() -> list[dict[str, Any]]:
    """Return the predicted step of every partition of Table II: 4 stages, 8 micro-batches of 4."""
    chain = _chain("gpt2_345m", 4, 4, 32)
    simulator = simulator_of(chain, 1)
    rows: list[dict[str, Any]] = []
    for layers in TABLE_2:
        # A layer is two blocks; the embedding is before the first, the head after the last.
        ends = list(itertools.accumulate(int(2 * count) for count in layers))
        cuts = (0, *(1 + end for end in ends[:-1]), chain.num_blocks)
        forward, backward = simulator.stage_times(cuts)
        times = [f + b for f, b in zip(forward, backward, strict=True)]
        rows.append(
            {
                "kind": "table 2",
                "layers": layers,
                "step_us": simulator.run(cuts)[0],
                "deviation_us": statistics.pstdev(times),
            }
        )
    best = min(row["step_us"] for row in rows)
    return [{**row, "over_best": row["step_us"] / best} for row in rows]


def _search_rows() -> list[dict[str, Any]]:
    """Return for 4 and 8 stages and every case of as many devices what heuristic and exact search find."""
    rows = []
    for model, devices, micro_batch, mini_batch in CASES:
        if devices not in (4, 8):
            continue
        simulator = simulator_of(_chain(model, devices, micro_batch, mini_batch), 1)
        begin = time.process_time()
        heuristic = search_heuristic(simulator, devices)
        middle = time.process_time()
        exact = search_exact(simulator, devices, limit=EXACT_LIMIT)
        rows.append(
            {
                "kind": "search",
                "model": model,
                "stages": devices,
                "micro_batch": micro_batch,
                "heuristic_us": heuristic[0],
                "exact_us": exact[0] if exact else None,
                "is_optimal": exact is not None and heuristic[0] <= exact[0] * (1 + 1e-9),
                "heuristic_cpu_seconds": middle - begin,
                "exact_cpu_seconds": time.process_time() - middle,
            }
        )
    return rows


def _request(
    model: str, devices: int, micro_batch: int, mini_batch: int, granularity: str, num_stages: int | None
) -> PlanRequest:
    library_model = build_model(model, granularity=granularity)
    cluster = read_cluster("rtx3090_100g", num_devices=devices)
    return PlanRequest(
        graph=library_model.graph,
        profile=profile_model(library_model, cluster.devices[0], largest=micro_batch, recompute=True),
        cluster=cluster,
        num_ranks=devices,
        mini_batch=mini_batch,
        loss_unit=1,
        micro_batch_sizes={"*": micro_batch},
        num_stages=num_stages,
    )


def _chain(model: str, devices: int, micro_batch: int, mini_batch: int) -> ChainCosts:
    request = _request(model, devices, micro_batch, mini_batch, "sub_layer", None)
    costs = CostModel(request.graph, request.profile, request.cluster)
    return ChainCosts(request, costs, batch_rules(request), micro_batch)


def _row(
    args: argparse.Namespace, model: str, devices: int, micro_batch: int, mini_batch: int, planner: str
) -> dict[str, Any]:
    granularity = "sub_layer" if planner in OURS else "layer"
    request = _request(model, devices, micro_batch, mini_batch, granularity, args.stages)
    row: dict[str, Any] = {
        "kind": "planner",
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
