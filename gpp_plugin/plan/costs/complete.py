"""Adds to a finished plan what running it without its model needs: boundary tensors, gradient bytes."""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile


def complete_plan(plan: PipelinePlan, graph: BlockGraph, profile: Profile) -> PipelinePlan:
    """Return the plan with the specs of its edges' tensors and the gradient bytes of its stages.

    Args:
        graph, profile: those the plan was made for.
    """
    costs = profile.by_block()
    stages = tuple(
        dataclasses.replace(stage, gradient_bytes=sum(costs[name].gradient_bytes for name in stage.blocks))
        for stage in plan.stages
    )
    names = dict.fromkeys(name for edge in plan.edges for name in (*edge.batch_tensors, *edge.whole_tensors))
    return dataclasses.replace(plan, stages=stages, tensors=tuple(graph.tensors[name] for name in names))
