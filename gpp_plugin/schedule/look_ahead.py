"""Frozen branches run ahead: their forwards of the next mini-batch stand in the programs of this one.

Stages that depend on the mini-batch alone (`frozen_branch`) have nothing to wait for at a mini-batch's end but the
other stages. So a mini-batch is cut in two parts, the branch's forwards and all else, and parts of two mini-batches run
together. Of a frozen stage 0 and a trained stage 1 with two micro-batches each, where 2 and 3 are the next mini-batch's:

    whole    rank 0  F0 F1           step     as without look-ahead, where nothing was run ahead and nothing will be
             rank 1     F0 B0 F1 B1  step
    fill     rank 0  F2 F3                    the branch alone, before a first mini-batch
    steady   rank 0  F2 F3           step     rank 1 has what F0 and F1 read; while it works, F2's and F3's arrive
             rank 1  F0 B0 F1 B1     step
    last     rank 0                  step     no next mini-batch is known, or its shapes are to be met first
             rank 1  F0 B0 F1 B1     step

``fill`` and ``steady`` end with messages that nobody has read. They are received in the program that sends them, as of
asynchronous windows (`windows`), and the next program, ``steady`` or ``last``, reads them. Each part is lowered from one
global order, so a receive of the next mini-batch stands where its message is due by simulation.

Source: this project
Tests: tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import end_mini_batch, lower_graph
from gpp_plugin.schedule.messages import activation_bytes
from gpp_plugin.schedule.orders.forward_only import forward_only_stages, frozen_branch
from gpp_plugin.schedule.task_graph import TaskGraph, build_task_graph
from gpp_plugin.schedule.windows import (
    Programs,
    cut_graph,
    lengthened,
    part_durations,
    shift_message,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadPrograms:
    """The programs of all ranks for a plan whose frozen branch runs a mini-batch ahead.

    Micro-batches of the mini-batch that is trained count from 0, those of the next one go on from there.

    Args:
        branch: the stages that run ahead.
        fill, steady, last: as drawn above.
    """

    plan: PipelinePlan
    branch: frozenset[int]
    fill: Programs
    steady: Programs
    last: Programs

    def of_rank(self, rank: int) -> RankAhead:
        """Return one rank's programs."""
        fill, steady, last = (
            next(p for p in programs if p.rank == rank) for programs in (self.fill, self.steady, self.last)
        )
        received = fill.messages(InstructionKind.RECEIVE) if fill.stage not in self.branch else ()
        return RankAhead(
            is_ahead=fill.stage in self.branch,
            fill=fill,
            steady=steady,
            last=last,
            carried=tuple(moved_message(self.plan, message, -1) for message in received),
        )

    def most_carried_bytes(self, rank: int) -> float:
        """Return the most bytes that a rank holds of messages that came ahead of their mini-batch.

        What is here as ``steady`` begins goes with the forwards that read it, and the next mini-batch's comes.
        """
        own = self.of_rank(rank)
        edges = self.plan.edges
        sizes = {
            m: activation_bytes(edges[m.edge], m.samples.num_samples, m.has_whole_tensors) / _shares(self, m)
            for m in (*own.carried, *own.steady.messages(InstructionKind.RECEIVE))
            if edges[m.edge].src in self.branch
        }
        unread = set(own.carried)
        held = most = sum(sizes[m] for m in unread)
        for instruction in own.steady.instructions:
            if instruction.message in sizes and instruction.message not in unread:
                held += sizes[instruction.message]
                most = max(most, held)
            if instruction.task is not None:
                read = {m for m in unread if _is_read_by(m, instruction.task)}
                held -= sum(sizes[m] for m in read)
                unread -= read
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAhead:
    """The programs of one rank: of `AheadPrograms`.

    Args:
        is_ahead: the rank's stage runs ahead, so its tasks in ``steady`` are of the next mini-batch.
        carried: what ``steady`` and ``last`` read of the messages that were received before them.
    """

    is_ahead: bool
    fill: RankProgram
    steady: RankProgram
    last: RankProgram
    carried: tuple[Message, ...]


