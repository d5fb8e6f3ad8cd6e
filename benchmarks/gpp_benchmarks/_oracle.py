"""Random block graphs, and plans by brute force: slow, short, and without any code of the planners.

Times and bytes are `_oracle_costs`; of `gpp_plugin.plan` only the type of the request is known, which is what both are
asked, and of `gpp_plugin.ir` the types in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import networkx as nx

from gpp_benchmarks._oracle_costs import Groups, fits, least_us, num_micro_batches, oracle_plan, step_us
from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.plan.request import PlanRequest


def random_dag(rng: random.Random, num: int) -> nx.DiGraph:
    """Return a random connected-ish graph over 0..num-1 whose edges go upwards."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(num))
    density = rng.uniform(0.15, 0.5)
    for a, b in itertools.combinations(range(num), 2):
        if rng.random() < density:
            graph.add_edge(a, b)
    for node in range(1, num):
        if nx.is_isolate(graph, node):
            graph.add_edge(rng.randrange(node), node)
    return graph


def random_series_parallel(rng: random.Random, num: int) -> nx.DiGraph:
    """Return a random series-parallel order over 0..num-1."""
    graph = nx.DiGraph()
    counter = itertools.count()

    def build(size: int) -> tuple[list[int], list[int]]:
        if size == 1:
            node = next(counter)
            graph.add_node(node)
            return [node], [node]
        left = rng.randint(1, size - 1)
        first, second = build(left), build(size - left)
        if rng.random() < 0.55:
            graph.add_edges_from(itertools.product(first[1], second[0]))
            return first[0], second[1]
        return first[0] + second[0], first[1] + second[1]

    build(num)
    order = {node: i for i, node in enumerate(nx.lexicographical_topological_sort(graph))}
    return nx.relabel_nodes(graph, order)


def random_request(
    rng: random.Random, graph: nx.DiGraph, *, ranks: int, is_tight: bool, micro_batch_size: int = 4
) -> PlanRequest:
    """Return a request with random times and bytes; ``is_tight``: memory near what the best plan needs."""
    names = [f"n{node}" for node in sorted(graph)]
    block_graph = BlockGraph(
        model="random",
        num_samples=1,
        blocks=tuple(Block(name=name) for name in names),
        edges=tuple(BlockEdge(src=f"n{a}", dst=f"n{b}", tensors=(f"t{a}",)) for a, b in sorted(graph.edges)),
        tensors={
            f"t{node}": TensorSpec(
                name=f"t{node}",
                dtype="float32",
                shape=(1, rng.randint(1, 500)),
                num_samples=1,
                layout=batch_layout(),
                requires_grad=True,
            )
            for node in sorted(graph)
        },
        loss_block=None,
        tied={},
    )
    costs = []
    for name in names:
        us = float(rng.randint(20, 200))
        costs.append(
            BlockCost(
                block=name,
                samples=(1,),
                forward_us=(us,),
                backward_us=(2 * us,),
                saved_bytes_per_sample=float(rng.randint(10, 100)),
                parameter_bytes=rng.randint(50, 500),
                gradient_bytes=rng.randint(50, 500),
            )
        )
    profile = Profile(graph=fingerprint(block_graph), device="unit", source="given", costs=tuple(costs))
    # Tight: the model's own bytes and one and a half micro-batches of it, shared out evenly, and up to 1.8 times that.
    everything = sum(c.parameter_bytes + c.gradient_bytes for c in costs)
    activations = sum(c.saved_bytes_per_sample for c in costs) * micro_batch_size
    need = (everything + 1.5 * activations) / ranks
    memory = round(need * rng.uniform(1.0, 1.8)) if is_tight else 1 << 40
    device = Device(name="unit", memory_bytes=memory, flops_per_s=1e12, memory_bytes_per_s=1e12)
    link = Link(
        name="all", span=ranks, bytes_per_s=rng.choice([2e7, 1e8, 1e9]), latency_us=rng.choice([0.0, 5.0])
    )
    return PlanRequest(
        graph=block_graph,
        profile=profile,
        cluster=Cluster(name="random", devices=(device,) * ranks, links=(link,)),
        num_ranks=ranks,
        mini_batch=8 * micro_batch_size,
        loss_unit=1,
        micro_batch_sizes={"*": micro_batch_size},
    )


