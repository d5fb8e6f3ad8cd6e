"""What a stage's data-parallel ranks send each other in a predicted step: launched when, and hidden behind what.

    ZeRO   while gradients are made                         at the end             behind the step
    0      buckets, beside the last backward                nothing, or the sum    -
    1      -                                                reduce-scatter         all-gather of parameters
    2      a reduce-scatter behind each backward            reduce-scatter         all-gather of parameters
    3      as 2; a gather before the tasks that need it     reduce-scatter         -

*Early* sums are those of ZeRO 0 on stages without tensor ranks whose last task is a whole backward
(`engine.gradient_store.EarlySends`). A bucket begins when its gradients are final on all ranks of the stage, behind the
bucket before it. With a backward of 6 us and three buckets of 2 us that are final after 2, 4 and 6 us:

    us        0    2    4    6    8
    computes  |B3            |
    sums      .    |b0  |b1  |b2  |        6 us travel, 4 of them hidden, 2 exposed

The rank waits for them behind its tasks, where the program has ``reduce_data``. Tied parameters are summed then, by all
stages that hold them together; then all ranks step. A reduce-scatter behind a backward keeps the rank from its next
task, not the messages that the backward sends. A gather of ZeRO 3 is begun in front of the stage's task, or a task
earlier where memory allows it, and the task waits for it (`schedule.gathers`).

Sums of one rank take turns in the order in which they begin: they share its links. Messages do not wait for them, nor
they for messages, as each group of ranks has a communicator of its own; that both then share a link's bandwidth is not
counted. Nor is that the first mini-batch of a job only watches its last backward, or that `reduce_bucket_size` may make
buckets smaller.

Searches play task graphs. There all stages are early that meet the conditions above, and in front of the last sum
ranks of a stage do not meet. `simulate_step`, which judges plans, lets those be early that the programs do
(`stages_that_reduce_early`). Where tasks wait (ZeRO 2 and 3) it plays the programs, with every rendezvous.

Source: this project
Tests: tests/simulate/test_reductions.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.step_cost import Buckets, Reductions, StageReductions
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.schedule.checks.order_check import LAST_KINDS
from gpp_plugin.schedule.event_loop import TaskTimes, Waits
from gpp_plugin.schedule.gathers import may_prefetch
from gpp_plugin.schedule.task_graph import TaskGraph

Floats = npt.NDArray[np.float64]
Spans = Mapping[int, Mapping[int, tuple[float, float]]]
"""By stage and rank, from when to when the last backward runs."""


def total_times(plan: PipelinePlan, reductions: Reductions) -> dict[int, float]:
    """Return by stage what its own reductions take in one step, and tied ones, hidden or not.

    Gathers (ZeRO 3) are as many as there may be: one, or one a task where a rank holds several stages.
    """
    times = {}
    for i, (stage, own) in enumerate(zip(plan.stages, reductions.stages, strict=True)):
        count = plan.num_micro_batches(i)
        is_alone = not own.gather_us or all(len(plan.stages_of_rank(rank)) == 1 for rank in stage.ranks)
        gathers = (1 if is_alone else 2 * count) * own.gather_us
        times[i] = own.last_us + own.step_us + (count - 1) * own.each_us + gathers
    for holders, us in reductions.tied:
        for i in holders:
            times[i] += us
    return times


def reductions_of(plan: PipelinePlan, reduce_us: Mapping[int, float] | Reductions | None) -> Reductions:
    """Return reductions by stage, each behind its rank's tasks, as `Reductions`; those as they are."""
    if isinstance(reduce_us, Reductions):
        return reduce_us
    times = reduce_us or {}
    return Reductions(
        stages=tuple(StageReductions(last_us=times.get(i, 0.0)) for i in range(len(plan.stages)))
    )


