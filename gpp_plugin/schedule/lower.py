"""From task orders to one program a rank that finishes even if every rank runs it serially.

`placement` decides where messages stand between the tasks; here they become instructions, and the
reductions and the optimizer step follow at the end. Two stages of one rank, one micro-batch:

    rank 0   F0  send x               receive dx  B0  reduce  step
    rank 1       receive x  F0  B0    send dx         reduce  step

A part of a longer schedule (`windows`) is lowered by the same code; what differs stands in its task graph.

ZeRO 2 keeps no whole gradients, so it needs a reduction behind every micro-batch's backward. A reduction is a
rendezvous of the stage's ranks, so it can stop programs that finish without it: rank a reduces before it sends what
rank b, by way of other stages, needs for its backward. What is tried first is one reduction after each backward, behind
the messages that follow it and before the next task; then all programs are executed serially, and a reduction at which
they stop is taken out on all ranks of its stage. That is always allowed, as a reduction takes all gradients that have
come together since the last one, and the one before the step remains.

    rank 0   F0  F1  B0  send  reduce  F2  B1  send  reduce  B2  send  reduce  step
    rank 1   F0  F1  B0  send  reduce  F2  B1  send  reduce  B2  send  reduce  step

Source: this project
Tests: tests/schedule/test_lower.py, tests/schedule/test_reductions.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.checks.order_check import has_backwards
from gpp_plugin.schedule.checks.rendezvous import execute_serially
from gpp_plugin.schedule.durations import Durations, nominal_durations, task_durations
from gpp_plugin.schedule.event_loop import Transfers, message_transfers, run_task_graph
from gpp_plugin.schedule.placement import Placement, place_messages, safe_placement
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
) -> tuple[RankProgram, ...]:
    """Return the program of every rank, in rank order.

    Args:
        tied_stages: stages that share a parameter with another one; they reduce its gradient at the end.
        forward_only_stages: stages whose schedules must have no backwards.
        reduce_each_backward: reduce gradients after each micro-batch's backward, not only at the end (ZeRO 2).
        costs: task durations to order by; the plan's by default. They affect speed, never correctness.
        cluster: links to order by; without one messages take no time.
        training: end with reductions and the optimizer step.

    Raises:
        ScheduleError: the schedules are incomplete, wait for each other, or do not fit the arguments.
        PlanError: micro-batches do not divide evenly, or an edge names no tensors.
    """
    # 1. tasks and messages as one graph; 2. when each would happen, simulated with the plan's times; 3. one global
    # order by those times, restricted to each rank, so that no two ranks can wait for each other (`placement`);
    # 4. instructions; 5. the tail that every rank runs once: reductions, and the step that all ranks agree on.
    graph = build_task_graph(plan, schedules)
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
    tied = frozenset(tied_stages)
    programs = []
    for program in lower_graph(graph, durations, transfers=transfers):
        tail = _tail(program.stage in trained, program.stage in tied) if training else ()
        programs.append(dataclasses.replace(program, instructions=(*program.instructions, *tail)))
    if training and reduce_each_backward:
        return reduce_after_backwards(plan, programs, trained)
    return tuple(programs)


def lower_graph(
    graph: TaskGraph, durations: list[float], *, transfers: Transfers | None = None
) -> tuple[RankProgram, ...]:
    """Return what each rank does of a task graph, of a mini-batch's or a part of one, in rank order.

    Args:
        durations: of every node, microseconds; they and ``transfers`` affect speed, never correctness.
    """
    times = run_task_graph(graph, durations, transfers=transfers)
    programs = _programs(graph, place_messages(graph, times))
    # Late receives are proven safe among tasks and messages. An update is more than that, a rendezvous of all ranks
    # of its stage: rank 1 may stand in it while rank 0, still before it, waits for a message that needs, by way of
    # other stages, what rank 1 sends behind it. The global order itself puts each update after the backwards on all
    # ranks of its stage, so its slots are safe with updates too.
    if graph.num_updates and execute_serially(graph.plan, {p.rank: p for p in programs}).stuck:
        return _programs(graph, safe_placement(graph, times))
    return programs


def _tail(is_trained: bool, is_tied: bool) -> tuple[Instruction, ...]:
    kinds = [InstructionKind.STEP]
    if is_tied:
        kinds.insert(0, InstructionKind.REDUCE_TIED)
    if is_trained:
        kinds.insert(0, InstructionKind.REDUCE_DATA)
    return tuple(Instruction(kind=kind) for kind in kinds)


def _programs(graph: TaskGraph, placement: Placement) -> tuple[RankProgram, ...]:
    """Return the programs of all ranks, their messages where ``placement`` puts them."""
    # (rank, slot) -> its messages there, in the order of the placement: both ends of a channel take it from there.
    sends: dict[tuple[int, int], list[Message]] = {}
    receives: dict[tuple[int, int], list[Message]] = {}
    for number in placement.order:
        message = graph.message(number)
        sends.setdefault((message.src_rank, placement.send_slot[number]), []).append(message)
        receives.setdefault((message.dst_rank, placement.receive_slot[number]), []).append(message)
    instructions = _instructions(graph)
    bodies = {}
    for lead, nodes in graph.orders.items():
        own = [instructions[node] for node in nodes]
        for rank in graph.members[lead]:
            bodies[rank] = _body(rank, own, sends, receives)
    return tuple(
        RankProgram(rank=rank, stage=graph.plan.stage_of_rank(rank), instructions=tuple(bodies[rank]))
        for rank in sorted(bodies)
    )


def _instructions(graph: TaskGraph) -> list[tuple[Instruction, ...]]:
    """Return what every node does in a program; ranks of a stage share the instructions of their tasks."""
    known: dict[Task, tuple[Instruction, ...]] = {}
    found: list[tuple[Instruction, ...]] = [_UPDATE] * graph.num_updates
    for node in graph.tasks:
        task = graph.task(node)
        if task not in known:
            known[task] = (Instruction(kind=InstructionKind.COMPUTE, task=task),)
        found.append(known[task])
    return found + [()] * graph.num_ends


def _body(
    rank: int,
    instructions: Sequence[tuple[Instruction, ...]],
    sends: Mapping[tuple[int, int], Sequence[Message]],
    receives: Mapping[tuple[int, int], Sequence[Message]],
) -> list[Instruction]:
    body: list[Instruction] = []
    for slot in range(len(instructions) + 1):
        key = (rank, slot)
        if key in sends or key in receives:
            group = Instruction(
                kind=InstructionKind.EXCHANGE,
                sends=tuple(sends.get(key, ())),
                receives=tuple(receives.get(key, ())),
            )
            body.append(group)
        if slot < len(instructions):
            body += instructions[slot]
    return body


_MAKES_GRADIENTS = (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)


def reduce_after_backwards(
    plan: PipelinePlan, programs: Sequence[RankProgram], stages: Collection[int]
) -> tuple[RankProgram, ...]:
    """Return ``programs`` with a reduction after each backward of ``stages``, as far as they still finish.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution and end with a reduction.
        stages: those to change; a stage of one rank has nothing to reduce.
    """
    wanted = {index for index in stages if plan.stages[index].degree > 1}
    left_out: set[tuple[int, int]] = set()
    while True:
        changed = tuple(
            _with_reductions(program, left_out) if program.stage in wanted else program
            for program in programs
        )
        stuck = _stuck_reductions(plan, changed)
        if not stuck:
            return changed
        left_out |= stuck


def _with_reductions(program: RankProgram, left_out: Collection[tuple[int, int]]) -> RankProgram:
    """Insert a reduction before the first task after each backward; a place is (stage, tasks before it)."""
    body: list[Instruction] = []
    num_tasks = 0
    is_due = False
    for instruction in program.instructions:
        if instruction.task is not None:
            if is_due and (program.stage, num_tasks) not in left_out:
                body.append(_REDUCE)
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
