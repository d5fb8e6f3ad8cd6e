"""Mini-batches that were taken of iterators before they are trained, each kept as long as its iterator."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpp_plugin.errors import GppError
from gpp_plugin.runtime.batches import (
    Batch,
)

logger = logging.getLogger(__name__)

_MOST_HELD = 4
"""Iterators without weak references (a list's, ``zip``, ``map``) of which a mini-batch taken ahead is kept."""


@dataclass(slots=True)
class Taken:
    """A mini-batch taken ahead, or what kept it from being.

    Args:
        source: returns what it was taken from, or None where that is gone, and with it whoever could ask for the rest.
        is_held: the source is kept alive, since nothing would tell when it goes.
    """

    source: Callable[[], Any]
    is_held: bool
    batch: Batch | None = None
    error: BaseException | None = None


class TakenAhead:
    """Mini-batches taken ahead by what they were taken from: each lives as long as its iterator, and no longer.

    A caller may take turns between any number of iterators, and go back to one it has left. Where an iterator has no
    weak references it is held, and so are only a few of them: of one more nothing is taken ahead, so nothing is lost.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Taken] = {}
        self._has_warned = False

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def pop(self, source: Any) -> Taken | None:
        """Return what was taken of a source, and keep it no longer."""
        return self._by_id.pop(id(source), None)

    def place_for(self, source: Any) -> Taken | None:
        """Return an empty place for what will be taken of a source; None where there is none."""
        number = id(source)

        def forget(_: Any) -> None:  # before the number is another object's
            self._by_id.pop(number, None)

        try:
            return Taken(weakref.ref(source, forget), is_held=False)
        except TypeError:
            pass
        if sum(each.is_held for each in self._by_id.values()) < _MOST_HELD:
            return Taken(lambda: source, is_held=True)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "look_ahead: mini-batches of %d iterators that were left in their middle are kept, and of one more "
                "(a %s) none is taken ahead; pass the same iterator at every call, or generators: when they are gone, "
                "so is what is kept",
                _MOST_HELD,
                type(source).__name__,
            )
        return None

    def keep(self, taken: Taken) -> None:
        """Keep what was taken until its turn comes."""
        if taken.error is not None:
            if taken.is_held and isinstance(taken.error, StopIteration):
                return  # it will say so again
            _without_frames(taken.error)
        self._by_id[id(taken.source())] = taken


def _without_frames(error: BaseException) -> None:
    """Let an error hold none of the frames it went through, nor their callers': they keep its iterator alive."""
    if not isinstance(error, GppError | StopIteration):
        text = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"raised as the next mini-batch was taken ahead:\n{text}")
    done: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in done:
        done.add(id(seen))
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
