"""What the planners of sequential pipelines share: costs of intervals of the linearised model, and their evaluator.

Systems without a graph of stages (PipeDream, Megatron, DAPPLE, Piper) impose an order on stages that do not depend on
each other (GraphPipe, section 2). A plan of theirs run here would not wait; to compare with what they do, the order is
made explicit as edges that carry nothing (`as_sequential`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import networkx as nx
import numpy as np

from gpp_plugin.ir.block_graph import BlockEdge, BlockGraph
from gpp_plugin.ir.plan import ORDER_ONLY, PipelinePlan, StageEdge
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.plan.costs.collective_costs import boundary_us, link_us_per_byte
from gpp_plugin.plan.costs.cost_model import CostModel, Floats, interval_sums, prefix_sums, us_per_sample
from gpp_plugin.plan.costs.estimate import evaluate_us, exposed_us
from gpp_plugin.plan.graphpipe.intervals import interval_bytes
from gpp_plugin.plan.make import StageDraft, build_plan, linear_order, make_drafts, with_in_flight
from gpp_plugin.plan.memory.operator_chain import OperatorChain
from gpp_plugin.plan.request import BatchRules, Ints, PlanRequest, SizeClasses, batch_rules
from gpp_plugin.plan.selection import busiest_us, quickest_in_flight
from gpp_plugin.schedule.build import plan_in_flight

# What ZeRO's data parallelism needs of a device, for comparison with pipelines of the same model.
#
# Every rank computes its share of the samples through the whole model (Rajbhandari et al., 2020):
#
#     stage 2   parameters whole; gradients and optimizer state shared out
#     stage 3   parameters too; the layer in use and the next one are gathered


def zero_memory_bytes(
    chain: OperatorChain, *, num_ranks: int, zero_stage: int, bounds: Sequence[int]
) -> float:
    """Return the peak of one rank that computes the chain's samples at a time.

    Args:
        bounds: where layers begin, and the number of operators.

    Raises:
        ValueError: ``zero_stage`` is neither 2 nor 3.
    """
    if zero_stage not in (2, 3):
        raise ValueError(f"zero_stage is {zero_stage}; this model has 2 and 3")
    num = chain.num_blocks
    parameters = float(chain.parameters[num])
    shared = chain.held_bytes(0, num, 1) - parameters
    if zero_stage == 2:
        held = parameters + shared / num_ranks
    else:
        layers = np.diff(chain.parameters[list(bounds)])
        held = (parameters + shared) / num_ranks + 2 * float(layers.max(initial=0.0))
    return held + chain.saved_bytes(0, num) + chain.transient(0, num)


class ChainCosts:
    """Costs of every interval [start, stop) of the blocks in linear order, at one micro-batch size.

    An interval that must have another size (it mixes samples, or the user fixes it) has its costs at that one.
    """

    def __init__(self, request: PlanRequest, costs: CostModel, rules: BatchRules, wish: int) -> None:
        self.request, self.costs, self.rules, self.wish = request, costs, rules, wish
        self.link_us_per_byte = link_us_per_byte(request.cluster, request.num_ranks)
        self.order = linear_order(request.graph)
        self.num_blocks = len(self.order)
        self.rows = costs.indices(self.order)
        self.limit = min(request.rank_limits[rank] for rank in range(request.num_ranks))
        self._held = [
            self._prefix(values)
            for values in (costs.parameter_bytes, costs.gradient_bytes, costs.optimizer_bytes)
        ]
        saved = costs.saved_per_sample, costs.saved_fixed
        self._saved, self._saved_fixed = (interval_sums(self._prefix(values)) for values in saved)
        # what a stage keeps too that an earlier one is charged with
        for blocks, per_sample, fixed in costs.shared:
            flags = np.zeros((2, len(self.rows)))
            flags[0, blocks[0]], flags[1, blocks[1:]] = 1.0, 1.0
            first, others = (interval_sums(self._prefix(own)) > 0.5 for own in flags)
            self._saved += (others & ~first) * per_sample
            self._saved_fixed += (others & ~first) * fixed
        num = len(self.order)
        self._transient = np.zeros((num + 1, num + 1))
        for start, row in enumerate(self.rows):
            self._transient[start, start + 1 :] = costs.transient_per_sample[row]
        self._transient = np.maximum.accumulate(self._transient[::-1], axis=0)[::-1]
        self.boundary_bytes = interval_bytes(request.graph, [[row] for row in self.rows])
        self.size_classes = SizeClasses(rules, [block.name for block in request.graph.blocks])
        self._classes = self.size_classes.of(
            np.stack([interval_sums(self._prefix(flags)) for flags in self.size_classes.flags])
        )

    def _prefix(self, values: Floats) -> Floats:
        return prefix_sums(values[self.rows])

    def size_of(self, start: int, stop: int, degree: int) -> int | None:
        """Return the micro-batch size of an interval on ``degree`` ranks, or None where there is none."""
        return self.rules.micro_batch_size(self.order[start:stop], degree, self.wish)

    def _sizes(self, degree: int) -> Ints:
        """Return [start, stop] the micro-batch size of an interval, 0 where it is empty or has none."""
        sizes = self.size_classes.sizes(self._classes, degree, self.wish)
        return np.triu(sizes, 1)

    def us_per_sample(self, degree: int) -> Floats:
        """Return [start, stop]: what an interval on ``degree`` ranks takes a sample, its messages and reduction too.

        inf where the interval is empty or has no micro-batch size for that degree.
        """
        # All arrays are [start, stop]: differences of prefix sums, of which those on the diagonal and below it
        # (stop <= start) are no stages. Few sizes differ, so the times are worked out for all intervals at each size,
        # and a mask says where it holds.
        mini_batch = self.request.mini_batch
        sizes = self._sizes(degree)
        result = np.full(sizes.shape, np.inf)
        gradient = interval_sums(self._held[1])
        reduce_us = self.costs.reduction(degree).us(gradient)
        link_us = boundary_us(self.boundary_bytes, degree, self.link_us_per_byte)
        for size in map(int, np.unique(sizes[sizes > 0])):
            forward, backward = self.costs.block_times(size / degree)
            reducing = reduce_us * self.costs.num_reductions(mini_batch // size)
            behind = exposed_us(self.costs, reducing, interval_sums(self._prefix(backward)), gradient)
            time = us_per_sample(
                interval_sums(self._prefix(forward + backward)),
                size,
                reduce_us=behind / mini_batch,
                link_us=link_us,
            )
            result[sizes == size] = time[sizes == size]
        return result

    def memory(self, degree: int, in_flight: int) -> Floats:
        """Return [start, stop]: bytes of one rank with that many micro-batches in flight, or all where they are fewer.

        inf as in `us_per_sample`.
        """
        held = [interval_sums(prefix) for prefix in self._held]
        counts = [interval_sums(self._prefix(flags)) for flags in self.costs.reader_flags]
        inputs = (self.costs.input_bytes_of(counts, degree),)
        sizes = self._sizes(degree)
        result = np.full(sizes.shape, np.inf)
        for size in map(int, np.unique(sizes[sizes > 0])):
            local, count = size / degree, min(in_flight, self.request.mini_batch // size)
            saved = self._saved * local + self._saved_fixed
            transient = self._transient * local
            peak = self.costs.peak_bytes(
                held, saved, count, degree=degree, transient=transient, inputs=inputs
            )
            result[sizes == size] = peak[sizes == size]
        return result

    def cut_bytes(self, at: int) -> float:
        """Return the bytes a sample of all that is made before block ``at`` of the order and read from there on."""
        return float(self.boundary_bytes[0, at])

    def drafts(self, bounds: Sequence[tuple[int, int, int]]) -> list[StageDraft] | None:
        """Return the drafts of (start, stop, degree), or None where one has no micro-batch size."""
        groups = [self.order[start:stop] for start, stop, _ in bounds]
        return make_drafts(self.rules, groups, [degree for _, _, degree in bounds], self.wish)


def chains_of(request: PlanRequest) -> list[ChainCosts]:
    """Return the costs of a request's chain at each micro-batch size worth trying; at least one."""
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    return [ChainCosts(request, costs, rules, wish) for wish in rules.sizes_to_try]


