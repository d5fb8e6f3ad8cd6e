"""Rehearses a plan: checks it, starts a process a rank, and compares the measured times with the simulator."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.launch import run_ranks
from gpp_plugin.rehearse.measured_times import MeasuredTimes, measure_times, predict_from
from gpp_plugin.rehearse.rehearsal_settings import (
    LEAST_COMM_TIMEOUT_S,
    RehearsalSettings,
    check_memory,
    check_rehearsable,
)
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import lengthened
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_prefetch, validate_programs
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
