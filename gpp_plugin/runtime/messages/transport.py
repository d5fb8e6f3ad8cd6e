"""Point-to-point transport: one ordered channel per edge and direction, on gloo or NCCL.

Both backends offer the same: what a message needs is bound when the program is compiled, and the callable
that comes of it posts one transfer a tensor and returns at once; `Pending.wait` completes them. What is
posted in which order is decided by the program, never here. Dtypes and shapes are those frozen at compile
time, so nothing but rows is ever sent.

gloo matches transfers by (peer, tag) and moves host memory; tensors on a CUDA device are staged through
pinned host memory, and the small tensors of one message travel as one. NCCL has no tags: each channel is a
communicator of its own two ranks, so that two channels never wait for each other, unless the device has too
few hardware queues for that.

Why a channel has one direction: with rendezvous messages two ranks that both send first on one ordered channel wait
for each other, though each could receive if that did not stand behind its own send:

    rank 0   send x   receive dy            one channel: rank 1's dy stands behind nothing it can do; both stop
    rank 1   send dy  receive x             one a direction: x and dy travel beside each other
"""

from __future__ import annotations

import datetime
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.doors import Channel, Transport, TransportFactory, TransportRequest
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.runtime.messages.pending import MessagePlace, Pending, Post, Posted
from gpp_plugin.runtime.messages.sockets import widened_sockets
from gpp_plugin.runtime.messages.wires import Wire

logger = logging.getLogger(__name__)

MAX_TENSORS_PER_EDGE = 4096

PACKED_BYTES = 1 << 15


class GlooTransport:
    """Transfers over two gloo groups; a slot number keeps edges and tensors apart.

    Activations and gradients have a group each: a pair of ranks then moves data one way in a group. In one
    group for both, a rank that is sending holds the lock that its own event thread needs for what arrives;
    gloo's event thread spins until it gets it, and where cores are few it spins on the core that the sender
    waits for (a message then takes a hundred times what it takes otherwise).

    Args:
        groups: gloo process groups of all ranks of the plan, used for nothing else.
        names: how an edge is called in errors, e.g. ``vision -> loss``.
    """

    prepost_depth = 32
    prepost_bytes = 1 << 20

    def __init__(
        self, *, groups: Mapping[Direction, dist.ProcessGroup], names: Sequence[str], timeout_s: float
    ) -> None:
        self._groups = groups
        self._names = names
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def bind_send(self, message: Message, wires: Sequence[Wire]) -> Post:
        """Return what sends the message (staged to the host where its tensors are on a device)."""
        send, peer = self._groups[message.direction].send, message.dst_rank
        is_packed = _is_packed(wires)
        tags = [_tag(message, wire) for wire in (wires[:1] if is_packed else wires)]
        place = MessagePlace("send", message, self._names, self._timeout)

        # Small tensors are put behind each other as bytes and travel under the first one's tag. Both ends decide that
        # by the same sizes, so neither has to tell the other.
        def post(tensors: Sequence[Tensor]) -> Pending:
            if is_packed:
                tensors = [torch.cat([_as_bytes(tensor) for tensor in tensors])]
            host = [t if t.device.type == "cpu" else t.cpu() for t in tensors]
            return Posted([send([t], peer, tag) for t, tag in zip(host, tags, strict=True)], place, host)

        return post

    def bind_receive(self, message: Message, wires: Sequence[Wire]) -> Post:
        """Return what receives the message (staged from the host where its buffers are on a device)."""
        receive, peer = self._groups[message.direction].recv, message.src_rank
        tags = [_tag(message, wire) for wire in wires]
        place = MessagePlace("receive", message, self._names, self._timeout)
        sizes = [wire.num_bytes for wire in wires]

        def post(buffers: Sequence[Tensor]) -> Pending:
            host = [b if b.device.type == "cpu" else _pinned(b.shape, b.dtype) for b in buffers]
            works = [receive([b], peer, tag) for b, tag in zip(host, tags, strict=True)]
            staged = [(b, h) for b, h in zip(buffers, host, strict=True) if b is not h]
            return Posted(works, place, host, staged)

        def post_packed(buffers: Sequence[Tensor]) -> Pending:
            packed = _pinned((sum(sizes),), torch.uint8)
            staged = [(_as_bytes(b), part) for b, part in zip(buffers, packed.split(sizes), strict=True)]
            return Posted([receive([packed], peer, tags[0])], place, [packed], staged)

        return post_packed if _is_packed(wires) else post

    def begin_exchange(self) -> None:
        """Do nothing: transfers do not wait for each other."""

    def end_exchange(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Let go of the process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)


