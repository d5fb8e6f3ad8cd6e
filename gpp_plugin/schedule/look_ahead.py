"""Frozen branches run ahead: their forwards of the next mini-batch stand in the programs of this one.

Stages that depend on the mini-batch alone (`frozen_branch`) wait for nothing at a mini-batch's end but the others. So
a mini-batch is cut in two parts, the branch's forwards and all else, and parts of two mini-batches run
together. Of a frozen stage 0 and a trained stage 1 with two micro-batches each, 2 and 3 are the next mini-batch's:

    whole    rank 0  F0 F1           step     as without look-ahead: nothing was run ahead, and nothing will be
             rank 1     F0 B0 F1 B1  step
    fill     rank 0  F2 F3                    the branch alone, before a first mini-batch
    steady   rank 0  F2 F3           step     rank 1 has what F0 and F1 read; while it works, F2's and F3's arrive
             rank 1  F0 B0 F1 B1     step
    last     rank 0                  step     no next mini-batch is known, or its shapes are to be met first
             rank 1  F0 B0 F1 B1     step

``fill`` and ``steady`` end with messages that nobody has read. They are received in the program that sends them, as
those of asynchronous windows are (`windows`), and the next program, ``steady`` or ``last``, reads them. Each part is
lowered from one global order, so a receive of the next mini-batch stands where its message is due by simulation.

Where a frozen stage is on the ranks of trained ones, its forwards of the next mini-batch go where these would idle
(`shared_ranks`); what it makes for a stage of the same rank is handed over now and kept until the next program.

    rank 0, stages 0 and 1   1F0 1B0 0F2 (idle no more) 1F1 1B1 0F3   step

Source: this project
Tests: tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.event_loop import run_task_graph
from gpp_plugin.schedule.gathers import gather_around_tasks
from gpp_plugin.schedule.lower import end_mini_batch, lower_graph
from gpp_plugin.schedule.messages import activation_bytes
from gpp_plugin.schedule.orders.gpipe import forward_only_stages, frozen_branch
from gpp_plugin.schedule.shared_ranks import merge_chains
from gpp_plugin.schedule.task_graph import TaskGraph
from gpp_plugin.schedule.windows import (
    Programs,
    cut_graph,
    lengthened,
    part_durations,
    set_orders,
    shift_message,
)

Part = Literal["fill", "steady", "last"]


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
        return RankAhead(plan=self.plan, branch=self.branch, fill=fill, steady=steady, last=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAhead:
    """The programs of one rank, or of one of its stages: of `AheadPrograms`."""

    plan: PipelinePlan
    branch: frozenset[int]
    fill: RankProgram
    steady: RankProgram
    last: RankProgram

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages that the programs are of."""
        return self.steady.stages

    def program(self, part: Part) -> RankProgram:
        """Return the program of a part."""
        return {"fill": self.fill, "steady": self.steady, "last": self.last}[part]

    def of_stage(self, stage: int) -> RankAhead:
        """Return what the rank does for one of its stages."""
        fill, steady, last = (p.of_stage(stage) for p in (self.fill, self.steady, self.last))
        return dataclasses.replace(self, fill=fill, steady=steady, last=last)

    @property
    def is_ahead(self) -> bool:
        """Return whether the one stage runs ahead, so that its tasks in ``steady`` are of the next mini-batch."""
        return self.steady.stage in self.branch

    @property
    def carried(self) -> tuple[Message, ...]:
        """Return what ``steady`` and ``last`` read of the messages that were received before them."""
        return tuple(
            moved_message(self.plan, instruction.message, -1)
            for instruction in self.fill.instructions
            if instruction.message is not None
            and instruction.kind is InstructionKind.RECEIVE
            and self.fill.stage_of(instruction) not in self.branch
        )

    @property
    def most_bytes(self) -> int:
        """Return the most bytes that the rank ever holds of messages that came ahead, each stage by itself added up."""
        return round(sum(self.of_stage(stage)._most_of_stage() for stage in self.stages))

    def _most_of_stage(self) -> float:
        # What is here as the program begins goes with the tasks that read it, while the next mini-batch's comes.
        edges, carried = self.plan.edges, self.carried
        if not carried:
            return 0.0
        coming = [
            m
            for m in self.steady.messages(InstructionKind.RECEIVE)
            if m.samples.first_sample >= self.plan.mini_batch
        ]
        sizes = {
            m: activation_bytes(edges[m.edge], m.samples.num_samples, m.has_whole_tensors) / self._senders(m)
            for m in (*carried, *coming)
        }
        unread = set(carried)
        held = most = sum(sizes[m] for m in carried)
        for instruction in self.steady.instructions:
            message = instruction.message
            if message is not None and instruction.kind is InstructionKind.RECEIVE:
                held += sizes.get(message, 0.0)
                most = max(most, held)
            elif instruction.task is not None:
                read = {m for m in unread if _is_read_by(m, instruction.task)}
                held -= sum(sizes[m] for m in read)
                unread -= read
        return most

    def _senders(self, message: Message) -> int:
        """Return among how many senders the bytes of a message's samples are shared out, where they hold shards."""
        edge = self.plan.edges[message.edge]
        return self.plan.stages[edge.src].tensor if edge.src_shard_axis is not None else 1


