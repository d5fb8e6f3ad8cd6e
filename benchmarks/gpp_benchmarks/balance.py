"""Units as they come against units in balanced order, packed or not: an epoch of each, on emulated ranks and simulated.

Processes, messages and the executor are real, compute is delays: of a decoder layer by the tokens of a unit, padding
included, of the vision tower by its images; a unit of texts alone takes nothing there. Two epochs are run:

    mix       30 % of samples are texts, 40 % have one image, 30 % two to eight; texts log-normal, 32 to 4,096 tokens
    4 times   texts of 1,024 to 4,096 tokens, one a unit, and no tower

Units are of equal numbers of samples as they come, or packed to a budget of padded tokens; their order in a mini-batch
is the given one or balanced (`graph_pipeline.unit_order`). A row has an epoch's time, simulated and measured, and how
many times longer the epoch takes with units as they come in the given order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpp_benchmarks._emulated_graphs import chain_links, emulated_plan
from gpp_benchmarks._options import add_option, add_real_time
from gpp_plugin.data import pack
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.plan.costs.planned_lengths import MiniBatchTimes, order_units
from gpp_plugin.simulate.predict import predict_iteration_us

IMAGE_TOKENS = 144
"""Of the decoder, for each image."""
TYPICAL_TOKENS, TYPICAL_IMAGES = 6144, 8
"""Of a unit: what the plan's times are for."""
FORWARD_US = 20_000.0
"""Of a typical unit on each stage; a backward takes twice as long."""
DEGREE = 2
"""Ranks of each stage."""

TaskTimes = dict[tuple[int, TaskKind, int, int], float]
Way = tuple[str, str]
"""How units are made, and their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """An epoch's samples.

    Args:
        tokens: of each, those of its images included.
        images: of each.
        a_unit: samples of a unit where they are taken as they come.
        budget: tokens of a packed unit.
        has_tower: the first stage of the plan is a vision tower.
    """

    name: str
    tokens: NDArray[np.int64]
    images: NDArray[np.int64]
    a_unit: int
    budget: int
    has_tower: bool


TABLE = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(parser, "--ranks", 8, "two a stage")
    add_option(parser, "--units", 16, "of a mini-batch")
    add_option(parser, "--mini-batches", 12, "of an epoch as it comes")
    add_option(parser, "--scale-time", 1.0, "multiply 20 ms forwards, 40 ms backwards")
    add_option(parser, "--seed", 0, "of the samples")
    parser.add_argument("--simulate", action="store_true", help="start no processes")
    add_real_time(parser, "mini-batches run")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way to make and order units.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    if args.ranks < 4 or args.ranks % DEGREE or args.units % DEGREE or args.mini_batches < 1:
        raise ConfigError(
            f"--ranks {args.ranks} --units {args.units} --mini-batches {args.mini_batches}: give an even number of at "
            "least 4 ranks, an even number of units, and 1 mini-batch or more"
        )
    if args.scale_time <= 0:
        raise ConfigError(f"--scale-time {args.scale_time:g} must be above 0")
    count = args.units * args.mini_batches
    cases = [_case(args, samples) for samples in (mix(4 * count, args.seed), four_times(count, args.seed))]
    measured = [case.simulated for case in cases] if args.simulate else _measure(args, cases)
    rows = [row for case, found in zip(cases, measured, strict=True) for row in _rows(args, case, found)]
    return {"rows": rows}


# ---- samples and units ---------------------------------------------------------------------------------------


def mix(count: int, seed: int) -> Samples:
    """Return texts of unlike lengths with no, one or several images."""
    generator = np.random.default_rng(seed)
    # 95 of 100 lengths lie between 32 and 4,096, evenly by their logarithms' distance from the middle, 362
    middle, spread = np.log(32 * 4096) / 2, np.log(4096 / 32) / 4
    texts = np.clip(np.exp(generator.normal(middle, spread, count)), 32, 4096).astype(np.int64)
    images = generator.choice([0, 1, 2], size=count, p=[0.3, 0.4, 0.3])
    images = np.where(images == 2, generator.integers(2, 9, count), images)
    return Samples(
        name="mix",
        tokens=texts + IMAGE_TOKENS * images,
        images=images,
        a_unit=4,
        budget=TYPICAL_TOKENS,
        has_tower=True,
    )


def four_times(count: int, seed: int) -> Samples:
    """Return texts of which the longest are four times as long as the shortest."""
    texts = np.random.default_rng(seed).integers(1024, 4097, count)
    return Samples(
        name="4 times", tokens=texts, images=np.zeros_like(texts), a_unit=1, budget=4096, has_tower=False
    )


def unit_lists(samples: Samples, *, units: int, is_packed: bool, seed: int) -> list[list[list[int]]]:
    """Return the samples of each unit, by mini-batch, of one epoch."""
    if is_packed:
        packing = pack(samples.tokens, cost=samples.tokens, budget=samples.budget, units=units, seed=seed)
        found = packing.epoch_units(0)
    else:
        size = samples.a_unit
        found = [list(range(first, first + size)) for first in range(0, len(samples.tokens), size)]
    return [found[first : first + units] for first in range(0, len(found), units)]


def unit_factors(samples: Samples, units: Sequence[Sequence[int]], num_stages: int) -> NDArray[np.float64]:
    """Return what each unit takes over a typical one, [units, stages]: by padded tokens, and by images as they are."""
    tokens = [len(unit) * samples.tokens[list(unit)].max() / TYPICAL_TOKENS for unit in units]
    images = [samples.images[list(unit)].sum() / TYPICAL_IMAGES for unit in units]
    columns = [tokens] * num_stages
    if samples.has_tower:
        columns[0] = images
    return np.array(columns, dtype=np.float64).T


def make_plan(samples: Samples, *, ranks: int, units: int, scale: float) -> PipelinePlan:
    """Return stages in a row, two ranks each, whose samples are units."""
    stages = ranks // DEGREE
    every = range(stages)
    return emulated_plan(
        samples.name,
        chain_links(stages),
        num_micro_batches=units,
        samples=1,
        sizes=dict.fromkeys(every, DEGREE),
        degrees=dict.fromkeys(every, DEGREE),
        forward_us=FORWARD_US * scale,
        backward_us=2 * FORWARD_US * scale,
    )


def task_times(plan: PipelinePlan, factors: NDArray[np.float64], order: Sequence[int]) -> TaskTimes:
    """Return the microseconds of each task where units are at these places."""
    times: TaskTimes = {}
    for index, stage in enumerate(plan.stages):
        for micro_batch in range(plan.num_micro_batches(index)):
            for rank in stage.ranks:
                factor = float(factors[order[stage.samples(micro_batch, rank).first_sample], index])
                times[index, TaskKind.FORWARD, micro_batch, rank] = stage.forward_us * factor
                times[index, TaskKind.BACKWARD, micro_batch, rank] = stage.backward_us * factor
    return times


# ---- rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An epoch in each way to make and order units: the times of tasks, and of mini-batches in ms."""

    plan: PipelinePlan
    epochs: dict[Way, list[TaskTimes]]
    simulated: dict[Way, list[float]]


