"""The board of this process's job, and what errors say by it: which rank failed first, where, and why.

An error that all ranks raise together (`mark_shared`) is nobody's failure. One that another rank's failure led to gets
its name; one of this rank's own, after which the job cannot continue, is written on the board. The end of the process
informs the others as well, and the last line that it prints says who failed first.

Source: this project
Tests: tests/runtime/test_failure_board.py, tests/integrations/test_faults.py, tests/runtime/test_agents_store.py,
    tests/integrations/test_elastic.py
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from gpp_plugin import errors
from gpp_plugin.errors import CommTimeout, GppError, describe_error
from gpp_plugin.runtime.messages.sockets import close_connections
from gpp_plugin.runtime.ranks.failure_board import HERE, FailureBoard, RankStatus

# The store of an elastic agent, which outlives the processes that it starts: keys of each start's own.
#
# torchrun's agent keeps one store for a job and starts the ranks anew, as many or fewer, when one fails. What the
# ranks before have left there, their addresses and their first failure, is not to be read by those of now. Nothing
# that an agent sets for its processes counts its starts alike on all hosts, so the ranks agree on a name for theirs:
#
#     rank 0      call = 7f3a                                   go/7f3a = [b1, 9c]      a name, all who answered it
#     rank 1            call? 7f3a   answer/1 = 7f3a b1         go/7f3a has b1: it is
#     rank 2      call? 22c0 answer/2 = 22c0 9c   go/22c0 (of the start before) has no 9c ... call? 7f3a   answer, go

LOOKS_S = 0.05
"""Between two looks at what the others have written, in a job of few ranks."""

LOOKS_A_SECOND = 2000
"""Of all ranks together, at most: the store, one thread, has other work while ranks start."""

_PREFIX = "gpp_plugin/start"


def has_agents_store() -> bool:
    """Return whether the store in this process's environment is an elastic agent's, and no rank's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_start(store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> dist.Store:
    """Return the part of an agent's store that the ranks started together have; collective over them.

    Raises:
        CommTimeout: a rank did not come; says which.
    """
    started = time.monotonic()
    own = secrets.token_hex(8)
    name = own if rank == 0 else ""
    answers: dict[int, str] = {}
    if rank == 0:
        store.set(f"{_PREFIX}/call", name)
    while time.monotonic() - started < timeout_s:
        if rank == 0:
            answers |= _answers(store, name, num_ranks, known=answers)
            if len(answers) == num_ranks - 1:
                store.set(f"{_PREFIX}/go/{name}", json.dumps(list(answers.values())))
                return dist.PrefixStore(name, store)
        else:
            called = _get(store, "call")
            if called != name:
                name = called
                store.set(f"{_PREFIX}/answer/{rank}", f"{name} {own}")
            if name and own in _get(store, f"go/{name}"):
                return dist.PrefixStore(name, store)
        time.sleep(max(LOOKS_S, num_ranks / LOOKS_A_SECOND))
    here = {0} | set(_answers(store, name, num_ranks)) if name else set()
    absent = [other for other in range(num_ranks) if other not in here] or [0]
    raise did_not_come(absent, rank=rank, num_ranks=num_ranks, waited_s=timeout_s)


def _answers(store: dist.Store, name: str, num_ranks: int, known: Container[int] = ()) -> dict[int, str]:
    """Return the words of the other ranks that have answered to a name, but for those whose answer is known."""
    unknown = [rank for rank in range(1, num_ranks) if rank not in known]
    replies = {rank: _get(store, f"answer/{rank}").split() for rank in unknown}
    return {rank: words[1] for rank, words in replies.items() if words[:1] == [name]}


def _get(store: dist.Store, key: str) -> str:
    """Return what is written under a key; empty where nothing is, without waiting for it."""
    full = f"{_PREFIX}/{key}"
    text: str = store.get(full).decode() if store.check([full]) else ""
    return text


def did_not_come(
    absent: list[int], *, rank: int, num_ranks: int, waited_s: float, why: str = ""
) -> CommTimeout:
    """Return the error of a rank that waited for others to start.

    Args:
        absent: who did not come.
        why: what torch said.
    """
    names = " and ".join(f"rank {each}" for each in absent)
    where = os.environ.get("MASTER_ADDR", "the job's store")
    return CommTimeout(
        f"rank {rank} of {num_ranks} ranks waited {round(waited_s, 1):g} s for all to join at {where}: {names} did not "
        f"come{f' ({why})' if why else ''}; start every rank, with rank 0's host as MASTER_ADDR, and look at the "
        "output of those that did not come"
    )


_board: FailureBoard | None = None


def open_board(
    store: dist.Store,
    *,
    rank: int,
    num_ranks: int,
    epoch: int,
    limit_s: float,
    neighbours: Collection[int] | None = None,
) -> FailureBoard | None:
    """Make the board of a job that begins; the one of a job before it is closed. None for a job of one rank.

    Args:
        neighbours: the ranks of this rank's host (`FailureBoard`).
    """
    global _board
    close_board()
    # calls are counted from here, alike on all ranks: a rank that waits in a call of another number will not come
    for name, value in vars(RankStatus()).items():
        if name not in ("call", "doing"):
            setattr(HERE, name, value)
    if num_ranks > 1:
        _board = FailureBoard(
            store,
            rank=rank,
            num_ranks=num_ranks,
            epoch=epoch,
            limit_s=limit_s,
            holder=None if has_agents_store() else 0,
            neighbours=neighbours,
        )
        _watch_exit()
    return _board