def lower_ahead(
    plan: PipelinePlan, *, tied_stages: Collection[int] = (), reduce_each_backward: bool = False
) -> AheadPrograms:
    """Return the programs of a plan whose frozen branch runs a mini-batch ahead.

    Args:
        tied_stages, reduce_each_backward: as for `lower_schedules`.

    Raises:
        ScheduleError, PlanError: the plan's own schedules cannot be lowered.
    """
    branch = frozen_branch(plan)
    trained = set(range(len(plan.stages))) - forward_only_stages(plan)
    counts = [plan.num_micro_batches(stage) for stage in range(len(plan.stages))]
    graph = build_task_graph(lengthened(plan, 2), repeated_schedules(plan, 2))

    def is_next(node: int) -> bool:
        return graph.micro_batch[node] >= counts[graph.stage[node]]

    def is_ahead(node: int) -> bool:
        return graph.stage[node] in branch and is_next(node)

    def is_now(node: int) -> bool:
        return graph.stage[node] not in branch and not is_next(node)

    def ended(programs: Programs) -> Programs:
        return end_mini_batch(
            plan, programs, trained, tied_stages=tied_stages, reduce_each_backward=reduce_each_backward
        )

    return AheadPrograms(
        plan=plan,
        branch=branch,
        fill=_lower_part(graph, is_ahead),
        steady=ended(_lower_part(graph, lambda node: is_ahead(node) or is_now(node))),
        last=ended(_lower_part(graph, is_now)),
    )


def repeated_schedules(plan: PipelinePlan, num_mini_batches: int) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in so many mini-batches, one behind the other; the branch is not held back."""
    branch = frozen_branch(plan)
    repeated = []
    for schedule in build_schedules(plan, forward_only_stages=forward_only_stages(plan)):
        count = plan.num_micro_batches(schedule.stage)
        firsts = range(0, num_mini_batches * count, count)
        tasks = [moved_task(task, first) for first in firsts for task in schedule.tasks]
        held = num_mini_batches * count if schedule.stage in branch else schedule.num_in_flight
        repeated.append(
            dataclasses.replace(
                schedule,
                tasks=tuple(tasks),
                num_in_flight=held,
                joined=tuple(first + m for first in firsts for m in schedule.joined),
            )
        )
    return tuple(repeated)


def moved_task(task: Task, micro_batches: int) -> Task:
    """Return a task as it is numbered after so many micro-batches more."""
    return dataclasses.replace(task, micro_batch=task.micro_batch + micro_batches)


def moved_message(plan: PipelinePlan, message: Message, mini_batches: int) -> Message:
    """Return a message as it is numbered after so many mini-batches more, each stage with its own micro-batches."""
    edge = plan.edges[message.edge]
    stages = (edge.src, edge.dst) if message.direction is Direction.ACTIVATION else (edge.dst, edge.src)
    at_src, at_dst = (mini_batches * plan.num_micro_batches(stage) for stage in stages)
    return shift_message(message, at_src, mini_batches * plan.mini_batch, at_dst=at_dst)


def _lower_part(graph: TaskGraph, is_inside: Callable[[int], bool]) -> Programs:
    part = cut_graph(graph, is_inside, has_updates=False)
    return lower_graph(part, part_durations(part))


def _is_read_by(message: Message, task: Task) -> bool:
    half = message.dst_half
    return message.dst_micro_batch == task.micro_batch and (half is None or half == task.half)


def _shares(programs: AheadPrograms, message: Message) -> int:
    """Return among how many senders the bytes of a message's samples are shared out, where tensors are shards."""
    edge = programs.plan.edges[message.edge]
    return programs.plan.stages[edge.src].tensor if edge.src_shard_axis is not None else 1
