"""What plans are made for where lengths are declared, what their stages hold at others, and how units are ordered.

A profile is of one length. `LengthCosts` says how each cost grows; so a profile of other lengths (`profile_at`) is this
one times a growth, which is 1 at its own. Planned is for two at once (`planned_profile`): the mean of the typical
lengths' times, and the bytes of the longest.

    input_ids      512     1024    4096
    forward_us     100     220     -         160 is planned
    saved bytes    1 MB    2 MB    8 MB      8 MB are planned, and refused where they do not fit

`SizedPlan` puts the bytes of a mini-batch's own lengths into the one formula of memory: what is compared with counts,
and why a mini-batch is refused. `UnitOrder` says in which order the loss units of a mini-batch are run.

Source: R. L. Graham, Bounds on multiprocessing timing anomalies (SIAM J. Appl. Math. 1969, doi 10.1137/0117039): units
    dealt out; lengths, exchanges of units: this project
Tests: tests/plan/test_planned_lengths.py, tests/integrations/test_length_memory.py, tests/plan/test_unit_order.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import MemoryBreakdown, MemoryPlan, PipelinePlan, stage_task_us
from gpp_plugin.ir.profile import BlockCost, Profile
from gpp_plugin.ir.size_formulas import (
    Coefficients,
    Evaluate,
    LengthCosts,
    Lengths,
    Mismatch,
    compile_formulas,
    products,
    value_of,
)
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan.costs.memory_formula import memory_breakdown, with_inputs
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.event_loop import nominal_times
from gpp_plugin.schedule.task_graph import TaskGraph


def profile_at(
    profile: Profile, costs: LengthCosts, lengths: Lengths, *, with_tensors: bool = True
) -> Profile:
    """Return a profile of other lengths; its inputs stay as they are.

    Args:
        with_tensors: say how tensors grow, too, which planners ask for alone.
    """
    here, there = products(lengths, costs.terms), products(costs.reference, costs.terms)

    def growth(coefficients: Coefficients) -> float:
        known = value_of(coefficients, there)
        return value_of(coefficients, here) / known if known > 0 else 1.0

    def at(cost: BlockCost) -> BlockCost:
        own = costs.blocks[cost.block]
        times = growth(own.forward_us), growth(own.backward_us)
        saved, transient = growth(own.saved_bytes), growth(own.transient_bytes)
        return dataclasses.replace(
            cost,
            forward_us=tuple(us * times[0] for us in cost.forward_us),
            backward_us=tuple(us * times[1] for us in cost.backward_us),
            saved_bytes_per_sample=cost.saved_bytes_per_sample * saved,
            saved_bytes_fixed=cost.saved_bytes_fixed * saved,
            transient_bytes_per_sample=cost.transient_bytes_per_sample * transient,
            pending_bytes_per_sample=cost.pending_bytes_per_sample * saved,
        )

    grown = [growth(coefficients) for coefficients in costs.shared]
    tensors = {name: growth(c) for name, c in costs.tensors.items()} if with_tensors else {}
    return dataclasses.replace(
        profile,
        costs=tuple(at(cost) for cost in profile.costs),
        shared=tuple(
            dataclasses.replace(s, bytes_per_sample=s.bytes_per_sample * by, bytes_fixed=s.bytes_fixed * by)
            for s, by in zip(profile.shared, grown, strict=True)
        ),
        growth={name: by for name, by in tensors.items() if by != 1.0},
    )


def planned_profile(typical: Sequence[Profile], longest: Profile) -> Profile:
    """Return a profile with the mean of the typical ones' times, and the bytes of the longest.

    Args:
        typical: at least one; all are of the same blocks, and of the same numbers of samples.
    """

    def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))

    return dataclasses.replace(
        longest,
        costs=tuple(
            dataclasses.replace(
                cost,
                forward_us=mean([one.costs[i].forward_us for one in typical]),
                backward_us=mean([one.costs[i].backward_us for one in typical]),
            )
            for i, cost in enumerate(longest.costs)
        ),
    )


def inputs_at(inputs: Sequence[TensorSpec], costs: LengthCosts, lengths: Lengths) -> list[TensorSpec]:
    """Return the model's inputs at other lengths; those that no formula is known of as they are."""
    found = []
    for spec in inputs:
        formulas = costs.sizes.shapes.get(spec.name)
        if formulas is not None:
            evaluate = _compiled(tuple(costs.sizes.symbols), tuple(formulas))
            spec = dataclasses.replace(spec, shape=tuple(int(size) for size in evaluate(*lengths)))
        found.append(spec)
    return found


@functools.lru_cache(maxsize=1024)
def _compiled(symbols: tuple[str, ...], formulas: tuple[str, ...]) -> Evaluate:
    """Return what evaluates formulas, compiled once: shapes of each mini-batch are evaluated before it runs."""
    return compile_formulas(symbols, formulas)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """The lengths of a loss unit, or of a whole mini-batch where all its units are alike, and its samples."""

    lengths: Lengths
    samples: int


