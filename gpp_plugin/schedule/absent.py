"""Which stages run a loss unit, and which edges carry something of it, where units lack whole branches of the model.

A unit without images runs no vision tower: no task, no message, no gradient there. With units as the samples of a
plan (`runtime.unit_lane`) every task is of one unit, so what is left out of a mini-batch's task graph are nodes and
messages:

    units          image  text  image  text
    stage vision   F0           F2                  B0  B2
    stage text     F0     F1    F2     F3   B3  B1  B2  B0

Each stage's order is that of the whole schedule without the tasks of absent units. A part of an order that finishes
finishes too: whoever waited for an absent task waits for nothing now. `validate_programs` proves the programs anew.

Source: this project
Tests: tests/schedule/test_absent.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What there is of each unit of a mini-batch; units are the samples of the plan.

    Args:
        stages: of each unit, the stages that run it.
        edges: of each unit, the edges that carry something of it; both of their stages run it.
    """

    stages: tuple[frozenset[int], ...]
    edges: tuple[frozenset[int], ...]

    def check(self, plan: PipelinePlan) -> None:
        """Refuse a plan whose tasks are not of one unit each, or an edge of a unit that one of its stages lacks.

        Raises:
            ScheduleError: says which.
        """
        cut = [s.name for s in plan.stages if s.local_batch_size != 1 or s.num_sliced]
        if cut or not len(self.stages) == len(self.edges) == plan.mini_batch:
            raise ScheduleError(
                f"{len(self.stages)} units for a mini-batch of {plan.mini_batch}, stages {cut} take other than one "
                "at a time; give a plan of units"
            )
        for unit, (stages, edges) in enumerate(zip(self.stages, self.edges, strict=True)):
            for index in edges:
                if not {plan.edges[index].src, plan.edges[index].dst} <= stages:
                    raise ScheduleError(
                        f"edge {plan.edge_name(index)} carries unit {unit}, which runs on stages {sorted(stages)} only"
                    )

    def is_run(self, plan: PipelinePlan, task: Task, rank: int) -> bool:
        """Return whether a rank runs a task of its stage's schedule."""
        unit = plan.stages[task.stage].samples(task.micro_batch, rank).first_sample
        return task.stage in self.stages[unit]


def own_tasks(
    plan: PipelinePlan, tasks: Sequence[Task], rank: int, presence: Presence | None
) -> tuple[Task, ...]:
    """Return those tasks of a stage's schedule that one of its ranks runs."""
    if presence is None:
        return tuple(tasks)
    return tuple(task for task in tasks if presence.is_run(plan, task, rank))
