"""The planner users get: GraphPipe's stage graph, refined, against every other planner; the simulator decides.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.plan.baselines.chain_costs import block_orders, in_order
from gpp_plugin.plan.baselines.data_parallel import plain_candidates
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe.graphpipe import SearchTrees, explain_graph, search_stages
from gpp_plugin.plan.heterogeneous_devices import exchange_stages
from gpp_plugin.plan.make import StageDraft
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.refine.refine import MOVES, Candidate, Refiner
from gpp_plugin.plan.registry import run_planner
from gpp_plugin.plan.request import PlanRequest, SearchReport, batch_rules, grid_rules, unlimited
from gpp_plugin.plan.selection import NEAR, evaluated_plans, join_memory, simplest, with_alternatives

logger = logging.getLogger(__name__)

BUDGET = 300_000
"""Simulated tasks in all: about a second."""
NUM_REFINED = 12
NUM_EVALUATED, NUM_SCHEDULED = 5, 5
"""Candidates that are simulated, and of all these, how many are compared under the schedule they will get."""
NUM_SIMPLER = 2
"""Candidates of fewer stages that are compared with these, where simpler plans win within a band."""
NUM_SIZES, NUM_ALONE = 2, 2
"""Micro-batch sizes that are searched alone, and the candidates of each search alone that are simulated."""
BASELINES = ("uniform", "pipedream", "autopipe")
SLOW_BASELINES = ("piper", "dapple")
"""Planners whose plans are compared and refined as well; the slow ones on small problems only."""
MAX_BASELINE_SIZE = 6_000
MAX_SLOW_SIZE = 400
"""Blocks x ranks."""


def auto_plan(request: PlanRequest) -> PipelinePlan:
    """Return the plan with the shortest simulated step among GraphPipe's and all baselines', refined.

    Raises:
        PlanInfeasible: no plan fits; the message names stage, need, limit and knob.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules, report = batch_rules(request), SearchReport()
    trees = SearchTrees(request.graph, costs, report)

    def search(changed: PlanRequest, fitter: StageFitter | None) -> list[Candidate]:
        # With all memory, or with stages made to fit, it is the frontier that counts, not finding any plan.
        is_plain = changed is request and fitter is None
        return search_stages(
            changed,
            costs,
            rules,
            trees,
            budget=BUDGET if is_plain else BUDGET // 2,
            num_refined=NUM_REFINED,
            is_thorough=is_plain,
            fitter=fitter,
        )

    refiner = Refiner(request, costs, rules, budget=BUDGET // 2, report=report)
    plain = plain_candidates(refiner)
    found = search(request, None)
    candidates = [*plain, *found]
    notes: dict[tuple[StageDraft, ...], str] = {}
    baselines: dict[str, Candidate] = {}
    for name, drafts in _baseline_stages(request, trees):
        start = refiner.from_drafts(drafts, max(d.micro_batch_size for d in drafts))
        candidates.append(start)
        baselines[name] = start
        notes[start.drafts] = f"stages of planner {name}"
        if start.score[1] <= NEAR * min(c.score[1] for c in candidates):
            candidates.append(refiner.improve(start))
    candidates += _of_chains(request, trees, refiner, _best(candidates))
    best = _best(candidates)
    finalists = [*plain, *best, *_simpler(candidates, best, request.band)]
    finalists += _with_one_size(request, costs, trees, candidates)
    report.begin(f"the best {len(finalists)} plans simulated")
    fitter = fitter_for(request, costs)
    if fitter is not None:
        joint = Refiner(request, costs, rules, budget=BUDGET // 2, fitter=fitter, report=report)
        more = [drafts for _, drafts in _baseline_stages(unlimited(request), trees)]
        finalists += plain_candidates(joint)
        finalists += join_memory(request, costs, finalists, search, joint, more=more)
    plans = evaluated_plans(request, costs, finalists, fitter, planner="auto", notes=notes)
    if not plans:
        explain_graph(request, sorted([*finalists, *candidates], key=lambda candidate: candidate.score))
    plan = _shortest_scheduled(plans, request)
    _note_rejected(baselines, plan, report)
    plan = with_alternatives(plan, request, costs, candidates)
    return dataclasses.replace(plan, notes=(*plan.notes, *report.notes))


def _shortest_scheduled(plans: Sequence[PipelinePlan], request: PlanRequest) -> PipelinePlan:
    """Return the plan with the shortest step under the schedule that it will get, of some in the order of their own."""
    # Under 1F1B two stages take 142.7 ms and three 146.2; under zero bubble, which "auto" may take, 142.7 and 141.2.
    # With less memory the two do not fit: were the shortest under 1F1B taken, more memory would give a longer step.
    if request.final_schedule is None or request.mode == "async":
        return plans[0]
    # Beside the shortest, whatever may be near enough to them and has fewer stages (`simplest`).
    near = [
        plan
        for plan in plans[NUM_SCHEDULED:]
        if plan.iteration_us <= plans[0].iteration_us * (1 + request.band)
    ]
    near.sort(key=lambda plan: len(plan.stages))
    found: list[PipelinePlan] = []
    own: dict[tuple[Stage, ...], PipelinePlan] = {}
    least = float("inf")
    for plan in [*plans[:NUM_SCHEDULED], *near[: NUM_SIMPLER if request.band else 0]]:
        busiest = max(
            (s.forward_us + s.backward_us) * (plan.mini_batch // s.micro_batch_size) for s in plan.stages
        )
        if busiest < least * (1 + request.band):
            with contextlib.suppress(PlanError):
                placed = exchange_stages(plan, request)
                us = schedule_plan(placed, request, schedule=request.final_schedule).iteration_us
                own[plan.stages] = plan
                found.append(dataclasses.replace(plan, iteration_us=us))
                least = min(least, us)
    if not found:
        return plans[0]
    taken = simplest(found, request.band)
    plan = own[taken.stages]
    return plan if taken.notes == plan.notes else dataclasses.replace(plan, notes=taken.notes)


def _simpler(candidates: Sequence[Candidate], best: Sequence[Candidate], band: float) -> list[Candidate]:
    """Return of fewer stages than the best candidate's the best ones that may take as long, those of the fewest."""
    if not best or not band:
        return []
    found: dict[int, Candidate] = {}
    for each in sorted(candidates, key=lambda candidate: candidate.score, reverse=True):
        if each.score[0] == 0 and each.score[1] <= best[0].score[1] * (1 + band):
            found[len(each.drafts)] = each
    return [found[count] for count in sorted(found) if count < len(best[0].drafts)][:NUM_SIMPLER]


def _with_one_size(
    request: PlanRequest, costs: CostModel, trees: SearchTrees, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the best candidates of searches for one micro-batch size: the sizes with the best candidates so far.

    A search over all sizes shares its budget among them. Where that was used up, one with one size gets further, and
    may end quicker.
    """
    if request.micro_batch_sizes is not None or not _is_worth_more(request, trees):
        return []
    best: dict[int, float] = {}
    for found in candidates:
        if found.score[0] == 0:
            best[found.wish] = min(best.get(found.wish, found.score[1]), found.score[1])
    more: list[Candidate] = []
    for size in sorted(best, key=lambda size: best[size])[:NUM_SIZES]:
        more += _best_alone(dataclasses.replace(request, micro_batch_sizes={"*": size}), costs, trees)
    return more


def _of_chains(
    request: PlanRequest, trees: SearchTrees, refiner: Refiner, best: Sequence[Candidate]
) -> list[Candidate]:
    """Return the best candidates of searches of the model in a line, where that of the graph was cut off.

    A chain's stages are a plan of the graph. On slow links, where many branches end in one stage, a search of them gets
    to plans that moves from those of the graph do not reach: CANDLE-Uno on 16 devices 24 ms for 48. There the chains
    are short before any move. Of each search the best start is refined, and those near the graph's ``best``.
    """
    if trees.is_chain or not _is_worth_more(request, trees):
        return []
    found: list[Candidate] = []
    worth_us = NEAR * best[0].score[1] if best else float("inf")
    for order in block_orders(request.graph):
        own = in_order(request, order)
        costs = CostModel(own.graph, own.profile, own.cluster, zero_stage=own.zero_stage)
        own_trees = SearchTrees(own.graph, costs, trees.report)
        alone = _best_alone(own, costs, own_trees, worth_us=worth_us)
        found += [refiner.from_drafts(each.drafts, each.wish) for each in alone]
    return found


def _is_worth_more(request: PlanRequest, trees: SearchTrees) -> bool:
    """Return whether a search used its budget up, on a problem where one of less gets far."""
    is_small = len(request.graph.blocks) * request.num_ranks <= MAX_BASELINE_SIZE
    return is_small and trees.report.has_left_out(MOVES)


def _best_alone(
    request: PlanRequest, costs: CostModel, trees: SearchTrees, *, worth_us: float = float("inf")
) -> list[Candidate]:
    """Return the best candidates of a search with a budget of its own."""
    found = search_stages(
        request,
        costs,
        batch_rules(request),
        trees,
        budget=BUDGET,
        num_refined=NUM_REFINED,
        is_thorough=True,
        worth_us=worth_us,
    )
    return _best(found)[:NUM_ALONE]


def _note_rejected(baselines: Mapping[str, Candidate], plan: PipelinePlan, report: SearchReport) -> None:
    """Report why the stages of each other baseline were not taken: memory, or time."""
    chosen = {stage.blocks for stage in plan.stages}
    for name, baseline in baselines.items():
        if {draft.blocks for draft in baseline.drafts} == chosen:
            continue
        too_many, step_us, _ = baseline.score
        why = (
            f"needs {too_many / 2**20:.1f} MiB more than there is as it stands"
            if too_many > 0
            else f"{step_us / plan.iteration_us:.3f} times the step of those taken, before a schedule is chosen"
        )
        report.reject(f"stages of planner {name}", why)


def _best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidates that fit, each set of stages once."""
    distinct = {frozenset(c.drafts): c for c in sorted(candidates, key=lambda c: c.score, reverse=True)}
    fitting = [candidate for candidate in distinct.values() if candidate.score[0] == 0]
    return sorted(fitting, key=lambda c: c.score)[:NUM_EVALUATED]


def _baseline_stages(request: PlanRequest, trees: SearchTrees) -> Iterator[tuple[str, list[StageDraft]]]:
    """Yield the names of the planners worth asking that have a plan, and its stages."""
    for name in _baselines(request, trees):
        trees.report.begin(f"planner {name}")
        try:
            baseline = run_planner(name, request)
        except PlanError as error:
            logger.debug("planner %s has no plan: %s", name, error)
            continue
        degrees, rules = {stage.degree for stage in baseline.stages}, grid_rules(request)
        if (
            any(stage.grid not in rules.allowed(stage.blocks) for stage in baseline.stages)
            or request.num_stages not in (None, len(baseline.stages))
            or (request.data_parallel is not None and degrees != {request.data_parallel})
        ):
            logger.debug("planner %s cannot take explicit numbers of stages or ranks a stage", name)
            continue
        yield name, [StageDraft.of(stage) for stage in baseline.stages]


def _baselines(request: PlanRequest, trees: SearchTrees) -> tuple[str, ...]:
    """Return the planners worth asking: all on a chain, where theirs is the whole search space.

    None where devices are of several speeds, which they take for alike, or where context or tensor sizes are explicit.
    """
    if trees.costs.is_mixed or request.has_grids:
        return ()  # nearly all of them know tensor size 1 alone
    size = len(request.graph.blocks) * request.num_ranks
    if size > MAX_BASELINE_SIZE:
        trees.report.leave_out(
            f"what {', '.join(BASELINES)} plan (more than {MAX_BASELINE_SIZE} blocks x ranks)"
        )
        return ()
    return BASELINES + (SLOW_BASELINES if trees.is_chain and size <= MAX_SLOW_SIZE else ())
