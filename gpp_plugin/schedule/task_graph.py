"""Tasks and messages of all ranks as one graph of integers: what the simulator runs and lowering orders.

A node is one task on one rank. It waits for the task before it on its rank and for every message it
needs. A forward-only stage also waits until its consumers have run on the micro-batch that its
``num_in_flight`` lets go of, so that it does not run ahead without bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Message
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.grid import format_grid
from gpp_plugin.schedule.messages import (
    activation_bytes,
    activation_message,
    check_divisibility,
    edge_overlaps,
    gradient_bytes,
    gradient_kinds,
    gradient_message,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Nodes 0..N-1 are tasks, messages are 0..M-1; every list is indexed by one of the two.

    Args:
        orders: nodes of each rank in the order it runs them.
        stage, rank, micro_batch, is_backward: of a node.
        num_waits: how many things a node waits for.
        next_on_rank: the node that follows on its rank, or -1.
        source, target: nodes that send and receive a message.
        num_bytes, edge: of a message; ``overlaps`` its samples, as `edge_overlaps` yields them.
        num_activations: messages below this number hold activations, the others gradients.
        first_message, next_message: the messages that a node sends, as a linked list; -1 ends it.
        unlocks: node -> nodes of forward-only stages that wait for its end.
    """

    plan: PipelinePlan
    orders: dict[int, list[int]]
    stage: list[int]
    rank: list[int]
    micro_batch: list[int]
    is_backward: list[bool]
    num_waits: list[int]
    next_on_rank: list[int]
    source: list[int]
    target: list[int]
    num_bytes: list[float]
    edge: list[int]
    overlaps: list[tuple[int, int, int, int, bool]]
    num_activations: int
    first_message: list[int]
    next_message: list[int]
    unlocks: dict[int, list[int]]

    def task(self, node: int) -> Task:
        """Return the task of a node."""
        kind = TaskKind.BACKWARD if self.is_backward[node] else TaskKind.FORWARD
        return Task(stage=self.stage[node], kind=kind, micro_batch=self.micro_batch[node])

    def message(self, number: int) -> Message:
        """Return a message as the programs name it."""
        make = activation_message if number < self.num_activations else gradient_message
        return make(self.plan, self.edge[number], self.overlaps[number])

    def messages_of(self, node: int) -> Iterator[int]:
        """Yield the numbers of the messages a node sends."""
        number = self.first_message[node]
        while number >= 0:
            yield number
            number = self.next_message[number]


def check_schedules(plan: PipelinePlan, schedules: Sequence[StageSchedule]) -> None:
    """Refuse schedules that are not one whole order of tasks for each stage.

    Raises:
        ScheduleError: a task is missing, repeated or foreign, a backward precedes its forward, or
            more is held than ``num_in_flight``.
    """
    if [schedule.stage for schedule in schedules] != list(range(len(plan.stages))):
        raise ScheduleError(
            f"schedules of stages {[s.stage for s in schedules]} for a plan of {len(plan.stages)} stages; "
            "give one for each, in stage order"
        )
    for schedule in schedules:
        _check_schedule(plan, schedule)


def _check_schedule(plan: PipelinePlan, schedule: StageSchedule) -> None:
    name, count = plan.stages[schedule.stage].name, plan.num_micro_batches(schedule.stage)
    forwards: set[int] = set()
    backwards: set[int] = set()

    def fail(position: int, what: str) -> ScheduleError:
        rows = {f"stage {schedule.stage}": [str(task) for task in schedule.tasks]}
        return ScheduleError(f"stage {name!r}: {what}\n{format_grid(rows, bad={(0, position)})}")

    for position, task in enumerate(schedule.tasks):
        done = forwards if task.kind is TaskKind.FORWARD else backwards
        if task.stage != schedule.stage or not 0 <= task.micro_batch < count:
            raise fail(
                position, f"{task} is not a task of stage {schedule.stage}, which runs {count} micro-batches"
            )
        if task.micro_batch in done:
            raise fail(position, f"{task} is there twice; keep one")
        if task.kind is TaskKind.BACKWARD and task.micro_batch not in forwards:
            raise fail(position, f"{task} comes before its forward; move it behind")
        done.add(task.micro_batch)
        held = len(forwards) - len(backwards)
        if held > schedule.num_in_flight and any(t.kind is TaskKind.BACKWARD for t in schedule.tasks):
            raise fail(
                position, f"{task} holds {held} micro-batches, num_in_flight is {schedule.num_in_flight}"
            )
    if len(forwards) < count or (backwards and len(backwards) < count):
        raise fail(
            len(schedule.tasks) - 1,
            f"{len(forwards)} forwards and {len(backwards)} backwards of {count} micro-batches; schedule all",
        )


