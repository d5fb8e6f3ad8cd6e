"""Rehearses a plan: checks it, starts a process a rank, and compares the measured times with the simulator."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import ConfigError, GppError, PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec, batch_layout
from gpp_plugin.ir.timeline import Event, EventKind, Timeline
from gpp_plugin.launch import run_ranks
from gpp_plugin.plan.plan_form import check_form, read_plan
from gpp_plugin.rehearse.measured_times import MeasuredTimes, measure_times, predict_from
from gpp_plugin.report.timeline_chart import format_timeline
from gpp_plugin.report.units import fill_text, format_ms, format_table
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import lengthened
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_prefetch, validate_programs
from gpp_plugin.schedule.event_loop import stage_task_us
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.schedule.orders.gpipe import forward_only_stages
from gpp_plugin.schedule.program_sets import ProgramSet, lower_async, lower_prefetch
from gpp_plugin.simulate.predict import (
    measured_steady_us,
    num_windows,
    predict_drained_us,
    predict_iteration_us,
    simulate_windows,
)
from gpp_plugin.simulate.timeline_metrics import peak_in_flight

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
    # (`check_memory`, `run._check_programs`).
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
    rows = spec.num_samples if is_batch else 1
    return TensorSpec(
        name=spec.name,
        dtype=spec.dtype,
        shape=(rows, max(1, round(elements / rows * factor)))
        if is_batch
        else (max(1, round(elements * factor)),),
        num_samples=spec.num_samples,
        layout=batch_layout(0) if is_batch else spec.layout,
        requires_grad=spec.requires_grad,
    )


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
            copies = stage.degree * (stage.tensor if shard_axis is None else 1)
            total += one * copies * (held + 1)  # the one more: its gradients
    reduced = sum(stage.gradient_bytes * len(stage.ranks) for stage in plan.stages if stage.degree > 1)
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
    frozen = forward_only_stages(plan)
    schedules = build_schedules(plan, forward_only_stages=frozen)
    programs = lower_schedules(plan, schedules, forward_only_stages=frozen)
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


def make_prefetch_programs(plan: PipelinePlan, *, validate: bool = True) -> ProgramSet:
    """Return the programs of a plan whose frozen branch is prefetched, as the engine lowers them.

    Raises:
        ScheduleError: they are unsafe.
    """
    programs = lower_prefetch(plan)
    if validate:
        validate_prefetch(plan, programs)
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
    return dataclasses.replace(plan, stages=stages, edges=edges, iteration_us=plan.iteration_us * factor)


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
        planned_us: simulated iteration with the plan's own (scaled) times and messages that take none.
        predicted_us: simulated iteration from the measured task times and message delays.
    """

    plan: PipelinePlan
    settings: RehearsalSettings
    timelines: tuple[Timeline, ...]
    times: MeasuredTimes
    planned_us: float
    predicted_us: float
    num_windows: int = 1

    @property
    def steady_us(self) -> tuple[float, float]:
        """Return what a mini-batch of an asynchronous plan took while the pipeline was full, and its plan's figure."""
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
    rehearsed, planned_us = _check_programs(scaled)
    settings = dataclasses.replace(settings, comm_timeout_s=comm_timeout_s(settings, planned_us))
    with tempfile.TemporaryDirectory(prefix="gpp_rehearse_") as name:
        folder = Path(name)
        save(scaled, folder / "plan.json")
        _run(folder, scaled, settings, planned_us, tell)
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
        planned_us=planned_us,
        predicted_us=predict_from(rehearsed, timelines),
    )


def _check_programs(plan: PipelinePlan) -> tuple[PipelinePlan, float]:
    """Return what a rehearsal runs at a time, as one plan, and how long that should take.

    Raises:
        ScheduleError: the plan's programs are unsafe.
    """
    if plan.mode == "async":
        make_async_programs(plan)
        rehearsed = lengthened(plan, num_windows(windows_of(plan)))
        return rehearsed, predict_drained_us(rehearsed)
    programs_of_plan(plan)
    return plan, predict_iteration_us(plan, forward_only_stages=forward_only_stages(plan))


def _run(
    folder: Path,
    plan: PipelinePlan,
    settings: RehearsalSettings,
    planned_us: float,
    tell: Callable[[str], None],
) -> None:
    count, seconds = settings.steps + 1, planned_us / 1e6
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


def comm_timeout_s(settings: RehearsalSettings, planned_us: float) -> float:
    """Return how long a rank waits for a message: as set, or several planned mini-batches."""
    if settings.comm_timeout_s is not None:
        return settings.comm_timeout_s
    return max(LEAST_COMM_TIMEOUT_S, SLOWNESS * planned_us / 1e6)


