"""The greedy schedule: backwards as early as the stage's shortest running time allows.

It starts with one forward and then takes a backward wherever the order continued from there as 1F1B is still
time-optimal, else a forward; among time-optimal orders the result holds the fewest micro-batches.

Deviations:

- The guard ``c_b + 1 <= c_f <= B / b`` that the paper leaves out.
- ``IsTimeOptimal`` runs the order against the successors' fixed schedules in the simulator, with all
  stages behind the successors; what other branches send them is taken to be there in time.
- The shortest running time is that of GPipe's order: every forward is as early as it can be, so every
  gradient comes as early as it can, and the backwards follow each other without a forward between.
- Every edge between stages that run backwards counts as one with gradients (see `in_flight`).
- Stages that share ranks are ordered as on ranks of their own; whose turn it is on a rank is found later.
- ``most_in_flight`` caps what is held; at the cap the next task is a backward.

Source: GraphPipe thesis (chapter 3), section 3.10.1, Algorithm 4
Tests: tests/schedule/test_greedy.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, on_own_ranks, stages_behind
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.plugins import Schedule
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.checks.order_check import has_backwards
from gpp_plugin.schedule.event_loop import nominal_durations, run_task_graph
from gpp_plugin.schedule.orders.gpipe import gpipe_schedule
from gpp_plugin.schedule.task_graph import TaskGraph

SLACK = 1e-9
"""Relative difference of two running times that rounding can make."""


def greedy_schedule(
    plan: PipelinePlan,
    stage: int,
    behind: Mapping[int, StageSchedule],
    *,
    most_in_flight: int | None = None,
) -> StageSchedule:
    """Return the time-optimal order of one stage that holds the fewest micro-batches.

    Args:
        behind: the schedules of at least all stages that depend on this one.
        most_in_flight: cap on the micro-batches held; None is none.

    Raises:
        ScheduleError: no order under the cap can run with the successors' schedules.
    """
    # Orders are lists of micro-batches, m for F and ~m for B: [0, 1, ~0, ~1] is F0 F1 B0 B1. At each step the
    # question is whether B may come now: whether what has been run, that B, and 1F1B from there still end at the
    # goal. The first of two stages, F 1 and B 2 on both, three micro-batches; the second stage holds one. As GPipe
    # the first ends at 12:
    #
    #     time  0  1  2  3  4  5  6  7  8  9  10 11
    #     B 2nd F0 .  .  .  B0 B0 F1 .  .  .  B1 B1 ...   the next stage waits for F1, and the end is at 18: no
    #     B 3rd F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2       F2 comes at 7, when the next stage is free: yes
    #
    # So it takes F0 F1 B0 F2 B1 B2 and holds two, where GPipe holds three and ends no earlier.
    followers = stages_behind(plan)[stage]
    fixed = tuple(behind[index] if index in followers else None for index in range(len(plan.stages)))
    # The order does not depend on what the plan says stages hold: it is searched once for all such counts.
    count = len(plan.stages)
    alone = on_own_ranks(plan).with_each(in_flight=[1] * count, memory_bytes=[0] * count)
    alone = dataclasses.replace(alone, notes=(), iteration_us=0.0)
    found = _search(alone, stage, fixed, plan.num_micro_batches(stage))
    # An order that holds no more than the cap is the one that is found under it.
    if most_in_flight is None or found.num_in_flight <= most_in_flight:
        return found
    return _search(alone, stage, fixed, most_in_flight)


@functools.lru_cache(maxsize=128)
def _search(
    plan: PipelinePlan, stage: int, behind: tuple[StageSchedule | None, ...], cap: int
) -> StageSchedule:
    """Return the order of one stage of ranks of its own that holds at most ``cap`` micro-batches.

    Args:
        behind: by stage, its schedule; None for those that do not depend on this one.
    """
    count = plan.num_micro_batches(stage)
    evaluator = _Evaluator(plan, stage, behind)
    goal = evaluator.running_us([*range(count), *(~m for m in range(count))]) * (1.0 + SLACK)
    order = [0]
    forward, backward = 1, 0
    while backward < count:
        is_full = forward - backward == cap or forward == count
        may_backward = backward < forward
        if may_backward and (
            is_full or evaluator.running_us(_continued(order, forward, backward, count)) <= goal
        ):
            order.append(~backward)
            backward += 1
        else:
            order.append(forward)
            forward += 1
    if evaluator.running_us(order) == float("inf"):
        raise ScheduleError(
            f"stage {plan.stages[stage].name!r}: no order that holds {cap} micro-batches can run with its "
            "successors; raise in_flight"
        )
    held = [sum(1 if item >= 0 else -1 for item in order[: end + 1]) for end in range(len(order))]
    return StageSchedule(stage=stage, tasks=_tasks(stage, order), num_in_flight=max(held))


def _continued(order: Sequence[int], forward: int, backward: int, count: int) -> list[int]:
    """Return ``order``, the next backward, and then forwards and backwards in turn (1F1B)."""
    result = [*order, ~backward]
    backward += 1
    while forward < count:
        result += (forward, ~backward)
        forward, backward = forward + 1, backward + 1
    result.extend(~m for m in range(backward, count))
    return result


def _tasks(stage: int, order: Sequence[int]) -> tuple[Task, ...]:
    return tuple(
        Task(
            stage=stage,
            kind=TaskKind.FORWARD if m >= 0 else TaskKind.BACKWARD,
            micro_batch=m if m >= 0 else ~m,
        )
        for m in order
    )


class _Evaluator:
    """The stage and all behind it as one task graph, run again for every order tried."""

    def __init__(self, plan: PipelinePlan, stage: int, behind: Sequence[StageSchedule | None]) -> None:
        # Stages that this one does not send to run alone: without their edges they delay nothing.
        followers = {index for index, order in enumerate(behind) if order is not None}
        trained = {
            stage,
            *(i for i, order in enumerate(behind) if order is not None and has_backwards(order)),
        }
        edges = tuple(
            dataclasses.replace(edge, gradient_tensors=(*edge.batch_tensors, *edge.whole_tensors))
            if {edge.src, edge.dst} <= trained
            else edge
            for edge in plan.edges
            if edge.src in followers or edge.src == stage
        )
        alone = dataclasses.replace(plan, edges=edges)
        schedules = [
            order or gpipe_schedule(index, plan.num_micro_batches(index))
            for index, order in enumerate(behind)
        ]
        self._graph: TaskGraph = build_task_graph(alone, schedules)
        self._durations = nominal_durations(self._graph)
        self._ranks = plan.stages[stage].data_ranks(0)
        self._count = plan.num_micro_batches(stage)
        self._forwards = {rank: self._graph.orders[rank][: self._count] for rank in self._ranks}
        self._backwards = {rank: self._graph.orders[rank][self._count :] for rank in self._ranks}

    def running_us(self, order: Sequence[int]) -> float:
        """Return when the stage is done under this order; infinity if it never is."""
        last = []
        for rank in self._ranks:
            forwards, backwards = self._forwards[rank], self._backwards[rank]
            nodes = [forwards[m] if m >= 0 else backwards[~m] for m in order]
            for node, follower in zip(nodes, [*nodes[1:], -1], strict=True):
                self._graph.next_on_rank[node] = follower
            self._graph.orders[rank] = nodes
            last.append(nodes[-1])
        try:
            times = run_task_graph(self._graph, self._durations)
        except ScheduleError:
            return float("inf")
        return max(times.end[node] for node in last)


class Greedy(Schedule):
    """The greedy schedule as a stage's: what it holds comes of its order, and is known once that is made."""

    def order(self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]) -> StageSchedule:
        """Return the greedy order that holds at most the stage's ``in_flight``."""
        return greedy_schedule(plan, index, behind, most_in_flight=plan.stages[index].in_flight)

    def free_order(
        self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]
    ) -> StageSchedule:
        """Return the greedy order, which holds the fewest micro-batches of all that are as quick."""
        return greedy_schedule(plan, index, behind)


GREEDY = Greedy()
