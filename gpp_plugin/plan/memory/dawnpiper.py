"""DawnPiper's planner: stages cut operator by operator, each with the memory optimization that makes it fit.

This is Algorithm 1 (BiPar) of "DawnPiper: A Memory-scalable Pipeline Parallel Training Framework"; cuts by Theorem 4.1
below, memory optimization by `capuchin`. The longest stage, compute and memory optimization together, is made
as short as it gets.

Legend: N_L..N_R the operators that stages L..R hold, rho a cut, M the memory of a device.

Deviations from Algorithm 1:

- Line 4 returns a time where a pair (plan, time) is meant.
- Lines 10 and 28 stop at the first cut that needs no memory optimization, which is not optimal for more
  than two stages (times 1, 3, 1, 2, 3 on four stages: 4, where 3 is possible). As the cut moves right the
  left part can only get longer and the right part shorter, so the best cut is where they cross; it is found
  by bisection, with its neighbours, and the interval grows to the side on which they have not met. So
  `bi_partition` tries a few dozen cuts a level where the paper traverses up to a hundred.
- Any number of stages: the left half has the middle stage.
- What exceeds the devices is minimised first, so that an infeasible request ends with the bytes missing.
- Cuts that send much are left out only where a plan fits without them. Where memory is so short that only
  stages of whole recomputed segments fit, bisection may pass between them: cuts between layers are tried too.
- Cuts are moved to a neighbour that sends less where no stage gets longer by more than `SLACK` (B.2).

Source: DawnPiper (arXiv 2505.05856), section 4, Algorithm 1
Tests: tests/plan/test_dawnpiper.py
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.make import layer_bounds
from gpp_plugin.plan.memory.capuchin import StageOptimizer
from gpp_plugin.plan.memory.memory_chain import ChainPlan, optimized, plan_chain
from gpp_plugin.plan.memory.operator_chain import Ints, PipelineShape, TensorChain
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plugins import planner_traits

# Where a chain of operators may be cut: compute-balanced, memory-balanced, cheap to communicate.
#
# DawnPiper, Theorem 4.1: the best cut of a model in two stages lies between the position that balances
# compute and the one that balances memory. Appendix B.1 (Algorithm 2) finds the second by filling stages in
# order; B.2 avoids cuts that send much.
#
# Deviations: Algorithm 2 derives each stage's share from ``l / (l - i)`` in one pass, which is exact only
# where everything a stage holds grows with what is in flight; here the common limit is found by bisection
# with each stage's own memory, synchronous or asynchronous, and ``÷`` divides as real numbers do.

WIDENING = 2
"""Cut positions tried beyond both ends of the theorem's interval (it holds for two stages only)."""
MOST_COMMUNICATION = 0.5
"""A cut is left out where sending its tensors takes longer than this share of a stage's even time."""
NEAR = 0.25
NUM_BISECTIONS = 10


def compute_balanced_cut(chain: TensorChain, start: int, stop: int, share: float) -> int:
    """Return the cut that leaves about ``share`` of the interval's time on its left."""
    target = chain.time[start] + share * (chain.time[stop] - chain.time[start])
    right = int(np.searchsorted(chain.time, target))
    left = max(right - 1, start)
    nearest = left if target - chain.time[left] < chain.time[min(right, stop)] - target else right
    return min(max(nearest, start), stop)


def memory_balanced_cuts(
    chain: TensorChain, shape: PipelineShape, start: int, stop: int, stages: Sequence[int]
) -> list[int]:
    """Return the cuts between ``stages`` for which the largest share of a device that one needs is smallest.

    Args:
        stages: consecutive places in the pipeline; a place decides what is in flight.
    """
    low = 0.0
    high = max(chain.memory_bytes(start, stop, stage, shape) / shape.limits[stage] for stage in stages)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        if _fill(chain, shape, start, stop, stages, middle)[-1] >= stop:
            high = middle
        else:
            low = middle
    return _fill(chain, shape, start, stop, stages, high)[:-1]


def _fill(
    chain: TensorChain, shape: PipelineShape, start: int, stop: int, stages: Sequence[int], share: float
) -> list[int]:
    """Return where each stage ends when stages take, in order, all that fits ``share`` of their device.

    Every stage leaves at least one operator to each of those after it.
    """
    ends: list[int] = []
    at = start
    for i, stage in enumerate(stages):
        low, high = at, stop - (len(stages) - 1 - i)
        limit = share * shape.limits[stage]
        while low < high:
            middle = (low + high + 1) // 2
            if chain.memory_bytes(at, middle, stage, shape) <= limit:
                low = middle
            else:
                high = middle - 1
        at = max(low, min(at + 1, high))
        if chain.memory_bytes(ends[-1] if ends else start, at, stage, shape) > limit:
            at = ends[-1] if ends else start  # not even one operator fits
        ends.append(at)
    return ends


