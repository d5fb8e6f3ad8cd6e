"""What is read off a timeline: in-flight and memory over time, start-up, what travel is hidden.

Everything here takes timelines from any source: predicted, rehearsed or measured. `times_of_ranks` compares what the
tasks of ranks took with the plan, and with each other.

Source: this project
Tests: tests/simulate/test_overlap.py, tests/nccl/test_overlap.py, tests/simulate/test_metrics.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, stage_compute_us
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.timeline import COMPUTE_KINDS, LAST_KINDS, Event, EventKind, Timeline
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.simulate.predict import num_windows

Steps = tuple[tuple[float, float], ...]
"""(microsecond, value from then on), in order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one rank of a stage holds.

    Args:
        static_bytes: parameters, gradients, optimizer: all the time.
        saved_bytes_per_sample: from a forward's start to the end of its backward or weight gradient.
        saved_bytes_fixed: the same for each micro-batch, whatever its size.
        transient_bytes_per_sample: only while a task runs.
    """

    static_bytes: float = 0.0
    saved_bytes_per_sample: float = 0.0
    saved_bytes_fixed: float = 0.0
    transient_bytes_per_sample: float = 0.0


def _tasks_by_rank(timeline: Timeline) -> dict[int, list[Event]]:
    """Return the forwards and backwards of each rank in the order they ran."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE_KINDS:
            by_rank[event.rank].append(event)
    for events in by_rank.values():
        events.sort(key=lambda e: (e.start_us, e.end_us))
    return dict(sorted(by_rank.items()))


def _trained_stages(tasks: Sequence[Event]) -> set[int]:
    """Return the stages that run backwards among a rank's tasks."""
    return {task.stage for task in tasks if task.kind in LAST_KINDS}


def in_flight_over_time(timeline: Timeline) -> dict[int, Steps]:
    """Return for each rank how many micro-batches it holds, from a forward's start to its B's or W's end.

    In a stage that runs no backwards a micro-batch is held until its last message has arrived. A rank of several stages
    holds what they hold together.
    """
    sent: dict[tuple[int, int, int], float] = {}
    for event in timeline.events:
        if event.kind is EventKind.SEND:
            key = (event.rank, event.stage, event.micro_batch)
            sent[key] = max(sent.get(key, 0.0), event.end_us)
    # Halves: a forward in two is one micro-batch, held from the start of half
    # 0; None != 1, so a whole forward counts.
    result = {}
    for rank, tasks in _tasks_by_rank(timeline).items():
        trained = _trained_stages(tasks)
        changes = []
        for task in tasks:
            if task.kind is EventKind.FORWARD:
                if task.half != 1:
                    changes.append((task.start_us, 1))
                if task.stage not in trained and task.half != 0:
                    key = (rank, task.stage, task.micro_batch)
                    changes.append((sent.get(key, task.end_us), -1))
            elif task.kind in LAST_KINDS:
                changes.append((task.end_us, -1))
        result[rank] = _accumulate(changes)
    return result


def peak_in_flight(timeline: Timeline) -> dict[int, int]:
    """Return the most micro-batches each rank holds at a time."""
    return {rank: int(max(v for _, v in steps)) for rank, steps in in_flight_over_time(timeline).items()}


def memory_over_time(
    plan: PipelinePlan, timeline: Timeline, memory: Sequence[StageMemory]
) -> dict[int, Steps]:
    """Return the bytes each rank holds over time.

    Args:
        memory: one for each stage of ``plan``.

    Raises:
        PlanError: there is not one entry for each stage.
    """
    if len(memory) != len(plan.stages):
        raise PlanError(f"memory of {len(memory)} stages for a plan of {len(plan.stages)}; give one for each")
    result = {}
    for rank, tasks in _tasks_by_rank(timeline).items():
        trained = _trained_stages(tasks)
        changes = [(0.0, sum(memory[stage].static_bytes for stage in plan.stages_of_rank(rank)))]
        for task in tasks:
            costs, samples = memory[task.stage], plan.stages[task.stage].local_batch_size
            saved = costs.saved_bytes_fixed + costs.saved_bytes_per_sample * samples
            transient = costs.transient_bytes_per_sample * samples
            # Example: 2 samples, 10 B saved and 4 B transient a sample: a forward adds 28 B,
            # its end frees 8, the backward adds 8 and its end frees 28. The end of an input
            # gradient frees its transient bytes only.
            part = 1.0 if task.half is None else 0.5
            is_forward = task.kind is EventKind.FORWARD
            changes.append((task.start_us, part * (transient + (saved if is_forward else 0.0))))
            is_freed = task.kind in LAST_KINDS or task.stage not in trained
            changes.append((task.end_us, -part * (transient + (saved if is_freed else 0.0))))
        result[rank] = _accumulate(changes)
    return result


def _accumulate(changes: Sequence[tuple[float, float]]) -> Steps:
    """Return running sums; at one time what is freed counts before what is taken."""
    steps: list[tuple[float, float]] = []
    total = 0.0
    # Sorting pairs puts the negative changes of a time first: a buffer freed at 7 us can be taken at 7 us.
    for time, change in sorted(changes):
        total += change
        if steps and steps[-1][0] == time:
            steps[-1] = (time, total)
        else:
            steps.append((time, total))
    return tuple(steps)


