"""A backward in two parts: first the gradients of received tensors, later those of parameters.

Zero Bubble Pipeline Parallelism (Qi et al., 2024) splits a backward into B (input) and W (weight); here I and W.
Nothing is computed twice: the first part keeps the gradients that arrive at every operator that also has a parameter
behind it, and the second part runs those operators again for that side only, as autograd skips what is not asked for.
Which operators these are is in a `SplitPlan` of numbers, found once for a graph and followed in all graphs that the
same code makes. An `autograd.Function` written in Python computes all its gradients in both parts: it is right, but
not cheaper.

    roots ──► n1 ──► gelu ──► n2 ──► leaf        I runs this row and captures what arrives at n1 and n2
               └► t1 ► w1      └► t2 ► w2        W runs n1 for t1 only, n2 for t2 only, then t1, t2 and below

n1 and n2 are *boundary* operators (a leaf and a parameter behind them), t1 and t2 their *targets* (only parameters
behind them). Asking n1 for w1 must not run the row again: so boundary operators that lead to each other
run in calls of their own, level by level, and where a parameter is used on several levels (tied layers), each
call asks only as far as the targets and one last call goes on from all of them. Parameters behind a
target that itself is used on several levels, or lies behind another one (a bias added in every layer),
are *early*: the first part makes their gradients and the second adds them.

Source: Zero Bubble (arXiv 2401.10241), section 2
Tests: tests/runtime/test_split.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Edges = list[GradientEdge]


@dataclass(slots=True)
class _Call:
    """One call of the second part: a level of the plan in one graph, and the gradients that arrived at it."""

    starts: _Edges
    arrived: list[Tensor | None]
    wanted: _Edges
    is_private: bool


@dataclass(slots=True)
class PendingWeights:
    """The second part of a backward; holds everything it needs, and lets go of it while it runs.

    Args:
        calls: from the roots down.
        edges, gradients: what the last call starts from besides targets that are shared.
    """

    calls: list[_Call] = field(default_factory=list)
    edges: _Edges = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Add the gradients of parameters to their ``grad``."""
        for call in self.calls:
            if not call.is_private:
                self.add(call.wanted, _gradients(call.starts, call.wanted, call.arrived))
            elif any(gradient is not None for gradient in call.arrived):
                edges, seeds = _known(call.starts, call.arrived)
                torch.autograd.backward(edges, seeds, inputs=call.wanted)
            call.starts, call.wanted, call.arrived = [], [], []
        if self.edges:
            torch.autograd.backward(self.edges, self.gradients)
        self.calls, self.edges, self.gradients = [], [], []

    def add(self, edges: _Edges, gradients: Sequence[Tensor | None]) -> None:
        """Start the last call from these edges too, where there is a gradient."""
        known_edges, known = _known(edges, gradients)
        self.edges += known_edges
        self.gradients += known


MAX_PLANS = 32
"""Plans that a splitter keeps: a stage has one structure a pattern of inputs, a half, a choice of attention."""


class BackwardSplitter:
    """Splits the backwards of graphs that the code of one stage makes.

    A plan is made once for each structure of a graph: which operator follows which, and which end at leaves. Lengths
    do not change it. Graphs are compared whole, so that a plan is never followed in another graph.
    """

    def __init__(self) -> None:
        self._plans: deque[SplitPlan] = deque(maxlen=MAX_PLANS)

    def split(
        self, roots: Sequence[Tensor | GradientEdge], leaves: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], PendingWeights]:
        """Compute the gradients of ``leaves``, and return what is left to do for all other leaves of the graph.

        Args:
            roots: what the backward starts from, with the gradients ``seeds``.
            leaves: tensors without a ``grad_fn`` that require a gradient, each once; the same ones of each graph.

        Returns:
            The gradient of each leaf (None where no root depends on it), and the second part.
        """
        # One pass of autograd for I asks for three kinds of edges at once: leaves, boundary operators by level, and
        # early parameters. For the figure above, with n1 and n2 on levels 0 and 1:
        #
        #     wanted   [leaf | n1, n2 | ]        found   [d leaf | what arrived at n1, at n2 | ]
        #     pending  calls [n1 -> w1, n2 -> w2]
        #
        # ``retain_graph``: W runs the same operators again, and lets go of them.
        if not roots:
            return [None] * len(leaves), PendingWeights()
        edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        leaf_edges = [get_gradient_edge(leaf) for leaf in leaves]
        plan, nodes = self._plan(edges, leaf_edges)
        early = [GradientEdge(nodes[number], 0) for number in plan.early]
        pending = PendingWeights()
        starts = [[GradientEdge(nodes[n], entry) for n, entry in level.starts] for level in plan.levels]
        wanted = [*leaf_edges, *(edge for level in starts for edge in level), *early]
        found = _gradients(edges, wanted, seeds, retain_graph=True) if wanted else []
        arrived = iter(found[len(leaves) :])
        for level, level_starts in zip(plan.levels, starts, strict=True):
            pending.calls.append(
                _Call(
                    starts=level_starts,
                    arrived=[next(arrived) for _ in level_starts],
                    wanted=[GradientEdge(nodes[n], entry) for n, entry in level.wanted],
                    is_private=level.is_private,
                )
            )
        pending.add(early, list(arrived))
        pending.add([edges[i] for i in plan.late_roots], [seeds[i] for i in plan.late_roots])
        return found[: len(leaves)], pending

    def _plan(self, roots: _Edges, leaves: _Edges) -> tuple[SplitPlan, list[Node]]:
        """Return how to split the backward that starts from ``roots`` and whose first part ends at ``leaves``.

        Returns:
            The plan, and the operators it numbers.
        """
        ends = [leaf.node for leaf in leaves]
        for plan in self._plans:
            nodes = find_nodes(plan, roots, ends)
            if nodes is not None:
                return plan, nodes
        found = _number_nodes([root.node for root in roots])
        assert found is not None
        nodes, numbers, structure = found
        places = [(numbers[root.node], root.output_nr) for root in roots]
        plan = _Graph(structure, places, [numbers.get(end, -1) for end in ends]).plan()
        self._plans.appendleft(plan)
        return plan, nodes


