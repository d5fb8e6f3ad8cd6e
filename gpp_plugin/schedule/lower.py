"""From task orders to one program a rank that finishes even if every rank runs it serially.

`placement` puts all tasks and messages into one order; here they become instructions, and the reductions and the
optimizer step follow at the end. Two stages of one rank, one micro-batch:

    rank 0   F0  send x               receive dx  B0  reduce  step
    rank 1       receive x  F0  B0    send dx         reduce  step

A part of a longer schedule (`windows`) is lowered by the same code; what differs stands in its task graph.

ZeRO 2 and 3 keep no whole gradients, so they need a reduction behind every micro-batch's backward. A reduction is a
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
import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.plan import forward_only_stages as stages_without_backwards
from gpp_plugin.ir.program import Instruction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task
from gpp_plugin.schedule.build_graph import Presence, build_task_graph
from gpp_plugin.schedule.checks.order_check import LAST_KINDS, standing_at
from gpp_plugin.schedule.event_loop import (
    Durations,
    TaskTimes,
    Transfers,
    message_transfers,
    nominal_durations,
    run_task_graph,
    task_durations,
)
from gpp_plugin.schedule.gathers import gather_around_tasks
from gpp_plugin.schedule.task_graph import TaskGraph

# Where each message stands in the programs of its two ranks: one global order, restricted to each rank.
#
# All tasks and messages of all ranks are put into one order in which every task comes after the messages it needs and
# every message after the task that makes it: by start time in the simulation (a message counts from the end of its
# task), messages before tasks. A rank's program is what of it is the rank's: a send stands behind the task that makes
# it, and the receive at the same place of the order, among the receiver's tasks.
#
# Why nothing can stop that runs in this order, whatever waits for what on the way:
#
# - A host that launches its program in order waits before the next launch for earlier launches at most: by a wait for
#   the device (an allocator that frees memory, a kernel that is loaded at its first use, a synchronise), or not at
#   all.
# - On the device a launch waits for earlier launches of the same rank at most, as streams and
#   hardware queues are first in, first out; and a message by its other end, as transfers are rendezvous.
# - So take the first item of the global order that has not happened. All before it has, on every rank: it is launched
#   on its ranks, nothing before it is left in their queues, both ends of a message stand there. It happens. The tensor
#   ranks of a data position run each task together: it is one thing in that order, after the messages of all of them.
#
# That needs one order for all ranks (two ranks that restrict different orders may each wait for the other's later
# item) and each message to be a launch of its own, or a part of one with its neighbours. It does not need a number of
# hardware queues, streams that do not share one, or a device that nothing waits for: a receive that stood any earlier,
# before its send in the order, would.
#
#     rank 0   F0  send x            F1  ...                a wait at * holds rank 1 until x came: rank 0 needs nothing
#     rank 1       receive x *  F0       ...                of rank 1 to send it
#
#     rank 0   F0  receive dy *  send x                     a wait at * waits for dy, rank 1 for x: both stand still
#     rank 1       receive x  F0  B0  send dy               (dy comes after x in any order: this is none)
#
# What it costs: a receive begins when the receiver's stream comes to it, which is before the first of its tasks that
# starts after the send ends; a task that was under way by then may delay the transfer, nothing else does.


def global_order(graph: TaskGraph, times: TaskTimes) -> Iterator[int]:
    """Yield tasks as their node n and messages as ~m: by start time, each after what it waits for."""
    # A linear extension of "waits for": the graph has no circles (`run_task_graph` would have raised), so something
    # is always ready until everything has been yielded. For the example of `task_graph`, with times F 1 and B 2:
    #
    #     0  ~0  1  4  ~1  6  ~2  2  5  7  ~3  3        (node 0, message 0, node 1, ...)
    #
    # and so for rank 0 (nodes 0 to 3) F0, send 0, F1, send 1, receive 2, B0, receive 3, B1.
    waits = list(graph.num_waits)
    # (start, 0 for a message, number): at one time messages go first, so that sends are not delayed.
    heap = [(times.start[node], 1, node) for node, count in enumerate(waits) if count == 0]
    heapq.heapify(heap)

    def release(node: int) -> None:
        waits[node] -= 1
        if waits[node] == 0:
            heapq.heappush(heap, (times.start[node], 1, node))

    while heap:
        _, is_task, number = heapq.heappop(heap)
        if not is_task:
            yield ~number
            release(graph.target[number])
            continue
        yield number
        for message in graph.messages_of(number):
            heapq.heappush(heap, (times.end[number], 0, message))
        if graph.next_on_rank[number] >= 0:
            release(graph.next_on_rank[number])
        for locked in graph.unlocks.get(number, ()):
            release(locked)


_UPDATE = (InstructionKind.REDUCE_DATA, InstructionKind.STEP)
"""What an update of a task graph is in a program."""


def lower_schedules(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    *,
    tied_stages: Collection[int] = (),
    forward_only_stages: frozenset[int] | None = None,
    reduce_each_backward: bool = False,
    costs: Durations | None = None,
    cluster: Cluster | None = None,
    training: bool = True,
    presence: Presence | None = None,
) -> tuple[RankProgram, ...]:
    """Return the program of every rank, in rank order; with gathers of the stages that need some (`gathers`).

    Args:
        tied_stages: stages that share a parameter with another one; they reduce its gradient at the end.
        forward_only_stages: stages whose schedules must have no backwards; None: as of `build_schedules`.
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
    trained = graph.trained
    if forward_only_stages is None:
        forward_only_stages = stages_without_backwards(plan)
    if not training and trained:
        raise ScheduleError(f"stages {sorted(trained)} run backwards in evaluation; use forward_schedules")
    if training and trained != set(range(len(plan.stages))) - forward_only_stages:
        raise ScheduleError(
            f"stages {sorted(trained)} run backwards and stages {sorted(forward_only_stages)} must not; give "
            "build_schedules and lower_schedules the same forward_only_stages"
        )
    durations = nominal_durations(graph) if costs is None else task_durations(graph, costs)
    programs = lower_graph(graph, durations, transfers=message_transfers(graph, cluster))
    if training:
        programs = end_mini_batch(
            plan, programs, trained, tied_stages=tied_stages, reduce_each_backward=reduce_each_backward
        )
    return gather_around_tasks(plan, programs)


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
    # The reductions of a rank's stages, each kind in the order of stages as on all ranks, and the one step.
    ended = []
    for program in programs:
        stages = program.stages
        tail = [program.instruction(InstructionKind.REDUCE_DATA, s) for s in stages if s in trained]
        tail += [program.instruction(InstructionKind.REDUCE_TIED, s) for s in stages if s in tied_stages]
        tail.append(Instruction(kind=InstructionKind.STEP))
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
    stages_of = {rank: graph.plan.stages_of_rank(rank) for rank in bodies}
    # Each item of the one order is appended to the end of its ranks' programs: a message to its two, a task to all
    # ranks that run it together.
    for item in global_order(graph, times):
        if item < 0:
            message = graph.message(~item)
            bodies[message.src_rank].append(Instruction(kind=InstructionKind.SEND, message=message))
            bodies[message.dst_rank].append(Instruction(kind=InstructionKind.RECEIVE, message=message))
            continue
        for rank in graph.members[graph.rank[item]]:
            bodies[rank] += _instructions(graph, item, known, is_named=len(stages_of[rank]) > 1)
    edges = tuple((edge.src, edge.dst) for edge in graph.plan.edges)
    return tuple(
        RankProgram(
            rank=rank, stages=stages, instructions=tuple(body), edges=edges if len(stages) > 1 else ()
        )
        for rank, body in sorted(bodies.items())
        for stages in (stages_of[rank],)
    )


