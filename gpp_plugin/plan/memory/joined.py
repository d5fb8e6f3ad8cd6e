"""Joined planning: stages and the memory optimization they run with are chosen together (`fitting`).

Three searches, as far as they are needed:

    as it is     within the devices' memory, nothing swapped or recomputed: what is planned without all this
    unlimited    with all the memory in the world; where its stages fit as they are, memory is ample, and the
                 first plan is the plan
    joined       every stage considered takes its time plus the least cost of making it fit

The winner of the second, made to fit afterwards, competes too. So the result is never worse than planning
without memory optimization, nor than optimizing a finished plan.

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.refine.refine import Candidate, Refiner
from gpp_plugin.plan.request import PlanRequest, unlimited
from gpp_plugin.plan.selection import memory_excess

NUM_FITTED = 4
"""Candidates of a search that are fitted tensor by tensor and evaluated."""
NEAR = 1.1
"""Times the best step known, up to which what was planned without a thought of memory is refined."""
LEAST_BUDGET = 20_000

Search = Callable[[PlanRequest, StageFitter | None], list[Candidate]]
"""Returns candidates, best first."""


def join_memory(
    request: PlanRequest,
    costs: CostModel,
    plain: Sequence[Candidate],
    search: Search,
    refiner: Refiner,
    *,
    more: Sequence[Sequence[StageDraft]] = (),
) -> list[Candidate]:
    """Return candidates that need memory optimization, or none where memory is ample.

    Args:
        plain: candidates without, best first.
        refiner: has the fitter, and a budget.
        more: further stages to fit and refine.
    """
    free = search(unlimited(request), None)[:1]
    if plain and plain[0].score[0] == 0 and free:
        resident = build_plan(request, free[0].drafts, planner="", costs=costs, is_named=False)
        if memory_excess(request, resident)[0] <= 0:
            return []
    starts = [refiner.from_drafts(c.drafts, c.wish) for c in free]
    starts += [refiner.from_drafts(drafts, max(d.micro_batch_size for d in drafts)) for drafts in more]
    found = search(request, refiner.fitter)[:NUM_FITTED]
    fitting = [c.score[1] for c in (*starts, *found) if c.score[0] == 0]
    for start in starts:
        found.append(start)
        if not fitting or (start.score[0] == 0 and start.score[1] <= NEAR * min(fitting)):
            refiner.budget = max(refiner.budget, LEAST_BUDGET)
            found.append(refiner.improve(start))
    return sorted(found, key=lambda candidate: candidate.score)


def best_evaluated(
    request: PlanRequest,
    costs: CostModel,
    candidates: Sequence[Candidate],
    fitter: StageFitter | None,
    *,
    planner: str,
    notes: Mapping[tuple[StageDraft, ...], str] | None = None,
) -> PipelinePlan | None:
    """Return the candidate that fits and has the shortest simulated step; None where none fits.

    Ties go to the shallower plan, then to the earlier candidate.
    """
    best: PipelinePlan | None = None
    seen = set()
    for candidate in candidates:
        identity = frozenset(candidate.drafts)
        if identity in seen:
            continue
        seen.add(identity)
        note = notes.get(candidate.drafts) if notes else None
        plan = build_plan(
            request, candidate.drafts, planner=planner, costs=costs, notes=(note,) if note else ()
        )
        if fitter is not None:
            plan = fitter.fitted(plan)
        if memory_excess(request, plan)[0] > 0:
            continue
        plan = dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))
        if best is None or (plan.iteration_us, plan.depth) < (best.iteration_us * (1 - 1e-9), best.depth):
            best = plan
    return best
