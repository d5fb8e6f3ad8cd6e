"""Where a graph of stages wins: plain data parallelism, tensor ranks, chains and graphs over models and clusters.

A case is a model, a cluster, a number of devices, a batch, a memory limit and a speed of links between nodes. In each
the four kinds of plans have the same costs, links and memory, recompute by need, and the ZeRO stage that suits them:

    plain    one stage on all ranks
    tensor   one stage of groups of tensor ranks
    chain    stages one behind the other, of any tensor size (`compare.simulated.best_chain`)
    graph    what `auto` makes, of any tensor size; it counts as what it is: a plan of one stage is plain

The map has a cell a case: the quickest kind, and how many times as fast it is as the next kind. Errors of costs are up
to `BAND` (`gpp bench published`), so that less is no win: below the map stand the cases where a graph is quicker than
all others by more. What cannot come to so much is not searched:

    bound    all work shared out evenly, at the best micro-batch of each block, nothing sent: no plan takes less. Where
             plain or tensor is within `BAND` of it, no pipeline is searched.
    chain    searched only where a graph is quicker than plain and tensor by more than `BAND`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpp_benchmarks._options import add_option
from gpp_benchmarks._paper import SAMPLES_PER_DEVICE
from gpp_plugin.api import make_request, plan_for
from gpp_plugin.compare.simulated import best_chain
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.data_parallel import best_plain
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.request import STEP_ERROR, TENSOR_SIZES, PlanRequest
from gpp_plugin.report.progress import step
from gpp_plugin.report.units import fill_text, format_table

PLAIN, TENSOR, CHAIN, GRAPH = KINDS = ("plain", "tensor", "chain", "graph")
BAND = STEP_ERROR
MODELS = (
    "mmt", "dlrm", "candle_uno", "two_towers", "omni_7b", "gpt2_1p3b", "llava_34b", "vl_72b", "vit22b_llama70b",
)  # fmt: skip
CLUSTERS = ("dgx_h100", "l40s_100g", "a100_pcie_25g")
CASE = ("model", "cluster", "devices", "batch", "memory", "slower")
TABLE = (
    *CASE[:3],
    "mini_batch",
    *CASE[4:],
    "bound_ms",
    *(f"{kind}_ms" for kind in KINDS),
    "winner",
    "margin",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--models", list(MODELS), "as of gpp plan")
    add_option(parser, "--clusters", list(CLUSTERS), "cluster descriptions")
    add_option(parser, "--devices", [16, 64], "numbers of devices")
    add_option(parser, "--batch", [0], "samples a device; 0 is a paper's for this model, or 8")
    add_option(parser, "--memory", [0], "GB a device; 0 is all that it has")
    add_option(parser, "--slower", [1], "times by which links between nodes are slower")
    add_option(parser, "--workers", 2, "cases at a time")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print a line a case as it is found, the map, and the cases where a graph wins; return them."""
    axes = args.models, args.clusters, args.devices, args.batch, args.memory, args.slower
    cases, rows = list(itertools.product(*axes)), []
    with step("cases") as progress, concurrent.futures.ProcessPoolExecutor(args.workers) as pool:
        for row in pool.map(find_winner, cases):
            rows.append(row)
            progress.update(len(rows), len(cases))
            print(describe(row), flush=True)
    wins = [row for row in rows if is_win(row)]
    print(f"\n{format_map(rows)}\n")
    print(f"a graph is quicker than all others by more than {BAND:.0%} in {len(wins)} of {len(rows)} cases")
    for row in wins:
        print(fill_text(f"{describe(row)}; {row['command']}", indent="  "))
    return {"rows": rows, "graph_wins": wins, "band": BAND}


