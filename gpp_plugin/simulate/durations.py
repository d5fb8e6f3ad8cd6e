"""How long each task takes: from the plan, a mapping or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.task_graph import TaskGraph

Durations = Callable[[int, TaskKind, int, int], float] | Mapping[tuple[Any, ...], float]
"""Microseconds by (stage, kind, micro-batch, rank); a mapping may leave out the rank."""


def duration_reader(
    plan: PipelinePlan, durations: Durations | None
) -> Callable[[int, TaskKind, int, int], float]:
    """Return a function from (stage, kind, micro-batch, rank) to microseconds.

    Args:
        durations: where the plan's own times do not hold; None takes `Stage.forward_us` and `backward_us`.
    """
    if durations is None:
        times = {
            kind: [s.forward_us if kind is TaskKind.FORWARD else s.backward_us for s in plan.stages]
            for kind in TaskKind
        }
        return lambda stage, kind, micro_batch, rank: times[kind][stage]
    return durations if callable(durations) else _mapping_reader(durations)


def task_durations(graph: TaskGraph, durations: Durations | None) -> list[float]:
    """Return the microseconds of every node of ``graph``.

    Raises:
        PlanError: a mapping lacks a task, or a time is negative.
    """
    if durations is None:
        pairs = [(stage.forward_us, stage.backward_us) for stage in graph.plan.stages]
        return [pairs[s][backward] for s, backward in zip(graph.stage, graph.is_backward, strict=True)]
    read = duration_reader(graph.plan, durations)
    result = []
    for node, stage in enumerate(graph.stage):
        kind = TaskKind.BACKWARD if graph.is_backward[node] else TaskKind.FORWARD
        microseconds = read(stage, kind, graph.micro_batch[node], graph.rank[node])
        if not microseconds >= 0.0:
            raise PlanError(
                f"{graph.task(node)} on rank {graph.rank[node]} takes {microseconds} us; give a time of 0 or more"
            )
        result.append(microseconds)
    return result


def nominal_durations(graph: TaskGraph) -> list[float]:
    """Return the plan's times, or times by the number of samples where the plan has none."""
    stages = graph.plan.stages
    if any(stage.forward_us > 0.0 for stage in stages):
        return task_durations(graph, None)
    samples = [float(stage.local_batch_size) for stage in stages]
    return [
        samples[stage] * (2.0 if backward else 1.0)
        for stage, backward in zip(graph.stage, graph.is_backward, strict=True)
    ]


def _mapping_reader(durations: Mapping[tuple[Any, ...], float]) -> Callable[[int, TaskKind, int, int], float]:
    def read(stage: int, kind: TaskKind, micro_batch: int, rank: int) -> float:
        found = durations.get((stage, kind, micro_batch, rank))
        if found is None:
            found = durations.get((stage, kind, micro_batch))
        if found is None:
            raise PlanError(
                f"durations lack (stage {stage}, {kind.value}, micro-batch {micro_batch}[, rank {rank}]); add it"
            )
        return found

    return read
