"""Tasks and messages of all ranks as one graph of integers: what the simulator runs and lowering orders.

A node is one task on one rank, or on the tensor ranks of one data position: collectives inside the task keep
those together, so they run it as one, and the first of them stands for all. It waits for the task before it on
its rank and for every message that one of its ranks needs. A forward-only stage also waits until its consumers
have run on the micro-batch that its ``num_in_flight`` lets go of, so that it does not run ahead without bound.

Two stages of one rank each, two micro-batches, 1F1B with two and one in flight; nodes are numbered by stage and kind,
in the order of micro-batches:

    rank 0   0: F0   1: F1   2: B0   3: B1              next_on_rank  [1, 2, 3, -1, 6, 7, 5, -1]
    rank 1   4: F0   6: B0   5: F1   7: B1              num_waits     [0, 1, 2, 2, 1, 2, 1, 1]

    messages 0: 0 > 4   1: 1 > 5   2: 6 > 2   3: 7 > 3  source [0, 1, 6, 7], target [4, 5, 2, 3]; gradients come last

A part of such a graph (`windows`) is one too. It has nodes of two more kinds, which the graph of a mini-batch lacks:
*updates* behind backwards, numbered first, and one *end* a rank, numbered last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.absent import Presence
from gpp_plugin.schedule.checks.order_check import (
    check_gradient_edges,
    check_schedules,
    has_backwards,
)
from gpp_plugin.schedule.grid import format_grid
from gpp_plugin.schedule.messages import (
    WHOLE,
    Overlap,
    TensorPair,
    activation_bytes,
    activation_message,
    check_divisibility,
    edge_overlaps,
    gradient_bytes,
    gradient_kinds,
    gradient_message,
    slicing_of,
    tensor_pairs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """``count`` nodes from ``first`` on that are the same kind of task of one stage."""

    first: int
    count: int
    stage: int
    kind: TaskKind
    half: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Nodes 0..N-1 are tasks, messages are 0..M-1; every list is indexed by one of the two.

    Args:
        orders: by rank (the first of its tensor ranks) the nodes in the order it runs them.
        members: by that rank all ranks that run those nodes together.
        groups: what the nodes are, in the order of nodes; together all of them.
        stage, rank, micro_batch, kind, half: of a node.
        num_waits: how many things a node waits for.
        next_on_rank: the node that follows on its rank, or -1.
        source, target: nodes that send and receive a message.
        num_bytes, edge, sender, receiver: of a message, the last two are ranks; ``overlaps`` its samples, as
            `edge_overlaps` yields them; ``pairs`` its tensor positions.
        num_activations: messages below this number hold activations, the others gradients.
        first_message, next_message: the messages that a node sends, as a linked list; -1 ends it.
        unlocks: node -> nodes that wait for its end though it sends them nothing: of forward-only stages, and updates.
        num_updates, num_ends: how many of the first nodes are updates, and of the last ones ends.
    """

    plan: PipelinePlan
    orders: dict[int, list[int]]
    members: dict[int, tuple[int, ...]]
    groups: tuple[NodeGroup, ...]
    stage: list[int]
    rank: list[int]
    micro_batch: list[int]
    kind: list[TaskKind]
    half: list[int | None]
    num_waits: list[int]
    next_on_rank: list[int]
    first_message: list[int]
    num_activations: int = 0
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    edge: list[int] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    pairs: list[TensorPair] = field(default_factory=list)
    next_message: list[int] = field(default_factory=list)
    unlocks: dict[int, list[int]] = field(default_factory=dict)
    num_updates: int = 0
    num_ends: int = 0

    @property
    def tasks(self) -> range:
        """Return the nodes that are tasks."""
        return range(self.num_updates, len(self.stage) - self.num_ends)

    def task(self, node: int) -> Task:
        """Return the task of a node."""
        return Task(
            stage=self.stage[node],
            kind=self.kind[node],
            micro_batch=self.micro_batch[node],
            half=self.half[node],
        )

    def message(self, number: int) -> Message:
        """Return a message as the programs name it."""
        make = activation_message if number < self.num_activations else gradient_message
        return make(self.plan, self.edge[number], self.overlaps[number], self.pairs[number])

    def messages_of(self, node: int) -> Iterator[int]:
        """Yield the numbers of the messages a node sends."""
        number = self.first_message[node]
        while number >= 0:
            yield number
            number = self.next_message[number]

    # ---- while it is made: lists grow, and whoever waits for one thing more counts it ---------------

    def set_order(self, rank: int, order: list[int]) -> None:
        """Let a rank run these nodes one after the other."""
        self.orders[rank] = order
        for node, follower in zip(order, order[1:], strict=False):
            self.next_on_rank[node] = follower
            self.num_waits[follower] += 1

    def add_message(
        self, source: int, target: int, num_bytes: float, edge: int, overlap: Overlap, pair: TensorPair
    ) -> None:
        """Let a node send a message to another one, in front of those that it sends already."""
        self.next_message.append(self.first_message[source])
        self.first_message[source] = len(self.source)
        self.source.append(source)
        self.target.append(target)
        self.num_bytes.append(num_bytes)
        self.edge.append(edge)
        self.sender.append(self.members[self.rank[source]][pair.sender])
        self.receiver.append(self.members[self.rank[target]][pair.receiver])
        self.overlaps.append(overlap)
        self.pairs.append(pair)
        self.num_waits[target] += 1

    def add_unlock(self, node: int, locked: int) -> None:
        """Let a node wait for the end of another one that sends it nothing."""
        self.unlocks.setdefault(node, []).append(locked)
        self.num_waits[locked] += 1