def start_up_us(timeline: Timeline) -> float:
    """Return the time until every stage has begun its first forward; on a chain, until the last has."""
    first: dict[int, float] = {}
    for event in timeline.events:
        if event.kind is EventKind.FORWARD:
            first[event.stage] = min(first.get(event.stage, event.start_us), event.start_us)
    return max(first.values()) - min(first.values()) if first else 0.0


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


# How much of what travels is hidden behind computing: messages, gathers, reductions, and swap's copies each way.
#
#     hidden(x)  =  time that x travels while its rank computes, and what it computes does not wait for x
#     share      =  sum of hidden(x) / sum of how long x travels, over all x of a kind
#
# A message counts on the rank that receives it, as its sender continues at once. A timeline has messages, gathers and
# reductions. Swap's copies are played beside its tasks here (`swap_copies`), as `runtime.memory.swap` orders them: what
# a forward keeps leaves as it is made, the first to come back is requested when the task in front of its backward
# begins, and each next one when the one before is used. Two tensors a and b, copies of 2 us, tasks of 4 us:
#
#     us        0    2    4    6    8   10   12
#     compute   |F0       |F1       |B0       |
#     out       .    |b0  |a0  |b1  |a1  .    .       made at the middle and the end of a forward
#     back      .    .    |a0  .    |b0  .    .       a0 requested at 4, used at 8; b0 requested at 8, used at 10
#
# (a is the last that the forward keeps, and the first that the backward uses.)


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
    tasks = _tasks_by_rank(timeline)
    computing = {rank: [(event.start_us, event.end_us) for event in own] for rank, own in tasks.items()}
    return overlap_of(travels, computing)


def overlap_of(
    travels: Iterable[Travel], computing: Mapping[int, Sequence[tuple[float, float]]]
) -> tuple[Overlap, ...]:
    """Return the overlap of each kind of what travels with what ranks compute meanwhile."""
    busy = {rank: joined_spans(spans) for rank, spans in computing.items()}
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


def joined_spans(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return times as spans with gaps between them: (0, 4) (3, 6) (8, 9) are (0, 6) (8, 9)."""
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
    tasks = _tasks_by_rank(timeline)
    for index, stage in enumerate(plan.stages):
        if stage.memory is None or not stage.memory.swapped:
            continue
        # the later in the forward a tensor is last used, the sooner its backward uses it: its FreeTime is the shorter
        ordered = sorted(stage.memory.swapped, key=lambda tensor: -tensor.free_us)
        for rank in stage.ranks:
            rate = cluster.devices[rank].host_bytes_per_s / 1e6
            own = [event for event in tasks.get(rank, ()) if event.stage == index]
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


# ---- stragglers ----------------------------------------------------------------------------------------------

STRAGGLES = 1.3
"""A rank whose tasks take longer than so many times what they should is a straggler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """What the tasks of a rank took in a step, beside what they should.

    Args:
        planned_us: by the plan; 0 where it predicts no times.
        over_plan: of the quickest rank with the same stages, over the median of all ranks with others: its time over
            the plan's. 0 where that is unknown.
        over_replicas: its time over the median of the other data-parallel replicas of its stages; 0 without any.
    """

    us: float
    planned_us: float
    over_plan: float
    over_replicas: float

    @property
    def slowness(self) -> float:
        """Return the larger one of both ratios."""
        return max(self.over_plan, self.over_replicas)


def times_of_ranks(plan: PipelinePlan, measured_us: Mapping[int, float]) -> dict[int, RankTime]:
    """Return the times of ranks beside the plan and beside each other.

    Args:
        measured_us: rank -> microseconds of its tasks; those of 0 ran none, and are left out.
    """
    # A plan's times are often wrong for the machine as a whole, so ratios to it are compared, not times. Two stages on
    # two ranks each, and the plan says 20 and 10 ms:
    #
    #     rank   stage   ms   over planned   over the plan                over its replica
    #     0      text    30   1.5            min(1.5, 2.4) / 1.6 = 0.9    30 / 48 = 0.6
    #     1      text    48   2.4            0.9                          48 / 30 = 1.6    a straggler
    #     2, 3   image   16   1.6            1.6 / median(1.5, 2.4) = 0.8     1.0
    #
    # A stage is slow where even the quickest of its ranks is: one slow replica makes no stragglers of the others.
    measured = {rank: us for rank, us in measured_us.items() if us > 0.0}
    stages = {rank: plan.stages_of_rank(rank) for rank in measured}
    planned = {rank: sum(stage_compute_us(plan, index) for index in own) for rank, own in stages.items()}
    ratios = {rank: measured[rank] / planned[rank] for rank in measured if planned[rank] > 0.0}
    found = {}
    for rank, own in stages.items():
        alike = [ratio for other, ratio in ratios.items() if stages[other] == own]
        others = [ratio for other, ratio in ratios.items() if stages[other] != own]
        places = [plan.stages[index].position(rank)[1] for index in own]
        replicas = [
            measured[other]
            for other in measured
            if other != rank
            and stages[other] == own
            and [plan.stages[index].position(other)[1] for index in own] == places
        ]
        found[rank] = RankTime(
            us=measured[rank],
            planned_us=planned[rank],
            over_plan=min(alike) / median(others) if alike and others else 0.0,
            over_replicas=measured[rank] / median(replicas) if replicas else 0.0,
        )
    return found
