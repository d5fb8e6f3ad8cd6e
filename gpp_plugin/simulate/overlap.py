"""How much of what travels is hidden behind computing: messages, gathers, reductions, and swap's copies each way.

    hidden(x)  =  time that x travels while its rank computes, and what it computes does not wait for x
    share      =  sum of hidden(x) / sum of how long x travels, over all x of a kind

A message counts on the rank that receives it, as its sender continues at once. A timeline has messages, gathers and
reductions. Swap's copies are played beside its tasks here (`swap_copies`), as `runtime.memory.swap` orders them: what a
forward keeps leaves as it is made, the first to come back is requested when the task in front of its backward begins,
and each next one when the one before is used. Two tensors a and b, copies of 2 us, tasks of 4 us:

    us        0    2    4    6    8   10   12
    compute   |F0       |F1       |B0       |
    out       .    |b0  |a0  |b1  |a1  .    .       made at the middle and the end of a forward
    back      .    .    |a0  .    |b0  .    .       a0 requested at 4, used at 8; b0 requested at 8, used at 10

(a is the last that the forward keeps, and the first that the backward uses.)

Source: this project
Tests: tests/simulate/test_overlap.py, tests/nccl/test_overlap.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import COMPUTE_KINDS, Event, EventKind, Timeline

COPIES_OUT, COPIES_BACK = "copies out", "copies back"
_KINDS = {EventKind.RECEIVE: "messages", EventKind.GATHER: "gathers", EventKind.REDUCE: "reductions"}

Spans = Sequence[tuple[float, float]]
"""Times from and to, in microseconds, ascending and disjoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """Something on its way to or from a rank.

    Args:
        needed_us: when the rank stops for it, if it is not there; None: nothing waits for it.
    """

    kind: str
    rank: int
    start_us: float
    end_us: float
    needed_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What of one kind travels, on all ranks together."""

    kind: str
    count: int
    travel_us: float
    hidden_us: float

    @property
    def share(self) -> float:
        """Return the hidden share; 1 where nothing takes time."""
        return self.hidden_us / self.travel_us if self.travel_us > 0 else 1.0


def timeline_overlap(plan: PipelinePlan, timeline: Timeline, cluster: Cluster) -> tuple[Overlap, ...]:
    """Return the overlap of each kind that there is.

    Args:
        timeline: of the plan.
        cluster: whose links to host memory swap's copies take.
    """
    travels = [
        Travel(kind=_KINDS[event.kind], rank=event.rank, start_us=event.start_us, end_us=event.end_us)
        for event in timeline.events
        if event.kind in _KINDS
    ]
    travels += swap_copies(plan, timeline, cluster)
    computing: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS:
            computing[event.rank].append((event.start_us, event.end_us))
    return overlap_of(travels, computing)


def overlap_of(
    travels: Iterable[Travel], computing: Mapping[int, Sequence[tuple[float, float]]]
) -> tuple[Overlap, ...]:
    """Return the overlap of each kind of what travels with what ranks compute meanwhile."""
    busy = {rank: _joined(spans) for rank, spans in computing.items()}
    sums: dict[str, list[float]] = {}
    for each in travels:
        found = sums.setdefault(each.kind, [0.0, 0.0, 0.0])
        end = each.end_us if each.needed_us is None else min(each.end_us, each.needed_us)
        found[0] += 1
        found[1] += each.end_us - each.start_us
        found[2] += sum(
            max(0.0, min(end, until) - max(each.start_us, since)) for since, until in busy.get(each.rank, ())
        )
    return tuple(
        Overlap(kind=kind, count=int(count), travel_us=travel, hidden_us=hidden)
        for kind, (count, travel, hidden) in sums.items()
    )


def _joined(spans: Iterable[tuple[float, float]]) -> Spans:
    joined: list[tuple[float, float]] = []
    for since, until in sorted(spans):
        if joined and since <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(until, joined[-1][1])
        else:
            joined.append((since, until))
    return joined


def swap_copies(plan: PipelinePlan, timeline: Timeline, cluster: Cluster) -> list[Travel]:
    """Return the copies of stages that swap, with each rank's tasks at the timeline's times."""
    found: list[Travel] = []
    tasks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS:
            tasks[event.rank, event.stage].append(event)
    for index, stage in enumerate(plan.stages):
        if stage.memory is None or not stage.memory.swapped:
            continue
        # the later in the forward a tensor is last used, the sooner its backward uses it: its FreeTime is the shorter
        ordered = sorted(stage.memory.swapped, key=lambda tensor: -tensor.free_us)
        for rank in stage.ranks:
            rate = cluster.devices[rank].host_bytes_per_s / 1e6
            own = sorted(tasks[rank, index], key=lambda event: event.start_us)
            found += _Link(rank, [tensor.bytes / rate for tensor in ordered]).copies(own)
    return found


class _Link:
    """One rank's copies for one stage.

    Args:
        copy_us: of each tensor of a micro-batch, in the order in which the forward keeps them.
    """

    def __init__(self, rank: int, copy_us: Sequence[float]) -> None:
        self._rank, self._copy_us = rank, copy_us
        self._left: dict[int, list[float]] = {}  # by micro-batch, when each tensor is on the host

    def copies(self, tasks: Sequence[Event]) -> list[Travel]:
        """Return the copies beside tasks, which are in order."""
        # Each direction is a stream of its own, whose copies follow each other: ``out_free`` and ``back_free`` are when
        # it is through with its input. Weight gradients use what their input gradient has brought back.
        found: list[Travel] = []
        out_free = back_free = 0.0
        for previous, task in pairwise((None, *tasks)):
            assert task is not None, "the pair's second one is a task"
            if task.kind is EventKind.FORWARD:
                out_free = self._leave(task, out_free, found)
            elif task.kind is not EventKind.WEIGHT_GRADIENT:
                back_free = self._return(task, self._requested_us(previous, task), back_free, found)
        return found

    def _requested_us(self, previous: Event | None, task: Event) -> float:
        """Return when the first copy back of a backward is requested."""
        # Of F0 F1 B0 B1, B0's is requested as F1 begins, and B1's as B0 uses the last of its own. Of F0 B0 nothing has
        # left in between; with split backwards (I0 W0 I1 W1) I1's is requested as W0 begins.
        if previous is None or previous.kind is EventKind.INPUT_GRADIENT:
            return task.start_us
        if previous.kind is EventKind.FORWARD:
            return task.start_us if previous.micro_batch == task.micro_batch else previous.start_us
        if previous.kind is EventKind.WEIGHT_GRADIENT:
            return previous.start_us
        return self._times(previous, ends=False)[-1]  # a backward uses its last one

    def _times(self, task: Event, *, ends: bool) -> list[float]:
        """Return when a task has made, or first uses, each of its tensors: evenly, as plans say nothing of it."""
        count, length = len(self._copy_us), task.end_us - task.start_us
        return [task.start_us + (place + ends) * length / count for place in range(count)]

    def _leave(self, task: Event, free: float, found: list[Travel]) -> float:
        # a forward in two halves is taken for two of its length: each moves half of every tensor
        share = 1.0 if task.half is None else 0.5
        left = self._left.setdefault(task.micro_batch, [0.0] * len(self._copy_us))
        for place, (made, copy_us) in enumerate(
            zip(self._times(task, ends=True), self._copy_us, strict=True)
        ):
            start = max(made, free)
            left[place] = free = start + share * copy_us
            found.append(Travel(kind=COPIES_OUT, rank=self._rank, start_us=start, end_us=free))
        return free

    def _return(self, task: Event, requested_us: float, free: float, found: list[Travel]) -> float:
        # ``requested_us``: when a copy may begin; of the first one; of each next one, the use of the one before. What
        # a late copy makes the backward wait moves all later uses: copies of 3 us, uses planned at 0, 2, 4 are at 0, 3,
        # 6.
        left = self._left.pop(task.micro_batch, [0.0] * len(self._copy_us))
        late = 0.0  # what the backward has waited for copies
        for use, copy_us, gone in zip(
            self._times(task, ends=False), reversed(self._copy_us), reversed(left), strict=True
        ):
            start = max(requested_us, free, gone)
            free = start + copy_us
            needed = use + late
            found.append(
                Travel(
                    kind=COPIES_BACK,
                    rank=self._rank,
                    start_us=start,
                    end_us=free,
                    needed_us=max(needed, start),
                )
            )
            late += max(0.0, free - needed)
            requested_us = use + late
        return free
