"""Compares a timeline with the simulator: task times and message delays as measured, simulated again."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.timeline import Event, EventKind, Timeline
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.orders.gpipe import forward_only_stages
from gpp_plugin.schedule.task_graph import TaskGraph
from gpp_plugin.simulate.predict import drained_graph, predict_drained_us, predict_iteration_us

# Bounds of what can be read off spans. Slope and latency of a line through messages of 1.0 and
# 1.1 MB would be noise.
DISTINCT_SIZES = 2.0
"""A bandwidth is read off messages only where the largest is this many times the smallest."""

# 5 ms, far above what a message takes within one machine: what a rank still lost after that is its own.
ARRIVED_US = 5000.0
"""A message produced that long ago has arrived."""

TaskKey = tuple[int, int, TaskKind, int | None]
"""Rank, stage, kind, half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """What tasks and messages took, in microseconds.

    Tasks are medians; messages and host are means, as a path through many of them takes their sum.

    Args:
        task_us: (rank, stage, kind, half) -> a task's time.
        host_us: by rank, from the end of a task to the start of the next one where nothing is waited for.
        message_us: from the end of a task (and that host time) to the start of the task that waits for it.
        bytes_per_s: what larger messages take beyond that; infinite where sizes do not differ.
        reduce_us: by stage, the reductions after its last task.
        step_us: the agreement before the optimizer step.
    """

    task_us: dict[TaskKey, float]
    host_us: dict[int, float]
    message_us: float
    bytes_per_s: float
    reduce_us: dict[int, float]
    step_us: float

    def cluster(self, num_ranks: int) -> Cluster:
        """Return links with the measured delays."""
        device = Device(name="rehearsal", memory_bytes=0, flops_per_s=1.0, memory_bytes_per_s=1.0)
        link = Link(name="messages", span=num_ranks, bytes_per_s=self.bytes_per_s, latency_us=self.message_us)
        return Cluster(name="rehearsal", devices=(device,) * num_ranks, links=(link,))


def measure_times(plan: PipelinePlan, timelines: Sequence[Timeline]) -> MeasuredTimes:
    """Read the times of tasks, messages, reductions and steps off rehearsed or measured timelines.

    Args:
        timelines: of the same plan, at least one.
    """
    # Between the end of a task and the start of the next one a rank loses time of two kinds; which one a
    # gap shows is known from the order of two events, the end of the task before and the end of the one
    # that sent the message:
    #
    #   rank 0   |0F0 |0F1 |  .    .                 rank 0   |0F0 |
    #   rank 1   |busy          |gap|1F0 |           rank 1   .    .  |1F0 |
    #                            ^ host_us                         ^^ host_us + message_us + bytes / bandwidth
    #   the message was there long ago               the rank was free before: it has waited for the message
    #
    # Gaps that are neither (the message came at about the time the rank was free) are not counted.
    graph = _task_graph(plan)
    tasks: dict[TaskKey, list[float]] = defaultdict(list)
    gaps: dict[int, list[float]] = defaultdict(list)
    waits: list[_Wait] = []
    for timeline in timelines:
        spans = _task_spans(graph, timeline)
        for (rank, task), (start, end) in spans.items():
            tasks[rank, task.stage, task.kind, task.half].append(end - start)
        for wait in _waits(graph, spans):
            if wait.has_waited:
                waits.append(wait)
            elif wait.produced_us < wait.before_us - ARRIVED_US:
                gaps[wait.rank].append(wait.start_us - wait.before_us)
    # A rank that always waits shows no gap of its own; it is taken to be like the others. Gaps are under the
    # first of its tensor ranks (the lead), which run every task together.
    usual = statistics.fmean(chain.from_iterable(gaps.values())) if gaps else 0.0
    host_us = {
        rank: statistics.fmean(gaps[lead]) if lead in gaps else usual
        for lead, row in graph.members.items()
        for rank in row
    }
    message_us, bytes_per_s = fit_link(
        [(w.num_bytes, max(0.0, w.start_us - w.produced_us - host_us[w.producer])) for w in waits]
    )
    return MeasuredTimes(
        task_us={key: statistics.median(values) for key, values in tasks.items()},
        host_us=host_us,
        message_us=message_us,
        bytes_per_s=bytes_per_s,
        reduce_us=_reduce_us(plan, timelines),
        step_us=_last_us([e for t in timelines for e in t.events if e.kind is EventKind.STEP]),
    )


def predict_from(plan: PipelinePlan, timelines: Sequence[Timeline]) -> float:
    """Return the simulated iteration of ``plan`` in microseconds, from measured times.

    Every mini-batch is simulated with the times of its own tasks, messages, reductions and step; the median of
    those simulations is for comparison with the median measured one.
    """
    return statistics.median(_predict_one(plan, timeline) for timeline in timelines)


def _predict_one(plan: PipelinePlan, timeline: Timeline) -> float:
    times = measure_times(plan, [timeline])
    # The simulator has no host: its time is added to the task before it. Two tasks of 100 us with 20 us
    # between them are simulated as 120 us each.
    durations: dict[tuple[object, ...], float] = {}
    for (rank, task), (start, end) in _task_spans(_task_graph(plan), timeline).items():
        half = () if task.half is None else (task.half,)
        durations[(task.stage, task.kind, task.micro_batch, rank, *half)] = end - start + times.host_us[rank]
    cluster = times.cluster(plan.num_ranks)
    if plan.mode == "async":  # its updates are between tasks, in the time of the host
        return predict_drained_us(plan, cluster=cluster, durations=durations)
    return predict_iteration_us(
        plan,
        cluster=cluster,
        durations=durations,
        forward_only_stages=forward_only_stages(plan),
        reduce_us=times.reduce_us,
        # ranks of several stages agree once for all of them, and all ranks end together
        step_us=dict.fromkeys(range(1 if plan.shares_ranks else len(plan.stages)), times.step_us),
    )


