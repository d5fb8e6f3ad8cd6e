"""Makes the task graph of a mini-batch: nodes, the order of each rank, messages, and what holds stages back.

Where a rank holds several stages, the tasks of each are a chain of their own until all else is known; then the rank's
one order is found from all of them (`shared_ranks`).

Source: this project
Tests: tests/schedule/test_async.py, tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, stage_task_us
from gpp_plugin.ir.program import Direction
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.checks.order_check import (
    check_divisibility,
    check_gradient_edges,
    check_schedules,
    check_shared_rows,
    has_backwards,
)
from gpp_plugin.schedule.event_loop import nominal_times
from gpp_plugin.schedule.messages import (
    WHOLE,
    Overlap,
    activation_bytes,
    edge_overlaps,
    gradient_bytes,
    gradient_kinds,
    slicing_of,
    tensor_pairs,
)
from gpp_plugin.schedule.shared_ranks import Chain, merge_chains
from gpp_plugin.schedule.task_graph import NodeGroup, TaskGraph

# Which stages run a loss unit, and which edges carry something of it, where units lack whole branches of the model.
#
# A unit without images runs no vision tower: no task, no message, no gradient there. With units as the samples of a
# plan (`runtime.stage_runner`) every task is of one unit, so what is left out of a mini-batch's task graph are nodes
# and messages:
#
#     units          image  text  image  text
#     stage vision   F0           F2                  B0  B2
#     stage text     F0     F1    F2     F3   B3  B1  B2  B0
#
# Each stage's order is that of the whole schedule without the tasks of absent units. A part of an order that finishes
# finishes too: what waited for an absent task waits for nothing now. `validate_programs` proves the programs anew.


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What there is of each unit of a mini-batch; units are the samples of the plan.

    Args:
        stages: of each unit, the stages that run it.
        edges: of each unit, the edges that carry something of it; both of their stages run it.
    """

    stages: tuple[frozenset[int], ...]
    edges: tuple[frozenset[int], ...]

    def check(self, plan: PipelinePlan) -> None:
        """Refuse a plan whose tasks are not of one unit each, or an edge of a unit that one of its stages lacks.

        Raises:
            ScheduleError: says which.
        """
        cut = [s.name for s in plan.stages if s.local_batch_size != 1 or s.num_sliced]
        if cut or not len(self.stages) == len(self.edges) == plan.mini_batch:
            raise ScheduleError(
                f"{len(self.stages)} units for a mini-batch of {plan.mini_batch}, stages {cut} take other than one "
                "at a time; give a plan of units"
            )
        for unit, (stages, edges) in enumerate(zip(self.stages, self.edges, strict=True)):
            for index in edges:
                if not {plan.edges[index].src, plan.edges[index].dst} <= stages:
                    raise ScheduleError(
                        f"edge {plan.edge_name(index)} carries unit {unit}, which runs on stages {sorted(stages)} only"
                    )


def own_tasks(
    plan: PipelinePlan, tasks: Sequence[Task], rank: int, presence: Presence | None
) -> tuple[Task, ...]:
    """Return those tasks of a stage's schedule that one of its ranks runs."""
    if presence is None:
        return tuple(tasks)
    units = [plan.stages[task.stage].samples(task.micro_batch, rank).first_sample for task in tasks]
    return tuple(t for t, unit in zip(tasks, units, strict=True) if t.stage in presence.stages[unit])


def build_task_graph(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    *,
    presence: Presence | None = None,
    is_merged: bool = True,
) -> TaskGraph:
    """Return the graph of all tasks and messages of ``plan`` under ``schedules``.

    Args:
        is_merged: ranks of several stages have one order; else only the chains of their stages, to be cut.
        presence: what there is of each sample, where some lack branches; tasks of a stage that does not run a sample,
            and messages of an edge that carries nothing of it, are left out.

    Raises:
        ScheduleError: the schedules are incomplete or do not fit the plan's gradients.
        PlanError: micro-batches do not divide evenly, an edge names no tensors, or stages of different model rows
            share a rank.
    """
    check_shared_rows(plan)
    for index in range(len(plan.stages)):
        check_divisibility(plan, index)
    check_schedules(plan, schedules)
    trained = frozenset(schedule.stage for schedule in schedules if has_backwards(schedule))
    check_gradient_edges(plan, trained)
    if presence is not None:
        presence.check(plan)
    return _Builder(plan, schedules, trained).build(presence, is_merged=is_merged)


