"""The best chain of our own tools: what a model reaches without a graph of stages, everything else being equal.

Beside it a graph of stages shows what the graph alone is worth: both have the same planner and refinement, the same
micro-batch sizes, micro-batches in flight and costs, and whatever else the request allows.

A chain comes from the same planner on the same model, in which every block also waits for the one before it in some
order: by a tensor without bytes, which takes no time. Two orders are tried: branch after branch, as linearised models
are usually cut, and level by level, with which a stage may hold a slice of all branches.

Source: GraphPipe (arXiv 2406.17145), section 7.1, on what sequential pipelines can express
Tests: tests/plan/test_best_chain.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import networkx as nx

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.block_graph import BlockEdge, BlockGraph
from gpp_plugin.ir.plan import ORDER_ONLY, PipelinePlan
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.plan.linear_order import linear_order
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest


def best_chain(
    request: PlanRequest, *, planner: str = "auto", make: Callable[[PlanRequest], PipelinePlan] | None = None
) -> PipelinePlan:
    """Return the quickest chain that ``planner`` finds in any of the `block_orders`; its graph is that of `in_order`.

    Args:
        make: plans the model in an order, where more than a planner is to decide (schedules, say).

    Raises:
        PlanInfeasible: no chain fits; the message is that of the last order.
    """
    plans, problem = [], None
    for order in block_orders(request.graph):
        try:
            line = in_order(request, order)
            plans.append(make_plan(planner, line) if make is None else make(line))
        except PlanInfeasible as error:
            problem = error
    if problem is not None and not plans:
        raise problem
    return min(plans, key=lambda plan: plan.iteration_us)


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
    profile = dataclasses.replace(request.profile, graph=fingerprint(chained))
    return dataclasses.replace(request, graph=chained, profile=profile)
