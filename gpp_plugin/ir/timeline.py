"""What happened when, whichever way the program was run: predicted, rehearsed or measured."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.typed_leaves import Bytes, Half, Index, IndexOrNone, OneOf, SignedMicros


class EventKind(enum.Enum):
    """What a rank was doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    SEND = "send"
    RECEIVE = "receive"
    GATHER = "gather"
    REDUCE = "reduce"
    STEP = "step"


EVENT_OF_TASK = MappingProxyType(
    {
        TaskKind.FORWARD: EventKind.FORWARD,
        TaskKind.BACKWARD: EventKind.BACKWARD,
        TaskKind.INPUT_GRADIENT: EventKind.INPUT_GRADIENT,
        TaskKind.WEIGHT_GRADIENT: EventKind.WEIGHT_GRADIENT,
    }
)
"""The kind of event that running a task is."""

COMPUTE_KINDS = frozenset(EVENT_OF_TASK.values())
LAST_KINDS = frozenset({EventKind.BACKWARD, EventKind.WEIGHT_GRADIENT})
"""Tasks after which a micro-batch is no longer held."""

_TASK_OF_EVENT = MappingProxyType({event: kind for kind, event in EVENT_OF_TASK.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One interval on one rank, in microseconds since the mini-batch began.

    Args:
        micro_batch: of the stage; -1 where it has no meaning.
        edge: index of the plan's edge for messages; -1 otherwise.
        peer: the rank at a message's other end; -1 for what is no message.
        half: of a forward of half the samples, 0 or 1.
    """

    rank: Index
    stage: IndexOrNone
    kind: EventKind
    start_us: SignedMicros
    end_us: SignedMicros
    micro_batch: IndexOrNone = -1
    edge: IndexOrNone = -1
    bytes: Bytes = 0
    half: Half | None = None
    peer: IndexOrNone = -1

    @property
    def task(self) -> Task | None:
        """Return the task that was computed; None for what is not a task."""
        kind = _TASK_OF_EVENT.get(self.kind)
        if kind is None:
            return None
        return Task(stage=self.stage, kind=kind, micro_batch=self.micro_batch, half=self.half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of one mini-batch on all ranks.

    Args:
        source: ``predicted``, ``rehearsed`` or ``measured``.
        plan: fingerprint of the plan that was run.
    """

    source: Annotated[str, OneOf(("predicted", "rehearsed", "measured"))]
    plan: str
    events: tuple[Event, ...]

    @property
    def iteration_us(self) -> float:
        """Return the time from the first event's start to the last one's end."""
        if not self.events:
            return 0.0
        return max(e.end_us for e in self.events) - min(e.start_us for e in self.events)

    def busy_us(self) -> dict[int, float]:
        """Return the microseconds each rank computed."""
        busy: dict[int, float] = defaultdict(float)
        for event in self.events:
            busy[event.rank] += event.end_us - event.start_us if event.kind in COMPUTE_KINDS else 0.0
        return dict(busy)

    def bubble_ratio(self) -> float:
        """Return idle over total compute time: 1 - busy / (ranks x span of compute)."""
        # Two ranks, forwards and backwards from 0 to 100: busy 60 and 90 us of 200 in all, a bubble of 25 %. From the
        # first task's start to the last one's end: reductions and the step behind them are no part of the schedule.
        compute = [e for e in self.events if e.kind in COMPUTE_KINDS]
        if not compute:
            return 0.0
        span = max(e.end_us for e in compute) - min(e.start_us for e in compute)
        busy = self.busy_us()
        return 1.0 - sum(busy.values()) / (len(busy) * span) if span > 0 else 0.0
