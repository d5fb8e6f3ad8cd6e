"""`gpp rehearse`: runs a plan's processes and messages on this machine with delays in place of compute."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

from gpp_plugin.api import rehearse, save
from gpp_plugin.commands.command_parser import add_width, axis_of
from gpp_plugin.config.key_names import CommandNames, use_names
from gpp_plugin.ir.serialize import output_path
from gpp_plugin.ir.timeline import EventKind, Timeline
from gpp_plugin.rehearse.rehearsal import (
    Rehearsal,
    idle_over_planned,
    load_rehearsable,
    planned_task_us,
    task_events,
)
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.report.plan_text import cost_cluster
from gpp_plugin.report.timeline_chart import format_timeline
from gpp_plugin.report.units import fill_text, format_ms, format_table
from gpp_plugin.simulate.timeline_metrics import peak_in_flight

LARGEST_HOST_SHARE = 0.03
"""Of a task's time: with more between two tasks, a rehearsal shows the machine and not the schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp rehearse`."""
    parser.add_argument("plan", type=Path, help="a plan, as gpp plan --out writes it")
    parser.add_argument("--steps", type=int, default=5, help="mini-batches to measure (%(default)s)")
    parser.add_argument(
        "--scale-time", type=float, default=1.0, metavar="X", help="multiply every duration (%(default)s)"
    )
    parser.add_argument(
        "--scale-bytes",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the size of messages and of reduced gradients (%(default)s)",
    )
    parser.add_argument(
        "--trace-path",
        type=output_path,
        metavar="OUT",
        help="write the mini-batch of median length as a trace for Perfetto",
    )
    parser.add_argument("--out", type=output_path, help="write its timeline there")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="longest wait for a message, in seconds (by the plan)"
    )
    add_width(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rehearse the plan, and print what was measured beside what the simulator says.

    Raises:
        GppError: an option or the plan is wrong, or a rank failed.
    """
    # The plan is read and checked before torch is loaded: a wrong file is refused at once, not after seconds.
    plan = load_rehearsable(args.plan)
    with use_names(CommandNames(options=(), written={"timeout_s": "--timeout"})):
        # Progress is printed line by line (flush): a rehearsal takes minutes, often into a pipe or a log.
        rehearsal = rehearse(
            plan,
            steps=args.steps,
            scale_time=args.scale_time,
            scale_bytes=args.scale_bytes,
            timeout_s=args.timeout,
            tell=lambda text: print(text, flush=True),
        )
    print(f"\n{format_rehearsal(rehearsal, **axis_of(args))}")
    if args.out is not None:
        save(rehearsal.median_timeline, args.out)
        print(f"timeline written to {args.out}")
    if args.trace_path:
        write_trace(rehearsal.median_timeline, rehearsal.plan, str(args.trace_path), step=0)
        print(f"trace written to {args.trace_path}; open it in Perfetto")
    return {"rows": stage_rows(rehearsal), **rehearsal_figures(rehearsal)}


# What a rehearsal comes to, as text and as rows: times, idle shares, micro-batches held, the simulator's figures.


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
                "measured_in_flight": max(_most_held(timeline, index) for timeline in rehearsal.timelines),
            }
        )
    return rows


def _most_held(timeline: Timeline, stage: int) -> int:
    """Return the most micro-batches that any rank of a stage held of it, whatever else the rank holds."""
    own = tuple(event for event in timeline.events if event.stage == stage)
    return max(peak_in_flight(dataclasses.replace(timeline, events=own)).values(), default=0)


def rehearsal_figures(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the figures of the whole pipeline as JSON types; times in ms where not said otherwise."""
    times = [timeline.iteration_us / 1e3 for timeline in rehearsal.timelines]
    plan, measured = rehearsal.plan, rehearsal.times
    steady = {}
    if rehearsal.plan.mode == "async":
        found_us, delays_us = rehearsal.steady_us
        steady = {"steady_ms": found_us / 1e3, "steady_delays_ms": delays_us / 1e3}
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
        "planned_ms": None if rehearsal.cost is None else rehearsal.cost.step_us / 1e3,
        "delays_ms": rehearsal.delays_us / 1e3,
        "simulated_ms": rehearsal.predicted_us / 1e3,
        "difference": rehearsal.difference,
        "bubble_ratio": statistics.median(t.bubble_ratio() for t in rehearsal.timelines),
        "idle_over_planned": idle_over_planned(rehearsal.plan, rehearsal.timelines),
        # how much longer a delay lasted than planned
        "overshoot_us": statistics.median(
            event.end_us - event.start_us - planned_task_us(plan, event)
            for event in task_events(rehearsal.timelines)
        ),
        "host_us": statistics.median(measured.host_us.values()),
        "message_us": measured.message_us,
        "reduce_ms": {plan.stages[index].name: us / 1e3 for index, us in measured.reduce_us.items()},
    }


def format_rehearsal(rehearsal: Rehearsal, *, width: int = 100, screen: int | None = None) -> str:
    """Return the rehearsal as text: the median mini-batch's picture, a table of stages, the comparison.

    Args:
        width: columns of the picture's time axis.
        screen: columns of everything, instead.
    """
    # Three times of one mini-batch, from ideal to real, each explaining what the one before lacks:
    #
    #   delays      the plan's own task times, messages take none     what is rehearsed; the plan's step has more
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
        *_planned(rehearsal),
        f"delays alone {figures['delays_ms']:.1f} ms, simulated with the plan's times and messages that take none",
        f"simulated {figures['simulated_ms']:.1f} ms with measured times: "
        f"{100 * figures['difference']:+.1f} % of the measured",
        f"bubble {100 * figures['bubble_ratio']:.1f} %; a task lasts {figures['overshoot_us']:.0f} us longer than "
        f"planned, {figures['host_us']:.0f} us pass between two tasks, a message takes "
        f"{figures['message_us']:.0f} us",
    ]
    if "steady_ms" in figures:
        lines.append(
            f"while the pipeline is full a mini-batch takes {figures['steady_ms']:.1f} ms, its delays alone "
            f"{figures['steady_delays_ms']:.1f}"
        )
    if figures["reduce_ms"]:
        reduced = ", ".join(f"{name} {ms:.1f} ms" for name, ms in figures["reduce_ms"].items())
        lines.append(f"gradients are reduced in: {reduced}")
    filled = [fill_text(line, indent="  ") for line in (*lines, *_advice(rehearsal, figures))]
    return "\n".join([picture, "", format_table(header, rows), "", *filled])


def _planned(rehearsal: Rehearsal) -> list[str]:
    """Return what the plan says of its step, which is longer than its delays."""
    cost = rehearsal.cost
    if cost is None:
        return []
    what = "a mini-batch while the pipeline is full" if rehearsal.plan.mode == "async" else "a step"
    factor = rehearsal.settings.scale_time
    unscaled = "" if factor == 1.0 else f", before its times are multiplied by {factor:g}"
    more = "its messages, reductions and optimizer step included"
    return [f"planned {format_ms(cost.step_us)} ms {what} on {cost_cluster(cost)}, {more}{unscaled}"]


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
    if figures["message_us"] > task_us or slowest_reduction_us > rehearsal.delays_us:
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
        for event in task_events(rehearsal.timelines)
        if event.stage == stage and event.kind is kind and event.half is None
    ]
    return statistics.median(found) / 1e3 if found else None
