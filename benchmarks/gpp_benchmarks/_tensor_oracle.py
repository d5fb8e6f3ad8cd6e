"""Context and tensor sizes by brute force: every partition, and every grid of ranks for each of its stages.

Times, bytes and steps are the oracles' own (`_oracle_costs`), and what tensor ranks make of them is worked out here a
second time, operation by operation: of a block that t ranks divide each computes its share of what is divided and all
of the rest, holds so much of parameters and of what is saved, and takes part in rings of 2 (t - 1) steps. Of a block
that c context ranks divide each holds all parameters, and sends the others c - 1 messages an exchange.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import networkx as nx

from gpp_benchmarks._oracle import all_partitions, random_dag, random_request, shortest_us, the_size
from gpp_benchmarks._oracle_costs import Groups, all_reduce_us, block_us, limit_of, oracle_plan
from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.cluster import Link
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.request import PlanRequest

Grid = tuple[int, int, int]
"""Data, context and tensor ranks of a stage."""


def tensor_request(seed: int, *, has_context: bool = False) -> PlanRequest:
    """Return a random graph, most of whose blocks tensor ranks can divide, on two or four ranks.

    With context, its blocks' positions too; every third one has context ranks alone.

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
    request = _with_sharding(rng, request)
    return _with_context(rng, request) if has_context else request


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


def _with_context(rng: random.Random, request: PlanRequest) -> PlanRequest:
    blocks = tuple(
        dataclasses.replace(block, saved_bytes=rng.choice([200, 1000])) for block in request.graph.blocks
    )
    context = [
        BlockSharding(
            block=block.name,
            degrees=rng.choice([(2,), (2, 4), (2, 4)]),
            flop_share=rng.choice([1.0, 0.9, 0.6]),
            parameter_bytes=0,
            trainable_bytes=0,
            saved_share=rng.uniform(0.5, 1.0),
            forward_sums=0,
            forward_sum_bytes=0,
            backward_sums=0,
            backward_sum_bytes=0,
            forward_gathers=(gathers := rng.choice([0, 0, 1])),
            forward_gather_bytes=400 * gathers,
            forward_exchanges=4,
            forward_exchange_bytes=rng.choice([400, 4000]),
            backward_exchanges=4,
            backward_exchange_bytes=rng.choice([400, 4000]),
            groups=rng.choice([0, 4, 4, 8]),
            group_bytes=40,
        )
        for block in blocks
        if rng.random() < 0.9
    ]
    graph = dataclasses.replace(request.graph, blocks=blocks, context=tuple(context))
    profile = dataclasses.replace(request.profile, graph=fingerprint(graph))
    return dataclasses.replace(
        request,
        graph=graph,
        profile=profile,
        sequence_parallel=None,
        tensor_parallel=rng.choice([1, None, None]),
    )


