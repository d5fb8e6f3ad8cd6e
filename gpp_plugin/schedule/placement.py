"""Where each message stands in the programs of its two ranks: sends early, receives late, no deadlock.

A slot is the place before a rank's n-th task (the last one is after all of them); all messages in one
slot are one group. A send stands right after the task that makes it. A receive is waited for in
order, so it should stand as late as it can: right before the task that needs it. That alone can
deadlock on DAGs under rendezvous semantics (14 % of random ones), so:

1. one global order of all tasks and messages gives every receive a slot that is proven safe (below);
2. all receives are put right before their tasks, and all programs are executed serially;
3. if they stop, the channels in the circle go back to their safe slots, and 2 is tried again.

Why the safe slots cannot deadlock with rendezvous messages and one queue a rank: in the global order
every task comes after the messages it needs and every message after the task that makes it, so the
first thing in that order that has not happened can always happen next. Posting adjacent messages of a
rank together only lets the later ones start sooner: nothing else of that rank lies between them. The tensor
ranks of a data position run each task together: it is one thing in that order, after the messages of all of them.

The global order is by start time in the simulation (a message counts from the end of its task),
messages before tasks.

Source: this project
Tests: tests/schedule/test_lower.py
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from gpp_plugin.schedule.event_loop import TaskTimes
from gpp_plugin.schedule.task_graph import TaskGraph

Channel = tuple[int, bool, int, int]
"""Edge, whether it holds activations, sender, receiver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The slot of each message on its sender and on its receiver, and the order within slots.

    Args:
        order: all messages; those of one slot, and of one channel, stand in this order.
        send_slot, receive_slot: by message number, an index into the rank's tasks.
    """

    order: list[int]
    send_slot: list[int]
    receive_slot: list[int]


def place_messages(graph: TaskGraph, times: TaskTimes) -> Placement:
    """Return slots with which all ranks finish under serial rendezvous execution."""
    # Why receives are late: a receive is waited for where it stands, so whatever comes behind it on its rank waits
    # too. In the example of `task_graph` message 1 is sent early, so the global order has rank 1 wait for it before
    # B0, though only F1 needs it; where it is slow, B0 and the gradient that rank 0 waits for are late for nothing:
    #
    #     safe   rank 1   receive 0  F0  receive 1  B0  send 2  F1  B1  send 3
    #     late   rank 1   receive 0  F0  B0  send 2  receive 1  F1  B1  send 3
    #
    # Late slots are tried for all messages at once; channels on which that stops go back to their safe slots, whole,
    # as both ends of a channel keep one order. Every round pins at least one channel more, so there are at most as
    # many rounds as channels, and with all of them pinned the placement is the global order, which cannot stop.
    safe = safe_placement(graph, times)
    late = _late_slots(graph, safe)
    channels = _channels(graph)
    pinned: set[Channel] = set()
    while True:
        slots = [
            early if channel in pinned else latest
            for early, latest, channel in zip(safe.receive_slot, late, channels, strict=True)
        ]
        placement = Placement(order=safe.order, send_slot=safe.send_slot, receive_slot=slots)
        circle = _waiting_messages(graph, placement)
        if not circle:
            return placement
        moved = {channels[message] for message in circle if slots[message] != safe.receive_slot[message]}
        assert moved, "the global order itself cannot stop"
        pinned |= moved


def global_order(graph: TaskGraph, times: TaskTimes) -> Iterator[int]:
    """Yield tasks as their node n and messages as ~m: by start time, each after what it waits for."""
    # A linear extension of "waits for": the graph has no circles (`run_task_graph` would have raised), so something
    # is always ready until everything has been yielded. For the example of `task_graph`, with times F 1 and B 2:
    #
    #     0  ~0  1  4  ~1  6  ~2  2  5  7  ~3  3        (node 0, message 0, node 1, ...)
    #
    # Whatever each rank runs serially in this order cannot deadlock: take the first item of the whole order that has
    # not happened. All before it has, on every rank; so its task has its messages, or both ends of its message stand
    # at it, and it can happen now. That argument needs one order for all ranks: two ranks that restrict different
    # extensions may each wait for the other's later item.
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


def safe_placement(graph: TaskGraph, times: TaskTimes) -> Placement:
    """Return the slots of the global order itself, in which every receive stands as early as its send."""
    # A slot counts the rank's tasks that come before the message in the global order: for the example above the send
    # slots are [1, 2, 2, 4] and the receive slots [0, 1, 2, 3], so rank 0 receives the gradients right before B0 and
    # B1.
    num_run = dict.fromkeys(graph.orders, 0)
    order: list[int] = []
    send_slot, receive_slot = [0] * len(graph.source), [0] * len(graph.source)
    for item in global_order(graph, times):
        if item >= 0:
            num_run[graph.rank[item]] += 1
            continue
        message = ~item
        order.append(message)
        send_slot[message] = num_run[graph.rank[graph.source[message]]]
        receive_slot[message] = num_run[graph.rank[graph.target[message]]]
    return Placement(order=order, send_slot=send_slot, receive_slot=receive_slot)


def _channels(graph: TaskGraph) -> list[Channel]:
    return [
        (edge, number < graph.num_activations, sender, receiver)
        for number, (edge, sender, receiver) in enumerate(
            zip(graph.edge, graph.sender, graph.receiver, strict=True)
        )
    ]


def _late_slots(graph: TaskGraph, placement: Placement) -> list[int]:
    """Return for each receive the slot of its task, or an earlier one where its channel's order asks for it."""
    position = [0] * len(graph.stage)
    for nodes in graph.orders.values():
        for index, node in enumerate(nodes):
            position[node] = index
    # Backwards over the order, so that on a channel no message gets a slot behind that of the message after it:
    #
    #     needed before tasks  3, 5, 4   of messages 0, 1, 2 of one channel      gives slots  3, 4, 4
    channels = _channels(graph)
    limit: dict[Channel, int] = {}
    late = [0] * len(graph.source)
    for message in reversed(placement.order):
        channel = channels[message]
        slot = min(position[graph.target[message]], limit.get(channel, len(position)))
        late[message] = limit[channel] = slot
    return late


