"""Asynchronous 1F1B on a graph of stages (PipeDream, SOSP 2019, section 3.2): a pipeline that never drains.

Every stage holds k micro-batches, counted from the sinks, and continues without end: k forwards, then one backward
and one forward in turn. After each backward the stage updates its weights, so a micro-batch's backward comes k - 1
updates after its forward, and uses the weights of that forward.

A call of ``train_batch`` brings M micro-batches and runs one *window* of that order on every stage: the M forwards,
and after forward m the backward of m - k + 1. At a window's end nothing is left to do with what came in but k - 1
backwards a stage, so a stage never waits at the border. With k of 3, 2 and 1, and M = 2:

    stage 0   F0 F1        | F2 B0 F3 B1    | F4 B2 F5 B3    | ...
    stage 1   F0 F1 B0     | F2 B1 F3 B2    | F4 B3 F5 B4    | ...
    stage 2   F0 B0 F1 B1  | F2 B2 F3 B3    | F4 B4 F5 B5    | ...

After a few windows they repeat, shifted by M. What crosses the border are gradients: a stage whose successor holds
less gets them a window before it uses them. The windows of all stages together need nothing of later ones, because
a stage holds at least as many micro-batches as each of its successors.

Deviations from the paper: the order of a stage is fixed, not by priority of what has arrived; a graph, not a chain.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.2
Tests: tests/schedule/test_async.py
"""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, sinks_first
from gpp_plugin.ir.schedule import Task, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Which tasks of the endless order each window holds; windows count from 1.

    Args:
        micro_batches: of one window (M).
        in_flight: of each stage (k).
        vertical_sync: every stage uses weights as old as those of the stage that holds most.
    """

    micro_batches: int
    in_flight: tuple[int, ...]
    vertical_sync: bool = False

    @property
    def longest(self) -> int:
        """Return the most micro-batches that a stage holds."""
        return max(self.in_flight)

    @property
    def first_steady(self) -> int:
        """Return the first window of those that repeat: every stage runs M backwards in it."""
        return 1 - (1 - self.longest) // self.micro_batches

    def program_of(self, window: int) -> int:
        """Return the window, `first_steady` or one before it, that ``window`` is a shift of."""
        return min(window, self.first_steady)

    def tasks(self, stage: int, window: int, *, is_trained: bool = True) -> tuple[Task, ...]:
        """Return the stage's tasks in a window, in order.

        >>> windows = Windows(micro_batches=2, in_flight=(3, 2, 1))
        >>> " ".join(map(str, windows.tasks(1, 1) + windows.tasks(1, 2)))
        '1F0 1F1 1B0 1F2 1B1 1F3 1B2'
        """
        found = []
        for forward in range((window - 1) * self.micro_batches, window * self.micro_batches):
            found.append(Task(stage=stage, kind=TaskKind.FORWARD, micro_batch=forward))
            backward = forward - self.in_flight[stage] + 1
            if is_trained and backward >= 0:
                found.append(Task(stage=stage, kind=TaskKind.BACKWARD, micro_batch=backward))
        return tuple(found)

    def drain(self, stage: int, window: int, *, is_trained: bool = True) -> tuple[Task, ...]:
        """Return the backwards that are left after a window."""
        entered = window * self.micro_batches
        first = max(0, entered - self.in_flight[stage] + 1)
        left = range(first, entered) if is_trained else ()
        return tuple(Task(stage=stage, kind=TaskKind.BACKWARD, micro_batch=m) for m in left)

    def backward_after(self, task: Task, *, is_draining: bool) -> int | None:
        """Return the micro-batch whose backward is its stage's next task after ``task``; None if that is a forward."""
        if task.kind is TaskKind.FORWARD:
            return task.micro_batch - self.in_flight[task.stage] + 1
        return task.micro_batch + 1 if is_draining else None

    def staleness(self, stage: int) -> int:
        """Return the updates of a stage between the weights a micro-batch uses and its own update."""
        return (self.longest if self.vertical_sync else self.in_flight[stage]) - 1

    def has_peaked(self, window: int) -> bool:
        """Return whether every stage has held by the end of a window what it ever holds, of activations and weights.

        A set of weights is added by each of the first ``longest`` - 1 updates, the last of which comes as many
        forwards later.
        """
        return window * self.micro_batches >= max(1, 2 * (self.longest - 1))

    def num_reported(self, window: int) -> int:
        """Return how many losses are known when a window ends.

        Only those are waited for that are not waited for anyway: a loss is computed ``longest`` - 1 forwards after
        the first stage began the micro-batch. The first window waits for the first loss.
        """
        return max(1, window * self.micro_batches - self.longest + 1)


def windows_of(plan: PipelinePlan) -> Windows:
    """Return the windows of an asynchronous plan.

    Raises:
        PlanError: the plan cannot run so; says what to change.
    """
    check_asynchronous(plan)
    return Windows(
        micro_batches=plan.num_micro_batches(0),
        in_flight=tuple(stage.in_flight for stage in plan.stages),
        vertical_sync=plan.vertical_sync,
    )


def asynchronous_in_flight(plan: PipelinePlan) -> tuple[int, ...]:
    """Return the micro-batches each stage holds: one more than the most that a successor holds, one at a sink."""
    counts = [1] * len(plan.stages)
    for index in sinks_first(plan):
        counts[index] = max(
            (counts[edge.dst] + 1 for edge in plan.edges if edge.src == index), default=counts[index]
        )
    return tuple(counts)


def check_asynchronous(plan: PipelinePlan) -> None:
    """Refuse a plan whose stages cannot step after every micro-batch.

    Raises:
        PlanError: micro-batches differ between stages, an order is not 1F1B of whole tasks, or a stage holds less
            than a successor.
    """
    sizes = {stage.micro_batch_size for stage in plan.stages}
    if len(sizes) > 1:
        listed = ", ".join(f"{stage.name!r} {stage.micro_batch_size}" for stage in plan.stages)
        raise PlanError(
            "mode async: each micro-batch is one optimizer step of every stage, so all stages take the same number of "
            f"samples, and here they take {listed}; give all one size that every degree divides "
            f"(stages that mix samples compute {plan.loss_unit} a rank)"
        )
    for stage in plan.stages:
        if stage.schedule != "1f1b" or stage.k != 1 or stage.num_sliced:
            has = f"schedule {stage.schedule!r}, k {stage.k}, num_sliced {stage.num_sliced}"
            raise PlanError(
                f"mode async: stage {stage.name!r} has {has}; it runs 1f1b, k 1, num_sliced 0 only"
            )
    for edge in plan.edges:
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        if src.in_flight < dst.in_flight:
            raise PlanError(
                f"mode async: stage {src.name!r} holds {src.in_flight} micro-batches and its successor {dst.name!r} "
                f"{dst.in_flight}, which would wait for more; raise in_flight of {src.name!r} to {dst.in_flight + 1}"
            )