def free_memory_bytes() -> float:
    """Return the bytes this machine can still give out, counting what it would drop from its file cache."""
    try:
        # MemFree leaves out the page cache, which a freshly loaded machine is full of; MemAvailable (kernel
        # 3.14 on) counts what of it could be dropped.
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# What a rehearsal comes to, as text and as rows: times, idle shares, micro-batches held, the simulator's figures.


LARGEST_HOST_SHARE = 0.03
"""Of a task's time: with more between two tasks, a rehearsal shows the machine and not the schedule."""


def stage_rows(rehearsal: Rehearsal) -> list[dict[str, Any]]:
    """Return one JSON object per stage: planned and measured task times, idle share, micro-batches held."""
    plan = rehearsal.plan
    timeline = rehearsal.median_timeline
    busy = timeline.busy_us()
    rows = []
    for index, stage in enumerate(plan.stages):
        busy_us = statistics.fmean(busy.get(rank, 0.0) for rank in stage.ranks)
        rows.append(
            {
                "stage": stage.name,
                "ranks": list(stage.ranks),
                "micro_batches": plan.num_micro_batches(index),
                "forward_ms": stage.forward_us / 1e3,
                "measured_forward_ms": _median_ms(rehearsal, index, EventKind.FORWARD),
                "backward_ms": stage.backward_us / 1e3,
                "measured_backward_ms": _median_ms(rehearsal, index, EventKind.BACKWARD),
                "idle": 1.0 - busy_us / timeline.iteration_us,
                "in_flight": stage.in_flight,
                "measured_in_flight": max(most_held(timeline, index) for timeline in rehearsal.timelines),
            }
        )
    return rows


def most_held(timeline: Timeline, stage: int) -> int:
    """Return the most micro-batches that any rank of a stage held of it, whatever else the rank holds."""
    own = tuple(event for event in timeline.events if event.stage == stage)
    return max(peak_in_flight(dataclasses.replace(timeline, events=own)).values(), default=0)