def _task_graph(plan: PipelinePlan) -> TaskGraph:
    if plan.mode == "async":
        return drained_graph(plan)
    return build_task_graph(plan, build_schedules(plan, forward_only_stages=forward_only_stages(plan)))


def fit_link(delays: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency in microseconds and bytes per second of (bytes, delay) pairs, by least squares.

    Only a latency, the mean delay, where sizes hardly differ or larger messages were not slower.
    """
    if not delays:
        return 0.0, float("inf")
    sizes = [size for size, _ in delays]
    mean_size = statistics.fmean(sizes)
    mean_delay = statistics.fmean(delay for _, delay in delays)
    if max(sizes) < DISTINCT_SIZES * min(sizes) or max(sizes) == min(sizes):
        return mean_delay, float("inf")
    # Ordinary least squares, delay = latency + slope * bytes, in us and us a byte. (1000 B, 12 us) and (3000
    # B, 16 us) give slope 0.002, that is 5e8 bytes a second, and a latency of 10 us.
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = sum((size - mean_size) * (delay - mean_delay) for size, delay in delays) / spread
    latency = mean_delay - slope * mean_size
    if slope <= 0.0 or latency < 0.0:
        return mean_delay, float("inf")
    return latency, 1e6 / slope


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a task had to wait for: the task before it on its rank, and the last of its producers.

    Args:
        before_us, produced_us: when those ended; -inf where there is none.
        producer, num_bytes: that producer's rank and the size of its message.
    """

    rank: int
    start_us: float
    before_us: float
    produced_us: float
    producer: int
    num_bytes: float

    @property
    def has_waited(self) -> bool:
        """Return whether the rank was free before the message was made."""
        return self.produced_us > self.before_us


def _task_spans(graph: TaskGraph, timeline: Timeline) -> dict[tuple[int, Task], tuple[float, float]]:
    """Return when each rank ran each task; tensor ranks begin when the last of them comes to it.

    A gather of parameters before a task counts as a part of it.
    """
    # A tensor rank that comes early waits inside its task: its own start is too early by that.
    gathers = _gathers_before(timeline)
    spans = {
        (e.rank, e.task): (e.start_us - gathers.get((e.rank, e.task), 0.0), e.end_us)
        for e in timeline.events
        if e.task is not None
    }
    rows = {rank: row for row in graph.members.values() if len(row) > 1 for rank in row}
    return {
        (rank, task): (max(spans[peer, task][0] for peer in rows.get(rank, (rank,))), end)
        for (rank, task), (_, end) in spans.items()
    }


def _gathers_before(timeline: Timeline) -> dict[tuple[int, Task], float]:
    """Return, by rank and task, what the gather before it took: on the rank of its stage that came to it last."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(timeline.events, key=lambda event: event.start_us):
        if event.kind is EventKind.GATHER:
            found[event.stage, event.rank].append(event)
    shortest: dict[tuple[int, int], float] = {}
    for (stage, _), of_rank in found.items():
        for number, event in enumerate(of_rank):
            took = event.end_us - event.start_us
            shortest[stage, number] = min(took, shortest.get((stage, number), took))
    before: dict[tuple[int, Task], float] = {}
    for (stage, rank), of_rank in found.items():
        own = [e for e in timeline.events if (e.stage, e.rank) == (stage, rank) and e.task is not None]
        for number, event in enumerate(of_rank):
            behind = [e for e in own if e.start_us >= event.end_us]
            following = min(behind, key=lambda e: e.start_us).task if behind else None
            if following is not None:
                before[rank, following] = shortest[stage, number]
    return before


def _waits(graph: TaskGraph, spans: Mapping[tuple[int, Task], tuple[float, float]]) -> Iterator[_Wait]:
    """Yield for every task what it had to wait for."""
    times = [spans[rank, graph.task(node)] for node, rank in enumerate(graph.rank)]
    before = [-math.inf] * len(times)
    for node, following in enumerate(graph.next_on_rank):
        if following >= 0:
            before[following] = times[node][1]
    produced = [(-math.inf, -1, 0.0)] * len(times)
    for source, target, num_bytes in zip(graph.source, graph.target, graph.num_bytes, strict=True):
        # The last producer counts, by the end of its task; tuples compare it first.
        produced[target] = max(produced[target], (times[source][1], graph.rank[source], num_bytes))
    for node, (start, _) in enumerate(times):
        end, producer, num_bytes = produced[node]
        rank, before_us = graph.rank[node], before[node]
        yield _Wait(rank, start, before_us, produced_us=end, producer=producer, num_bytes=num_bytes)


def _reduce_us(plan: PipelinePlan, timelines: Sequence[Timeline]) -> dict[int, float]:
    result = {}
    for index, stage in enumerate(plan.stages):
        events = [e for t in timelines for e in t.events if e.kind is EventKind.REDUCE and e.stage == index]
        if stage.degree > 1 and events:
            result[index] = _last_us(events)
    return result


def _last_us(events: Sequence[Event]) -> float:
    """Return the time of a collective: that of the rank that came last and did not wait."""
    if not events:
        return 0.0
    by_rank: dict[int, list[float]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event.end_us - event.start_us)
    # One row a rank, one column a collective; the shortest time in a column is the last comer's. Waiting of
    # (30, 5, 12) us in a round means that the collective itself took 5.
    rounds = zip(*by_rank.values(), strict=True)
    return statistics.median(min(each) for each in rounds)