def lower_ahead(
    plan: PipelinePlan, *, tied_stages: Collection[int] = (), reduce_each_backward: bool = False
) -> AheadPrograms:
    """Return the programs of a plan whose frozen branch runs a mini-batch ahead.

    Args:
        tied_stages, reduce_each_backward: as for `lower_schedules`.

    Raises:
        ScheduleError, PlanError: the plan's own schedules cannot be lowered.
    """
    trained = set(range(len(plan.stages))) - forward_only_stages(plan)

    def lowered(part: TaskGraph) -> Programs:
        return lower_graph(part, part_durations(part))

    def ended(part: TaskGraph) -> Programs:
        return end_mini_batch(
            plan, lowered(part), trained, tied_stages=tied_stages, reduce_each_backward=reduce_each_backward
        )

    parts = ahead_graphs(plan)
    return AheadPrograms(
        plan=plan,
        branch=frozen_branch(plan),
        fill=gather_around_tasks(plan, lowered(parts["fill"])),
        steady=gather_around_tasks(plan, ended(parts["steady"])),
        last=gather_around_tasks(plan, ended(parts["last"])),
    )


def ahead_graphs(plan: PipelinePlan) -> dict[str, TaskGraph]:
    """Return the tasks and messages of each part, without what ends a mini-batch: of two mini-batches in a row."""
    branch = frozen_branch(plan)
    counts = [plan.num_micro_batches(stage) for stage in range(len(plan.stages))]
    schedules = build_schedules(plan, forward_only_stages=forward_only_stages(plan))
    full = build_task_graph(lengthened(plan, 2), _repeated(plan, schedules, 2), is_merged=False)

    def cut(*, is_branch_in: bool, are_others_in: bool, is_merged: bool = True) -> TaskGraph:
        def is_inside(node: int) -> bool:
            stage = full.stage[node]
            is_next = full.micro_batch[node] >= counts[stage]
            return is_next and is_branch_in if stage in branch else are_others_in and not is_next

        return cut_graph(full, is_inside, has_updates=False, is_merged=is_merged)

    fill = cut(is_branch_in=True, are_others_in=False)
    steady = cut(is_branch_in=True, are_others_in=True, is_merged=False)
    last = cut(is_branch_in=False, are_others_in=True, is_merged=False)
    if plan.shares_ranks:
        _merge(last, _turns_of(last, schedules))
        _merge(steady, _turns_in_gaps(steady, fill, last))
    return {"fill": fill, "steady": steady, "last": last}


def _merge(part: TaskGraph, turns: Sequence[int] | None) -> None:
    set_orders(part, merge_chains(part, part.chains, turns, durations=part_durations(part)))


