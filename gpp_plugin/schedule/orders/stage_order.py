"""What the graph of a plan's stages says: sinks first, who is behind whom, who is waited for; a rank for each stage."""

from __future__ import annotations

import itertools

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan


def sinks_first(plan: PipelinePlan) -> list[int]:
    """Return the stage indices so that every stage comes after all its successors.

    Raises:
        PlanError: the stages depend on each other in a circle.
    """
    waiting = [0] * len(plan.stages)
    incoming: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        incoming[edge.dst].append(edge.src)
        waiting[edge.src] += 1
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for other in incoming[index]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    if len(order) < len(plan.stages):
        circle = [plan.stages[i].name for i, count in enumerate(waiting) if count]
        raise PlanError(f"the stages {circle} depend on each other in a circle; no schedule can run them")
    return order


def stages_behind(plan: PipelinePlan) -> list[set[int]]:
    """Return for each stage the stages that depend on it, directly or not."""
    behind: list[set[int]] = [set() for _ in plan.stages]
    successors: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        successors[edge.src].append(edge.dst)
    for index in sinks_first(plan):
        for other in successors[index]:
            behind[index] |= {other} | behind[other]
    return behind


def on_own_ranks(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with ranks of its own for every stage: itself where no stages share any."""
    if not plan.shares_ranks:
        return plan
    ends = itertools.accumulate(len(stage.ranks) for stage in plan.stages)
    return plan.with_each(
        ranks=[tuple(range(end - len(s.ranks), end)) for end, s in zip(ends, plan.stages, strict=True)]
    )


def sends_gradients(plan: PipelinePlan, stage: int) -> bool:
    """Return whether other stages wait for a stage's input gradients, so that splitting its backward helps."""
    return any(edge.dst == stage and edge.gradient_tensors for edge in plan.edges)