def has_backwards(schedule: StageSchedule) -> bool:
    """Return whether a stage runs backwards under this schedule."""
    return any(task.kind is TaskKind.BACKWARD for task in schedule.tasks)


def check_gradient_edges(plan: PipelinePlan, backward_stages: Iterable[int]) -> None:
    """Refuse an edge with gradients between a stage that runs backwards and one that does not.

    Raises:
        ScheduleError: names the edge and the stage.
    """
    trained = frozenset(backward_stages)
    if not trained:
        return
    for index, edge in enumerate(plan.edges):
        for stage in (edge.src, edge.dst):
            if edge.gradient_tensors and stage not in trained:
                raise ScheduleError(
                    f"stage {plan.stages[stage].name!r} runs no backwards, but edge {index} from "
                    f"{plan.stages[edge.src].name!r} to {plan.stages[edge.dst].name!r} carries gradients of "
                    f"{list(edge.gradient_tensors)}; leave it out of forward_only_stages"
                )


def build_task_graph(plan: PipelinePlan, schedules: Sequence[StageSchedule]) -> TaskGraph:
    """Return the graph of all tasks and messages of ``plan`` under ``schedules``.

    Raises:
        ScheduleError: the schedules are incomplete or do not fit the plan's gradients.
        PlanError: micro-batches do not divide evenly, or an edge names no tensors.
    """
    for index in range(len(plan.stages)):
        check_divisibility(plan, index)
    check_schedules(plan, schedules)
    trained = {schedule.stage for schedule in schedules if has_backwards(schedule)}
    check_gradient_edges(plan, trained)
    forward_base, backward_base = [0] * len(plan.stages), [-1] * len(plan.stages)
    stage: list[int] = []
    rank: list[int] = []
    micro_batch: list[int] = []
    is_backward: list[bool] = []
    for index, owner in enumerate(plan.stages):
        count, degree = plan.num_micro_batches(index), owner.degree
        for backward in (False, True) if index in trained else (False,):
            (backward_base if backward else forward_base)[index] = len(stage)
            stage += [index] * (count * degree)
            rank += list(owner.ranks) * count
            micro_batch += [m for m in range(count) for _ in range(degree)]
            is_backward += [backward] * (count * degree)
    graph = TaskGraph(
        plan=plan,
        orders={},
        stage=stage,
        rank=rank,
        micro_batch=micro_batch,
        is_backward=is_backward,
        num_waits=[0] * len(stage),
        next_on_rank=[-1] * len(stage),
        source=[],
        target=[],
        num_bytes=[],
        edge=[],
        overlaps=[],
        num_activations=sum(1 for e in range(len(plan.edges)) for _ in edge_overlaps(plan, e)),
        first_message=[-1] * len(stage),
        next_message=[],
        unlocks={},
    )
    _add_orders(graph, schedules, forward_base, backward_base)
    _add_messages(graph, forward_base, backward_base)
    _add_unlocks(graph, schedules, trained)
    return graph


def _add_orders(
    graph: TaskGraph, schedules: Sequence[StageSchedule], forward_base: list[int], backward_base: list[int]
) -> None:
    for schedule, stage in zip(schedules, graph.plan.stages, strict=True):
        degree = stage.degree
        bases = {
            TaskKind.FORWARD: forward_base[schedule.stage],
            TaskKind.BACKWARD: backward_base[schedule.stage],
        }
        firsts = [bases[task.kind] + task.micro_batch * degree for task in schedule.tasks]
        for position, rank in enumerate(stage.ranks):
            order = [first + position for first in firsts]
            graph.orders[rank] = order
            for node, follower in zip(order, order[1:], strict=False):
                graph.next_on_rank[node] = follower
                graph.num_waits[follower] += 1


