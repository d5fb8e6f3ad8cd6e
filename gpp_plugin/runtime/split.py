"""A backward in two parts: first the gradients of received tensors, later those of parameters.

Source: Zero Bubble Pipeline Parallelism (Qi et al., 2024), section 2, which splits a backward into B (input) and W
(weight); here I and W. Nothing is computed twice: the first part keeps the gradients that arrive at every
operator that also has a parameter behind it, and the second part runs those operators again for that
side only, as autograd skips what is not asked for.

    roots ──► n1 ──► gelu ──► n2 ──► leaf        I runs this row and captures what arrives at n1 and n2
               └► t1 ► w1      └► t2 ► w2        W runs n1 for t1 only, n2 for t2 only, then t1, t2 and below

n1 and n2 are *boundary* operators (a leaf and a parameter behind them), t1 and t2 their *targets* (only parameters
behind them). Asking n1 for w1 must not run the row again: so boundary operators that lead to each other
run in calls of their own, level by level, and where a parameter is used on several levels (tied layers), each
call asks only as far as the targets and one last call goes on from all of them. Parameters behind a
target that itself is used on several levels, or lies behind another one (a bias added in every layer),
are *early*: the first part makes their gradients and the second adds them. All this is found for each graph
by walking it. An `autograd.Function` written in Python computes all its gradients in both parts: it is
right, but not cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Edges = list[GradientEdge]


@dataclass(slots=True)
class Level:
    """Boundary operators none of which leads to another one.

    Args:
        starts: where gradients arrive at them; ``arrived``: those gradients.
        wanted: the parameters behind them, or their targets if the parameters are used elsewhere too.
        is_private: which of the two.
    """

    starts: _Edges
    wanted: _Edges
    is_private: bool
    arrived: list[Tensor | None] = field(default_factory=list)


@dataclass(slots=True)
class PendingWeights:
    """The second part of a backward; holds everything it needs, and lets go of it while it runs.

    Args:
        levels: from the roots down.
        edges, gradients: what the last call starts from besides shared targets.
        num_early: parameters whose gradients the first part has made.
    """

    levels: list[Level] = field(default_factory=list)
    edges: _Edges = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    num_early: int = 0

    def run(self) -> None:
        """Add the gradients of parameters to their ``grad``."""
        for level in self.levels:
            if not level.is_private:
                self.add(level.wanted, _gradients(level.starts, level.wanted, level.arrived))
            elif any(gradient is not None for gradient in level.arrived):
                edges, seeds = _known(level.starts, level.arrived)
                torch.autograd.backward(edges, seeds, inputs=level.wanted)
            level.starts, level.wanted, level.arrived = [], [], []
        if self.edges:
            torch.autograd.backward(self.edges, self.gradients)
        self.levels, self.edges, self.gradients = [], [], []

    def add(self, edges: _Edges, gradients: Sequence[Tensor | None]) -> None:
        """Start the last call from these edges too, where there is a gradient."""
        known_edges, known = _known(edges, gradients)
        self.edges += known_edges
        self.gradients += known


def _known(edges: _Edges, gradients: Sequence[Tensor | None]) -> tuple[_Edges, list[Tensor]]:
    pairs = [(edge, g) for edge, g in zip(edges, gradients, strict=True) if g is not None]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def split_backward(
    roots: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[list[Tensor | None], PendingWeights]:
    """Compute the gradients of ``leaves``, and return what is left to do for all other leaves of the graph.

    Args:
        roots: what the backward starts from, with the gradients ``seeds``.
        leaves: tensors without a ``grad_fn`` that require a gradient, each once.

    Returns:
        The gradient of each leaf (None where no root depends on it), and the second part.
    """
    root_edges = [get_gradient_edge(root) for root in roots]
    graph = _Graph(root_edges, [get_gradient_edge(leaf).node for leaf in leaves])
    levels = graph.levels()
    pending = PendingWeights(levels=levels, num_early=len(graph.early))
    captured = [*(edge for level in levels for edge in level.starts), *graph.early]
    wanted = [*(get_gradient_edge(leaf) for leaf in leaves), *captured]
    found = _gradients(root_edges, wanted, list(seeds), retain_graph=True) if wanted else []
    arrived = iter(found[len(leaves) :])
    for level in levels:
        level.arrived = [next(arrived) for _ in level.starts]
    pending.add(graph.early, list(arrived))
    for edge, seed in zip(root_edges, seeds, strict=True):
        if graph.starts_late(edge.node):
            pending.add([edge], [seed])
    return found[: len(leaves)], pending


def _gradients(
    starts: _Edges, wanted: _Edges, seeds: Sequence[Tensor | None], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradients that arrive at ``wanted``; nothing else is computed."""
    edges, known = _known(starts, seeds)
    if not known:
        return [None] * len(wanted)
    return list(torch.autograd.grad(edges, wanted, known, retain_graph=retain_graph, allow_unused=True))