def job_board() -> FailureBoard | None:
    """Return the board of this process's job; None where it has one rank, or none was made."""
    return _board


def close_board() -> None:
    """Close the job's board, if there is one."""
    global _board, _is_broken
    if _board is not None:
        _is_broken = _is_broken or _board.first is not None
        _board.close()
    _board = None


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error, or what it came of, says that another rank did not answer or is gone."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # an error that is raised from itself is its own cause
        causes.append(cause)
        cause = cause.__cause__
    return any(
        isinstance(each, CommTimeout | dist.DistNetworkError | dist.DistBackendError)
        or (isinstance(each, RuntimeError) and any(sign in str(each).lower() for sign in _SIGNS))
        for each in causes
    )


_SIGNS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "operation timed out",
    "gloo/transport",
)
"""Of gloo's messages; its exceptions are RuntimeErrors."""

_SHARED = "_gpp_plugin_raised_on_all_ranks"


def mark_shared(error: BaseException) -> None:
    """Note that all ranks raise this error together: none of them has failed before the others."""
    setattr(error, _SHARED, True)


def shared_error(kind: str, text: str) -> GppError:
    """Return an error that all ranks raise together, of the class that one of them named."""
    error: GppError = getattr(errors, kind, GppError)(text)
    mark_shared(error)
    return error


def is_shared(error: BaseException) -> bool:
    """Return whether `mark_shared` was called for the error."""
    return bool(getattr(error, _SHARED, False))


def name_cause(error: BaseException, *, is_fatal: bool) -> None:
    """Add to an error who failed first; where it was this rank, inform the others.

    Args:
        is_fatal: the job cannot continue after it.
    """
    global _is_broken
    board = _board
    if board is None or is_shared(error):
        return
    if is_broken_connection(error):
        _is_broken = True
        first = board.find()
    elif is_fatal:
        first = board.post_error(error)
    else:
        return
    if first is not None and first.rank == board.rank:
        error.add_note(f"{first}")
    elif first is not None and not (str(first) in str(error) or first.why == describe_error(error)):
        if isinstance(error, GppError):
            error.args = (f"{error}; {first}",)
        else:
            error.add_note(f"{first}")
    board.linger()


_watched = False
_is_broken = False
"""Whether a wait of this process for another rank has broken off, or a board that was closed had a failure."""


def _watch_exit() -> None:
    """Let what ends this process be known to the others, and its last line be what the job failed of."""
    global _watched
    if _watched:
        return
    _watched = True
    atexit.register(_leave)
    os.register_at_fork(after_in_child=_forget)
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        board = _board
        if board is not None and not is_shared(error):
            with contextlib.suppress(Exception):
                name_cause(error, is_fatal=True)
        hook(kind, error, trace)
        if board is not None and board.first is not None:
            board.close()  # a thread that was asking a store as it went would have torch write a page behind the line
            sys.stderr.write(f"gpp_plugin: {board.first}\n")

    sys.excepthook = excepthook


def _leave() -> None:
    if _board is not None:
        _board.linger()
        _board.leave()
    if _is_broken or (_board is not None and _board.first is not None):
        close_connections()


def _forget() -> None:
    """Let a forked process, which has no thread and must not use the connection, know nothing of the board."""
    global _board
    _board = None


# The calls by which a user's program enters the engine: where a rank is, and who failed first where one ends badly.

C = TypeVar("C", bound=type)


@contextmanager
def engine_call(name: str, *, is_fatal: Callable[[], bool]) -> Iterator[None]:
    """Run a call; within another one, only its instruction is published.

    Args:
        is_fatal: called after an exception: the job cannot continue. One that it survives is nobody's failure.
    """
    if HERE.call:
        with HERE.during(name):
            yield
        return
    try:
        # the call last: as it is set, all three are published
        HERE.number, HERE.last_error, HERE.call = HERE.number + 1, "", name
        yield
    except BaseException as error:
        ends_job = not isinstance(error, Exception) or isinstance(error, MemoryError) or is_fatal()
        name_cause(error, is_fatal=ends_job)
        HERE.last_error = f"{type(error).__name__}, in {name}"
        raise
    finally:
        HERE.call = HERE.doing = ""
        HERE.instruction = None


def watched_calls(*names: str) -> Callable[[C], C]:
    """Make methods of a class engine calls; its objects say with ``has_failed`` whether they can continue."""

    def watched(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with engine_call(name, is_fatal=lambda: self.has_failed):
                return method(self, *args, **kwargs)

        return call

    def wrap_all(owner: C) -> C:
        for name in names:
            setattr(owner, name, watched(getattr(owner, name), name))
        return owner

    return wrap_all
