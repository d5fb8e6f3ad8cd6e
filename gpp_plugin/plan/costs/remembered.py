"""Methods whose results are stored on their instance: each is computed once for each set of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def remembered(method: Callable[Concatenate[S, P], R]) -> cached_property[Callable[P, R]]:
    """Return a method that computes each result once; its arguments must be hashable.

    `functools.cache` on a method would hold every instance for ever; here results live as long as their instance. For
    classes that live as long as a search: an instance refers to itself so, and only `gc` frees it.
    """

    def of_instance(instance: Any) -> Callable[P, R]:
        return cast("Callable[P, R]", cache(MethodType(method, instance)))

    return cached_property(of_instance)