def early_of_blocks(
    gradient_bytes: Floats, backward_us: Floats, most: float, sum_us: Callable[[float], float]
) -> Buckets:
    """Return `StageReductions.early` of a stage's blocks, in their order.

    Buckets are cut from the last block to the first, as the backward makes gradients; those of a block become final
    evenly while its backward runs.

    Args:
        most: bytes of a bucket; inf: it is never early.
        sum_us: what the sum of so many bytes takes.

    >>> early_of_blocks(np.array([2.0, 4.0]), np.array([3.0, 1.0]), 2.0, lambda num_bytes: num_bytes)
    ((0.125, 6.0), (1.0, 2.0))
    """
    made, over = (np.concatenate([[0.0], np.cumsum(each[::-1])]) for each in (gradient_bytes, backward_us))
    if made[-1] <= 0.0 or over[-1] <= 0.0 or math.isinf(most):
        return ()
    ends = np.append(np.arange(most, made[-1], most), made[-1])
    shares = np.interp(ends, made, over / over[-1])
    # What is in front of all parameters makes no gradient of them. A single bucket goes behind the backward.
    shares[-1] = 1.0 if len(ends) == 1 else over[np.searchsorted(made, made[-1])] / over[-1]
    each_us = [*[sum_us(most)] * (len(ends) - 1), sum_us(float(made[-1]) - most * (len(ends) - 1))]
    # A sum ends at max(share T + left) over its buckets, for a backward of T. Points on or below a line between two
    # others never decide that: evenly spread buckets leave the first and the last.
    left = 0.0
    points: list[
        tuple[float, float]
    ] = []  # from the last bucket to the first: shares fall, what is left grows
    for share, us in zip(reversed(shares.tolist()), reversed(each_us), strict=True):
        left += us
        while points and share >= points[-1][0]:
            points.pop()
        while len(points) > 1 and _is_below(points[-1], points[-2], (share, left)):
            points.pop()
        points.append((share, left))
    return tuple(reversed(points))


def _is_below(point: tuple[float, float], right: tuple[float, float], left: tuple[float, float]) -> bool:
    """Return whether a point is on or below the line between its neighbours, up to rounding."""
    along = (right[0] - point[0]) / (right[0] - left[0])
    return point[1] <= right[1] + along * (left[1] - right[1]) + 1e-9 * left[1]


def early_sums(
    plan: PipelinePlan, reductions: Reductions, last_backwards: Spans
) -> dict[int, tuple[float, float]]:
    """Return from when to when each early sum travels, as one piece that ends when its last bucket does.

    Args:
        last_backwards: of stages that are early; others are behind their ranks' tasks.
    """
    found = {}
    free: dict[int, float] = defaultdict(float)  # of each rank, when the sums before are through
    begun = sorted((_reached(reductions.stages[s].early[0][0], own), s) for s, own in last_backwards.items())
    for _, stage in begun:
        own = reductions.stages[stage].early
        ranks = plan.stages[stage].ranks
        whole_us = own[0][1]
        end = max(free[rank] for rank in ranks) + whole_us
        for share, left in own:
            end = max(end, _reached(share, last_backwards[stage]) + left)
        free.update(dict.fromkeys(ranks, end))
        found[stage] = end - whole_us, end
    return found


def _reached(share: float, spans: Mapping[int, tuple[float, float]]) -> float:
    """Return when that share of a backward is over on all ranks."""
    return max(end if share >= 1.0 else start + share * (end - start) for start, end in spans.values())


def sum_events(
    plan: PipelinePlan, ends: Mapping[int, float], reductions: Reductions, last_backwards: Spans
) -> list[Event]:
    """Return each stage's last sum.

    Args:
        ends: by rank, when its tasks end.
        last_backwards: as of `early_sums`.
    """
    early = early_sums(plan, reductions, last_backwards)
    done = dict(ends)
    through = {rank: end for stage, (_, end) in early.items() for rank in plan.stages[stage].ranks}
    events = []
    for index, own in enumerate(reductions.stages):
        ranks = plan.stages[index].ranks
        if own.last_us <= 0.0:
            continue
        if index in early:
            start, end = early[index]
        else:  # all of its ranks come there, one stage of a rank behind the other
            start = max(max(done[rank], through.get(rank, 0.0)) for rank in ranks)
            end = start + own.last_us
        for rank in ranks:
            done[rank] = max(done[rank], end)
            events.append(Event(rank=rank, stage=index, kind=EventKind.REDUCE, start_us=start, end_us=end))
    return events


