"""The rows of `gpp bench schedule` that compare task orders: sliced warm-ups, and split backwards."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan, with_in_flight
from gpp_plugin.compare.alternated_benchmarks import AlternatedBenchmark, Outcome
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.plan.choose_schedule import choose_slicing
from gpp_plugin.rehearse.rehearsal import idle_over_planned
from gpp_plugin.schedule.orders.slicer import slice_warm_up
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan
from gpp_plugin.simulate.timeline_metrics import peak_in_flight, start_up_us

SLICED_RANKS = (2, 4, 8)
DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4))
DIAMOND_MICRO_BATCHES = (8, 16)

Race = Callable[..., dict[str, Outcome]]
"""`run_alternated` with its rounds and priority."""


def slicing_rows(race: Race, **times: Any) -> list[dict[str, Any]]:
    """Return one row a chain and variant: unsliced, halves sent singly, the last send joined.

    ``is_auto`` marks the variant that ``slicing: "auto"`` takes.
    """
    rows = []
    for num_ranks in SLICED_RANKS:
        whole = emulated_plan("chain", chain_links(num_ranks), num_micro_batches=2 * num_ranks, **times)
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


def zero_bubble_rows(race: Race, **times: Any) -> list[dict[str, Any]]:
    """Return one row a schedule and number of micro-batches on a five-stage diamond, at equal in-flight counts."""
    rows = []
    for num_micro_batches in DIAMOND_MICRO_BATCHES:
        base = emulated_plan("diamond", DIAMOND, num_micro_batches=num_micro_batches, **times)
        split = base.with_each(schedule=["zero_bubble"] * len(base.stages))
        variants = {"1f1b": base, "zero_bubble": split}
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
    contest = AlternatedBenchmark(name=name, plans=variants, has_timelines=True)
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


# The rows of `gpp bench schedule` about ranks that hold several stages: interleaved chains, a colocated tower.

RANKS = 8
MICRO_BATCHES = 16
STAGES_A_RANK = (1, 2, 4)
TOWER_SHARE = 0.25
"""Of the work: what the vision tower takes of it."""
TOWER_RANKS = 2
"""Its share of the ranks, where it has ranks of its own."""
SAMPLES = 2
"""Of a micro-batch of the language model."""


def interleaved_rows(race: Race, **times: Any) -> list[dict[str, Any]]:
    """Return one row for each number of stages a rank: one model in chains of 8, 16 and 32 stages on eight ranks.

    ``over_ideal`` is the time over that of ranks that are never idle.
    """
    plans = {f"{count} a rank": interleaved_chain(count, **times) for count in STAGES_A_RANK}
    ideal_us = MICRO_BATCHES * sum(times.values())
    found = _race("interleaved chain", plans, race)
    return [
        {**_row("interleaved chain", name, plan, found[name], ideal_us), "stages_a_rank": count}
        for count, (name, plan) in zip(STAGES_A_RANK, plans.items(), strict=True)
    ]


def interleaved_chain(stages_a_rank: int, *, forward_us: float, backward_us: float) -> PipelinePlan:
    """Return a chain on eight ranks, stage i on rank i modulo 8.

    Args:
        forward_us, backward_us: of all stages of a rank: each takes its part, so that the host's time is as much larger
            a share of a task as it is where a model is cut into more stages.
    """
    plan = emulated_plan(
        "interleaved chain",
        chain_links(RANKS * stages_a_rank),
        num_micro_batches=MICRO_BATCHES,
        forward_us=forward_us / stages_a_rank,
        backward_us=backward_us / stages_a_rank,
    )
    return _placed(plan, [(index % RANKS,) for index in range(len(plan.stages))])


def colocated_rows(race: Race, **times: Any) -> list[dict[str, Any]]:
    """Return two rows: a vision tower on ranks of its own, and on all ranks of the language model that it feeds.

    The tower is a quarter of the work, and data-parallel either way; ``gain`` is over ranks of its own.
    """
    plans = tower_plans(**times)
    ideal_us = MICRO_BATCHES * sum(times.values())
    found = _race("vision tower", plans, race)
    rows = [_row("vision tower", name, plan, found[name], ideal_us) for name, plan in plans.items()]
    usual = rows[0]
    return [
        {
            **row,
            "gain": usual["iteration_ms"] / row["iteration_ms"],
            "simulated_gain": usual["simulated_ms"] / row["simulated_ms"],
        }
        for row in rows
    ]


def tower_plans(*, forward_us: float, backward_us: float) -> dict[str, PipelinePlan]:
    """Return a tower and a chain of language stages on eight ranks: disjoint, and the tower on all of the chain's.

    Args:
        forward_us, backward_us: of a micro-batch, the work of an eighth of the model.
    """
    # Of 8 eighths the tower is 2. Disjoint: on two ranks, a sample each, and the chain is six stages. Colocated: eight
    # chain stages of 6/8 of an eighth, and each rank takes a sample of four micro-batches at a time through the tower.
    apart = RANKS - TOWER_RANKS
    disjoint = _tower(apart, TOWER_RANKS, 1.0, forward_us=forward_us, backward_us=backward_us)
    ranks = [tuple(range(TOWER_RANKS)), *((rank,) for rank in range(TOWER_RANKS, RANKS))]
    colocated = _tower(RANKS, RANKS, 1.0 - TOWER_SHARE, forward_us=forward_us, backward_us=backward_us)
    everywhere = [tuple(range(RANKS)), *((rank,) for rank in range(RANKS))]
    return {"disjoint": _placed(disjoint, ranks), "colocated": _placed(colocated, everywhere)}


def _tower(
    language_stages: int, degree: int, share: float, *, forward_us: float, backward_us: float
) -> PipelinePlan:
    """Return a tower, a sample a rank at a time, that feeds a chain whose stages take ``share`` of the times."""
    of_a_sample = TOWER_SHARE * RANKS / SAMPLES  # of the whole tower's eighths
    return emulated_plan(
        "vision tower",
        chain_links(1 + language_stages),
        num_micro_batches=MICRO_BATCHES,
        forward_us=[forward_us * of_a_sample] + [forward_us * share] * language_stages,
        backward_us=[backward_us * of_a_sample] + [backward_us * share] * language_stages,
        degrees={0: degree},
        sizes={0: degree},
        samples=SAMPLES,
    )


def _placed(plan: PipelinePlan, ranks: Sequence[tuple[int, ...]]) -> PipelinePlan:
    """Return the plan with its stages on these ranks, and the in-flight counts that this asks for."""
    return with_in_flight(plan.with_each(ranks=ranks))


def _race(name: str, plans: Mapping[str, PipelinePlan], race: Race) -> dict[str, list[float]]:
    seconds = sum(predict_iteration_us(plan) for plan in plans.values()) / 1e6
    outcomes = race([AlternatedBenchmark(name=name, plans=dict(plans))], num_ranks=RANKS, seconds=seconds)
    return outcomes[name].times_ms


def _row(
    graph: str, variant: str, plan: PipelinePlan, times_ms: Sequence[float], ideal_us: float
) -> dict[str, Any]:
    measured, simulated = statistics.median(times_ms), predict_iteration_us(plan) / 1e3
    return {
        "graph": graph,
        "runtime": "gpp",
        "variant": variant,
        "ranks": plan.num_ranks,
        "stages": len(plan.stages),
        "micro_batches": MICRO_BATCHES,
        "iteration_ms": measured,
        "fastest_ms": min(times_ms),
        "simulated_ms": simulated,
        "over_simulated": measured / simulated,
        "over_ideal": measured * 1e3 / ideal_us,
        "simulated_over_ideal": simulated * 1e3 / ideal_us,
        "in_flight": [stage.in_flight for stage in plan.stages],
    }
