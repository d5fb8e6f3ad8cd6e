"""In which order the loss units of a mini-batch are run, and so which rank of a stage runs which of them.

Programs name places: with two ranks a stage runs the units at places 0, 2, 4, ... on the first one and those at 1, 3,
5, ... on the second, whatever they cost. What can be chosen is which unit is at which place. A heavy unit makes all
wait that run beside it, and heavy units on one rank make its stage wait for that rank:

    costs of units 0..5      8 1 7 1 2 5       two ranks run 8 7 2 = 17 and 1 1 5 = 7
    places                   0 5 4 2 1 3       two ranks run 8 2 1 = 11 and 5 7 1 = 13

A few orders are tried first: the batch's own, and units dealt out to ranks, the costliest first and each to the rank
that has least (LPT), which every rank then runs from the costliest on, or the other way round, or with the costliest in
the middle. From the shortest of them on, the exchange of two units that shortens the mini-batch most is made, some
times. What is shortest is said by the longest path through all tasks in the order in which ranks run them, that of
`schedule.event_loop` without links. It is computed for all exchanges at once.

No clock is read and nothing is drawn: the same sizes give the same order on every rank.

Source: R. L. Graham, Bounds on multiprocessing timing anomalies (SIAM J. Appl. Math. 1969, doi 10.1137/0117039); the
    exchanges: this project
Tests: tests/plan/test_unit_order.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.event_loop import nominal_times, stage_task_us
from gpp_plugin.schedule.orders.gpipe import forward_only_stages
from gpp_plugin.schedule.task_graph import TaskGraph

# What a loss unit costs, stage by stage, by the sizes of its tensors: known to every rank without a message.
#
# A block takes time with the elements of the batch's entries that drive it: those that it reads itself, or else those
# that drive what it reads. A stage takes what its blocks take, weighed by their operations at the sample batch:
#
#     sample unit   pixel_values [4, 3, 32, 32], input_ids [4, 24]        a unit of 4 x 48 tokens and 1 image
#     vision tower                                   pixel_values         0.25
#     decoder layers                                 input_ids            2
#     loss                                           labels               2
#
# A block that grows faster than its lengths, as attention does, is taken to grow as they do.


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What units cost over what the unit costs that a plan was made for.

    Args:
        stages: of each stage, shares of its time (together 1) and the entries of the batch that drive these.
        typical: elements of each entry in that unit.
    """

    stages: tuple[tuple[tuple[float, tuple[str, ...]], ...], ...]
    typical: Mapping[str, int]

    def factors(self, sizes: Mapping[str, int]) -> list[float]:
        """Return what a unit with these numbers of elements takes on each stage over what a typical one does."""
        return [
            sum((share * self._ratio(keys, sizes) for share, keys in parts), 0.0) for parts in self.stages
        ]

    def _ratio(self, keys: Sequence[str], sizes: Mapping[str, int]) -> float:
        usual = sum(self.typical.get(key, 0) for key in keys)
        return sum(sizes.get(key, 0) for key in keys) / usual if usual else 1.0


def unit_costs(plan: PipelinePlan, graph: BlockGraph, typical: Mapping[str, int]) -> UnitCosts:
    """Return what units cost under a plan.

    Args:
        graph: whose blocks the plan's stages hold.
        typical: elements of each entry of the batch in a unit that the plan was made for.
    """
    driven = _drivers(graph, frozenset(typical))
    flops = {block.name: block.flops for block in graph.blocks}
    stages = []
    for stage in plan.stages:
        shares: dict[tuple[str, ...], float] = {}
        total = sum(flops.get(name, 0.0) for name in stage.blocks)
        for name in stage.blocks:
            keys = driven.get(name, ())
            share = flops.get(name, 0.0) / total if total > 0 else 1.0 / len(stage.blocks)
            shares[keys] = shares.get(keys, 0.0) + share
        stages.append(tuple((share, keys) for keys, share in shares.items() if share > 0))
    return UnitCosts(stages=tuple(stages), typical=dict(typical))


