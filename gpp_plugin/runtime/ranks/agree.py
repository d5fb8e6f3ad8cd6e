"""Decisions all ranks must share: made once on rank 0, told to the others, or refused by all.

Source: this project
Tests: tests/runtime/test_meeting.py, tests/runtime/test_agree.py
"""

from __future__ import annotations

import contextlib
import datetime
import json
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from gpp_plugin import errors
from gpp_plugin.errors import CommTimeout, GppError
from gpp_plugin.ir.serialize import dumps, loads

T = TypeVar("T")

TELLING_TIMEOUT_S = 600.0
"""How long a rank waits for an answer that is there, on its way from another rank."""


def call_on_rank_zero(
    make: Callable[[], T], kind: type[T], *, what: str, group: dist.ProcessGroup | None, timeout_s: float
) -> T:
    """Call ``make`` on rank 0 alone and return its result on every rank.

    Args:
        kind: the `ir` dataclass that ``make`` returns.
        what: the phase, for errors (``profile``, ``plan``).
        group: a CPU group of all ranks; None for a single rank.
        timeout_s: how long the other ranks wait.

    Raises:
        GppError: ``make`` raised it on rank 0; every rank raises the same.
        CommTimeout: rank 0 did not answer in time.
    """
    # Two broadcasts, how long and then what, so that nobody needs to guess a length. An error is an answer too: rank
    # 0 tells its type and text, and every rank raises the same line instead of waiting for a plan that will not come.
    if group is None or dist.get_world_size(group) == 1:
        return make()
    answer = b""
    failure: BaseException | None = None
    result: T | None = None
    if dist.get_rank() == 0:
        try:
            result = make()
            answer = json.dumps({"value": dumps(result)}).encode()
        except Exception as error:  # the others must not wait for an answer that will not come
            failure = error
            name = type(error).__name__ if isinstance(error, GppError) else "GppError"
            text = (
                str(error)
                if isinstance(error, GppError)
                else f"{what} failed: {type(error).__name__}: {error}"
            )
            answer = json.dumps({"error": name, "text": text}).encode()
    body = _bytes_of(0, answer, what, group, timeout_s)
    if failure is not None:
        raise failure
    if result is not None:
        return result
    told = json.loads(body)
    if "error" in told:
        raise getattr(errors, told["error"], GppError)(told["text"])
    return loads(kind, told["value"])


def tell(
    make: Callable[[], T],
    *,
    source: int,
    what: str,
    group: dist.ProcessGroup | None,
    stages: Sequence[str] = (),
) -> T:
    """Call ``make`` on every rank and return what it gave on ``source``; if it fails on one, all raise the same.

    For answers that are large and one rank's: `exchange` has room for every rank's on every rank.

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
    body = _bytes_of(source, answer, what, group, TELLING_TIMEOUT_S)
    if is_source:
        return own[0]
    told: T = pickle.loads(body)
    return told


def _bytes_of(source: int, answer: bytes, what: str, group: dist.ProcessGroup, timeout_s: float) -> bytes:
    """Return, on every rank, the ``answer`` that ``source`` has: how long it is, then itself."""
    length = torch.tensor([len(answer)], dtype=torch.int64)
    _broadcast(length, source, what, group, timeout_s)
    body = torch.empty(int(length), dtype=torch.uint8)
    if answer:
        body.copy_(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
    _broadcast(body, source, what, group, timeout_s)
    return body.numpy().tobytes()


def _broadcast(
    tensor: torch.Tensor, source: int, what: str, group: dist.ProcessGroup, timeout_s: float
) -> None:
    work = dist.broadcast(tensor, src=source, group=group, async_op=True)
    assert work is not None
    try:
        work.wait(datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise CommTimeout(
            f"rank {dist.get_rank()} waited {timeout_s:g} s for the {what} of rank {source}, which did not come; "
            f"look at rank {source}'s output"
        ) from error


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
        value = make()
    except Exception as error:  # whatever it is: the other ranks must not wait for this one
        cause = error
        is_ours = isinstance(error, GppError)
        failure = (
            type(error).__name__ if is_ours else "GppError",
            str(error)
            if is_ours
            else f"{_name(dist.get_rank(), stages)}: {what} failed: {type(error).__name__}: {error}",
        )
    told: list[tuple[T, tuple[str, str] | None]] = [None] * dist.get_world_size(group)  # type: ignore[list-item]
    roll = _Roll(group)
    roll.answer()
    started = time.monotonic()
    try:
        dist.all_gather_object(told, (value, failure), group=group)
    except RuntimeError as error:
        absent = ", ".join(_name(rank, stages) for rank in roll.absent()) or "a rank that came and went"
        raise CommTimeout(
            f"{_name(dist.get_rank(), stages)} waited {time.monotonic() - started:.0f} s for {what}, to which "
            f"{absent} did not come: look for the first error there"
        ) from error
    for rank, (_, problem) in enumerate(told):
        if problem is not None:
            name, text = problem
            raise getattr(errors, name, GppError)(text) from (cause if rank == dist.get_rank() else None)
    return [answer for answer, _ in told]


def do_together(act: Callable[[], object], *, what: str, group: dist.ProcessGroup | None) -> None:
    """Call ``act`` on every rank; if it fails on one, all raise the same.

    As `exchange` without answers, and in a step: where nothing fails ranks tell each other one number.

    Args:
        what, group: as for `exchange`.

    Raises:
        GppError, CommTimeout: as for `exchange`.
    """
    if group is None or dist.get_world_size(group) == 1:
        act()
        return
    failures: list[Exception] = []
    try:
        act()
    except Exception as error:
        failures.append(error)
    count = torch.tensor([len(failures)], dtype=torch.int64)
    try:
        dist.all_reduce(count, group=group)
    except RuntimeError as error:
        raise CommTimeout(
            f"{_name(dist.get_rank(), ())} waited for {what}, to which a rank did not come: look for the first error "
            "on the others"
        ) from error
    if int(count) == 0:
        return

    def fail() -> None:
        for error in failures:
            raise error

    exchange(fail, what=what, group=group)


def _name(rank: int, stages: Sequence[str]) -> str:
    return f"rank {rank} (stage {stages[rank]!r})" if stages else f"rank {rank}"


_calls: defaultdict[str, int] = defaultdict(int)
"""Exchanges begun, by group."""


class _Roll:
    """Who has come to an exchange, as ranks note it in the job's store: a collective that fails does not say whom
    it lacked.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._name = f"gpp_plugin/exchange/{group.group_name}"
        _calls[self._name] += 1
        self._call = _calls[self._name]
        self._store = dist.distributed_c10d._get_default_store()

    def _key(self, rank: int, call: int) -> str:
        return f"{self._name}/{call}/{rank}"

    def answer(self) -> None:
        """Note that this rank has come; its note before the last one is read by nobody any more."""
        with contextlib.suppress(
            RuntimeError
        ):  # the store is on rank 0: if that is gone the collective fails too
            self._store.set(self._key(dist.get_rank(), self._call), "1")
            if self._call > 2:
                self._store.delete_key(self._key(dist.get_rank(), self._call - 2))

    def absent(self) -> list[int]:
        """Return the ranks that have not come; rank 0 where the store is gone."""
        try:
            return [rank for rank in self._ranks if not self._store.check([self._key(rank, self._call)])]
        except RuntimeError:
            return [0]
