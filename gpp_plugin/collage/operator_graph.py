"""Operators of a forward as placements see them: names, attributes, who reads whom; no tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of an operator.

    Args:
        key: unique in its graph.
        name: what is called, without namespace and overload: ``linear`` for ``aten.linear.default``.
        inputs: what it reads, in the order of its arguments: keys of operators, or names of the graph's inputs.
        attr: its other arguments by name, such as ``stride``.
    """

    key: str
    name: str
    inputs: tuple[str, ...]
    attr: Mapping[str, Any] = field(default_factory=dict)


class OperatorGraph:
    """Operators in a topological order; sets of them are integers whose bit i stands for the i-th.

    Bits make "is it convex" three operations on integers, whatever the size of the graph.

    Args:
        operators: each behind those that it reads.
        outputs: keys of operators whose results leave the graph; those that no operator reads leave it anyway.
    """

    def __init__(self, operators: Sequence[Operator], outputs: Iterable[str] = ()) -> None:
        self.operators = tuple(operators)
        self.position = {operator.key: i for i, operator in enumerate(self.operators)}
        self.everything = (1 << len(self.operators)) - 1
        # conv, relu(conv), add(relu, conv) as bits 0, 1, 2: reads is [0, 0b001, 0b011], before the same here, and
        # after is [0b110, 0b100, 0]; add is what leaves.
        self.reads: list[int] = []
        """By position: the operators whose results it reads."""
        self.before: list[int] = []
        """By position: all operators that it depends on, through others as well."""
        for operator in self.operators:
            # names that are no operators are inputs and weights of the whole, there before anything runs
            read = self.mask(key for key in operator.inputs if key in self.position)
            self.reads.append(read)
            self.before.append(functools.reduce(int.__or__, (self.before[i] for i in bits(read)), read))
        self.after = [0] * len(self.operators)
        """By position: all operators that depend on it."""
        for i in reversed(range(len(self.operators))):
            for j in bits(self.reads[i]):
                self.after[j] |= self.after[i] | 1 << i
        leaving = {key for key in outputs if key in self.position}
        self.outputs = self.mask(leaving) | sum(1 << i for i, mask in enumerate(self.after) if not mask)

    def mask(self, keys: Iterable[str]) -> int:
        """Return the set of these operators."""
        return functools.reduce(int.__or__, (1 << self.position[key] for key in keys), 0)

    def keys(self, mask: int) -> tuple[str, ...]:
        """Return the operators of a set, in order."""
        return tuple(self.operators[i].key for i in bits(mask))

    def is_convex(self, mask: int) -> bool:
        """Return whether no path leaves the set and comes back: only then can it run as one."""
        # a -> b -> c: {a, c} is not, since b reads from it and it reads from b
        predecessors = functools.reduce(int.__or__, (self.after[i] for i in bits(mask)), 0)
        successors = functools.reduce(int.__or__, (self.before[i] for i in bits(mask)), 0)
        return not predecessors & successors & ~mask

    def needs(self, mask: int) -> int:
        """Return the operators outside of a set that it reads from."""
        return functools.reduce(int.__or__, (self.reads[i] for i in bits(mask)), 0) & ~mask

    def between(self, source: int, sink: int) -> int:
        """Return all operators on paths from one position to another, both among them."""
        return (self.after[source] | 1 << source) & (self.before[sink] | 1 << sink)

    @functools.cached_property
    def post_dominators(self) -> tuple[int | None, ...]:
        """Return by position the next operator that everything made of its result passes; None: the end."""
        # dominators of the reversed graph, from one end behind all results that leave
        end = len(self.operators)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(end + 1))
        graph.add_edges_from((end, i) for i in bits(self.outputs))
        graph.add_edges_from((i, j) for i, read in enumerate(self.reads) for j in bits(read))
        found = nx.immediate_dominators(graph, end)
        return tuple(None if found[i] == end else found[i] for i in range(end))


def bits(mask: int) -> Iterable[int]:
    """Return the positions of a set's members, in order.

    >>> list(bits(0b10110))
    [1, 2, 4]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def run_order(graph: OperatorGraph, groups: Sequence[int]) -> list[int]:
    """Return the order in which disjoint sets can run, by their index; those that wait for each other are left out."""
    order: list[int] = []
    # Two convex groups can wait for each other: with a -> c and b -> d, {a, d} needs b and {b, c} needs a. So
    # being convex is not enough, and an order is looked for.
    done = 0
    waiting = dict(enumerate(groups))
    while True:
        ready = [i for i, group in waiting.items() if not graph.needs(group) & ~done]
        if not ready:
            return order
        # the first in the graph's own order: what was made last is read soonest
        chosen = min(ready, key=lambda i: waiting[i] & -waiting[i])
        done |= waiting.pop(chosen)
        order.append(chosen)