class _Builder:
    """A task graph in the making: where the nodes of each stage's tasks begin, then orders and messages."""

    def __init__(
        self, plan: PipelinePlan, schedules: Sequence[StageSchedule], trained: frozenset[int]
    ) -> None:
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

    def build(self, presence: Presence | None = None, *, is_merged: bool) -> TaskGraph:
        # First all nodes, so that the first node of any task is known by arithmetic: a stage's F of micro-batch m at
        # data position p is ``forward[stage] + m * degree + p``, which for parts a (`messages`) is ``forward + a``.
        # Then who waits for whom: the order of each rank, messages, and what holds forward-only stages back.
        for schedule in self._schedules:
            self._add_nodes(schedule)
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
            members={
                row[0]: row
                for stage in self._plan.stages
                for row in map(stage.model_ranks, range(stage.degree))
            },
            groups=tuple(self._groups),
            stage=self._stage,
            rank=self._rank,
            micro_batch=self._micro_batch,
            kind=self._kind,
            half=self._half,
            trained=self._trained,
            num_activations=sum(
                len(of_edge) * len(tensor_pairs(self._plan, index, Direction.ACTIVATION))
                for index, of_edge in enumerate(overlaps)
            ),
        )
        chains = self._chains()
        for _, nodes in chains:
            graph.add_chain(nodes)
        for index, of_edge in enumerate(overlaps):
            self._add_activations(graph, index, of_edge)
        for index, of_edge in enumerate(overlaps):
            self._add_gradients(graph, index, of_edge)
        if presence is not None:
            graph, chains = _present_part(graph, chains, presence)
        self._add_unlocks(graph, chains)
        graph.chains.extend(chains)
        if not self._plan.shares_ranks:
            graph.orders.update(chains)
        elif is_merged:
            graph.replace_chains(merge_chains(graph, chains, turns_of(graph, self._schedules)))
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

    def _chains(self) -> list[Chain]:
        """Return the nodes of each stage on each of its data positions, in the order of its schedule."""
        chains = []
        for schedule, stage in zip(self._schedules, self._plan.stages, strict=True):
            firsts = [self._first_node(task) for task in schedule.tasks]
            for position, rank in enumerate(stage.data_ranks(0)):
                chains.append((rank, [first + position for first in firsts]))
        return chains

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

    def _add_unlocks(self, graph: TaskGraph, chains: Sequence[Chain]) -> None:
        # A stage without backwards would run all its forwards at once, and its consumers would hold what it sent.
        # With ``num_in_flight`` of 2, its F2 waits until the readers of F0's results have run on them:
        #
        #     frozen     F0  F1          F2          F3
        #     consumer       F0 ─────────┘ F1 ───────┘ ...
        later: dict[int, int] = {}
        for _, order in chains:
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


def turns_of(graph: TaskGraph, schedules: Sequence[StageSchedule]) -> list[int] | None:
    """Return the turns of a graph's tasks in a whole mini-batch, its ends last; None where a schedule has none."""
    if not all(len(schedule.turns) == len(schedule.tasks) for schedule in schedules):
        return None
    turn_of = {task: turn for s in schedules for task, turn in zip(s.tasks, s.turns, strict=True)}
    found = [turn_of[graph.task(node)] for node in graph.tasks]
    return [*found, *[max(found, default=0) + 1] * graph.num_ends]


