"""Picks the schedule of a plan by simulation: what ``schedule: "auto"`` and ``slicing: "auto"`` mean.

Candidates are the same for all stages: 1F1B, kFkB, GPipe, greedy, and 1F1B with a longer warm-up, which
hides messages behind computation where links are slow (Table 2 assumes that they take no time). Zero bubble
is tried only on request: with 1F1B's in-flight counts, and with the first stage's on every
stage where memory allows. The warm-up of the best candidate is then sliced, if that is shorter.

Source: Zero Bubble (arXiv 2401.10241), section 2 (what W keeps); this project (with swap and recompute)
Tests: tests/plan/test_schedules.py
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible, ScheduleError
from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, stages_behind
from gpp_plugin.ir.step_cost import Reductions
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import MAX_RANK_TASKS, update_times
from gpp_plugin.plan.make import (
    has_split_times,
    pending_bytes,
    with_link_times,
    with_part_times,
    with_pending,
)
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.refine.plan_evaluator import BUDGET, PlanEvaluator, memory_excess, under
from gpp_plugin.plan.request import PlanRequest, SearchReport, coupled_blocks
from gpp_plugin.plugins import AUTO, KFKB, SCHEDULES, is_schedule_name, k_of, schedule_label, unknown_schedule
from gpp_plugin.schedule.build import build_schedules, plan_in_flight, with_schedule, with_slices
from gpp_plugin.schedule.event_loop import Durations
from gpp_plugin.schedule.orders.slicer import slice_warm_up, unsliced
from gpp_plugin.simulate.predict import predict_iteration_us

logger = logging.getLogger(__name__)

USUAL_SCHEDULES = ("1f1b", "gpipe", "greedy")
"""What ``schedule: "auto"`` tries; ``zero_bubble`` must be requested."""

GAIN = 0.01
"""A later candidate must be faster by this fraction, or hold less in the same time: a simulation is not more exact."""

SPLIT_GAIN = 0.02
"""What zero bubble must gain where the user did not ask for it: what splitting costs is known to a few percent."""

GREEDY_TASKS = 2048
"""Most tasks of all stages for which the greedy schedule is tried: it simulates the plan once a task."""


Context = dict[str, Any]
"""What all candidates are predicted with: arguments of `predict_iteration_us`."""


def choose_schedule(
    plan: PipelinePlan,
    *,
    schedules: Collection[str] = USUAL_SCHEDULES,
    slicing: str | int = "off",
    whole_stages: Collection[int] = (),
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    most_in_flight: Sequence[int] | None = None,
    reduce_us: Mapping[int, float] | Reductions | None = None,
    step_us: Mapping[int, float] | None = None,
) -> PipelinePlan:
    """Return ``plan`` with the schedule, k, in-flight counts and slices of the shortest predicted iteration.

    This is the entry for an engine: the result runs as it is (`build_schedules`, `lower_schedules`).

    Args:
        schedules: names of `Stage.schedule` that may be chosen; ``1f1b`` stands for kFkB too. What a split
            backward costs is in the plan's times of its parts or in ``durations``.
        slicing: as for `choose_slicing`, which has the last word on the best schedule.
        whole_stages: stages whose forwards must not run in halves (those with coupled blocks).
        most_in_flight: for each stage, the most micro-batches its memory holds; None is no limit.
        cluster, durations, reduce_us, step_us: as for `simulate_plan`.

    Raises:
        PlanError: no candidate fits ``most_in_flight``; the text says what the least one needs.
        ValueError: a schedule or ``slicing`` is unknown.
    """
    # Slices come last, on the winner alone: they change no in-flight count, and each one tried is a simulation more.
    context = Context(cluster=cluster, durations=durations, reduce_us=reduce_us, step_us=step_us)
    candidates = candidate_schedules(unsliced(plan), schedules, most_in_flight=most_in_flight)
    name, chosen, time = _shortest(candidates, context, most_in_flight)
    chosen, time, slices = _choose_slicing(chosen, time, slicing, whole_stages, context)
    note = f"schedule {name}{slices}"
    return dataclasses.replace(chosen, notes=(*plan.notes, note), iteration_us=time)


def _shortest(
    candidates: Iterable[tuple[str, PipelinePlan]],
    context: Context,
    most_in_flight: Sequence[int] | None,
) -> tuple[str, PipelinePlan, float]:
    """Return the best of some (name, plan), and its predicted time.

    Raises:
        PlanError: none fits ``most_in_flight``.
    """
    # 1F1B comes first, and each candidate must beat the best one so far by `GAIN`, or hold less in no more time. So
    # with
    #
    #     1f1b 100.0 us, 12 samples     2f2b 99.5, 20     gpipe 99.5, 32     greedy 100.0, 9
    #
    # 2F2B and GPipe are no faster than the simulation is exact, greedy takes as long and holds less, and is chosen.
    best: tuple[float, float, PipelinePlan, str] | None = None
    refused = []
    for name, candidate in candidates:
        counts = [stage.in_flight for stage in candidate.stages]
        if most_in_flight is not None and any(c > m for c, m in zip(counts, most_in_flight, strict=True)):
            refused.append(f"{name} {counts}")
            continue
        try:
            time = predict_iteration_us(candidate, **context)
        except ScheduleError as error:
            # A longer warm-up of one stage can ask more of another than that one holds.
            logger.debug("schedule %s: %s", name, error)
            continue
        held = sum(s.in_flight * s.micro_batch_size for s in candidate.stages)
        logger.debug("schedule %s: %.1f us, %d samples in flight", name, time, held)
        if best is None or time < best[0] * (1.0 - GAIN) or (time <= best[0] and held < best[1]):
            best = (time, held, candidate, name)
    if best is None:
        limits = list(most_in_flight or ())
        raise PlanError(
            f"no schedule fits {limits} micro-batches in flight; the candidates hold {'; '.join(refused)}; "
            f"lower {name_of('micro_batch_sizes')} or allow more memory"
        )
    time, _, chosen, name = best
    return name, chosen, time


def choose_slicing(
    plan: PipelinePlan,
    *,
    slicing: str | int = "auto",
    whole_stages: Collection[int] = (),
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    reduce_us: Mapping[int, float] | Reductions | None = None,
    step_us: Mapping[int, float] | None = None,
) -> PipelinePlan:
    """Return ``plan``, its schedules as they are, with `Stage.num_sliced` of the shortest predicted iteration.

    Args:
        slicing: ``auto`` takes halves sent singly, halves joined in the last send of each warm-up, or none,
            whichever is shortest; ``on`` one of the first two; a number slices so many micro-batches;
            ``off`` slices nothing.
        whole_stages: stages whose forwards must not run in halves (those with coupled blocks).
        cluster, durations, reduce_us, step_us: as for `simulate_plan`.

    Raises:
        ScheduleError: the plan cannot run.
        ValueError: ``slicing`` is unknown.
    """
    context = Context(cluster=cluster, durations=durations, reduce_us=reduce_us, step_us=step_us)
    plan = unsliced(plan)
    unsliced_us = predict_iteration_us(plan, **context)
    chosen, time, slices = _choose_slicing(plan, unsliced_us, slicing, whole_stages, context)
    notes = (*plan.notes, f"warm-up{slices}") if slices else plan.notes
    return dataclasses.replace(chosen, notes=notes, iteration_us=time)


def _choose_slicing(
    plan: PipelinePlan,
    unsliced_us: float,
    slicing: str | int,
    whole_stages: Collection[int],
    context: Context,
) -> tuple[PipelinePlan, float, str]:
    """Return the plan to run, its time, and what to report of its slices."""
    is_count = isinstance(slicing, int) and not isinstance(slicing, bool) and slicing >= 0
    if slicing not in ("auto", "on", "off") and not is_count:
        raise ValueError(f"slicing is {slicing!r}; give auto, on, off or a number of micro-batches")
    if slicing in ("off", 0):
        return plan, unsliced_us, ""
    variants = []
    schedules = build_schedules(plan)
    for joins_last, how in ((False, "halves sent singly"), (True, "last send joined")):
        sliced = slice_warm_up(
            plan,
            num_sliced=slicing if isinstance(slicing, int) else None,
            joins_last=joins_last,
            whole_stages=whole_stages,
            cluster=context["cluster"],
        )
        if any(stage.num_sliced for stage in sliced.stages):
            us = predict_iteration_us(sliced, schedules=with_slices(sliced, schedules), **context)
            variants.append((us, sliced, how))
    if not variants:
        why = "the longest warm-up has two stages or fewer, or none that can be halved"
        return plan, unsliced_us, "" if slicing == "auto" else f", nothing sliced ({why})"
    # Fewer messages win where both take the same time.
    time, chosen, how = min(reversed(variants), key=lambda v: v[0])
    if slicing == "auto" and time >= unsliced_us * (1.0 - GAIN):
        return plan, unsliced_us, ""
    return chosen, time, f", {max(s.num_sliced for s in chosen.stages)} sliced ({how})"


def candidate_schedules(
    plan: PipelinePlan,
    schedules: Collection[str] = USUAL_SCHEDULES,
    *,
    most_in_flight: Sequence[int] | None = None,
) -> Iterator[tuple[str, PipelinePlan]]:
    """Yield (name, plan under that schedule), 1F1B first.

    Args:
        schedules: the names allowed.
        most_in_flight: what zero bubble may use of; the other candidates take what they need.

    Raises:
        ValueError: a name is unknown.
    """
    known = SCHEDULES.names()
    unknown = sorted(set(schedules) - set(known))
    if unknown or not schedules:
        raise ValueError(f"schedules {unknown} are not among {known}; give at least one of these")
    # Why a longer warm-up is one: 1F1B on two stages, a message as long as a task. With 2 and 1 in flight stage 0
    # waits for the way there and back each time, with 3 and 1 it does not:
    #
    #     2   F0 F1 .  .  .  B0 F2 B1 F3 .  .  B2 ...        3   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 ...
    if "1f1b" in schedules:
        base = _under(plan, "1f1b", 1)
        yield "1f1b", base
        for longer in (1.5, 2.0):
            yield f"1f1b with {longer:g} times the warm-up", _with_longer_warm_up(base, longer)
        for k in (2, 4):
            if any(plan.num_micro_batches(i) > k for i in range(len(plan.stages))):
                yield f"{k}f{k}b", _under(plan, "1f1b", k)
    if "greedy" in schedules and (plan.num_rank_tasks <= GREEDY_TASKS or len(schedules) == 1):
        yield "greedy", _under(plan, "greedy", 1)
    if "gpipe" in schedules:
        yield "gpipe", _under(plan, "gpipe", 1)
    if "zero_bubble" in schedules:
        split = _under(plan, "zero_bubble", 1)
        yield "zero_bubble", split
        yield "zero_bubble with the most in flight on every stage", _with_even_limits(split, most_in_flight)
    for name in known:
        if name in schedules and name not in SCHEDULES.built_in:
            yield name, _under(plan, name, 1)


def _under(plan: PipelinePlan, schedule: str, k: int) -> PipelinePlan:
    """Return the plan with one schedule on all stages and its in-flight counts."""
    changed = with_schedule(plan, schedule, k)
    return changed.with_each(in_flight=plan_in_flight(changed))


def _with_longer_warm_up(plan: PipelinePlan, factor: float) -> PipelinePlan:
    """Return the plan with in-flight counts scaled on all stages but sinks, which nothing waits behind."""
    behind = stages_behind(plan)
    counts = [
        min(math.ceil(stage.in_flight * factor), plan.num_micro_batches(i)) if behind[i] else stage.in_flight
        for i, stage in enumerate(plan.stages)
    ]
    return plan.with_each(in_flight=counts)


def _with_even_limits(plan: PipelinePlan, most_in_flight: Sequence[int] | None) -> PipelinePlan:
    """Return the plan with as many samples in flight on every stage as on the one that holds most, memory allowing."""
    samples = max(stage.in_flight * stage.micro_batch_size for stage in plan.stages)
    counts = []
    for index, stage in enumerate(plan.stages):
        most = plan.num_micro_batches(index)
        if most_in_flight is not None:
            most = min(most, most_in_flight[index])
        counts.append(max(stage.in_flight, min(samples // stage.micro_batch_size, most)))
    return plan.with_each(in_flight=counts)


# The schedule of a plan whose ranks hold several stages: the one the user names, or the shortest in simulation.
#
# Stages keep orders of their own, as on ranks of their own; in what turns a rank runs the tasks of its stages is found
# for each candidate (`schedule.shared_ranks`). Forwards are not run in halves there.

SPLIT = "zero_bubble"


def schedule_shared(
    plan: PipelinePlan,
    request: PlanRequest,
    *,
    schedule: str = AUTO,
    budget: int = BUDGET,
    report: SearchReport | None = None,
) -> PipelinePlan:
    """Return ``plan``, whose ranks hold several stages, under a schedule, with in-flight counts that fit.

    A plan that swaps or recomputes stays, or runs zero bubble, fitted anew.

    Args:
        budget: tasks of the simulations, after which no further schedule is tried; ``report`` notes that.

    Raises:
        PlanInfeasible: nothing that the name stands for fits the ranks' memory and can run.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    evaluator = PlanEvaluator(
        request,
        costs,
        schedule=first_schedule(schedule),
        budget=budget,
        fitter=fitter_for(request, costs),
        report=report,
    )
    is_fitted = any(stage.memory is not None for stage in plan.stages)
    # what swaps or recomputes does so for its order: that stays, or backwards are split and it is fitted anew
    best: PipelinePlan | None = plan if is_fitted and schedule == AUTO else None
    plain = without_memory_plans(plan, costs) if is_fitted else plan
    for name, gain in _names(request, schedule):
        if is_fitted and name != SPLIT:
            continue
        if best is not None and evaluator.is_spent():
            break
        found = evaluator.best_counts(under(with_part_times(plain, costs), name, costs))
        if found is not None and (best is None or found.iteration_us < best.iteration_us * (1.0 - gain)):
            best = found
    if best is None:
        rank = max(range(plan.num_ranks), key=lambda rank: len(plan.stages_of_rank(rank)))
        held = ", ".join(plan.stages[i].name for i in plan.stages_of_rank(rank))
        raise PlanInfeasible(
            f"no order of schedule {schedule!r} fits and runs with several stages on a rank (rank {rank} holds "
            f"{held}); write {setting_of('schedule', '1f1b')}, lower {name_of('micro_batch_sizes')}, or give stages "
            "ranks of their own"
        )
    return best


