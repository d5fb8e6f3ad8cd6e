"""Times of a task graph: longest paths where links are free, an event loop where they are shared."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.schedule.task_graph import TaskGraph, deadlock_error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """When each task runs and each message travels, in microseconds; lists as in `TaskGraph`."""

    start: list[float]
    end: list[float]
    message_start: list[float]
    message_end: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What each message costs: the time it takes up its ends' links, and the latency after that."""

    occupied_us: list[float]
    latency_us: list[float]


def message_transfers(graph: TaskGraph, cluster: Cluster) -> Transfers:
    """Return the cost of every message of ``graph`` on the links of ``cluster``.

    Raises:
        PlanError: the plan uses more ranks than the cluster has.
    """
    highest = max((rank for ranks in graph.members.values() for rank in ranks), default=0)
    if highest >= cluster.num_devices:
        raise PlanError(
            f"the plan uses rank {highest}, cluster {cluster.name!r} has {cluster.num_devices} devices; "
            "plan for fewer or describe a larger cluster"
        )
    rates: dict[tuple[int, int], tuple[float, float]] = {}
    occupied, latency = [], []
    for sender, receiver, num_bytes in zip(graph.sender, graph.receiver, graph.num_bytes, strict=True):
        pair = (sender, receiver)
        rate = rates.get(pair)
        if rate is None:
            fixed = cluster.transfer_us(*pair, 0.0)
            rate = rates[pair] = (fixed, cluster.transfer_us(*pair, 1e6) - fixed)
        latency.append(rate[0])
        occupied.append(rate[1] * num_bytes / 1e6)
    return Transfers(occupied_us=occupied, latency_us=latency)


def run_task_graph(
    graph: TaskGraph,
    durations: Sequence[float],
    *,
    transfers: Transfers | None = None,
    share_links: bool = True,
) -> TaskTimes:
    """Return the times at which every rank runs its tasks in order, each as soon as it can.

    Messages travel beside the computation. A rank has one link out and one link in; with
    ``share_links`` messages take turns on each in the order in which they are ready (ties: by message
    number), else each has the full bandwidth.

    Args:
        durations: microseconds of each node.
        transfers: cost of each message; None means none.

    Raises:
        ScheduleError: the orders wait for each other in a circle.
    """
    if transfers is not None and share_links:
        return _run_with_shared_links(graph, durations, transfers)
    return _run_with_free_links(graph, durations, transfers)


def _run_with_free_links(
    graph: TaskGraph, durations: Sequence[float], transfers: Transfers | None
) -> TaskTimes:
    # Longest paths: a node starts when the last thing it waits for is there, and is ready when its count of those
    # comes to 0, so every node and message is looked at once, in any order that respects the graph. Lists are by node
    # (start, end, waits) or by message. Forward 1, backward 2, the example of `task_graph`, messages that take 0.5:
    #
    #     node    0  1  2    3    4    5    6    7
    #     start   0  1  5    8    1.5  4.5  2.5  5.5      node 5 waits for message 1 (at 2.5) and for node 6, which ends
    #     end     1  2  7    10   2.5  5.5  4.5  7.5      at 4.5: it starts at 4.5
    num_messages = len(graph.source)
    if transfers is None:
        delay = [0.0] * num_messages
    else:
        delay = [a + b for a, b in zip(transfers.occupied_us, transfers.latency_us, strict=True)]
    start, waits = [0.0] * len(durations), list(graph.num_waits)
    end = [-1.0] * len(durations)
    next_on_rank, target, unlocks = graph.next_on_rank, graph.target, graph.unlocks
    first_message, next_message = graph.first_message, graph.next_message
    message_start, message_end = [0.0] * num_messages, [0.0] * num_messages
    ready = [node for node, count in enumerate(waits) if count == 0]
    num_run = 0
    while ready:
        node = ready.pop()
        num_run += 1
        now = end[node] = start[node] + durations[node]
        follower = next_on_rank[node]
        if follower >= 0:
            if now > start[follower]:
                start[follower] = now
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
        message = first_message[node]
        while message >= 0:
            message_start[message] = now
            arrival = message_end[message] = now + delay[message]
            consumer = target[message]
            if arrival > start[consumer]:
                start[consumer] = arrival
            waits[consumer] -= 1
            if waits[consumer] == 0:
                ready.append(consumer)
            message = next_message[message]
        for locked in unlocks.get(node, ()) if unlocks else ():
            start[locked] = max(start[locked], now)
            waits[locked] -= 1
            if waits[locked] == 0:
                ready.append(locked)
    if num_run < len(durations):
        raise deadlock_error(graph, [time >= 0.0 for time in end])
    return TaskTimes(start=start, end=end, message_start=message_start, message_end=message_end)


