"""Rehearses a plan: checks it, starts a process a rank, and compares the measured times with the simulator."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import ConfigError, GppError, PlanError
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages, stage_task_us
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.step_cost import StepCost
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec, batch_layout
from gpp_plugin.ir.timeline import Event, EventKind, Timeline
from gpp_plugin.launch import free_memory_bytes, run_ranks
from gpp_plugin.plan.plan_form import check_form, read_plan
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph, lengthened
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.schedule.program_sets import ProgramSet, lower_async
from gpp_plugin.schedule.task_graph import TaskGraph
from gpp_plugin.simulate.predict import (
    drained_graph,
    num_windows,
    predict_drained_us,
    predict_iteration_us,
    simulate_windows,
)
from gpp_plugin.simulate.timeline_metrics import measured_steady_us

# How a plan is rehearsed, and what a plan must hold for it; everything is checked before a process starts.


LARGEST_MEMORY_SHARE = 0.8
"""Of the memory that is free, what a rehearsal may fill with messages and gradients."""
LEAST_COMM_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSettings:
    """How often, at which speed and with how large messages.

    Args:
        steps: mini-batches that are measured; one more runs before them.
        scale_time: factor of every task's planned duration.
        scale_bytes: factor of every message and of the gradients that are reduced.
        comm_timeout_s: longest wait for a message; None: by the plan's own times.
    """

    steps: int = 5
    scale_time: float = 1.0
    scale_bytes: float = 1.0
    comm_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"{place_of('steps')}: {self.steps} is not valid; give at least 1")
        for name in ("scale_time", "scale_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{place_of(name)}: {value:g} is not valid; give a number above 0")
        if self.comm_timeout_s is not None and not self.comm_timeout_s > 0:
            raise ConfigError(
                f"{place_of('timeout_s')}: {self.comm_timeout_s:g} is not valid; give seconds above 0"
            )


def load_rehearsable(path: Path) -> PipelinePlan:
    """Read a plan and check that it can be rehearsed.

    Raises:
        GppError: the file is missing, not a plan of this release, or cannot be rehearsed.
    """
    plan = read_plan(path)
    try:
        check_rehearsable(plan)
    except GppError as error:
        raise type(error)(f"{path}: {error}") from error
    return plan


def check_rehearsable(plan: PipelinePlan) -> None:
    """Refuse a plan whose ranks, times or tensors do not say what to run.

    Raises:
        PlanError: it says what is missing and how to get it.
    """
    # What any plan is, then times, and the shape of all that is sent. Memory and programs are checked elsewhere
    # (`check_memory`, `rehearse_plan`).
    check_form(plan)
    if not any(stage.forward_us for stage in plan.stages):
        raise PlanError("its stages have no forward_us; make the plan with gpp plan --out")
    for stage in plan.stages:
        times = (stage.forward_us, stage.backward_us)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise PlanError(
                f"stage {stage.name!r} takes {times[0]} and {times[1]} us; times must be 0 or more"
            )
    known = {spec.name for spec in plan.tensors}
    for number, edge in enumerate(plan.edges):
        missing = [name for name in (*edge.batch_tensors, *edge.whole_tensors) if name not in known]
        if missing:
            raise PlanError(
                f"edge {number} sends {missing[0]!r}, whose shape the plan does not hold; "
                "make the plan anew with gpp plan --out"
            )


def scale_tensors(plan: PipelinePlan, factor: float) -> dict[str, TensorSpec]:
    """Return the plan's tensors by name, with ``factor`` times the elements.

    At a factor of 1 shapes are the model's own. At others a tensor becomes a matrix of samples x elements
    (one row of elements where it has no batch axis), at least one element each; one that tensor ranks hold as
    shards keeps its axes, and the longest that has neither samples nor shards is scaled.
    """
    if factor == 1.0:
        return {spec.name: spec for spec in plan.tensors}
    cut: dict[str, set[int]] = defaultdict(set)
    for edge in plan.edges:
        for name in (*edge.batch_tensors, *edge.whole_tensors):
            cut[name].update(axis for axis in (edge.src_shard_axis, edge.dst_shard_axis) if axis is not None)
    return {spec.name: _scale_tensor(spec, factor, cut[spec.name]) for spec in plan.tensors}


def _scale_tensor(spec: TensorSpec, factor: float, shard_axes: set[int]) -> TensorSpec:
    # [8 samples, 197 tokens, 768], factor 0.1, at axis 0 the samples:
    #
    #   without shards                (8, 15130)           1/10 of 197 * 768 elements a sample
    #   tokens in shards (axis 1)     (8, 197, 77)         axis 1 must go on dividing among the tensor ranks
    #   no batch axis, no shards      (121037,)            1/10 of all 8 * 197 * 768
    elements = math.prod(spec.shape)
    if elements == 0:
        return spec
    is_batch = spec.layout.kind is LayoutKind.BATCH
    if shard_axes:
        free = set(range(len(spec.shape))) - shard_axes - ({spec.layout.axis} if is_batch else set())
        if not free:
            return spec
        axis = max(free, key=spec.shape.__getitem__)
        scaled = max(1, round(spec.shape[axis] * factor))
        return dataclasses.replace(spec, shape=(*spec.shape[:axis], scaled, *spec.shape[axis + 1 :]))
    rows = (spec.num_samples,) if is_batch else ()
    scaled = max(1, round(elements / math.prod(rows) * factor))
    layout = batch_layout(0) if is_batch else spec.layout
    return dataclasses.replace(spec, shape=(*rows, scaled), layout=layout)


def message_memory_bytes(plan: PipelinePlan, settings: RehearsalSettings) -> float:
    """Return about how many bytes all ranks together need for messages and gradients."""
    tensors = scale_tensors(plan, settings.scale_bytes)
    total = 0.0
    for edge in plan.edges:
        for index, shard_axis in ((edge.src, edge.src_shard_axis), (edge.dst, edge.dst_shard_axis)):
            stage = plan.stages[index]
            one = sum(
                tensors[name].bytes_for(stage.local_batch_size)
                for name in (*edge.batch_tensors, *edge.whole_tensors)
            )
            # A consumer may have received the activations of all micro-batches in flight, a producer sends
            # the same tensor again and again. Two stages of 1 rank, 10 MB a micro-batch, in flight 2 and 1:
            # 10 * (1 + 1) where it is made and 10 * (1 + 1) where it is used, 40 MB.
            held = stage.in_flight if index == edge.dst else 1
            copies = len(stage.ranks) / stage.num_parts(shard_axis)
            total += one * copies * (held + 1)  # the one more: its gradients
    reduced = sum(stage.gradient_bytes * len(stage.ranks) for stage in plan.stages if stage.num_replicas > 1)
    return total + reduced * settings.scale_bytes


def check_memory(plan: PipelinePlan, settings: RehearsalSettings, free_bytes: float) -> None:
    """Refuse a rehearsal whose messages do not fit this machine's memory.

    Raises:
        ConfigError: says how much smaller they must be.
    """
    needed = message_memory_bytes(plan, settings)
    limit = free_bytes * LARGEST_MEMORY_SHARE
    if needed > limit:
        fitting = settings.scale_bytes * limit / needed
        digit = 10.0 ** math.floor(math.log10(fitting))
        fitting = math.floor(fitting / digit) * digit  # one digit, rounded down
        raise ConfigError(
            f"the messages and gradients of {plan.num_ranks} ranks take about {needed / 2**30:.1f} GiB, this "
            f"machine has {free_bytes / 2**30:.1f} GiB free; write "
            f"{setting_of('scale_bytes', fitting)}"
        )


# From a saved plan to the programs of its ranks, without the model it was made for.


def programs_of_plan(plan: PipelinePlan, *, validate: bool = True) -> tuple[RankProgram, ...]:
    """Return the programs of all ranks, as the engine lowers them.

    Raises:
        ScheduleError: they would deadlock, reorder messages or exceed their in-flight counts.
    """
    # The parent validates once, before a process starts; each of its ranks lowers again, to the same
    # programs, without repeating the proof.
    schedules = build_schedules(plan)
    programs = lower_schedules(plan, schedules)
    if validate:
        validate_programs(plan, schedules, programs)
    return programs


def make_async_programs(plan: PipelinePlan, *, validate: bool = True) -> ProgramSet:
    """Return the programs of a plan of mode async, as the engine lowers them.

    Raises:
        PlanError: the plan cannot run so.
        ScheduleError: they are unsafe.
    """
    frozen = forward_only_stages(plan)
    programs = lower_async(plan, forward_only_stages=frozen)
    if validate:
        validate_async(plan, programs, forward_only_stages=frozen)
    return programs


def scale_times(plan: PipelinePlan, factor: float) -> PipelinePlan:
    """Return the plan with every task ``factor`` times as long."""
    if factor == 1.0:
        return plan
    # 0 stays 0, which means "not measured" for halves and split backwards (`stage_task_us`).
    names = ("forward_us", "backward_us", "half_forward_us", "input_gradient_us", "weight_gradient_us")
    stages = tuple(
        dataclasses.replace(stage, **{name: getattr(stage, name) * factor for name in names})
        for stage in plan.stages
    )
    # the times of messages in orders as well, or they would be other orders
    edges = tuple(
        dataclasses.replace(edge, message_us=edge.message_us * factor, gradient_us=edge.gradient_us * factor)
        for edge in plan.edges
    )
    return dataclasses.replace(
        plan, stages=stages, edges=edges, iteration_us=plan.iteration_us * factor, cost=None
    )


# Compares a timeline with the simulator: task times and message delays as measured, simulated again.

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
            if wait.produced_us > wait.before_us:  # the rank was free before the message was made
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
        reduce_us=times.reduce_us,
        # ranks of several stages agree once for all of them, and all ranks end together
        step_us=dict.fromkeys(range(1 if plan.shares_ranks else len(plan.stages)), times.step_us),
    )


def _task_graph(plan: PipelinePlan) -> TaskGraph:
    if plan.mode == "async":
        return drained_graph(plan)
    return build_task_graph(plan, build_schedules(plan))


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
        if stage.num_replicas > 1 and events:
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


def idle_over_planned(plan: PipelinePlan, timelines: Sequence[Timeline]) -> float:
    """Return the idle time of all ranks over the compute that was planned, the median over mini-batches.

    Idle is what a rank was not in a task between the first task's start and the last one's end, so that a
    delay that lasts longer than planned counts as compute, not as idle.
    """
    # Rank-microseconds. Two ranks, 100 us from first start to last end, busy for 90 and 60: idle
    # is 50. Over 140 planned (the delays overran by 10 in all) that is 0.36: what the pipeline
    # costs a useful microsecond.
    idle = []
    for timeline in timelines:
        busy = timeline.busy_us()
        tasks = task_events([timeline])
        span = max(e.end_us for e in tasks) - min(e.start_us for e in tasks)
        idle.append(len(busy) * span - sum(busy.values()))
    return statistics.median(idle) / sum(planned_task_us(plan, e) for e in task_events(timelines[:1]))


def task_events(timelines: Iterable[Timeline]) -> list[Event]:
    """Return the tasks that ran in some timelines."""
    return [event for timeline in timelines for event in timeline.events if event.task is not None]


def planned_task_us(plan: PipelinePlan, event: Event) -> float:
    """Return the time that a plan gives a task."""
    assert event.task is not None, "only tasks have planned times"
    return stage_task_us(plan.stages[event.stage], event.task.kind, event.half)


# Limits of time in s: 16 ranks may take 180 + 160 s to start, and a mini-batch ten times what was planned.
START_TIMEOUT_S = 180.0
START_S_PER_RANK = 10.0
"""Time for processes to start: they import torch side by side on however few cores there are."""
SLOWNESS = 10.0
"""How many times slower than planned a rehearsal may be before it is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What came out.

    Args:
        plan: with the times that were rehearsed; ``timelines`` name the user's plan.
        timelines: of the measured mini-batches, source ``rehearsed``.
        num_windows: mini-batches that ``plan`` and each timeline have as one: several of an asynchronous plan, from an
            empty pipeline to an empty one.
        delays_us: simulated iteration with the plan's own (scaled) times and messages that take none.
        cost: what the plan, unscaled, says of its step; None where it says nothing.
        predicted_us: simulated iteration from the measured task times and message delays.
    """

    plan: PipelinePlan
    settings: RehearsalSettings
    timelines: tuple[Timeline, ...]
    times: MeasuredTimes
    delays_us: float
    predicted_us: float
    num_windows: int = 1
    cost: StepCost | None = None

    @property
    def steady_us(self) -> tuple[float, float]:
        """Return what a mini-batch of an asynchronous plan took while the pipeline was full, and its delays alone."""
        one = dataclasses.replace(self.plan, mini_batch=self.plan.mini_batch // self.num_windows)
        measured = statistics.median(measured_steady_us(one, timeline) for timeline in self.timelines)
        return measured, simulate_windows(one).steady_us

    @property
    def iteration_us(self) -> float:
        """Return the median time of a mini-batch."""
        return statistics.median(timeline.iteration_us for timeline in self.timelines)

    @property
    def median_timeline(self) -> Timeline:
        """Return the timeline of the mini-batch of median length (the shorter of two)."""
        ordered = sorted(self.timelines, key=lambda timeline: timeline.iteration_us)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def difference(self) -> float:
        """Return by which fraction the simulation from measured times differs from the measured median."""
        return self.predicted_us / self.iteration_us - 1.0


def rehearse_plan(
    plan: PipelinePlan, settings: RehearsalSettings, *, tell: Callable[[str], None] = lambda text: None
) -> Rehearsal:
    """Run ``plan`` on processes of this machine with delays in place of compute.

    Args:
        tell: called with each line of progress.

    Raises:
        PlanError: the plan does not hold what a rehearsal needs.
        ConfigError: its messages do not fit this machine.
        ScheduleError: its programs are unsafe.
        RuntimeFailure: a rank failed or took too long.
    """
    # What can be refused is refused before a process starts, the cheap checks first: ranks and
    # tensors, then memory, then the proof of the programs. Times are scaled before that proof, which
    # orders messages by them.
    #
    #   plan --scale_time--> scaled --windows--> rehearsed         (mode async: many windows as one)
    #                          |                    '-- simulated, measured, reported
    #                          '-- saved and run by the ranks, which lower it again to the same programs
    check_rehearsable(plan)
    check_memory(plan, settings, free_memory_bytes())
    scaled = scale_times(plan, settings.scale_time)
    rehearsed = scaled
    if scaled.mode == "async":
        make_async_programs(scaled)
        rehearsed = lengthened(scaled, num_windows(windows_of(scaled)))
        delays_us = predict_drained_us(rehearsed)
    else:
        programs_of_plan(scaled)
        delays_us = predict_iteration_us(scaled)
    if settings.comm_timeout_s is None:  # several planned mini-batches
        timeout_s = max(LEAST_COMM_TIMEOUT_S, SLOWNESS * delays_us / 1e6)
        settings = dataclasses.replace(settings, comm_timeout_s=timeout_s)
    with tempfile.TemporaryDirectory(prefix="gpp_rehearse_") as name:
        folder = Path(name)
        save(scaled, folder / "plan.json")
        _run(folder, scaled, settings, delays_us, tell)
        recorded = [load(Timeline, folder / f"timeline{i}.json") for i in range(settings.steps)]
    # Ranks name the scaled plan; a reader looks for the one on disk.
    timelines = tuple(dataclasses.replace(timeline, plan=fingerprint(plan)) for timeline in recorded)
    times = measure_times(rehearsed, timelines)
    return Rehearsal(
        plan=rehearsed,
        num_windows=rehearsed.mini_batch // scaled.mini_batch,
        settings=settings,
        timelines=timelines,
        times=times,
        delays_us=delays_us,
        cost=plan.cost,
        predicted_us=predict_from(rehearsed, timelines),
    )


def _run(
    folder: Path,
    plan: PipelinePlan,
    settings: RehearsalSettings,
    delays_us: float,
    tell: Callable[[str], None],
) -> None:
    count, seconds = settings.steps + 1, delays_us / 1e6
    tell(f"starting {plan.num_ranks} ranks; {count} mini-batches of about {seconds:.2f} s follow")
    start = time.perf_counter()
    events = run_ranks(
        "gpp_plugin.rehearse.rehearsal_rank",
        [str(folder / "plan.json"), json.dumps(dataclasses.asdict(settings)), str(folder)],
        num_ranks=plan.num_ranks,
        timeout_s=START_TIMEOUT_S + START_S_PER_RANK * plan.num_ranks + SLOWNESS * seconds * count,
    )
    for event in events:
        if event["event"] == "ready":
            tell(f"the ranks are up after {time.perf_counter() - start:.1f} s")
        else:
            number = event["step"] + 1
            tell(f"mini-batch {number} of {settings.steps}: {event['iteration_us'] / 1e3:.1f} ms")
