"""Times of a task graph: longest paths where links are free, an event loop where they are shared.

Both give the same times where no two messages share a link. The first needs no events in the order of time: a node's
start is the largest of what it waits for, whatever order nodes are visited in, so it costs a fraction of the second.

What a task takes is `stage_task_us`: from the plan, a mapping or a function. Without that, half a forward takes half of
the time, the input and the weight gradient half of the backward each (for a stack of matrix products these are one
product of the same size each; what more a split costs is in the plan's times of its parts). What a message takes is in
`MessageCosts`. `simulate.predict` plays lowered programs with the same two.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan, stage_task_us
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.task_graph import TaskGraph, deadlock_error

Durations = Callable[[int, TaskKind, int, int], float] | Mapping[tuple[Any, ...], float]
"""Microseconds by (stage, kind, micro-batch, rank).

A mapping may leave out the rank, and name half a forward by one more entry, its half. Where it lacks a part
of a task, that takes half of the whole task's time; a function is called for I and W, and for whole forwards.
"""


def duration_reader(plan: PipelinePlan, durations: Durations | None) -> Callable[[Task, int], float]:
    """Return a function from (task, rank) to microseconds.

    Args:
        durations: where the plan's own times do not hold; None takes the plan's (`stage_task_us`).
    """
    if durations is None:
        stages = plan.stages
        return lambda task, rank: stage_task_us(stages[task.stage], task.kind, task.half)
    return _function_reader(durations) if callable(durations) else _mapping_reader(durations)


def task_durations(graph: TaskGraph, durations: Durations | None) -> list[float]:
    """Return the microseconds of every node of ``graph``: of its slowest rank, for which the others wait.

    Raises:
        PlanError: a mapping lacks a task, or a time is negative.
    """
    if durations is None:
        return _planned(graph, graph.plan)
    result = []
    read = duration_reader(graph.plan, durations)
    for node in range(len(graph.stage)):
        task = graph.task(node)
        times = [read(task, rank) for rank in graph.members[graph.rank[node]]]
        # Written this way round so that NaN is refused too.
        if not min(times) >= 0.0:
            raise PlanError(
                f"{task} on rank {graph.rank[node]} takes {min(times)} us; give a time of 0 or more"
            )
        result.append(max(times))
    return result


def nominal_times(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan itself, or with times by the number of samples where it has none."""
    if any(stage.forward_us > 0.0 for stage in plan.stages):
        return plan
    # Plans without a profile (written by hand, in tests) still need *an* order: a sample's
    # forward takes 1 us, its backward 2 us, the usual ratio. What is lowered from it is correct
    # at any times; only its speed is a guess.
    samples = [float(stage.local_batch_size) for stage in plan.stages]
    return plan.with_each(forward_us=samples, backward_us=[2.0 * count for count in samples])


def nominal_durations(graph: TaskGraph) -> list[float]:
    """Return the plan's times, or times by the number of samples where the plan has none."""
    return _planned(graph, nominal_times(graph.plan))


def _planned(graph: TaskGraph, plan: PipelinePlan) -> list[float]:
    # A group is all tasks of a stage, kind and half, numbered consecutively: one look-up a group instead of
    # one a node, for planners that simulate thousands of candidates.
    result: list[float] = []
    for group in graph.groups:
        result += [stage_task_us(plan.stages[group.stage], group.kind, group.half)] * group.count
    return result


def _function_reader(durations: Callable[[int, TaskKind, int, int], float]) -> Callable[[Task, int], float]:
    def read(task: Task, rank: int) -> float:
        whole = durations(task.stage, task.kind, task.micro_batch, rank)
        return whole if task.half is None else whole / 2.0

    return read


def _mapping_reader(durations: Mapping[tuple[Any, ...], float]) -> Callable[[Task, int], float]:
    def find(task: Task, kind: TaskKind, rank: int) -> float | None:
        found = durations.get((task.stage, kind, task.micro_batch, rank))
        return durations.get((task.stage, kind, task.micro_batch)) if found is None else found

    def read(task: Task, rank: int) -> float:
        if task.half is None:
            found = find(task, task.kind, rank)
        else:
            found = durations.get((task.stage, task.kind, task.micro_batch, rank, task.half))
        if found is not None:
            return found
        is_whole = task.half is None and task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
        kind = TaskKind.FORWARD if task.kind is TaskKind.FORWARD else TaskKind.BACKWARD
        whole = None if is_whole else find(task, kind, rank)
        if whole is None:
            raise PlanError(
                f"durations lack (stage {task.stage}, {task.kind.value}, micro-batch {task.micro_batch}[, rank "
                f"{rank}]){'' if task.half is None else f' or half {task.half} of it'}; add it"
            )
        return whole / 2.0

    return read


