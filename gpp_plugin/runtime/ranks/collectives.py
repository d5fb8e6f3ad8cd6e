"""What all ranks do together outside of messages: collectives that none waits in without a limit, and answers of all.

A wait is in slices, so that a failure elsewhere ends it, and by signs of work. An error says who waited for what.

    limit        a rank that is gone ends a wait within a second or two. One that is stopped, is outside of the
                 engine's calls, or waits in another call, ends it at the limit (`comm_timeout_s`). One that is at work
                 in the same call (it captures, compiles, loads) is waited for as long as the caller allows.

In a step only on gloo: what NCCL's streams wait for, no host does.

Source: this project
Tests: tests/runtime/test_collectives.py, tests/runtime/test_agree.py, tests/model/test_lane_wire.py,
    tests/runtime/test_time_limits.py
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout, GppError, describe_error, first_line
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import dumps, loads
from gpp_plugin.runtime.ranks.failure_board import (
    HERE,
    FailureBoard,
    FirstFailure,
    SeenRank,
    failure_of,
    name_of,
    place_of,
)
from gpp_plugin.runtime.ranks.job_board import job_board, mark_shared, shared_error

T = TypeVar("T")

# How long ranks wait for each other outside of a single message: by the plan's own times, not the limit of a message.

LEAST_COLLECTIVE_S = 600.0
"""No collective gives up sooner: the first mini-batch of a shape captures, compiles and loads kernels on its way."""

SLOWNESS = 10.0
"""How many times longer than predicted a mini-batch may take before its ranks are given up."""


def collective_timeout_s(plan: PipelinePlan | None, comm_timeout_s: float) -> float:
    """Return the limit, in seconds, of whatever may wait for as long as a whole mini-batch takes.

    These are all sums over ranks, and every communicator of NCCL, those of messages among them. A rank that is through
    early requests the gradients' norm, and waits while the others run the rest of the mini-batch. A receive that is
    posted for the last stage waits while its sender's own inputs travel through all stages before it. NCCL's watchdog
    counts from when an operation was posted and ends the process at the limit, so that the limit of a message,
    ``comm_timeout_s``, holds on gloo alone, where a wait is the host's and says which message did not come.

    Args:
        plan: None where there is none yet.
        comm_timeout_s: the configuration's; a longer one than follows from the plan is honoured.
    """
    # A plan of 200 s a mini-batch: 2000 s. One of 3 s: 600 s. One without a predicted time (a saved plan of another
    # release): by the busiest stage's own tasks, which no mini-batch is shorter than.
    if plan is None:
        return max(LEAST_COLLECTIVE_S, comm_timeout_s)
    busy_us = [
        plan.num_micro_batches(index) * (stage.forward_us + stage.backward_us)
        for index, stage in enumerate(plan.stages)
    ]
    predicted_us = max([plan.iteration_us, *busy_us])
    return max(LEAST_COLLECTIVE_S, comm_timeout_s, SLOWNESS * predicted_us / 1e6)


SLICE_S = 1.0
"""After how long a wait looks whether a rank has failed; one that ends sooner looks at nothing."""

EVERY_RANK = ", which every rank calls"

GRACE_S = 2.0
"""How long a wait within its limit continues when a rank has failed: what it had sent before may still come."""

IDLE_S = 30.0
"""How long the thread that looks at messages stays when none is waited for."""


def wait_for(
    work: Any,
    *,
    what: str,
    who: str,
    group: dist.ProcessGroup,
    limit_s: float | None = None,
    most_s: float | None = None,
    is_polled: bool = False,
    look: Callable[[], None] | None = None,
) -> None:
    """Wait for a collective that was posted on gloo.

    Args:
        what: what the ranks come together for, for errors.
        who: this rank, for errors.
        limit_s: how long ranks are waited for that show no sign of work; None: the job's.
        most_s: how long those at work are waited for; None: as long as the group's own limit says.
        is_polled: ask whether it is done, as of a collective on a device, in which the host cannot wait so long.
        look: called every second; what it raises ends the wait.

    Raises:
        CommTimeout: a rank is gone, has failed, or did not come; names it, and where it is.
    """
    # gloo's timeout of a wait leaves the collective as it is: it may be waited for again. The group's own limit ends
    # it.
    board = job_board()
    if limit_s is None:
        limit_s = min(most_s or board.limit_s, board.limit_s) if board is not None else most_s
    started, has_ended = time.monotonic(), False
    failed_at: float | None = None
    HERE.waits_for = what
    try:
        while True:
            waited = time.monotonic() - started
            # at the limit, not after it; past it a look every second
            rest = SLICE_S if limit_s is None or waited >= limit_s else min(SLICE_S, limit_s - waited)
            try:
                if is_polled:
                    _poll(work, max(rest, 0.01))
                else:
                    work.wait(datetime.timedelta(seconds=max(rest, 0.01)))
                return
            except RuntimeError as error:
                waited = time.monotonic() - started
                is_late = "timed out!" in str(error)
                if is_late and not has_ended and work.is_completed():
                    has_ended = True  # between the two calls, well or by an error: another call says which
                    continue
                if has_ended or not is_late:
                    first = None if board is None else board.find() or _reason_to_stop(board, group, what)
                    broken = f"the connection to another rank broke off ({first_line(error)[:120]})"
                    raise _lost(what, who, waited, limit_s, first or broken) from error
            if board is not None and board.first is not None:
                failed_at = failed_at or time.monotonic()
                is_over = limit_s is not None and waited >= limit_s
                if is_over or time.monotonic() - failed_at >= GRACE_S:
                    raise _lost(what, who, waited, limit_s, board.first)
            if look is not None:
                look()
            if limit_s is not None and waited >= limit_s:
                is_over = most_s is not None and waited >= most_s
                reason = _reason_to_stop(board, group, what, is_over=is_over)
                if reason is None and is_over:
                    reason = "the others are still at work"
                if reason is not None:
                    raise _lost(what, who, waited, limit_s, reason)
    finally:
        HERE.waits_for = ""


def wait_for_message(
    work: Any, *, what: str, who: str, group: dist.ProcessGroup, most_s: float, hang_up: Callable[[], None]
) -> None:
    """Wait for a message of another rank over gloo, or until one that was sent is taken; by the rule of `wait_for`.

    Once, not in slices: gloo closes the connections of a group in which a message is late. So a thread looks at the
    board meanwhile, and closes them where nobody will come; a rank that fails ends the wait by closing them itself.

    Args:
        most_s: how long ranks at work are waited for; those that show no sign of it, as long as the job says.
        hang_up: closes the connections that the message would come on.

    Raises:
        CommTimeout: as `wait_for`.
    """
    board = job_board()
    limit_s = most_s if board is None else min(most_s, board.limit_s)
    waiting = _Waiting(what=what, group=group, limit_s=limit_s, hang_up=hang_up)
    HERE.waits_for = what
    try:
        with contextlib.nullcontext() if board is None else _WATCH.over(waiting):
            work.wait(datetime.timedelta(seconds=most_s))
    except RuntimeError as error:
        waited = time.monotonic() - waiting.started
        reason = waiting.reason
        if reason is None and board is not None:
            reason = board.find() or _reason_to_stop(board, group, what, is_over=waited >= 0.9 * most_s)
        other = (
            "nothing came; look for the first error of the other ranks, or raise graph_pipeline.comm_timeout_s"
            if waited >= 0.9 * most_s
            else f"the connection to another rank broke off ({first_line(error)[:120]})"
        )
        raise _lost(what, who, waited, limit_s, reason or other) from error
    finally:
        HERE.waits_for = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A wait for a message that continues.

    Args:
        limit_s: after how long it matters whether the others are at work.
        reason: why it was ended from here.
    """

    what: str
    group: dist.ProcessGroup
    limit_s: float
    hang_up: Callable[[], None]
    started: float = field(default_factory=time.monotonic)
    failed_at: float | None = None
    reason: FirstFailure | str | None = None

    def is_over(self, board: FailureBoard) -> bool:
        """Return whether nobody will come, and take down why; takes two beats past the limit."""
        now = time.monotonic()
        if board.first is not None:
            self.failed_at = self.failed_at or now
            if now - self.failed_at >= GRACE_S or now - self.started >= self.limit_s:
                self.reason = board.first
        elif now - self.started >= self.limit_s:
            self.reason = _reason_to_stop(board, self.group, self.what)
        return self.reason is not None


