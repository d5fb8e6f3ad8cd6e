"""Tensor sizes by brute force: every partition, and every grid of data x tensor ranks for each of its stages.

Times, bytes and steps are the oracles' own (`_oracle_costs`), and what tensor ranks make of them is worked out here a
second time, operation by operation: of a block that t ranks divide each computes its share of what is divided and all
of the rest, holds so much of parameters and of what is saved, and takes part in rings of 2 (t - 1) steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import networkx as nx

from gpp_benchmarks._oracle import all_partitions, random_dag, random_request, shortest_us, the_size
from gpp_benchmarks._oracle_costs import Groups, all_reduce_us, block_us, limit_of, oracle_plan
from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.cluster import Link
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.request import PlanRequest

Grid = tuple[int, int]
"""Data and tensor ranks of a stage."""


def tensor_request(seed: int) -> PlanRequest:
    """Return a random graph, most of whose blocks tensor ranks can divide, on two or four ranks.

    Every other one is of little memory; some are of nodes of two ranks, others of micro-batches that no data-parallel
    ranks can share.
    """
    rng = random.Random(13_000_027 * (seed + 1))
    num, ranks = rng.randint(3, 5), rng.choice([2, 4, 4])
    order = random_dag(rng, num) if rng.random() < 0.5 else nx.path_graph(num, create_using=nx.DiGraph)
    size = rng.choice([1, 1, 2, 4])
    request = random_request(rng, order, ranks=ranks, is_tight=seed % 2 == 1, micro_batch_size=size)
    cluster = request.cluster
    links: tuple[Link, ...] = (
        dataclasses.replace(cluster.links[0], bytes_per_s=rng.choice([1e8, 1e9, 1e10])),
    )
    if ranks == 4 and rng.random() < 0.4:
        node = Link(name="node", span=2, bytes_per_s=links[0].bytes_per_s * 8, latency_us=1.0)
        links = (node, *links)
    if seed % 2 == 1:  # micro-batches may be so few that no stage holds more than one
        cluster = cluster.with_memory(round(cluster.devices[0].memory_bytes * rng.uniform(1.0, 1.8)))
    request = dataclasses.replace(
        request,
        cluster=dataclasses.replace(cluster, links=links),
        mini_batch=size * rng.choice([1, 2, 4, 8]),
        tensor_parallel=None,
    )
    return _with_sharding(rng, request)


def _with_sharding(rng: random.Random, request: PlanRequest) -> PlanRequest:
    costs = {cost.block: cost for cost in request.profile.costs}
    blocks, sharding = [], list[BlockSharding]()
    for block in request.graph.blocks:
        parameter, gradient = costs[block.name].parameter_bytes, costs[block.name].gradient_bytes
        blocks.append(dataclasses.replace(block, parameter_bytes=parameter, trainable_bytes=gradient))
        if rng.random() < 0.8:
            sharding.append(
                BlockSharding(
                    block=block.name,
                    degrees=rng.choice([(2,), (2, 4), (2, 4), (4,)]),
                    flop_share=rng.choice([1.0, 0.9, 0.6]),
                    parameter_bytes=round(parameter * rng.uniform(0.5, 1.0)),
                    trainable_bytes=round(gradient * rng.uniform(0.5, 1.0)),
                    saved_share=rng.uniform(0.2, 0.9),
                    forward_sums=rng.choice([0, 1, 2]),
                    forward_sum_bytes=rng.choice([0, 400, 4000]),
                    backward_sums=1,
                    backward_sum_bytes=rng.choice([400, 4000]),
                    beside_share=len(sharding) / 4,
                )
            )
    graph = dataclasses.replace(request.graph, blocks=tuple(blocks), sharding=tuple(sharding))
    profile = dataclasses.replace(request.profile, graph=fingerprint(graph))
    return dataclasses.replace(request, graph=graph, profile=profile)


def best_tensor_us(request: PlanRequest, most: int = 4) -> float | None:
    """Return the shortest step of all partitions on all grids at the request's one size; None: none fits.

    Args:
        most: the largest tensor size.
    """

    def held(plan: PipelinePlan) -> Iterator[PipelinePlan]:
        yield plan
        yield from (each for each in _with_more_in_flight(plan) if _still_fits(each, plan, request))

    return shortest_us(request, _plans(request, most), held)


def _with_more_in_flight(plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """Yield the plan holding half as many micro-batches more as it holds beyond one, and as many more."""
    for more in (0.5, 1.0) if len(plan.stages) > 1 else ():
        held = [stage.in_flight + math.ceil(more * (stage.in_flight - 1)) for stage in plan.stages]
        most = [plan.mini_batch // stage.micro_batch_size for stage in plan.stages]
        yield plan.with_each(in_flight=map(min, held, most))


def _plans(request: PlanRequest, most: int) -> Iterator[PipelinePlan]:
    # Three stages on 4 ranks have grids of 1, 1 and 2 ranks in some order, the last of them 2x1 or 1x2: all are tried,
    # whatever memory they take; those that do not fit are left out by the caller.
    size = the_size(request)
    grids = [
        (d, t)
        for t in (1, 2, 4)
        for d in range(1, request.num_ranks + 1)
        if t <= most and size % d == 0 and d * t <= request.num_ranks
    ]
    for groups in all_partitions(request.graph, request.num_ranks):
        for chosen in itertools.product(grids, repeat=len(groups)):
            if sum(d * t for d, t in chosen) == request.num_ranks and all(
                may_have(request.graph, group, t) for group, (_, t) in zip(groups, chosen, strict=True)
            ):
                yield grid_plan(request, groups, chosen)


def may_have(graph: BlockGraph, blocks: Sequence[str], tensor: int) -> bool:
    """Return whether ``tensor`` ranks divide all of these blocks that can be divided, and one at least."""
    degrees = [each.degrees for each in graph.sharding if each.block in blocks]
    return tensor == 1 or (bool(degrees) and all(tensor in own for own in degrees))


def grid_plan(request: PlanRequest, groups: Groups, grids: Sequence[Grid]) -> PipelinePlan:
    """Return the plan of these stages on these grids: ranks in their order, or the largest tensor size first."""
    # The plan of data-parallel ranks alone has the order of stages, edges and in-flight counts; ranks, times and bytes
    # are then of each stage's grid. Grids 1x1, 1x2 and 1x1 in order are ranks 0, (1, 2), 3, a row over two nodes of 2:
    # so those of the largest tensor size take ranks first, (0, 1), then 2 and 3.
    size = the_size(request)
    plan = oracle_plan(request, groups, [d for d, _ in grids], size)
    grid_of = dict(zip(groups, grids, strict=True))
    chosen = [grid_of[stage.blocks] for stage in plan.stages]
    ends = list(itertools.accumulate((d * t for d, t in chosen), initial=0))
    order = list(range(len(chosen)))
    if any(start % t for start, (_, t) in zip(ends, chosen, strict=False)):
        order.sort(key=lambda i: -chosen[i][1])
    ranks: dict[int, tuple[int, ...]] = {}
    first = 0
    for i in order:
        count = chosen[i][0] * chosen[i][1]
        ranks[i] = tuple(range(first, first + count))
        first += count
    stages = [
        _on_grid(
            request, dataclasses.replace(stage, ranks=ranks[i], tensor=chosen[i][1]), size // chosen[i][0]
        )
        for i, stage in enumerate(plan.stages)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def _on_grid(request: PlanRequest, stage: Stage, local: int) -> Stage:
    """Return the stage with times, gradients and bytes of one of its tensor ranks."""
    # Of a block of 100 us and 1000 bytes of which 0.6 and 500 are divided, on 2 ranks: 40 + 30 us and its sums, and
    # 500 + 250 bytes. A row that lies in two nodes sums over the slower link, and the stage takes as long as that row.
    t = stage.tensor
    costs = {cost.block: cost for cost in request.profile.costs}
    divided = {each.block: each for each in request.graph.sharding if t in each.degrees}
    forward = backward = held = saved = gradients = 0.0
    largest = 0.0
    row = max(
        (stage.ranks[i : i + t] for i in range(0, len(stage.ranks), t)),
        key=lambda group: _levels(request, group),
    )
    for name in stage.blocks:
        cost, own = costs[name], divided.get(name)
        there, back = block_us(cost, local)
        parameter, gradient = float(cost.parameter_bytes), float(cost.gradient_bytes)
        keeps = cost.saved_bytes_per_sample * local
        if own is not None and t > 1:
            whole = 1.0 - own.flop_share
            there, back = (us * whole + us * own.flop_share / t for us in (there, back))
            parameter = round(parameter - own.parameter_bytes * (t - 1) / t)
            gradient = round(gradient - own.trainable_bytes * (t - 1) / t)
            keeps -= keeps * own.saved_share * (t - 1) / t
            there += _sums_us(own.forward_sums, own.forward_sum_bytes * local, row, request)
            # weight gradients of what reads the summed tensor are made while it travels
            sums = _sums_us(own.backward_sums, own.backward_sum_bytes * local, row, request)
            back = max(back, back * (1 - (1 - cost.input_share) * own.beside_share) + sums)
        forward, backward = forward + there, backward + back
        held, saved, gradients = held + parameter + gradient, saved + keeps, gradients + gradient
        largest = max(largest, cost.transient_bytes_per_sample * local)
    return dataclasses.replace(
        stage,
        forward_us=forward,
        backward_us=backward,
        gradient_bytes=round(gradients),
        memory_bytes=round(held + stage.in_flight * saved + largest),
    )


def _levels(request: PlanRequest, ranks: Sequence[int]) -> int:
    """Return the level of the network that a row of tensor ranks sums over."""
    for level, link in enumerate(request.cluster.links):
        if ranks[0] // link.span == ranks[-1] // link.span:
            return level
    return len(request.cluster.links) - 1


def _sums_us(sums: int, num_bytes: float, row: Sequence[int], request: PlanRequest) -> float:
    """Return what so many equal all-reduces of so many bytes together take."""
    return all_reduce_us(request.cluster, row, num_bytes, count=sums)


def _still_fits(held: PipelinePlan, plan: PipelinePlan, request: PlanRequest) -> bool:
    """Return whether a plan fits that holds more micro-batches than ``plan``."""
    for more, stage in zip(held.stages, plan.stages, strict=True):
        one = _on_grid(request, dataclasses.replace(stage, in_flight=1), _local(stage)).memory_bytes
        none = _on_grid(request, dataclasses.replace(stage, in_flight=0), _local(stage)).memory_bytes
        need = none + more.in_flight * (one - none)
        if any(need > limit_of(request, rank) for rank in stage.ranks):
            return False
    return True


def _local(stage: Stage) -> int:
    return stage.micro_batch_size * stage.tensor // len(stage.ranks)
