"""Parts of a task graph: some of its tasks, with the messages that these send, as a task graph of their own.

Programs that follow each other (`program_sets`) are such parts of the graph of several mini-batches in a row. Two kinds
of nodes are added:

- an *update* after each backward, where stages step alone. The stage's ranks reduce gradients and step together, so
  it waits for that backward on all of them;
- an *end* of each stage on a rank, which takes what is for later programs. Such a receive stands behind the stage's
  last task.

A part is lowered as any other graph (`lower`).

Source: this project
Tests: tests/schedule/test_async.py, tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.durations import nominal_times, stage_task_us
from gpp_plugin.schedule.shared_ranks import merge_chains
from gpp_plugin.schedule.task_graph import TaskGraph


def lengthened(plan: PipelinePlan, num_mini_batches: int) -> PipelinePlan:
    """Return ``plan`` with the samples of so many mini-batches as one mini-batch."""
    return dataclasses.replace(plan, mini_batch=plan.mini_batch * num_mini_batches)


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
    graph = _empty_part(full, trained, tasks, owners)
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
    for nodes in _meetings(graph, range(graph.num_updates)):
        for node in nodes:
            for other in nodes:
                if other != node:
                    graph.add_unlock(before[node], other)


def _meetings(graph: TaskGraph, nodes: Iterable[int]) -> Iterable[list[int]]:
    """Return those of nodes together that are of one stage and micro-batch."""
    together: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        together.setdefault((graph.stage[node], graph.micro_batch[node]), []).append(node)
    return together.values()


def _empty_part(
    full: TaskGraph, trained: Sequence[int], tasks: Sequence[int], owners: Sequence[tuple[int, int]]
) -> TaskGraph:
    """Return a graph of these nodes without orders, messages and waits.

    Args:
        owners: of each end its rank, the first of tensor ranks, and its stage.
    """
    nodes = [*trained, *tasks]
    count = len(nodes) + len(owners)
    inside = frozenset(tasks)
    return TaskGraph(
        plan=full.plan,
        orders={},
        members=full.members,
        groups=(),
        stage=[full.stage[node] for node in nodes] + [stage for _, stage in owners],
        rank=[full.rank[node] for node in nodes] + [lead for lead, _ in owners],
        micro_batch=[full.micro_batch[node] for node in nodes] + [-1] * len(owners),
        kind=[full.kind[node] for node in nodes] + [TaskKind.FORWARD] * len(owners),
        half=[full.half[node] for node in nodes] + [None] * len(owners),
        num_waits=[0] * count,
        next_on_rank=[-1] * count,
        first_message=[-1] * count,
        num_activations=sum(source in inside for source in full.source[: full.num_activations]),
        num_updates=len(trained),
        num_ends=len(owners),
    )


def _unlocks(
    full: TaskGraph, number: Mapping[int, int], update: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield (node, what waits for its end): updates for their stage's backwards on all other ranks, which they meet,
    and tasks of forward-only stages for their consumers.
    """
    for nodes in _meetings(full, update):
        yield from ((number[node], update[other]) for node in nodes for other in nodes if node != other)
    for node, freed in full.unlocks.items():
        yield from ((number[node], number[n]) for n in freed if node in number and n in number)