def even_stage_counts(request: PlanRequest) -> list[int]:
    """Return the numbers of stages of equal degree that a request allows."""
    if request.num_stages is not None:
        return [request.num_stages]
    if request.data_parallel is not None:
        return [request.num_ranks // request.data_parallel]
    return [p for p in range(1, request.num_ranks + 1) if request.num_ranks % p == 0]


def best_sequential(
    request: PlanRequest,
    costs: CostModel,
    preferences: Iterable[Iterable[Sequence[StageDraft] | None]],
    *,
    planner: str,
) -> PipelinePlan | None:
    """Return the candidate that is quickest when run as a chain and fits as a chain, or None.

    The plan's own in-flight and time are those of its graph, which our runtime runs.

    Args:
        preferences: a candidate is the first of such a list that fits: what its planner prefers.
    """
    best: tuple[float, Sequence[StageDraft]] | None = None
    for drafts_in_turn in preferences:
        for drafts in drafts_in_turn:
            if drafts is None:
                continue
            if best is not None and busiest_us(request, costs, drafts) > best[0]:
                break
            found = _as_it_runs(request, costs, drafts)
            if found is not None:
                best = found if best is None or found[0] < best[0] else best
                break
    if best is None:
        return None
    plan = build_plan(request, best[1], planner=planner, costs=costs)
    return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))