def build_task_graph(
    plan: PipelinePlan, schedules: Sequence[StageSchedule], *, presence: Presence | None = None
) -> TaskGraph:
    """Return the graph of all tasks and messages of ``plan`` under ``schedules``.

    Args:
        presence: what there is of each sample, where some lack branches; tasks of a stage that does not run a sample,
            and messages of an edge that carries nothing of it, are left out.

    Raises:
        ScheduleError: the schedules are incomplete or do not fit the plan's gradients.
        PlanError: micro-batches do not divide evenly, or an edge names no tensors.
    """
    for index in range(len(plan.stages)):
        check_divisibility(plan, index)
    check_schedules(plan, schedules)
    trained = {schedule.stage for schedule in schedules if has_backwards(schedule)}
    check_gradient_edges(plan, trained)
    if presence is None:
        return _Builder(plan, schedules, trained).build()
    presence.check(plan)
    return _Builder(plan, schedules, trained).build(presence)


class _Builder:
    """A task graph in the making: where the nodes of each stage's tasks begin, then orders and messages."""

    def __init__(self, plan: PipelinePlan, schedules: Sequence[StageSchedule], trained: set[int]) -> None:
        self._plan = plan
        self._schedules = schedules
        self._trained = trained
        self._slicing = [slicing_of(schedule) for schedule in schedules]
        # By stage: the first node of forwards (of first halves, where there are halves) and of what
        # sends gradients; of second halves and weight gradients the first node by micro-batch.
        self._forward = [0] * len(plan.stages)
        self._gradient = [-1] * len(plan.stages)
        self._second: list[dict[int, int]] = [{} for _ in plan.stages]
        self._weight: list[dict[int, int]] = [{} for _ in plan.stages]
        self._groups: list[NodeGroup] = []
        self._stage: list[int] = []
        self._rank: list[int] = []
        self._micro_batch: list[int] = []
        self._kind: list[TaskKind] = []
        self._half: list[int | None] = []

    def build(self, presence: Presence | None = None) -> TaskGraph:
        # First all nodes, so that the first node of any task is known by arithmetic: a stage's F of micro-batch m at
        # data position p is ``forward[stage] + m * degree + p``, which for parts a (`messages`) is ``forward + a``.
        # Then who waits for whom: the order of each rank, messages, and what holds forward-only stages back.
        for schedule in self._schedules:
            self._add_nodes(schedule)
        num_nodes = len(self._stage)
        overlaps = [
            list(
                edge_overlaps(
                    self._plan, i, producer=self._slicing[edge.src], consumer=self._slicing[edge.dst]
                )
            )
            for i, edge in enumerate(self._plan.edges)
        ]
        graph = TaskGraph(
            plan=self._plan,
            orders={},
            members={
                stage.ranks[first]: stage.ranks[first : first + stage.tensor]
                for stage in self._plan.stages
                for first in range(0, len(stage.ranks), stage.tensor)
            },
            groups=tuple(self._groups),
            stage=self._stage,
            rank=self._rank,
            micro_batch=self._micro_batch,
            kind=self._kind,
            half=self._half,
            num_waits=[0] * num_nodes,
            next_on_rank=[-1] * num_nodes,
            first_message=[-1] * num_nodes,
            num_activations=sum(
                len(of_edge) * len(tensor_pairs(self._plan, index, Direction.ACTIVATION))
                for index, of_edge in enumerate(overlaps)
            ),
        )
        self._add_orders(graph)
        for index, of_edge in enumerate(overlaps):
            self._add_activations(graph, index, of_edge)
        for index, of_edge in enumerate(overlaps):
            self._add_gradients(graph, index, of_edge)
        if presence is not None:
            graph = _present_part(graph, presence)
        self._add_unlocks(graph)
        return graph

    def _add_nodes(self, schedule: StageSchedule) -> None:
        index = schedule.stage
        every = range(self._plan.num_micro_batches(index))
        halved = self._slicing[index].halved
        self._forward[index] = len(self._stage)
        if halved:
            for first in every:
                self._add_group(index, TaskKind.FORWARD, 0 if first in halved else None, [first])
            self._second[index] = self._add_group(index, TaskKind.FORWARD, 1, sorted(halved))
        else:
            self._add_group(index, TaskKind.FORWARD, None, every)
        if index not in self._trained:
            return
        self._gradient[index] = len(self._stage)
        split = [t.micro_batch for t in schedule.tasks if t.kind is TaskKind.INPUT_GRADIENT]
        if split and len(split) < len(every):
            whole = set(every) - set(split)
            for first in every:
                kind = TaskKind.BACKWARD if first in whole else TaskKind.INPUT_GRADIENT
                self._add_group(index, kind, None, [first])
        else:
            self._add_group(index, TaskKind.INPUT_GRADIENT if split else TaskKind.BACKWARD, None, every)
        if split:
            self._weight[index] = self._add_group(index, TaskKind.WEIGHT_GRADIENT, None, sorted(split))

    def _add_group(
        self, index: int, kind: TaskKind, half: int | None, micro_batches: Sequence[int]
    ) -> dict[int, int]:
        """Add one node a data position for each of these micro-batches; return each one's first node."""
        ranks = self._plan.stages[index].data_ranks(0)
        degree, count, first = len(ranks), len(micro_batches), len(self._stage)
        self._groups.append(NodeGroup(first=first, count=count * degree, stage=index, kind=kind, half=half))
        self._stage += [index] * (count * degree)
        self._rank += ranks * count
        self._micro_batch += [m for m in micro_batches for _ in range(degree)]
        self._kind += [kind] * (count * degree)
        self._half += [half] * (count * degree)
        return {m: first + i * degree for i, m in enumerate(micro_batches)}

    def _first_node(self, task: Task) -> int:
        """Return the node of a task on the first rank of its stage."""
        if task.half == 1:
            return self._second[task.stage][task.micro_batch]
        if task.kind is TaskKind.WEIGHT_GRADIENT:
            return self._weight[task.stage][task.micro_batch]
        base = self._forward if task.kind is TaskKind.FORWARD else self._gradient
        return base[task.stage] + task.micro_batch * self._plan.stages[task.stage].degree

    def _add_orders(self, graph: TaskGraph) -> None:
        for schedule, stage in zip(self._schedules, self._plan.stages, strict=True):
            firsts = [self._first_node(task) for task in schedule.tasks]
            for position, rank in enumerate(stage.data_ranks(0)):
                graph.set_order(rank, [first + position for first in firsts])

    def _add_activations(self, graph: TaskGraph, index: int, overlaps: Sequence[Overlap]) -> None:
        edge = self._plan.edges[index]
        src_base, dst_base = self._forward[edge.src], self._forward[edge.dst]
        pairs = tensor_pairs(self._plan, index, Direction.ACTIVATION)
        for overlap in overlaps:
            producer, consumer, _, num_samples, is_whole, src_half, dst_half = overlap
            source, target = src_base + producer, dst_base + consumer
            if src_half == 1:
                source = self._second_half(edge.src, producer)
            if dst_half == 1:
                target = self._second_half(edge.dst, consumer)
            num_bytes = activation_bytes(edge, num_samples, is_whole)
            for pair in pairs:
                graph.add_message(source, target, num_bytes * pair.share, index, overlap, pair)

    def _add_gradients(self, graph: TaskGraph, index: int, overlaps: Sequence[Overlap]) -> None:
        edge = self._plan.edges[index]
        src_base, dst_base = self._gradient[edge.src], self._gradient[edge.dst]
        has_batch, has_whole = gradient_kinds(edge)
        if min(src_base, dst_base) < 0 or not (has_batch or has_whole):
            return
        if self._slicing[edge.src] is not WHOLE or self._slicing[edge.dst] is not WHOLE:
            overlaps = list(edge_overlaps(self._plan, index))
        pairs = tensor_pairs(self._plan, index, Direction.GRADIENT)
        for overlap in overlaps:
            producer, consumer, _, num_samples, is_whole, _, _ = overlap
            if has_batch or is_whole:
                source, target = dst_base + consumer, src_base + producer
                num_bytes = gradient_bytes(edge, num_samples, is_whole)
                for pair in pairs:
                    graph.add_message(source, target, num_bytes * pair.share, index, overlap, pair)

    def _second_half(self, index: int, part: int) -> int:
        micro_batch, position = divmod(part, self._plan.stages[index].degree)
        return self._second[index][micro_batch] + position

    def _add_unlocks(self, graph: TaskGraph) -> None:
        # A stage without backwards would run all its forwards at once, and its consumers would hold what it sent.
        # With ``num_in_flight`` of 2, its F2 waits until whoever reads F0's results has run on them:
        #
        #     frozen     F0  F1          F2          F3
        #     consumer       F0 ─────────┘ F1 ───────┘ ...
        later: dict[int, int] = {}
        for order in graph.orders.values():
            if order and graph.stage[order[0]] not in self._trained:
                # of a forward in halves, both free what the first half of the later one waits for
                count = self._schedules[graph.stage[order[0]]].num_in_flight
                firsts = [node for node in order if graph.half[node] != 1]
                of_micro_batch = {
                    graph.micro_batch[early]: late
                    for early, late in zip(firsts, firsts[count:], strict=False)
                }
                for node in order:
                    if graph.micro_batch[node] in of_micro_batch:
                        later[node] = of_micro_batch[graph.micro_batch[node]]
        for number in range(graph.num_activations):
            source = graph.source[number]
            if source in later:
                graph.add_unlock(graph.target[number], later[source])


