"""From task orders to one program a rank that finishes even if every rank runs it serially.

`placement` decides where messages stand between the tasks; here they become instructions, and the
reductions and the optimizer step follow at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.check import has_backwards
from gpp_plugin.schedule.placement import Placement, place_messages
from gpp_plugin.schedule.reductions import reduce_after_backwards
from gpp_plugin.schedule.task_graph import TaskGraph, build_task_graph
from gpp_plugin.simulate.durations import Durations, nominal_durations, task_durations
from gpp_plugin.simulate.event_loop import message_transfers, run_task_graph


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
    times = run_task_graph(graph, durations, transfers=transfers)
    instructions = {
        task: Instruction(kind=InstructionKind.COMPUTE, task=task) for s in schedules for task in s.tasks
    }
    bodies = rank_bodies(graph, place_messages(graph, times), lambda node: (instructions[graph.task(node)],))
    tied = frozenset(tied_stages)
    programs = []
    for rank in sorted(bodies):
        stage = plan.stage_of_rank(rank)
        tail = _tail(stage in trained, stage in tied) if training else ()
        programs.append(RankProgram(rank=rank, stage=stage, instructions=(*bodies[rank], *tail)))
    if training and reduce_each_backward:
        return reduce_after_backwards(plan, programs, trained)
    return tuple(programs)


def _tail(is_trained: bool, is_tied: bool) -> tuple[Instruction, ...]:
    kinds = [InstructionKind.STEP]
    if is_tied:
        kinds.insert(0, InstructionKind.REDUCE_TIED)
    if is_trained:
        kinds.insert(0, InstructionKind.REDUCE_DATA)
    return tuple(Instruction(kind=kind) for kind in kinds)


def rank_bodies(
    graph: TaskGraph, placement: Placement, instructions: Callable[[int], tuple[Instruction, ...]]
) -> dict[int, list[Instruction]]:
    """Return what each rank does, its messages where ``placement`` puts them.

    Args:
        instructions: of a node.
    """
    sends: dict[tuple[int, int], list[Message]] = {}
    receives: dict[tuple[int, int], list[Message]] = {}
    for number in placement.order:
        message = graph.message(number)
        sends.setdefault((message.src_rank, placement.send_slot[number]), []).append(message)
        receives.setdefault((message.dst_rank, placement.receive_slot[number]), []).append(message)
    bodies = {}
    for lead, nodes in graph.orders.items():
        own = [instructions(node) for node in nodes]
        for rank in graph.members[lead]:
            bodies[rank] = _body(rank, own, sends, receives)
    return bodies


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
