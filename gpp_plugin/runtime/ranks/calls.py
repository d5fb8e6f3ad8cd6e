"""The calls by which a user's program enters the engine: where a rank is, and who failed first where one ends badly.

Source: this project
Tests: tests/integrations/test_faults.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gpp_plugin.runtime.ranks.job_board import name_cause
from gpp_plugin.runtime.ranks.whereabouts import HERE

C = TypeVar("C", bound=type)


@contextmanager
def engine_call(name: str, *, is_fatal: Callable[[], bool]) -> Iterator[None]:
    """Run a call; within another one, only what it does is told.

    Args:
        is_fatal: asked after an exception: the job cannot go on. One that it survives is nobody's failure.
    """
    if HERE.call:
        with HERE.during(name):
            yield
        return
    try:
        HERE.call, HERE.number, HERE.last_error = name, HERE.number + 1, ""
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
    """Make methods of a class engine calls; its objects say with ``has_failed`` whether they can go on."""

    def wrap_all(owner: C) -> C:
        for name in names:
            setattr(owner, name, _watched(getattr(owner, name), name))
        return owner

    return wrap_all


def _watched(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with engine_call(name, is_fatal=lambda: self.has_failed):
            return method(self, *args, **kwargs)

    return call
