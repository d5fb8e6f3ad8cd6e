"""Forwards alone: evaluation, and frozen stages in training."""

from __future__ import annotations

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind


def forward_only_stages(plan: PipelinePlan) -> frozenset[int]:
    """Return the stages through which no gradient flows in training: frozen, or before every trained parameter.

    Nobody sends them a gradient of their outputs. The stages that yield a loss have backwards.
    """
    trained = {edge.src for edge in plan.edges if edge.gradient_tensors}
    return frozenset(range(len(plan.stages))) - trained - set(plan.loss_stages())


def frozen_branch(plan: PipelinePlan) -> frozenset[int]:
    """Return the forward-only stages that depend on the mini-batch alone: all that is before them is forward-only too.

    Nothing that training changes reaches them, so they may run a mini-batch before its turn. A forward-only stage
    behind a trained one (it reads tensors without gradients) is none of them.
    """
    found = set(forward_only_stages(plan))
    while late := {edge.dst for edge in plan.edges if edge.src not in found and edge.dst in found}:
        found -= late
    return frozenset(found)


def forward_only_schedule(stage: int, micro_batches: int, *, num_in_flight: int) -> StageSchedule:
    """Return the forwards of one stage in order.

    Args:
        num_in_flight: most micro-batches run but not yet taken by every consumer.

    Raises:
        ValueError: a count is below 1.

    >>> " ".join(map(str, forward_only_schedule(2, 3, num_in_flight=1).tasks))
    '2F0 2F1 2F2'
    """
    if micro_batches < 1 or num_in_flight < 1:
        raise ValueError(
            f"stage {stage}: {micro_batches} micro-batches, {num_in_flight} in flight; both must be at least 1"
        )
    tasks = tuple(Task(stage=stage, kind=TaskKind.FORWARD, micro_batch=m) for m in range(micro_batches))
    return StageSchedule(stage=stage, tasks=tasks, num_in_flight=min(num_in_flight, micro_batches))