def _known(edges: _Edges, gradients: Sequence[Tensor | None]) -> tuple[_Edges, list[Tensor]]:
    pairs = [(edge, g) for edge, g in zip(edges, gradients, strict=True) if g is not None]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _gradients(
    starts: _Edges, wanted: _Edges, seeds: Sequence[Tensor | None], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradients that arrive at ``wanted``; nothing else is computed."""
    edges, known = _known(starts, seeds)
    if not known:
        return [None] * len(wanted)
    return list(torch.autograd.grad(edges, wanted, known, retain_graph=retain_graph, allow_unused=True))


# ---- the plan: which operators both parts pass ----------------------------------------------------
#
# Which operator follows which and where the first part ends decide all of it; what the operators do is of no matter.

GradientPort = tuple[int, int]
"""Number of an operator, and which of the gradients that arrive there."""

Structure = tuple[tuple[GradientPort, ...], ...]
"""For each operator the ports that follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan:
    """Boundary operators none of which leads to another one.

    Args:
        starts: where gradients arrive at them.
        wanted: the parameters behind them, or their targets if the parameters are used elsewhere too.
        is_private: which of the two.
    """

    starts: tuple[GradientPort, ...]
    wanted: tuple[GradientPort, ...]
    is_private: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """What to do in every graph of one structure; operators are numbered in the order they are found.

    Args:
        roots, leaves, structure: of the graph it was made for; a leaf that nothing depends on is -1.
        levels: from the roots down.
        early: parameters whose gradients the first part makes.
        late_roots: positions of the roots that lead to no leaf.
    """

    roots: tuple[GradientPort, ...]
    leaves: tuple[int, ...]
    structure: Structure
    levels: tuple[LevelPlan, ...]
    early: tuple[int, ...]
    late_roots: tuple[int, ...]


def find_nodes(plan: SplitPlan, roots: Sequence[GradientEdge], leaves: Sequence[Node]) -> list[Node] | None:
    """Return the operators that a plan numbers in another graph; None if that has another structure."""
    found = _number_nodes([root.node for root in roots], plan.structure)
    if found is None:
        return None
    nodes, numbers, _ = found
    is_same = plan.roots == tuple((numbers[root.node], root.output_nr) for root in roots) and (
        plan.leaves == tuple(numbers.get(leaf, -1) for leaf in leaves)
    )
    return nodes if is_same else None


def _number_nodes(
    roots: Sequence[Node], known: Structure | None = None
) -> tuple[list[Node], dict[Node, int], Structure] | None:
    """Return all operators behind ``roots`` in the order they are found, their numbers, and what follows each.

    Args:
        known: give up, with None, where the graph differs from this.
    """
    nodes = list(dict.fromkeys(roots))
    numbers = {node: number for number, node in enumerate(nodes)}
    rows: list[tuple[GradientPort, ...]] = []
    for node in nodes:  # it grows
        row = []
        for child, entry in node.next_functions:
            if child is None:
                continue
            number = numbers.get(child)
            if number is None:
                number = numbers[child] = len(nodes)
                nodes.append(child)
            row.append((number, entry))
        found = tuple(row)
        if known is not None and (len(rows) >= len(known) or found != known[len(rows)]):
            return None
        rows.append(found)
    return nodes, numbers, tuple(rows)


class _Graph:
    """An autograd graph from its roots down, and what of it leads to leaves and what to parameters only."""

    def __init__(self, structure: Structure, roots: Sequence[GradientPort], leaves: Sequence[int]) -> None:
        self._children = structure
        self._leaves = tuple(leaves)
        self._places = tuple(roots)
        self._roots = [number for number, _ in roots]
        self._entries: list[dict[int, None]] = [{} for _ in structure]
        for number, entry in (*roots, *(place for row in self._children for place in row)):
            self._entries[number][entry] = None
        self._order = self._sort()
        is_leaf = set(leaves)
        self._to_leaf: dict[int, bool] = {}
        for node in reversed(self._order):
            self._to_leaf[node] = node in is_leaf or any(
                self._to_leaf[child] for child, _ in self._children[node]
            )
        self._level = self._find_levels()
        self._early_starts, self._early = self._find_early()

    def _sort(self) -> list[int]:
        """Return all nodes, each before those it leads to."""
        finished: list[int] = []
        is_met = [False] * len(self._children)
        stack = [(root, False) for root in self._roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                finished.append(node)
            elif not is_met[node]:
                is_met[node] = True
                stack.append((node, True))
                stack += [(child, False) for child, _ in self._children[node] if not is_met[child]]
        finished.reverse()
        return finished

    def _find_levels(self) -> dict[int, int]:
        """Return the level of each boundary node: none leads to another one of its level."""
        # The level is the most boundary operators on a way down to the node: n1 0, n2 behind it 1, gelu between them
        # none.
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

    def _find_early(self) -> tuple[set[int], list[int]]:
        """Return the targets and roots that the first part must run to the end, and the parameters behind them.

        These are closed under each other: whatever leads to an early parameter is early itself, with all
        parameters it leads to.
        """
        # ``levels_at``: target -> the levels of the boundary operators above it. A bias added in two layers has
        # levels {0, 1}: the call of level 0 would leave its graph for level 1's, so I makes its gradient. The loop at
        # the end closes that: a target that leads to an early parameter is early with all its parameters, as it runs
        # only once.
        levels_at: dict[int, set[int]] = {}
        for node, level in self._level.items():
            for child, _ in self._children[node]:
                if not self._to_leaf[child]:
                    levels_at.setdefault(child, set()).add(level)
        beyond: set[int] = set()  # nodes behind a target
        for node in self._order:
            if node in levels_at or node in beyond:
                beyond.update(child for child, _ in self._children[node])
        early = {node for node, levels in levels_at.items() if len(levels) > 1 or node in beyond}
        if not early:
            return early, []
        starts = [*levels_at, *(root for root in self._roots if not self._to_leaf[root])]
        behind = {start: self._parameters(start) for start in starts}
        parameters: set[int] = set()
        while True:
            parameters.update(*(behind[start] for start in early))
            grown = {start for start in starts if not parameters.isdisjoint(behind[start])}
            if grown == early:
                break
            early = grown
        return early, [node for node in self._order if node in parameters]

    def _parameters(self, start: int) -> set[int]:
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

    def plan(self) -> SplitPlan:
        """Return what to do in any graph of this structure."""
        return SplitPlan(
            roots=self._places,
            leaves=self._leaves,
            structure=self._children,
            levels=tuple(self._calls()),
            early=tuple(self._early),
            late_roots=tuple(i for i, root in enumerate(self._roots) if self._starts_late(root)),
        )

    def _calls(self) -> Iterator[LevelPlan]:
        """Yield the calls of the second part but for the last."""
        owner = self._owners()
        is_shared: dict[int, bool] = {}
        for node in reversed(self._order):
            if not self._to_leaf[node]:
                behind = any(is_shared[child] for child, _ in self._children[node])
                is_shared[node] = behind or owner.get(node) is None
        starts: dict[int, dict[GradientPort, None]] = {}
        targets: dict[int, dict[GradientPort, None]] = {}
        for node, level in self._level.items():
            for child, number in self._children[node]:
                if not self._to_leaf[child] and child not in self._early_starts:
                    targets.setdefault(level, {})[child, number] = None
                    entries = self._entries[node]
                    starts.setdefault(level, {}).update(((node, entry), None) for entry in entries)
        ends: dict[int, list[GradientPort]] = {}
        for node in self._order:
            owning = owner.get(node)
            if owning is not None and not self._children[node]:
                ends.setdefault(owning, []).append((node, 0))
        for level in sorted(starts):
            is_private = not any(is_shared[target] for target, _ in targets[level])
            wanted = tuple(ends[level] if is_private else targets[level])
            yield LevelPlan(starts=tuple(starts[level]), wanted=wanted, is_private=is_private)

    def _owners(self) -> dict[int, int | None]:
        """Return whose call needs each node behind targets: a level's, the last one's (-1), or None for several."""
        owner: dict[int, int | None] = {root: -1 for root in self._roots if self._starts_late(root)}
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

    def _starts_late(self, root: int) -> bool:
        """Return whether a root leads to no leaf and is left to the second part."""
        return not self._to_leaf[root] and root not in self._early_starts
