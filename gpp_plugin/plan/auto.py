"""The planner users get: GraphPipe's stage graph, refined, against every other planner; the simulator decides.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batch_rules import batch_rules, tensor_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe.graphpipe import explain_graph, search_stages
from gpp_plugin.plan.graphpipe.search_tree import SearchTrees
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.memory.joined import best_judged, join_memory
from gpp_plugin.plan.refine.branch_chains import refine_chains
from gpp_plugin.plan.refine.refine import MOVES, Candidate, Refiner
from gpp_plugin.plan.registry import run_planner
from gpp_plugin.plan.request import PlanRequest, unlimited
from gpp_plugin.plan.search_report import SearchReport

logger = logging.getLogger(__name__)

BUDGET = 300_000
"""Simulated tasks in all: about a second."""
NUM_REFINED = 12
NUM_CHAINED = 2
"""Candidates whose chains inside branches are refined by the critical path."""
NUM_JUDGED = 5
NUM_SIZES, NUM_ONE_SIZE = 2, 2
"""Micro-batch sizes that are searched alone, and the candidates of each that are simulated."""
RIVALS = ("uniform", "pipedream", "autopipe")
SLOW_RIVALS = ("piper", "dapple")
"""Planners whose plans are compared and refined as well; the slow ones on small problems only."""
MAX_RIVAL_SIZE = 6_000
MAX_SLOW_SIZE = 400
"""Blocks x ranks."""


def auto_plan(request: PlanRequest) -> PipelinePlan:
    """Return the plan with the shortest simulated step among GraphPipe's and all rivals', refined.

    Raises:
        PlanInfeasible: no plan fits; the message names stage, need, limit and knob.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules, report = batch_rules(request), SearchReport()
    trees = SearchTrees(request.graph, costs, report)

    def search(asked: PlanRequest, fitter: StageFitter | None) -> list[Candidate]:
        # With all memory, or with stages made to fit, it is the frontier that counts, not finding any plan.
        is_plain = asked is request and fitter is None
        return search_stages(
            asked,
            costs,
            rules,
            trees,
            budget=BUDGET if is_plain else BUDGET // 2,
            num_refined=NUM_REFINED,
            is_thorough=is_plain,
            fitter=fitter,
        )

    candidates = search(request, None)
    refiner = Refiner(request, costs, rules, budget=BUDGET // 2, report=report)
    for candidate in candidates[:NUM_CHAINED]:
        if candidate.score[0] == 0:
            candidates.append(refine_chains(refiner, candidate))
    notes: dict[tuple[StageDraft, ...], str] = {}
    rivals: dict[str, Candidate] = {}
    for name, drafts in _rivals_stages(request, report):
        start = refiner.from_drafts(drafts, max(d.micro_batch_size for d in drafts))
        candidates.append(start)
        rivals[name] = start
        notes[start.drafts] = f"stages of planner {name}"
        if start.score[1] <= 1.1 * min(c.score[1] for c in candidates):
            candidates.append(refiner.improve(start))
    finalists = _best(candidates)
    finalists += _with_one_size(request, costs, trees, candidates)
    report.begin(f"the best {len(finalists)} plans simulated")
    fitter = fitter_for(request, costs)
    if fitter is not None:
        joint = Refiner(request, costs, rules, budget=BUDGET // 2, fitter=fitter, report=report)
        more = [drafts for _, drafts in _rivals_stages(unlimited(request), report)]
        finalists += join_memory(request, costs, finalists, search, joint, more=more)
    plan = best_judged(request, costs, finalists, fitter, planner="auto", notes=notes)
    if plan is None:
        explain_graph(request, sorted([*finalists, *candidates], key=lambda candidate: candidate.score))
    _note_rejected(rivals, plan, report)
    return dataclasses.replace(plan, notes=(*plan.notes, *report.notes))


def _with_one_size(
    request: PlanRequest, costs: CostModel, trees: SearchTrees, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the best candidates of searches for one micro-batch size: the sizes with the best candidates so far.

    A search over all sizes shares its budget among them. Where that was used up, one with one size goes further, and
    may end quicker.
    """
    is_small = len(request.graph.blocks) * request.num_ranks <= MAX_RIVAL_SIZE
    if request.micro_batch_sizes is not None or not is_small or not trees.report.has_left_out(MOVES):
        return []
    best: dict[int, float] = {}
    for found in candidates:
        if found.score[0] == 0:
            best[found.wish] = min(best.get(found.wish, found.score[1]), found.score[1])
    more: list[Candidate] = []
    for size in sorted(best, key=lambda size: best[size])[:NUM_SIZES]:
        asked = dataclasses.replace(request, micro_batch_sizes={"*": size})
        rules = batch_rules(asked)
        found_alone = search_stages(
            asked, costs, rules, trees, budget=BUDGET, num_refined=NUM_REFINED, is_thorough=True
        )
        more += _best(found_alone)[:NUM_ONE_SIZE]
    return more


def _note_rejected(rivals: Mapping[str, Candidate], plan: PipelinePlan, report: SearchReport) -> None:
    """Tell of each rival's stages that are not the plan's why they are not: memory, or time."""
    chosen = {stage.blocks for stage in plan.stages}
    for name, rival in rivals.items():
        if {draft.blocks for draft in rival.drafts} == chosen:
            continue
        too_many, step_us, _ = rival.score
        why = (
            f"needs {too_many / 2**20:.1f} MiB more than there is as it stands"
            if too_many > 0
            else f"{step_us / 1e3:.3f} ms a step simulated as it stands, the plan {plan.iteration_us / 1e3:.3f} ms"
        )
        report.reject(f"stages of planner {name}", why)


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidates that fit, each set of stages once."""
    distinct = {frozenset(c.drafts): c for c in sorted(candidates, key=lambda c: c.score, reverse=True)}
    fitting = [candidate for candidate in distinct.values() if candidate.score[0] == 0]
    return sorted(fitting, key=lambda c: c.score)[:NUM_JUDGED]


def _rivals_stages(request: PlanRequest, report: SearchReport) -> Iterator[tuple[str, list[StageDraft]]]:
    """Yield the names of the planners worth asking that have a plan, and its stages."""
    for name in _rivals(request, report):
        report.begin(f"planner {name}")
        try:
            rival = run_planner(name, request)
        except PlanError as error:
            logger.debug("planner %s has no plan: %s", name, error)
            continue
        if not _is_asked_for(rival, request):
            logger.debug("planner %s knows no given numbers of stages or ranks a stage", name)
            continue
        yield (
            name,
            [
                StageDraft(
                    blocks=s.blocks,
                    degree=s.degree,
                    micro_batch_size=s.micro_batch_size,
                    k=s.k,
                    tensor=s.tensor,
                )
                for s in rival.stages
            ],
        )


def _is_asked_for(rival: PipelinePlan, request: PlanRequest) -> bool:
    """Return whether a plan has the stages and the ranks a stage that the request gives: DAPPLE's may not."""
    degrees, sizes = {stage.degree for stage in rival.stages}, tensor_rules(request)
    if any(stage.tensor not in sizes.allowed(stage.blocks) for stage in rival.stages):
        return False
    return request.num_stages in (None, len(rival.stages)) and (
        request.data_parallel is None or degrees == {request.data_parallel}
    )


def _rivals(request: PlanRequest, report: SearchReport) -> tuple[str, ...]:
    """Return the planners worth asking: all on a chain, where theirs is the whole search space.

    None where devices are of several speeds, which they take for alike, or where tensor sizes are given.
    """
    if request.cluster.is_mixed:
        return ()
    if request.tensor_parallel not in (1, None):
        return ()  # nearly all of them know size 1 alone
    size = len(request.graph.blocks) * request.num_ranks
    if size > MAX_RIVAL_SIZE:
        report.leave_out(f"what {', '.join(RIVALS)} plan (more than {MAX_RIVAL_SIZE} blocks x ranks)")
        return ()
    order = request.graph.dependencies()
    is_chain = all(order.in_degree(block) <= 1 and order.out_degree(block) <= 1 for block in order)
    return RIVALS + (SLOW_RIVALS if is_chain and size <= MAX_SLOW_SIZE else ())
