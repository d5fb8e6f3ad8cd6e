"""Megatron's partition: a chain of stages with the same number of layers and the same degree each.

Source: Megatron-LM (arXiv 2104.04473)
Tests: tests/plan/test_uniform.py
"""

from __future__ import annotations

from collections.abc import Iterable

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batch_rules import BatchRules, batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.linear_order import linear_order, split_by_layers
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.refine.degrees import choose_degrees
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import best_plan, explain_infeasible


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
    if request.num_stages is not None:
        counts = [request.num_stages]
    elif request.data_parallel is not None:
        counts = [request.num_ranks // request.data_parallel]
    else:
        counts = [p for p in range(1, request.num_ranks + 1) if request.num_ranks % p == 0]
    counts = [count for count in counts if count <= len(order)]
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