class SizedPlan:
    """A plan that says what fills its ranks at any lengths.

    Args:
        plan: its memory is that of the longest.
        profile: of the lengths that blocks were measured at, without inputs.
        inputs: the model's, at those lengths.
        dtype: what floats of the batch are cast to.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        profile: Profile,
        costs: LengthCosts,
        graph: BlockGraph,
        inputs: Sequence[TensorSpec],
        dtype: str,
        zero_stage: int,
    ) -> None:
        self.plan, self.costs = plan, costs
        self._profile, self._graph, self._inputs = profile, graph, tuple(inputs)
        self._dtype, self._zero_stage = dtype, zero_stage
        self._known: dict[UnitSize, tuple[MemoryBreakdown, ...]] = {}
        self._solve = costs.sizes.solver()

    def lengths_of(self, shapes: Mapping[str, Sequence[int]]) -> Lengths | str:
        """Return the lengths of a loss unit of ``costs.num_samples`` samples, or why it is none of those known."""
        if not self.costs.sizes.shapes.keys() <= shapes.keys():
            missing = sorted(self.costs.sizes.shapes.keys() - shapes.keys())
            return f"it has no {missing[0]}"
        found = self._solve(shapes)
        return str(found) if isinstance(found, Mismatch) else found

    def at(self, units: Sequence[UnitSize]) -> PipelinePlan:
        """Return the plan with the memory of a mini-batch of these units.

        Args:
            units: one where all are alike.
        """
        # A stage with 3 micro-batches in flight holds at most its three largest units at once; whatever one of them
        # needs in passing, the largest does.
        parts = [self._of_unit(unit) for unit in dict.fromkeys(units)]
        by_unit = dict(zip(dict.fromkeys(units), parts, strict=True))
        memory = []
        for index, stage in enumerate(self.plan.stages):
            own = [by_unit[unit][index] for unit in units]
            one = max(own, key=lambda part: part.total)
            if len(own) > 1:
                each = sorted((part.activations / stage.in_flight for part in own), reverse=True)
                share = sum(unit.samples for unit in units)
                read = sum(part.inputs * unit.samples / share for part, unit in zip(own, units, strict=True))
                one = dataclasses.replace(
                    one, activations=round(sum(each[: stage.in_flight])), inputs=round(read)
                )
            memory.append(dataclasses.replace(one, limit=self.plan.memory[index].limit))
        lengths = max(units, key=lambda unit: (unit.lengths, unit.samples)).lengths
        return dataclasses.replace(self._plan_at(lengths), memory=tuple(memory))

    def _plan_at(self, lengths: Lengths) -> PipelinePlan:
        stages = tuple(
            stage
            if stage.memory is None
            else dataclasses.replace(stage, memory=self._memory_plan(stage.memory, lengths))
            for stage in self.plan.stages
        )
        return dataclasses.replace(self.plan, stages=stages)

    def _of_unit(self, unit: UnitSize) -> tuple[MemoryBreakdown, ...]:
        found = self._known.get(unit)
        if found is None:
            profile = profile_at(self._profile, self.costs, unit.lengths, with_tensors=False)
            inputs = inputs_at(self._inputs, self.costs, unit.lengths)
            profile = with_inputs(
                profile, self._graph, inputs, mini_batch=self.plan.mini_batch, dtype=self._dtype
            )
            by = unit.samples / self.costs.num_samples
            plan, zero = self._plan_at(unit.lengths), self._zero_stage
            messages = [round(part.messages * by) for part in self.plan.memory]
            found = memory_breakdown(
                plan, profile, graph=self._graph, zero_stage=zero, more_samples=by, messages=messages
            )
            while len(self._known) >= 256:
                self._known.pop(next(iter(self._known)))
            self._known[unit] = found
        return found

    def _memory_plan(self, memory: MemoryPlan, lengths: Lengths) -> MemoryPlan:
        """Return what a stage swaps and recomputes at other lengths than the longest, for which it was planned."""
        here = products(lengths, self.costs.terms)
        there = products(self.costs.longest, self.costs.terms)

        def growth(names: Sequence[str]) -> float:
            known = [self.costs.tensors[name] for name in names if name in self.costs.tensors]
            total = sum(value_of(coefficients, there) for coefficients in known)
            return sum(value_of(c, here) for c in known) / total if total > 0 else 1.0

        swapped = tuple(
            dataclasses.replace(tensor, bytes=round(tensor.bytes * growth([tensor.name])))
            for tensor in memory.swapped
        )
        on_edges = growth(sorted({name for edge in self._graph.edges for name in edge.tensors}))
        recomputed = tuple(
            dataclasses.replace(
                segment,
                bytes=round(segment.bytes * growth(segment.tensors)),
                held_bytes=round(segment.held_bytes * on_edges),
            )
            for segment in memory.recomputed
        )
        found = dataclasses.replace(memory, swapped=swapped, recomputed=recomputed)
        known, now = (
            one.swapped_bytes + sum(segment.bytes for segment in one.recomputed) for one in (memory, found)
        )
        by = now / known if known > 0 else 1.0
        return dataclasses.replace(found, working_bytes=round(memory.working_bytes * by))


# In which order the loss units of a mini-batch are run, and so which rank of a stage runs which of them.
#
# Programs name places: with two ranks a stage runs the units at places 0, 2, 4, ... on the first one and those at 1, 3,
# 5, ... on the second, whatever they cost. What can be chosen is which unit is at which place. A heavy unit makes all
# wait that run beside it, and heavy units on one rank make its stage wait for that rank:
#
#     costs of units 0..5      8 1 7 1 2 5       two ranks run 8 7 2 = 17 and 1 1 5 = 7
#     places                   0 5 4 2 1 3       two ranks run 8 2 1 = 11 and 5 7 1 = 13
#
# A few orders are tried first: the batch's own, and units dealt out to ranks, the costliest first and each to the rank
# that has least (LPT), which every rank then runs from the costliest on, or the other way round, or with the costliest
# in the middle. From the shortest of them on, the exchange of two units that shortens the mini-batch most is made, some
# times. What is shortest is said by the longest path through all tasks in the order in which ranks run them, that of
# `schedule.event_loop` without links. It is computed for all exchanges at once.
#
# No clock is read and nothing is drawn: the same sizes give the same order on every rank.
#
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
        schedules = build_schedules(plan)
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