def _instructions(
    graph: TaskGraph, node: int, known: dict[Task, Instruction], *, is_named: bool
) -> tuple[Instruction, ...]:
    """Return what a node does in a program; ranks of a stage share the instructions of their tasks.

    Args:
        known: those that there are.
        is_named: the rank holds several stages, so an update says of which it is.
    """
    if node < graph.num_updates:
        stage = graph.stage[node] if is_named else None
        return tuple(Instruction(kind=kind, stage=stage) for kind in _UPDATE)
    if node not in graph.tasks:
        return ()  # the end of a part's stage does nothing: it waits for what is for later parts
    task = graph.task(node)
    if task not in known:
        known[task] = Instruction(kind=InstructionKind.COMPUTE, task=task)
    return (known[task],)


def reduce_after_backwards(
    plan: PipelinePlan, programs: Sequence[RankProgram], stages: Collection[int]
) -> tuple[RankProgram, ...]:
    """Return ``programs`` with a reduction after each backward of ``stages``, as far as they still finish.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution and end with a reduction.
        stages: those to change; a stage of one rank has nothing to reduce.
    """
    # Ranks of a stage that run different tasks, as their units lack other branches, reduce once, at the end.
    tasks: dict[int, set[tuple[Task, ...]]] = defaultdict(set)
    for program in programs:
        for stage in program.stages:
            tasks[stage].add(tuple(task for task in program.tasks if task.stage == stage))
    wanted = {index for index in stages if plan.stages[index].num_replicas > 1 and len(tasks[index]) == 1}
    attempts: dict[_Place, int] = defaultdict(int)
    while True:
        changed = tuple(_with_reductions(program, wanted, attempts) for program in programs)
        # the last reduction stays; ranks that stand there wait for one that moves
        standing = standing_at(plan, changed, InstructionKind.REDUCE_DATA)
        stuck = {(stage, over) for stage, over, left in standing if left}
        if not stuck:
            return changed
        for place in stuck:
            attempts[place] += 1


_Place = tuple[int, int]
"""A stage, and how many of its tasks are over."""


def _with_reductions(
    program: RankProgram, stages: Collection[int], attempts: Mapping[_Place, int]
) -> RankProgram:
    """Insert a reduction after each backward: before the next task, or at the second attempt behind what is sent.

    Args:
        stages: those that reduce so.
        attempts: how often a reduction stopped the programs; twice leaves it out.
    """
    # ``due`` are stages whose backward is over and whose reduction is still to come. "Before the next task" is before
    # that of any stage of the rank, and a local transfer's two halves stay together. A stage's last one is in the tail.
    if not any(stage in stages for stage in program.stages):
        return program
    body: list[Instruction] = []
    num_tasks = dict.fromkeys(program.stages, 0)
    totals = Counter(task.stage for task in program.tasks)
    due: list[int] = []
    for instruction in program.instructions:
        message = instruction.message
        is_sent = message is not None and (
            instruction.kind is InstructionKind.SEND or message.is_local_transfer
        )
        for stage in tuple(due):
            attempt = attempts.get((stage, num_tasks[stage]), 0)
            if instruction.task is not None or (attempt == 1 and not is_sent):
                due.remove(stage)
                if attempt < 2:
                    body.append(program.instruction(InstructionKind.REDUCE_DATA, stage))
        task = instruction.task
        if task is not None:
            num_tasks[task.stage] += 1
            is_last = num_tasks[task.stage] == totals[task.stage]
            if task.stage in stages and task.kind in LAST_KINDS and not is_last:
                due.append(task.stage)
        body.append(instruction)
    return dataclasses.replace(program, instructions=tuple(body))