def _drivers(graph: BlockGraph, known: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the entries of the batch that drive each block; blocks are in topological order."""
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.dst, []).append(edge.src)
    found: dict[str, tuple[str, ...]] = {}
    for block in graph.blocks:
        own = known.intersection(block.inputs)
        before = {key for source in sources.get(block.name, ()) for key in found.get(source, ())}
        found[block.name] = tuple(sorted(own or before))
    return found


MOST_EXCHANGES = 8
"""Exchanges of two units that are made at most."""
PAIRS_TRIED = 256
"""Exchanges that are tried for each that is made; all of 23 units."""
LEAST_GAIN = 1e-6
"""Share of a mini-batch's time below which an exchange is none."""

_Floats = NDArray[np.float64]


class UnitOrder:
    """The order of any mini-batch's units under one plan; a plain object that worker processes may receive.

    Args:
        plan: of units: a sample of it is a unit.
        costs: what a unit costs by its sizes.
    """

    def __init__(self, plan: PipelinePlan, costs: UnitCosts) -> None:
        self._costs = costs
        self._times = MiniBatchTimes(plan)
        self._last: tuple[_Floats, tuple[int, ...]] | None = None

    def __call__(self, sizes: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
        """Return which unit is at each place, of units with these numbers of elements by key.

        Other than a mini-batch's many, of an evaluation, stay as they come.
        """
        if len(sizes) != self._times.num_units:
            return tuple(range(len(sizes)))
        factors = np.array([self._costs.factors(unit) for unit in sizes], dtype=np.float64)
        # evaluations repeat mini-batches, and constant shapes repeat all
        if self._last is None or not np.array_equal(self._last[0], factors):
            self._last = factors, order_units(self._times, factors)
        return self._last[1]


class MiniBatchTimes:
    """What a mini-batch takes by the order of its units.

    Args:
        plan: of units, with the times of typical ones.
    """

    def __init__(self, plan: PipelinePlan) -> None:
        plan = nominal_times(plan)
        schedules = build_schedules(plan, forward_only_stages=forward_only_stages(plan))
        graph = build_task_graph(plan, schedules)
        self.num_units = plan.mini_batch
        self.degrees = tuple(dict.fromkeys(stage.degree for stage in plan.stages))
        # By task, in an order in which each comes behind all it waits for: the place of its unit, its stage, what it
        # takes for a typical unit, and the tasks that it waits for.
        self._tasks: list[tuple[int, int, float, tuple[int, ...]]] = []
        at: dict[int, int] = {}
        for node, waits_for in _in_order(graph):
            stage = plan.stages[graph.stage[node]]
            place = stage.samples(graph.micro_batch[node], graph.rank[node]).first_sample
            us = stage_task_us(stage, graph.kind[node], graph.half[node])
            at[node] = len(self._tasks)
            self._tasks.append((place, graph.stage[node], us, tuple(at[other] for other in waits_for)))
        self._last = [at[order[-1]] for order in graph.orders.values() if order]
        self.stage_us = [0.0] * len(plan.stages)
        for _, index, us, _ in self._tasks:
            self.stage_us[index] += us / plan.mini_batch

    def of(self, orders: NDArray[np.int64], factors: _Floats) -> _Floats:
        """Return the microseconds of mini-batches in several orders.

        Args:
            orders: [orders, places], which unit is there.
            factors: [units, stages], what a unit takes there over what a typical one does.
        """
        # [stages, places, orders], so that what is looked up for a task lies together
        taken = np.ascontiguousarray(factors[orders].transpose(2, 1, 0))
        zero = np.zeros(len(orders))
        end: list[_Floats] = []
        for place, stage, us, waits_for in self._tasks:
            start = end[waits_for[0]] if waits_for else zero
            for other in waits_for[1:]:
                start = np.maximum(start, end[other])
            end.append(start + taken[stage, place] * us)
        latest: _Floats = np.max([end[task] for task in self._last], axis=0)
        return latest


def order_units(times: MiniBatchTimes, factors: _Floats) -> tuple[int, ...]:
    """Return which unit is at each place.

    Args:
        factors: [units, stages], what a unit takes there over what a typical one does.
    """
    as_listed = tuple(range(times.num_units))
    assert len(as_listed) == len(factors), f"{len(factors)} units for a plan of {len(as_listed)}"
    if (factors == factors[0]).all():
        return as_listed
    starts = _starts(times, factors)
    found = times.of(starts, factors)
    at = int(found.argmin())  # of equals the first: the batch's order, where nothing is shorter
    best, shortest = starts[at], float(found[at])
    pairs = _pairs(len(as_listed))
    for number in range(MOST_EXCHANGES):
        # 100 units have 4,950 pairs: the 256 of this time, then the next ones
        tried = np.take(
            pairs, np.arange(number * PAIRS_TRIED, (number + 1) * PAIRS_TRIED), axis=0, mode="wrap"
        )
        tried = tried[: len(pairs)]
        tried = tried[(factors[best[tried[:, 0]]] != factors[best[tried[:, 1]]]).any(axis=1)]
        if not len(tried):
            continue
        orders = np.repeat(best[None], len(tried), axis=0)
        rows = np.arange(len(tried))
        orders[rows, tried[:, 0]], orders[rows, tried[:, 1]] = best[tried[:, 1]], best[tried[:, 0]]
        found = times.of(orders, factors)
        at = int(found.argmin())
        if found[at] < shortest * (1 - LEAST_GAIN):
            best, shortest = orders[at], float(found[at])
        elif len(pairs) <= PAIRS_TRIED:
            break
    return tuple(int(unit) for unit in best)


def _pairs(count: int) -> NDArray[np.int64]:
    """Return all pairs of places, neighbours first."""
    return np.array(
        [(i, i + distance) for distance in range(1, count) for i in range(count - distance)], dtype=np.int64
    ).reshape(-1, 2)


def _starts(times: MiniBatchTimes, factors: _Floats) -> NDArray[np.int64]:
    """Return the orders that are tried first, [orders, places]; the batch's own is the first."""
    # stage by stage: a matrix product may round otherwise on another machine, and all ranks must choose alike
    weights = np.zeros(len(factors))
    for stage, us in enumerate(times.stage_us):
        weights = weights + factors[:, stage] * us
    found = [list(range(len(weights)))]
    for degree in times.degrees:
        dealt = _deal(weights, degree)
        for arranged in (dealt, [own[::-1] for own in dealt], [_peak(own) for own in dealt]):
            # the places of rank r of 2 are r, r + 2, r + 4, ...
            found.append([unit for row in zip(*arranged, strict=True) for unit in row])
    return np.array(found, dtype=np.int64)


def _deal(weights: _Floats, degree: int) -> list[list[int]]:
    """Return the units of each rank, as many for each: the costliest first, each to the rank that has least yet."""
    most = len(weights) // degree
    dealt: list[list[int]] = [[] for _ in range(degree)]
    loads = [0.0] * degree
    for unit in np.argsort(-weights, kind="stable"):
        rank = min((r for r in range(degree) if len(dealt[r]) < most), key=lambda r: (loads[r], r))
        dealt[rank].append(int(unit))
        loads[rank] += float(weights[unit])
    return dealt


def _peak(units: Sequence[int]) -> list[int]:
    """Return units that come from the costliest on with the costliest in the middle: 9 7 4 2 -> 4 9 7 2 or so."""
    # a pipeline fills and drains at its ends: what is short there is waited for least
    return [*reversed(units[2::2]), *units[:1], *units[1::2]]


def _in_order(graph: TaskGraph) -> Iterable[tuple[int, list[int]]]:
    """Yield nodes, each behind all it waits for, with those."""
    waits_for: list[list[int]] = [[] for _ in graph.stage]
    followers: dict[int, list[int]] = {node: list(others) for node, others in graph.unlocks.items()}
    for node, follower in enumerate(graph.next_on_rank):
        if follower >= 0:
            followers.setdefault(node, []).append(follower)
    for source, target in zip(graph.source, graph.target, strict=True):
        followers.setdefault(source, []).append(target)
    for node, others in followers.items():
        for other in dict.fromkeys(others):
            waits_for[other].append(node)
    left: list[Any] = [len(others) for others in waits_for]
    ready = [node for node, count in enumerate(left) if not count]
    while ready:
        node = ready.pop()
        yield node, waits_for[node]
        for other in dict.fromkeys(followers.get(node, ())):
            left[other] -= 1
            if not left[other]:
                ready.append(other)