def _turns_of(last: TaskGraph, schedules: Sequence[StageSchedule]) -> list[int] | None:
    """Return the turns that the trained stages' tasks have in a whole mini-batch; None where these have none."""
    if not all(schedule.turns for schedule in schedules):
        return None
    turn_of = {task: turn for s in schedules for task, turn in zip(s.tasks, s.turns, strict=True)}
    found = [turn_of[last.task(node)] for node in last.tasks]
    return [*found, *[max(found, default=0) + 1] * last.num_ends]


def _turns_in_gaps(steady: TaskGraph, fill: TaskGraph, last: TaskGraph) -> list[int]:
    """Return a turn for each node of both parts together: the trained stages' as without the branch.

    The branch's tasks are put where their ranks idle, each into the first gap that holds it, so that none delays a
    trained stage's. On rank 1 of the stages ``0F`` (frozen, on ranks 0 and 1), 1 and 2, one micro-batch each:

        last     rank 0   1F0 .   .   .   1B0 1B0      rank 1   .   2F0 2B0 2B0
        steady   rank 0   1F0 0F1 .   .   1B0 1B0      rank 1   0F1 2F0 2B0 2B0
    """
    durations = part_durations(steady)
    start = [float("inf")] * len(durations)  # ends come last
    number = {_key(steady, node): node for node in steady.tasks}
    busy: dict[int, list[tuple[float, float]]] = {rank: [] for rank in steady.rank}
    times = run_task_graph(last, part_durations(last))
    for node in last.tasks:
        start[number[_key(last, node)]] = times.start[node]
        bisect.insort(busy[last.rank[node]], (times.start[node], times.end[node]))
    # Of the branch's tasks those before come first, and its messages take no time here.
    before: dict[int, list[int]] = {node: [] for node in range(len(fill.stage))}
    for node, follower in enumerate(fill.next_on_rank):
        if follower >= 0:
            before[follower].append(node)
    for source, target in zip(fill.source, fill.target, strict=True):
        before[target].append(source)
    ends = [0.0] * len(fill.stage)
    times = run_task_graph(fill, part_durations(fill))
    for node in sorted(fill.tasks, key=lambda node: (times.start[node], times.end[node])):
        own, rank = number[_key(fill, node)], fill.rank[node]
        ready = max((ends[other] for other in before[node]), default=0.0)
        start[own] = _first_gap(busy[rank], ready, durations[own])
        ends[node] = start[own] + durations[own]
        bisect.insort(busy[rank], (start[own], ends[node]))
    order = sorted(range(len(start)), key=lambda node: start[node])
    turns = [0] * len(order)
    for turn, node in enumerate(order):
        turns[node] = turn
    return turns


def _first_gap(busy: Sequence[tuple[float, float]], ready: float, us: float) -> float:
    """Return when a rank that is busy at these times, in order, first has so many microseconds from ``ready`` on."""
    now = ready
    for begin, end in busy:
        if begin - now >= us:
            break
        now = max(now, end)
    return now


def _key(graph: TaskGraph, node: int) -> tuple[Task, int]:
    return graph.task(node), graph.rank[node]


def repeated_schedules(plan: PipelinePlan, num_mini_batches: int) -> tuple[StageSchedule, ...]:
    """Return the order of every stage in so many mini-batches, one behind the other; the branch is not held back."""
    schedules = build_schedules(plan, forward_only_stages=forward_only_stages(plan))
    return _repeated(plan, schedules, num_mini_batches)


def _repeated(
    plan: PipelinePlan, schedules: Sequence[StageSchedule], num_mini_batches: int
) -> tuple[StageSchedule, ...]:
    branch = frozen_branch(plan)
    repeated = []
    for schedule in schedules:
        count = plan.num_micro_batches(schedule.stage)
        firsts = range(0, num_mini_batches * count, count)
        tasks = [moved_task(task, first) for first in firsts for task in schedule.tasks]
        held = num_mini_batches * count if schedule.stage in branch else schedule.num_in_flight
        repeated.append(
            dataclasses.replace(
                schedule,
                tasks=tuple(tasks),
                num_in_flight=held,
                turns=(),
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


def _is_read_by(message: Message, task: Task) -> bool:
    half = message.dst_half
    return message.dst_micro_batch == task.micro_batch and (half is None or half == task.half)
