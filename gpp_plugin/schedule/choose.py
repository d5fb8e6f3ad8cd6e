"""Picks the schedule of a plan by simulation: what ``schedule: "auto"`` means.

Candidates are the same for all stages: 1F1B, kFkB, GPipe, greedy, and 1F1B with a longer warm-up, which
hides messages behind computation where links are slow (Table 2 assumes that they take no time).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.schedule.in_flight import plan_in_flight
from gpp_plugin.schedule.stage_order import stages_behind
from gpp_plugin.simulate.durations import Durations
from gpp_plugin.simulate.engine import predict_iteration_us

logger = logging.getLogger(__name__)

GAIN = 1e-3
"""A schedule that is not the first candidate must be faster by this fraction, or hold less in the same time."""

GREEDY_TASKS = 4096
"""Most tasks of all stages for which the greedy schedule is tried: it simulates the plan once a task."""


def choose_schedule(
    plan: PipelinePlan,
    *,
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    most_in_flight: Sequence[int] | None = None,
    forward_only_stages: frozenset[int] = frozenset(),
    reduce_us: Mapping[int, float] | None = None,
) -> PipelinePlan:
    """Return ``plan`` with the schedule, k and in-flight counts of the shortest predicted iteration.

    Args:
        cluster, durations, forward_only_stages, reduce_us: as for `simulate_plan`.
        most_in_flight: for each stage, the most micro-batches its memory holds; None is no limit.

    Raises:
        PlanError: no candidate fits ``most_in_flight``; the text says what the least one needs.
    """
    best: tuple[float, float, PipelinePlan, str] | None = None
    refused = []
    for name, candidate in candidate_schedules(plan):
        counts = [stage.in_flight for stage in candidate.stages]
        if most_in_flight is not None and any(c > m for c, m in zip(counts, most_in_flight, strict=True)):
            refused.append(f"{name} {counts}")
            continue
        try:
            time = predict_iteration_us(
                candidate,
                cluster=cluster,
                durations=durations,
                forward_only_stages=forward_only_stages,
                reduce_us=reduce_us,
            )
        except ScheduleError:
            continue  # a longer warm-up of one stage can ask more of another than that one holds
        held = sum(s.in_flight * s.micro_batch_size for s in candidate.stages)
        logger.debug("schedule %s: %.1f us, %d samples in flight", name, time, held)
        if best is None or time < best[0] * (1.0 - GAIN) or (time <= best[0] and held < best[1]):
            best = (time, held, candidate, name)
    if best is None:
        limits = list(most_in_flight or ())
        raise PlanError(
            f"no schedule fits {limits} micro-batches in flight; the candidates hold {'; '.join(refused)}; "
            "lower micro_batch_sizes or allow more memory"
        )
    note = f"schedule {best[3]}: {best[0]:.0f} us predicted"
    return dataclasses.replace(best[2], notes=(*plan.notes, note), iteration_us=best[0])


def candidate_schedules(plan: PipelinePlan) -> Iterator[tuple[str, PipelinePlan]]:
    """Yield (name, plan under that schedule), 1F1B first."""
    base = _under(plan, "1f1b", 1)
    yield "1f1b", base
    for longer in (1.5, 2.0):
        yield f"1f1b with {longer:g} times the warm-up", _with_longer_warm_up(base, longer)
    for k in (2, 4):
        if any(plan.num_micro_batches(i) > k for i in range(len(plan.stages))):
            yield f"{k}f{k}b", _under(plan, "1f1b", k)
    if sum(2 * plan.num_micro_batches(i) * s.degree for i, s in enumerate(plan.stages)) <= GREEDY_TASKS:
        yield "greedy", _under(plan, "greedy", 1)
    yield "gpipe", _under(plan, "gpipe", 1)


def _under(plan: PipelinePlan, schedule: str, k: int) -> PipelinePlan:
    """Return the plan with one schedule on all stages and its in-flight counts."""
    stages = tuple(dataclasses.replace(stage, schedule=schedule, k=k) for stage in plan.stages)
    changed = dataclasses.replace(plan, stages=stages)
    return _with_counts(changed, plan_in_flight(changed))


def _with_counts(plan: PipelinePlan, counts: Sequence[int]) -> PipelinePlan:
    stages = (dataclasses.replace(s, in_flight=count) for s, count in zip(plan.stages, counts, strict=True))
    return dataclasses.replace(plan, stages=tuple(stages))


def _with_longer_warm_up(plan: PipelinePlan, factor: float) -> PipelinePlan:
    """Return the plan with in-flight counts scaled on all stages but sinks, which nothing waits behind."""
    behind = stages_behind(plan)
    counts = [
        min(math.ceil(stage.in_flight * factor), plan.num_micro_batches(i)) if behind[i] else stage.in_flight
        for i, stage in enumerate(plan.stages)
    ]
    return _with_counts(plan, counts)
