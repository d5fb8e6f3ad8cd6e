"""How long each planner searches: the paper's models at 4 to 32 devices, and larger ones.

Every planner sees the same blocks, costs and sweep of micro-batch sizes. `uniform` is listed for its plan's
quality: it searches nothing, it divides layers by a rule. What follows a search is timed on large plans too: choosing
a schedule, lowering and proving it, simulating it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpp_benchmarks._emulated_graphs import emulated_plan
from gpp_benchmarks._options import add_option
from gpp_benchmarks._oracle import bottleneck_us
from gpp_benchmarks._paper import PAPER_DEVICES, PAPER_MODELS, paper_request, searched
from gpp_plugin.api import make_request
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.choose_schedule import USUAL_SCHEDULES, choose_schedule
from gpp_plugin.plan.refine.share_ranks import share_ranks
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import LEFT_OUT, PlanRequest, batch_rules
from gpp_plugin.report.rows_text import LINES, RowsChart
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.simulate.predict import simulate_plan

PLANNERS = ("graphpipe", "auto", "uniform", "pipedream", "autopipe", "piper", "dapple")
WITHOUT_SEARCH = ("uniform",)
OURS = ("graphpipe", "auto", "autopipe")
SCHEDULES = (*USUAL_SCHEDULES, "zero_bubble")
"""What `choose` weighs, each with and without slices."""
LONG_SECONDS = 2.0
"""A search that takes longer is timed once."""
PAPER_RATIO = {
    ("mmt", "pipedream"): (21.4, 15.6, 14.7, 15.0),
    ("dlrm", "pipedream"): (19.3, 11.4, 9.9, 9.2),
    ("candle_uno", "pipedream"): (20.2, 11.8, 10.7, 10.4),
    ("mmt", "piper"): (440.5, 165.7, 101.3, 73.7),
}
"""Table 1: search time over GraphPipe's at 4, 8, 16, 32 devices."""
TABLE = (
    "model",
    "planner",
    "devices",
    "blocks",
    "cpu_seconds",
    "over_graphpipe",
    "paper_over_graphpipe",
    "status",
    "not_searched",
)
"""Columns of the table that is printed (`gpp_plugin.report.rows_text`)."""
CHART = RowsChart(
    kind=LINES,
    x=("devices",),
    y="cpu_seconds",
    series=("planner",),
    panels=("model",),
    y_label="seconds of search",
    is_log=True,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--models", nargs="+", default=list(PAPER_MODELS), help="models of the library")
    add_option(parser, "--devices", list(PAPER_DEVICES), "numbers of devices")
    add_option(parser, "--planners", list(PLANNERS), "planners to run")
    add_option(parser, "--limit", 60.0, "seconds a search may take")
    add_option(parser, "--repeat", 3, "searches of each, in turns, of which the median counts")
    parser.add_argument(
        "--large",
        action="store_true",
        help="also MMT on 1,024 devices with graphpipe; with auto LLaVA-7B in sub-layers on 64 and 1,024, each also "
        "with ranks that may hold several stages, and a chain and a graph of 2,000 blocks on 64; and what follows a "
        "search",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return one row a model, number of devices and planner, and where graphpipe is not the quickest."""
    rows = []
    for model in args.models:
        for devices in args.devices:
            request = paper_request(model, devices)
            found = _time_cell(args, model, request)
            rows += _with_ratios(found, model, devices)
    if args.large:
        rows += [
            time_search(model, request, planner, args.limit) for model, planner, request in _large_cases()
        ]
        rows += _time_steps()
    behind = [
        [row["model"], row["devices"], row["planner"]]
        for row in rows
        if row["planner"] not in (*OURS, *WITHOUT_SEARCH)
        and row["status"] == "ok"
        and (row.get("over_graphpipe") or 2.0) <= 1.0
    ]
    return {"rows": rows, "summary": {"quicker_than_graphpipe": behind}}


def _large_cases() -> Iterator[tuple[str, str, PlanRequest]]:
    """Yield models that take seconds: their names, the planners, and the requests, each made when it is its turn."""
    yield "mmt", "graphpipe", paper_request("mmt", 1024)
    for devices in (64, 1024):
        request = make_request(
            "llava-7b", num_devices=devices, granularity="sub_layer", mini_batch=16 * devices, loss_unit=1
        )
        yield "llava-7b sub_layer", "auto", request
        shared = dataclasses.replace(request, virtual_stages=None, colocate=True)
        yield "llava-7b sub_layer, ranks shared", "auto", shared
    for name, sizes in (("transformer", {"layers": 1000}), ("mmt", {"layers": 250})):
        model = build_model(name, granularity="sub_layer", **sizes)
        blocks = len(model.graph.blocks)
        yield (
            f"{name} of {blocks} blocks",
            "auto",
            paper_request(model, 64, cluster="dgx_h100", mini_batch=1024),
        )


def _time_steps() -> list[dict[str, Any]]:
    """Return a row for each step behind a search, on chains of stages of equal cost."""
    middle, long, wide = (
        emulated_plan(
            f"{stages} stages, {count} micro-batches",
            [(i, i + 1) for i in range(stages - 1)],
            num_micro_batches=count,
        )
        for stages, count in ((8, 64), (32, 256), (128, 256))
    )
    schedules = build_schedules(long)
    steps: list[tuple[PipelinePlan, str, Callable[[], object]]] = [
        (middle, "choose", lambda: choose_schedule(middle, schedules=SCHEDULES, slicing="auto")),
        (long, "lower", lambda: lower_schedules(long, schedules)),
        (
            long,
            "prove",
            functools.partial(validate_programs, long, schedules, lower_schedules(long, schedules)),
        ),
        (wide, "simulate", lambda: simulate_plan(wide)),
    ]
    return [_time_step(plan, step, call) for plan, step, call in steps]


def _time_step(plan: PipelinePlan, step: str, call: Callable[[], object]) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {
        "model": plan.model,
        "planner": step,
        "devices": plan.num_ranks,
        "blocks": len(plan.stages),
        "is_search": False,
        "status": "ok",
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }


def _time_cell(args: argparse.Namespace, model: str, request: PlanRequest) -> list[dict[str, Any]]:
    """Return a row a planner; the planners take turns, so that a busy machine slows all of them."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in args.planners}
    for _ in range(max(args.repeat, 1)):
        for name, rows in rounds.items():
            if not rows or (rows[-1]["status"] == "ok" and rows[-1]["seconds"] < LONG_SECONDS):
                rows.append(time_search(model, request, name, args.limit))
    return [
        {
            **rows[0],
            "seconds": statistics.median(row["seconds"] for row in rows),
            "cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
        }
        for rows in rounds.values()
    ]


def _with_ratios(rows: list[dict[str, Any]], model: str, devices: int) -> list[dict[str, Any]]:
    ours = next((row["cpu_seconds"] for row in rows if row["planner"] == "graphpipe"), None)
    for row in rows:
        paper = PAPER_RATIO.get((model, row["planner"]))
        is_known = paper is not None and devices in PAPER_DEVICES
        row["over_graphpipe"] = row["cpu_seconds"] / ours if ours else None
        row["paper_over_graphpipe"] = paper[PAPER_DEVICES.index(devices)] if paper and is_known else None
    return rows


def time_search(model: str, request: PlanRequest, planner: str, limit: float) -> dict[str, Any]:
    """Return the row of one search; ``status`` is ok, timeout, or why there is no plan.

    Args:
        limit: seconds the search may compute.
    """
    row: dict[str, Any] = {
        "model": model,
        "devices": request.num_ranks,
        "planner": planner,
        "blocks": len(request.graph.blocks),
        "micro_batch_sizes": len(batch_rules(request).sizes_to_try),
        "is_search": planner not in WITHOUT_SEARCH,
        "bottleneck_us_per_sample": None,
        "depth": None,
        "iteration_us": None,
        "status": "",
        "not_searched": "",
    }
    wall, cpu = time.perf_counter(), time.process_time()
    # which leaves a plan as it is where ranks are to hold one stage each
    plan, row["status"] = searched(
        limit, lambda: share_ranks(make_plan(planner, request), request, schedule="1f1b")
    )
    if plan is not None:
        left_out = (note.removeprefix(LEFT_OUT) for note in plan.notes if note.startswith(LEFT_OUT))
        row["not_searched"] = "; ".join(left_out)
        row["bottleneck_us_per_sample"] = bottleneck_us(plan.stages)
        row["depth"], row["iteration_us"] = plan.depth, plan.iteration_us
    row["seconds"], row["cpu_seconds"] = time.perf_counter() - wall, time.process_time() - cpu
    return row
