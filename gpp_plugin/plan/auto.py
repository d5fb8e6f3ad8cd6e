"""The planner users get: GraphPipe's stage graph, refined, against every other planner; the simulator decides.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.plan.baselines.data_parallel import plain_candidates
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe.graphpipe import SearchTrees, explain_graph, search_stages
from gpp_plugin.plan.heterogeneous_devices import exchange_stages
from gpp_plugin.plan.make import StageDraft, build_plan, split_by_weight
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.refine.block_sets import Mask, bits
from gpp_plugin.plan.refine.refine import MOVES, ROUNDING, Candidate, Refiner, is_better
from gpp_plugin.plan.registry import run_planner
from gpp_plugin.plan.request import PlanRequest, SearchReport, batch_rules, tensor_rules, unlimited
from gpp_plugin.plan.selection import evaluated_plans, join_memory, with_alternatives
from gpp_plugin.simulate.predict import simulate_plan
from gpp_plugin.simulate.timeline_metrics import critical_path

# AutoPipe's refinement inside the branches of a stage graph: block boundaries along the master stage's chain.
#
# The simulator's critical path closest to the sinks gives the *master stage*: the one it runs through most in
# the steady phase (AutoPipe, section III-B). Its *chain* are the stages before and after it that follow each
# other without a fork or join between them. As on AutoPipe's own chains, the master's first block may go to the
# stage before it and its last to the one after it, with and without Algorithm 1 (`split_by_weight`) on the
# stages on that side, and the stages after the master may be made lighter; Algorithm 1 on the whole chain is
# tried as well. Partitions are followed in the order of their predicted times, better than the start or not:
# steps that only together help are found, which `Refiner.improve` cannot.
#
# Deviation: masters that move towards the sink are followed too; on a graph the sink may be on another branch.

MAX_ROUNDS = 12
"""Partitions that are simulated for their master stage."""
MAX_RANK_TASKS = 8_000
"""Plans with more tasks, summed over ranks, are left as they are: their critical path takes too long."""


def refine_chains(refiner: Refiner, start: Candidate) -> Candidate:
    """Return the best candidate reached from ``start`` by moves along the chains of master stages."""
    best, number, rounds = start, 0, MAX_ROUNDS
    queue = [(start.score, number, start)]
    while queue and rounds > 0 and refiner.budget > 0:
        rounds -= 1
        _, _, at = heapq.heappop(queue)
        found = master_chain(refiner, at)
        if found is None:
            continue
        for masks in _shifted(refiner, at.masks, *found):
            candidate = refiner.with_masks(masks, at.wish, at.slack, at.way)
            if candidate is None:
                continue
            best = candidate if is_better(candidate.score, best.score) else best
            number += 1
            heapq.heappush(queue, (candidate.score, number, candidate))
    return best


def master_chain(refiner: Refiner, at: Candidate) -> tuple[list[Mask], int] | None:
    """Return the stages of the master's chain, source first, and its place; None where it has no neighbour."""
    request, costs = refiner.request, refiner.costs
    plan = build_plan(request, at.drafts, planner="", costs=costs, is_named=False)
    if plan.num_rank_tasks > MAX_RANK_TASKS:
        refiner.report.leave_out("cuts along the critical path of plans with very many tasks")
        return None
    after: list[set[int]] = [set() for _ in plan.stages]
    before: list[set[int]] = [set() for _ in plan.stages]
    for edge in plan.edges:
        after[edge.src].add(edge.dst)
        before[edge.dst].add(edge.src)
    master = master_stage(plan, costs)
    chain = [master]
    while len(before[chain[0]]) == 1 and len(after[min(before[chain[0]])]) == 1:
        chain.insert(0, min(before[chain[0]]))
    while len(after[chain[-1]]) == 1 and len(before[min(after[chain[-1]])]) == 1:
        chain.append(min(after[chain[-1]]))
    if len(chain) == 1:
        return None
    masks = [sum(1 << row for row in costs.indices(plan.stages[i].blocks)) for i in chain]
    return masks, chain.index(master)


def master_stage(plan: PipelinePlan, costs: CostModel) -> int:
    """Return the stage with most tasks of the critical path in the steady phase, the later of equals."""
    timeline = simulate_plan(plan, cluster=costs.cluster, reduce_us=costs.reductions(plan))
    steps: Counter[int] = Counter()
    path = critical_path(plan, timeline)
    for event in path:
        stage = plan.stages[event.stage]
        if event.kind is EventKind.FORWARD:
            steps[event.stage] += event.micro_batch >= stage.in_flight - 1
        else:
            steps[event.stage] += event.micro_batch <= plan.num_micro_batches(event.stage) - stage.in_flight
    return max(steps, key=lambda i: (steps[i], i))


def _shifted(refiner: Refiner, masks: Sequence[Mask], chain: list[Mask], master: int) -> Iterator[list[Mask]]:
    """Yield the partitions that moves along the chain lead to; other stages stay."""
    others = [mask for mask in masks if mask not in chain]
    order = [row for mask in chain for row in bits(mask)]
    cuts = [0]
    for mask in chain:
        cuts.append(cuts[-1] + mask.bit_count())
    forward, backward = refiner.costs.block_times(refiner.request.mini_batch / refiner.request.num_ranks)
    weights = [float(forward[row] + backward[row]) for row in order]
    tried = set()
    for moved in _moved_cuts(weights, cuts, master):
        if moved == cuts or tuple(moved) in tried:
            continue
        tried.add(tuple(moved))
        stages = [sum(1 << row for row in order[a:b]) for a, b in zip(moved, moved[1:], strict=False)]
        if all(stages) and refiner.sets.is_acyclic([*others, *stages]):
            yield [*others, *stages]


