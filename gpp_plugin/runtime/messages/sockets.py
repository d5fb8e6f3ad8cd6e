"""The sockets of gloo's connections: buffers for whole messages, and none that nobody uses in a job of many ranks.

A connection starts with a receive window of 64 KiB, which grows with its traffic. Before it has, the tail
of a larger message waits until the receiver's kernel acknowledges its beginning, which it delays by up to 40 ms:
seen as one message in some thousands that took 20 or 40 ms on loopback, on messages of 64 KiB and not of 16.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gpp_plugin.plugins import Channel
from gpp_plugin.runtime.messages.opening_order import opening_order

BUFFER_BYTES = 1 << 20
_DESCRIPTORS = Path("/proc/self/fd")

MOST_MESHED = 32
"""Ranks up to which gloo connects each with each when a group is made; of more, two connect at their first message."""

_WHEN_USED = "TORCH_GLOO_LAZY_INIT"

LEAST_OPENING_S = 60.0
"""How long ranks may take to connect, where the wait for a message is shorter."""

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
    for descriptor in _descriptors() - before:
        _widen(descriptor)


def widen_open_sockets() -> None:
    """Give all TCP connections of this process larger buffers: those of groups that others have made."""
    for descriptor in _descriptors():
        _widen(descriptor)


def _descriptors() -> set[int]:
    if not _DESCRIPTORS.is_dir():
        return set()
    return {int(name) for name in os.listdir(_DESCRIPTORS)}


def _widen(descriptor: int) -> None:
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return  # the descriptor that listed the folder
    try:
        copy = socket.socket(fileno=duplicate)
    except OSError:  # no socket
        os.close(duplicate)
        return
    with copy:
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                if copy.getsockopt(socket.SOL_SOCKET, option) < BUFFER_BYTES:
                    copy.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
