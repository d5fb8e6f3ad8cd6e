"""Decides in linear time whether the operations of all ranks end, under a mapping of streams to hardware queues.

All waits are of the kind "this after all of those" (`operations`), so everything ends exactly where the graph of
those waits has no circle and no end without its other one. Nodes are the start of each operation and, where it meets
other ranks, its end:

    start of an item     after the end of the item before it in its queue, of the items it waits for, and of the last
                         host wait before it
    end of an item       after its start; of a rendezvous, after the starts of all its ends
    a host wait          after the ends of the items it waits for, and of the last host wait before it

A device-wide wait at a host point is one node more: after the ends of all items before the point, and before
everything that the host does behind it. It only adds to the graph. Hence, for any mapping of streams to queues:

    waits at *all* points at once end   =>   a wait at any *one* point, or at some, ends

and with waits at all points each rank does one thing after the other, whatever the queues: one graph answers for all
mappings (`ends_serially`). Where that one does not end, `points_that_hang` says exactly at which single points a
wait hangs: a wait at point p of a rank closes a circle where something that the rank does behind p leads to the end of
an item that it issued before p. One pass over the graph in reverse order finds, for each node and rank, the first
item of that rank whose end it leads to:

    rank 0    p0  receive dx  p1  send x  p2        send x leads to rank 1's receive x, behind which rank 1 sends dx,
                                                     the other end of receive dx, item 0 of rank 0: p1 hangs

Source: this project
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.nccl.operations import Collectives, Job, Operation, Place, Transfer

Queues = Mapping[tuple[int, int], int]
"""(rank, stream) -> hardware queue of that rank."""


def share_queues(job: Job, num_queues: int) -> Queues:
    """Return the mapping of a device that gives its queues to streams in turn, as they are made."""
    return {
        (rank, each.stream): each.stream % num_queues
        for rank, operations in enumerate(job)
        for each in operations
        if each.place is Place.DEVICE
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """What never happens: by rank, the first operation that does not start or end."""

    first: tuple[tuple[int, int, Operation], ...]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank} #{number} {operation}" for rank, number, operation in self.first)


class WaitGraph:
    """The waits of a job that hold whatever the queues: host order, named items, rendezvous.

    Operation n of rank r is node ``first[r] + n``; the end of a rendezvous has a node of its own behind all those.
    """

    def __init__(self, job: Job) -> None:
        # ``after[node]`` the nodes that wait for it, ``waits[node]`` how many it waits for, ``end[node]`` the node of
        # the operation's end: itself but for a rendezvous. ``serial[node]``: the last operation of the same rank
        # before it on the device or in the host's way, which waits at all points put in front of it.
        self.job = job
        sizes = [len(operations) for operations in job]
        self.first = [sum(sizes[:rank]) for rank in range(len(job))]
        self.num_operations = sum(sizes)
        self.end = list(range(self.num_operations))
        self.after: list[list[int]] = [[] for _ in range(self.num_operations)]
        self.waits = [0] * self.num_operations
        self.serial = [-1] * self.num_operations
        self._add_rendezvous()
        for rank in range(len(job)):
            self._add_host_order(rank)

    def _edge(self, before: int, behind: int) -> None:
        self.after[before].append(behind)
        self.waits[behind] += 1

    def _add_rendezvous(self) -> None:
        """Give rendezvous their ends; an end whose other one is missing waits for nothing that happens."""
        met: defaultdict[tuple[Transfer | Collectives, int], list[int]] = defaultdict(list)
        for rank, operations in enumerate(self.job):
            counts: defaultdict[Transfer | Collectives, int] = defaultdict(int)
            for number, each in enumerate(operations):
                if not each.transfers and each.collectives is None:
                    continue
                self._add_end(self.first[rank] + number)
                for what in (*each.transfers, *(() if each.collectives is None else (each.collectives,))):
                    met[what, counts[what]].append(self.first[rank] + number)
                    counts[what] += 1
        for (what, _), nodes in met.items():
            num_ends = len(what.ranks) if isinstance(what, Collectives) else 2
            for node in nodes:
                for other in nodes:
                    if other != node:
                        self._edge(other, self.end[node])
                self.waits[self.end[node]] += num_ends - len(nodes)

    def _add_end(self, node: int) -> None:
        self.end[node] = len(self.after)
        self.after.append([])
        self.waits.append(0)
        self._edge(node, self.end[node])

    def _add_host_order(self, rank: int) -> None:
        operations, first = self.job[rank], self.first[rank]
        gate = last = -1
        items: list[int] = []  # on the device, since the last wait for all of it
        for number, each in enumerate(operations):
            node = first + number
            if gate >= 0:
                self._edge(gate, node)
            self.serial[node] = last
            for item in items if each.after is None else [first + item for item in each.after]:
                self._edge(self.end[item], node)
            if each.place is Place.HOST:
                gate = node
                if each.after is None:
                    items = []
            if each.place is not Place.THREAD:
                last = self.end[node]
            if each.place is Place.DEVICE:
                items.append(node)

    def behind(self, queues: Queues) -> list[int]:
        """Return, for each node, the item that stands behind it in its queue; -1 for none."""
        following = [-1] * len(self.after)
        tails: dict[tuple[int, int], int] = {}
        for rank, operations in enumerate(self.job):
            node = self.first[rank]
            for each in operations:
                if each.place is Place.DEVICE:
                    queue = (rank, queues[rank, each.stream])
                    if queue in tails:
                        following[tails[queue]] = node
                    tails[queue] = self.end[node]
                node += 1
        return following


def topological_order(
    graph: WaitGraph, queues: Queues | None, *, waits_at: Collection[tuple[int, int]] = ()
) -> list[int]:
    """Return all nodes that happen, each behind those it waits for; fewer than there are nodes: a hang.

    Args:
        queues: None: device-wide waits at every host point, which make queues no matter.
        waits_at: (rank, point) of device-wide waits; point n is before the rank's operation n.
    """
    after, waits = graph.after, list(graph.waits)
    following: list[int] | None = None
    extra: defaultdict[int, list[int]] = defaultdict(list)
    if queues is None:
        for node, last in enumerate(graph.serial):
            if last >= 0:
                extra[last].append(node)
                waits[node] += 1
    else:
        following = graph.behind(queues)
        for node in following:
            if node >= 0:
                waits[node] += 1
        _add_waits(graph, waits_at, extra, waits)
    ready = [node for node, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for other in after[node] if node < len(after) else ():
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
        if following is not None and node < len(following) and (other := following[node]) >= 0:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
        if node in extra:
            for other in extra[node]:
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
    return order


def _add_waits(
    graph: WaitGraph,
    waits_at: Collection[tuple[int, int]],
    extra: defaultdict[int, list[int]],
    waits: list[int],
) -> None:
    """Put device-wide waits into a graph: one node more each, behind what was issued, before all that follows."""
    for rank, point in waits_at:
        operations, first = graph.job[rank], graph.first[rank]
        node = len(waits)
        waits.append(0)
        for number, each in enumerate(operations):
            if number >= point:
                extra[node].append(first + number)
                waits[first + number] += 1
            elif each.place is Place.DEVICE:
                extra[graph.end[first + number]].append(node)
                waits[node] += 1


def ends_serially(graph: WaitGraph) -> bool:
    """Return whether all ends with device-wide waits at every host point of every rank, whatever the queues."""
    return len(topological_order(graph, None)) == len(graph.after)


def ends(graph: WaitGraph, queues: Queues, *, waits_at: Collection[tuple[int, int]] = ()) -> bool:
    """Return whether all ends; the waits as of `topological_order`."""
    found = topological_order(graph, queues, waits_at=waits_at)
    return len(found) == len(graph.after) + len(waits_at)


def find_stuck(
    graph: WaitGraph, queues: Queues | None, *, waits_at: Collection[tuple[int, int]] = ()
) -> Stuck | None:
    """Return what never happens, None where all ends."""
    happened = set(topological_order(graph, queues, waits_at=waits_at))
    first = []
    for rank, operations in enumerate(graph.job):
        for number, each in enumerate(operations):
            node = graph.first[rank] + number
            if node not in happened or graph.end[node] not in happened:
                first.append((rank, number, each))
                break
    return Stuck(first=tuple(first)) if first else None


def points_that_hang(graph: WaitGraph, queues: Queues) -> dict[int, list[int]] | None:
    """Return, by rank, the host points at which a single device-wide wait hangs; None: it hangs without any.

    Exact: the same as calling `ends` with each point in turn, in one pass.
    """
    order = topological_order(graph, queues)
    if len(order) < len(graph.after):
        return None
    # reach [node, rank]: the number of the rank's first item whose end the node leads to.
    num_ranks = len(graph.job)
    following = graph.behind(queues)
    reach = np.full((len(graph.after), num_ranks), np.iinfo(np.int32).max, dtype=np.int32)
    ends_of = {
        graph.end[graph.first[rank] + number]: (rank, number)
        for rank, operations in enumerate(graph.job)
        for number, each in enumerate(operations)
        if each.place is Place.DEVICE
    }
    for node in reversed(order):
        row = reach[node]
        for other in graph.after[node]:
            np.minimum(row, reach[other], out=row)
        if following[node] >= 0:
            np.minimum(row, reach[following[node]], out=row)
        if node in ends_of:
            rank, number = ends_of[node]
            row[rank] = min(row[rank], number)
    found: dict[int, list[int]] = {}
    for rank, operations in enumerate(graph.job):
        points: set[int] = set()
        for number in range(len(operations)):
            earliest = int(reach[graph.first[rank] + number, rank])
            points.update(range(earliest + 1, number + 1))
        if points:
            found[rank] = sorted(points)
    return found


def count_points(job: Sequence[Sequence[Operation]]) -> int:
    """Return the host points of a job: before each operation of each rank, and behind the last one."""
    return sum(len(operations) + 1 for operations in job)


def mismatches(job: Job) -> list[str]:
    """Return what is received as something else than what was sent: ends that meet and move unlike numbers of bytes."""
    sizes: defaultdict[tuple[object, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, operations in enumerate(job):
        counts: defaultdict[object, int] = defaultdict(int)
        for each in operations:
            for transfer, size in zip(each.transfers, each.sizes, strict=bool(each.sizes)):
                sizes[transfer, counts[transfer]].append((rank, size))
                counts[transfer] += 1
    return [
        f"transfer {number} of {transfer}: "
        + ", ".join(f"{size} bytes on rank {rank}" for rank, size in ends_of)
        for (transfer, number), ends_of in sizes.items()
        if len({size for _, size in ends_of}) > 1
    ]
