"""Where each message stands in the programs of its two ranks: one global order, restricted to each rank.

All tasks and messages of all ranks are put into one order in which every task comes after the messages it needs and
every message after the task that makes it: by start time in the simulation (a message counts from the end of its
task), messages before tasks. A rank's program is what of it is the rank's: a send stands behind the task that makes
it, and the receive at the same place of the order, among the receiver's tasks.

Why nothing can stop that runs in this order, whatever waits for what on the way:

- A host that launches its program in order is kept from the next launch by launches before it at most: by a wait for
  the device (an allocator that frees memory, a kernel that is loaded at its first use, a synchronise), or not at all.
- On the device a launch is kept from starting by launches before it of the same rank at most, as streams and hardware
  queues are first in, first out; and a message by its other end, as transfers are rendezvous.
- So take the first item of the global order that has not happened. All before it has, on every rank: it is launched on
  its ranks, nothing before it is left in their queues, both ends of a message stand there. It happens. The tensor ranks
  of a data position run each task together: it is one thing in that order, after the messages of all of them.

That needs one order for all ranks (two ranks that restrict different orders may each wait for the other's later item)
and each message to be a launch of its own, or a part of one with its neighbours. It does not need a number of hardware
queues, streams that do not share one, or a device that nobody waits for: a receive that stood any earlier, ahead of its
send in the order, would.

    rank 0   F0  send x            F1  ...                a wait at * holds rank 1 until x came: rank 0 needs nothing
    rank 1       receive x *  F0       ...                of rank 1 to send it

    rank 0   F0  receive dy *  send x                     a wait at * waits for dy, rank 1 for x: both stand still
    rank 1       receive x  F0  B0  send dy               (dy comes after x in any order: this is none)

What it costs: a receive begins when the receiver's stream comes to it, which is before the first of its tasks that
starts after the send ends; a task that was under way by then may delay the transfer, nothing else does.

Source: this project
Tests: tests/schedule/test_lower.py
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from gpp_plugin.schedule.event_loop import TaskTimes
from gpp_plugin.schedule.task_graph import TaskGraph


def global_order(graph: TaskGraph, times: TaskTimes) -> Iterator[int]:
    """Yield tasks as their node n and messages as ~m: by start time, each after what it waits for."""
    # A linear extension of "waits for": the graph has no circles (`run_task_graph` would have raised), so something
    # is always ready until everything has been yielded. For the example of `task_graph`, with times F 1 and B 2:
    #
    #     0  ~0  1  4  ~1  6  ~2  2  5  7  ~3  3        (node 0, message 0, node 1, ...)
    #
    # and so for rank 0 (nodes 0 to 3) F0, send 0, F1, send 1, receive 2, B0, receive 3, B1.
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