def _run_with_shared_links(graph: TaskGraph, durations: Sequence[float], transfers: Transfers) -> TaskTimes:
    # A message takes three steps, each of which may have to wait: it is ready when its task ends; its sender's link
    # out takes it when that is free, for ``occupied`` microseconds; its receiver's link in does so too, not before;
    # after ``latency`` more it is there. Events come in order of time, so who is ready first has a link first. Two
    # messages of 4 that rank 0 sends at time 0, to ranks 1 and 2, with a latency of 1:
    #
    #     out of 0   [0 a 4][4 b 8]
    #     into 1     [0 a 4] there at 5                into 2           [4 b 8] there at 9
    num_nodes, num_messages = len(durations), len(graph.source)
    occupied, latency = transfers.occupied_us, transfers.latency_us
    start, waits = [0.0] * num_nodes, list(graph.num_waits)
    end = [-1.0] * num_nodes
    message_start, message_end = [0.0] * num_messages, [0.0] * num_messages
    sender_of, receiver_of, target, unlocks = graph.sender, graph.receiver, graph.target, graph.unlocks
    next_on_rank, first_message, next_message = graph.next_on_rank, graph.first_message, graph.next_message
    out_free = dict.fromkeys((rank for ranks in graph.members.values() for rank in ranks), 0.0)
    in_free = dict(out_free)
    push, pop = heapq.heappush, heapq.heappop
    # An event is (time, code): a task ends, a message is ready, a message comes to its receiver's link.
    arrives = num_nodes + num_messages
    events = [(durations[node], node) for node, count in enumerate(waits) if count == 0]
    heapq.heapify(events)
    num_run = 0
    while events:
        now, code = pop(events)
        if code < num_nodes:
            num_run += 1
            end[code] = now
            message = first_message[code]
            while message >= 0:
                push(events, (now, num_nodes + message))
                message = next_message[message]
            freed = unlocks.get(code, ()) if unlocks else ()
            follower = next_on_rank[code]
            for node in (follower, *freed) if freed else (follower,):
                if node < 0:
                    continue
                if now > start[node]:
                    start[node] = now
                waits[node] -= 1
                if waits[node] == 0:
                    push(events, (start[node] + durations[node], node))
            continue
        if code < arrives:
            message = code - num_nodes
            sender = sender_of[message]
            begin = out_free[sender]
            if begin < now:
                begin = now
            out_free[sender] = begin + occupied[message]
            message_start[message] = begin
            if begin > now:
                push(events, (begin, arrives + message))
                continue
        else:
            message = code - arrives
        node = target[message]
        receiver = receiver_of[message]
        begin = in_free[receiver]
        if begin < now:
            begin = now
        begin += occupied[message]
        in_free[receiver] = begin
        begin += latency[message]
        message_end[message] = begin
        if begin > start[node]:
            start[node] = begin
        waits[node] -= 1
        if waits[node] == 0:
            push(events, (start[node] + durations[node], node))
    if num_run < num_nodes:
        raise deadlock_error(graph, [time >= 0.0 for time in end])
    return TaskTimes(start=start, end=end, message_start=message_start, message_end=message_end)
