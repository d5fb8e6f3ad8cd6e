"""What a model reaches on a cluster, by simulation alone: plain data parallelism, one device, chains, the graph.

All have the same costs, links and memory limits, and the simulator's time of a step; no rank and no weights are needed.
Each baseline has the best that it may have: ZeRO stage, loss unit and recompute. Stock DeepSpeed's chain has any number
of stages that divides the ranks, unless the user says how many. The best chain has the graph's planner, schedules and
memory optimization, on a model whose blocks run one after the other (`best_chain`).

Source: GraphPipe (arXiv 2406.17145), section 7.1, on what sequential pipelines can express
Tests: tests/compare/test_simulated.py, tests/plan/test_best_chain.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gpp_plugin.compare.compare_settings import CHAIN, GRAPH, PLAIN, SINGLE, STOCK
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import block_orders, in_order
from gpp_plugin.plan.baselines.data_parallel import PLAIN as PLAIN_PLANNER
from gpp_plugin.plan.baselines.data_parallel import (
    best_plain,
    better_plain,
    describe_plain,
    loss_units,
    settled,
)
from gpp_plugin.plan.baselines.stock_chain import STOCK as STOCK_PLANNER
from gpp_plugin.plan.costs.estimate import finished_plan
from gpp_plugin.plan.costs.memory_formula import complete_plan
from gpp_plugin.plan.memory.fitting import recompute_fully
from gpp_plugin.plan.registry import make_plan, run_planner
from gpp_plugin.plan.request import PlanRequest, one_stage_a_rank, unlimited
from gpp_plugin.plan.selection import memory_excess
from gpp_plugin.plan.validate_plan import check_request, validate_for
from gpp_plugin.report.units import format_bytes

# The best chain of our own tools: what a model reaches without a graph of stages, everything else being equal.
#
# Beside it a graph of stages shows what the graph alone is worth: both have the same planner and refinement, the same
# micro-batch sizes, micro-batches in flight and costs, and whatever else the request allows.
#
# A chain comes from the same planner on the same model in a line (`chain_costs.in_order`).


def best_chain(request: PlanRequest, make: MakePlan) -> PipelinePlan:
    """Return the quickest chain that is found in any of the `block_orders`; its graph is that of `in_order`.

    Args:
        make: plans the model in an order.

    Raises:
        PlanInfeasible: no chain fits; the message is that of the last order.
    """
    plans, problem = [], None
    for order in block_orders(request.graph):
        try:
            plans.append(make(in_order(request, order)))
        except PlanInfeasible as error:
            problem = error
    if problem is not None and not plans:
        raise problem
    return min(plans, key=lambda plan: plan.iteration_us)


MakePlan = Callable[[PlanRequest], PipelinePlan]
"""Plans a request with the planner, schedule and slices that the user names."""


def simulate_mode(mode: str, request: PlanRequest, make_graph: MakePlan) -> dict[str, Any]:
    """Return a mode's row: its stages, simulated milliseconds and fullest rank, or why it cannot run this.

    Args:
        make_graph: makes the graph's plan, and the chain's of the request in a line.
    """
    makers: dict[str, MakePlan] = {
        PLAIN: best_plain,
        SINGLE: single_plan,
        STOCK: best_stock,
        CHAIN: lambda request: best_chain(request, make_graph),
        GRAPH: make_graph,
    }
    try:
        row = simulated_row(mode, makers[mode](request), request)
    except PlanError as error:
        ranks = 1 if mode == SINGLE else request.num_ranks
        row = {"mode": mode, "how": "simulated", "ranks": ranks, "refused": str(error)}
    if mode == PLAIN:
        better = better_plain(request, row.get("iteration_ms", float("inf")) * 1e3)
        if better is not None:  # the request allows no such plan: a row of its own
            row["open"] = {**simulated_row(mode, better[0], request), "with": better[1]}
    return row


def simulated_row(mode: str, plan: PipelinePlan, request: PlanRequest) -> dict[str, Any]:
    """Return what a table of modes says of a plan."""
    cost = plan.cost or finished_plan(plan, settled(request, plan)).cost
    assert cost is not None
    return {
        "mode": mode,
        "how": "estimated" if plan.is_estimate else "simulated",
        "what": describe_plain(plan) if len(plan.stages) == 1 and mode != SINGLE else "",
        "ranks": plan.num_ranks,
        "stages": len(plan.stages),
        "depth": len(plan.stages) if mode in (STOCK, CHAIN) else plan.depth,
        "micro_batches": [plan.num_micro_batches(i) for i in range(len(plan.stages))],
        "iteration_ms": cost.step_us / 1e3,
        "peak_bytes": cost.fullest.peak,
        "fits": cost.fits,
        "limit_bytes": cost.fullest.limit,
        "notes": list(plan.notes) if mode == STOCK else [],
    }


def plain_line(rows: Sequence[dict[str, Any]]) -> str:
    """Return how plain data parallelism does beside the graph's plan, the last row: what a reader should know first.

    "" where these are not among the rows.
    """
    by_mode = {row["mode"]: row for row in rows}
    plain, graph = by_mode.get(PLAIN), by_mode.get(GRAPH)
    if plain is None or graph is None:
        return ""
    allowed, plain = plain, plain.get("open", plain)
    if "refused" in plain:
        return f"{PLAIN_PLANNER}: not possible: {plain['refused']}"
    own = f"{plain['what']}: {_facts(plain)}{_asked(plain)}"
    if "refused" in graph:
        return f"{own}; no graph of stages: {graph['refused']}"
    if graph["what"] and plain is allowed:
        return f"{graph['what']}: {_facts(graph)}; no pipeline: no other plan that was found is shorter"
    many = f"{graph['stages']} stages" if graph["stages"] > 1 else graph["what"]
    return f"{own}; this plan, {many}: {_facts(graph)}"


def _asked(row: dict[str, Any]) -> str:
    return f" (with {row['with']})" if row.get("with") else ""


def _facts(row: dict[str, Any]) -> str:
    if "peak_bytes" not in row:
        return f"{row['iteration_ms']:.4g} ms"
    fits = "" if row["fits"] else " (too much)"
    return f"{row['iteration_ms']:.4g} ms, {format_bytes(row['peak_bytes'])}{fits}"


def single_plan(request: PlanRequest) -> PipelinePlan:
    """Return the whole model on one device, a loss unit at a time, with all the memory that takes."""
    alone = dataclasses.replace(
        unlimited(one_stage_a_rank(request)),
        num_ranks=1,
        num_stages=1,
        data_parallel=None,
        tensor_parallel=1,
        sequence_parallel=1,
        micro_batch_sizes=None,
        schedule="1f1b",
        zero_stage=0,
    )
    return make_plan(STOCK_PLANNER, alone)


def best_stock(request: PlanRequest) -> PipelinePlan:
    """Return the quickest chain that stock DeepSpeed can run and hold, with the best that it may have.

    That is any number of stages and loss unit that is left open, and ZeRO 0 or 1. Layers are recomputed where nothing
    fits without. Where nothing fits at all it is the quickest.

    Raises:
        PlanInfeasible: there is none; the message is that of the fewest stages.
    """
    own = dataclasses.replace(
        one_stage_a_rank(request),
        micro_batch_sizes=None,
        schedule="1f1b",
        memory_optimization=(),
        tensor_parallel=1,
        sequence_parallel=1,
        is_zero_open=False,
        is_unit_open=False,
    )
    counts = [own.num_stages]
    if own.num_stages is None and own.data_parallel is None:
        most = min(own.num_ranks, len(own.graph.blocks))
        counts = [count for count in range(1, most + 1) if own.num_ranks % count == 0]
    check_request(own)
    plans: list[PipelinePlan] = []
    problem: PlanInfeasible | None = None
    stages = (1, 0) if request.num_ranks > 1 else (0,)  # of ZeRO; its engine takes no others
    for count, unit, stage in itertools.product(counts, loss_units(request), stages):
        try:
            wanted = dataclasses.replace(own, num_stages=count, loss_unit=unit, zero_stage=stage)
            plans.append(run_planner(STOCK_PLANNER, wanted))
        except PlanInfeasible as error:
            problem = problem or error
    if not plans:
        nothing = f"{STOCK_PLANNER}: {request.num_ranks} ranks hold no stage of this model"
        raise problem or PlanInfeasible(nothing)
    plans.sort(key=lambda plan: plan.iteration_us)
    fitting = [plan for plan in plans if memory_excess(own, plan)[0] <= 0]
    plan = (fitting or _recomputed(own, plans) or plans)[0]
    if fitting:
        validate_for(plan, settled(own, plan))
    return complete_plan(plan, own.graph, own.profile)


def _recomputed(request: PlanRequest, plans: Sequence[PipelinePlan]) -> list[PipelinePlan]:
    """Return those of some chains that fit with every layer recomputed, quickest first."""
    found = []
    for plan in plans:
        try:
            found.append(recompute_fully(plan, settled(request, plan)))
        except PlanError:  # the model is only described, or too large even so
            continue
    return sorted(found, key=lambda plan: plan.iteration_us)