class _MessageWatch:
    """Looks every `SLICE_S` at the messages that this process waits for; a message that comes costs an entry in a set.

    wait       |-- message ---|       |-- message ------------------------------ closed |
    looks        .      .      .      .      .      .(limit: board)  .(at work)  .(stopped: hang up)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # several: micro-batches of a generation wait in threads of their own
        self._going_on: set[_Waiting] = set()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, waiting: _Waiting) -> Iterator[None]:
        """Look at a wait while the block lasts."""
        with self._lock:
            self._going_on.add(waiting)
            if self._thread is None or not self._thread.is_alive():  # a forked process has none
                self._thread = threading.Thread(target=self._run, name="gpp_plugin messages", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._going_on.discard(waiting)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(SLICE_S)
            with self._lock:
                now = tuple(self._going_on)
                if now:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > IDLE_S:
                    self._thread = None
                    return
            board = job_board()
            for waiting in () if board is None else now:
                with contextlib.suppress(
                    Exception
                ):  # its group is gone: no other thread ends the other waits
                    if board is not None and waiting.is_over(board):
                        self._end(waiting)

    def _end(self, waiting: _Waiting) -> None:
        with self._lock:
            if waiting not in self._going_on:  # the message has come meanwhile
                return
            waiting.hang_up()


_WATCH = _MessageWatch()


def _poll(work: Any, seconds: float) -> None:
    """Wait for a collective on a device.

    Raises:
        RuntimeError: it is not done in time; in gloo's words.
    """
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("Operation timed out!")
        time.sleep(0.001)
    work.wait()


def _lost(
    what: str, who: str, waited: float, limit_s: float | None, reason: FirstFailure | str
) -> CommTimeout:
    limit = "" if limit_s is None else f" (limit {limit_s:g} s)"
    return CommTimeout(f"{who} waited for the other ranks at {what}{limit}: after {waited:.1f} s {reason}")


def _reason_to_stop(
    board: FailureBoard | None, group: dist.ProcessGroup, what: str, *, is_over: bool = False
) -> FirstFailure | str | None:
    """Return why the ranks that have not come will not, when the limit has passed; None: they are at work.

    Where the time of those ``is_over`` too, the first of them is the reason.
    """
    if board is None:
        return "one of them has not come: it is gone or stuck; look for its first error"
    seen = [
        each
        for each in board.look(dist.get_process_group_ranks(group))
        if each.state != "alive" or each.facts.get("waits_for") != what
    ]
    if board.first is not None:
        return board.first
    lost = next((each for each in seen if each.state != "alive"), None) or next(
        (each for each in seen if _will_not_come(each) or (is_over and not each.facts.get("waits_for"))), None
    )
    if lost is None:
        return None
    if lost.state != "alive":  # its last beat may be of a call before
        return board.post(failure_of(lost))
    why = f"it did not come to {what.removesuffix(EVERY_RANK)}{EVERY_RANK}"
    return board.post(
        FirstFailure(rank=lost.rank, stage=lost.facts.get("stage", ""), where=place_of(lost.facts), why=why)
    )


def _will_not_come(seen: SeenRank) -> bool:
    """Return whether a rank that lives is elsewhere: between the engine's calls, or waiting in another one."""
    facts = seen.facts
    if not facts:
        return False  # never heard of
    if not facts.get("call"):
        return bool(HERE.call)  # where nobody is in an engine's call, that says nothing
    return bool(facts.get("waits_for")) and (facts["call"], facts["number"]) != (HERE.call, HERE.number)