def _moved_cuts(weights: Sequence[float], cuts: list[int], master: int) -> Iterator[list[int]]:
    last = len(cuts) - 2

    def balanced(first: int, stop: int, bounds: list[int]) -> list[int]:
        """Return the bounds with Algorithm 1 on stages ``first`` up to ``stop``."""
        if stop - first < 2:
            return bounds
        low, high = bounds[first], bounds[stop]
        found = split_by_weight(weights[low:high], stop - first)
        return [*bounds[:first], *(low + cut for cut in found[:-1]), *bounds[stop:]]

    yield balanced(0, last + 1, cuts)
    is_divisible = cuts[master + 1] - cuts[master] > 1
    if is_divisible and master > 0:
        moved = [*cuts[:master], cuts[master] + 1, *cuts[master + 1 :]]
        yield moved
        yield balanced(0, master, moved)
    if is_divisible and master < last:
        moved = [*cuts[: master + 1], cuts[master + 1] - 1, *cuts[master + 2 :]]
        yield moved
        yield balanced(master + 1, last + 1, moved)
        yield balanced(0, master + 1, moved)
    for stage in range(master + 1, last):  # step 2: what follows the master gets lighter, front first
        if cuts[stage + 1] - cuts[stage] > 1:
            yield [*cuts[: stage + 1], cuts[stage + 1] - 1, *cuts[stage + 2 :]]


logger = logging.getLogger(__name__)

BUDGET = 300_000
"""Simulated tasks in all: about a second."""
NUM_REFINED = 12
NUM_CHAINED = 2
"""Candidates whose chains inside branches are refined by the critical path."""
NUM_EVALUATED, NUM_SCHEDULED = 5, 5
"""Candidates that are simulated, and of all these, how many are compared under the schedule they will get."""
NUM_SIZES, NUM_ONE_SIZE = 2, 2
"""Micro-batch sizes that are searched alone, and the candidates of each that are simulated."""
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
    for candidate in found[:NUM_CHAINED]:
        if candidate.score[0] == 0:
            candidates.append(refine_chains(refiner, candidate))
    notes: dict[tuple[StageDraft, ...], str] = {}
    baselines: dict[str, Candidate] = {}
    for name, drafts in _baseline_stages(request, trees):
        start = refiner.from_drafts(drafts, max(d.micro_batch_size for d in drafts))
        candidates.append(start)
        baselines[name] = start
        notes[start.drafts] = f"stages of planner {name}"
        if start.score[1] <= 1.1 * min(c.score[1] for c in candidates):
            candidates.append(refiner.improve(start))
    finalists = [*plain, *_best(candidates)]
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
    found, least = plans[0], float("inf")
    for plan in plans[:NUM_SCHEDULED]:
        busiest = max(
            (s.forward_us + s.backward_us) * (plan.mini_batch // s.micro_batch_size) for s in plan.stages
        )
        if busiest < least:
            with contextlib.suppress(PlanError):
                placed = exchange_stages(plan, request)
                us = schedule_plan(placed, request, schedule=request.final_schedule).iteration_us
                found, least = (plan, us) if us < least * (1 - ROUNDING) else (found, least)
    return found


def _with_one_size(
    request: PlanRequest, costs: CostModel, trees: SearchTrees, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the best candidates of searches for one micro-batch size: the sizes with the best candidates so far.

    A search over all sizes shares its budget among them. Where that was used up, one with one size gets further, and
    may end quicker.
    """
    is_small = len(request.graph.blocks) * request.num_ranks <= MAX_BASELINE_SIZE
    if request.micro_batch_sizes is not None or not is_small or not trees.report.has_left_out(MOVES):
        return []
    best: dict[int, float] = {}
    for found in candidates:
        if found.score[0] == 0:
            best[found.wish] = min(best.get(found.wish, found.score[1]), found.score[1])
    more: list[Candidate] = []
    for size in sorted(best, key=lambda size: best[size])[:NUM_SIZES]:
        changed = dataclasses.replace(request, micro_batch_sizes={"*": size})
        rules = batch_rules(changed)
        found_alone = search_stages(
            changed, costs, rules, trees, budget=BUDGET, num_refined=NUM_REFINED, is_thorough=True
        )
        more += _best(found_alone)[:NUM_ONE_SIZE]
    return more


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
        degrees, sizes = {stage.degree for stage in baseline.stages}, tensor_rules(request)
        if (
            any(stage.tensor not in sizes.allowed(stage.blocks) for stage in baseline.stages)
            or request.num_stages not in (None, len(baseline.stages))
            or (request.data_parallel is not None and degrees != {request.data_parallel})
        ):
            logger.debug("planner %s cannot take explicit numbers of stages or ranks a stage", name)
            continue
        yield name, [StageDraft.of(stage) for stage in baseline.stages]


def _baselines(request: PlanRequest, trees: SearchTrees) -> tuple[str, ...]:
    """Return the planners worth asking: all on a chain, where theirs is the whole search space.

    None where devices are of several speeds, which they take for alike, or where tensor sizes are explicit.
    """
    if trees.costs.is_mixed or request.tensor_parallel not in (1, None):
        return ()  # nearly all of them know tensor size 1 alone
    size = len(request.graph.blocks) * request.num_ranks
    if size > MAX_BASELINE_SIZE:
        trees.report.leave_out(
            f"what {', '.join(BASELINES)} plan (more than {MAX_BASELINE_SIZE} blocks x ranks)"
        )
        return ()
    return BASELINES + (SLOW_BASELINES if trees.is_chain and size <= MAX_SLOW_SIZE else ())
