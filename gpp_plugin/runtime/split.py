"""A backward in two parts: first the gradients of received tensors, later those of parameters.

Source: Zero Bubble Pipeline Parallelism (Qi et al., 2024), section 2, which splits a backward into B (input) and W
(weight); here I and W. Nothing is computed twice: the first part keeps the gradients that arrive at every
operator that also has a parameter behind it, and the second part runs those operators again for that
side only, as autograd skips what is not asked for. Which operators these are is in a `SplitPlan`, found once
for a graph and followed in all graphs that the same code makes. An `autograd.Function` written in Python computes
all its gradients in both parts: it is right, but not cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpp_plugin.runtime.split_plan import SplitPlan, find_nodes, plan_split

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
        num_early: parameters whose gradients the first part has made.
    """

    calls: list[_Call] = field(default_factory=list)
    edges: _Edges = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    num_early: int = 0

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


class BackwardSplitter:
    """Splits the backwards of graphs that one piece of code makes.

    A plan is made once for each structure of a graph: which operator follows which, and which end at leaves. Graphs
    are compared whole, so that a plan is never followed in another graph.
    """

    def __init__(self) -> None:
        self._plans: list[SplitPlan] = []

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
        if not roots:
            return [None] * len(leaves), PendingWeights()
        edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
        leaf_edges = [get_gradient_edge(leaf) for leaf in leaves]
        plan, nodes = self._plan(edges, leaf_edges)
        early = [GradientEdge(nodes[number], 0) for number in plan.early]
        pending = PendingWeights(num_early=len(early))
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
        ends = [leaf.node for leaf in leaves]
        for plan in self._plans:
            nodes = find_nodes(plan, roots, ends)
            if nodes is not None:
                return plan, nodes
        plan, nodes = plan_split(roots, ends)
        self._plans.append(plan)
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