def cut_interval(
    chain: TensorChain, shape: PipelineShape, start: int, stop: int, first: int, last: int
) -> tuple[int, int]:
    """Return the positions between which stages ``first``..``last`` are cut in the middle (Theorem 4.1).

    Both ends are widened by `WIDENING`, and leave an operator to every stage.
    """
    middle = (first + last) // 2
    num_left, num_right = middle - first + 1, last - middle
    balanced = compute_balanced_cut(chain, start, stop, num_left / (num_left + num_right))
    cuts = memory_balanced_cuts(chain, shape, start, stop, range(first, last + 1))
    even_memory = cuts[middle - first]
    low = max(min(balanced, even_memory) - WIDENING, start + num_left)
    high = min(max(balanced, even_memory) + WIDENING, stop - num_right)
    return min(low, high), max(low, high)


def allowed_cuts(chain: TensorChain, shape: PipelineShape) -> Ints:
    """Return the cut positions whose communication hides behind an even stage (B.2), both ends included.

    What crosses wherever near by a cut is made (the least within `NEAR` of an even stage's operators) is
    inevitable, and not held against a cut. Where that leaves fewer positions than stages need, all are allowed.
    """
    num, num_stages = chain.num_blocks, shape.num_stages
    even_us = chain.time[-1] / num_stages
    reach = max(int(NEAR * num / num_stages), 1)
    inner = chain.crossing[1:num]
    padded = np.pad(inner, reach, constant_values=np.inf)
    inevitable = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).min(axis=1)
    send_us = (inner - inevitable) / shape.link_bytes_per_s * 1e6
    allowed = 1 + np.flatnonzero(send_us <= MOST_COMMUNICATION * even_us)
    if len(allowed) < num_stages - 1:
        allowed = np.arange(1, num)
    return np.concatenate([[0], allowed, [num]]).astype(np.int64)


NEIGHBOURS = 2
FEW = 24
"""Cuts that are all tried: on so short a chain one operator more or less matters, and costs nearly nothing."""
SLACK = 0.002
TOLERANCE = 1.01
"""Times the estimate, up to which a stage's exact choice is taken as it is."""
MOST_RELIEFS = 12
TIGHT = 1.2
"""Times the even share of compute, above which cuts between layers are tried as well."""
REACH = 12
"""Positions to either side that a cut may be moved to send less."""

Key = tuple[float, float]
"""Bytes too many, and the longest stage's time."""


class BinaryPartition:
    """BiPar over the allowed cuts of a chain."""

    def __init__(self, optimizer: StageOptimizer, cuts: Sequence[int]) -> None:
        self._optimizer = optimizer
        self._cuts = list(cuts)
        self._known: dict[tuple[int, int, int, int], tuple[Key, tuple[int, ...]]] = {}

    def bi_partition(self, start: int, stop: int, first: int, last: int) -> tuple[Key, tuple[int, ...]]:
        """Return the key of the best cuts found for stages ``first``..``last`` of [start, stop), and them."""
        if first == last:
            return self._optimizer.estimate(first, start, stop), ()
        where = start, stop, first, last
        if where not in self._known:
            self._known[where] = self._search(start, stop, first, last)
        return self._known[where]

    def _search(self, start: int, stop: int, first: int, last: int) -> tuple[Key, tuple[int, ...]]:
        middle = (first + last) // 2
        least = bisect_left(self._cuts, start + 1) + (middle - first)
        most = bisect_left(self._cuts, stop) - 1 - (last - middle - 1)
        if least > most:
            return (float("inf"), float("inf")), ()
        interval = cut_interval(self._optimizer.chain, self._optimizer.shape, start, stop, first, last)
        low, high = (min(max(bisect_left(self._cuts, p), least), most) for p in interval)
        tried: dict[int, tuple[Key, Key]] = {}

        def halves(at: int) -> tuple[Key, Key]:
            if at not in tried:
                cut = self._cuts[at]
                tried[at] = (
                    self.bi_partition(start, cut, first, middle)[0],
                    self.bi_partition(cut, stop, middle + 1, last)[0],
                )
            return tried[at]

        if most - least < FEW:
            for at in range(least, most + 1):
                halves(at)
        else:
            # until those cuts are tried at which the left part ceases to be the shorter one
            width = max(high - low, 1)
            while low > least and halves(low)[0] > halves(low)[1]:
                low, width = max(low - width, least), 2 * width
            while high < most and halves(high)[0] < halves(high)[1]:
                high, width = min(high + width, most), 2 * width
            begin, end = low, high
            while begin < end:
                at = (begin + end) // 2
                if halves(at)[0] < halves(at)[1]:
                    begin = at + 1
                else:
                    end = at
            for at in range(max(begin - NEIGHBOURS, least), min(begin + NEIGHBOURS, most) + 1):
                halves(at)
        best = min(tried, key=lambda at: (max(tried[at]), sum(key[1] for key in tried[at])))
        cut = self._cuts[best]
        left = self.bi_partition(start, cut, first, middle)
        right = self.bi_partition(cut, stop, middle + 1, last)
        return max(left[0], right[0]), (*left[1], cut, *right[1])