def all_reduce(
    tensor: Tensor, *, group: dist.ProcessGroup | int, what: str, op: Any = dist.ReduceOp.SUM
) -> None:
    """Reduce a tensor over a group's ranks, in place; on the host as `wait_for`, on a device as torch does.

    Raises:
        CommTimeout: as `wait_for`.
    """
    begin_all_reduce(tensor, group=group, what=what, op=op)()


def begin_all_reduce(
    tensor: Tensor, *, group: dist.ProcessGroup | int, what: str, op: Any = dist.ReduceOp.SUM
) -> Callable[[], None]:
    """Begin an `all_reduce`, and return what waits for it; until then the tensor is left alone."""
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return functools.partial(finish, work, tensor, group=group, what=what)


def begin_all_gather(
    whole: Tensor, part: Tensor, *, group: dist.ProcessGroup, what: str
) -> Callable[[], None]:
    """Begin to put the parts of a group's ranks into ``whole``, one after the other; return what waits for it.

    Until then both tensors are left alone.
    """
    # torch 2.13 renamed it, and warns of the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(whole, part, group=group, async_op=True)
    return functools.partial(finish, work, whole, group=group, what=what)


def finish(work: Any, tensor: Tensor, *, group: dist.ProcessGroup | int | None, what: str) -> None:
    """Wait for a collective of a tensor that was begun; as `all_reduce`."""
    if tensor.device.type != "cpu":
        work.wait()
        return
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group"
    wait_for(work, what=what, who=own_name(), group=group)