def _present_part(graph: TaskGraph, presence: Presence) -> TaskGraph:
    """Return what of a graph, before anything is unlocked, is there: nodes are numbered anew, in their order."""
    # ``number`` of a node is its new one, -1 where its stage does not run its unit. Of units image, text on one vision
    # rank with nodes F0 F1 B0 B1 it is [0, -1, 1, -1], and the rank's order F0 F1 B0 B1 becomes F0 B0.
    plan = graph.plan
    of_rank = {rank: s.position(rank)[0] for s in plan.stages for rank in s.data_ranks(0)}
    number = [-1] * len(graph.stage)
    kept: list[int] = []
    for node, index in enumerate(graph.stage):
        unit = graph.micro_batch[node] * plan.stages[index].degree + of_rank[graph.rank[node]]
        if index in presence.stages[unit]:
            number[node] = len(kept)
            kept.append(node)
    groups = []
    for group in graph.groups:
        found = [number[n] for n in range(group.first, group.first + group.count) if number[n] >= 0]
        if found:
            groups.append(replace(group, first=found[0], count=len(found)))
    # a message is of the unit that is its first sample, as every task is of one
    messages = [m for m, o in enumerate(graph.overlaps) if graph.edge[m] in presence.edges[o[2]]]
    part = TaskGraph(
        plan=plan,
        orders={},
        members=graph.members,
        groups=tuple(groups),
        stage=[graph.stage[n] for n in kept],
        rank=[graph.rank[n] for n in kept],
        micro_batch=[graph.micro_batch[n] for n in kept],
        kind=[graph.kind[n] for n in kept],
        half=[graph.half[n] for n in kept],
        num_waits=[0] * len(kept),
        next_on_rank=[-1] * len(kept),
        first_message=[-1] * len(kept),
        num_activations=sum(m < graph.num_activations for m in messages),
    )
    for rank, order in graph.orders.items():
        part.set_order(rank, [number[n] for n in order if number[n] >= 0])
    for m in messages:
        ends = number[graph.source[m]], number[graph.target[m]]
        part.add_message(*ends, graph.num_bytes[m], graph.edge[m], graph.overlaps[m], graph.pairs[m])
    return part


def waiting_circle(graph: TaskGraph, finished: Sequence[bool]) -> list[int]:
    """Return unfinished nodes each of which waits for the next, the last one for the first."""
    # One thing that each unfinished node waits for and that has not ended is enough: whoever is unfinished waits for
    # an unfinished node, there are finitely many, so the walk comes back to a node it has seen.
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
        if graph.kind[node] is TaskKind.FORWARD
        and (graph.kind[other] is not TaskKind.FORWARD or node in graph.unlocks.get(other, ()))
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