def _case(args: argparse.Namespace, samples: Samples) -> _Case:
    plan = make_plan(samples, ranks=args.ranks, units=args.units, scale=args.scale_time)
    choose = MiniBatchTimes(plan)
    epochs: dict[Way, list[TaskTimes]] = {}
    for is_packed, units in ((False, "as they come"), (True, "packed")):
        batches = unit_lists(samples, units=args.units, is_packed=is_packed, seed=args.seed)
        factors = [unit_factors(samples, batch, len(plan.stages)) for batch in batches]
        given = range(args.units)
        epochs[units, "given"] = [task_times(plan, each, given) for each in factors]
        epochs[units, "balanced"] = [task_times(plan, each, order_units(choose, each)) for each in factors]
    simulated = {
        way: [predict_iteration_us(plan, durations=times) / 1e3 for times in epoch]
        for way, epoch in epochs.items()
    }
    return _Case(plan=plan, epochs=epochs, simulated=simulated)


def _measure(args: argparse.Namespace, cases: Sequence[_Case]) -> list[dict[Way, list[float]]]:
    """Return the milliseconds of each mini-batch; those of one case's epochs take turns."""
    from gpp_plugin.compare.alternated_benchmarks import AlternatedBenchmark, run_alternated

    contests = [
        AlternatedBenchmark(
            name=case.plan.model,
            plans={", ".join(way): case.plan for way in case.epochs},
            by_round={", ".join(way): epoch for way, epoch in case.epochs.items()},
        )
        for case in cases
    ]
    outcomes = run_alternated(
        contests,
        num_ranks=args.ranks,
        rounds=max(len(epoch) for case in cases for epoch in case.epochs.values()),
        seconds=sum(max(times) for case in cases for times in case.simulated.values()) / 1e3,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
        is_real_time=args.real_time,
    )
    # a shorter epoch began anew: its first mini-batches are the epoch
    return [
        {
            way: outcomes[case.plan.model].times_ms[", ".join(way)][: len(epoch)]
            for way, epoch in case.epochs.items()
        }
        for case in cases
    ]


def _rows(args: argparse.Namespace, case: _Case, measured: dict[Way, list[float]]) -> list[dict[str, Any]]:
    rows = []
    first = next(iter(case.epochs))
    for way, epoch in case.epochs.items():
        found, wanted = sum(measured[way]), sum(case.simulated[way])
        gain, predicted = sum(measured[first]) / found, sum(case.simulated[first]) / wanted
        row = {
            "samples": case.plan.model,
            "ranks": args.ranks,
            "units": way[0],
            "order": way[1],
            "mini_batches": len(epoch),
            "simulated_ms": wanted,
            "simulated_gain": predicted,
        }
        if not args.simulate:
            row |= {"measured_ms": found, "measured_gain": gain, "off": gain / predicted - 1}
        rows.append(row)
    return rows