def partition_chain(optimizer: StageOptimizer) -> ChainPlan:
    """Return the stages of a chain, memory optimized; they may not fit (`ChainPlan.key`).

    Raises:
        PlanError: there are fewer operators than stages.
    """
    chain, num_stages = optimizer.chain, optimizer.shape.num_stages
    if chain.num_blocks < num_stages:
        raise PlanError(f"{num_stages} stages of {chain.num_blocks} operators; lower the number of stages")
    plan = _partition(optimizer, allowed_cuts(chain, optimizer.shape).tolist())
    if not plan.fits or plan.key[1] > TIGHT * chain.time[-1] / num_stages:
        plan = min(plan, _partition(optimizer, layer_bounds(chain.names, num_stages)), key=lambda p: p.key)
    if not plan.fits:
        plan = min(plan, _partition(optimizer, list(range(chain.num_blocks + 1))), key=lambda p: p.key)
    return plan


def _partition(optimizer: StageOptimizer, cuts: list[int]) -> ChainPlan:
    last = optimizer.shape.num_stages - 1
    end = optimizer.chain.num_blocks
    _, inner = BinaryPartition(optimizer, cuts).bi_partition(0, end, 0, last)
    return _relieve(optimizer, _send_less(optimizer, [0, *inner, end]), cuts)


def _relieve(optimizer: StageOptimizer, bounds: Sequence[int], cuts: list[int]) -> ChainPlan:
    """Return the stages between these cuts, the longest made smaller where it came out longer than estimated.

    Estimates take tensors as divisible; where few large ones must go, the choice among them costs more.
    """
    plan = optimized(optimizer, bounds)
    estimate = max(optimizer.estimate(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(bounds)))
    for _ in range(MOST_RELIEFS):
        worst = max(range(len(plan.stages)), key=lambda s: plan.stages[s].key)
        if plan.stages[worst].key <= (estimate[0], estimate[1] * TOLERANCE):
            break
        better = next(_relieved(optimizer, plan, worst, cuts), None)
        if better is None:
            break
        plan = better
    return plan


def _relieved(optimizer: StageOptimizer, plan: ChainPlan, worst: int, cuts: list[int]) -> Iterator[ChainPlan]:
    """Yield plans in which stage ``worst`` has passed operators to a neighbour, both then below it."""
    for step in (1, 3, 9):
        for cut, sign in ((worst, 1), (worst + 1, -1)):
            if not 0 < cut < len(plan.stages):
                continue
            at = bisect_left(cuts, plan.cuts[cut]) + sign * step
            if not 0 < at < len(cuts) or not plan.cuts[cut - 1] < cuts[at] < plan.cuts[cut + 1]:
                continue
            bounds = (*plan.cuts[:cut], cuts[at], *plan.cuts[cut + 1 :])
            pair = [optimizer.optimize(s, bounds[s], bounds[s + 1]) for s in (cut - 1, cut)]
            if max(choice.key for choice in pair) < plan.stages[worst].key:
                stages = (*plan.stages[: cut - 1], *pair, *plan.stages[cut + 1 :])
                yield dataclasses.replace(plan, cuts=bounds, stages=stages)


def _send_less(optimizer: StageOptimizer, bounds: list[int]) -> list[int]:
    """Return the cuts moved to near positions that fewer bytes cross, where the longest stage stays so."""
    crossing = optimizer.chain.crossing
    longest = max(optimizer.estimate(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(bounds)))
    allowed = longest[0], longest[1] * (1 + SLACK)
    bounds = list(bounds)
    for i in range(1, len(bounds) - 1):
        near = range(max(bounds[i] - REACH, bounds[i - 1] + 1), min(bounds[i] + REACH, bounds[i + 1] - 1) + 1)
        for at in sorted(near, key=lambda p: (crossing[p], abs(p - bounds[i]))):
            if at == bounds[i] or crossing[at] >= crossing[bounds[i]]:
                break
            left = optimizer.estimate(i - 1, bounds[i - 1], at)
            right = optimizer.estimate(i, at, bounds[i + 1])
            if max(left, right) <= allowed:
                bounds[i] = at
                break
    return bounds


@planner_traits(granularity="node", is_asynchronous=True)
def dawnpiper_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of stages with the shortest longest stage, memory optimization included.

    The blocks of the graph are taken as operators, in their order; with blocks of layers cuts are coarser and
    there are no tensors to swap or recompute.

    Raises:
        PlanInfeasible: no micro-batch size fits; the message has the bytes missing and what would fit.
    """
    return plan_chain(request, partition_chain, planner="dawnpiper")