def _add_messages(graph: TaskGraph, forward_base: list[int], backward_base: list[int]) -> None:
    plan = graph.plan
    gradients: list[tuple[int, int, float, int, tuple[int, int, int, int, bool]]] = []

    def add(
        source: int, target: int, num_bytes: float, edge: int, overlap: tuple[int, int, int, int, bool]
    ) -> None:
        graph.next_message.append(graph.first_message[source])
        graph.first_message[source] = len(graph.source)
        graph.source.append(source)
        graph.target.append(target)
        graph.num_bytes.append(num_bytes)
        graph.edge.append(edge)
        graph.overlaps.append(overlap)
        graph.num_waits[target] += 1

    for index, edge in enumerate(plan.edges):
        has_batch, has_whole = gradient_kinds(edge)
        is_trained = backward_base[edge.src] >= 0 and backward_base[edge.dst] >= 0
        for overlap in edge_overlaps(plan, index):
            producer, consumer, _, num_samples, is_whole = overlap
            num_bytes = activation_bytes(edge, num_samples, is_whole)
            add(
                forward_base[edge.src] + producer,
                forward_base[edge.dst] + consumer,
                num_bytes,
                index,
                overlap,
            )
            if is_trained and (has_batch or (is_whole and has_whole)):
                source, target = backward_base[edge.dst] + consumer, backward_base[edge.src] + producer
                num_bytes = gradient_bytes(edge, num_samples, is_whole)
                gradients.append((source, target, num_bytes, index, overlap))
    for gradient in gradients:
        add(*gradient)


def _add_unlocks(graph: TaskGraph, schedules: Sequence[StageSchedule], trained: set[int]) -> None:
    for number in range(graph.num_activations):
        source = graph.source[number]
        index = graph.stage[source]
        if index in trained:
            continue
        stage = graph.plan.stages[index]
        locked = source + schedules[index].num_in_flight * stage.degree
        if graph.micro_batch[source] + schedules[index].num_in_flight < graph.plan.num_micro_batches(index):
            graph.unlocks.setdefault(graph.target[number], []).append(locked)
            graph.num_waits[locked] += 1


def waiting_circle(graph: TaskGraph, finished: Sequence[bool]) -> list[int]:
    """Return unfinished nodes each of which waits for the next, the last one for the first."""
    waits: dict[int, int] = {}
    for order in graph.orders.values():
        for node, follower in zip(order, order[1:], strict=False):
            if not finished[node]:
                waits.setdefault(follower, node)
    for source, target in zip(graph.source, graph.target, strict=True):
        if not finished[source]:
            waits.setdefault(target, source)
    for node, locked in graph.unlocks.items():
        if not finished[node]:
            for other in locked:
                waits.setdefault(other, node)
    seen: dict[int, int] = {}
    node = next(node for node in range(len(finished)) if not finished[node])
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = waits[node]
    return path[seen[node] :]


def deadlock_error(graph: TaskGraph, finished: Sequence[bool]) -> ScheduleError:
    """Return the error for orders that stop: the circle, the remedy, and the grid with the circle marked."""
    circle = waiting_circle(graph, finished)
    following = [*circle[1:], circle[0]]
    # A stage holds too little where a forward waits for a backward of its own, or for its consumers.
    short = [
        index
        for index, (node, other) in enumerate(zip(circle, following, strict=True))
        if not graph.is_backward[node] and (graph.is_backward[other] or node in graph.unlocks.get(other, ()))
    ]
    stages = sorted({graph.stage[circle[index]] for index in short}) or sorted(
        {graph.stage[n] for n in circle}
    )
    if short:
        circle = [*circle[short[0] :], *circle[: short[0]]]
    names = ", ".join(f"{graph.plan.stages[s].name!r} (now {graph.plan.stages[s].in_flight})" for s in stages)
    chain = " waits for ".join(str(graph.task(node)) for node in [*_corners(graph, circle), circle[0]])
    rows = {f"rank {rank}": [str(graph.task(node)) for node in nodes] for rank, nodes in graph.orders.items()}
    row_of = {rank: row for row, rank in enumerate(graph.orders)}
    bad = {(row_of[graph.rank[node]], graph.orders[graph.rank[node]].index(node)) for node in circle}
    return ScheduleError(
        f"the orders of the stages wait for each other: {chain}; raise in_flight of {names}\n"
        + format_grid(rows, bad=bad)
    )


def _corners(graph: TaskGraph, circle: Sequence[int]) -> list[int]:
    """Leave out of a circle the tasks whose neighbours are on the same rank."""
    ranks = [graph.rank[node] for node in circle]
    return [
        node
        for i, node in enumerate(circle)
        if i == 0 or not ranks[i - 1] == ranks[i] == ranks[(i + 1) % len(circle)]
    ]
