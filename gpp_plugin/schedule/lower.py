"""From task orders to one program a rank that finishes even if every rank runs it serially.

One global order of all tasks and messages is taken and restricted to each rank; messages with no task
between them on a rank are then posted as one group.

Why this cannot deadlock with rendezvous messages and one queue a rank: in the global order every task
comes after the messages it needs and every message after the task that makes it, so the first thing
in that order that has not happened can always happen next. Posting adjacent messages of a rank
together only lets the later ones start sooner: nothing else of that rank lies between them.

The global order is by start time in the simulation (a message starts when its task ends), messages
before tasks. Sorted so, a send is posted as soon as its task has ended, and a rank that waits for a
message in its order waits at most the time of the transfer longer than it must.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.task_graph import TaskGraph, build_task_graph, has_backwards
from gpp_plugin.simulate.durations import Durations, nominal_durations, task_durations
from gpp_plugin.simulate.event_loop import TaskTimes, message_transfers, run_task_graph


def lower_schedules(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    *,
    tied_stages: Collection[int] = (),
    forward_only_stages: frozenset[int] = frozenset(),
    costs: Durations | None = None,
    cluster: Cluster | None = None,
    training: bool = True,
) -> tuple[RankProgram, ...]:
    """Return the program of every rank, in rank order.

    Args:
        tied_stages: stages that share a parameter with another one; they reduce its gradient at the end.
        forward_only_stages: stages whose schedules must have no backwards.
        costs: task durations to order by; the plan's by default. They affect speed, never correctness.
        cluster: links to order by; without one messages take no time.
        training: end with reductions and the optimizer step.

    Raises:
        ScheduleError: the schedules are incomplete, wait for each other, or do not fit the arguments.
        PlanError: micro-batches do not divide evenly, or an edge names no tensors.
    """
    trained = {schedule.stage for schedule in schedules if has_backwards(schedule)}
    if not training and trained:
        raise ScheduleError(f"stages {sorted(trained)} run backwards in evaluation; use forward_schedules")
    if training and (
        wrong := trained & forward_only_stages or set(range(len(plan.stages))) - trained - forward_only_stages
    ):
        raise ScheduleError(
            f"stages {sorted(wrong)}: backwards are scheduled where forward_only_stages forbids them, or are "
            "missing; give build_schedules and lower_schedules the same forward_only_stages"
        )
    graph = build_task_graph(plan, schedules)
    durations = nominal_durations(graph) if costs is None else task_durations(graph, costs)
    transfers = message_transfers(graph, cluster) if cluster is not None else None
    times = run_task_graph(graph, durations, transfers=transfers)
    bodies = _rank_bodies(graph, times)
    tied = frozenset(tied_stages)
    programs = []
    for rank in sorted(graph.orders):
        stage = plan.stage_of_rank(rank)
        tail = _tail(stage in trained, stage in tied) if training else ()
        programs.append(RankProgram(rank=rank, stage=stage, instructions=(*bodies[rank], *tail)))
    return tuple(programs)


def _tail(is_trained: bool, is_tied: bool) -> tuple[Instruction, ...]:
    kinds = [InstructionKind.STEP]
    if is_tied:
        kinds.insert(0, InstructionKind.REDUCE_TIED)
    if is_trained:
        kinds.insert(0, InstructionKind.REDUCE_DATA)
    return tuple(Instruction(kind=kind) for kind in kinds)


def global_order(graph: TaskGraph, times: TaskTimes) -> Iterator[int]:
    """Yield tasks as their node n and messages as ~m: by start time, each after what it waits for."""
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
            heapq.heappush(heap, (times.message_start[message], 0, message))
        if graph.next_on_rank[number] >= 0:
            release(graph.next_on_rank[number])
        for locked in graph.unlocks.get(number, ()):
            release(locked)


def _rank_bodies(graph: TaskGraph, times: TaskTimes) -> dict[int, list[Instruction]]:
    bodies: dict[int, list[Instruction]] = {rank: [] for rank in graph.orders}
    sends: dict[int, list[Message]] = {rank: [] for rank in graph.orders}
    receives: dict[int, list[Message]] = {rank: [] for rank in graph.orders}

    def flush(rank: int) -> None:
        if sends[rank] or receives[rank]:
            group = Instruction(
                kind=InstructionKind.EXCHANGE, sends=tuple(sends[rank]), receives=tuple(receives[rank])
            )
            bodies[rank].append(group)
            sends[rank].clear()
            receives[rank].clear()

    tasks = {}
    for item in global_order(graph, times):
        if item < 0:
            message = graph.message(~item)
            sends[message.src_rank].append(message)
            receives[message.dst_rank].append(message)
            continue
        rank = graph.rank[item]
        flush(rank)
        key = (graph.stage[item], graph.is_backward[item], graph.micro_batch[item])
        if key not in tasks:
            tasks[key] = Instruction(kind=InstructionKind.COMPUTE, task=graph.task(item))
        bodies[rank].append(tasks[key])
    for rank in bodies:
        flush(rank)
    return bodies
