"""Predicts the timeline of a plan: discrete events, every stage in its own order, on the links of a cluster.

Source: this project
Tests: tests/plan/test_asynchronous.py, tests/simulate/test_asynchronous.py, tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule, TaskKind
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.timeline import EVENT_OF_TASK, Event, EventKind, Timeline
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph, part_durations
from gpp_plugin.schedule.event_loop import (
    Durations,
    TaskTimes,
    message_transfers,
    run_task_graph,
    task_durations,
)
from gpp_plugin.schedule.orders.async_1f1b import Windows, windows_of
from gpp_plugin.schedule.orders.gpipe import forward_only_stages, frozen_branch
from gpp_plugin.schedule.program_sets import joined_windows, prefetch_graphs, window_schedules
from gpp_plugin.schedule.task_graph import TaskGraph


def simulate_plan(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    schedules: Sequence[StageSchedule] | None = None,
    forward_only_stages: frozenset[int] = frozenset(),
    share_links: bool = True,
    reduce_us: Mapping[int, float] | None = None,
    step_us: Mapping[int, float] | None = None,
) -> Timeline:
    """Return the timeline of one mini-batch when every rank waits only for what its next task needs.

    Args:
        cluster: links; without one messages take no time.
        durations: microseconds of each task; the plan's `Stage.forward_us` and `backward_us` by default.
        schedules: task orders; those the plan names by default.
        share_links: messages of one rank take turns on its link; else each has the full bandwidth.
        reduce_us: by stage, the gradient reduction after its last task; starts on all ranks together.
        step_us: by stage, the optimizer step; starts when every rank is done (the norm is global).

    Raises:
        ScheduleError: the orders wait for each other; the text shows the circle in the grid.
        PlanError: the plan does not fit the cluster, or its micro-batches do not divide evenly.
    """
    # Two stages, one micro-batch of 1 us each way, 1 us a message, a reduction of 2 us on stage 0:
    #
    #   us       0    1    2    3    4    5    6    7    8
    #   stage 0  |0F0 |    .    .    .    |0B0 |reduce   |
    #   link     .    |act.|    .    |grad|    .    .
    #   stage 1  .    .    |1F0 |1B0 |    .    .    .
    graph, times = _run(plan, cluster, durations, schedules, forward_only_stages, share_links)
    with paused_collector():  # it would walk millions of new events again and again: they hold no circles
        events = _task_events(graph, times)
        events += _tail_events(plan, _rank_ends(graph, times), reduce_us or {}, step_us or {})
        events += _message_events(graph, times)
    return Timeline(source="predicted", plan=fingerprint(plan), events=tuple(events))


def predict_iteration_us(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    schedules: Sequence[StageSchedule] | None = None,
    forward_only_stages: frozenset[int] = frozenset(),
    share_links: bool = True,
    reduce_us: Mapping[int, float] | None = None,
    step_us: Mapping[int, float] | None = None,
) -> float:
    """Return only the time of one mini-batch, as `simulate_plan` predicts it, without making events."""
    graph, times = _run(plan, cluster, durations, schedules, forward_only_stages, share_links)
    ends = _rank_ends(graph, times)
    tail = _tail_events(plan, ends, reduce_us or {}, step_us or {})
    begin = min(times.start, default=0.0)
    return max([*ends.values(), *(event.end_us for event in tail)], default=0.0) - begin


def _run(
    plan: PipelinePlan,
    cluster: Cluster | None,
    durations: Durations | None,
    schedules: Sequence[StageSchedule] | None,
    forward_only_stages: frozenset[int],
    share_links: bool,
) -> tuple[TaskGraph, TaskTimes]:
    if schedules is None:
        schedules = build_schedules(plan, forward_only_stages=forward_only_stages)
    graph = build_task_graph(plan, schedules)
    times = run_task_graph(
        graph,
        task_durations(graph, durations),
        transfers=message_transfers(graph, cluster),
        share_links=share_links,
    )
    return graph, times


def _rank_ends(graph: TaskGraph, times: TaskTimes) -> dict[int, float]:
    # Tensor ranks run every task together, so `orders` has one entry a
    # data position; all its members end there.
    return {
        rank: times.end[order[-1]] for lead, order in graph.orders.items() for rank in graph.members[lead]
    }


def _task_events(graph: TaskGraph, times: TaskTimes) -> list[Event]:
    """Return what each rank runs, updates that take time included."""
    events = []
    for node in range(graph.tasks.stop):
        is_update = node < graph.num_updates
        if is_update and times.end[node] == times.start[node]:
            continue
        events += [
            Event(
                rank=rank,
                stage=graph.stage[node],
                kind=EventKind.STEP if is_update else EVENT_OF_TASK[graph.kind[node]],
                start_us=times.start[node],
                end_us=times.end[node],
                micro_batch=-1 if is_update else graph.micro_batch[node],
                half=graph.half[node],
            )
            for rank in graph.members[graph.rank[node]]
        ]
    return events


def _message_events(graph: TaskGraph, times: TaskTimes) -> list[Event]:
    """Return a send and a receive for each message; what passes between two stages of one rank has none."""
    events = []
    # A send and its receive have the same two times: from when the sender's link takes the message up to when
    # it has arrived, waiting for the receiver's link and the latency included.
    for number, (sender, receiver) in enumerate(zip(graph.sender, graph.receiver, strict=True)):
        if sender == receiver:
            continue
        for node, rank, peer, kind in (
            (graph.source[number], sender, receiver, EventKind.SEND),
            (graph.target[number], receiver, sender, EventKind.RECEIVE),
        ):
            events.append(
                Event(
                    rank=rank,
                    stage=graph.stage[node],
                    kind=kind,
                    start_us=times.message_start[number],
                    end_us=times.message_end[number],
                    micro_batch=graph.micro_batch[node],
                    edge=graph.edge[number],
                    bytes=round(graph.num_bytes[number]),
                    half=graph.half[node],
                    peer=peer,
                )
            )
    return events


def _tail_events(
    plan: PipelinePlan,
    ends: Mapping[int, float],
    reduce_us: Mapping[int, float],
    step_us: Mapping[int, float],
) -> list[Event]:
    """Return the reductions of each stage and the optimizer steps, from when each rank's tasks end."""
    events = []
    # reduce_us and step_us are by stage, in microseconds. Stages reduce independently
    # of each other, each when its last rank is done; steps wait for all stages, because
    # the gradient norm is over the whole model. A rank of several stages does one after the other.
    done = dict(ends)
    for index, microseconds in reduce_us.items():
        ranks = plan.stages[index].ranks
        start = max(done[rank] for rank in ranks)
        for rank in ranks:
            done[rank] = start + microseconds
            events.append(
                Event(rank=rank, stage=index, kind=EventKind.REDUCE, start_us=start, end_us=done[rank])
            )
    done = dict.fromkeys(done, max(done.values(), default=0.0))
    for index, microseconds in step_us.items():
        for rank in plan.stages[index].ranks:
            start, done[rank] = done[rank], done[rank] + microseconds
            events.append(
                Event(rank=rank, stage=index, kind=EventKind.STEP, start_us=start, end_us=done[rank])
            )
    return events