def _as_it_runs(
    request: PlanRequest, costs: CostModel, drafts: Sequence[StageDraft]
) -> tuple[float, Sequence[StageDraft]] | None:
    """Return the time of a chain and its stages with the best number in flight; None: it does not fit."""
    chain = as_sequential(build_plan(request, drafts, planner="", costs=costs, is_named=False), costs)
    found = quickest_in_flight(request, costs, chain)
    if found is None:
        return None
    us, extra = found
    extra_of = {stage.blocks: more for stage, more in zip(chain.stages, extra, strict=True)}
    in_order = [tuple(sorted(draft.blocks, key=costs.index.__getitem__)) for draft in drafts]
    return us, [
        dataclasses.replace(draft, extra_in_flight=extra_of[blocks])
        for draft, blocks in zip(drafts, in_order, strict=True)
    ]


def as_sequential(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan with every stage after its predecessor in the list; for prediction only.

    Depth and in-flight become those of a chain, and memory with them: what the plan holds beyond what its graph needs,
    the chain holds beyond what a chain needs.
    """
    wanted = plan_in_flight(plan)
    extra = [stage.in_flight - count for stage, count in zip(plan.stages, wanted, strict=True)]
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
    return with_in_flight(dataclasses.replace(plan, edges=ordered), costs, extra=extra)


# The model itself in a line: every block also waits for the one before it in some order, by a tensor without bytes,
# which takes no time. Two orders: branch after branch, as linearised models are usually cut, and level by level, with
# which a stage may hold a slice of all branches.


def block_orders(graph: BlockGraph) -> list[list[str]]:
    """Return the orders to cut a model in, each once: branch after branch, and level by level."""
    levels = [name for level in nx.topological_generations(graph.digraph()) for name in level]
    branches = linear_order(graph)
    return [branches] if levels == branches else [branches, levels]


def in_order(request: PlanRequest, order: Sequence[str]) -> PlanRequest:
    """Return the request for a model whose blocks run one after the other, gradients the other way."""
    # On a -> c <- b in the order a, b, c the edge a -> b is added, of a tensor without elements; b -> c is there. One
    # is also added beside an edge that carries no gradient (a mask), for the way back.
    graph = request.graph
    tensors = dict(graph.tensors)
    is_there = {
        (edge.src, edge.dst) for edge in graph.edges if any(tensors[t].requires_grad for t in edge.tensors)
    }
    edges = list(graph.edges)
    for src, dst in zip(order, order[1:], strict=False):
        if (src, dst) not in is_there:
            name = f"{ORDER_ONLY} {dst}"
            edges.append(BlockEdge(src=src, dst=dst, tensors=(name,)))
            tensors[name] = TensorSpec(
                name=name,
                dtype="float32",
                shape=(graph.num_samples, 0),
                num_samples=graph.num_samples,
                layout=batch_layout(),
                requires_grad=True,
            )
    place = {name: i for i, name in enumerate(order)}
    chained = dataclasses.replace(
        graph,
        blocks=tuple(sorted(graph.blocks, key=lambda block: place[block.name])),
        edges=tuple(sorted(edges, key=lambda edge: (place[edge.src], place[edge.dst]))),
        tensors=tensors,
    )
    profile = dataclasses.replace(request.profile, graph=chained.fingerprint)
    return dataclasses.replace(request, graph=chained, profile=profile)