# ---- times of a graph -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """When each task runs and each message travels, in microseconds; lists as in `TaskGraph`."""

    start: list[float]
    end: list[float]
    message_start: list[float]
    message_end: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What each message costs: the time it takes up its ends' links, and the latency after that.

    Args:
        leaves_by, comes_by: what it takes turns on with others, as `Cluster.port` numbers it; None: the links of its
            two ranks.
    """

    occupied_us: list[float]
    latency_us: list[float]
    leaves_by: list[int] | None = None
    comes_by: list[int] | None = None


class MessageCosts:
    """What messages take on the links of a cluster (`Cluster.transfer_us`), in the two parts that simulators play.

    What passes between two stages of one rank takes no link and no time.
    """

    def __init__(self, cluster: Cluster | None) -> None:
        """Take a cluster; without one messages take no time."""
        self._cluster = cluster
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}

    def of(self, sender: int, receiver: int, num_bytes: float) -> tuple[float, float]:
        """Return the time a message takes up its ends' links, and the latency after that."""
        if self._cluster is None or sender == receiver:
            return 0.0, 0.0
        pair = (sender, receiver)
        rate = self._rates.get(pair)
        if rate is None:
            latency = self._cluster.transfer_us(*pair, 0.0)
            rate = self._rates[pair] = self._cluster.transfer_us(*pair, 1e6) - latency, latency
        return rate[0] * num_bytes / 1e6, rate[1]

    def ports(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return what a message leaves by and comes by: two ranks' links, or adapters that ranks share."""
        if self._cluster is None or not self._cluster.has_adapters or sender == receiver:
            return sender, receiver
        link = self._cluster.link_between(sender, receiver)
        return self._cluster.port(sender, link), self._cluster.port(receiver, link)


def message_transfers(graph: TaskGraph, cluster: Cluster | None) -> Transfers | None:
    """Return the cost of every message of ``graph`` on the links of ``cluster``; what is order alone costs nothing.

    None: without a cluster no message takes time.

    Raises:
        PlanError: the plan uses more ranks than the cluster has.
    """
    if cluster is None:
        return None
    highest = max((rank for ranks in graph.members.values() for rank in ranks), default=0)
    if highest >= cluster.num_devices:
        raise PlanError(
            f"the plan uses rank {highest}, cluster {cluster.name!r} has {cluster.num_devices} devices; "
            "plan for fewer or describe a larger cluster"
        )
    costs = MessageCosts(cluster)
    is_silent = [edge.is_order_only for edge in graph.plan.edges]
    each = [
        (0.0, 0.0) if is_silent[edge] else costs.of(sender, receiver, num_bytes)
        for edge, sender, receiver, num_bytes in zip(
            graph.edge, graph.sender, graph.receiver, graph.num_bytes, strict=True
        )
    ]
    found = Transfers(occupied_us=[us for us, _ in each], latency_us=[us for _, us in each])
    if not cluster.has_adapters:
        return found
    ports = [costs.ports(*ends) for ends in zip(graph.sender, graph.receiver, strict=True)]
    return replace(found, leaves_by=[port for port, _ in ports], comes_by=[port for _, port in ports])


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What ranks wait for beside tasks and messages, in microseconds: sums and gathers among a stage's ranks.

    Args:
        before: by node, the earliest time at which it starts.
        behind: of each node, how long after it the next one of its rank starts; messages leave at its end.
    """

    before: Mapping[int, float]
    behind: Sequence[float]


def _starts(graph: TaskGraph, waits_us: Waits | None) -> list[float]:
    found = [0.0] * len(graph.stage)
    for node, us in ({} if waits_us is None else waits_us.before).items():
        found[node] = us
    return found


def run_task_graph(
    graph: TaskGraph,
    durations: Sequence[float],
    *,
    transfers: Transfers | None = None,
    share_links: bool = True,
    waits_us: Waits | None = None,
) -> TaskTimes:
    """Return the times at which every rank runs its tasks in order, each as soon as it can.

    Messages travel beside the computation. A rank has one link out and one link in, and shares the adapters
    of its node where the cluster has such; with ``share_links`` messages take turns on each in the order in
    which they are ready (ties: by message number), else each has the full bandwidth.

    Args:
        durations: microseconds of each node.
        transfers: cost of each message; None means none.
        waits_us: what ranks wait for beside that.

    Raises:
        ScheduleError: the orders wait for each other in a circle.
    """
    if transfers is not None and share_links:
        return _run_with_shared_links(graph, durations, transfers, waits_us)
    return _run_with_free_links(graph, durations, transfers, waits_us)


def _run_with_free_links(
    graph: TaskGraph, durations: Sequence[float], transfers: Transfers | None, waits_us: Waits | None
) -> TaskTimes:
    # A longest path: tasks and messages form an acyclic graph, and `start` of a node is the
    # largest end of what it waits for. So any order in which a node comes after all it waits for
    # gives the same times: a plain stack does, no heap. O(tasks + messages). `waits` counts what
    # is still to come, as in Kahn's topological sort.
    num_messages = len(graph.source)
    if transfers is None:
        delay = [0.0] * num_messages
    else:
        delay = [a + b for a, b in zip(transfers.occupied_us, transfers.latency_us, strict=True)]
    # Lists are by node (a task on a row of tensor ranks) or by message:
    #     F0 (0-10) on rank 0 sends to F0 on rank 1, 2 us away: that one starts at max(0, 10 + 2)
    start, waits = _starts(graph, waits_us), list(graph.num_waits)
    behind = None if waits_us is None else waits_us.behind
    # -1 marks what never ran: those nodes are in a circle, or behind one.
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
            free = now if behind is None else now + behind[node]
            if free > start[follower]:
                start[follower] = free
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
        # A stage without backwards holds what its consumers have not taken yet: their tasks unlock its next ones.
        for locked in unlocks.get(node, ()) if unlocks else ():
            start[locked] = max(start[locked], now)
            waits[locked] -= 1
            if waits[locked] == 0:
                ready.append(locked)
    if num_run < len(durations):
        raise deadlock_error(graph, [time >= 0.0 for time in end])
    return TaskTimes(start=start, end=end, message_start=message_start, message_end=message_end)


def _run_with_shared_links(
    graph: TaskGraph, durations: Sequence[float], transfers: Transfers, waits_us: Waits | None
) -> TaskTimes:
    # One function without calls, on local names, since planners run it for thousands of candidates. The order of
    # events matters here: who is ready first takes the link first. Links are cut-through: a message takes its
    # sender's link out and, from the same moment if it is free, its receiver's link in. Two messages of 10 us,
    # latency 1 us, from ranks 0 and 1 to rank 2, both ready at 0:
    #
    #   rank 0 out  |mmmmmmmm|                  0..10
    #   rank 1 out  |nnnnnnnn|                  0..10: a sender is free again whatever its receiver does
    #   rank 2 in   |mmmmmmmm|nnnnnnnn|         0..10 and 10..20; they arrive at 11 and 21
    num_nodes, num_messages = len(durations), len(graph.source)
    occupied, latency = transfers.occupied_us, transfers.latency_us
    start, waits = _starts(graph, waits_us), list(graph.num_waits)
    behind = None if waits_us is None else waits_us.behind
    end = [-1.0] * num_nodes
    message_start, message_end = [0.0] * num_messages, [0.0] * num_messages
    target, unlocks = graph.target, graph.unlocks
    next_on_rank, first_message, next_message = graph.next_on_rank, graph.first_message, graph.next_message
    out_free = dict.fromkeys((rank for ranks in graph.members.values() for rank in ranks), 0.0)
    in_free = dict(out_free)
    leaves_by, comes_by = transfers.leaves_by or graph.sender, transfers.comes_by or graph.receiver
    out_free.update(dict.fromkeys(leaves_by, 0.0))
    in_free.update(dict.fromkeys(comes_by, 0.0))
    push, pop = heapq.heappush, heapq.heappop
    # An event is (time, code): a task ends, a message is ready, a message comes to its receiver's link. Codes are
    # nodes, then messages, then messages again, so that at one time all tasks end before a message takes a link, and
    # messages that are ready together go in the order of their numbers.
    arrives = num_nodes + num_messages
    # Hand-overs between two stages of one rank take no link, so they wait for none.
    shares_ranks = graph.plan.shares_ranks
    events = [(start[node] + durations[node], node) for node, count in enumerate(waits) if count == 0]
    heapq.heapify(events)
    num_run = 0
    while events:
        now, code = pop(events)
        if code < num_nodes:
            num_run += 1
            end[code] = now
            message = first_message[code]
            freed = tuple(unlocks.get(code, ())) if unlocks else ()
            while message >= 0:
                if shares_ranks and graph.sender[message] == graph.receiver[message]:
                    message_start[message] = message_end[message] = now
                    freed = (*freed, target[message])
                else:
                    push(events, (now, num_nodes + message))
                message = next_message[message]
            follower = next_on_rank[code]
            if behind is not None and follower >= 0:
                start[follower] = max(start[follower], now + behind[code])
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
            sender = leaves_by[message]
            begin = out_free[sender]
            if begin < now:
                begin = now
            out_free[sender] = begin + occupied[message]
            message_start[message] = begin
            # A link that is free at once needs no second event: fall through to the receiver's end.
            if begin > now:
                push(events, (begin, arrives + message))
                continue
        else:
            message = code - arrives
        node = target[message]
        receiver = comes_by[message]
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
