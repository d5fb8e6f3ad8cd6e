"""Waits for other ranks on the host: in slices, so that a failure elsewhere ends them, and by signs of work.

    limit        a rank that is gone ends a wait within a second or two. One that is stopped, is outside of the
                 engine's calls, or waits in another call, ends it at the limit (`comm_timeout_s`). One that is at work
                 in the same call (it captures, compiles, loads) is waited for as long as the caller allows.

In a step only on gloo: what NCCL's streams wait for, no host does.

Source: this project
Tests: tests/runtime/test_meeting.py, tests/runtime/test_agree.py
"""

from __future__ import annotations

import datetime
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import CommTimeout, first_line
from gpp_plugin.runtime.ranks.failure_board import FailureBoard
from gpp_plugin.runtime.ranks.job_board import job_board
from gpp_plugin.runtime.ranks.whereabouts import HERE, FirstFailure, SeenRank, place_of

SLICE_S = 1.0
"""After how long a wait looks whether a rank has failed; one that ends sooner looks at nothing."""

EVERY_RANK = ", which every rank calls"

GRACE_S = 2.0
"""How long a wait goes on when a rank has failed: what it had sent before may still come."""


def wait_for(
    work: Any,
    *,
    what: str,
    who: str,
    group: dist.ProcessGroup,
    limit_s: float | None = None,
    most_s: float | None = None,
    is_polled: bool = False,
) -> None:
    """Wait for a collective that was posted on gloo.

    Args:
        what: what the ranks come together for, for errors.
        who: this rank, for errors.
        limit_s: how long ranks are waited for that show no sign of work; None: the job's.
        most_s: how long those at work are waited for; None: as long as the group's own limit says.
        is_polled: ask whether it is done, as of a collective on a device, in which the host cannot wait so long.

    Raises:
        CommTimeout: a rank is gone, has failed, or did not come; names it, and where it is.
    """
    # gloo's timeout of a wait leaves the collective as it is: it may be waited for again. The group's own limit ends
    # it.
    board = job_board()
    if limit_s is None:
        limit_s = min(most_s or board.limit_s, board.limit_s) if board is not None else most_s
    started = time.monotonic()
    failed_at: float | None = None
    has_ended = False
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
                    has_ended = True  # between the two calls, well or by an error: asked again it says which
                    continue
                if has_ended or not is_late:
                    first = None if board is None else board.find() or _reason_to_stop(board, group, what)
                    broken = f"the connection to another rank broke off ({first_line(error)[:120]})"
                    raise _lost(what, who, waited, limit_s, first or broken) from error
            if board is not None and board.first is not None:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at >= min(GRACE_S, limit_s or GRACE_S):
                    raise _lost(what, who, waited, limit_s, board.first)
            if limit_s is not None and waited >= limit_s:
                reason = _reason_to_stop(board, group, what)
                if reason is None and most_s is not None and waited >= most_s:
                    reason = "the others are still at work"
                if reason is not None:
                    raise _lost(what, who, waited, limit_s, reason)
    finally:
        HERE.waits_for = ""


def wait_for_message(work: Any, *, what: str, who: str, group: dist.ProcessGroup, limit_s: float) -> None:
    """Wait for a message of another rank over gloo, or until one that was sent is taken; as `wait_for`.

    Once, up to the limit: gloo closes the connections of a group in which a message is late. A rank that fails ends
    the wait by closing them.

    Raises:
        CommTimeout: as `wait_for`.
    """
    board = job_board()
    if board is not None:
        limit_s = min(limit_s, board.limit_s)
    started = time.monotonic()
    HERE.waits_for = what
    try:
        work.wait(datetime.timedelta(seconds=limit_s))
    except RuntimeError as error:
        waited = time.monotonic() - started
        is_late = waited >= 0.9 * limit_s
        first = None
        if board is not None:
            first = board.find() or _reason_to_stop(board, group, what)
        other = (
            "nothing came; look for the first error of the other ranks, or raise graph_pipeline.comm_timeout_s"
            if is_late
            else f"the connection to another rank broke off ({first_line(error)[:120]})"
        )
        raise _lost(what, who, waited, limit_s, first or other) from error
    finally:
        HERE.waits_for = ""


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
    error = CommTimeout(f"{who} waited for the other ranks at {what}{limit}: after {waited:.1f} s {reason}")
    return error


def _reason_to_stop(
    board: FailureBoard | None, group: dist.ProcessGroup, what: str
) -> FirstFailure | str | None:
    """Return why the ranks that have not come will not, when the limit has passed; None: they are at work."""
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
        (each for each in seen if _will_not_come(each)), None
    )
    if lost is None:
        return None
    why = (
        lost.why
        if lost.state != "alive"
        else f"it did not come to {what.removesuffix(EVERY_RANK)}{EVERY_RANK}"
    )
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
    if tensor.device.type != "cpu":
        dist.all_reduce(tensor, op=op, group=group)
        return
    finish(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor, group=group, what=what)


def all_gather(whole: Tensor, part: Tensor, *, group: dist.ProcessGroup, what: str) -> None:
    """Put the parts of a group's ranks into ``whole``, one after the other; on the host as `wait_for`.

    Raises:
        CommTimeout: as `wait_for`.
    """
    # torch 2.13 renamed it, and warns of the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if whole.device.type != "cpu":
        gather(whole, part, group=group)
        return
    finish(gather(whole, part, group=group, async_op=True), whole, group=group, what=what)


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
    return "cpu" if "gloo" in str(dist.get_backend(group)) else "cuda"


def gather_objects(value: Any, *, group: dist.ProcessGroup, **wait: Any) -> list[Any]:
    """Return every rank's value, on every rank; arguments as of `gather_bytes`."""
    told = gather_bytes(pickle.dumps(value), group=group, **wait)
    assert told is not None
    return [pickle.loads(each) for each in told]


def tell_bytes(own: bytes, *, source: int, group: dist.ProcessGroup, **wait: Any) -> bytes:
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
    told = torch.tensor([own], dtype=torch.int64, device=device)
    work = dist.all_gather(found, told, group=group, async_op=True)
    wait_for(work, group=group, is_polled=device != "cpu", **wait)
    return [int(each) for each in found]
