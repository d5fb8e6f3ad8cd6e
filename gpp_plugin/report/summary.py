"""Figures drawn from a timeline: idle time, what each rank did, which stages ran at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Event, EventKind, Timeline

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSummary:
    """What one mini-batch's timeline comes to.

    Args:
        bubble_ratio: idle share of all ranks over the span of compute.
        busy_us: rank -> microseconds it computed; ``communication_us`` it spent in messages and reductions.
        overlap_us: microseconds in which the requested stages all ran their forward, whatever the micro-batch.
        same_micro_batch_overlap_us: the part of it in which they ran the same micro-batch.
    """

    source: str
    iteration_us: float
    bubble_ratio: float
    busy_us: dict[int, float]
    communication_us: dict[int, float]
    bytes_sent: int
    overlap_us: float = 0.0
    same_micro_batch_overlap_us: float = 0.0


def summarize_timeline(
    timeline: Timeline, plan: PipelinePlan, *, overlapping: Sequence[str] = ()
) -> TimelineSummary:
    """Return the figures of a timeline.

    Args:
        overlapping: names of stages whose common forward time is wanted.
    Raises:
        PlanError: a name is no stage of the plan.
    """
    stages = [plan.stage_index(name) for name in overlapping]
    communication: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in (EventKind.SEND, EventKind.RECEIVE, EventKind.REDUCE):
            communication[event.rank] += event.end_us - event.start_us
    return TimelineSummary(
        source=timeline.source,
        iteration_us=timeline.iteration_us,
        bubble_ratio=timeline.bubble_ratio(),
        busy_us=dict(sorted(timeline.busy_us().items())),
        communication_us=dict(sorted(communication.items())),
        bytes_sent=sum(event.bytes for event in timeline.events if event.kind is EventKind.SEND),
        overlap_us=forward_overlap_us(timeline, stages) if stages else 0.0,
        same_micro_batch_overlap_us=sum(forward_overlaps_us(timeline, stages).values()) if stages else 0.0,
    )


def forward_overlap_us(timeline: Timeline, stages: Sequence[int]) -> float:
    """Return the microseconds in which every one of ``stages`` was in some forward."""
    return _common_us([_forwards(timeline, stage) for stage in stages])


def forward_overlaps_us(timeline: Timeline, stages: Sequence[int]) -> dict[int, float]:
    """Return micro-batch -> microseconds in which all ``stages`` were in that micro-batch's forward."""
    numbers = {event.micro_batch for stage in stages for event in _forwards(timeline, stage)}
    return {
        number: _common_us([_forwards(timeline, stage, number) for stage in stages])
        for number in sorted(numbers)
    }


def _forwards(timeline: Timeline, stage: int, micro_batch: int | None = None) -> list[Event]:
    return [
        event
        for event in timeline.events
        if event.kind is EventKind.FORWARD
        and event.stage == stage
        and (micro_batch is None or event.micro_batch == micro_batch)
    ]


def _common_us(groups: Sequence[Iterable[Event]]) -> float:
    # ``groups``: by stage, its forwards on all its ranks. A stage runs while any of its ranks does (their union); of
    # [0, 200] and [50, 150] 100 us are common.
    common: list[Interval] | None = None
    for events in groups:
        intervals = _union([(event.start_us, event.end_us) for event in events])
        common = intervals if common is None else _intersect(common, intervals)
    return sum(end - start for start, end in common or [])


def _union(intervals: list[Interval]) -> list[Interval]:
    # sorted by start, an interval joins the one before or begins a new one: (0, 4) (3, 6) (8, 9) are (0, 6) (8, 9)
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersect(first: list[Interval], second: list[Interval]) -> list[Interval]:
    return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]
