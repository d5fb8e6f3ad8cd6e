"""A timeline in the Chrome trace-event format, which Perfetto and chrome://tracing show."""

from __future__ import annotations

from typing import Any

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Event, EventKind, Timeline

_TRACKS = {
    EventKind.FORWARD: (0, "compute"),
    EventKind.BACKWARD: (0, "compute"),
    EventKind.INPUT_GRADIENT: (0, "compute"),
    EventKind.WEIGHT_GRADIENT: (0, "compute"),
    EventKind.REDUCE: (0, "compute"),
    EventKind.STEP: (0, "compute"),
    EventKind.RECEIVE: (100, "receive"),
    EventKind.SEND: (200, "send"),
}


def chrome_trace(timeline: Timeline, plan: PipelinePlan) -> dict[str, Any]:
    """Return the trace as JSON types: a process per rank, tracks for compute, receives and sends.

    Messages that are under way at the same time take tracks of their own, as the format demands that
    the events of one track nest.
    """
    events: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in timeline.events}):
        stage = plan.stage_of_rank(rank)
        name = f"rank {rank}: stage {stage} {plan.stages[stage].name}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        events += _rank_events([event for event in timeline.events if event.rank == rank], plan)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source, "plan": timeline.plan, "model": plan.model},
    }


def _rank_events(events: list[Event], plan: PipelinePlan) -> list[dict[str, Any]]:
    ends: dict[int, float] = {}
    shown: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
        track, track_name = _TRACKS[event.kind]
        while ends.get(track, float("-inf")) > event.start_us:
            track += 1
        if track not in ends:
            args = {"name": track_name}
            shown.append({"ph": "M", "name": "thread_name", "pid": event.rank, "tid": track, "args": args})
        ends[track] = event.end_us
        shown.append(
            {
                "ph": "X",
                "name": _event_name(event, plan),
                "cat": event.kind.value,
                "pid": event.rank,
                "tid": track,
                "ts": event.start_us,
                "dur": event.end_us - event.start_us,
                "args": _event_args(event, plan),
            }
        )
    return shown


def _event_name(event: Event, plan: PipelinePlan) -> str:
    if event.task is not None:
        return str(event.task)
    if event.edge >= 0:
        edge = plan.edges[event.edge]
        return f"{event.kind.value} {plan.stages[edge.src].name} -> {plan.stages[edge.dst].name}"
    return event.kind.value


def _event_args(event: Event, plan: PipelinePlan) -> dict[str, Any]:
    args: dict[str, Any] = {
        "stage": plan.stages[event.stage].name,
        "kind": event.kind.value,
        "bytes": event.bytes,
    }
    if event.micro_batch >= 0:
        args["micro_batch"] = event.micro_batch
    if event.half is not None:
        args["half"] = event.half
    if event.edge >= 0:
        args["edge"] = event.edge
    return args