class _Graph:
    """An autograd graph from its roots down, and what of it leads to leaves and what to parameters only."""

    def __init__(self, roots: _Edges, leaves: Sequence[Node]) -> None:
        self._roots = [root.node for root in roots]
        self._children: dict[Node, list[tuple[Node, int]]] = {}
        self._entries: dict[Node, dict[int, None]] = {}
        for root in roots:
            self._entries.setdefault(root.node, {})[root.output_nr] = None
        self._order = self._sort()
        is_leaf = set(leaves)
        self._to_leaf: dict[Node, bool] = {}
        for node in reversed(self._order):
            self._to_leaf[node] = node in is_leaf or any(
                self._to_leaf[child] for child, _ in self._children[node]
            )
        self._level = self._find_levels()
        self._early_starts, self.early = self._find_early()

    def _sort(self) -> list[Node]:
        """Return all nodes, each before those it leads to."""
        finished: list[Node] = []
        stack: list[tuple[Node, bool]] = [(root, False) for root in dict.fromkeys(self._roots)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                finished.append(node)
            elif node not in self._children:
                children = [(child, number) for child, number in node.next_functions if child is not None]
                self._children[node] = children
                stack.append((node, True))
                for child, number in children:
                    self._entries.setdefault(child, {})[number] = None
                    if child not in self._children:
                        stack.append((child, False))
        finished.reverse()
        return finished

    def _find_levels(self) -> dict[Node, int]:
        """Return the level of each boundary node: none leads to another one of its level."""
        depth = dict.fromkeys(self._order, 0)
        level = {}
        for node in self._order:
            if not self._to_leaf[node]:
                continue
            is_boundary = any(not self._to_leaf[child] for child, _ in self._children[node])
            if is_boundary:
                level[node] = depth[node]
            for child, _ in self._children[node]:
                depth[child] = max(depth[child], depth[node] + is_boundary)
        return level

    def _find_early(self) -> tuple[set[Node], _Edges]:
        """Return the targets and roots that the first part must run to the end, and the parameters behind them.

        These are closed under each other: whatever leads to an early parameter is early itself, with all
        parameters it leads to.
        """
        levels_at: dict[Node, set[int]] = {}
        for node, level in self._level.items():
            for child, _ in self._children[node]:
                if not self._to_leaf[child]:
                    levels_at.setdefault(child, set()).add(level)
        beyond: set[Node] = set()  # nodes behind a target
        for node in self._order:
            if node in levels_at or node in beyond:
                beyond.update(child for child, _ in self._children[node])
        early = {node for node, levels in levels_at.items() if len(levels) > 1 or node in beyond}
        if not early:
            return early, []
        starts = [*levels_at, *(root for root in self._roots if not self._to_leaf[root])]
        behind = {start: self._parameters(start) for start in starts}
        parameters: set[Node] = set()
        while True:
            parameters.update(*(behind[start] for start in early))
            grown = {start for start in starts if not parameters.isdisjoint(behind[start])}
            if grown == early:
                break
            early = grown
        return early, [GradientEdge(node, 0) for node in self._order if node in parameters]

    def _parameters(self, start: Node) -> set[Node]:
        """Return the ends of the graph behind a node."""
        seen = {start}
        stack = [start]
        ends = set()
        while stack:
            node = stack.pop()
            if not self._children[node]:
                ends.add(node)
            for child, _ in self._children[node]:
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return ends

    def levels(self) -> list[Level]:
        """Return the calls of the second part, but for the last one."""
        owner = self._owners()
        is_shared: dict[Node, bool] = {}
        for node in reversed(self._order):
            if not self._to_leaf[node]:
                behind = any(is_shared[child] for child, _ in self._children[node])
                is_shared[node] = behind or owner.get(node) is None
        starts: dict[int, dict[GradientEdge, None]] = {}
        targets: dict[int, dict[GradientEdge, None]] = {}
        for node, level in self._level.items():
            for child, number in self._children[node]:
                if not self._to_leaf[child] and child not in self._early_starts:
                    targets.setdefault(level, {})[GradientEdge(child, number)] = None
                    entries = self._entries[node]
                    starts.setdefault(level, {}).update(
                        (GradientEdge(node, entry), None) for entry in entries
                    )
        ends: dict[int, _Edges] = {}
        for node in self._order:
            owning = owner.get(node)
            if owning is not None and not self._children[node]:
                ends.setdefault(owning, []).append(GradientEdge(node, 0))
        levels = []
        for level in sorted(starts):
            is_private = not any(is_shared[target.node] for target in targets[level])
            wanted = ends[level] if is_private else list(targets[level])
            levels.append(Level(starts=list(starts[level]), wanted=wanted, is_private=is_private))
        return levels

    def _owners(self) -> dict[Node, int | None]:
        """Return whose call needs each node behind targets: a level's, the last one's (-1), or None for several."""
        owner: dict[Node, int | None] = {root: -1 for root in self._roots if self.starts_late(root)}
        for node in self._order:
            if self._to_leaf[node]:
                mine = self._level.get(node)
                if mine is None:
                    continue
            elif node in owner:
                mine = owner[node]
            else:
                continue  # early
            for child, _ in self._children[node]:
                if not self._to_leaf[child] and child not in self._early_starts:
                    owner[child] = mine if owner.get(child, mine) == mine else None
        return owner

    def starts_late(self, root: Node) -> bool:
        """Return whether a root leads to no leaf and is left to the second part."""
        return not self._to_leaf[root] and root not in self._early_starts