def best_tensor_us(request: PlanRequest, most: int = 4) -> float | None:
    """Return the shortest step of all partitions on all grids at the request's one size; None: none fits.

    Args:
        most: the largest tensor size, and the largest context size.
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
    # Three stages on 4 ranks have grids of 1, 1 and 2 ranks in some order, the last of them 2x1x1 or 1x1x2: all are
    # tried, whatever memory they take; those that do not fit are left out by the caller.
    size = the_size(request)
    grids = [
        (d, c, t)
        for c in ((1, 2, 4) if request.sequence_parallel is None else (1,))
        for t in ((1, 2, 4) if request.tensor_parallel is None else (1,))
        for d in range(1, request.num_ranks + 1)
        if max(c, t) <= most and size % d == 0 and d * c * t <= request.num_ranks
    ]
    for groups in all_partitions(request.graph, request.num_ranks):
        for chosen in itertools.product(grids, repeat=len(groups)):
            if sum(map(math.prod, chosen)) == request.num_ranks and all(
                may_have(request.graph, group, grid) for group, grid in zip(groups, chosen, strict=True)
            ):
                yield grid_plan(request, groups, chosen)


def may_have(graph: BlockGraph, blocks: Sequence[str], grid: Grid) -> bool:
    """Return whether ranks divide all of these blocks that can be divided, and one at least, along each axis."""
    _, context, tensor = grid
    for size, known in ((context, graph.context), (tensor, graph.sharding)):
        degrees = [each.degrees for each in known if each.block in blocks]
        if size > 1 and not (degrees and all(size in own for own in degrees)):
            return False
    sharded = {each.block for each in graph.sharding}
    for each in graph.context if min(context, tensor) > 1 else ():
        if each.block in blocks and each.block in sharded:
            if context * tensor not in each.degrees:
                return False
    return True


def grid_plan(request: PlanRequest, groups: Groups, grids: Sequence[Grid]) -> PipelinePlan:
    """Return the plan of these stages on these grids: ranks in their order, or the largest grids of a sample first."""
    # The plan of data-parallel ranks alone has the order of stages, edges and in-flight counts; ranks, times and bytes
    # are then of each stage's grid. Grids of 1, 1x1x2 and 1 ranks in order are 0, (1, 2), 3, a row over two nodes of 2:
    # so those of the most ranks of the same samples take ranks first, (0, 1), then 2 and 3.
    size = the_size(request)
    plan = oracle_plan(request, groups, [d for d, _, _ in grids], size)
    grid_of = dict(zip(groups, grids, strict=True))
    chosen = [grid_of[stage.blocks] for stage in plan.stages]
    ends = list(itertools.accumulate(map(math.prod, chosen), initial=0))
    order = list(range(len(chosen)))
    if any(start % (c * t) for start, (_, c, t) in zip(ends, chosen, strict=False)):
        order.sort(key=lambda i: -chosen[i][1] * chosen[i][2])
    ranks: dict[int, tuple[int, ...]] = {}
    first = 0
    for i in order:
        count = math.prod(chosen[i])
        ranks[i] = tuple(range(first, first + count))
        first += count
    stages = [
        _on_grid(
            request,
            dataclasses.replace(stage, ranks=ranks[i], context=chosen[i][1], tensor=chosen[i][2]),
            size // chosen[i][0],
        )
        for i, stage in enumerate(plan.stages)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def _on_grid(request: PlanRequest, stage: Stage, local: int) -> Stage:
    """Return the stage with times, gradients and bytes of one of its ranks."""
    # Of a block of 100 us and 1000 bytes of which 0.6 and 500 are divided, on 2 ranks: 40 + 30 us and its sums, and
    # 500 + 250 bytes. A row that lies in two nodes sums over the slower link, and the stage takes as long as that row.
    c, t = stage.context, stage.tensor
    costs = {cost.block: cost for cost in request.profile.costs}
    divided = {each.block: each for each in request.graph.sharding if t in each.degrees}
    forward = backward = held = saved = gradients = 0.0
    largest = 0.0
    row = max(
        (stage.ranks[i : i + t] for i in range(0, len(stage.ranks), t)),
        key=lambda group: _levels(request, group),
    )
    beside = max(
        (stage.ranks[i + j : i + c * t : t] for i in range(0, len(stage.ranks), c * t) for j in range(t)),
        key=lambda group: _levels(request, group),
    )
    cut = {each.block: each for each in request.graph.context if c in each.degrees}
    graph = {block.name: block for block in request.graph.blocks}
    for name in stage.blocks:
        cost, own = costs[name], divided.get(name)
        there, back = block_us(cost, local)
        parameter, gradient = float(cost.parameter_bytes), float(cost.gradient_bytes)
        keeps, positions = cost.saved_bytes_per_sample * local, cut.get(name)
        share = 1.0
        if positions is not None and c > 1:
            there, back = (us * (1 - positions.flop_share * (c - 1) / c) for us in (there, back))
            share = 1 - positions.saved_share * (c - 1) / c
            groups = positions.groups // (t if own is not None else 1)
            times = c // math.gcd(c, groups) if groups else 1
            more = (times - 1) * positions.group_bytes
            keeps *= share + more / c / graph[name].saved_bytes
        if own is not None and t > 1:
            whole = 1.0 - own.flop_share
            there, back = (us * whole + us * own.flop_share / t for us in (there, back))
            parameter = round(parameter - own.parameter_bytes * (t - 1) / t)
            gradient = round(gradient - own.trainable_bytes * (t - 1) / t)
            keeps -= keeps * own.saved_share * (t - 1) / t
            there += _sums_us(own.forward_sums, own.forward_sum_bytes * local * share, row, request)
            # weight gradients of what reads the summed tensor are made while it travels
            sums = _sums_us(own.backward_sums, own.backward_sum_bytes * local * share, row, request)
            back = max(back, back * (1 - (1 - cost.input_share) * own.beside_share) + sums)
        if positions is not None and c > 1:
            heads = t if own is not None and t > 1 else 1
            for_one = _sent_us(positions.forward_exchanges, positions.forward_gathers, beside, request)
            there += for_one(
                (positions.forward_exchange_bytes + more) / heads, positions.forward_gather_bytes, local
            )
            for_one = _sent_us(positions.backward_exchanges, positions.backward_gathers, beside, request)
            back += for_one(
                (positions.backward_exchange_bytes + more) / heads, positions.backward_gather_bytes, local
            )
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


def _sent_us(
    exchanges: int, gathers: int, ranks: Sequence[int], request: PlanRequest
) -> Callable[[float, float, int], float]:
    """Return what is the time of so many exchanges and gathers, by the bytes of either a sample, and samples."""
    # Four ranks in two nodes: a rank has S / 4, and sends a quarter of that to each of the three others. Of 16 such
    # sixteenths 4 leave each node, over two links. A gather brings each rank, and each node, the other parts whole.
    cluster, n = request.cluster, len(ranks)
    inner, outer = cluster.links[0], cluster.links[-1]
    within = Counter(rank // inner.span for rank in ranks)
    nodes, most, least = len(within), max(within.values()), min(within.values())
    steps = (n - nodes) * inner.latency_us + (nodes - 1) * outer.latency_us
    inside = 1e6 / inner.bytes_per_s if most > 1 else 0.0
    outside = 1e6 / (outer.bytes_per_s * least) if nodes > 1 else 0.0
    leaving = max(q * (n - q) for q in within.values()) / n**2
    exchanged = max(inside * (n - 1) / n**2, outside * leaving)
    gathered = max(inside, outside) * (n - 1) / n

    def taken(exchange_bytes: float, gather_bytes: float, local: int) -> float:
        sent = exchange_bytes * exchanged + gather_bytes * gathered
        return (exchanges + gathers) * steps + sent * local

    return taken


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
    return stage.micro_batch_size * stage.context * stage.tensor // len(stage.ranks)
