"""Series-parallel decomposition of a block graph; graphs that have none are given one.

A component is a set of blocks. It is *parallel* when it falls apart into parts without dependencies
between them, and *series* when it can be cut so that everything before the cut precedes everything
after it. A graph that is neither (after transitive reduction, so skips and cross-attention do not
count) contains an N: there the cut is forced where it adds the fewest orderings. Such orderings guide
the search only; the plan's edges stay those of the model.

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py, tests/plan/test_known_answers.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A node of the series-parallel tree.

    Args:
        kind: ``block``, ``series`` or ``parallel``; ``run``: blocks in a row that are taken as one (`coarsening`).
        blocks: positions of its blocks in the graph, increasing.
        children: in order for a series; none for a block.
    """

    kind: str
    blocks: tuple[int, ...]
    children: tuple[Component, ...] = ()

    def __str__(self) -> str:
        if self.kind == "block":
            return str(self.blocks[0])
        return f"{'S' if self.kind == 'series' else 'P'}({' '.join(map(str, self.children))})"


def decompose(dependencies: nx.DiGraph) -> Component:
    """Return the series-parallel tree of a graph whose nodes are 0..n-1 in a topological order.

    >>> str(decompose(nx.DiGraph([(0, 1), (0, 2), (1, 3), (2, 3)])))
    'S(0 P(1 2) 3)'
    """
    num = dependencies.number_of_nodes()
    before = [0] * num
    for node in range(num):
        for other in dependencies.predecessors(node):
            before[node] |= before[other] | 1 << other
    after = [0] * num
    for node in range(num - 1, -1, -1):
        for other in dependencies.successors(node):
            after[node] |= after[other] | 1 << other
    return _decompose((1 << num) - 1, before, after)


def _decompose(members: int, before: Sequence[int], after: Sequence[int]) -> Component:
    nodes = tuple(_bits(members))
    if len(nodes) == 1:
        return Component(kind="block", blocks=nodes)
    parts = _connected(members, lambda node: (before[node] | after[node]) & members)
    if len(parts) > 1:
        children = tuple(_decompose(part, before, after) for part in parts)
        return Component(kind="parallel", blocks=nodes, children=children)
    parts = _connected(members, lambda node: members & ~(before[node] | after[node]))
    if len(parts) == 1:
        prefix = _cheapest_cut(members, nodes, before, after)
        parts = [prefix, members & ~prefix]
    else:
        parts.sort(key=lambda part: (before[_lowest(part)] & members & ~part).bit_count())
    items: list[Component] = []
    for part in parts:
        child = _decompose(part, before, after)
        items.extend(child.children if child.kind == "series" else (child,))
    return Component(kind="series", blocks=nodes, children=tuple(items))


def _bits(members: int) -> Iterator[int]:
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def _lowest(members: int) -> int:
    return (members & -members).bit_length() - 1


def _connected(members: int, neighbours: Callable[[int], int]) -> list[int]:
    parts = []
    rest = members
    while rest:
        part = frontier = rest & -rest
        while frontier:
            node = _lowest(frontier)
            frontier &= frontier - 1
            fresh = neighbours(node) & ~part
            part |= fresh
            frontier |= fresh
        parts.append(part)
        rest &= ~part
    return parts


def _cheapest_cut(members: int, nodes: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
    """Return the prefix whose completion before all the rest adds the fewest orderings a pair.

    Tried are, for every node: it and what precedes it; everything that does not follow it; and every
    level of the longest paths from the sources.
    """
    level: dict[int, int] = {}
    for node in nodes:
        level[node] = 1 + max((level[other] for other in _bits(before[node] & members)), default=-1)
    prefixes = {(before[node] & members) | 1 << node for node in nodes}
    prefixes |= {members & ~(after[node] | 1 << node) for node in nodes}
    for limit in range(max(level.values())):
        prefixes.add(sum(1 << node for node in nodes if level[node] <= limit))
    prefixes -= {0, members}

    def cost(prefix: int) -> tuple[float, int]:
        rest = members & ~prefix
        added = sum((rest & ~after[node]).bit_count() for node in _bits(prefix))
        return added / (prefix.bit_count() * rest.bit_count()), prefix

    return min(prefixes, key=cost)