def own_name() -> str:
    """Return this rank in errors."""
    return f"rank {dist.get_rank()}" + (f", stage {HERE.stage!r}" if HERE.stage else "")


def gather_bytes(
    own: bytes, *, group: dist.ProcessGroup, first_only: bool = False, **wait: Any
) -> list[bytes] | None:
    """Return what every rank has, on every rank, or on the group's first one alone (None on the others).

    Args:
        wait: as of `wait_for`.

    Raises:
        CommTimeout: as `wait_for`.
    """
    # How long each one is, then all of them, each as long as the longest; nobody is through the first before all came.
    device = device_of(group)
    sizes = _sizes(len(own), group, **wait)
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if own:
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    padded = padded.to(device)
    is_first = dist.get_rank(group) == 0
    parts = [torch.empty_like(padded) for _ in sizes] if is_first or not first_only else None
    if first_only:
        work = dist.gather(padded, parts, group=group, group_dst=0, async_op=True)
    else:
        work = dist.all_gather(parts, padded, group=group, async_op=True)
    wait_for(work, group=group, is_polled=device != "cpu", **wait)
    if parts is None:
        return None
    return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def device_of(group: dist.ProcessGroup) -> str:
    """Return where a group's tensors must be: of NCCL's on the device."""
    # by device, "cpu:gloo": `get_backend` is "undefined" of a group that was made without a name
    return "cpu" if "gloo" in dist.get_backend_config(group) else "cuda"


def gather_objects(value: Any, *, group: dist.ProcessGroup, **wait: Any) -> list[Any]:
    """Return every rank's value, on every rank; arguments as of `gather_bytes`."""
    own_size = gather_bytes(pickle.dumps(value), group=group, **wait)
    assert own_size is not None
    return [pickle.loads(each) for each in own_size]


def broadcast_bytes(own: bytes, *, source: int, group: dist.ProcessGroup, **wait: Any) -> bytes:
    """Return, on every rank, what the rank ``source`` of the job has; arguments as of `gather_bytes`."""
    is_source = dist.get_rank() == source
    device = device_of(group)
    sizes = _sizes(len(own) if is_source else 0, group, **wait)
    body = torch.empty(sizes[dist.get_group_rank(group, source)], dtype=torch.uint8)
    if is_source and own:
        body.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    body = body.to(device)
    work = dist.broadcast(body, src=source, group=group, async_op=True)
    wait_for(work, group=group, is_polled=device != "cpu", **wait)
    return own if is_source else body.cpu().numpy().tobytes()