def step_events(
    plan: PipelinePlan, ends: Mapping[int, float], reductions: Reductions, step_us: Mapping[int, float]
) -> list[Event]:
    """Return what follows the last sums: those of tied parameters, the optimizer steps, and parameters behind them.

    Args:
        ends: by rank, when its tasks and sums end.
    """
    # Each tied sum is made by all ranks of its stages together; then all ranks step together, as the gradient norm is
    # over the whole model. A rank of several stages steps one after the other.
    done = dict(ends)
    events = []
    for holders, us in reductions.tied:
        ranks = {rank: index for index in reversed(holders) for rank in plan.stages[index].ranks}
        start = max(done[rank] for rank in ranks)
        for rank, index in ranks.items():
            done[rank] = start + us
            events.append(
                Event(rank=rank, stage=index, kind=EventKind.REDUCE, start_us=start, end_us=done[rank])
            )
    done = dict.fromkeys(done, max(done.values(), default=0.0))
    for index, us in step_us.items():
        for rank in plan.stages[index].ranks:
            start, done[rank] = done[rank], done[rank] + us
            events.append(
                Event(rank=rank, stage=index, kind=EventKind.STEP, start_us=start, end_us=done[rank])
            )
    for index, own in enumerate(reductions.stages):
        ranks_of = plan.stages[index].ranks if own.step_us else ()
        start = max((done[rank] for rank in ranks_of), default=0.0)
        for rank in ranks_of:
            done[rank] = start + own.step_us
            events.append(
                Event(rank=rank, stage=index, kind=EventKind.REDUCE, start_us=start, end_us=done[rank])
            )
    return events


def ends_behind(ends: Mapping[int, float], events: Iterable[Event]) -> dict[int, float]:
    """Return by rank when these events end, if any of them ends later."""
    found = dict(ends)
    for event in events:
        found[event.rank] = max(found[event.rank], event.end_us)
    return found


# ---- of a task graph ---------------------------------------------------------------------------------------


def last_backwards(graph: TaskGraph, times: TaskTimes, reductions: Reductions) -> Spans:
    """Return the last backwards of the stages that may sum early: whole ones behind which the stage has no task."""
    spans: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    refused = set()
    for lead, chain in graph.chains if reductions.has_early else ():
        stage = graph.stage[chain[-1]]
        if reductions.stages[stage].early and graph.kind[chain[-1]] is TaskKind.BACKWARD:
            spans[stage][lead] = times.start[chain[-1]], times.end[chain[-1]]
        else:
            refused.add(stage)
    return {stage: own for stage, own in spans.items() if stage not in refused}


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenTasks:
    """What ranks wait for between their tasks: sums behind backwards, and gathers.

    Args:
        sums: nodes behind which a sum keeps the rank from its next task: all backwards but each stage's last.
        gathers: a node whose stage is gathered for it, the node before it on its rank or -1, and whether the gather
            travels beside that one.
    """

    graph: TaskGraph
    reductions: Reductions
    sums: tuple[int, ...]
    gathers: tuple[tuple[int, int, bool], ...]
    waits_us: Waits

    @classmethod
    def of(cls, graph: TaskGraph, durations: Sequence[float], reductions: Reductions) -> BetweenTasks | None:
        """Return what ranks of a graph wait for, its tasks taking so long; None: nothing."""
        if not reductions.is_between_tasks:
            return None
        stages = [reductions.stages[stage] for stage in graph.stage]
        sums = tuple(
            node
            for _, chain in graph.chains
            for node in chain[:-1]
            if graph.kind[node] in LAST_KINDS and stages[node].each_us
        )
        gathers = tuple(_gathers(graph, reductions))
        behind = [0.0] * len(durations)
        before = {}
        for node in sums:
            behind[node] += stages[node].each_us
        for node, previous, is_beside in gathers:
            us = stages[node].gather_us
            if previous < 0:
                before[node] = us
            else:
                behind[previous] += max(0.0, us - durations[previous]) if is_beside else us
        return cls(
            graph=graph,
            reductions=reductions,
            sums=sums,
            gathers=gathers,
            waits_us=Waits(before=before, behind=behind),
        )

    def events(self, times: TaskTimes) -> list[Event]:
        """Return the events of sums and gathers."""
        graph = self.graph
        stages = [self.reductions.stages[stage] for stage in graph.stage]
        found = [(node, EventKind.REDUCE, times.end[node], stages[node].each_us) for node in self.sums]
        for node, previous, is_beside in self.gathers:
            start = 0.0
            if previous >= 0:
                start = times.start[previous] if is_beside else times.end[previous]
            found.append((node, EventKind.GATHER, start, stages[node].gather_us))
        return [
            Event(rank=rank, stage=graph.stage[node], kind=kind, start_us=start, end_us=start + us)
            for node, kind, start, us in found
            for rank in graph.members[graph.rank[node]]
        ]


