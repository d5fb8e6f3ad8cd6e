"""Which stages share a node: a finished plan's stages take their ranks in another order where that is quicker.

Planners give consecutive ranks to stages in their order. What is cheap inside a node and dear between nodes then
depends on where the borders fall: of four stages a -> b -> c -> d of one rank each, where only b -> c is large, on
nodes of two,

    in order            | a  b | c  d |        b -> c goes between nodes
    b and d exchanged   | a  d | c  b |        a -> b and c -> d do

Two stages are exchanged in the order in which ranks are taken: a fixed number of pairs, those whose messages between
nodes are largest first, predicted quickly (`estimate`); the best of them is simulated, and taken where it is quicker.
That goes on until none is, or the exchanges are used up.

Source: this project
Tests: tests/plan/test_node_placement.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import estimate_plan_us
from gpp_plugin.plan.costs.judge import MAX_RANK_TASKS, judge_us
from gpp_plugin.plan.make import with_ranks
from gpp_plugin.plan.request import PlanRequest, rank_limit

NUM_EXCHANGES = 64
"""Exchanges that are predicted, in all."""
MAX_TASKS = 200_000
"""Simulated tasks of all of them."""
LEAST_GAIN = 1e-3
"""Part of a step that an exchange must save: stages in order are easier to read."""


def exchange_stages(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a finished plan on other ranks where a step is then shorter, else as it is.

    Nothing is exchanged where all ranks are alike and joined by one level of links, or where stages share ranks.
    """
    if len(plan.stages) < 2 or plan.shares_ranks or not _has_places(plan, request):
        return plan
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    first_us = plan.iteration_us or judge_us(plan, costs)
    best, best_us = plan, first_us
    tasks = sum(2 * plan.num_micro_batches(i) for i in range(len(plan.stages)))
    left = min(NUM_EXCHANGES, MAX_TASKS // max(tasks, 1))
    before = estimate_plan_us(plan, costs)
    while left > 0:
        found: list[tuple[float, int, PipelinePlan]] = []
        for ranks in itertools.islice(_exchanged(best, costs), left):
            left -= 1
            changed = with_ranks(best, ranks, costs)
            if _fits(changed, request):
                found.append((estimate_plan_us(changed, costs), len(found), changed))
        if not found:
            break
        estimated, _, changed = min(found)
        if estimated > before * (1 - LEAST_GAIN):
            break
        us = judge_us(changed, costs)
        if us > best_us * (1 - LEAST_GAIN):
            break
        best, best_us, before = dataclasses.replace(changed, iteration_us=us), us, estimated
    if best is plan:
        return plan
    note = f"stages take ranks in another order than their own, which saves {1 - best_us / first_us:.1%}"
    return dataclasses.replace(best, notes=(*best.notes, note))


def _has_places(plan: PipelinePlan, request: PlanRequest) -> bool:
    """Return whether it matters on which ranks a stage is, and few enough tasks are to be simulated."""
    tasks = sum(2 * plan.num_micro_batches(i) * stage.degree for i, stage in enumerate(plan.stages))
    spans = [link.span for link in request.cluster.links]
    return tasks <= MAX_RANK_TASKS and (min(spans) < plan.num_ranks or request.cluster.is_mixed)


def _exchanged(plan: PipelinePlan, costs: CostModel) -> Iterator[list[tuple[int, ...]]]:
    """Yield the ranks of all stages after exchanging two of them, those with most bytes between nodes first."""
    order = sorted(range(len(plan.stages)), key=lambda stage: plan.stages[stage].ranks[0])
    taken = sorted(rank for stage in plan.stages for rank in stage.ranks)
    crossing = _crossing_bytes(plan, costs)
    pairs = itertools.combinations(range(len(order)), 2)
    for i, j in sorted(pairs, key=lambda pair: -max(crossing[order[place]] for place in pair)):
        changed = list(order)
        changed[i], changed[j] = changed[j], changed[i]
        yield _in_turn(plan, changed, taken)


def _in_turn(plan: PipelinePlan, order: Sequence[int], ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return by stage its ranks where stages take them in this order."""
    placed: dict[int, tuple[int, ...]] = {}
    start = 0
    for stage in order:
        size = len(plan.stages[stage].ranks)
        placed[stage] = tuple(ranks[start : start + size])
        start += size
    return [placed[stage] for stage in range(len(order))]


def _crossing_bytes(plan: PipelinePlan, costs: CostModel) -> list[float]:
    """Return by stage the bytes a sample that it exchanges with stages outside its innermost group of ranks."""
    inner = costs.cluster.links[0]
    found = [0.0] * len(plan.stages)
    for edge in plan.edges:
        src, dst = plan.stages[edge.src].ranks, plan.stages[edge.dst].ranks
        if costs.cluster.link_between(min(src[0], dst[0]), max(src[-1], dst[-1])) is not inner:
            for stage in (edge.src, edge.dst):
                found[stage] += edge.bytes_per_sample + edge.gradient_bytes_per_sample
    return found


def _fits(plan: PipelinePlan, request: PlanRequest) -> bool:
    return all(
        stage.memory_bytes <= rank_limit(request, rank) for stage in plan.stages for rank in stage.ranks
    )