def _sizes(own: int, group: dist.ProcessGroup, **wait: Any) -> list[int]:
    device = device_of(group)
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    own_size = torch.tensor([own], dtype=torch.int64, device=device)
    work = dist.all_gather(found, own_size, group=group, async_op=True)
    wait_for(work, group=group, is_polled=device != "cpu", **wait)
    return [int(each) for each in found]


# ---- answers of all ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The collective operations of all ranks of a job, as one rank calls them.

    Args:
        group: a CPU group of all ranks; None for a single rank, which waits for nobody.
        who: this rank in errors, e.g. ``rank 2, stage 'vision'``.
        timeout_s: how long this rank waits, at most, for others that are at work (`wait_for`).
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
        self.begin_sum(tensor, what)()
        return tensor

    def begin_sum(self, tensor: Tensor, what: str) -> Callable[[], None]:
        """Begin a `sum`, and return what waits for it; until then the tensor is left alone."""
        if self.group is None:
            return lambda: None
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return functools.partial(wait_for, work, **self._wait(self.group, what))

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
        own = pickle.dumps(value) if dist.get_rank() == source else b""
        received = broadcast_bytes(own, source=source, **self._wait(self.group, what))
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
        timeout_s: how long the other ranks wait for a rank 0 that is at work (`wait_for`).

    Raises:
        GppError: ``make`` raised it on rank 0; every rank raises the same.
        CommTimeout: rank 0 did not answer in time.
    """
    # Two broadcasts, how long and then what, so that nobody needs to guess a length. An error is an answer too: rank
    # 0 sends its type and text, and every rank raises the same line instead of waiting for a plan that will not come.
    if group is None or dist.get_world_size(group) == 1:
        return make()
    answer, failure = b"", None
    result: T | None = None
    if dist.get_rank() == 0:
        try:
            with HERE.during(what):
                result = make()
            answer = json.dumps({"value": dumps(result)}).encode()
        except Exception as error:  # the others must not wait for an answer that will not come
            failure, (name, text) = error, _answer_of(error, what, name_of(0, HERE.stage))
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
    return "GppError", f"{rank}: {what} failed: {describe_error(error)}"


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
    make: Callable[[], T],
    *,
    what: str,
    group: dist.ProcessGroup | None,
    stages: Sequence[str] = (),
    **wait: Any,
) -> list[T]:
    """Call ``make`` on every rank and return what it gave on each; if it fails on one, all raise the same.

    Args:
        what: the phase, for errors.
        group: a CPU group of all ranks; None for a single rank.
        stages: the stage of each rank, for errors; ``wait``: as of `wait_for`.

    Raises:
        GppError: ``make`` raised on a rank; of several, the first one's.
        CommTimeout: a rank is gone, or did not answer in the group's time; names those that did not come.
    """
    # Every rank comes to the gather, failed or not, and brings (value, None) or (None, (type, text)). The first
    # rank's problem is raised on all, with its name if not all failed; there it has the error itself as its cause.
    #
    #     rank 0   (42, None)   (None, ("CaptureError", "stage ..."))      both raise CaptureError("rank 1: stage ...")
    if group is None or dist.get_world_size(group) == 1:
        return [make()]
    rank = dist.get_rank()
    name = name_of(rank, stages[rank] if stages else HERE.stage)
    value: T | None = None
    failure, cause = None, None
    try:
        with HERE.during(what):
            value = make()
    except Exception as error:  # whatever it is: the other ranks must not wait for this one
        cause = error
        failure = _answer_of(error, what, name)
    received: list[tuple[T, tuple[str, str] | None]] = gather_objects(
        (value, failure), group=group, what=what, who=name, **wait
    )
    failed = [(other, problem) for other, (_, problem) in enumerate(received) if problem is not None]
    if not failed:
        return [answer for answer, _ in received]
    first, (name, text) = failed[0]
    if len(failed) < len(received) and f"rank {first}" not in text:  # what all raise is no rank's own
        text = f"{name_of(first, stages[first] if stages else '')}: {text}"
    raise shared_error(name, text) from (cause if first == rank else None)


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
