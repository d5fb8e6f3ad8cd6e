"""How long each task takes: from the plan, a mapping or a function.

The parts of a task take what the plan says of them, and without that: half a forward half of the time, the
input and the weight gradient half of the backward each (for a stack of matrix products these are one product
of the same size each; what more a split costs is `with_split_costs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.task_graph import TaskGraph

Durations = Callable[[int, TaskKind, int, int], float] | Mapping[tuple[Any, ...], float]
"""Microseconds by (stage, kind, micro-batch, rank).

A mapping may leave out the rank, and name half a forward by one more entry, its half. Where it lacks a part
of a task, that takes half of the whole task's time; a function is called for I and W, and for whole forwards.
"""


def stage_task_us(stage: Stage, kind: TaskKind, half: int | None = None) -> float:
    """Return the microseconds that the plan gives a task of ``stage``: the one definition of its parts' times."""
    if kind is TaskKind.FORWARD:
        if half is None:
            return stage.forward_us
        # 0 means that halves were not measured: a kernel's start-up cost is then not counted twice.
        return stage.half_forward_us or stage.forward_us / 2.0
    if kind is TaskKind.BACKWARD:
        return stage.backward_us
    # Both are tested, since one may truly be 0: a stage without weights has no weight
    # gradient, and the first stage no input gradient.
    if not stage.input_gradient_us and not stage.weight_gradient_us:
        return stage.backward_us / 2.0
    return stage.input_gradient_us if kind is TaskKind.INPUT_GRADIENT else stage.weight_gradient_us


def with_split_costs(
    plan: PipelinePlan, *, half_overhead_us: float = 0.0, split_factor: float = 1.0, input_share: float = 0.5
) -> PipelinePlan:
    """Return ``plan`` with times for the parts of its stages' tasks.

    Args:
        half_overhead_us: what half a forward takes beyond half of the forward.
        split_factor: input and weight gradient together over the whole backward, as measured.
        input_share: share of the input gradient in that.

    Raises:
        ValueError: an overhead is negative or the share is not between 0 and 1.
    """
    if half_overhead_us < 0.0 or split_factor <= 0.0 or not 0.0 < input_share < 1.0:
        raise ValueError(
            f"half_overhead_us={half_overhead_us} split_factor={split_factor} input_share={input_share}; "
            "give an overhead of 0 or more, a positive factor and a share between 0 and 1"
        )
    # Worked example: forward 10 us, backward 20 us, half_overhead_us=1, split_factor=1.1, input_share=0.6
    # give half a forward 6 us, an input gradient of 20 * 1.1 * 0.6 = 13.2 us and a weight gradient of 8.8 us.
    return plan.with_each(
        half_forward_us=[stage.forward_us / 2.0 + half_overhead_us for stage in plan.stages],
        input_gradient_us=[s.backward_us * split_factor * input_share for s in plan.stages],
        weight_gradient_us=[s.backward_us * split_factor * (1.0 - input_share) for s in plan.stages],
    )


def duration_reader(plan: PipelinePlan, durations: Durations | None) -> Callable[[Task, int], float]:
    """Return a function from (task, rank) to microseconds.

    Args:
        durations: where the plan's own times do not hold; None takes the plan's (`stage_task_us`).
    """
    if durations is None:
        stages = plan.stages
        return lambda task, rank: stage_task_us(stages[task.stage], task.kind, task.half)
    return _function_reader(durations) if callable(durations) else _mapping_reader(durations)


def task_durations(graph: TaskGraph, durations: Durations | None) -> list[float]:
    """Return the microseconds of every node of ``graph``: of its slowest rank, for which the others wait.

    Raises:
        PlanError: a mapping lacks a task, or a time is negative.
    """
    if durations is None:
        return _planned(graph, graph.plan)
    result = []
    read = duration_reader(graph.plan, durations)
    for node in range(len(graph.stage)):
        task = graph.task(node)
        times = [read(task, rank) for rank in graph.members[graph.rank[node]]]
        # Written this way round so that NaN is refused too.
        if not min(times) >= 0.0:
            raise PlanError(
                f"{task} on rank {graph.rank[node]} takes {min(times)} us; give a time of 0 or more"
            )
        result.append(max(times))
    return result


def nominal_times(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan itself, or with times by the number of samples where it has none."""
    if any(stage.forward_us > 0.0 for stage in plan.stages):
        return plan
    # Plans without a profile (written by hand, in tests) still need *an* order: a sample's
    # forward takes 1 us, its backward 2 us, the usual ratio. What is lowered from it is correct
    # at any times; only its speed is a guess.
    samples = [float(stage.local_batch_size) for stage in plan.stages]
    return plan.with_each(forward_us=samples, backward_us=[2.0 * count for count in samples])


def nominal_durations(graph: TaskGraph) -> list[float]:
    """Return the plan's times, or times by the number of samples where the plan has none."""
    return _planned(graph, nominal_times(graph.plan))


def _planned(graph: TaskGraph, plan: PipelinePlan) -> list[float]:
    # A group is all tasks of a stage, kind and half, numbered consecutively: one look-up a group instead of
    # one a node, for planners that simulate thousands of candidates.
    result: list[float] = []
    for group in graph.groups:
        result += [stage_task_us(plan.stages[group.stage], group.kind, group.half)] * group.count
    return result


def _function_reader(durations: Callable[[int, TaskKind, int, int], float]) -> Callable[[Task, int], float]:
    def read(task: Task, rank: int) -> float:
        whole = durations(task.stage, task.kind, task.micro_batch, rank)
        return whole if task.half is None else whole / 2.0

    return read


def _mapping_reader(durations: Mapping[tuple[Any, ...], float]) -> Callable[[Task, int], float]:
    def find(task: Task, kind: TaskKind, rank: int) -> float | None:
        found = durations.get((task.stage, kind, task.micro_batch, rank))
        return durations.get((task.stage, kind, task.micro_batch)) if found is None else found

    def read(task: Task, rank: int) -> float:
        if task.half is None:
            found = find(task, task.kind, rank)
        else:
            found = durations.get((task.stage, task.kind, task.micro_batch, rank, task.half))
        if found is not None:
            return found
        is_whole = task.half is None and task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        kind = TaskKind.FORWARD if task.kind is TaskKind.FORWARD else TaskKind.BACKWARD
        whole = None if is_whole else find(task, kind, rank)
        if whole is None:
            raise PlanError(
                f"durations lack (stage {task.stage}, {task.kind.value}, micro-batch {task.micro_batch}[, rank "
                f"{rank}]){'' if task.half is None else f' or half {task.half} of it'}; add it"
            )
        return whole / 2.0

    return read