def _tag(message: Message, wire: Wire) -> int:
    # Edge 2, slot 3: 2 * 4096 + 3 = 8195. Messages of one channel and slot share a tag; gloo keeps their order.
    return message.edge * MAX_TENSORS_PER_EDGE + wire.slot


def _is_packed(wires: Sequence[Wire]) -> bool:
    """Return whether a message's tensors travel as one: a copy of few bytes costs less than a transfer."""
    return len(wires) > 1 and sum(wire.num_bytes for wire in wires) <= PACKED_BYTES


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a host buffer, pinned where there is a device to copy from or to."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


class NcclTransport:
    """Transfers over NCCL, each channel with a two-rank communicator and a stream of its own.

    `Pending.wait` makes the compute stream wait for the transfer; the host never does (a wait with a
    timeout would block it), so the communicators' own timeout ends a rank whose peer is gone. Its watchdog
    names the group, which is called after its channel, and which transfer of the channel it was.

    A transfer starts after what was computed before it was posted, so a receive overlaps with a task only
    where it is posted ahead of it.

    Args:
        groups: the communicator of every channel this rank is an end of.
        names: how an edge is called in errors, e.g. ``vision -> loss``.
    """

    prepost_depth = 2
    prepost_bytes = 1 << 40  # the depth bounds them

    def __init__(self, *, groups: Mapping[Channel, dist.ProcessGroup], names: Sequence[str]) -> None:
        self._groups = groups
        self._names = names

    def bind_send(self, message: Message, wires: Sequence[Wire]) -> Post:
        """Return what sends the message, all its tensors in one launch."""
        group, place = self._groups[message.channel], MessagePlace("send", message, self._names, None)
        return _bind_launch(group, group.send, _group_rank(message, message.dst_rank), place)

    def bind_receive(self, message: Message, wires: Sequence[Wire]) -> Post:
        """Return what receives the message, all its tensors in one launch."""
        group, place = self._groups[message.channel], MessagePlace("receive", message, self._names, None)
        return _bind_launch(group, group.recv, _group_rank(message, message.src_rank), place)

    def begin_exchange(self) -> None:
        """Do nothing: channels do not wait for each other."""

    def end_exchange(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Let go of the communicators."""
        for group in self._groups.values():
            dist.destroy_process_group(group)


Call = Callable[[list[Tensor], int, int], dist.Work]


def _bind_launch(group: dist.ProcessGroup, call: Call, peer: int, place: MessagePlace) -> Post:
    def post(tensors: Sequence[Tensor]) -> Pending:
        return Posted([_launch(group, call, peer, tensors)], place, tensors)

    return post


def _launch(group: dist.ProcessGroup, call: Call, peer: int, tensors: Sequence[Tensor]) -> dist.Work:
    """Start the transfers of some tensors to or from one peer as one launch."""
    if len(tensors) == 1:
        return call([tensors[0]], peer, 0)
    device = tensors[0].device
    group._start_coalescing(device)
    for tensor in tensors:
        call([tensor], peer, 0)
    return group._end_coalescing(device)


def _open_channel(group: dist.ProcessGroup, channel: Channel, device: torch.device) -> None:
    """Move one tensor, and two in one launch: torch makes a communicator for each at its first use.

    There the hosts of both ranks wait for each other, which no program's order allows for.
    """
    is_sender = dist.get_rank() == channel[2]
    call, other = (group.send, channel[3]) if is_sender else (group.recv, channel[2])
    for count in (1, 2):
        tensors = [torch.zeros(1, device=device) for _ in range(count)]
        _launch(group, call, sorted(channel[2:]).index(other), tensors).wait()


class OneQueueNcclTransport:
    """Transfers over one NCCL communicator of all ranks, each exchange of the program as one launch.

    Where the device has fewer hardware queues than channels, the transfers of two channels may stand in one
    queue, where the first keeps the second from starting. Programs are proven to finish if every rank
    executes its exchanges one after the other, the transfers of one exchange together: that is what is done
    here, and nothing is posted ahead.

    Args:
        group: a NCCL group of all ranks of the plan, used for nothing else.
        names: how an edge is called in errors, e.g. ``vision -> loss``.
    """

    prepost_depth = 0
    prepost_bytes = 0

    def __init__(self, *, group: dist.ProcessGroup, names: Sequence[str], device: torch.device) -> None:
        self._group = group
        self._names = names
        self._device = device
        self._launch: list[dist.Work] = []

    def bind_send(self, message: Message, wires: Sequence[Wire]) -> Post:
        """Return what adds the message's tensors to the exchange."""
        return self._bind(
            self._group.send, message.dst_rank, MessagePlace("send", message, self._names, None)
        )

    def bind_receive(self, message: Message, wires: Sequence[Wire]) -> Post:
        """Return what adds the message's buffers to the exchange."""
        return self._bind(
            self._group.recv, message.src_rank, MessagePlace("receive", message, self._names, None)
        )

    def _bind(self, call: Call, peer: int, place: MessagePlace) -> Post:
        def post(tensors: Sequence[Tensor]) -> Pending:
            for tensor in tensors:
                call([tensor], peer, 0)
            return Posted(self._launch, place, tensors)  # filled when the exchange ends

        return post

    def begin_exchange(self) -> None:
        """Open the launch that everything until `end_exchange` is a part of."""
        self._launch = []
        self._group._start_coalescing(self._device)

    def end_exchange(self) -> None:
        """Launch the exchange."""
        self._launch.append(self._group._end_coalescing(self._device))

    def close(self) -> None:
        """Let go of the communicator."""
        dist.destroy_process_group(self._group)


def _group_rank(message: Message, rank: int) -> int:
    return sorted((message.src_rank, message.dst_rank)).index(rank)


OTHER_QUEUES = 3
"""Hardware queues for what is no channel: compute, copies, the stage's reductions."""


def has_queue_for_each(num_channels: int) -> bool:
    """Return whether a device gives every one of a rank's channels a hardware queue of its own.

    CUDA_DEVICE_MAX_CONNECTIONS says how many there are (8 if unset); streams beyond them share.
    """
    # Say a rank has two edges of two peers each, both directions: 8 channels, 11 queues with compute, copies and
    # reductions, so 8 connections are too few. Two channels in one queue run one after the other there, and a receive
    # that waits for its sender then holds up a send that the sender waits for.
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
    return num_channels + OTHER_QUEUES <= queues


def make_transport(
    *, device: torch.device, channels: Iterable[Channel], names: Sequence[str], timeout_s: float
) -> Transport:
    """Create the transport for ``device``; collective: every rank calls it with all channels.

    NCCL is used where each rank has a CUDA device of its own; ranks that share one exchange over gloo
    with host staging, because one device cannot host two NCCL ranks.
    """
    # Every rank makes every group, in one order: creating a group is collective over the job, also for who is not in
    # it.
    #
    #     gloo               2 groups of all ranks, tags tell channels apart
    #     NCCL, many queues  a communicator of two ranks a channel; only its ranks keep it
    #     NCCL, few queues   1 communicator of all ranks, one launch an exchange
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type != "cuda" or torch.cuda.device_count() < _local_world_size():
        with widened_sockets():
            groups = {d: dist.new_group(None, timeout=timeout, backend="gloo") for d in Direction}
        return GlooTransport(groups=groups, names=names, timeout_s=timeout_s)
    ordered = sorted(channels, key=lambda c: (c[0], c[1].value, c[2], c[3]))
    most = max(Counter(rank for channel in ordered for rank in channel[2:]).values())
    if not has_queue_for_each(most):
        logger.info(
            "a rank has %d channels and fewer hardware queues: messages go one exchange after the other; set "
            "CUDA_DEVICE_MAX_CONNECTIONS=%d (at most 32) to let them overlap",
            most,
            most + OTHER_QUEUES,
        )
        everyone = dist.new_group(None, timeout=timeout, backend="nccl", group_desc="all messages")
        dist.all_reduce(torch.zeros(1, device=device), group=everyone)  # all ranks make the communicator now
        return OneQueueNcclTransport(group=everyone, names=names, device=device)
    communicators: dict[Channel, dist.ProcessGroup] = {}
    for channel in ordered:
        edge, direction, source, target = channel
        described = f"{direction.value} on edge {names[edge]}, rank {source} to {target}"
        group: Any = dist.new_group(
            sorted((source, target)), timeout=timeout, backend="nccl", group_desc=described
        )
        if dist.get_rank() in (source, target):
            _open_channel(group, channel, device)
            communicators[channel] = group
    return NcclTransport(groups=communicators, names=names)


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class NativeTransports(TransportFactory):
    """Our own transports as what ``"p2p": "native"`` names."""

    def make(self, request: TransportRequest) -> Transport:
        """Return the transport for the request's device; collective."""
        return make_transport(
            device=torch.device(request.device),
            channels=request.channels,
            names=request.edge_names,
            timeout_s=request.timeout_s,
        )


NATIVE_TRANSPORT = NativeTransports()
