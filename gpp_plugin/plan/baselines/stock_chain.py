"""The chain that stock DeepSpeed runs: what `PipelineModule` can express, balanced as well as it can be.

DeepSpeed's pipeline is a chain of stages of equal degree; every rank computes one loss unit at a time (its
``train_micro_batch_size_per_gpu``), in 1F1B. Its own ``partition_method="parameters"`` puts the embeddings'
parameters on the scale as if they were compute; to compare with it fairly, the blocks are balanced by their
measured time, with the smallest slowest stage (exact).

Source: DeepSpeed 0.19.8, its PipelineEngine
Tests: tests/integrations/test_stock.py, tests/integrations/test_stock_layer.py, tests/plan/test_stock.py,
    tests/plan/test_stock.py, tests/plan/test_uniform.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.chain_costs import as_sequential, even_stage_counts
from gpp_plugin.plan.batch_rules import BatchRules, batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.linear_order import linear_order, split_by_layers, split_by_weight
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.refine.degrees import choose_degrees
from gpp_plugin.plan.request import PlanRequest, finer_advice
from gpp_plugin.plan.selection import best_plan, explain_infeasible

# Megatron's partition: a chain of stages with the same number of layers and the same degree each.


def uniform_plan(request: PlanRequest) -> PipelinePlan:
    """Cut the blocks, in a linear order, into stages with the same number of layers.

    Branches follow each other in the chain; edges that skip stages stay real edges. Where the number
    of stages is left open every divisor of the number of ranks is tried (Megatron's sizes), with
    every micro-batch size, and the quickest by prediction is taken. Coupled stages keep whole loss
    units; where equal degrees are impossible with them, ranks are shared out anew.

    Raises:
        PlanInfeasible: no such chain fits; the message says what to change.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    order = linear_order(request.graph)
    counts = [count for count in even_stage_counts(request) if count <= len(order)]
    groupings = [split_by_layers(order, count) for count in counts]
    candidates = [
        drafts
        for groups in groupings
        for wish in rules.wishes()
        for drafts in _with_degrees(request, costs, rules, groups, wish)
    ]
    plan = best_plan(request, costs, candidates, planner="uniform", may_hold_more=True)
    return plan if plan is not None else explain_infeasible(request, costs, rules, groupings)


def _with_degrees(
    request: PlanRequest, costs: CostModel, rules: BatchRules, groups: list[list[str]], wish: int
) -> Iterable[list[StageDraft]]:
    degree, rest = divmod(request.num_ranks, len(groups))
    sizes = [rules.micro_batch_size(group, degree, wish) for group in groups] if not rest else [None]
    if all(size is not None for size in sizes):
        yield [
            StageDraft(blocks=tuple(group), degree=degree, micro_batch_size=size)
            for group, size in zip(groups, sizes, strict=True)
            if size is not None
        ]
        return
    drafts = choose_degrees(request, costs, rules, groups, wish)
    if drafts is not None:
        yield drafts


STOCK = "stock_1f1b"
"""The planner's name: with it `deepspeed.initialize` returns DeepSpeed's own pipeline engine."""


def stock_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of equal degrees with the quickest slowest stage; time and memory are a chain's.

    Where the number of stages is left open there are as many as ranks (divided by ``data_parallel``).

    Raises:
        PlanInfeasible: DeepSpeed has no such pipeline; the message says what to change.
    """
    stages, degree = _shape(request)
    size = request.loss_unit * degree
    if request.mini_batch % size:
        raise PlanInfeasible(
            f"{STOCK}: {degree} ranks a stage take {size} samples at a time ({request.loss_unit} each), which does "
            f"not divide the mini-batch of {request.mini_batch}; change "
            f"{name_of('data_parallel')} or {name_of('mini_batch')}"
        )
    if request.schedule != "1f1b":
        raise PlanInfeasible(f"{STOCK}: DeepSpeed's engine runs 1F1B only, not {request.schedule}; remove it")
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    order = linear_order(request.graph)
    forward, backward = costs.block_times(request.loss_unit)
    rows = costs.indices(order)
    weights = [float(forward[row] + backward[row]) for row in rows]
    drafts = [
        StageDraft(blocks=tuple(order[start:stop]), degree=degree, micro_batch_size=size)
        for start, stop in split_by_weight(weights, stages)
    ]
    plan = build_plan(request, drafts, planner=STOCK, costs=costs, notes=_notes(request, size))
    sequential = as_sequential(plan, costs)
    # what a chain holds and takes; the edges stay those of the graph, along which tensors are passed on
    return dataclasses.replace(sequential, edges=plan.edges, iteration_us=evaluate_us(sequential, costs))


def _shape(request: PlanRequest) -> tuple[int, int]:
    """Return the number of stages and the degree of each."""
    ranks, blocks = request.num_ranks, len(request.graph.blocks)
    wanted = request.num_stages or ranks // (request.data_parallel or 1)
    if wanted > blocks:
        possible = max(p for p in range(1, blocks + 1) if ranks % p == 0)
        raise PlanInfeasible(
            f"{STOCK}: {wanted} stages and the model has {blocks} blocks; write "
            f"{setting_of('stages', possible)}{finer_advice(request, wanted)}"
        )
    if ranks % wanted:
        below = max(p for p in range(1, wanted) if ranks % p == 0)
        raise PlanInfeasible(
            f"{STOCK}: DeepSpeed gives every stage the same number of ranks, and {wanted} stages do not divide "
            f"{ranks} ranks; write {setting_of('stages', below)}"
        )
    return wanted, ranks // wanted


def _notes(request: PlanRequest, size: int) -> tuple[str, ...]:
    notes = ["stock DeepSpeed 1F1B: one chain, balanced by the blocks' times"]
    if request.mini_batch == size:
        notes.append(
            "stock DeepSpeed has one micro-batch size for all stages, the loss unit: with one loss a mini-batch it "
            "runs a single micro-batch, and no two stages ever work at the same time"
        )
    wanted = {s for s in (request.micro_batch_sizes or {}).values() if s != size}
    if wanted:
        notes.append(f"micro_batch_sizes has no effect: every stage takes {size} samples at a time")
    return tuple(notes)