def _present_part(
    graph: TaskGraph, chains: Sequence[Chain], presence: Presence
) -> tuple[TaskGraph, list[Chain]]:
    """Return what is there of a graph, in which nothing is unlocked, and of its chains: nodes get new numbers."""
    # ``number`` of a node is its new one, -1 where its stage does not run its unit. Of units image, text on one vision
    # rank with nodes F0 F1 B0 B1 it is [0, -1, 1, -1], and the rank's order F0 F1 B0 B1 becomes F0 B0.
    plan = graph.plan
    positions = [{rank: s.position(rank)[0] for rank in s.data_ranks(0)} for s in plan.stages]
    number = [-1] * len(graph.stage)
    present_nodes: list[int] = []
    for node, index in enumerate(graph.stage):
        unit = graph.micro_batch[node] * plan.stages[index].degree + positions[index][graph.rank[node]]
        if index in presence.stages[unit]:
            number[node] = len(present_nodes)
            present_nodes.append(node)
    groups = []
    for group in graph.groups:
        found = [number[n] for n in range(group.first, group.first + group.count) if number[n] >= 0]
        if found:
            groups.append(replace(group, first=found[0], count=len(found)))
    # a message is of the unit that is its first sample, as every task is of one
    messages = [m for m, o in enumerate(graph.overlaps) if graph.edge[m] in presence.edges[o[2]]]
    num_activations = sum(m < graph.num_activations for m in messages)
    part = _empty_part(graph, present_nodes, groups=tuple(groups), num_activations=num_activations)
    present = [(rank, [number[n] for n in nodes if number[n] >= 0]) for rank, nodes in chains]
    for _, nodes in present:
        part.add_chain(nodes)
    for m in messages:
        ends = number[graph.source[m]], number[graph.target[m]]
        part.add_message(*ends, graph.num_bytes[m], graph.edge[m], graph.overlaps[m], graph.pairs[m])
    return part, present


# Parts of a task graph: some of its tasks, with the messages that these send, as a task graph of their own.
#
# Programs that follow each other (`program_sets`) are such parts of the graph of several mini-batches in a row. Two
# kinds of nodes are added:
#
# - an *update* after each backward, where stages step alone. The stage's ranks reduce gradients and step together, so
#   it waits for that backward on all of them;
# - an *end* of each stage on a rank, which takes what is for later programs. Such a receive stands behind the stage's
#   last task.
#
# A part is lowered as any other graph (`lower`).


def lengthened(plan: PipelinePlan, num_mini_batches: int) -> PipelinePlan:
    """Return ``plan`` with the samples of so many mini-batches as one mini-batch."""
    return dataclasses.replace(plan, mini_batch=plan.mini_batch * num_mini_batches, cost=None)


def part_durations(graph: TaskGraph, *, update_us: Callable[[int], float] = lambda stage: 0.0) -> list[float]:
    """Return the microseconds of each node of a part; a plan without times has them by the number of samples.

    Args:
        update_us: of one update of a stage.
    """
    stages = nominal_times(graph.plan).stages
    updates = [update_us(graph.stage[node]) for node in range(graph.num_updates)]
    times = [
        stage_task_us(stages[graph.stage[node]], graph.kind[node], graph.half[node]) for node in graph.tasks
    ]
    return [*updates, *times, *[0.0] * graph.num_ends]


