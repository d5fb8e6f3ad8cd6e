"""Point-to-point transports: gloo, NCCL, and which of them a job uses.

Both offer the same: what a message needs is bound when the program is compiled, and the callable that comes of it posts
one transfer a tensor and returns at once; `Pending.wait` completes them. What is posted in which order is decided by
the program, never here. Dtypes and shapes are those frozen at compile time, so nothing but rows is ever sent.

gloo matches transfers by (peer, tag) and moves host memory; tensors on a CUDA device are staged through pinned host
memory, and the small tensors of one message travel as one.

NCCL has no tags: a communicator of two ranks for each channel, a launch for each message. The messages of all edges
that one rank sends to another share a communicator and its order, which is the program's at both ends and a part of
what is proved (`schedule.lower`, `schedule.checks`). A channel has one direction: with rendezvous transfers two
ranks that both send first on one ordered channel wait for each other, though each could receive if that did not stand
behind its own send:

    rank 0   send x   receive dy            one channel: rank 1's dy stands behind nothing it can do; both stop
    rank 1   send dy  receive x             one a direction: x and dy travel beside each other

A launch occupies its communicator's stream, and a few of the device's processors, until its other end is launched too.
That can keep whatever is launched behind it waiting (streams may share a hardware queue), so nothing is posted before
its place, and what has to be made or packed for a message is made before it is launched.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout, first_line
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.plugins import Channel, Pending, Post, Transport, TransportFactory, TransportRequest
from gpp_plugin.runtime.messages.routes import Payload
from gpp_plugin.runtime.messages.sockets import LEAST_OPENING_S, open_pairs, opening_order, widened_sockets
from gpp_plugin.runtime.ranks.collectives import collective_timeout_s
from gpp_plugin.schedule.messages import PREFETCHED_BUFFERS

# ---- what has been posted -------------------------------------------------------------------------------


_GONE = ("closed by peer", "reset by peer", "broken pipe")
"""What sockets say when their other end is gone."""


class MessagePlace:
    """Where a message is sent or received, for errors, and how long a wait may take; ``edge`` is its edge's name."""

    __slots__ = ("message", "timeout", "verb", "where")

    def __init__(self, verb: str, message: Message, edge: str, timeout: datetime.timedelta | None) -> None:
        self.verb = verb
        self.message = message
        self.where = edge
        self.timeout = timeout

    def describe(self, error: Exception, waited_s: float) -> str:
        """Return one line: what failed, where, why after how long, and what to do."""
        message = self.message
        limit_s = None if self.timeout is None else self.timeout.total_seconds()
        if any(sign in str(error).lower() for sign in _GONE):
            reason = f"after {waited_s:.1f} s the other rank is gone"
        elif limit_s is not None and waited_s >= 0.9 * limit_s:
            reason = f"nothing came within {limit_s:g} s"
        else:
            reason = f"after {waited_s:.1f} s: {first_line(error)}"
        is_receive = self.verb == "receive"
        here, there = (
            (message.dst_rank, message.src_rank) if is_receive else (message.src_rank, message.dst_rank)
        )
        micro_batch = message.dst_micro_batch if is_receive else message.src_micro_batch
        return (
            f"{self.verb} of {message.direction.value} {'from' if is_receive else 'to'} rank {there} on rank "
            f"{here}, edge {self.where}, micro-batch {micro_batch}, samples {message.samples.first_sample}.."
            f"{message.samples.end - 1}: {reason}; look for the first error of the other ranks, or raise "
            "graph_pipeline.comm_timeout_s"
        )


class Posted:
    """The transfers of one message in torch.distributed."""

    __slots__ = ("_keep", "_place", "_staged", "_works")

    def __init__(
        self,
        works: list[dist.Work],
        place: MessagePlace,
        keep: Sequence[Tensor],
        staged: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._works = works
        self._place = place
        self._keep: Sequence[Tensor] = keep  # a sent tensor must outlive its transfer
        self._staged = staged

    def wait(self) -> None:
        """Complete the transfers; see `Pending`."""
        timeout = self._place.timeout
        started = time.monotonic()
        try:
            for work in self._works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except RuntimeError as error:
            raise CommTimeout(self._place.describe(error, time.monotonic() - started)) from error
        self._works = []  # gloo counts completions: waiting twice would wait for a transfer never posted
        self._keep = ()
        for destination, staged in self._staged:
            destination.copy_(staged, non_blocking=True)
        self._staged = ()

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


# ---- gloo -----------------------------------------------------------------------------------------------

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


# ---- NCCL -----------------------------------------------------------------------------------------------

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
                pg_options=_nccl_options(self._timeout_s),
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


def _nccl_options(timeout_s: float) -> Any:
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
