"""A chain of stages as sequential pipelines run it: every stage waits for the one before it.

Systems without a graph of stages (PipeDream, Megatron, DAPPLE, Piper) impose an order on stages that
do not depend on each other (GraphPipe, section 2). A plan of theirs run here would not wait; to compare
with what they do, the order is made explicit as edges that carry nothing.
"""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.make import with_in_flight

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
