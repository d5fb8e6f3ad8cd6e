"""Devices of two speeds by brute force: every partition, and every number of ranks of each kind for each stage.

Times, bytes and steps are the oracles' own (`_oracle_costs`): of a block that nothing is known of but its time a device
of half the speed takes twice; a stage takes what its slowest rank does. Candidates are simulated in the order of
what their busiest stage computes, until that alone takes as long as the best step found.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from gpp_benchmarks._oracle import all_partitions, random_dag, random_request, the_size
from gpp_benchmarks._oracle_costs import fits, least_us, num_micro_batches, oracle_plan, step_us
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.request import PlanRequest

H100_OVER_A100 = 2.6
"""What large products of bf16 reach (`clusters/h100_a100.json`)."""
LARGE_EVERY = 4
"""Every so manieth case is of four and four devices."""


def unlike_request(seed: int) -> PlanRequest:
    """Return a random graph on two to four devices of two speeds, or on four and four as H100 and A100."""
    rng = random.Random(11_000_027 * (seed + 1))
    is_large = seed % LARGE_EVERY == LARGE_EVERY - 1
    quick, slow = (4, 4) if is_large else rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)])
    factor = H100_OVER_A100 if is_large else rng.choice([1.6, 2.6, 3.0])
    blocks = rng.randint(4, 5 if is_large else 6)
    request = random_request(rng, random_dag(rng, blocks), ranks=quick + slow, is_tight=False)
    device = request.cluster.devices[0]
    quicker = dataclasses.replace(device, name="quick", flops_per_s=device.flops_per_s * factor)
    slower = dataclasses.replace(device, name="slow")
    devices = (quicker,) * quick + (slower,) * slow
    if rng.random() < 0.5:
        devices = devices[::-1]
    return dataclasses.replace(request, cluster=dataclasses.replace(request.cluster, devices=devices))


def best_unlike_us(request: PlanRequest) -> float | None:
    """Return the shortest step of all partitions on all placements at the request's one size; None: none fits."""
    bounded = sorted(
        (
            (least_us(plan), number, plan)
            for number, plan in enumerate(_plans(request))
            if fits(plan, request)
        ),
        key=lambda item: item[:2],
    )
    best: float | None = None
    for bound, _, plan in bounded:
        if best is not None and bound >= best:
            break
        us = min(step_us(each, request.cluster) for each in _with_more_in_flight(plan))
        best = us if best is None else min(best, us)
    return best


def _with_more_in_flight(plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """Yield the plan, and the same with up to twice as many micro-batches in flight, which hides messages."""
    yield plan
    most = max(num_micro_batches(plan, stage) for stage in plan.stages)
    for times in (1.5, 2.0):
        stages = tuple(
            stage
            if stage.in_flight == 1
            else dataclasses.replace(stage, in_flight=min(most, math.ceil(stage.in_flight * times)))
            for stage in plan.stages
        )
        held = dataclasses.replace(plan, stages=stages)
        if len(stages) > 1:
            yield held


def _plans(request: PlanRequest) -> Iterator[PipelinePlan]:
    size = the_size(request)
    devices = request.cluster.devices
    kinds = [
        [rank for rank, device in enumerate(devices) if device == kind] for kind in dict.fromkeys(devices)
    ]
    for groups in all_partitions(request.graph, request.num_ranks):
        for placed in _placements(len(groups), kinds):
            if all(size % len(ranks) == 0 for ranks in placed):
                yield _placed_plan(request, groups, placed, size)


def _placed_plan(
    request: PlanRequest, groups: tuple[tuple[str, ...], ...], placed: Sequence[tuple[int, ...]], size: int
) -> PipelinePlan:
    plan = oracle_plan(request, groups, [len(ranks) for ranks in placed], size)
    ranks_of = dict(zip(groups, placed, strict=True))
    first = _speed(request.cluster.devices[0])
    stages = []
    for stage in plan.stages:
        ranks = ranks_of[stage.blocks]
        slower = max(first / _speed(request.cluster.devices[rank]) for rank in ranks)
        stages.append(
            dataclasses.replace(
                stage,
                ranks=ranks,
                forward_us=stage.forward_us * slower,
                backward_us=stage.backward_us * slower,
            )
        )
    return dataclasses.replace(plan, stages=tuple(stages))


def _speed(device: Device) -> float:
    return device.flops_per_s * device.efficiency


def _placements(num_stages: int, kinds: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to give all ranks to stages, those of a kind being alike."""
    # Stages 0, 1 of kinds [0, 1] and [2, 3]: (2, 0) of the first kind and (1, 1) of the second are (0, 1, 2) and (3,).
    shares = [
        [
            counts
            for counts in itertools.product(range(len(ranks) + 1), repeat=num_stages)
            if sum(counts) == len(ranks)
        ]
        for ranks in kinds
    ]
    for chosen in itertools.product(*shares):
        placed = tuple(
            tuple(
                rank
                for ranks, counts in zip(kinds, chosen, strict=True)
                for rank in ranks[sum(counts[:stage]) : sum(counts[: stage + 1])]
            )
            for stage in range(num_stages)
        )
        if all(placed):
            yield placed
