"""The order of one stage's tasks, printed as ``2F0`` (stage 2, forward of micro-batch 0).

A micro-batch's backward is one task (B), or two: the input gradient (I), which other stages wait for, and
later the weight gradient (W). A forward may run in two halves of its samples, ``2F0a`` and ``2F0b``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TaskKind(enum.Enum):
    """What a task computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    """The part of a backward that makes the gradients of received tensors."""
    WEIGHT_GRADIENT = "W"
    """The rest of that backward: the gradients of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One forward or backward of one micro-batch on one stage, or a part of it.

    Args:
        half: 0 or 1 for the forward of only the first or second half of the samples; None for all.
    """

    stage: int
    kind: TaskKind
    micro_batch: int
    half: int | None = None

    def __str__(self) -> str:
        half = "" if self.half is None else "ab"[self.half]
        return f"{self.stage}{self.kind.value}{self.micro_batch}{half}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """The tasks of one stage in the order each of its ranks runs them.

    Args:
        num_in_flight: most micro-batches held, from the first forward to the B or W.
        joined: micro-batches run in halves whose outputs leave together, after the second half.
        turns: when each task is begun, in a simulation of all stages together, as numbers that count over all stages:
            the first order that is tried on ranks of several stages. Empty: none is known.
    """

    stage: int
    tasks: tuple[Task, ...]
    num_in_flight: int
    joined: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
