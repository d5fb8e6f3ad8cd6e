"""Patterns of operators that a backend runs as one: trees of operator names, attributes and wildcards.

    conv = is_op("conv2d")(wildcard(), wildcard()).has_attr({"stride": [1, 1]})
    conv_add_relu = is_op("relu")(is_op("add")(conv, wildcard()))

A pattern is of the operator that makes its result; what a wildcard stands for is outside of the match.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.3, listing 1)
Tests: tests/collage/test_patterns.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpp_plugin.collage.operator_graph import OperatorGraph


@dataclass(frozen=True, slots=True, eq=False)
class Wildcard:
    """Stands for any tensor: an operator's result, an input or a parameter."""

    def __str__(self) -> str:
        return "*"


@dataclass(frozen=True, slots=True, eq=False)
class OperatorPattern:
    """An operator of some name, whose first tensors match patterns.

    Args:
        name: as of `Operator.name`.
        inputs: of its first tensors; those beyond may be anything. None: all may.
        attr: what its attributes must be.
    """

    name: str
    inputs: tuple[Pattern, ...] | None = None
    attr: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *inputs: Pattern) -> OperatorPattern:
        """Return the pattern with patterns of what the operator reads."""
        return dataclasses.replace(self, inputs=inputs)

    def has_attr(self, attributes: Mapping[str, Any]) -> OperatorPattern:
        """Return the pattern with attributes that the operator must have."""
        return dataclasses.replace(self, attr={**self.attr, **attributes})

    def __str__(self) -> str:
        inputs = "" if self.inputs is None else f"({', '.join(map(str, self.inputs))})"
        attr = "".join(f"[{name}={value}]" for name, value in self.attr.items())
        return f"{self.name}{attr}{inputs}"


Pattern = OperatorPattern | Wildcard


def is_op(name: str) -> OperatorPattern:
    """Return the pattern of an operator of that name, whatever it reads.

    >>> str(is_op("relu")(is_op("conv2d").has_attr({"groups": 1})))
    'relu(conv2d[groups=1])'
    """
    return OperatorPattern(name)


def wildcard() -> Wildcard:
    """Return the pattern of any tensor."""
    return Wildcard()


def match_pattern(pattern: OperatorPattern, graph: OperatorGraph, key: str) -> int | None:
    """Return the set of operators that match a pattern whose result the operator ``key`` makes; None: they do not.

    What it makes on the way must not be read elsewhere, and the set must be convex: else it could not run as one.
    """
    found: dict[int, str] = {}  # id of a pattern -> what it stands for: one used twice is the same operator
    if not _matches(pattern, graph, key, found):
        return None
    # What the pattern's inside makes is gone when it runs as one: nobody else may want it, nor the graph's caller.
    mask = graph.mask(set(found.values()))
    inner = mask & ~graph.mask([key])
    if inner & graph.outputs or not graph.is_convex(mask):
        return None
    for i, read in enumerate(graph.reads):
        if read & inner and not mask >> i & 1:
            return None
    return mask


def _matches(pattern: Pattern, graph: OperatorGraph, key: str, found: dict[int, str]) -> bool:
    if isinstance(pattern, Wildcard):
        return True
    if id(pattern) in found:  # add(relu(conv), conv) with one conv: both places are the same operator
        return found[id(pattern)] == key
    if key not in graph.position:
        return False
    operator = graph.operators[graph.position[key]]
    if operator.name != pattern.name or any(
        name not in operator.attr or operator.attr[name] != value for name, value in pattern.attr.items()
    ):
        return False
    found[id(pattern)] = key
    inputs = pattern.inputs or ()
    return len(inputs) <= len(operator.inputs) and all(
        _matches(inner, graph, read, found) for inner, read in zip(inputs, operator.inputs, strict=False)
    )
