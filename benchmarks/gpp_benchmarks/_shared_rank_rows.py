"""The rows of `gpp bench schedule` about ranks that hold several stages: interleaved chains, a colocated tower."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan, with_in_flight
from gpp_benchmarks._schedule_orders import Race
from gpp_plugin.compare.alternated_benchmarks import Contest
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.simulate.predict import predict_iteration_us

RANKS = 8
MICRO_BATCHES = 16
STAGES_A_RANK = (1, 2, 4)
TOWER_SHARE = 0.25
"""Of the work: what the vision tower takes of it."""
TOWER_RANKS = 2
"""Its share of the ranks, where it has ranks of its own."""
SAMPLES = 2
"""Of a micro-batch of the language model."""


def interleaved_rows(*, forward_us: float, backward_us: float, race: Race) -> list[dict[str, Any]]:
    """Return one row for each number of stages a rank: one model in chains of 8, 16 and 32 stages on eight ranks.

    ``over_ideal`` is the time over that of ranks that are never idle.
    """
    plans = {
        f"{count} a rank": interleaved_chain(count, forward_us=forward_us, backward_us=backward_us)
        for count in STAGES_A_RANK
    }
    ideal_us = MICRO_BATCHES * (forward_us + backward_us)
    times = _race("interleaved chain", plans, race)
    return [
        {**_row("interleaved chain", name, plan, times[name], ideal_us), "stages_a_rank": count}
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


def colocated_rows(*, forward_us: float, backward_us: float, race: Race) -> list[dict[str, Any]]:
    """Return two rows: a vision tower on ranks of its own, and on all ranks of the language model that it feeds.

    The tower is a quarter of the work, and data-parallel either way; ``gain`` is over ranks of its own.
    """
    plans = tower_plans(forward_us=forward_us, backward_us=backward_us)
    ideal_us = MICRO_BATCHES * (forward_us + backward_us)
    times = _race("vision tower", plans, race)
    rows = [_row("vision tower", name, plan, times[name], ideal_us) for name, plan in plans.items()]
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
    stages = tuple(dataclasses.replace(s, ranks=r) for s, r in zip(plan.stages, ranks, strict=True))
    return with_in_flight(dataclasses.replace(plan, stages=stages))


def _race(name: str, plans: Mapping[str, PipelinePlan], race: Race) -> dict[str, list[float]]:
    seconds = sum(predict_iteration_us(plan) for plan in plans.values()) / 1e6
    outcomes = race([Contest(name=name, plans=dict(plans))], num_ranks=RANKS, seconds=seconds)
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