def _waiting_messages(graph: TaskGraph, placement: Placement) -> list[int]:
    """Return the messages of a circle in which ranks wait for each other; none if all finish.

    Every rank executes its slots in order; a slot ends when all its messages are posted at both ends, and the
    next one begins when the tasks between them have been run, by all tensor ranks together.
    """
    # By rank: ``groups[rank][slot]`` are its messages there, ``slots[rank]`` the slots at which it has any,
    # ``at[rank]`` the index of the one it stands at, ``missing[rank]`` how many of that slot's messages lack their
    # other end. By message: ``posted`` is the rank that stands at one end of it. A rank is looked at once for each of
    # its slots, so this takes a time in the number of messages:
    #
    #     rank 0 at slot 1: sends a, receives b       posted[a] = posted[b] = 0, missing[0] = 2
    #     rank 1 at slot 0: receives a                missing[0] = 1; nothing of its own is missing: on to its slot 2
    #     rank 1 at slot 2: sends b                   missing[0] = 0: rank 0 goes on too
    groups, slots = _slots(graph, placement)
    rows = {rank: row for row in graph.members.values() if len(row) > 1 for rank in row}
    at = dict.fromkeys(groups, 0)
    missing = dict.fromkeys(groups, 0)
    posted: list[int | None] = [None] * len(graph.source)
    done = dict.fromkeys(rows, 0)  # how many slots a tensor rank has ended
    ready = list(groups)

    def end_slot(rank: int) -> list[int]:
        """Take note that ``rank`` is through its slot; return who goes on to the next one."""
        if rank not in rows:
            at[rank] += 1
            return [rank]
        done[rank] += 1
        if min(done[peer] for peer in rows[rank]) < done[rank]:
            return []
        for peer in rows[rank]:
            at[peer] += 1
        return list(rows[rank])

    while ready:
        rank = ready.pop()
        mine, by_slot = slots[rank], groups[rank]
        if at[rank] == len(mine):
            continue
        waits = 0
        for message in by_slot.get(mine[at[rank]], ()):
            other = posted[message]
            if other is None:
                posted[message] = rank
                waits += 1
            else:
                posted[message] = None
                missing[other] -= 1
                if missing[other] == 0:
                    ready += end_slot(other)
        missing[rank] = waits
        if not waits:
            ready += end_slot(rank)
    waits_for = _who_waits(graph, posted, rows, done)
    return _circle(waits_for) if waits_for else []


def _who_waits(
    graph: TaskGraph,
    posted: list[int | None],
    rows: dict[int, tuple[int, ...]],
    done: dict[int, int],
) -> dict[int, tuple[int, int | None]]:
    """Return for each rank that still stands one that it waits for, and the message or None for a task.

    Args:
        posted, rows, done: as of `_waiting_messages`, where it ended.
    """
    # Who stands waits for somebody who stands too, so following one of those from anywhere ends in a circle. Of the
    # two kinds a message goes before a task, as only a message's slot can be moved.
    waits_for: dict[int, tuple[int, int | None]] = {}
    for rank, row in rows.items():
        late = min(row, key=done.__getitem__)
        if done[late] < done[rank]:
            waits_for[rank] = (late, None)
    for message, waiting in enumerate(posted):
        if waiting is not None:
            sender, receiver = graph.sender[message], graph.receiver[message]
            waits_for[waiting] = (receiver if waiting == sender else sender, message)
    return waits_for


def _slots(
    graph: TaskGraph, placement: Placement
) -> tuple[dict[int, dict[int, list[int]]], dict[int, list[int]]]:
    """Return the messages of each rank by slot, and its slots in order: those at which one of its row has any."""
    groups: dict[int, dict[int, list[int]]] = {rank: {} for row in graph.members.values() for rank in row}
    for message in placement.order:
        sender, receiver = graph.sender[message], graph.receiver[message]
        groups[sender].setdefault(placement.send_slot[message], []).append(message)
        groups[receiver].setdefault(placement.receive_slot[message], []).append(message)
    slots = {}
    for row in graph.members.values():
        common = sorted(set().union(*(groups[rank] for rank in row)))
        slots.update(dict.fromkeys(row, common))
    return groups, slots


def _circle(waits_for: dict[int, tuple[int, int | None]]) -> list[int]:
    """Return the messages of a circle of (rank that is waited for, message or None for a task)."""
    rank = next(iter(waits_for))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = waits_for[rank][0]
    found = (waits_for[r][1] for r in path[path.index(rank) :])
    return [message for message in found if message is not None]