def find_winner(case: Sequence[Any]) -> dict[str, Any]:
    """Return a case's row: milliseconds of each kind, None where it fits in no way or is not searched; the winner."""
    model, name, devices, batch, memory, slower = case
    mini_batch = devices * (batch or SAMPLES_PER_DEVICE.get(model, 8))
    limit = {"memory_limit_gb": memory} if memory else {}
    cluster = slow_down(read_cluster(name, num_devices=devices), slower)
    request = make_request(
        model, cluster, mini_batch=mini_batch, zero="auto", tensor_parallel="auto", **limit
    )
    request = dataclasses.replace(
        request, memory_optimization=("recompute",), band=0.0
    )  # the shortest there is
    bound, times = bound_us(request), dict[str, float]()

    def take(make: Callable[[PlanRequest], PipelinePlan], **settings: Any) -> None:
        with contextlib.suppress(PlanError):
            plan = make(dataclasses.replace(request, **settings))
            kind = kind_of(plan)
            times[kind] = min(plan.iteration_us, times.get(kind, plan.iteration_us))

    def may_win() -> bool:
        return min(times.values(), default=np.inf) > bound * (1 + BAND)

    # parameters, gradients and optimizer state are held at least once
    held = sum(c.parameter_bytes + c.gradient_bytes + c.optimizer_bytes for c in request.profile.costs)
    fits = held <= sum(request.rank_limits)
    for size in (1, *TENSOR_SIZES) if fits else ():
        if size == 1 or may_win():
            take(best_plain, tensor_parallel=size)
    simple = min(times.values(), default=np.inf)
    is_searched = fits and may_win()
    if is_searched:
        take(plan_for)
        if times.get(GRAPH, np.inf) * (1 + BAND) < simple:
            take(functools.partial(best_chain, make=plan_for))
    ordered = sorted(times, key=times.__getitem__)
    options = {
        "--zero": "auto",
        "--tensor-parallel": "auto",
        "--memory-recompute": "auto",
        "--cluster": name,
        "--devices": devices,
        "--mini-batch": mini_batch,
    }
    options |= {"--memory-limit-gb": memory} if memory else {}
    return {
        **dict(zip(CASE, case, strict=True)),
        "mini_batch": mini_batch,
        "bound_ms": bound / 1e3,
        **{f"{kind}_ms": times[kind] / 1e3 if kind in times else None for kind in KINDS},
        "winner": ordered[0] if ordered else "none fits",
        "margin": times[ordered[1]] / times[ordered[0]] if len(ordered) > 1 else None,
        "pipelines": "searched" if is_searched or not fits else f"at most {simple / bound:.2f} x as fast",
        "command": " ".join(["gpp plan", model, *(f"{key} {value}" for key, value in options.items())]),
    }


def kind_of(plan: PipelinePlan) -> str:
    """Return what a plan is: a chain's longest path has all of its stages."""
    if len(plan.stages) == 1:
        return PLAIN if plan.stages[0].tensor == 1 else TENSOR
    return CHAIN if plan.depth == len(plan.stages) else GRAPH


def bound_us(request: PlanRequest) -> float:
    """Return a time that no plan goes below: the work of a mini-batch shared out evenly, and nothing sent.

    Every block takes what it does a sample at the number of samples that suits it best.
    """
    costs = CostModel(request.graph, request.profile, request.cluster)
    sizes = [1 << n for n in range(request.mini_batch.bit_length())]
    work = np.min([np.add(*costs.block_times(size)) / size for size in sizes], axis=0).sum()
    return float(work) * request.mini_batch / request.num_ranks


def slow_down(cluster: Cluster, times: int) -> Cluster:
    """Return the cluster with slower links between nodes; what was measured of their collectives is of others."""
    outer = [
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s / times, all_reduce=None, all_gather=None)
        for link in cluster.links[1:]
    ]
    return dataclasses.replace(cluster, links=(cluster.links[0], *outer))


def is_win(row: dict[str, Any]) -> bool:
    """Return whether a graph is quicker than every other kind by more than errors of costs, or alone fits."""
    return row["winner"] == GRAPH and (row["margin"] is None or row["margin"] > 1 + BAND)


def describe(row: dict[str, Any]) -> str:
    """Return a row in a line: ``mmt, l40s_100g, 16 devices: graph 79.5 ms, 1.31 x as fast as the next``."""
    more = [f"mini-batch {row['mini_batch']}", *([f"{row['memory']} GB"] if row["memory"] else [])]
    more += [f"links {row['slower']} x slower"] if row["slower"] > 1 else []
    name = ", ".join([row["model"], row["cluster"], f"{row['devices']} devices", *more])
    own = row.get(f"{row['winner']}_ms")
    if own is None:
        return f"{name}: none fits"
    margin = "alone" if row["margin"] is None else f"{row['margin']:.2f} x as fast as the next"
    return f"{name}: {row['winner']} {own:.1f} ms, {margin}; pipelines {row['pipelines']}"


def format_map(rows: Sequence[dict[str, Any]]) -> str:
    """Return the map: models down, all else across, the winner and its margin in a cell."""
    across = list(dict.fromkeys(tuple(row[key] for key in CASE[1:]) for row in rows))
    # what is the same in all cases is no part of a heading
    varies = [len({each[i] for each in across}) > 1 or i == 0 for i in range(len(CASE) - 1)]
    names = (
        " ".join(str(part) for part, shown in zip(each, varies, strict=True) if shown) for each in across
    )
    cells: dict[str, list[str]] = {}
    for row in rows:
        margin = "" if row["margin"] is None else f" {row['margin']:.2f}"
        cells.setdefault(row["model"], []).append(f"{row['winner']}{margin}")
    return format_table(["", *names], [[model, *found] for model, found in cells.items()])
