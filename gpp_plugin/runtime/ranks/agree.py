"""Decisions that all ranks share: made once on rank 0 and broadcast to the others, or refused by all.

Source: this project
Tests: tests/runtime/test_collectives.py, tests/runtime/test_agree.py
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import GppError
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.runtime.ranks.failure_board import HERE, name_of
from gpp_plugin.runtime.ranks.job_board import mark_shared, shared_error
from gpp_plugin.runtime.ranks.waiting import (
    all_reduce,
    broadcast_bytes,
    gather_bytes,
    gather_objects,
    own_name,
    wait_for,
)

# What all ranks do together outside of messages: none waits without a limit, and an error says who waited for what.

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The collective operations of all ranks of a job, as one rank calls them.

    Args:
        group: a CPU group of all ranks; None for a single rank, which waits for nobody.
        who: this rank in errors, e.g. ``rank 2, stage 'vision'``.
        timeout_s: how long this rank waits, at most, for others that are at work (`waiting`).
    """

    group: dist.ProcessGroup | None
    who: str
    timeout_s: float

    def barrier(self, what: str) -> None:
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
        received = gather_bytes(pickle.dumps(value), first_only=True, **self._wait(self.group, what))
        return None if received is None else [pickle.loads(each) for each in received]

    def broadcast(self, value: T | None, *, source: int, what: str) -> T:
        """Return what the rank ``source`` gives, on every rank; the other ranks' values are not read.

        Raises:
            CommTimeout: a rank did not come in time (the error says which), or is gone.
        """
        if self.group is None:
            assert value is not None, "a single rank is its own source"
            return value
        is_source = dist.get_rank() == source
        received = broadcast_bytes(
            pickle.dumps(value) if is_source else b"", source=source, **self._wait(self.group, what)
        )
        answer: T = pickle.loads(received)
        return answer

    def _wait(self, group: dist.ProcessGroup, what: str) -> dict[str, Any]:
        """Return how `wait_for` waits: the job's limit for ranks that show no sign of work, this one for any."""
        return {"group": group, "what": what, "who": self.who, "most_s": self.timeout_s}


def call_on_rank_zero(
    make: Callable[[], T], kind: type[T], *, what: str, group: dist.ProcessGroup | None, timeout_s: float
) -> T:
    """Call ``make`` on rank 0 alone and return its result on every rank.

    Args:
        kind: the `ir` dataclass that ``make`` returns.
        what: the phase, for errors (``profile``, ``plan``).
        group: a CPU group of all ranks; None for a single rank.
        timeout_s: how long the other ranks wait for a rank 0 that is at work (`waiting`).

    Raises:
        GppError: ``make`` raised it on rank 0; every rank raises the same.
        CommTimeout: rank 0 did not answer in time.
    """
    # Two broadcasts, how long and then what, so that nobody needs to guess a length. An error is an answer too: rank
    # 0 sends its type and text, and every rank raises the same line instead of waiting for a plan that will not come.
    if group is None or dist.get_world_size(group) == 1:
        return make()
    answer = b""
    failure: BaseException | None = None
    result: T | None = None
    if dist.get_rank() == 0:
        try:
            with HERE.during(what):
                result = make()
            answer = json.dumps({"value": dumps(result)}).encode()
        except Exception as error:  # the others must not wait for an answer that will not come
            failure = error
            name, text = _answer_of(error, what, name_of(0, HERE.stage))
            answer = json.dumps({"error": name, "text": text}).encode()
    body = broadcast_bytes(
        answer, source=0, group=group, what=f"the {what} of rank 0", who=own_name(), most_s=timeout_s
    )
    if failure is not None:
        mark_shared(failure)
        raise failure
    if result is not None:
        return result
    received = json.loads(body)
    if "error" in received:
        raise shared_error(received["error"], received["text"])
    return loads(kind, received["value"])