def _names(request: PlanRequest, schedule: str) -> Iterator[tuple[str, float]]:
    """Yield the schedules to try, and by what part each must be shorter than those before it."""
    if schedule != AUTO:
        yield first_schedule(schedule), 0.0
        return
    yield "1f1b", 0.0
    yield "gpipe", GAIN
    if has_split_times(request.profile):
        yield SPLIT, SPLIT_GAIN


def first_schedule(schedule: str) -> str:
    """Return the schedule that stages are chosen for, where the user's name stands for several."""
    return {AUTO: "1f1b", KFKB: "2f2b"}.get(schedule, schedule)


# The schedule a plan runs: the one the user names, for every stage, or the shortest in simulation.
#
# Planners choose stages under 1F1B (or GPipe, which holds more); here the finished plan's stages get their
# schedule and in-flight counts, within the memory its ranks have. Stages that swap or recompute keep the planner's
# order, which that was made for, or run zero bubble, for which it is made anew (`fitted_split`).

LARGEST_K = 8


@paused_collector()  # as in `make_plan`
def schedule_plan(
    plan: PipelinePlan, request: PlanRequest, *, schedule: str = "auto", slicing: str | int = "auto"
) -> PipelinePlan:
    """Return ``plan`` under the schedule called ``schedule``, with its in-flight counts, slices and memory.

    Plans whose mode counts on their order and DeepSpeed's own stay as they are, and so do plans of too many tasks to
    simulate one by one, unless another schedule is requested. Of plans that swap or recompute only backwards may be
    split.

    Args:
        slicing: as for `choose_slicing`: ``auto`` runs the first forwards in halves where that is shorter.

    Raises:
        PlanError: there is no such schedule, or the plan must keep another one.
        PlanInfeasible: ranks lack the memory for what it holds.
    """
    if not is_schedule_name(schedule):
        raise PlanError(unknown_schedule(schedule))
    # Who decides, from the strongest: a plan that rests on its order keeps it (and refuses another by name); then the
    # name the user gives; then the simulation, which is left out where it would take too long. A stage of 16
    # micro-batches on 4 ranks is 2 * 16 * 4 = 128 tasks, a forward and a backward for each micro-batch and rank.
    #
    #     plan                 "auto"              "gpipe"
    #     1f1b, usual          the shortest        gpipe
    #     1f1b, with swaps     1f1b, zero bubble   PlanError: its swaps go by 1f1b's order
    tasks = plan.num_rank_tasks
    is_fitted = any(stage.memory is not None for stage in plan.stages)
    is_fixed = plan.planner == STOCK or plan.mode == "async" or (is_fitted and schedule != SPLIT)
    labels = {schedule_label(stage) for stage in plan.stages}
    if is_fixed and schedule not in ("auto", *labels):
        runs = f"planner {plan.planner!r} made its plan for {' and '.join(sorted(labels))}"
        fix = 'use "auto", or another planner'
        if plan.mode == "async":
            runs, fix = "mode async runs 1f1b", 'use "auto"'
        raise PlanError(f"schedule {schedule!r}: {runs}; {fix}")
    if is_fixed and not (is_fitted and plan.planner != STOCK and plan.mode == "sync"):
        return plan
    if is_fitted and schedule not in ("auto", SPLIT):
        return plan
    if plan.shares_ranks:
        return schedule_shared(plan, request, schedule=schedule)
    if tasks > MAX_RANK_TASKS and schedule in ("auto", *labels):
        note = f"{tasks} tasks are too many to try schedules and slices on; it keeps {' and '.join(sorted(labels))}"
        return dataclasses.replace(plan, notes=(*plan.notes, note))
    chooser = _Chooser(plan, request, slicing)
    if schedule == SPLIT:
        return chooser.named_split()
    if is_fitted:
        return chooser.with_split(plan)
    if schedule == "auto":
        return chooser.shortest()
    if schedule == "kfkb":
        most = max(plan.num_micro_batches(i) for i in range(len(plan.stages)))
        return chooser.best_k(range(2, max(2, min(LARGEST_K, most)) + 1))
    k = k_of(schedule)
    if k is None:
        return chooser.among((schedule,))
    return chooser.planned() if labels == {schedule} else chooser.best_k([k])