# Predicts what a plan gains where its frozen branch runs a mini-batch early.
#
# All ranks step together, so a mini-batch takes as long as its steady part (`schedule.program_sets`) from an idle
# start: what the branch made before is there, and what it makes meanwhile nobody waits for but the step.


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPrediction:
    """Microseconds of a mini-batch by itself, and with its frozen branch a mini-batch early.

    Args:
        stages: names of those that run early.
    """

    stages: tuple[str, ...]
    whole_us: float
    steady_us: float


def predict_prefetch(plan: PipelinePlan, *, cluster: Cluster | None = None) -> PrefetchPrediction | None:
    """Predict a plan with and without frozen-branch prefetch, no reductions or steps; None where nothing runs early.

    Args:
        cluster: links; without one messages take no time.
    """
    branch = frozen_branch(plan)
    if plan.mode != "sync" or not branch:
        return None
    part = prefetch_graphs(plan)["steady"]
    times = run_task_graph(part, part_durations(part), transfers=message_transfers(part, cluster))
    frozen = forward_only_stages(plan)
    return PrefetchPrediction(
        stages=tuple(plan.stages[index].name for index in sorted(branch)),
        whole_us=predict_iteration_us(plan, cluster=cluster, forward_only_stages=frozen),
        steady_us=max(times.end),
    )


# Predicts an asynchronous plan: windows one after the other, then the drain, and what a window takes once full.
#
# The same event loop as for a mini-batch runs a longer schedule, with an update behind each backward. A window's time
# is read off where windows repeat: how long after the end of one on all ranks the next one ends.


REPEATED = 4
"""Windows simulated beyond those that fill the pipeline; the last one is measured."""


def num_windows(windows: Windows) -> int:
    """Return how many windows are simulated or rehearsed in a row."""
    return windows.first_steady + REPEATED


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPrediction:
    """What asynchronous training takes, in microseconds.

    Args:
        plan: the plan with all windows of ``timeline`` as one mini-batch.
        num_windows: of the timeline, which begins and ends with an empty pipeline.
        steady_us: of one mini-batch while the pipeline is full.
        fill_us: what the first windows take beyond that; ``drain_us`` what a flush takes.
    """

    plan: PipelinePlan
    timeline: Timeline
    num_windows: int
    steady_us: float
    fill_us: float
    drain_us: float