def _gathers(graph: TaskGraph, reductions: Reductions) -> Iterator[tuple[int, int, bool]]:
    """Yield where stages are gathered: at first, and where tasks of others stood between (`schedule.gathers`)."""
    sharded = {index for index, own in enumerate(reductions.stages) if own.gather_us}
    early = may_prefetch(graph.plan, sharded)
    for order in graph.orders.values():
        last: dict[int, int] = {}  # where each stage's last task stands
        for at, node in enumerate(order):
            stage = graph.stage[node]
            between = at - last[stage] - 1 if stage in last else 0
            is_kept = stage in last and between <= (stage in early)  # released, it would be gathered at once
            if stage in sharded and not is_kept:
                yield node, order[at - 1] if at else -1, stage in early
            last[stage] = at


# ---- of programs -------------------------------------------------------------------------------------------


class ProgramReductions:
    """What ranks do together while programs are played: when it ends, for those that have come to it.

    Args:
        programs: by rank.
        reductions: with the stages alone that these programs let reduce early.
        step_us: by stage, the optimizer step.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        programs: Mapping[int, RankProgram],
        reductions: Reductions,
        step_us: Mapping[int, float],
    ) -> None:
        self._plan, self._reductions, self._step_us = plan, reductions, step_us
        self._last = {
            (rank, stage): program.of_stage(stage).tasks[-1]
            for rank, program in programs.items()
            for stage in program.stages
            if reductions.stages[stage].early
        }
        self._last_backwards: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)

    def note(self, rank: int, task: Task, start: float, end: float) -> None:
        """Take note of when a task runs."""
        if self._last.get((rank, task.stage)) == task:
            self._last_backwards[task.stage][rank] = start, end

    def run(
        self,
        kind: InstructionKind,
        stage: int | None,
        present: Mapping[int, float],
        now: float,
        *,
        is_last: bool,
    ) -> tuple[list[Event], dict[int, float]]:
        """Run what all of its ranks have come to; return its events, and by rank when it ends.

        Args:
            present: when each rank came.
            is_last: it is the last of its kind and stage in the program.
        """
        ends = dict.fromkeys(present, now)
        if (
            kind is InstructionKind.STEP
        ):  # sums of tied parameters, which all have come to, are in front of it
            found = step_events(self._plan, present, self._reductions, self._step_us)
            return found, ends_behind(ends, found)
        if stage is None:
            return [], ends
        own = self._reductions.stages[stage]
        event = EventKind.GATHER if kind is InstructionKind.GATHER else EventKind.REDUCE
        start, us = now, own.gather_us
        if kind is InstructionKind.REDUCE_DATA:
            early = early_sums(self._plan, self._reductions, self._begun())
            if stage in early:
                start, end = early[stage]
                us = end - start
            else:
                us = own.last_us if is_last else own.each_us
                # early sums of other stages may still take these ranks' links
                taken = (
                    end for s, (_, end) in early.items() if present.keys() & set(self._plan.stages[s].ranks)
                )
                start = max([now, *taken])
        if us <= 0.0:
            return [], ends
        found = [
            Event(rank=rank, stage=stage, kind=event, start_us=start, end_us=start + us) for rank in present
        ]
        return found, dict.fromkeys(present, max(now, start + us))

    def _begun(self) -> Spans:
        """Return the last backwards of stages that are early, where they have begun on all ranks."""
        return {
            stage: own
            for stage, own in self._last_backwards.items()
            if len(own) == len(self._plan.stages[stage].ranks)
        }
