"""Predicts the timeline of a plan: discrete events, every stage in its own order, on the links of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.timeline import EVENT_OF_TASK, Event, EventKind, Timeline
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.durations import Durations, task_durations
from gpp_plugin.schedule.event_loop import TaskTimes, message_transfers, run_task_graph
from gpp_plugin.schedule.task_graph import TaskGraph
from gpp_plugin.simulate.program_times import simulate_programs

__all__ = ["predict_iteration_us", "simulate_plan", "simulate_programs"]


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
        events += message_events(graph, times)
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
    transfers = message_transfers(graph, cluster) if cluster is not None else None
    times = run_task_graph(
        graph, task_durations(graph, durations), transfers=transfers, share_links=share_links
    )
    return graph, times


def _rank_ends(graph: TaskGraph, times: TaskTimes) -> dict[int, float]:
    # Tensor ranks run every task together, so `orders` has one entry a
    # data position; all its members end there.
    return {
        rank: times.end[order[-1]] for lead, order in graph.orders.items() for rank in graph.members[lead]
    }


def _task_events(graph: TaskGraph, times: TaskTimes) -> list[Event]:
    return [
        Event(
            rank=rank,
            stage=group.stage,
            kind=kind,
            start_us=times.start[node],
            end_us=times.end[node],
            micro_batch=graph.micro_batch[node],
            half=group.half,
        )
        for group, kind in [(group, EVENT_OF_TASK[group.kind]) for group in graph.groups]
        for node in range(group.first, group.first + group.count)
        for rank in graph.members[graph.rank[node]]
    ]


def message_events(graph: TaskGraph, times: TaskTimes) -> list[Event]:
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