def cut_graph(
    full: TaskGraph, is_inside: Callable[[int], bool], *, has_updates: bool = True, is_merged: bool = True
) -> TaskGraph:
    """Return the part of ``full`` with these nodes, and updates and ends.

    Args:
        has_updates: there is one behind each backward.
        is_merged: ranks of several stages have one order; else chains alone.

    Nodes wait for nothing outside: it happened before, or it is waited for at the end. Window 2 of two stages of one
    rank each that hold 2 and 1 micro-batches, with U an update and E an end:

        rank 0   F2 B1 U F3 B2 U E         updates 0 and 1, tasks 4..7, end 12
        rank 1   F2 B2 U F3 B3 U E         updates 2 and 3, tasks 8..11, end 13

    The gradient for rank 0's B1 was sent in window 1, so it is no message of this part: the rank has it. Those of B2
    and B3 are sent here; the one is for B2 on rank 0, the other for window 3, so it goes to rank 0's end.
    """
    rows = [(lead, [node for node in chain if is_inside(node)]) for lead, chain in full.chains if chain]
    owners = [(lead, full.stage[chain[0]]) for lead, chain in full.chains if chain]
    tasks = [node for _, row in rows for node in row]
    trained = [node for node in tasks if has_updates and full.kind[node] is TaskKind.BACKWARD]
    # From nodes of the whole graph to those of the part, in which updates come first, then tasks, then ends.
    update = {node: at for at, node in enumerate(trained)}
    number = {node: len(trained) + at for at, node in enumerate(tasks)}
    end = {owner: len(trained) + len(tasks) + at for at, owner in enumerate(owners)}
    inside = frozenset(tasks)
    num_activations = sum(source in inside for source in full.source[: full.num_activations])
    nodes = [*trained, *tasks]
    graph = _empty_part(full, nodes, owners, num_activations=num_activations, num_updates=len(trained))
    for (lead, row), owner in zip(rows, owners, strict=True):
        pairs = ((number[node], update.get(node)) for node in row)
        graph.chains.append((lead, [*(n for pair in pairs for n in pair if n is not None), end[owner]]))
        graph.add_chain(graph.chains[-1][1])
    for message, (source, target) in enumerate(zip(full.source, full.target, strict=True)):
        if source in number:
            graph.add_message(
                number[source],
                number[target] if target in number else end[full.rank[target], full.stage[target]],
                full.num_bytes[message],
                full.edge[message],
                full.overlaps[message],
                full.pairs[message],
            )
    for node, locked in _unlocks(full, number, update):
        graph.add_unlock(node, locked)
    if not full.plan.shares_ranks:
        graph.orders.update(graph.chains)
    elif is_merged:
        merged = merge_chains(graph, graph.chains, durations=part_durations(graph))
        set_orders(graph, merged)
    return graph


def set_orders(graph: TaskGraph, orders: Mapping[int, list[int]]) -> None:
    """Let ranks of several stages run their nodes in these orders, which contain the part's chains.

    An update meets when each of its stage's ranks has done all that stands before it, and not its backward alone: tasks
    of other stages may stand between the two.
    """
    graph.replace_chains(orders)
    before = {node: earlier for order in orders.values() for earlier, node in itertools.pairwise(order)}
    for node, other in _meetings(graph, range(graph.num_updates)):
        graph.add_unlock(before[node], other)


def _meetings(graph: TaskGraph, nodes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield every two of these nodes that are of one stage and micro-batch, in both orders."""
    together: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        together.setdefault((graph.stage[node], graph.micro_batch[node]), []).append(node)
    for each in together.values():
        yield from itertools.permutations(each, 2)


def _empty_part(
    full: TaskGraph, nodes: Sequence[int], owners: Sequence[tuple[int, int]] = (), **fields: Any
) -> TaskGraph:
    """Return a graph of these nodes without orders, messages and waits.

    Args:
        owners: of each end its rank, the first of tensor ranks, and its stage.
        fields: what else the graph says of itself.
    """
    return TaskGraph(
        plan=full.plan,
        members=full.members,
        stage=[full.stage[node] for node in nodes] + [stage for _, stage in owners],
        rank=[full.rank[node] for node in nodes] + [lead for lead, _ in owners],
        micro_batch=[full.micro_batch[node] for node in nodes] + [-1] * len(owners),
        kind=[full.kind[node] for node in nodes] + [TaskKind.FORWARD] * len(owners),
        half=[full.half[node] for node in nodes] + [None] * len(owners),
        trained=full.trained,
        num_ends=len(owners),
        **fields,
    )


def _unlocks(
    full: TaskGraph, number: Mapping[int, int], update: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield (node, what waits for its end): updates for their stage's backwards on all other ranks, which they meet,
    and tasks of forward-only stages for their consumers.
    """
    yield from ((number[node], update[other]) for node, other in _meetings(full, update))
    for node, freed in full.unlocks.items():
        yield from ((number[node], number[n]) for n in freed if node in number and n in number)