class _Chooser:
    """Tries schedules on one plan: times of parts of tasks from the profile, memory of its ranks."""

    def __init__(self, plan: PipelinePlan, request: PlanRequest, slicing: str | int) -> None:
        self._request = request
        self._costs = costs = CostModel(
            request.graph, request.profile, request.cluster, zero_stage=request.zero_stage
        )
        self._plan = plan = with_part_times(plan, costs)
        self._slicing = slicing
        coupled = coupled_blocks(request.graph)
        self._context: dict[str, Any] = {
            "cluster": request.cluster,
            "whole_stages": [
                i
                for i, stage in enumerate(plan.stages)
                if not coupled.isdisjoint(stage.blocks)
                or stage.local_batch_size < 2 * request.smallest_local_batch
            ],
            "reduce_us": costs.reductions(plan),
            "step_us": update_times(plan, costs),
        }
        self._most_in_flight = [self._most(i) for i in range(len(plan.stages))]

    def planned(self) -> PipelinePlan:
        """Return the plan with the counts its planner chose, perhaps more than Table 2's to hide messages."""
        return choose_slicing(self._plan, slicing=self._slicing, **self._context)

    def among(self, schedules: Sequence[str]) -> PipelinePlan:
        """Return the plan under the quickest of ``schedules`` that fits."""
        try:
            chosen = choose_schedule(
                self._plan,
                schedules=schedules,
                slicing=self._slicing,
                most_in_flight=self._most_in_flight,
                **self._context,
            )
        except PlanError as error:
            raise PlanInfeasible(str(error)) from error
        return self._with_memory(chosen)

    def shortest(self) -> PipelinePlan:
        """Return the plan as planned, or under the usual schedule that is shorter.

        Zero bubble is tried where it is known what splitting backwards costs, and must win by more than that may be
        off.
        """
        best = self.planned()
        if len(self._plan.stages) == 1:
            return best
        chosen = self.among(USUAL_SCHEDULES)
        if chosen.iteration_us < best.iteration_us * (1.0 - GAIN):
            best = chosen
        return self.with_split(best)

    def with_split(self, best: PipelinePlan) -> PipelinePlan:
        """Return ``best``, or the plan under zero bubble where that is known to be shorter."""
        if len(self._plan.stages) > 1 and has_split_times(self._request.profile):
            chosen = self._split()
            if chosen is not None and chosen.iteration_us < best.iteration_us * (1.0 - SPLIT_GAIN):
                return chosen
        return best

    def named_split(self) -> PipelinePlan:
        """Return the plan under zero bubble.

        Raises:
            PlanInfeasible: it does not fit.
        """
        chosen = self._split()
        if chosen is None:
            counts = [stage.in_flight for stage in self._plan.stages]
            raise PlanInfeasible(
                f"no schedule fits: zero_bubble holds {counts} micro-batches in flight, and beside them the gradients "
                f"that wait for weight gradients; write {setting_of('schedule', '1f1b')}, "
                f"{setting_of('memory.swap', 'auto')} or {setting_of('memory.recompute', 'auto')}, or lower "
                f"{name_of('micro_batch_sizes')}"
            )
        return chosen

    def _split(self) -> PipelinePlan | None:
        """Return the shortest plan under zero bubble that fits; None where none does."""
        fitter = fitter_for(self._request, self._costs)
        candidates = []  # each with orders that take messages to be free, and not
        for name, candidate in candidate_schedules(
            unsliced(self._plan), (SPLIT,), most_in_flight=self._most_in_flight
        ):
            candidates.append((name, candidate))
            linked = with_link_times(candidate, self._request.cluster)
            if linked is not candidate:
                candidates.append((f"{name}, its order with the links' times", linked))
        best: PipelinePlan | None = None
        for name, candidate in candidates:
            fitted = fitted_split(candidate, self._request, self._costs, fitter)
            if fitted is None:
                continue
            found = choose_slicing(fitted, slicing=self._slicing, **self._context)
            if best is None or found.iteration_us < best.iteration_us * (1.0 - GAIN):
                note = f"schedule {name}"
                best = dataclasses.replace(found, notes=(*found.notes, note))
        return best

    def best_k(self, ks: Iterable[int]) -> PipelinePlan:
        """Return the plan under the kFkB of the shortest step among those that fit."""
        candidates = [self._with_memory(_under(unsliced(self._plan), "1f1b", k)) for k in ks]
        fitting = [c for c in candidates if memory_excess(self._request, c)[0] <= 0]
        if not fitting:
            _, stage, rank = memory_excess(self._request, candidates[0])
            raise PlanInfeasible(
                f"stage {stage.name!r} holds {stage.in_flight} micro-batches under {schedule_label(stage)} and needs "
                f"{stage.memory_bytes} bytes, rank {rank} has {self._request.rank_limits[rank]}; write "
                f"{setting_of('schedule', '1f1b')}, or lower {name_of('micro_batch_sizes')}"
            )
        timed = [choose_slicing(c, slicing=self._slicing, **self._context) for c in fitting]
        return min(timed, key=lambda candidate: candidate.iteration_us)

    def _most(self, index: int) -> int:
        """Return how many micro-batches of a stage its ranks' memory holds, at most all of them."""
        stage = self._plan.stages[index]
        limit = min(self._request.rank_limits[rank] for rank in stage.ranks)
        none, one = (self._costs.memory_of(stage, in_flight) for in_flight in (0, 1))
        count = self._plan.num_micro_batches(index)
        return count if one <= none else min(count, max((limit - none) // (one - none), 0))

    def _with_memory(self, plan: PipelinePlan) -> PipelinePlan:
        needs = [self._costs.memory_of(stage, stage.in_flight) for stage in plan.stages]
        return plan.with_each(memory_bytes=needs)


# Zero bubble on a plan: what its order leaves pending counts, and stages swap and recompute where it does not fit.
#
# A micro-batch of a split backward is in flight until its weight gradient is made (W). Up to its input gradient (I) it
# holds what its forward saved; from there on also the gradients that arrived at operators with parameters, which W
# reads. So a stage of c micro-batches in flight, p of them pending at a time, needs what c whole backwards need, and p
# times these gradients. How many are pending only the order says:
#
#     F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3        in flight 3 (before W0), pending 2 (behind I1)
#
# A stage that does not fit is fitted into what those gradients leave of its rank (`memory.fitting`). That makes both
# parts of its backward longer (`with_part_times`), which may change the order, and with it what is pending: so orders
# are made again, at most `ROUNDS` times, and the plan counts with the last.

ROUNDS = 3
"""Orders that are made of one plan at most."""


def fitted_split(
    plan: PipelinePlan, request: PlanRequest, costs: CostModel, fitter: StageFitter | None
) -> PipelinePlan | None:
    """Return a plan of split backwards with the memory its order needs, and memory plans where stages need them.

    None where it does not fit, or cannot run with its in-flight counts.

    Args:
        plan: its stages have ranks of their own; memory plans it has are made anew.
        fitter: makes stages fit; None: such plans are left out.
    """
    plain = without_memory_plans(plan, costs)
    current = with_part_times(plain, costs)
    for _ in range(ROUNDS):
        try:
            schedules = build_schedules(current)
        except (ScheduleError, PlanError) as error:
            logger.debug("split backwards: %s", error)
            return None
        counted = with_pending(current, costs, schedules)
        if memory_excess(request, counted)[0] <= 0:
            return counted
        if fitter is None:
            return None
        stages = []
        for stage, pending in zip(plain.stages, counted.stages, strict=True):
            # what the pending micro-batches leave of its ranks
            limit = min(request.rank_limits[rank] for rank in stage.ranks)
            limit -= pending_bytes(stage, costs, pending.pending)
            stages.append(fitter.fitted_stage(stage, limit=limit))
        current = with_part_times(dataclasses.replace(plan, stages=tuple(stages)), costs)
    return None


def without_memory_plans(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan whose stages swap and recompute nothing, with what they take and need so."""
    count = len(plan.stages)
    added = [stage.memory.added_us if stage.memory is not None else 0.0 for stage in plan.stages]
    return plan.with_each(
        memory=[None] * count,
        pending=[0] * count,
        memory_bytes=[costs.memory_of(stage, stage.in_flight) for stage in plan.stages],
        backward_us=[stage.backward_us - more for stage, more in zip(plan.stages, added, strict=True)],
    )
