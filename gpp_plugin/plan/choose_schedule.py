"""Picks the schedule of a plan by simulation: what ``schedule: "auto"`` and ``slicing: "auto"`` mean.

Candidates are the same for all stages: 1F1B, kFkB, GPipe, greedy, and 1F1B with a longer warm-up, which
hides messages behind computation where links are slow (Table 2 assumes that they take no time). Zero bubble
is tried only where the caller asks for it: with 1F1B's in-flight counts, and with the first stage's on every
stage where memory allows. The warm-up of the best candidate is then sliced, if that is shorter.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.extensions import SCHEDULES
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.build import build_schedules, with_slices
from gpp_plugin.schedule.durations import Durations
from gpp_plugin.schedule.orders.in_flight import plan_in_flight
from gpp_plugin.schedule.orders.slicer import slice_warm_up, unsliced
from gpp_plugin.schedule.orders.stage_order import stages_behind
from gpp_plugin.simulate.predict import predict_iteration_us

logger = logging.getLogger(__name__)

USUAL_SCHEDULES = ("1f1b", "gpipe", "greedy")
"""What ``schedule: "auto"`` tries; ``zero_bubble`` must be asked for."""

GAIN = 0.01
"""A later candidate must be faster by this fraction, or hold less in the same time: a simulation is not more exact."""

SPLIT_GAIN = 0.02
"""What zero bubble must gain where the user did not ask for it: what splitting costs is known to a few percent."""

GREEDY_TASKS = 2048
"""Most tasks of all stages for which the greedy schedule is tried: it simulates the plan once a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """Predicts candidates, all in the same surroundings."""

    cluster: Cluster | None
    durations: Durations | None
    forward_only_stages: frozenset[int]
    reduce_us: Mapping[int, float] | None

    def predict_us(self, plan: PipelinePlan, schedules: Sequence[StageSchedule] | None = None) -> float:
        """Return the predicted time of one mini-batch.

        Raises:
            ScheduleError: the plan cannot run.
        """
        return predict_iteration_us(
            plan,
            cluster=self.cluster,
            durations=self.durations,
            schedules=schedules,
            forward_only_stages=self.forward_only_stages,
            reduce_us=self.reduce_us,
        )


def choose_schedule(
    plan: PipelinePlan,
    *,
    schedules: Collection[str] = USUAL_SCHEDULES,
    slicing: str | int = "off",
    whole_stages: Collection[int] = (),
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    most_in_flight: Sequence[int] | None = None,
    forward_only_stages: frozenset[int] = frozenset(),
    reduce_us: Mapping[int, float] | None = None,
) -> PipelinePlan:
    """Return ``plan`` with the schedule, k, in-flight counts and slices of the shortest predicted iteration.

    This is the entry for an engine: the result runs as it is (`build_schedules`, `lower_schedules`).

    Args:
        schedules: names of `Stage.schedule` that may be chosen; ``1f1b`` stands for kFkB too. What a split
            backward costs is in the plan (`with_split_costs`) or in ``durations``.
        slicing: as for `choose_slicing`, which has the last word on the best schedule.
        whole_stages: stages whose forwards must not run in halves (those with coupled blocks).
        most_in_flight: for each stage, the most micro-batches its memory holds; None is no limit.
        cluster, durations, forward_only_stages, reduce_us: as for `simulate_plan`.

    Raises:
        PlanError: no candidate fits ``most_in_flight``; the text says what the least one needs.
        ValueError: a schedule or ``slicing`` is unknown.
    """
    # Slices come last, on the winner alone: they change no in-flight count, and each one tried is a simulation more.
    judge = _Judge(
        cluster=cluster, durations=durations, forward_only_stages=forward_only_stages, reduce_us=reduce_us
    )
    candidates = candidate_schedules(unsliced(plan), schedules, most_in_flight=most_in_flight)
    name, chosen, time = _shortest(candidates, judge, most_in_flight)
    chosen, time, slices = _choose_slicing(chosen, time, slicing, whole_stages, judge)
    note = f"schedule {name}{slices}: {time:.0f} us predicted"
    return dataclasses.replace(chosen, notes=(*plan.notes, note), iteration_us=time)


def _shortest(
    candidates: Iterable[tuple[str, PipelinePlan]], judge: _Judge, most_in_flight: Sequence[int] | None
) -> tuple[str, PipelinePlan, float]:
    """Return the best of some (name, plan), and its predicted time.

    Raises:
        PlanError: none fits ``most_in_flight``.
    """
    # 1F1B comes first, and each candidate must beat the best one so far by `GAIN`, or hold less in no more time. So
    # with
    #
    #     1f1b 100.0 us, 12 samples     2f2b 99.5, 20     gpipe 99.5, 32     greedy 100.0, 9
    #
    # 2F2B and GPipe are no faster than the simulation is exact, greedy takes as long and holds less, and is chosen.
    best: tuple[float, float, PipelinePlan, str] | None = None
    refused = []
    for name, candidate in candidates:
        counts = [stage.in_flight for stage in candidate.stages]
        if most_in_flight is not None and any(c > m for c, m in zip(counts, most_in_flight, strict=True)):
            refused.append(f"{name} {counts}")
            continue
        try:
            time = judge.predict_us(candidate)
        except ScheduleError as error:
            # A longer warm-up of one stage can ask more of another than that one holds.
            logger.debug("schedule %s: %s", name, error)
            continue
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
    time, _, chosen, name = best
    return name, chosen, time


