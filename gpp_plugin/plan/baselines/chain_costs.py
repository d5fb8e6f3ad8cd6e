"""What the planners of sequential pipelines share: costs of intervals of the linearised model, and their judge.

Systems without a graph of stages (PipeDream, Megatron, DAPPLE, Piper) impose an order on stages that do not depend on
each other (GraphPipe, section 2). A plan of theirs run here would not wait; to compare with what they do, the order is
made explicit as edges that carry nothing (`as_sequential`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.plan.batch_rules import BatchRules
from gpp_plugin.plan.costs.cost_model import CostModel, Floats, link_for_span, ring_us
from gpp_plugin.plan.costs.estimate import estimate_plan_us
from gpp_plugin.plan.costs.judge import judge_us
from gpp_plugin.plan.costs.memory_formula import held_bytes, peak_bytes, unreduced_bytes
from gpp_plugin.plan.costs.time_formula import us_per_sample
from gpp_plugin.plan.linear_order import linear_order
from gpp_plugin.plan.make import StageDraft, build_plan, with_in_flight
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import busiest_us, memory_excess


class ChainCosts:
    """Costs of every interval [start, stop) of the blocks in linear order, at one micro-batch size."""

    def __init__(self, request: PlanRequest, costs: CostModel, rules: BatchRules, wish: int) -> None:
        self.request, self.costs, self.rules, self.wish = request, costs, rules, wish
        self.order = linear_order(request.graph)
        self.rows = costs.indices(self.order)
        self.limit = min(device.memory_bytes for device in request.cluster.devices[: request.num_ranks])
        if request.memory_limit_bytes is not None:
            self.limit = min(self.limit, request.memory_limit_bytes)
        self._held = [
            self._prefix(values)
            for values in (costs.parameter_bytes, costs.gradient_bytes, costs.optimizer_bytes)
        ]
        self._saved = self._prefix(costs.saved_per_sample), self._prefix(costs.saved_fixed)
        self._coupled = self._prefix(
            np.array([b.name in rules.coupled for b in request.graph.blocks], dtype=float)
        )
        place = {name: i for i, name in enumerate(self.order)}
        names = [block.name for block in request.graph.blocks]
        crossing = np.zeros(len(self.order) + 1)
        last: dict[str, tuple[int, int]] = {}
        for src, dst, tensors in costs.block_edges:
            for tensor in tensors:
                start, stop = last.get(tensor, (place[names[src]], 0))
                last[tensor] = start, max(stop, place[names[dst]])
        for tensor, (start, stop) in last.items():
            spec = request.graph.tensors[tensor]
            crossing[start + 1 : stop + 1] += spec.bytes_for(spec.num_samples) / spec.num_samples
        self.crossing_bytes = crossing

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.order)

    def _prefix(self, values: Floats) -> Floats:
        return np.concatenate([[0.0], np.cumsum(values[self.rows])])

    @staticmethod
    def _between(prefix: Floats) -> Floats:
        return prefix[None, :] - prefix[:, None]

    def size_of(self, start: int, stop: int, degree: int) -> int | None:
        """Return the micro-batch size of an interval on ``degree`` ranks, or None where there is none."""
        return self.rules.micro_batch_size(self.order[start:stop], degree, self.wish)

    def us_per_sample(self, degree: int) -> Floats:
        """Return [start, stop]: forward, backward and reduction of an interval on ``degree`` ranks.

        inf where the interval is empty or has no micro-batch size for that degree.
        """
        # All arrays are [start, stop]: differences of prefix sums, of which those below the diagonal (stop <= start)
        # are no stages. An interval with a block that mixes samples runs one loss unit a rank, any other one ``wish``,
        # so that there are two times for every interval, and a mask says which of them holds.
        num, mini_batch = self.num_blocks, self.request.mini_batch
        result = np.full((num + 1, num + 1), np.inf)
        gradient = self._between(self._held[1])
        link = link_for_span(self.request.cluster, degree)
        reduce_us = np.where(gradient > 0, ring_us(1e9, degree, link) / 1e9 * gradient, 0.0)
        is_empty = np.tril(np.ones((num + 1, num + 1), dtype=bool))
        coupled = self._between(self._coupled) > 0.5
        for is_coupled in (False, True):
            size = self.rules.loss_unit * degree if is_coupled else self.wish
            if size % degree or mini_batch % size:
                continue
            forward, backward = self.costs.block_times(size / degree)
            reduces = self.costs.num_reductions(mini_batch // size)
            time = us_per_sample(
                self._between(self._prefix(forward + backward)),
                size,
                reduce_us=reduce_us * reduces / mini_batch,
            )
            mask = ~is_empty & (coupled == is_coupled)
            result[mask] = time[mask]
        if self.rules.fixed:
            for start in range(num):
                for stop in range(start + 1, num + 1):
                    size_here = self.size_of(start, stop, degree)
                    if size_here is None:
                        result[start, stop] = np.inf
                        continue
                    times = self.costs.stage_times(self.rows[start:stop], size_here / degree)
                    reduces = self.costs.num_reductions(mini_batch // size_here)
                    result[start, stop] = us_per_sample(
                        sum(times), size_here, reduce_us=reduce_us[start, stop] * reduces / mini_batch
                    )
        return result

    def memory(self, degree: int, in_flight: int) -> Floats:
        """Return [start, stop]: bytes of one rank with that many micro-batches in flight."""
        parameter, gradient, optimizer = (self._between(prefix) for prefix in self._held)
        zero = self.costs.zero_stage
        held = held_bytes(parameter, gradient, optimizer, degree=degree, zero_stage=zero)
        held = held + self.costs.input_bytes_of(lambda flags: self._between(self._prefix(flags)), degree)
        local = max(self.wish // degree, 1)
        saved = self._between(self._saved[0]) * local + self._between(self._saved[1])
        peak = float(self.costs.transient_per_sample.max(initial=0.0)) * local
        held = held + unreduced_bytes(gradient, saved, degree=degree, zero_stage=zero)
        found: Floats = peak_bytes(held, saved, in_flight, transient=peak)
        return found

    def link_us_per_sample(self, num_ranks: int) -> Floats:
        """Return [cut]: microseconds a sample for activations and gradients over the outermost link needed."""
        link = link_for_span(self.request.cluster, num_ranks)
        found: Floats = link.occupied_us(2 * self.crossing_bytes)
        return found

    def drafts(self, bounds: Sequence[tuple[int, int, int]]) -> list[StageDraft] | None:
        """Return the drafts of (start, stop, degree), or None where one has no micro-batch size."""
        drafts = []
        for start, stop, degree in bounds:
            size = self.size_of(start, stop, degree)
            if size is None:
                return None
            drafts.append(
                StageDraft(blocks=tuple(self.order[start:stop]), degree=degree, micro_batch_size=size)
            )
        return drafts


def best_sequential(
    request: PlanRequest, costs: CostModel, candidates: Iterable[Sequence[StageDraft] | None], *, planner: str
) -> PipelinePlan | None:
    """Return the candidate that is quickest when run as a chain and fits as a chain, or None.

    The plan's own in-flight and time are those of its graph, which our runtime runs.
    """
    best: tuple[float, Sequence[StageDraft]] | None = None
    for drafts in candidates:
        if drafts is None or (best is not None and busiest_us(request, costs, drafts) > best[0]):
            continue
        plan = as_sequential(build_plan(request, drafts, planner="", costs=costs, is_named=False), costs)
        if memory_excess(request, plan)[0] > 0:
            continue
        us = estimate_plan_us(plan, costs)
        if best is None or us < best[0]:
            best = us, drafts
    if best is None:
        return None
    plan = build_plan(request, best[1], planner=planner, costs=costs)
    return dataclasses.replace(plan, iteration_us=judge_us(plan, costs))


ORDER_ONLY = "(order)"


def as_sequential(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan with every stage after its predecessor in the list; for prediction only.

    Depth and in-flight become those of a chain, and memory with them.
    """
    present = {(edge.src, edge.dst) for edge in plan.edges}
    added = tuple(
        StageEdge(src=i, dst=i + 1, batch_tensors=(ORDER_ONLY,), gradient_tensors=(ORDER_ONLY,))
        for i in range(len(plan.stages) - 1)
        if (i, i + 1) not in present
    )
    edges = tuple(
        edge if edge.gradient_tensors or edge.dst != edge.src + 1
        else dataclasses.replace(edge, gradient_tensors=(ORDER_ONLY,))
        for edge in plan.edges
    )  # fmt: skip
    ordered = tuple(sorted([*edges, *added], key=lambda edge: (edge.src, edge.dst)))
    return with_in_flight(dataclasses.replace(plan, edges=ordered), costs)