def rehearsal_figures(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the figures of the whole pipeline as JSON types; times in ms where not said otherwise."""
    times = [timeline.iteration_us / 1e3 for timeline in rehearsal.timelines]
    plan, measured = rehearsal.plan, rehearsal.times
    steady = {}
    if rehearsal.plan.mode == "async":
        found_us, planned_us = rehearsal.steady_us
        steady = {"steady_ms": found_us / 1e3, "planned_steady_ms": planned_us / 1e3}
    return {
        **steady,
        "plan": rehearsal.median_timeline.plan,
        "num_ranks": rehearsal.plan.num_ranks,
        "steps": rehearsal.settings.steps,
        "scale_time": rehearsal.settings.scale_time,
        "scale_bytes": rehearsal.settings.scale_bytes,
        "iteration_ms": rehearsal.iteration_us / 1e3,
        "fastest_ms": min(times),
        "slowest_ms": max(times),
        "planned_ms": rehearsal.planned_us / 1e3,
        "simulated_ms": rehearsal.predicted_us / 1e3,
        "difference": rehearsal.difference,
        "bubble_ratio": statistics.median(t.bubble_ratio() for t in rehearsal.timelines),
        "idle_over_planned": idle_over_planned(rehearsal.plan, rehearsal.timelines),
        "overshoot_us": overshoot_us(rehearsal.plan, rehearsal.timelines),
        "host_us": statistics.median(measured.host_us.values()),
        "message_us": measured.message_us,
        "reduce_ms": {plan.stages[index].name: us / 1e3 for index, us in measured.reduce_us.items()},
    }


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
        tasks = _task_events([timeline])
        span = max(e.end_us for e in tasks) - min(e.start_us for e in tasks)
        idle.append(len(busy) * span - sum(busy.values()))
    return statistics.median(idle) / sum(_planned_us(plan, e) for e in _task_events(timelines[:1]))


def overshoot_us(plan: PipelinePlan, timelines: Sequence[Timeline]) -> float:
    """Return the median over tasks of how much longer a delay lasted than planned."""
    return statistics.median(
        event.end_us - event.start_us - _planned_us(plan, event) for event in _task_events(timelines)
    )


def format_rehearsal(rehearsal: Rehearsal, *, width: int = 100, screen: int | None = None) -> str:
    """Return the rehearsal as text: the median mini-batch's picture, a table of stages, the comparison.

    Args:
        width: columns of the picture's time axis.
        screen: columns of everything, instead.
    """
    # Three times of one mini-batch, from ideal to real, each explaining what the one before lacks:
    #
    #   planned     the plan's own task times, messages take none     what the planner predicted
    #   simulated   task times and message delays as measured         what the schedule makes of this machine
    #   measured    the processes                                     also what is in neither
    figures = rehearsal_figures(rehearsal)
    header = ["stage", "ranks", "fwd ms", "measured", "bwd ms", "measured", "idle", "in flight", "measured"]
    rows = [
        [
            row["stage"],
            str(len(row["ranks"])),
            format_ms(row["forward_ms"] * 1e3),
            _format_optional(row["measured_forward_ms"]),
            format_ms(row["backward_ms"] * 1e3),
            _format_optional(row["measured_backward_ms"]),
            f"{100 * row['idle']:.0f} %",
            str(row["in_flight"]),
            str(row["measured_in_flight"]),
        ]
        for row in stage_rows(rehearsal)
    ]
    picture = format_timeline(rehearsal.median_timeline, rehearsal.plan, width=width, screen=screen)
    lines = [
        f"measured {figures['iteration_ms']:.1f} ms {_span(rehearsal)}, median of {figures['steps']} "
        f"({figures['fastest_ms']:.1f} to {figures['slowest_ms']:.1f})",
        f"planned {figures['planned_ms']:.1f} ms, simulated with the plan's times and messages that take none",
        f"simulated {figures['simulated_ms']:.1f} ms with measured times: "
        f"{100 * figures['difference']:+.1f} % of the measured",
        f"bubble {100 * figures['bubble_ratio']:.1f} %; a task lasts {figures['overshoot_us']:.0f} us longer than "
        f"planned, {figures['host_us']:.0f} us pass between two tasks, a message takes "
        f"{figures['message_us']:.0f} us",
    ]
    if "steady_ms" in figures:
        lines.append(
            f"while the pipeline is full a mini-batch takes {figures['steady_ms']:.1f} ms, planned "
            f"{figures['planned_steady_ms']:.1f}"
        )
    if figures["reduce_ms"]:
        reduced = ", ".join(f"{name} {ms:.1f} ms" for name, ms in figures["reduce_ms"].items())
        lines.append(f"gradients are reduced in: {reduced}")
    filled = [fill_text(line, indent="  ") for line in (*lines, *_advice(rehearsal, figures))]
    return "\n".join([picture, "", format_table(header, rows), "", *filled])


def _span(rehearsal: Rehearsal) -> str:
    if rehearsal.num_windows == 1:
        return "a mini-batch"
    return f"for {rehearsal.num_windows} mini-batches, from an empty pipeline to an empty one"


def _advice(rehearsal: Rehearsal, figures: dict[str, Any]) -> list[str]:
    """Return what to change where this machine, rather than the schedule, makes the time."""
    task_us = statistics.median(rehearsal.times.task_us.values())
    slowest_reduction_us = max(rehearsal.times.reduce_us.values(), default=0.0)
    # Two ways in which this machine, not the schedule, decides the time; messages first, since scaling time
    # would only hide them. Tasks of 1 ms with 60 us lost behind each are double LARGEST_HOST_SHARE:
    # --scale-time 2 brings it to 3 %.
    if figures["message_us"] > task_us or slowest_reduction_us > rehearsal.planned_us:
        return [
            "messages or reductions take longer than tasks: here they pass through this machine's memory, not over "
            "your links; a smaller --scale-bytes shows the schedule without them"
        ]
    lost_us = figures["host_us"] + figures["overshoot_us"]
    if lost_us > LARGEST_HOST_SHARE * task_us:
        wanted = math.ceil(lost_us / (LARGEST_HOST_SHARE * task_us) * rehearsal.settings.scale_time)
        short = f"tasks are short against this machine's {lost_us:.0f} us between them"
        return [f"{short}; --scale-time {wanted} shows the schedule"]
    return []


def _format_optional(ms: float | None) -> str:
    return "-" if ms is None else format_ms(ms * 1e3)


def _median_ms(rehearsal: Rehearsal, stage: int, kind: EventKind) -> float | None:
    """Return the median time of a stage's whole tasks of a kind; None where it has none."""
    found = [
        event.end_us - event.start_us
        for event in _task_events(rehearsal.timelines)
        if event.stage == stage and event.kind is kind and event.half is None
    ]
    return statistics.median(found) / 1e3 if found else None


def _task_events(timelines: Iterable[Timeline]) -> list[Event]:
    return [event for timeline in timelines for event in timeline.events if event.task is not None]


def _planned_us(plan: PipelinePlan, event: Event) -> float:
    assert event.task is not None, "only tasks have planned times"
    return stage_task_us(plan.stages[event.stage], event.task.kind, event.half)