def simulate_windows(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    update_us: Mapping[int, float] | None = None,
) -> AsyncPrediction:
    """Predict an asynchronous plan.

    Args:
        cluster: as for `simulate_plan`.
        update_us: by stage, reduction and step behind each backward; they start on all its ranks together.

    Raises:
        PlanError: the plan cannot run asynchronously, or does not fit the cluster.
    """
    # Two stages, in flight (2, 1), M = 2 micro-batches a window, every task 1 us, no updates:
    #
    #   us       0  1  2  3  4   5  6  7  8   9       22  23  24  25
    #   stage 0  F0 F1 .  B0|F2  B1 F3 B2|F4  B3 ...  F11 B10| .  B11    the drain
    #   stage 1  .  F0 B0 F1 B1| F2 B2 F3 B3| F4 ...  B10 F11 B11|
    #
    # Windows end at 5, 9, 13, ...: steady_us = 4, fill_us = 5 - 4 = 1 and drain_us = 1. A
    # stage's cut lies where its own tasks say (`Windows.tasks`), not at one time: stage 0 is
    # in window 2 while stage 1 still runs 1B1.
    windows = windows_of(plan)
    count = num_windows(windows)
    part = joined_windows(plan, count, forward_only_stages=forward_only_stages(plan))
    each = update_us or {}
    times = run_task_graph(
        part,
        part_durations(part, update_us=lambda stage: each.get(stage, 0.0)),
        transfers=message_transfers(part, cluster),
    )
    ends = _window_ends(part, times, windows, count)
    # Window `first_steady` is the first that repeats, but its start still depends on how the pipeline filled;
    # REPEATED windows later that has worn off, so only the last difference is read.
    steady = ends[count] - ends[count - 1]
    events = _task_events(part, times) + _message_events(part, times)
    return AsyncPrediction(
        plan=part.plan,
        timeline=Timeline(source="predicted", plan=fingerprint(plan), events=tuple(events)),
        num_windows=count,
        steady_us=steady,
        fill_us=ends[count] - count * steady,
        drain_us=ends[count + 1] - ends[count],
    )


def predict_drained_us(
    plan: PipelinePlan, *, cluster: Cluster | None = None, durations: Durations | None = None
) -> float:
    """Return the time of one window from an empty pipeline, and of the drain behind it, to an empty one.

    Several windows of a plan are one of the plan with a longer mini-batch (`lengthened`). Updates take no time here.
    """
    full = drained_graph(plan)
    transfers = message_transfers(full, cluster)
    return max(run_task_graph(full, task_durations(full, durations), transfers=transfers).end)


def drained_graph(plan: PipelinePlan) -> TaskGraph:
    """Return the tasks of one window of an asynchronous plan and of the drain behind it."""
    return build_task_graph(plan, window_schedules(windows_of(plan), 1, forward_only_stages(plan)))


def measured_steady_us(plan: PipelinePlan, timeline: Timeline) -> float:
    """Return what a window took while the pipeline was full, the mean of those that repeat.

    Args:
        plan: as of one window; ``timeline`` is of `num_windows` of them.
    """
    windows = windows_of(plan)
    count = num_windows(windows)
    ends = [0.0] * (count + 2)
    for event in timeline.events:
        task = event.task
        if task is None:
            continue
        # A backward belongs to the window of the forward that it runs behind: with k in flight, B(m) follows
        # F(m + k - 1). What falls behind the last window is the drain, one more entry.
        behind = windows.in_flight[task.stage] - 1 if task.kind is TaskKind.BACKWARD else 0
        window = min((task.micro_batch + behind) // windows.micro_batches + 1, count + 1)
        ends[window] = max(ends[window], event.end_us)
    return (ends[count] - ends[windows.first_steady]) / (count - windows.first_steady)


def _window_ends(graph: TaskGraph, times: TaskTimes, windows: Windows, count: int) -> list[float]:
    """Return when each window (from 1; the drain last) ends on the last rank, updates included."""
    ends = [0.0] * (count + 2)
    for node in range(graph.tasks.stop):
        micro_batch = graph.micro_batch[node]
        if graph.kind[node] is TaskKind.BACKWARD:
            micro_batch += windows.in_flight[graph.stage[node]] - 1  # it runs behind that forward
        window = min(micro_batch // windows.micro_batches + 1, count + 1)
        ends[window] = max(ends[window], times.end[node])
    for window in range(1, count + 2):
        # A window without tasks on the slowest rank (the drain of a
        # plan with k = 1) ends with the one before.
        ends[window] = max(ends[window], ends[window - 1])
    return ends
