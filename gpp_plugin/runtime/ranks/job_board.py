"""The board of this process's job, and what errors say by it: which rank failed first, where, and why.

An error that all ranks raise together (`mark_shared`) is nobody's failure. One that another rank's failure led to gets
its name; one of this rank's own, after which the job cannot go on, is written on the board. What ends the process tells
the others as well, and the last line that it prints says who failed first.

Source: this project
Tests: tests/runtime/test_failure_board.py, tests/integrations/test_faults.py
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Collection
from types import TracebackType

import torch.distributed as dist

from gpp_plugin.errors import CommTimeout, GppError
from gpp_plugin.runtime.ranks.agents_store import has_agents_store
from gpp_plugin.runtime.ranks.failure_board import FailureBoard
from gpp_plugin.runtime.ranks.whereabouts import HERE, FirstFailure, Whereabouts, describe_error

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
    for name, value in vars(Whereabouts()).items():
        if name not in ("call", "number", "doing"):
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
    global _board
    if _board is not None:
        _board.close()
    _board = None


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error, or what it came of, says that another rank did not answer or is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CommTimeout | dist.DistNetworkError | dist.DistBackendError):
            return True
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(sign in text for sign in _SIGNS):
            return True
        seen = seen.__cause__
    return False


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


def is_shared(error: BaseException) -> bool:
    """Return whether `mark_shared` was called for the error."""
    return bool(getattr(error, _SHARED, False))


def name_cause(error: BaseException, *, is_fatal: bool) -> None:
    """Add to an error who failed first; where it was this rank, tell the others.

    Args:
        is_fatal: the job cannot go on after it.
    """
    board = _board
    if board is None or is_shared(error):
        return
    if is_broken_connection(error):
        first = board.find()
    elif is_fatal:
        first = board.post_error(error)
    else:
        return
    if first is not None and first.rank == board.rank:
        error.add_note(f"{first}")
    elif first is not None and not _says(error, first):
        if isinstance(error, GppError):
            error.args = (f"{error}; {first}",)
        else:
            error.add_note(f"{first}")
    board.linger()


def _says(error: BaseException, first: FirstFailure) -> bool:
    """Return whether an error says who failed first, or is what every rank raises for itself."""
    return str(first) in str(error) or first.why == describe_error(error)


_watched = False


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


def _forget() -> None:
    """Let a forked process, which has no thread and must not use the connection, know nothing of the board."""
    global _board
    _board = None
