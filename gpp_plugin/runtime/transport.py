"""Point-to-point transport: one ordered channel per edge and direction, on gloo or NCCL.

Both backends offer the same three calls. `Transport.send` and `Transport.receive` post a transfer and
return at once; `Pending.wait` completes it. What is posted in which order is decided by the program,
never here. Every tensor of a message travels on a slot of its own, so that dtype and shape are those
frozen at compile time and nothing but rows is ever sent.

gloo matches transfers by (peer, slot) and moves host memory; tensors on a CUDA device are staged
through pinned host memory. NCCL has no slots: each channel is a communicator of its own two ranks, so
that two channels never wait for each other.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout
from gpp_plugin.ir.program import Direction, Message

Channel = tuple[int, Direction, int, int]

MAX_TENSORS_PER_EDGE = 4096


class Pending(Protocol):
    """A posted transfer."""

    def wait(self) -> None:
        """Complete it: a receive's buffer may be read, a sent tensor may be reused.

        Raises:
            CommTimeout: the peer did not answer in time, or is gone.
        """

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


class Transport(Protocol):
    """Posts transfers of single tensors; ``slot`` is the tensor's index within its message."""

    prepost_depth: int
    """How many exchanges ahead of their place receives may be posted."""

    def send(self, message: Message, slot: int, tensor: Tensor) -> Pending:
        """Post the transfer of a contiguous tensor."""

    def receive(self, message: Message, slot: int, buffer: Tensor) -> Pending:
        """Post the transfer into a contiguous buffer."""


class _Work:
    """A posted transfer of torch.distributed, with what to say when it fails."""

    __slots__ = ("_after", "_keep", "_message", "_place", "_timeout", "_work")

    def __init__(
        self,
        work: dist.Work,
        message: Message,
        timeout: datetime.timedelta | None,
        place: str,
        keep: Tensor,
        after: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._work: dist.Work | None = work
        self._message = message
        self._timeout = timeout
        self._place = place
        self._keep = keep  # a sent tensor must outlive its transfer
        self._after = after

    def wait(self) -> None:
        if self._work is None:
            return  # gloo counts completions: waiting twice would wait for a transfer never posted
        try:
            if self._timeout is None:
                self._work.wait()
            else:
                self._work.wait(self._timeout)
        except RuntimeError as error:
            raise CommTimeout(_describe_failure(self._message, self._place, self._timeout, error)) from error
        self._work = None
        if self._after is not None:
            destination, staged = self._after
            destination.copy_(staged, non_blocking=True)

    def is_done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def _describe_failure(
    message: Message, place: str, timeout: datetime.timedelta | None, error: Exception
) -> str:
    gone = "closed by peer" in str(error).lower() or "reset by peer" in str(error).lower()
    if gone or timeout is None:
        reason = "the other rank is gone" if gone else str(error)
    else:
        reason = f"nothing came within {timeout.total_seconds():g} s"
    micro_batch = message.dst_micro_batch if place.startswith("receive") else message.src_micro_batch
    return (
        f"{place}, micro-batch {micro_batch}, samples {message.samples.first_sample}.."
        f"{message.samples.end - 1}: {reason}; look for the first error of the other ranks, "
        f"or raise graph_pipeline.comm_timeout_s"
    )


class GlooTransport:
    """Transfers over one gloo group; a slot number keeps edges, directions and tensors apart.

    Args:
        group: a gloo process group of all ranks of the plan, used for nothing else.
        names: how an edge is called in errors, e.g. ``vision -> loss``.
    """

    prepost_depth = 8

    def __init__(self, *, group: dist.ProcessGroup, names: Sequence[str], timeout_s: float) -> None:
        self._group = group
        self._names = names
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._rank = dist.get_rank()

    def _slot(self, message: Message, slot: int) -> int:
        direction = 0 if message.direction is Direction.ACTIVATION else 1
        return (message.edge * 2 + direction) * MAX_TENSORS_PER_EDGE + slot

    def _place(self, verb: str, message: Message) -> str:
        peer = message.src_rank if verb == "receive" else message.dst_rank
        preposition = "from" if verb == "receive" else "to"
        kind = message.direction.value
        return f"{verb} of {kind} {preposition} rank {peer} on rank {self._rank}, edge {self._names[message.edge]}"

    def send(self, message: Message, slot: int, tensor: Tensor) -> Pending:
        """Post the transfer of a contiguous tensor (staged to the host when on a device)."""
        host = tensor.cpu() if tensor.device.type != "cpu" else tensor
        work = self._group.send([host], message.dst_rank, self._slot(message, slot))
        return _Work(work, message, self._timeout, self._place("send", message), host)

    def receive(self, message: Message, slot: int, buffer: Tensor) -> Pending:
        """Post the transfer into a contiguous buffer (staged from the host when on a device)."""
        if buffer.device.type == "cpu":
            work = self._group.recv([buffer], message.src_rank, self._slot(message, slot))
            return _Work(work, message, self._timeout, self._place("receive", message), buffer)
        host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=torch.cuda.is_available())
        work = self._group.recv([host], message.src_rank, self._slot(message, slot))
        place = self._place("receive", message)
        return _Work(work, message, self._timeout, place, host, (buffer, host))


class NcclTransport:
    """Transfers over one two-rank NCCL communicator per channel, each with its own stream.

    `Pending.wait` makes the compute stream wait for the transfer; the host never does (a wait with a
    timeout would block it), so the communicators' own timeout ends a rank whose peer is gone.

    Args:
        groups: the communicator of every channel this rank is an end of.
    """

    prepost_depth = 0  # a posted receive is a kernel: it may not run ahead of the program's order

    def __init__(self, *, groups: dict[Channel, dist.ProcessGroup], names: Sequence[str]) -> None:
        self._groups = groups
        self._names = names

    def send(self, message: Message, slot: int, tensor: Tensor) -> Pending:
        """Post the transfer of a contiguous device tensor."""
        work = self._groups[message.channel].send([tensor], _group_rank(message, message.dst_rank), slot)
        return _Work(work, message, None, f"send on edge {self._names[message.edge]}", tensor)

    def receive(self, message: Message, slot: int, buffer: Tensor) -> Pending:
        """Post the transfer into a contiguous device buffer."""
        work = self._groups[message.channel].recv([buffer], _group_rank(message, message.src_rank), slot)
        return _Work(work, message, None, f"receive on edge {self._names[message.edge]}", buffer)


def _group_rank(message: Message, rank: int) -> int:
    return sorted((message.src_rank, message.dst_rank)).index(rank)


def make_transport(
    *, device: torch.device, channels: Iterable[Channel], names: Sequence[str], timeout_s: float
) -> Transport:
    """Create the transport for ``device``; collective: every rank calls it with all channels.

    NCCL is used where each rank has a CUDA device of its own; ranks that share one exchange over gloo
    with host staging, because one device cannot host two NCCL ranks.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda" and torch.cuda.device_count() >= _local_world_size():
        groups: dict[Channel, dist.ProcessGroup] = {}
        rank = dist.get_rank()
        for channel in sorted(channels, key=lambda c: (c[0], c[1].value, c[2], c[3])):
            pair = sorted(channel[2:])
            group: Any = dist.new_group(pair, timeout=timeout, backend="nccl")
            if rank in pair:
                groups[channel] = group
        return NcclTransport(groups=groups, names=names)
    group = dist.new_group(None, timeout=timeout, backend="gloo")
    return GlooTransport(group=group, names=names, timeout_s=timeout_s)


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