def all_partitions(graph: BlockGraph, most: int) -> Iterator[Groups]:
    """Yield every way to cut the blocks into at most ``most`` stages whose graph has no circle."""
    names = [block.name for block in graph.blocks]
    index = {name: i for i, name in enumerate(names)}
    edges = [(index[e.src], index[e.dst]) for e in graph.edges]

    def grow(labels: list[int], used: int) -> Iterator[list[int]]:
        if len(labels) == len(names):
            yield labels
            return
        for label in range(min(used + 1, most)):
            yield from grow([*labels, label], max(used, label + 1))

    for labels in grow([], 0):
        quotient = nx.DiGraph((labels[a], labels[b]) for a, b in edges if labels[a] != labels[b])
        if nx.is_directed_acyclic_graph(quotient):
            yield tuple(
                tuple(name for name, label in zip(names, labels, strict=True) if label == stage)
                for stage in range(max(labels) + 1)
            )


def all_degrees(num_stages: int, ranks: int, allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to give the stages degrees that add up to ``ranks``."""
    for degrees in itertools.product(allowed, repeat=num_stages):
        if sum(degrees) == ranks:
            yield degrees


def brute_force(request: PlanRequest) -> float | None:
    """Return the shortest simulated step of any plan at the request's one micro-batch size; None: none fits.

    Stages hold what GraphPipe's Table 2 asks for, no more: a planner that holds more, to hide messages, may be quicker.
    """
    size = the_size(request)
    allowed = [d for d in range(1, request.num_ranks + 1) if size % d == 0]
    best: float | None = None
    for groups in all_partitions(request.graph, request.num_ranks):
        for degrees in all_degrees(len(groups), request.num_ranks, allowed):
            plan = oracle_plan(request, groups, degrees, size)
            if not fits(plan, request) or (best is not None and least_us(plan) >= best):
                continue
            us = step_us(plan, request.cluster)
            best = us if best is None else min(best, us)
    return best


def the_size(request: PlanRequest) -> int:
    """Return the one micro-batch size of an oracle's request."""
    assert request.micro_batch_sizes is not None and set(request.micro_batch_sizes) == {"*"}
    return request.micro_batch_sizes["*"]


Parts = tuple[str, tuple["Parts", ...], tuple[int, ...]]
"""A part of a series-parallel order: ``block``, ``series`` or ``parallel``; its parts; its blocks."""


def series_parallel_parts(order: nx.DiGraph, blocks: Sequence[int]) -> Parts:
    """Return how a series-parallel order is put together, by connected components.

    Blocks whose comparabilities (one before the other) do not connect them all are parallel parts; those whose
    incomparabilities do not are a series. So 0 -> 1 -> 3, 0 -> 2 -> 3 is a series: 1 and 2 alone are incomparable,
    which leaves the components {0}, {1, 2}, {3}, in the order of their numbers.

    Args:
        order: its transitive closure; edges go upwards.
    """
    if len(blocks) == 1:
        return "block", (), tuple(blocks)
    pairs = list(itertools.combinations(sorted(blocks), 2))
    for kind, is_linked in (("parallel", order.has_edge), ("series", lambda a, b: not order.has_edge(a, b))):
        graph = nx.Graph((a, b) for a, b in pairs if is_linked(a, b))
        graph.add_nodes_from(blocks)
        parts = sorted(sorted(part) for part in nx.connected_components(graph))
        if len(parts) > 1:
            if kind == "series":
                # The numbers need not follow the order of parts: the first of a series has most behind it.
                parts.sort(key=lambda part: -sum(order.has_edge(part[0], block) for block in blocks))
            return kind, tuple(series_parallel_parts(order, part) for part in parts), tuple(sorted(blocks))
    raise AssertionError("the order is not series-parallel")


def series_parallel_plans(part: Parts) -> list[frozenset[tuple[int, ...]]]:
    """Return all plans whose stages are whole parts of the tree: intervals of a series, sets of branches."""
    kind, children, blocks = part
    whole = frozenset([blocks])
    if kind == "block":
        return [whole]
    found = set()
    if kind == "parallel":
        for labels in itertools.product(range(len(children)), repeat=len(children)):
            shared = [
                [child for child, label in zip(children, labels, strict=True) if label == number]
                for number in range(len(children))
            ]
            found |= _products([some for some in shared if some])
    else:
        num = len(children)
        for cuts in itertools.chain.from_iterable(
            itertools.combinations(range(1, num), n) for n in range(num)
        ):
            bounds = [0, *cuts, num]
            found |= _products([list(children[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)])
    found.add(whole)
    return list(found)


def _products(parts: list[list[Parts]]) -> set[frozenset[tuple[int, ...]]]:
    options = [
        series_parallel_plans(some[0])
        if len(some) == 1
        else [frozenset([tuple(sorted(block for _, _, blocks in some for block in blocks))])]
        for some in parts
    ]
    return {frozenset().union(*choice) for choice in itertools.product(*options)}


def best_series_parallel(request: PlanRequest) -> float | None:
    """Return the smallest bottleneck time a sample of any series-parallel plan that fits, or None."""
    plans = placed_series_parallel(request)
    return min((bottleneck_us(plan.stages) for plan in plans if fits(plan, request)), default=None)


def placed_series_parallel(request: PlanRequest) -> Iterator[PipelinePlan]:
    """Yield every series-parallel plan at every choice of degrees that the ranks are enough for."""
    size = the_size(request)
    names = [block.name for block in request.graph.blocks]
    number = {name: i for i, name in enumerate(names)}
    edges = nx.DiGraph((number[edge.src], number[edge.dst]) for edge in request.graph.edges)
    edges.add_nodes_from(range(len(names)))
    order = nx.transitive_closure_dag(edges)
    allowed = [d for d in range(1, request.num_ranks + 1) if size % d == 0]
    for groups in series_parallel_plans(series_parallel_parts(order, range(len(names)))):
        if len(groups) > request.num_ranks:
            continue
        stages = tuple(tuple(names[i] for i in group) for group in sorted(groups))
        for degrees in itertools.product(allowed, repeat=len(stages)):
            if sum(degrees) <= request.num_ranks:
                yield oracle_plan(request, stages, degrees, size)


def bottleneck_us(stages: Sequence[Stage]) -> float:
    """Return the largest forward and backward time a sample of any stage."""
    return max((s.forward_us + s.backward_us) / s.micro_batch_size for s in stages)


def without_communication(request: PlanRequest) -> PlanRequest:
    """Return the request with links that cost nothing and blocks without gradients to reduce."""
    link = dataclasses.replace(request.cluster.links[0], bytes_per_s=1e30, latency_us=0.0)
    return dataclasses.replace(request, cluster=dataclasses.replace(request.cluster, links=(link,)))


# Devices of two speeds by brute force: every partition, and every number of ranks of each kind for each stage.
#
# Times, bytes and steps are the oracles' own (`_oracle_costs`): of a block that nothing is known of but its time a
# device of half the speed takes twice; a stage takes what its slowest rank does. Candidates are simulated in the order
# of what their busiest stage computes, until that alone takes as long as the best step found.

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
    return shortest_us(request, _plans(request), _with_more_in_flight)


def shortest_us(
    request: PlanRequest,
    plans: Iterable[PipelinePlan],
    held: Callable[[PipelinePlan], Iterable[PipelinePlan]],
) -> float | None:
    """Return the shortest step of those plans that fit, those of the least bound first; None: none fits.

    Args:
        held: yields a plan with each of the in-flight counts that are tried.
    """
    bounded = sorted(
        ((least_us(plan), number, plan) for number, plan in enumerate(plans) if fits(plan, request)),
        key=lambda item: item[:2],
    )
    best: float | None = None
    for bound, _, plan in bounded:
        if best is not None and bound >= best:
            break
        us = min(step_us(each, request.cluster) for each in held(plan))
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
