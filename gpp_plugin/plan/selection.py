"""Which of many candidate plans is taken, and the error message where none can be.

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import Alternative, PipelinePlan, Stage, sinks_first
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import estimate_plan_us, evaluate_us
from gpp_plugin.plan.make import StageDraft, build_plan, with_in_flight
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.refine.degrees import DegreeChooser, choose_degrees
from gpp_plugin.plan.refine.plan_evaluator import memory_excess
from gpp_plugin.plan.refine.refine import ROUNDING, SLACKS, Candidate, Refiner
from gpp_plugin.plan.request import (
    UNLIMITED,
    BatchRules,
    PlanRequest,
    batch_rules,
    limit_gb,
    unlimited,
)

MOST_TRIED = 4
"""Numbers of ranks that are planned, where none can be shared out, before nothing is suggested."""


def best_plan(
    request: PlanRequest,
    costs: CostModel,
    candidates: Iterable[Sequence[StageDraft]],
    *,
    planner: str,
    may_hold_more: bool = False,
) -> PipelinePlan | None:
    """Build every candidate, drop those without the memory, and return the quickest, or None.

    Ties go to the shallower plan, then to the earlier candidate.

    Args:
        may_hold_more: more micro-batches are held than the stages' orders ask for where that hides messages.
    """
    best: tuple[Sequence[StageDraft], list[int] | None] | None = None
    best_key = (float("inf"), 0)
    seen = set()
    for drafts in candidates:
        identity = frozenset(drafts)
        if identity in seen:
            continue
        seen.add(identity)
        if busiest_us(request, costs, drafts) > best_key[0]:
            continue
        plan = build_plan(request, drafts, planner=planner, costs=costs, is_named=False)
        extra: list[int] | None = None
        if may_hold_more:  # before the choice: what one candidate gains by it, another may not
            held = quickest_in_flight(request, costs, plan)
            us, extra = held if held is not None else (float("inf"), None)
        else:
            us = estimate_plan_us(plan, costs) if memory_excess(request, plan)[0] <= 0 else float("inf")
        if (us, plan.depth) < best_key:
            best, best_key = (drafts, extra), (us, plan.depth)
    if best is None:
        return None
    drafts, extra = best
    plan = build_plan(request, drafts, planner=planner, costs=costs)
    plan = plan if extra is None else with_in_flight(plan, costs, extra=extra)
    return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))


def quickest_in_flight(
    request: PlanRequest, costs: CostModel, plan: PipelinePlan
) -> tuple[float, list[int]] | None:
    """Return the time of a plan that holds the best of `SLACKS` micro-batches more, and how many, by stage.

    None where not even the plan that holds what its orders ask for fits.
    """
    best: tuple[float, list[int]] | None = None
    levels = [1] * len(plan.stages)  # stages on the longest way from each to a sink, both counted
    for index in sinks_first(plan):
        for edge in plan.edges:
            if edge.src == index:
                levels[index] = max(levels[index], levels[edge.dst] + 1)
    for slack in SLACKS:
        extra = [math.ceil((level - 1) * slack) for level in levels]
        held = with_in_flight(plan, costs, extra=extra)
        if memory_excess(request, held)[0] > 0:
            break
        us = estimate_plan_us(held, costs)
        if best is None or us < best[0]:
            best = us, extra
    return best


def best_optimized(
    request: PlanRequest, costs: CostModel, candidates: Iterable[Sequence[StageDraft]], *, planner: str
) -> PipelinePlan | None:
    """Return the quickest of those candidates that only swapping or recomputing makes fit, or None.

    Ties go to the shallower plan, then to the earlier candidate.
    """
    fitter = fitter_for(request, costs)
    if fitter is None:
        return None
    plans = [
        fitter.fitted(build_plan(request, drafts, planner=planner, costs=costs)) for drafts in candidates
    ]
    timed = [
        dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))
        for plan in plans
        if any(stage.memory is not None for stage in plan.stages) and memory_excess(request, plan)[0] <= 0
    ]
    return min(timed, key=lambda plan: (plan.iteration_us, plan.depth), default=None)


def busiest_us(request: PlanRequest, costs: CostModel, drafts: Sequence[StageDraft]) -> float:
    """Return how long the busiest stage computes in one step: no plan of these stages is quicker."""
    worst = 0.0
    for draft in drafts:
        local = draft.micro_batch_size / draft.degree
        own = costs.at_grid(draft.grid)
        forward, backward = own.stage_times(costs.indices(draft.blocks), local)
        worst = max(worst, (forward + backward) * (request.mini_batch // draft.micro_batch_size))
    return worst


def explain_infeasible(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    groupings: Iterable[Sequence[Sequence[str]]],
    *,
    tried: Sequence[Sequence[StageDraft]] = (),
    fitter: StageFitter | None = None,
    has_plan: HasPlan | None = None,
) -> NoReturn:
    """Say why none of these ways to group the blocks is a plan: ranks, or bytes and where.

    Args:
        tried: stages that were found not to fit.
        fitter: has swapped and recomputed all it could.
        has_plan: plans another request, to find the nearest that fits; None: only a knob is named.

    Raises:
        PlanInfeasible: always.
    """
    # Three answers: the ranks cannot be shared out at all (`_rank_problem`); else, of all stages that were tried, those
    # that lack fewest bytes, with what the user may change; or, where another request can be planned, the nearest
    # that fits. Degrees are chosen as if memory were no matter, since with it there would be none to name.
    found = list(groupings)
    closest: tuple[tuple[int, Stage, int], PipelinePlan] | None = None
    shared_out = (
        choose_degrees(request, costs, rules, groups, wish, ignore_memory=True)
        for groups in found
        for wish in rules.sizes_to_try
    )
    for drafts in itertools.chain(tried, shared_out):
        if drafts is None:
            continue
        plan = build_plan(request, drafts, planner="", costs=costs)
        worst = memory_excess(request, plan if fitter is None else fitter.estimated(plan))
        if closest is None or worst[0] < closest[0][0]:
            closest = worst, plan
    if closest is None or closest[0][0] <= 0:
        raise PlanInfeasible(_rank_problem(request, costs, found, has_plan))
    (excess, stage, rank), plan = closest
    if fitter is not None:
        plan = fitter.fitted(plan)
        excess, stage, rank = max(memory_excess(request, plan), closest[0], key=lambda worst: worst[0])
    limit = request.rank_limits[rank]
    lacking = {r: s.memory_bytes - request.rank_limits[r] for s in plan.stages for r in s.ranks}
    others = sum(num_bytes > 0 for num_bytes in lacking.values()) - 1
    used = f" with {' and '.join(request.memory_optimization)}" if fitter is not None else ""
    knob = _memory_knob(request, costs, stage, limit)
    if has_plan is not None:
        nearest = nearest_that_fits(request, has_plan, excess)
        knob = f"{knob}; {nearest}" if fitter is None else nearest
    raise PlanInfeasible(
        f"no plan fits{used}: stage {stage.name!r} needs {stage.memory_bytes} bytes and rank {rank} may use {limit} "
        f"({excess} too many, with {stage.in_flight} micro-batches of {stage.local_batch_size} samples in flight"
        f"{f'; {others} other ranks lack less' if others > 0 else ''}); {knob}"
    )


def _memory_knob(request: PlanRequest, costs: CostModel, stage: Stage, limit: int) -> str:
    costs = costs.on(stage)
    for block in stage.blocks:
        rows = costs.indices([block])
        alone = costs.stage_memory(rows, degree=request.num_ranks, local=1, in_flight=1)
        if alone > limit:
            return (
                f"its block {block!r} alone needs {alone} on every rank: coarsen less, recompute or swap, or raise "
                f"{name_of('memory.limit_gb')} by {alone - limit} bytes or more"
            )
    rows = costs.indices(stage.blocks)
    smallest = costs.stage_memory(rows, degree=stage.degree, local=1, in_flight=stage.in_flight)
    if smallest <= limit and stage.local_batch_size > 1 and stage.in_flight * stage.local_batch_size > 1:
        return f"lower {name_of('micro_batch_sizes')}"
    if request.zero_stage < 1 and stage.num_replicas > 1:
        return f"write {setting_of('zero', 1)}, add ranks, or raise {name_of('memory.limit_gb')}"
    return f"add ranks (now {request.num_ranks}) or stages, or raise {name_of('memory.limit_gb')}"


def _rank_problem(
    request: PlanRequest,
    costs: CostModel,
    groupings: Sequence[Sequence[Sequence[str]]],
    has_plan: HasPlan | None,
) -> str:
    """Say that the ranks cannot be shared out, and which numbers near theirs can; what was planned "would work"."""
    workable, tried = [], 0
    least = request.least_ranks  # fewer are refused
    for count in sorted(range(1, 2 * request.num_ranks + 1), key=lambda n: (abs(n - request.num_ranks), n)):
        if count == request.num_ranks or max(request.num_stages or 1, least) > count:
            continue
        devices = tuple(
            dataclasses.replace(request.cluster.devices[0], memory_bytes=UNLIMITED) for _ in range(count)
        )
        other = dataclasses.replace(
            request,
            num_ranks=count,
            memory_limit_bytes=None,
            cluster=dataclasses.replace(request.cluster, devices=devices),
        )
        chooser = DegreeChooser(other, costs, batch_rules(other))
        wishes = chooser.rules.sizes_to_try
        partitions = [[chooser.sets.mask_of(group) for group in groups] for groups in groupings]
        if any(chooser.choose(m, w, ignore_memory=True) is not None for m in partitions for w in wishes):
            tried += 1
            if has_plan is None or has_plan(with_ranks(request, count)):
                workable.append(count)
        if len(workable) == 2 or (has_plan is not None and tried == MOST_TRIED):
            break
    works = "can be shared out" if has_plan is None else "would work"
    nearest = f"; {' or '.join(map(str, sorted(workable)))} ranks {works}" if workable else ""
    degrees = request.data_parallel
    if (
        degrees is not None and not nearest
    ):  # of one number of samples, as many ranks take smaller units alone
        smaller = setting_of("loss_unit", max(request.mini_batch // degrees, 1), is_whole=True)
        nearest = f"; remove {setting_of('data_parallel', degrees)}, or write {smaller}"
    stages = "" if request.num_stages is None else f" in {request.num_stages} stages"
    fixed = (
        f" and {setting_of('micro_batch_sizes', request.micro_batch_sizes)}"
        if request.micro_batch_sizes
        else ""
    )
    degree = (
        "" if request.data_parallel is None else f" with {setting_of('data_parallel', request.data_parallel)}"
    )
    return (
        f"{request.num_ranks} ranks{stages}{degree} cannot share out a mini-batch of {request.mini_batch} with "
        f"loss units of {request.loss_unit}{fixed}: each stage's degree must divide its micro-batch, and a stage "
        f"that mixes samples takes {request.loss_unit} a rank{nearest}"
    )


# Joined planning: stages and the memory optimization they run with are chosen together (`fitting`).
#
# Three searches, as far as they are needed:
#
#     as it is     within the devices' memory, nothing swapped or recomputed: what is planned without all this
#     unlimited    with all the memory in the world; where its stages fit as they are, memory is ample, and the
#                  first plan is the plan
#     joined       every stage considered takes its time plus the least cost of making it fit
#
# The winner of the second, made to fit afterwards, competes too. So the result is never worse than planning
# without memory optimization, nor than optimizing a finished plan.


NUM_FITTED = 4
"""Candidates of a search that are fitted tensor by tensor and evaluated."""
NEAR = 1.1
"""Times the best step known, up to which what other searches found is refined."""
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


def evaluated_plans(
    request: PlanRequest,
    costs: CostModel,
    candidates: Sequence[Candidate],
    fitter: StageFitter | None,
    *,
    planner: str,
    notes: Mapping[tuple[StageDraft, ...], str] | None = None,
) -> list[PipelinePlan]:
    """Return the plans of the candidates that fit, those with the shortest simulated step first.

    Ties go to the shallower plan, then to the earlier candidate.
    """
    found: list[PipelinePlan] = []
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
        found.append(dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs)))
    least = min((plan.iteration_us for plan in found), default=0.0)
    return sorted(found, key=lambda plan: (max(plan.iteration_us, least * (1 + 1e-9)), plan.depth))


def simplest(plans: Sequence[PipelinePlan], band: float) -> PipelinePlan:
    """Return the shortest plan, or one of fewer stages that is at most ``band`` longer; of equals the earlier one."""
    # 10 stages 2457 ms, 3 stages 2480, 1 stage 2530: within 2 % the three, and a note of the ten; within 0 % the ten
    shortest = min(plans, key=lambda plan: plan.iteration_us)
    near = [p for p in plans if p.iteration_us <= shortest.iteration_us * (1 + max(band, ROUNDING))]
    found = min(near, key=lambda p: (len(p.stages), p.iteration_us)) if band else near[0]
    if len(found.stages) == len(shortest.stages):
        return found
    stages, less = len(shortest.stages), 1 - shortest.iteration_us / found.iteration_us
    note = (
        f"{stages} stages ({setting_of('stages', stages)}) may take {shortest.iteration_us / 1e3:.4g} ms, {less:.1%} "
        "less: no more than predictions are off"
    )
    return dataclasses.replace(found, notes=(*found.notes, note))


NUM_WEIGHED = 48
"""Candidates whose memory is worked out for `with_alternatives`; the best ones of each number of stages."""
MOST_ALTERNATIVES = 3
LESS_MEMORY = 0.9
FEWER_STAGES = 0.5
MOST_LONGER = 1.5
"""A longer plan is an alternative where it needs at most this part of each shorter one's memory, or of its stages, and
is not that many times longer."""


def with_alternatives(
    plan: PipelinePlan, request: PlanRequest, costs: CostModel, candidates: Sequence[Candidate]
) -> PipelinePlan:
    """Return the plan that says which candidates need much less memory, or stages, for how much more time."""
    # Stages, ms, GiB of candidates          kept beside the plan (3, 143, 41)
    #     8, 156, 18     4, 173, 11          8: 156, 18 and 4: 173, 11
    #     8, 160, 17     1, 150, 50          not 8: 160, 17, hardly less; 1: 150, 50, as it has far fewer stages
    by_count: dict[int, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda each: each.score):
        if candidate.score[0] == 0:
            by_count.setdefault(len(candidate.drafts), []).append(candidate)
    found = []
    for own in by_count.values():
        for candidate in own[: max(1, NUM_WEIGHED // len(by_count))]:
            other = build_plan(request, candidate.drafts, planner="", costs=costs, is_named=False)
            if memory_excess(request, other)[0] <= 0:
                found.append((candidate.score[1], len(other.stages), _peak_bytes(other), other))
    kept = [(len(plan.stages), _peak_bytes(plan))]
    alternatives = []
    for _, count, peak, other in sorted(found, key=lambda each: each[:3]):
        if any(count > FEWER_STAGES * stages and peak > LESS_MEMORY * most for stages, most in kept):
            continue
        us = evaluate_us(other, costs)
        if us > MOST_LONGER * plan.iteration_us:
            continue
        kept.append((count, peak))
        alternatives.append(
            Alternative(num_stages=count, iteration_us=us, peak_bytes=peak, zero_stage=request.zero_stage)
        )
        if len(alternatives) == MOST_ALTERNATIVES:
            break
    return dataclasses.replace(plan, alternatives=tuple(sorted(alternatives, key=lambda a: a.iteration_us)))


def _peak_bytes(plan: PipelinePlan) -> int:
    return max(stage.memory_bytes for stage in plan.stages)


# The configuration nearest to a request that no plan fits: found by planning, not by rule of thumb.
#
# One thing is changed at a time, in the order in which it costs the user least: ways to save memory, the samples
# a rank computes at a time, ZeRO, stages and ranks, and last the memory of a rank. What is suggested has a plan.


HasPlan = Callable[[PlanRequest], bool]

MORE_RANKS = (2,)
"""Times the requested ranks, that are tried."""
LIMIT_STEP = 1.02
MOST_STEPS = 4
NUM_BISECTIONS = 2
MOST_SHOWN = 3


def nearest_that_fits(request: PlanRequest, has_plan: HasPlan, missing_bytes: int) -> str:
    """Return a clause with up to three changes that each make a plan fit, or that none does.

    Args:
        has_plan: plans a changed request.
        missing_bytes: of the worst rank of the plan nearest to fitting.
    """
    found: list[str] = []
    for change in _changes(request, has_plan):
        found.append(change)
        if len(found) == MOST_SHOWN - 1:
            break
    least = _least_limit(request, has_plan, missing_bytes)
    if least is not None:
        found.append(f"{least} bytes a rank ({setting_of('memory.limit_gb', float(limit_gb(least)))})")
    return f"nearest that fits: {', or '.join(found)}" if found else "nothing that was tried fits"


def _changes(request: PlanRequest, has_plan: HasPlan) -> Iterator[str]:
    both = ("recompute", "swap")
    for ways in (("recompute",), both):
        more = tuple(dict.fromkeys((*request.memory_optimization, *ways)))
        if len(more) > len(request.memory_optimization) and has_plan(
            dataclasses.replace(request, memory_optimization=more)
        ):
            yield " and ".join(setting_of(f"memory.{way}", "auto") for way in more)
            break
    sizes = request.micro_batch_sizes or {}
    if "*" in sizes:
        size = _largest(
            sizes["*"], lambda n: has_plan(dataclasses.replace(request, micro_batch_sizes={**sizes, "*": n}))
        )
        if size is not None:
            yield setting_of("micro_batch_sizes", size)
    unit = request.loss_unit
    if request.keep_units or any(block.is_coupled for block in request.graph.blocks):
        size = _largest(unit, lambda n: has_plan(dataclasses.replace(request, loss_unit=n)))
        if size is not None:
            yield setting_of("loss_unit", size)
    most = 0 if request.num_ranks == 1 else 2 if request.mode == "async" else 3
    for stage in range(request.zero_stage + 1, most + 1):
        if has_plan(dataclasses.replace(request, zero_stage=stage)):
            yield setting_of("zero", stage)
            break
    if request.num_stages is not None and has_plan(dataclasses.replace(request, num_stages=None)):
        yield "stages left to the planner"
    for factor in MORE_RANKS if request.num_stages is None else ():
        ranks = round(factor * request.num_ranks)
        if ranks > request.num_ranks and has_plan(with_ranks(request, ranks)):
            yield f"{ranks} ranks"
            break


def _largest(size: int, works: Callable[[int], bool]) -> int | None:
    """Return the largest proper divisor of ``size`` that works, or None; smaller ones work where larger do."""
    divisors = [n for n in range(1, size) if size % n == 0]
    if not divisors or not works(divisors[0]):
        return None
    low, high = 0, len(divisors)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(divisors[middle]) else (low, middle)
    return divisors[low]


def with_ranks(request: PlanRequest, num_ranks: int) -> PlanRequest:
    """Return the request for so many ranks, on devices like those there are."""
    devices = request.cluster.devices[: request.num_ranks]
    more = (devices * (num_ranks // len(devices) + 1))[:num_ranks]
    cluster = dataclasses.replace(request.cluster, devices=more)
    return dataclasses.replace(request, num_ranks=num_ranks, cluster=cluster)


def _with_limit(request: PlanRequest, limit: int) -> PlanRequest:
    devices = tuple(
        dataclasses.replace(device, memory_bytes=max(device.memory_bytes, limit))
        for device in request.cluster.devices
    )
    cluster = dataclasses.replace(request.cluster, devices=devices)
    return dataclasses.replace(request, cluster=cluster, memory_limit_bytes=limit)


def _least_limit(request: PlanRequest, has_plan: HasPlan, missing_bytes: int) -> int | None:
    """Return about the least memory of a rank with which there is a plan."""
    low = max(request.rank_limits[rank] for rank in range(request.num_ranks))
    high = low + missing_bytes
    for _ in range(MOST_STEPS):
        if has_plan(_with_limit(request, high)):
            break
        low, high = high, round(high * LIMIT_STEP)
    else:
        return None
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if has_plan(_with_limit(request, middle)) else (middle, high)
    return high
