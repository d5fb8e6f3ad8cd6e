"""From task orders to one program a rank that finishes even if every rank runs it serially.

`placement` puts all tasks and messages into one order; here they become instructions, and the reductions and the
optimizer step follow at the end. Two stages of one rank, one micro-batch:

    rank 0   F0  send x               receive dx  B0  reduce  step
    rank 1       receive x  F0  B0    send dx         reduce  step

A part of a longer schedule (`windows`) is lowered by the same code; what differs stands in its task graph.

ZeRO 2 keeps no whole gradients, so it needs a reduction behind every micro-batch's backward. A reduction is a
rendezvous of the stage's ranks, so it can stop programs that finish without it: rank a reduces before it sends what
rank b, by way of other stages, needs for its backward. What is tried first is one reduction after each backward, before
the next task; then all programs are executed serially, and a reduction at which they stop is moved, on all ranks of its
stage, to right behind what the backward sends, before the receives that stand there; one at which they still stop is
taken out. That is always allowed, as a reduction takes all gradients that have come together since the last one, and
the one before the step remains.

    rank 0   F0  F1  B0  send  reduce  F2  B1  send  reduce  B2  send  reduce  step
    rank 1   F0  F1  B0  send  reduce  F2  B1  send  reduce  B2  send  reduce  step

Source: this project
Tests: tests/schedule/test_lower.py, tests/schedule/test_reductions.py
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.absent import Presence
from gpp_plugin.schedule.checks.order_check import has_backwards
from gpp_plugin.schedule.checks.rendezvous import execute_serially
from gpp_plugin.schedule.durations import Durations, nominal_durations, task_durations
from gpp_plugin.schedule.event_loop import Transfers, message_transfers, run_task_graph
from gpp_plugin.schedule.placement import global_order
from gpp_plugin.schedule.task_graph import TaskGraph, build_task_graph

_REDUCE = Instruction(kind=InstructionKind.REDUCE_DATA)
_UPDATE = (_REDUCE, Instruction(kind=InstructionKind.STEP))
"""What an update of a task graph is in a program."""


def lower_schedules(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    *,
    tied_stages: Collection[int] = (),
    forward_only_stages: frozenset[int] = frozenset(),
    reduce_each_backward: bool = False,
    costs: Durations | None = None,
    cluster: Cluster | None = None,
    training: bool = True,
    presence: Presence | None = None,
) -> tuple[RankProgram, ...]:
    """Return the program of every rank, in rank order.

    Args:
        tied_stages: stages that share a parameter with another one; they reduce its gradient at the end.
        forward_only_stages: stages whose schedules must have no backwards.
        reduce_each_backward: reduce gradients after each micro-batch's backward, not only at the end (ZeRO 2).
        costs: task durations to order by; the plan's by default. They affect speed, never correctness.
        cluster: links to order by; without one messages take no time.
        training: end with reductions and the optimizer step.
        presence: as of `build_task_graph`.

    Raises:
        ScheduleError: the schedules are incomplete, wait for each other, or do not fit the arguments.
        PlanError: micro-batches do not divide evenly, or an edge names no tensors.
    """
    # 1. tasks and messages as one graph; 2. when each would happen, simulated with the plan's times; 3. one global
    # order by those times, restricted to each rank, so that no two ranks can wait for each other (`placement`);
    # 4. instructions; 5. the tail that every rank runs once: reductions, and the step that all ranks agree on.
    graph = build_task_graph(plan, schedules, presence=presence)
    trained = {schedule.stage for schedule in schedules if has_backwards(schedule)}
    if not training and trained:
        raise ScheduleError(f"stages {sorted(trained)} run backwards in evaluation; use forward_schedules")
    if training and trained != set(range(len(plan.stages))) - forward_only_stages:
        raise ScheduleError(
            f"stages {sorted(trained)} run backwards and stages {sorted(forward_only_stages)} must not; give "
            "build_schedules and lower_schedules the same forward_only_stages"
        )
    durations = nominal_durations(graph) if costs is None else task_durations(graph, costs)
    transfers = message_transfers(graph, cluster) if cluster is not None else None
    programs = lower_graph(graph, durations, transfers=transfers)
    if not training:
        return programs
    return end_mini_batch(
        plan, programs, trained, tied_stages=tied_stages, reduce_each_backward=reduce_each_backward
    )


def end_mini_batch(
    plan: PipelinePlan,
    programs: Sequence[RankProgram],
    trained: Collection[int],
    *,
    tied_stages: Collection[int],
    reduce_each_backward: bool,
) -> tuple[RankProgram, ...]:
    """Return the programs with what ends a mini-batch: reductions, and the step that all ranks agree on.

    Args:
        trained: stages that run backwards.
        tied_stages, reduce_each_backward: as for `lower_schedules`.
    """
    ended = []
    for program in programs:
        tail = _tail(program.stage in trained, program.stage in tied_stages)
        ended.append(dataclasses.replace(program, instructions=(*program.instructions, *tail)))
    return reduce_after_backwards(plan, ended, trained) if reduce_each_backward else tuple(ended)


def lower_graph(
    graph: TaskGraph, durations: list[float], *, transfers: Transfers | None = None
) -> tuple[RankProgram, ...]:
    """Return what each rank does of a task graph, of a mini-batch's or a part of one, in rank order.

    Args:
        durations: of every node, microseconds; they and ``transfers`` affect speed, never correctness.
    """
    times = run_task_graph(graph, durations, transfers=transfers)
    known: dict[Task, Instruction] = {}
    bodies: dict[int, list[Instruction]] = {rank: [] for row in graph.members.values() for rank in row}
    # Each item of the one order goes to the end of its ranks' programs: a message to its two, a task to all ranks that
    # run it together.
    for item in global_order(graph, times):
        if item < 0:
            message = graph.message(~item)
            bodies[message.src_rank].append(Instruction(kind=InstructionKind.SEND, message=message))
            bodies[message.dst_rank].append(Instruction(kind=InstructionKind.RECEIVE, message=message))
            continue
        instructions = _instructions(graph, item, known)
        for rank in graph.members[graph.rank[item]]:
            bodies[rank] += instructions
    return tuple(
        RankProgram(rank=rank, stages=graph.plan.stages_of_rank(rank), instructions=tuple(bodies[rank]))
        for rank in sorted(bodies)
    )


def _tail(is_trained: bool, is_tied: bool) -> tuple[Instruction, ...]:
    kinds = [InstructionKind.STEP]
    if is_tied:
        kinds.insert(0, InstructionKind.REDUCE_TIED)
    if is_trained:
        kinds.insert(0, InstructionKind.REDUCE_DATA)
    return tuple(Instruction(kind=kind) for kind in kinds)


def _instructions(graph: TaskGraph, node: int, known: dict[Task, Instruction]) -> tuple[Instruction, ...]:
    """Return what a node does in a program; ranks of a stage share the instructions of their tasks.

    Args:
        known: those that there are.
    """
    if node < graph.num_updates:
        return _UPDATE
    if node not in graph.tasks:
        return ()  # the end of a part's rank does nothing: it waits for what is for later parts
    task = graph.task(node)
    if task not in known:
        known[task] = Instruction(kind=InstructionKind.COMPUTE, task=task)
    return (known[task],)


_MAKES_GRADIENTS = (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)


def reduce_after_backwards(
    plan: PipelinePlan, programs: Sequence[RankProgram], stages: Collection[int]
) -> tuple[RankProgram, ...]:
    """Return ``programs`` with a reduction after each backward of ``stages``, as far as they still finish.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution and end with a reduction.
        stages: those to change; a stage of one rank has nothing to reduce.
    """
    # Ranks of a stage that run unlike tasks, as their units lack other branches, reduce once, at the end.
    tasks: dict[int, set[tuple[Task, ...]]] = defaultdict(set)
    for program in programs:
        tasks[program.stage].add(tuple(i.task for i in program.instructions if i.task is not None))
    wanted = {index for index in stages if plan.stages[index].degree > 1 and len(tasks[index]) == 1}
    attempts: dict[tuple[int, int], int] = defaultdict(int)
    while True:
        changed = tuple(
            _with_reductions(program, attempts) if program.stage in wanted else program
            for program in programs
        )
        stuck = _stuck_reductions(plan, changed)
        if not stuck:
            return changed
        for place in stuck:
            attempts[place] += 1


def _with_reductions(program: RankProgram, attempts: Mapping[tuple[int, int], int]) -> RankProgram:
    """Insert a reduction after each backward: before the next task, or at the second attempt behind what is sent.

    Args:
        attempts: (stage, tasks before it) -> how often it stopped the programs; twice leaves it out.
    """
    body: list[Instruction] = []
    num_tasks = 0
    is_due = False
    for instruction in program.instructions:
        attempt = attempts.get((program.stage, num_tasks), 0)
        is_there = instruction.task is not None or (
            attempt == 1 and instruction.kind is not InstructionKind.SEND
        )
        if is_due and is_there:
            is_due = False
            if attempt < 2:
                body.append(_REDUCE)
        if instruction.task is not None:
            num_tasks += 1
            is_due = instruction.task.kind in _MAKES_GRADIENTS
        body.append(instruction)
    return dataclasses.replace(program, instructions=tuple(body))


def _stuck_reductions(plan: PipelinePlan, programs: Sequence[RankProgram]) -> set[tuple[int, int]]:
    """Execute serially with rendezvous messages; return the places of the reductions at which ranks stand."""
    by_rank = {program.rank: program for program in programs}
    places = set()
    for rank, at in execute_serially(plan, by_rank).stuck.items():
        instructions = by_rank[rank].instructions
        if instructions[at].kind is InstructionKind.REDUCE_DATA:
            num_tasks = sum(instruction.task is not None for instruction in instructions[:at])
            total = sum(instruction.task is not None for instruction in instructions)
            if num_tasks < total:  # the last reduction stays; who stands there waits for one that goes
                places.add((by_rank[rank].stage, num_tasks))
    return places
