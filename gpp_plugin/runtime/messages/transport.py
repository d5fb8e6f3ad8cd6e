"""Point-to-point transports: gloo, and which of gloo and NCCL a job uses.

Both offer the same: what a message needs is bound when the program is compiled, and the callable that comes of it posts
one transfer a tensor and returns at once; `Pending.wait` completes them. What is posted in which order is decided by
the program, never here. Dtypes and shapes are those frozen at compile time, so nothing but rows is ever sent.

gloo matches transfers by (peer, tag) and moves host memory; tensors on a CUDA device are staged through pinned host
memory, and the small tensors of one message travel as one. NCCL has no tags: see `nccl_transport`.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.plugins import Channel, Transport, TransportFactory, TransportRequest
from gpp_plugin.runtime.messages.nccl_transport import NcclTransport
from gpp_plugin.runtime.messages.payloads import Payload
from gpp_plugin.runtime.messages.pending import MessagePlace, Pending, Post, Posted
from gpp_plugin.runtime.messages.sockets import LEAST_OPENING_S, open_pairs, widened_sockets
from gpp_plugin.runtime.ranks.waiting import collective_timeout_s

MAX_TENSORS_PER_EDGE = 4096

PACKED_BYTES = 1 << 15


class GlooTransport:
    """Transfers over two gloo groups; a slot number separates edges and tensors.

    Activations and gradients have a group each: a pair of ranks then moves data one way in a group. In one
    group for both, a rank that is sending holds the lock that its own event thread needs for what arrives;
    gloo's event thread spins until it gets it, and where cores are few it spins on the core that the sender
    waits for (a message then takes a hundred times what it takes otherwise).

    Args:
        groups: gloo process groups of all ranks of the plan, used for nothing else.
        timeout_s: of a wait for a message.
    """

    prepost_depth = 32
    prepost_bytes = 1 << 20
    buffers_ahead = 0

    def __init__(self, *, groups: Mapping[Direction, dist.ProcessGroup], timeout_s: float) -> None:
        self._groups = groups
        self._opened: set[Channel] = set()
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def bind_send(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what sends the message (staged to the host where its tensors are on a device)."""
        send, peer = self._groups[message.direction].send, message.dst_rank
        is_packed = _is_packed(payloads)
        tags = [_tag(message, payload) for payload in (payloads[:1] if is_packed else payloads)]
        place = MessagePlace("send", message, edge, self._timeout)

        # Small tensors are put behind each other as bytes and travel under the first one's tag. Both ends decide that
        # by the same sizes, so neither has to send them to the other.
        def post(tensors: Sequence[Tensor]) -> Pending:
            if is_packed:
                tensors = [torch.cat([_as_bytes(tensor) for tensor in tensors])]
            host = [t if t.device.type == "cpu" else t.cpu() for t in tensors]
            return Posted([send([t], peer, tag) for t, tag in zip(host, tags, strict=True)], place, host)

        return post

    def bind_receive(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what receives the message (staged from the host where its buffers are on a device)."""
        receive, peer = self._groups[message.direction].recv, message.src_rank
        tags = [_tag(message, payload) for payload in payloads]
        place = MessagePlace("receive", message, edge, self._timeout)
        sizes = [payload.num_bytes for payload in payloads]

        def post(buffers: Sequence[Tensor]) -> Pending:
            host = [b if b.device.type == "cpu" else _pinned(b.shape, b.dtype) for b in buffers]
            works = [receive([b], peer, tag) for b, tag in zip(host, tags, strict=True)]
            staged = [(b, h) for b, h in zip(buffers, host, strict=True) if b is not h]
            return Posted(works, place, host, staged)

        def post_packed(buffers: Sequence[Tensor]) -> Pending:
            packed = _pinned((sum(sizes),), torch.uint8)
            staged = [(_as_bytes(b), part) for b, part in zip(buffers, packed.split(sizes), strict=True)]
            return Posted([receive([packed], peer, tags[0])], place, [packed], staged)

        return post_packed if _is_packed(payloads) else post

    def open(self, channels: Collection[Channel]) -> None:
        """Connect the pairs of ranks that have none of these channels yet; collective over the pairs.

        Nothing is to be done where groups connect all pairs when they are made (`connect_when_used`).
        """
        pairs = {(min(channel), max(channel)) for channel in channels} - self._opened
        self._opened |= pairs
        open_pairs(self._groups.values(), pairs, timeout_s=self._timeout.total_seconds())

    def close(self) -> None:
        """Release the process groups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)


def _tag(message: Message, payload: Payload) -> int:
    # Edge 2, slot 3: 2 * 4096 + 3 = 8195. Messages of one channel and slot share a tag; gloo keeps their order.
    return message.edge * MAX_TENSORS_PER_EDGE + payload.slot


def _is_packed(payloads: Sequence[Payload]) -> bool:
    """Return whether a message's tensors travel as one: a copy of few bytes costs less than a transfer."""
    return len(payloads) > 1 and sum(payload.num_bytes for payload in payloads) <= PACKED_BYTES


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a host buffer, pinned where there is a device to copy from or to."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def make_transport(
    *,
    device: torch.device,
    channels: Collection[Channel],
    timeout_s: float,
    backend: str = "gloo",
    launch_timeout_s: float | None = None,
) -> Transport:
    """Create the transport for ``device``; collective: every rank calls it with all channels.

    Args:
        timeout_s: how long a host waits for a message; over NCCL none does.
        backend: ``nccl``, or ``gloo`` on CPUs and where ranks share a device, as one cannot host two NCCL ranks: their
            tensors are staged through the host.
        launch_timeout_s: how long a transfer over NCCL may wait on the device for its other end.
    """
    # Every rank makes every group, in one order: creating a group is collective over the job, also for who is not in
    # it.
    #
    #     gloo   2 groups of all ranks, tags distinguish messages; of many ranks only those that have channels connect
    #     NCCL   a communicator of two ranks a channel; only its ranks keep it
    if backend == "nccl":
        transport = NcclTransport(device=device, timeout_s=launch_timeout_s or timeout_s)
        transport.open(channels)
        return transport
    # Connecting is no message: of ranks that start together one may be late by more than a short ``timeout_s``.
    opening = datetime.timedelta(seconds=max(timeout_s, LEAST_OPENING_S))
    with widened_sockets():
        groups = {d: dist.new_group(None, timeout=opening, backend="gloo") for d in Direction}
    made = GlooTransport(groups=groups, timeout_s=timeout_s)
    made.open(channels)
    return made


class NativeTransports(TransportFactory):
    """Our own transports as what ``"p2p": "native"`` names."""

    def make(self, request: TransportRequest) -> Transport:
        """Return the transport for the request's device; collective."""
        return make_transport(
            device=torch.device(request.device),
            channels=request.channels,
            timeout_s=request.timeout_s,
            backend=request.backend,
            launch_timeout_s=collective_timeout_s(request.plan, request.timeout_s),
        )


NATIVE_TRANSPORT = NativeTransports()
