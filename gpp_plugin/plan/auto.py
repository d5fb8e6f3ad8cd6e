"""The planner users get: GraphPipe's stage graph, refined, against every other planner; the simulator decides."""

from __future__ import annotations

import dataclasses
import logging

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batches import batch_rules
from gpp_plugin.plan.branch_chains import refine_chains
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.plan.graphpipe import search_stages
from gpp_plugin.plan.judge import judge_us
from gpp_plugin.plan.refine import Candidate, Refiner
from gpp_plugin.plan.registry import PlanRequest, register_planner, run_planner
from gpp_plugin.plan.selection import explain_infeasible
from gpp_plugin.plan.stages import StageDraft, build_plan

logger = logging.getLogger(__name__)

BUDGET = 300_000
"""Simulated tasks in all: about a second."""
NUM_REFINED = 12
NUM_CHAINED = 2
"""Candidates whose chains inside branches are refined by the critical path."""
NUM_JUDGED = 5
RIVALS = ("uniform", "pipedream", "autopipe")
SLOW_RIVALS = ("piper", "dapple")
"""Planners whose plans are compared and refined as well; the slow ones on small problems only."""
MAX_RIVAL_SIZE = 6_000
MAX_SLOW_SIZE = 400
"""Blocks x ranks."""


@register_planner("auto")
def auto_plan(request: PlanRequest) -> PipelinePlan:
    """Return the plan with the shortest simulated step among GraphPipe's and all rivals', refined.

    Raises:
        PlanInfeasible: no plan fits; the message names stage, need, limit and knob.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    candidates = search_stages(
        request, costs, rules, budget=BUDGET, num_refined=NUM_REFINED, is_thorough=True
    )
    refiner = Refiner(request, costs, rules, budget=BUDGET // 2)
    for candidate in candidates[:NUM_CHAINED]:
        if candidate.score[0] == 0:
            candidates.append(refine_chains(refiner, candidate))
    notes: dict[tuple[StageDraft, ...], str] = {}
    for name in _rivals(request):
        try:
            rival = run_planner(name, request)
        except PlanError as error:
            logger.debug("planner %s has no plan: %s", name, error)
            continue
        drafts = [
            StageDraft(blocks=s.blocks, degree=s.degree, micro_batch_size=s.micro_batch_size, k=s.k)
            for s in rival.stages
        ]
        start = refiner.from_drafts(drafts, max(d.micro_batch_size for d in drafts))
        candidates.append(start)
        notes[start.drafts] = f"stages of planner {name}"
        if start.score[1] <= 1.1 * min(c.score[1] for c in candidates):
            candidates.append(refiner.improve(start))
    fitting = [candidate for candidate in candidates if candidate.score[0] == 0]
    if not fitting:
        names = [block.name for block in request.graph.blocks]
        found = [[draft.blocks for draft in candidate.drafts] for candidate in candidates[:3]]
        explain_infeasible(request, costs, rules, [*found, [[name] for name in names], [names]])
    return _judge(request, costs, fitting, notes)


def _rivals(request: PlanRequest) -> tuple[str, ...]:
    """Return the planners worth asking: all on a chain, where theirs is the whole search space."""
    size = len(request.graph.blocks) * request.num_ranks
    if size > MAX_RIVAL_SIZE:
        return ()
    order = request.graph.dependencies()
    is_chain = all(order.in_degree(block) <= 1 and order.out_degree(block) <= 1 for block in order)
    return RIVALS + (SLOW_RIVALS if is_chain and size <= MAX_SLOW_SIZE else ())


def _judge(
    request: PlanRequest,
    costs: CostModel,
    candidates: list[Candidate],
    notes: dict[tuple[StageDraft, ...], str],
) -> PipelinePlan:
    """Return the candidate with the shortest simulated step; ties go to the shallower plan."""
    distinct = {frozenset(c.drafts): c for c in sorted(candidates, key=lambda c: c.score, reverse=True)}
    finalists = sorted(distinct.values(), key=lambda c: c.score)[:NUM_JUDGED]
    best: PipelinePlan | None = None
    for candidate in finalists:
        note = notes.get(candidate.drafts)
        plan = build_plan(
            request, candidate.drafts, planner="auto", costs=costs, notes=(note,) if note else ()
        )
        plan = dataclasses.replace(plan, iteration_us=judge_us(plan, costs))
        if best is None or (plan.iteration_us, plan.depth) < (best.iteration_us * (1 - 1e-9), best.depth):
            best = plan
    assert best is not None
    return best
