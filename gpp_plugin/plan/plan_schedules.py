"""The schedule a plan runs: the one the user names, for every stage, or the shortest in simulation.

Planners choose stages under 1F1B (or GPipe, which holds more); here the finished plan's stages are given their
schedule and in-flight counts, within the memory its ranks have. Stages that swap or recompute keep the planner's order,
which that was made for, or run zero bubble, for which it is made anew (`split_backwards`).

Source: this project
Tests: tests/plan/test_schedules.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.batch_rules import coupled_blocks
from gpp_plugin.plan.choose_schedule import (
    GAIN,
    SPLIT_GAIN,
    USUAL_SCHEDULES,
    candidate_schedules,
    choose_schedule,
    choose_slicing,
)
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.judge import MAX_RANK_TASKS
from gpp_plugin.plan.costs.link_times import with_link_times
from gpp_plugin.plan.costs.part_times import knows_split_times, with_part_times
from gpp_plugin.plan.memory.fitting import fitter_for
from gpp_plugin.plan.request import PlanRequest, rank_limit
from gpp_plugin.plan.selection import memory_excess
from gpp_plugin.plan.shared.shared_schedules import SPLIT, schedule_shared
from gpp_plugin.plan.split_backwards import fitted_split
from gpp_plugin.schedule.names import is_schedule_name, k_of, schedule_label, unknown_schedule
from gpp_plugin.schedule.orders.forward_only import forward_only_stages
from gpp_plugin.schedule.orders.in_flight import plan_in_flight
from gpp_plugin.schedule.orders.slicer import unsliced

LARGEST_K = 8


@paused_collector()  # as in `make_plan`
def schedule_plan(
    plan: PipelinePlan, request: PlanRequest, *, schedule: str = "auto", slicing: str | int = "auto"
) -> PipelinePlan:
    """Return ``plan`` under the schedule called ``schedule``, with its in-flight counts, slices and memory.

    Plans whose mode counts on their order and DeepSpeed's own stay as they are, and so do plans of too many tasks to
    simulate one by one, unless another schedule is asked for. Of plans that swap or recompute only backwards may be
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
    tasks = sum(2 * plan.num_micro_batches(i) * stage.degree for i, stage in enumerate(plan.stages))
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
        self._surroundings: dict[str, Any] = {
            "cluster": request.cluster,
            "whole_stages": [
                i
                for i, stage in enumerate(plan.stages)
                if not coupled.isdisjoint(stage.blocks)
                or stage.local_batch_size < 2 * request.smallest_local_batch
            ],
            "forward_only_stages": forward_only_stages(plan),
            "reduce_us": costs.reduce_times(plan),
        }
        self._most_in_flight = [self._most(i) for i in range(len(plan.stages))]

    def planned(self) -> PipelinePlan:
        """Return the plan with the counts its planner chose, perhaps more than Table 2's to hide messages."""
        return choose_slicing(self._plan, slicing=self._slicing, **self._surroundings)

    def among(self, schedules: Sequence[str]) -> PipelinePlan:
        """Return the plan under the quickest of ``schedules`` that fits."""
        try:
            chosen = choose_schedule(
                self._plan,
                schedules=schedules,
                slicing=self._slicing,
                most_in_flight=self._most_in_flight,
                **self._surroundings,
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
        if len(self._plan.stages) > 1 and knows_split_times(self._request.profile):
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
                "that wait for weight gradients; use 1f1b, allow swap or recompute, or lower micro_batch_sizes"
            )
        return chosen

    def _split(self) -> PipelinePlan | None:
        """Return the shortest plan under zero bubble that fits; None where none does."""
        fitter = fitter_for(self._request, self._costs)
        best: PipelinePlan | None = None
        for name, candidate in self._split_candidates():
            fitted = fitted_split(candidate, self._request, self._costs, fitter)
            if fitted is None:
                continue
            found = choose_slicing(fitted, slicing=self._slicing, **self._surroundings)
            if best is None or found.iteration_us < best.iteration_us * (1.0 - GAIN):
                note = f"schedule {name}: {found.iteration_us:.0f} us predicted"
                best = dataclasses.replace(found, notes=(*found.notes, note))
        return best

    def _split_candidates(self) -> Iterator[tuple[str, PipelinePlan]]:
        """Yield (name, plan under zero bubble), each with orders that take messages to be free, and not."""
        tried = candidate_schedules(unsliced(self._plan), (SPLIT,), most_in_flight=self._most_in_flight)
        for name, candidate in tried:
            yield name, candidate
            linked = with_link_times(candidate, self._request.cluster)
            if linked is not candidate:
                yield f"{name}, its order with the links' times", linked

    def best_k(self, ks: Iterable[int]) -> PipelinePlan:
        """Return the plan under the kFkB of the shortest step among those that fit."""
        candidates = [self._with_memory(_under_k(self._plan, k)) for k in ks]
        fitting = [c for c in candidates if memory_excess(self._request, c)[0] <= 0]
        if not fitting:
            self._explain(candidates[0])
        timed = [choose_slicing(c, slicing=self._slicing, **self._surroundings) for c in fitting]
        return min(timed, key=lambda candidate: candidate.iteration_us)

    def _most(self, index: int) -> int:
        """Return how many micro-batches of a stage its ranks' memory holds, at most all of them."""
        stage = self._plan.stages[index]
        limit = min(rank_limit(self._request, rank) for rank in stage.ranks)
        none, one = (self._memory(stage, in_flight) for in_flight in (0, 1))
        count = self._plan.num_micro_batches(index)
        return count if one <= none else min(count, max((limit - none) // (one - none), 0))

    def _memory(self, stage: Stage, in_flight: int) -> int:
        blocks = self._costs.indices(stage.blocks)
        return self._costs.on(stage).stage_memory(
            blocks, degree=stage.degree, local=stage.local_batch_size, in_flight=in_flight
        )

    def _with_memory(self, plan: PipelinePlan) -> PipelinePlan:
        stages = tuple(
            dataclasses.replace(stage, memory_bytes=self._memory(stage, stage.in_flight))
            for stage in plan.stages
        )
        return dataclasses.replace(plan, stages=stages)

    def _explain(self, plan: PipelinePlan) -> NoReturn:
        _, stage, rank = memory_excess(self._request, plan)
        raise PlanInfeasible(
            f"stage {stage.name!r} holds {stage.in_flight} micro-batches under {schedule_label(stage)} and needs "
            f"{stage.memory_bytes} bytes, rank {rank} has {rank_limit(self._request, rank)}; use 1f1b, or lower "
            "micro_batch_sizes"
        )


def _under_k(plan: PipelinePlan, k: int) -> PipelinePlan:
    stages = tuple(dataclasses.replace(stage, schedule="1f1b", k=k, num_sliced=0) for stage in plan.stages)
    counts = plan_in_flight(dataclasses.replace(plan, stages=stages))
    stages = tuple(dataclasses.replace(s, in_flight=n) for s, n in zip(stages, counts, strict=True))
    return dataclasses.replace(plan, stages=stages)
