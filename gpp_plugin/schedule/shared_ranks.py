"""One order for the tasks of all stages on a rank: list scheduling over the whole task graph.

Each stage's tasks are a chain in the order of its schedule; a rank of several stages runs their chains in turns. Whose
turn it is, a simulation decides: whenever a rank is free it starts, of the next tasks of its stages that can run, the
one that comes first by a rule. Something can always run, since the chains, messages and unlocks hold no circle, as on
ranks of their own; so merged orders never wait for each other. Two stages each on two ranks, four micro-batches:

    chains   rank 0   0F0 0F1 0F2 0B0 0F3 0B1 ...      2F0 2B0 2F1 2B1 ...
             rank 1   1F0 1F1 1B0 1F2 1B1 ...          3F0 3B0 3F1 ...
    merged   rank 0   0F0 0F1 2F0 0F2 2F1 ...

Stages that were ordered together come with their turns (`orders.interleaved`), and where these take as little as any
order could, that is it. Else several rules are tried too, as none is always best, and the shortest simulation is taken,
the first of those that are equal:

- the task with the most work behind it: the longest path to the end, or that and what its rank has left to do;
- the one that would start first were every stage on ranks of its own;
- backwards before forwards, and of either those of the stage nearest the end.

Then the best is improved by turns: the graph is run backwards in time, each rank taking first what ended last, and
forwards again, taking first what started first in that. A turn keeps what it gains and ends with the first that gains
nothing (forward-backward improvement of project scheduling: Li and Willis, 1992).

Times are the plan's, those of messages too where its edges have any (`StageEdge.message_us`; else they are taken to be
free): orders depend on the plan and its schedules alone, and every rank finds the same. What they come to with links
that messages share, `simulate` says.

In mode async a stage's update behind each of its backwards has a place in the order too, and is first of what can run.

Source: list scheduling, Graham (1966); forward-backward improvement, Li and Willis (1992), doi
    10.1016/0377-2217(92)90195-7
Tests: tests/schedule/test_shared_ranks.py
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.event_loop import nominal_durations
from gpp_plugin.schedule.task_graph import TaskGraph, deadlock_error

Chain = tuple[int, list[int]]
"""The first rank of a data position, and the nodes of one of its stages in their order."""

MOST_TURNS = 8
"""Improvements by turns that are tried at most; few gain after the second."""

FIRST = -float("inf")
"""The rule of updates."""

SLACK = 1e-9
"""Relative difference of two times that rounding can make."""


def merge_chains(
    graph: TaskGraph,
    chains: Sequence[Chain],
    turns: Sequence[int] | None = None,
    *,
    durations: Sequence[float] | None = None,
) -> dict[int, list[int]]:
    """Return the order of every rank that holds these chains, each in its order.

    Args:
        graph: its nodes wait for those before them in their chains, and for messages and unlocks.
        turns: of every node, where the schedules were made for shared ranks: the first order that is tried. With
            different micro-batches the ranks of a stage may come to a task at different times, and that order may stop.
        durations: of every node; None: the plan's.

    Raises:
        ScheduleError: the chains wait for each other, even on ranks of their own.
    """
    network = Network.of(graph, nominal_durations(graph) if durations is None else durations)
    alone, finished = network.longest_starts()
    if not all(finished):
        for rank, nodes in chains:
            graph.orders.setdefault(rank, []).extend(nodes)
        raise deadlock_error(graph, finished[: len(graph.stage)])
    best = None
    if turns is not None:
        # each rank's nodes in the order of their turns; those of one turn, two halves, as in their chain
        by_rank: dict[int, list[int]] = {}
        for rank, nodes in chains:
            by_rank.setdefault(rank, []).extend(nodes)
        best = network.in_order([sorted(nodes, key=turns.__getitem__) for nodes in by_rank.values()])
    if best is None or best.length > network.least_us() * (1.0 + SLACK):
        runs = [network.run(_updates_first(graph, rule)) for rule in _rules(graph, network, alone)]
        found = runs if best is None else [best, *runs]
        best = _improved(graph, network, min(found, key=lambda run: run.length))
    orders: dict[int, list[int]] = {rank: [] for rank, _ in chains}
    for node in sorted(range(len(graph.stage)), key=lambda node: best.places[node]):
        orders[graph.rank[node]].append(node)
    return orders


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One simulation: when each node started, which it was of all to start, and when the last one ended."""

    places: list[int]
    start: list[float]
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What waits for what: of each node its rank, its time, what comes after it and how many come before it.

    A message that takes time is a node too, behind all tasks, on a rank of its own.
    """

    rank: list[int]
    durations: list[float]
    after: list[list[int]]
    num_before: list[int]

    @classmethod
    def of(cls, graph: TaskGraph, durations: Sequence[float]) -> Network:
        """Return the network of a graph whose nodes are in chains."""
        after: list[list[int]] = [[] if node < 0 else [node] for node in graph.next_on_rank]
        late: list[tuple[int, int, float]] = []
        for number, (source, target) in enumerate(zip(graph.source, graph.target, strict=True)):
            us = graph.delay_us(number)
            if us > 0.0:
                late.append((source, target, us))
            else:
                after[source].append(target)
        for node, locked in graph.unlocks.items():
            after[node] += locked
        network = cls(
            rank=graph.rank,
            durations=list(durations),
            after=after,
            num_before=list(graph.num_waits),
        )
        return network.with_messages(late)

    def with_messages(self, late: Sequence[tuple[int, int, float]]) -> Network:
        """Return the network with messages that take time: (sender's node, receiver's node, microseconds)."""
        if not late:
            return self
        count = len(self.after)
        after = [list(others) for others in self.after]
        for number, (source, target, _) in enumerate(late):
            after[source].append(count + number)
            after.append([target])
        return Network(
            rank=[*self.rank, *(-1 - number for number in range(len(late)))],
            durations=[*self.durations, *(us for _, _, us in late)],
            after=after,
            num_before=[*self.num_before, *(1 for _ in late)],
        )

    def reversed(self) -> Network:
        """Return the network in which time runs backwards."""
        before: list[list[int]] = [[] for _ in self.after]
        for node, others in enumerate(self.after):
            for other in others:
                before[other].append(node)
        return Network(
            rank=self.rank,
            durations=self.durations,
            after=before,
            num_before=[len(others) for others in self.after],
        )

    def longest_starts(self) -> tuple[list[float], list[bool]]:
        """Return when each node starts where every chain has a rank of its own, and whether it ever does."""
        start, waits = [0.0] * len(self.after), list(self.num_before)
        ready = [node for node, count in enumerate(waits) if count == 0]
        finished = [False] * len(waits)
        while ready:
            node = ready.pop()
            finished[node] = True
            end = start[node] + self.durations[node]
            for other in self.after[node]:
                start[other] = max(start[other], end)
                waits[other] -= 1
                if waits[other] == 0:
                    ready.append(other)
        return start, finished

    def least_us(self) -> float:
        """Return what no order takes less than: a rank's work, with what must come before and after all of it."""
        heads, _ = self.longest_starts()
        tails, _ = self.reversed().longest_starts()
        inf = float("inf")
        ends: dict[int, tuple[float, float, float]] = {}
        for rank, us, head, tail in zip(self.rank, self.durations, heads, tails, strict=True):
            first, work, last = ends.get(rank, (inf, 0.0, inf))
            ends[rank] = (min(first, head), work + us, min(last, tail))
        return max((sum(parts) for parts in ends.values()), default=0.0)

    def run(self, rule: Sequence[float]) -> _Run:
        """Simulate: a free rank starts, of what can run, the node of the least rule; the first of equal ones.

        Of those that are `FIRST`, the one that could run first.
        """
        # All tasks that end at one time end before any rank chooses, so that the choice does not depend on the order
        # in which ends are found. ``free`` are ranks that may have something new to choose among.
        waits = list(self.num_before)
        start = [0.0] * len(waits)
        places = [0] * len(waits)
        num_started = 0
        ready: dict[int, list[tuple[float, float, int]]] = {rank: [] for rank in self.rank}
        busy = dict.fromkeys(ready, False)
        ends: list[tuple[float, int]] = []
        now = 0.0
        free = list(ready)
        for node, count in enumerate(waits):
            if count == 0:
                heapq.heappush(ready[self.rank[node]], (rule[node], 0.0, node))
        while True:
            for rank in free:
                if ready[rank] and not busy[rank]:
                    node = heapq.heappop(ready[rank])[-1]
                    busy[rank] = True
                    start[node] = now
                    places[node] = num_started
                    num_started += 1
                    heapq.heappush(ends, (now + self.durations[node], node))
            if not ends:
                return _Run(places=places, start=start, length=now)
            now = ends[0][0]
            free = []
            while ends and ends[0][0] <= now:
                node = heapq.heappop(ends)[1]
                rank = self.rank[node]
                busy[rank] = False
                free.append(rank)
                for other in self.after[node]:
                    waits[other] -= 1
                    if waits[other] == 0:
                        since = now if rule[other] == FIRST else 0.0
                        heapq.heappush(ready[self.rank[other]], (rule[other], since, other))
                        free.append(self.rank[other])

    def in_order(self, orders: Sequence[Sequence[int]]) -> _Run | None:
        """Simulate ranks that run their nodes in these orders, whatever else could run; None if they stop."""
        after, num_before = [list(others) for others in self.after], list(self.num_before)
        places = [0] * len(after)
        for order in orders:
            for place, (node, follower) in enumerate(zip(order, order[1:], strict=False)):
                after[node].append(follower)
                num_before[follower] += 1
                places[follower] = place + 1
        ordered = dataclasses.replace(self, after=after, num_before=num_before)
        start, finished = ordered.longest_starts()
        if not all(finished):
            return None
        ends = (begin + us for begin, us in zip(start, self.durations, strict=True))
        return _Run(places=places, start=start, length=max(ends, default=0.0))