def _answer_of(error: Exception, what: str, rank: str) -> tuple[str, str]:
    """Return an error's class and text as all ranks raise it: one that is not ours says where it happened."""
    if isinstance(error, GppError):
        return type(error).__name__, str(error)
    return "GppError", f"{rank}: {what} failed: {type(error).__name__}: {error}"


def broadcast_result(
    make: Callable[[], T],
    *,
    source: int,
    what: str,
    group: dist.ProcessGroup | None,
    stages: Sequence[str] = (),
) -> T:
    """Call ``make`` on every rank and return what it gave on ``source``; if it fails on one, all raise the same.

    For answers that are large and one rank's: `exchange` holds every rank's on every rank.

    Args:
        what: as for `call_on_rank_zero`; ``group``, ``stages``: as for `exchange`.

    Raises:
        GppError, CommTimeout: as for `exchange`.
    """
    own: list[T] = []
    exchange(lambda: own.append(make()), what=f"the {what}", group=group, stages=stages)
    if group is None or dist.get_world_size(group) == 1:
        return own[0]
    is_source = dist.get_rank() == source
    answer = pickle.dumps(own[0]) if is_source else b""
    body = broadcast_bytes(answer, source=source, group=group, what=f"the {what}", who=own_name())
    if is_source:
        return own[0]
    received: T = pickle.loads(body)
    return received


def exchange(
    make: Callable[[], T], *, what: str, group: dist.ProcessGroup | None, stages: Sequence[str] = ()
) -> list[T]:
    """Call ``make`` on every rank and return what it gave on each; if it fails on one, all raise the same.

    Args:
        what: the phase, for errors.
        group: a CPU group of all ranks; None for a single rank.
        stages: the stage of each rank, for errors.

    Raises:
        GppError: ``make`` raised on a rank; of several, the first one's.
        CommTimeout: a rank is gone, or did not answer in the group's time; names those that did not come.
    """
    # Every rank comes to the gather, failed or not, and brings (value, None) or (None, (type, text)). The first
    # rank's problem is raised on all; the rank it happened on has it as the cause, with its traceback.
    #
    #     rank 0   (42, None)   (None, ("CaptureError", "stage ..."))      both raise CaptureError("stage ...")
    if group is None or dist.get_world_size(group) == 1:
        return [make()]
    value: T | None = None
    failure: tuple[str, str] | None = None
    cause: Exception | None = None
    try:
        with HERE.during(what):
            value = make()
    except Exception as error:  # whatever it is: the other ranks must not wait for this one
        cause = error
        failure = _answer_of(error, what, _name(dist.get_rank(), stages))
    received: list[tuple[T, tuple[str, str] | None]] = gather_objects(
        (value, failure), group=group, what=what, who=_name(dist.get_rank(), stages)
    )
    for rank, (_, problem) in enumerate(received):
        if problem is not None:
            raise shared_error(*problem) from (cause if rank == dist.get_rank() else None)
    return [answer for answer, _ in received]


def do_together(act: Callable[[], T], *, what: str, group: dist.ProcessGroup | None) -> T:
    """Call ``act`` on every rank and return this rank's answer; if it fails on one, all raise the same.

    As `exchange` without the others' answers, and in a step: where nothing fails ranks exchange one number.

    Args:
        what, group: as for `exchange`.

    Raises:
        GppError, CommTimeout: as for `exchange`.
    """
    if group is None or dist.get_world_size(group) == 1:
        return act()
    answers: list[T] = []
    failures: list[Exception] = []
    try:
        answers.append(act())
    except Exception as error:
        failures.append(error)
    count = torch.tensor([len(failures)], dtype=torch.int64)
    all_reduce(count, group=group, what=what)

    def fail() -> None:
        for error in failures:
            raise error

    if int(count):
        exchange(fail, what=what, group=group)
    return answers[0]


def _name(rank: int, stages: Sequence[str]) -> str:
    return name_of(rank, stages[rank] if stages else HERE.stage)
