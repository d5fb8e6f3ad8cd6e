"""What has been posted: the transfers of one message, and where it is sent or received, for errors."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout, first_line
from gpp_plugin.ir.program import Message


class Pending(Protocol):
    """The posted transfers of one message."""

    def wait(self) -> None:
        """Complete them: a receive's buffers may be read, sent tensors may be reused.

        Raises:
            CommTimeout: the peer did not answer in time, or is gone.
        """

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


Post = Callable[[Sequence[Tensor]], Pending]
"""Posts the transfers of one message: of contiguous tensors to send, or into contiguous buffers.

A buffer may get other memory when its receive is posted: read it after `Pending.wait` only.
"""


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