def _updates_first(graph: TaskGraph, rule: list[float]) -> list[float]:
    # An update is a collective of its stage's ranks, which can all come to it from the same time on. So each comes to
    # it before any task that starts later, and of two updates to the one that could be first: no two ranks wait for
    # each other.
    return [FIRST] * graph.num_updates + rule[graph.num_updates :]


def _rules(graph: TaskGraph, network: Network, alone: Sequence[float]) -> Iterator[list[float]]:
    """Yield a number for each node by each rule; ranks take the least first."""
    tails, _ = network.reversed().longest_starts()
    own = [tail + us for tail, us in zip(tails, network.durations, strict=True)]
    yield [-tail for tail in own]
    yield list(alone)
    yield [start - tail for start, tail in zip(alone, own, strict=True)]
    # weight gradients last, then forwards, and of each the stages nearest the end first
    late = {TaskKind.FORWARD: 1, TaskKind.WEIGHT_GRADIENT: 2}
    stages = len(graph.plan.stages)
    by_kind = [
        float(stages * (late.get(kind, 0) + 1) - stage)
        for stage, kind in zip(graph.stage, graph.kind, strict=True)
    ]
    yield by_kind + [0.0] * (len(own) - len(by_kind))  # a message is alone on its rank


def _improved(graph: TaskGraph, network: Network, best: _Run) -> _Run:
    """Return the run, or a shorter one found from it by turns backwards and forwards in time."""
    opposite = network.reversed()
    for _ in range(MOST_TURNS):
        ends = [start + us for start, us in zip(best.start, network.durations, strict=True)]
        late = opposite.run([-end for end in ends])
        rule = [-(start + us) for start, us in zip(late.start, network.durations, strict=True)]
        again = network.run(_updates_first(graph, rule))
        if again.length >= best.length * (1.0 - SLACK):
            break
        best = again
    return best
