"""A timeline in the Chrome trace-event format, which Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import write_text_whole
from gpp_plugin.ir.timeline import Event, EventKind, Timeline

_TRACKS = {EventKind.RECEIVE: (100, "receive"), EventKind.SEND: (200, "send")}
"""Of messages; everything else is on track 0, ``compute``."""


def chrome_trace(timeline: Timeline, plan: PipelinePlan) -> dict[str, Any]:
    """Return the trace as JSON types: a process per rank, tracks for compute, receives and sends.

    Messages that are under way at the same time take tracks of their own, as the format demands that
    the events of one track nest. An arrow leads from each send to its receive.
    """
    events: list[dict[str, Any]] = []
    tracks: dict[int, int] = {}
    for rank in sorted({event.rank for event in timeline.events}):
        stages = plan.stages_of_rank(rank)
        names = ", ".join(f"{stage} {plan.stages[stage].forward_label}" for stage in stages)
        name = f"rank {rank}: stage{'s' * (len(stages) > 1)} {names}"
        for kind, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": rank})):
            events.append({"ph": "M", "name": kind, "pid": rank, "args": args})
        events += _rank_events([event for event in timeline.events if event.rank == rank], plan, tracks)
    events += _arrows(timeline, plan, tracks)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source, "plan": timeline.plan, "model": plan.model},
    }


def write_trace(timeline: Timeline, plan: PipelinePlan, path: str, *, step: int) -> None:
    """Write a trace; ``{step}`` in ``path`` makes one file a step."""
    target = Path(path.replace("{step}", str(step)))
    write_text_whole(target, json.dumps(chrome_trace(timeline, plan)) + "\n")


def _rank_events(events: list[Event], plan: PipelinePlan, tracks: dict[int, int]) -> list[dict[str, Any]]:
    """Return what one rank's tracks show; notes the track of each event, by its id, in ``tracks``."""
    # Compute is track 0; receives are 100, 101, ... and sends 200, 201, ...: of two receives under way at once the
    # second takes the next number that is free by then. Longer ones first where they begin together.
    ends: dict[int, float] = {}
    shown: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
        track, track_name = _TRACKS.get(event.kind, (0, "compute"))
        while ends.get(track, float("-inf")) > event.start_us:
            track += 1
        if track not in ends:
            args = {"name": track_name}
            shown.append({"ph": "M", "name": "thread_name", "pid": event.rank, "tid": track, "args": args})
        ends[track] = event.end_us
        tracks[id(event)] = track
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


def _arrows(timeline: Timeline, plan: PipelinePlan, tracks: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield two events a message: where it is sent, and where it is received."""
    for number, (send, receive) in enumerate(_messages(timeline, plan)):
        for phase, event in (("s", send), ("f", receive)):
            arrow: dict[str, Any] = {
                "ph": phase,
                "name": "message",
                "cat": "message",
                "id": number,
                "pid": event.rank,
                "tid": tracks[id(event)],
                "ts": event.start_us,
            }
            if phase == "f":
                # Just before the receive's end, which is after the send; at the event around that time.
                arrow["ts"] = event.end_us - min(0.001, (event.end_us - event.start_us) / 2)
                arrow["bp"] = "e"
            yield arrow


def _messages(timeline: Timeline, plan: PipelinePlan) -> Iterator[tuple[Event, Event]]:
    """Yield the send and the receive of every message that has both.

    The messages of a channel hold its samples in order, so both of their micro-batches increase.
    """
    # By edge, direction, sender and receiver: (1, True, 2, 3) are activations along edge 1 from rank 2 to rank 3. The
    # sender counts its micro-batches and the receiver its own (0, 1, 2, 3 against 0, 0, 1, 1), both upwards.
    Both = tuple[list[Event], list[Event]]
    channels: dict[tuple[int, bool, int, int], Both] = defaultdict(lambda: ([], []))
    for event in timeline.events:
        if event.peer < 0:
            continue
        is_send, is_activation = event.kind is EventKind.SEND, _is_activation(event, plan)
        ends = (event.rank, event.peer) if is_send else (event.peer, event.rank)
        channels[event.edge, is_activation, *ends][0 if is_send else 1].append(event)
    for both in channels.values():
        sends, receives = (
            sorted(events, key=lambda e: (e.micro_batch, e.half or 0, e.start_us)) for events in both
        )
        yield from zip(sends, receives, strict=False)


def _is_activation(event: Event, plan: PipelinePlan) -> bool:
    """Return whether a message is sent along its edge, not against it."""
    return (plan.edges[event.edge].src == event.stage) == (event.kind is EventKind.SEND)


def _event_name(event: Event, plan: PipelinePlan) -> str:
    if event.task is not None:
        return str(event.task)
    if event.edge >= 0:
        edge = plan.edges[event.edge]
        source, target = plan.stages[edge.src].name, plan.stages[edge.dst].name
        if _is_activation(event, plan):
            return f"{event.kind.value} {source} -> {target}"
        return f"{event.kind.value} gradient {target} -> {source}"
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
    if event.kind is EventKind.FORWARD and (backend := plan.stages[event.stage].runs_on):
        args["backend"] = backend
    if event.edge >= 0:
        args["edge"] = event.edge
    return args
