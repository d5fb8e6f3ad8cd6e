"""What all ranks do together outside of messages: none waits without a limit, and an error says who waited for what.

Source: this project
Tests: tests/runtime/test_meeting.py, tests/runtime/test_agree.py
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.runtime.ranks.waiting import gather_bytes, gather_objects, tell_bytes, wait_for

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks of a job, as one of them meets them; every method is collective.

    Args:
        group: a CPU group of all ranks; None for a single rank, which waits for nobody.
        who: this rank in errors, e.g. ``rank 2, stage 'vision'``.
        timeout_s: how long this rank waits, at most, for others that are at work (`waiting`).
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
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            wait_for(work, **self._wait(self.group, what))
        return tensor

    def gather(self, value: T, what: str) -> list[T]:
        """Return every rank's value, on every rank.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        if self.group is None:
            return [value]
        return gather_objects(value, **self._wait(self.group, what))

    def gather_on_first(self, value: T, what: str) -> list[T] | None:
        """Return every rank's value on the first rank, None on the others.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        if self.group is None:
            return [value]
        told = gather_bytes(pickle.dumps(value), first_only=True, **self._wait(self.group, what))
        return None if told is None else [pickle.loads(each) for each in told]

    def tell(self, value: T | None, *, source: int, what: str) -> T:
        """Return what the rank ``source`` gives, on every rank; the other ranks' values are not read.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        if self.group is None:
            assert value is not None, "a single rank tells itself"
            return value
        is_source = dist.get_rank() == source
        told = tell_bytes(
            pickle.dumps(value) if is_source else b"", source=source, **self._wait(self.group, what)
        )
        answer: T = pickle.loads(told)
        return answer

    def _wait(self, group: dist.ProcessGroup, what: str) -> dict[str, Any]:
        """Return how `wait_for` waits: the job's limit for ranks that show no sign of work, this one for any."""
        return {"group": group, "what": what, "who": self.who, "most_s": self.timeout_s}
