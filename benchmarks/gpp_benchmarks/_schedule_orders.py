"""The rows of `gpp bench schedule` that compare task orders: sliced warm-ups, and split backwards."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan
from gpp_plugin.compare.alternated_benchmarks import Contest, Outcome
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.plan.choose_schedule import choose_slicing
from gpp_plugin.rehearse.rehearsal_report import idle_over_planned
from gpp_plugin.schedule.orders.slicer import slice_warm_up
from gpp_plugin.simulate.predict import simulate_plan
from gpp_plugin.simulate.timeline_metrics import peak_in_flight, start_up_us

SLICED_RANKS = (2, 4, 8)
DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
DIAMOND_MICRO_BATCHES = (8, 16)

Race = Callable[..., dict[str, Outcome]]
"""`run_contests` with its rounds and priority."""


def slicing_rows(*, forward_us: float, backward_us: float, race: Race) -> list[dict[str, Any]]:
    """Return one row a chain and variant: unsliced, halves sent singly, the last send joined.

    ``is_auto`` marks the variant that ``slicing: "auto"`` takes.
    """
    rows = []
    for num_ranks in SLICED_RANKS:
        whole = emulated_plan(
            "chain",
            chain_links(num_ranks),
            num_micro_batches=2 * num_ranks,
            forward_us=forward_us,
            backward_us=backward_us,
        )
        variants = {
            "none": whole,
            "singly": slice_warm_up(whole),
            "joined": slice_warm_up(whole, joins_last=True),
        }
        auto = choose_slicing(whole)
        variants = {name: plan for name, plan in variants.items() if name == "none" or _most_sliced(plan) > 0}
        outcome = _run(variants, num_ranks, race)
        for name, plan in variants.items():
            row = _slicing_row(name, plan, outcome.timelines[name], whole, outcome.timelines["none"])
            rows.append({**row, "is_auto": plan.stages == auto.stages})
    return rows


def zero_bubble_rows(*, forward_us: float, backward_us: float, race: Race) -> list[dict[str, Any]]:
    """Return one row a schedule and number of micro-batches on a five-stage diamond, at equal in-flight counts."""
    rows = []
    for num_micro_batches in DIAMOND_MICRO_BATCHES:
        base = emulated_plan(
            "diamond",
            DIAMOND,
            num_micro_batches=num_micro_batches,
            forward_us=forward_us,
            backward_us=backward_us,
        )
        split = tuple(dataclasses.replace(stage, schedule="zero_bubble") for stage in base.stages)
        variants = {"1f1b": base, "zero_bubble": dataclasses.replace(base, stages=split)}
        outcome = _run(variants, base.num_ranks, race)
        usual = idle_over_planned(base, outcome.timelines["1f1b"])
        simulated_usual = idle_over_planned(base, [simulate_plan(base)])
        for name, plan in variants.items():
            timelines = outcome.timelines[name]
            bubble = idle_over_planned(plan, timelines)
            simulated = idle_over_planned(plan, [simulate_plan(plan)])
            rows.append(
                {
                    "graph": plan.model,
                    "runtime": "gpp",
                    "schedule": name,
                    "ranks": plan.num_ranks,
                    "micro_batches": num_micro_batches,
                    "iteration_ms": statistics.median(outcome.times_ms[name]),
                    "bubble": bubble,
                    "saving": 1.0 - bubble / usual,
                    "simulated_bubble": simulated,
                    "simulated_saving": 1.0 - simulated / simulated_usual,
                    "in_flight": [stage.in_flight for stage in plan.stages],
                    "measured_in_flight": _held(timelines),
                }
            )
    return rows


def _run(variants: dict[str, PipelinePlan], num_ranks: int, race: Race) -> Outcome:
    name = f"{next(iter(variants.values())).model} of {num_ranks}"
    seconds = sum(simulate_plan(plan).iteration_us for plan in variants.values()) / 1e6
    contest = Contest(name=name, plans=variants, has_timelines=True)
    return race([contest], num_ranks=num_ranks, seconds=seconds)[name]


def _slicing_row(
    name: str,
    plan: PipelinePlan,
    timelines: Sequence[Timeline],
    whole: PipelinePlan,
    whole_timelines: Sequence[Timeline],
) -> dict[str, Any]:
    simulated, simulated_whole = simulate_plan(plan), simulate_plan(whole)
    start_up = _median_us(start_up_us, timelines)
    iteration = _median_us(lambda timeline: timeline.iteration_us, timelines)
    return {
        "graph": plan.model,
        "runtime": "gpp",
        "slices": name,
        "num_sliced": _most_sliced(plan),
        "ranks": plan.num_ranks,
        "micro_batches": plan.num_micro_batches(0),
        "iteration_ms": iteration / 1e3,
        "iteration_over_unsliced": iteration
        / _median_us(lambda timeline: timeline.iteration_us, whole_timelines),
        "simulated_ms": simulated.iteration_us / 1e3,
        "start_up_ms": start_up / 1e3,
        "start_up_over_unsliced": start_up / _median_us(start_up_us, whole_timelines),
        "simulated_start_up_over_unsliced": start_up_us(simulated) / start_up_us(simulated_whole),
        "in_flight": [stage.in_flight for stage in plan.stages],
        "measured_in_flight": _held(timelines),
    }


def _most_sliced(plan: PipelinePlan) -> int:
    return max(stage.num_sliced for stage in plan.stages)


def _median_us(read: Callable[[Timeline], float], timelines: Sequence[Timeline]) -> float:
    return statistics.median(read(timeline) for timeline in timelines)


def _held(timelines: Sequence[Timeline]) -> list[int]:
    """Return the most micro-batches each rank held in any mini-batch."""
    peaks = [peak_in_flight(timeline) for timeline in timelines]
    return [max(peak[rank] for peak in peaks) for rank in sorted(peaks[0])]