def choose_slicing(
    plan: PipelinePlan,
    *,
    slicing: str | int = "auto",
    whole_stages: Collection[int] = (),
    cluster: Cluster | None = None,
    durations: Durations | None = None,
    forward_only_stages: frozenset[int] = frozenset(),
    reduce_us: Mapping[int, float] | None = None,
) -> PipelinePlan:
    """Return ``plan``, its schedules as they are, with `Stage.num_sliced` of the shortest predicted iteration.

    Args:
        slicing: ``auto`` takes halves sent singly, halves joined in the last send of each warm-up, or none,
            whichever is shortest; ``on`` one of the first two; a number slices so many micro-batches;
            ``off`` slices nothing.
        whole_stages: stages whose forwards must not run in halves (those with coupled blocks).
        cluster, durations, forward_only_stages, reduce_us: as for `simulate_plan`.

    Raises:
        ScheduleError: the plan cannot run.
        ValueError: ``slicing`` is unknown.
    """
    judge = _Judge(
        cluster=cluster, durations=durations, forward_only_stages=forward_only_stages, reduce_us=reduce_us
    )
    plan = unsliced(plan)
    chosen, time, slices = _choose_slicing(plan, judge.predict_us(plan), slicing, whole_stages, judge)
    notes = (*plan.notes, f"warm-up{slices}: {time:.0f} us predicted") if slices else plan.notes
    return dataclasses.replace(chosen, notes=notes, iteration_us=time)


def _choose_slicing(
    plan: PipelinePlan, unsliced_us: float, slicing: str | int, whole_stages: Collection[int], judge: _Judge
) -> tuple[PipelinePlan, float, str]:
    """Return the plan to run, its time, and what to tell of its slices."""
    is_count = isinstance(slicing, int) and not isinstance(slicing, bool) and slicing >= 0
    if slicing not in ("auto", "on", "off") and not is_count:
        raise ValueError(f"slicing is {slicing!r}; give auto, on, off or a number of micro-batches")
    if slicing in ("off", 0):
        return plan, unsliced_us, ""
    variants = []
    schedules = build_schedules(plan, forward_only_stages=judge.forward_only_stages)
    for joins_last, how in ((False, "halves sent singly"), (True, "last send joined")):
        sliced = slice_warm_up(
            plan,
            num_sliced=slicing if isinstance(slicing, int) else None,
            joins_last=joins_last,
            whole_stages=whole_stages,
            cluster=judge.cluster,
        )
        if any(stage.num_sliced for stage in sliced.stages):
            variants.append((judge.predict_us(sliced, with_slices(sliced, schedules)), sliced, how))
    if not variants:
        why = "the longest warm-up has two stages or fewer, or none that can be halved"
        return plan, unsliced_us, "" if slicing == "auto" else f", nothing sliced ({why})"
    # Fewer messages win where both take the same time.
    time, chosen, how = min(reversed(variants), key=lambda v: v[0])
    if slicing == "auto" and time >= unsliced_us * (1.0 - GAIN):
        return plan, unsliced_us, ""
    return chosen, time, f", {max(s.num_sliced for s in chosen.stages)} sliced ({how})"


def candidate_schedules(
    plan: PipelinePlan,
    schedules: Collection[str] = USUAL_SCHEDULES,
    *,
    most_in_flight: Sequence[int] | None = None,
) -> Iterator[tuple[str, PipelinePlan]]:
    """Yield (name, plan under that schedule), 1F1B first.

    Args:
        schedules: the names allowed.
        most_in_flight: what zero bubble may use of; the other candidates take what they need.

    Raises:
        ValueError: a name is unknown.
    """
    known = SCHEDULES.names()
    unknown = sorted(set(schedules) - set(known))
    if unknown or not schedules:
        raise ValueError(f"schedules {unknown} are not among {known}; give at least one of these")
    # Why a longer warm-up is one: 1F1B on two stages, a message as long as a task. With 2 and 1 in flight stage 0
    # waits for the way there and back each time, with 3 and 1 it does not:
    #
    #     2   F0 F1 .  .  .  B0 F2 B1 F3 .  .  B2 ...        3   F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 ...
    if "1f1b" in schedules:
        base = _under(plan, "1f1b", 1)
        yield "1f1b", base
        for longer in (1.5, 2.0):
            yield f"1f1b with {longer:g} times the warm-up", _with_longer_warm_up(base, longer)
        for k in (2, 4):
            if any(plan.num_micro_batches(i) > k for i in range(len(plan.stages))):
                yield f"{k}f{k}b", _under(plan, "1f1b", k)
    num_tasks = sum(2 * plan.num_micro_batches(i) * s.degree for i, s in enumerate(plan.stages))
    if "greedy" in schedules and (num_tasks <= GREEDY_TASKS or len(schedules) == 1):
        yield "greedy", _under(plan, "greedy", 1)
    if "gpipe" in schedules:
        yield "gpipe", _under(plan, "gpipe", 1)
    if "zero_bubble" in schedules:
        split = _under(plan, "zero_bubble", 1)
        yield "zero_bubble", split
        yield "zero_bubble with the most in flight on every stage", _with_even_limits(split, most_in_flight)
    for name in known:
        if name in schedules and name not in SCHEDULES.built_in:
            yield name, _under(plan, name, 1)


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


def _with_even_limits(plan: PipelinePlan, most_in_flight: Sequence[int] | None) -> PipelinePlan:
    """Return the plan with as many samples in flight on every stage as on the one that holds most, memory allowing."""
    samples = max(stage.in_flight * stage.micro_batch_size for stage in plan.stages)
    counts = []
    for index, stage in enumerate(plan.stages):
        most = plan.num_micro_batches(index)
        if most_in_flight is not None:
            most = min(most, most_in_flight[index])
        counts.append(max(stage.in_flight, min(samples // stage.micro_batch_size, most)))
    return _with_counts(plan, counts)
