"""Transfers over NCCL: a communicator of two ranks for each channel, a launch for each message.

NCCL has no tags. The messages of all edges that one rank sends to another share a communicator and its order, which is
the program's at both ends and a part of what is proved (`schedule.placement`, `schedule.checks`). A channel has one
direction: with rendezvous transfers two ranks that both send first on one ordered channel wait for each other, though
each could receive if that did not stand behind its own send:

    rank 0   send x   receive dy            one channel: rank 1's dy stands behind nothing it can do; both stop
    rank 1   send dy  receive x             one a direction: x and dy travel beside each other

A launch occupies its communicator's stream, and a few of the device's processors, until its other end is launched too.
That can keep whatever is launched behind it waiting (streams may share a hardware queue), so nothing is posted before
its place, and what has to be made or packed for a message is made before it is launched.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.program import Message
from gpp_plugin.plugins import Channel
from gpp_plugin.runtime.messages.opening_order import opening_order
from gpp_plugin.runtime.messages.payloads import Payload
from gpp_plugin.runtime.messages.pending import MessagePlace, Pending, Post, Posted
from gpp_plugin.schedule.messages import PREFETCHED_BUFFERS

MAX_CTAS = 4
"""Thread blocks of one transfer: enough for a link, and few of the processors that compute meanwhile."""

_KNOWN_TYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)
"""What NCCL moves by its name; the others travel as bytes."""

_Call = Callable[[list[Tensor], int, int], dist.Work]


class NcclTransport:
    """Transfers over NCCL, each channel with a two-rank communicator and a stream of its own.

    `Pending.wait` makes the current stream wait for the transfer; the host never does (a wait with a timeout would
    block it), so the communicators' own timeout ends a rank whose peer is gone. Its watchdog names the group, which is
    called after its channel, and which transfer of the channel it was.

    Args:
        device: this rank's.
        timeout_s: how long a launched transfer may wait for its other end.
    """

    prepost_depth = 0
    prepost_bytes = 0
    buffers_ahead = PREFETCHED_BUFFERS

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._opened: set[Channel] = set()
        self._groups: dict[Channel, Any] = {}

    def bind_send(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what sends the message, all its tensors in one launch."""
        group = self._groups[message.channel]
        return _bind(
            group, group.send, _group_rank(message.channel, 1), MessagePlace("send", message, edge, None)
        )

    def bind_receive(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what receives the message, all its tensors in one launch."""
        group = self._groups[message.channel]
        return _bind(
            group, group.recv, _group_rank(message.channel, 0), MessagePlace("receive", message, edge, None)
        )

    def open(self, channels: Collection[Channel]) -> None:
        """Make the communicators of those channels that have none; collective over all ranks."""
        # Each is used once: NCCL makes it then, where the hosts of both ranks wait for each other, which no program's
        # order allows for: hence one order on all ranks, in which those of other ranks are opened meanwhile.
        for channel in opening_order(set(channels) - self._opened):
            source, target = channel
            group: Any = dist.new_group(
                sorted(channel),
                timeout=datetime.timedelta(seconds=self._timeout_s),
                backend="nccl",
                pg_options=_options(self._timeout_s),
                group_desc=f"messages from rank {source} to rank {target}",
            )
            self._opened.add(channel)
            rank = dist.get_rank()
            if rank in channel:
                call, end = (group.send, 1) if rank == source else (group.recv, 0)
                first = torch.zeros(1, device=self._device)
                _launch(group, call, _group_rank(channel, end), [first]).wait()
                self._groups[channel] = group

    def close(self) -> None:
        """Release the communicators."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
        self._opened.clear()


def _options(timeout_s: float) -> Any:
    """Return what a channel's communicator is made with: few thread blocks, which go before those that compute."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options.config.max_ctas = MAX_CTAS
    return options


def _group_rank(channel: Channel, end: int) -> int:
    """Return a rank's number in its channel's group: 0 for the channel's sender, 1 for its receiver as ``end``."""
    return sorted(channel).index(channel[end])


def _bind(group: Any, call: _Call, peer: int, place: MessagePlace) -> Post:
    def post(tensors: Sequence[Tensor]) -> Pending:
        return Posted([_launch(group, call, peer, tensors)], place, tensors)

    return post


def _launch(group: Any, call: _Call, peer: int, tensors: Sequence[Tensor]) -> dist.Work:
    """Start the transfers of some tensors to or from one peer as one launch."""
    # Also a single one: torch makes a communicator of its own for transfers that no launch joins.
    device = tensors[0].device
    group._start_coalescing(device)
    for tensor in tensors:
        call([tensor if tensor.dtype in _KNOWN_TYPES else tensor.view(-1).view(torch.uint8)], peer, 0)
    return group._end_coalescing(device)
