"""What all ranks do together outside of messages: none waits without a limit, and an error says who waited for what.

Source: this project
Tests: tests/runtime/test_meeting.py, tests/runtime/test_agree.py
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout, first_line

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks of a job, as one of them meets them; every method is collective.

    Args:
        group: a CPU group of all ranks; None for a single rank, which waits for nobody.
        who: this rank in errors, e.g. ``rank 2, stage 'vision'``.
        timeout_s: how long this rank waits for the others.
    """

    group: dist.ProcessGroup | None
    who: str
    timeout_s: float

    def meet(self, what: str) -> None:
        """Wait for all ranks.

        Args:
            what: the occasion, for errors; a noun (``the end of the evaluation``).

        Raises:
            CommTimeout: a rank did not come in time, or is gone.
        """
        self.sum(torch.zeros(1), what)

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Sum a tensor over all ranks, in place.

        Raises:
            CommTimeout: a rank did not come in time, or is gone.
        """
        if self.group is not None:
            with self._named(what):
                work = dist.all_reduce(tensor, group=self.group, async_op=True)
                assert work is not None, "this rank is in the group"
                work.wait(datetime.timedelta(seconds=self.timeout_s))
        return tensor

    def gather(self, value: T, what: str) -> list[T]:
        """Return every rank's value, on every rank.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        with self._named(what):
            self._await_all(self.group)
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_first(self, value: T, what: str) -> list[T] | None:
        """Return every rank's value on the first rank, None on the others.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        if self.group is None:
            return [value]
        slots: list[Any] | None = None
        if dist.get_rank(self.group) == 0:
            slots = [None] * dist.get_world_size(self.group)
        with self._named(what):
            self._await_all(self.group)
            dist.gather_object(value, slots, group=self.group, group_dst=0)
        return slots

    def tell(self, value: T | None, *, source: int, what: str) -> T:
        """Return what the rank ``source`` gives, on every rank; the other ranks' values are not read.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        told: list[Any] = [value]
        if self.group is not None:
            with self._named(what):
                self._await_all(self.group)
                dist.broadcast_object_list(told, src=source, group=self.group)
        answer: T = told[0]
        return answer

    def _await_all(self, group: dist.ProcessGroup) -> None:
        """Wait for all ranks: what is gathered has only the group's own limit, the job's."""
        limit = datetime.timedelta(seconds=self.timeout_s)
        dist.monitored_barrier(group, timeout=limit, wait_all_ranks=True)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = first_line(error) or type(error).__name__
            raise CommTimeout(
                f"{self.who} waited for the other ranks at {what} (limit {self.timeout_s:g} s): {reason}; "
                "one of them is gone or stuck: look for its first error, or raise graph_pipeline.comm_timeout_s"
            ) from error
