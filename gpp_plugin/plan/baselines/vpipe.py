"""vPipe's planner: layers moved between stages by Kernighan and Lin's method, each saved, swapped or recomputed.

This is vPipe (Zhao et al., "vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable Pipeline
Parallel DNN Training") as DawnPiper compares with it: the granularity of partition and of memory optimization is a
layer.

For every stage the layers that save most memory per second are recomputed, others are swapped, as many of
either as fit at the least time. Stages start balanced by time. A pass moves single layers over stage
boundaries, always the move after which the longest stage (swaps and recomputation included) is shortest,
even when that is worse than before; a layer moves once a pass; the best state of the pass stays, and
passes go on while they help (Kernighan and Lin, 1970).

Deviations: activations only are swapped (the original also moves parameters); without memory optimization
memory plays no part in the partition, as the published comparison shows (its maximum batches equal
PipeDream's).

Source: vPipe (TPDS 2022, doi 10.1109/TPDS.2021.3094364)
Tests: tests/plan/test_vpipe.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.baselines.stock_chain import balanced_bounds
from gpp_plugin.plan.costs.cost_model import Floats
from gpp_plugin.plan.make import layer_bounds
from gpp_plugin.plan.memory.capuchin import Segments, StageChoice, StageOptimizer, segment_costs
from gpp_plugin.plan.memory.memory_chain import ChainPlan, plan_chain
from gpp_plugin.plan.memory.operator_chain import Ints, sum_by
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plugins import planner_traits

MOST_PASSES = 8
Score = tuple[float, float, float]
"""Bytes too many and time of the worst stage; sum of squared times."""


class LayerOptimizer:
    """The cheapest way to fit a stage of whole layers.

    Args:
        bounds: where layers begin, and the number of operators.
    """

    def __init__(self, optimizer: StageOptimizer, bounds: Sequence[int]) -> None:
        self.optimizer, self.bounds = optimizer, list(bounds)
        chain = optimizer.chain
        layers = Segments(
            starts=np.array(bounds[:-1], dtype=np.int64), stops=np.array(bounds[1:], dtype=np.int64)
        )
        costs = segment_costs(chain, layers)
        self._net, self._dropped, self._time = costs.dropped - costs.held, costs.dropped, costs.time_us
        self._saved = np.diff(chain.tensor_bytes[self.bounds])
        self._layer_of_tensor = np.searchsorted(layers.starts, chain.tensors.charged, side="right") - 1
        self._known: dict[tuple[int, int, int], StageChoice] = {}

    def choose(self, stage: int, first: int, last: int) -> StageChoice:
        """Return the choice for stage ``stage`` of layers [first, last)."""
        key = stage, first, last
        if key not in self._known:
            self._known[key] = self._choose(stage, first, last)
        return self._known[key]

    def _choose(self, stage: int, first: int, last: int) -> StageChoice:
        optimizer = self.optimizer
        start, stop = self.bounds[first], self.bounds[last]
        best = optimizer.weigh(stage, start, stop)
        if best.excess_bytes <= 0:
            return best
        layers = np.arange(first, last)
        worth = self._net[layers] / np.maximum(self._time[layers], 1e-9)
        by_worth = layers[np.argsort(-worth, kind="stable")]
        most = len(layers) if optimizer.can_recompute else 0
        waits = self._waits(stage, start, stop)
        excess = optimizer.excess_before(stage, start, stop)
        keys = [
            self._key(stage, start, stop, excess, by_worth[:count], np.sort(by_worth[count:]), waits)
            for count in range(most + 1)
        ]
        count = min(range(most + 1), key=keys.__getitem__)
        found = self._with_swaps(stage, start, stop, by_worth[:count], np.sort(by_worth[count:]))
        return min(best, found, key=lambda choice: choice.key)

    def _waits(self, stage: int, start: int, stop: int) -> Floats:
        """Return by layer what its swapped tensors lack of FreeTime, in microseconds."""
        charged = self.optimizer.chain.tensors.charged
        rows = np.flatnonzero((charged >= start) & (charged < stop))
        lacking = np.maximum(-self.optimizer.free_us(stage, start, stop, rows), 0.0)
        return sum_by(self._layer_of_tensor[rows], lacking, len(self._net))

    def _key(
        self, stage: int, start: int, stop: int, excess: float, again: Ints, others: Ints, waits: Floats
    ) -> tuple[float, float]:
        """Return the key that `_with_swaps` comes to, without saying which tensors: many are compared.

        Args:
            excess: bytes too many with nothing swapped or run again.
        """
        optimizer = self.optimizer
        chain, in_flight = optimizer.chain, optimizer.shape.in_flight(stage)
        again_us = float(self._time[again].sum())
        us = chain.stage_us(start, stop) + again_us
        needs = (
            excess - in_flight * float(self._net[again].sum()) + float(self._dropped[again].max(initial=0.0))
        )
        if needs <= 0 or not optimizer.can_swap or not len(others):
            return max(needs, 0.0), us
        freed, buffers, count = self._swaps(in_flight, others, needs)
        forward_us = float(chain.forward[stop] - chain.forward[start])
        exposed_us = optimizer.host.exposed_us(
            self._saved[others[: count + 1]].sum(),
            forward_us,
            us - forward_us,
            optimizer.shape.is_in_turn(stage),
        )
        us += float(exposed_us) + float(waits[others[: count + 1]].sum())
        return max(needs - float(freed[count]), 0.0), us

    def _swaps(self, in_flight: int, others: Ints, needs: float) -> tuple[Floats, Floats, int]:
        """Return what swapping more and more layers frees, the buffers it takes, and the last layer swapped."""
        sizes = self._saved[others]  # in order: the first layers of a stage wait longest for their backward
        buffers = 2 * np.maximum.accumulate(sizes)
        freed = in_flight * np.cumsum(sizes) - buffers
        enough = np.flatnonzero(freed >= needs)
        return freed, buffers, int(enough[0]) if len(enough) else int(freed.argmax())

    def _with_swaps(self, stage: int, start: int, stop: int, again: Ints, others: Ints) -> StageChoice:
        """Return the choice with layers run ``again``, and as many of the ``others`` swapped as it takes."""
        segments = [(self.bounds[i], self.bounds[i + 1]) for i in again.tolist()]
        found = self.optimizer.weigh(stage, start, stop, segments=segments)
        if found.excess_bytes <= 0 or not self.optimizer.can_swap or not len(others):
            return found
        in_flight = self.optimizer.shape.in_flight(stage)
        excess = self.optimizer.excess_to_swap(stage, start, stop, found)
        _, buffers, count = self._swaps(in_flight, others, excess)
        rows = np.flatnonzero(np.isin(self._layer_of_tensor, others[: count + 1]))
        return self.optimizer.weigh(
            stage, start, stop, segments=segments, swapped=rows, buffer_bytes=float(buffers[count])
        )


def partition_vpipe(optimizer: StageOptimizer) -> ChainPlan:
    """Return vPipe's stages; they may not fit (`ChainPlan.key`).

    Raises:
        PlanError: there are fewer layers than stages.
    """
    chain, num_stages = optimizer.chain, optimizer.shape.num_stages
    bounds = layer_bounds(chain.names, num_stages)
    layers = LayerOptimizer(optimizer, bounds)
    index = {position: i for i, position in enumerate(bounds)}
    cuts = tuple(index[p] for p in balanced_bounds(chain, bounds, num_stages))
    if optimizer.can_swap or optimizer.can_recompute:
        for _ in range(MOST_PASSES):
            better = _improve(layers, cuts)
            if better is None:
                break
            cuts = better
    return ChainPlan(
        cuts=tuple(bounds[i] for i in cuts),
        stages=tuple(layers.choose(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(cuts))),
        local=chain.local,
    )


def _improve(layers: LayerOptimizer, cuts: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the best cuts of one pass, or None where none is better than the first."""
    best_score, best = _score(layers, cuts), None
    moved: set[int] = set()
    while True:
        candidates = [
            (_score(layers, found), layer, found) for layer, found in _moves(cuts) if layer not in moved
        ]
        if not candidates:
            return best
        score, layer, cuts = min(candidates)
        moved.add(layer)
        if score < best_score:
            best_score, best = score, cuts


def _moves(cuts: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (layer, cuts) of every move of one layer over one boundary that leaves no stage empty."""
    for i in range(1, len(cuts) - 1):
        if cuts[i] - cuts[i - 1] > 1:
            yield cuts[i] - 1, (*cuts[:i], cuts[i] - 1, *cuts[i + 1 :])
        if cuts[i + 1] - cuts[i] > 1:
            yield cuts[i], (*cuts[:i], cuts[i] + 1, *cuts[i + 1 :])


def _score(layers: LayerOptimizer, cuts: tuple[int, ...]) -> Score:
    choices = [layers.choose(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(cuts))]
    excess, us = max(choice.key for choice in choices)
    return excess, us, sum(choice.us**2 for choice in choices)


@planner_traits(is_asynchronous=True)
def vpipe_plan(request: PlanRequest) -> PipelinePlan:
    """Return vPipe's chain of stages.

    Raises:
        PlanInfeasible: no micro-batch size fits; the message has the bytes missing and what would fit.
    """
    return plan_chain(request, partition_vpipe, planner="vpipe")
