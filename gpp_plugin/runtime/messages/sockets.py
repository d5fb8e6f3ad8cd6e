"""Connections between ranks: the order in which they are opened, and gloo's sockets with buffers for whole messages.

A connection starts with a receive window of 64 KiB, which grows with its traffic. Before it has, the tail
of a larger message waits until the receiver's kernel acknowledges its beginning, which it delays by up to 40 ms:
seen as one message in some thousands that took 20 or 40 ms on loopback, on messages of 64 KiB and not of 16.

Source: greedy edge colouring (Vizing, 1964, has k + 1 colours for simple graphs; no rank waits for that)
Tests: tests/runtime/test_opening_order.py
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import socket
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gpp_plugin.plugins import Channel

BUFFER_BYTES = 1 << 20
_DESCRIPTORS = Path("/proc/self/fd")

MOST_MESHED = 32
"""Ranks up to which gloo connects each with each when a group is made; of more, two connect at their first message."""

_WHEN_USED = "TORCH_GLOO_LAZY_INIT"

LEAST_OPENING_S = 60.0
"""How long ranks may take to connect, where the wait for a message is shorter."""

_HANG_UP_TAG = 1 << 29
"""Of a message that nobody sends."""

_OPENING_TAG = 1 << 30
"""Of the byte that connects two ranks: higher than any other tag."""


def connect_when_used(num_ranks: int) -> None:
    """Let gloo make the connections of a large job's groups when they are first used; before its first group.

    Meshed, a group of n ranks has n - 1 sockets and reads n values of 8 n bytes on each rank: of 1,024 ranks that is
    8.6 GB out of rank 0's store for a group, and more files than a process may open.
    """
    if num_ranks > MOST_MESHED:
        os.environ.setdefault(_WHEN_USED, "1")


def are_meshed() -> bool:
    """Return whether gloo's groups are connected when they are made (`connect_when_used`)."""
    return os.environ.get(_WHEN_USED, "0") in ("", "0", "no", "false", "False", "off")


def open_pairs(
    groups: Collection[dist.ProcessGroup], pairs: Collection[Channel], *, timeout_s: float
) -> None:
    """Connect pairs of ranks in gloo's groups; collective over the pairs.

    Nothing is to be done where groups connect all pairs when they are made (`connect_when_used`).
    """
    if are_meshed():
        return
    # Connected now, a byte in each group, and with wide buffers: not in a step, where one end would wait.
    own, limit = dist.get_rank(), datetime.timedelta(seconds=max(timeout_s, LEAST_OPENING_S))
    with widened_sockets():
        for first, second in opening_order({(min(pair), max(pair)) for pair in pairs}):
            if own not in (first, second):
                continue
            for group in groups:
                call, peer = (group.send, second) if own == first else (group.recv, first)
                there = dist.get_group_rank(group, peer)
                call([torch.zeros(1, dtype=torch.uint8)], there, _OPENING_TAG).wait(limit)


@contextlib.contextmanager
def widened_sockets() -> Iterator[None]:
    """Give the TCP connections that are made within the block larger buffers (on Linux; elsewhere nothing)."""
    before = _descriptors()
    yield
    _widen(_descriptors() - before)


def widen_open_sockets() -> None:
    """Give all TCP connections of this process larger buffers: those of groups that others have made."""
    _widen(_descriptors())


def _widen(descriptors: Collection[int]) -> None:
    for connection in _tcp_sockets(descriptors):
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            if connection.getsockopt(socket.SOL_SOCKET, option) < BUFFER_BYTES:
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def close_connections() -> None:
    """Close torch's TCP connections to other processes, so that what is pending on them fails now.

    A collective that a stopped rank does not come to stays when its wait is given up. The destructor of gloo's group
    waits for it, for as long as the group's limit: half an hour. The connections of Python's own sockets stay.
    """
    own = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
    for connection in _tcp_sockets(_descriptors() - own):
        with contextlib.suppress(OSError):  # not connected: gloo's listeners are not to be touched
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def hang_up(group: dist.ProcessGroup, others: Iterable[int]) -> None:
    """End every wait for a message in a group of gloo's, here and on the other ranks: this rank gives up.

    Args:
        others: the other ranks of the group.
    """
    # gloo closes the connections of a group in which a receive is late, and nothing else does while one is waited for.
    # One of a rank that is gone is not late, it fails: then the next one, of a rank that may be stopped.
    nothing = torch.empty(1, dtype=torch.uint8)
    for other in others:
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(nothing, other, group=group, tag=_HANG_UP_TAG)
            work.wait(datetime.timedelta(milliseconds=1))  # type: ignore[union-attr]


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir(_DESCRIPTORS)} if _DESCRIPTORS.is_dir() else set()


def _tcp_sockets(descriptors: Collection[int]) -> Iterator[socket.socket]:
    """Yield a copy of each that is a TCP socket, torch's own as well; closed behind the loop's body."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile: the descriptor that listed the folder
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield copy


# In which order the ranks of a job open the channels between them, so that many are opened at once.
#
# Opening a channel takes both of its ranks, which wait for each other. Every rank visits the channels in one order,
# so that whoever waits for another waits for somebody at an earlier one: no circle. But a sorted order is a queue. Of a
# chain of four ranks, r opening with r + 1, seen by the time at which each is opened:
#
#     sorted      (0,1) at 1    (1,2) at 2    (2,3) at 3          n - 1 one after another
#     in rounds   (0,1) at 1    (1,2) at 2    (2,3) at 1          as many as a rank has channels, twice that at most
#
# A round is a matching: no rank is in it twice. Greedily, each channel joins the first round that has neither of its
# ranks; where no rank has more than k channels there are at most 2 k - 1 rounds, as each of a channel's ranks takes up
# k - 1 others at most.


def opening_rounds(channels: Collection[Channel]) -> list[list[Channel]]:
    """Return the channels in rounds that follow each other; within one no rank occurs twice.

    Args:
        channels: (source rank, target rank), each once; both directions of a pair are channels of their own.

    >>> opening_rounds([(0, 1), (1, 2), (2, 3), (3, 2)])
    [[(0, 1), (2, 3)], [(1, 2)], [(3, 2)]]
    """
    rounds: list[list[Channel]] = []
    taken: dict[int, set[int]] = defaultdict(set)  # by rank, the rounds that it is in
    for channel in sorted(set(channels)):
        busy = taken[channel[0]] | taken[channel[1]]
        number = next(number for number in range(len(busy) + 1) if number not in busy)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(channel)
        for rank in channel:
            taken[rank].add(number)
    return rounds


def opening_order(channels: Collection[Channel]) -> list[Channel]:
    """Return the channels as every rank visits them: round by round."""
    return [channel for each in opening_rounds(channels) for channel in each]
