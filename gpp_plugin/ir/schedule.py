"""The order of one stage's tasks, printed and parsed as ``2F0`` (stage 2, forward of micro-batch 0)."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from gpp_plugin.errors import ScheduleError


class TaskKind(enum.Enum):
    """What a task computes."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One forward or backward of one micro-batch on one stage."""

    stage: int
    kind: TaskKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


def parse_task(text: str) -> Task:
    """Read a task as `Task.__str__` writes it.

    Raises:
        ScheduleError: the text is not of that form.
    """
    match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
    if match is None:
        raise ScheduleError(f"not a task: {text!r}; write it as 2F0 (stage, F or B, micro-batch)")
    return Task(stage=int(match[1]), kind=TaskKind(match[2]), micro_batch=int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """The tasks of one stage in the order each of its ranks runs them.

    Args:
        num_in_flight: most micro-batches held between forward and backward.
    """

    stage: int
    tasks: tuple[Task, ...]
    num_in_flight: int
