"""The trees of series and parallel components that one model's searches go through, each made once.

A planner searches many times: for several numbers of stages, within memory and without a limit. What differs are ranks,
micro-batch sizes and times; the tree, and what its stages hold, is the same. Long series are in runs (`coarsening`).

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_coarsening.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.plan.batch_rules import BatchRules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe import coarsening
from gpp_plugin.plan.graphpipe.components import Component, decompose
from gpp_plugin.plan.graphpipe.intervals import Series, block_signatures, build_series
from gpp_plugin.plan.graphpipe.stage_shapes import StageShapes
from gpp_plugin.plan.search_report import SearchReport


@dataclass(slots=True, kw_only=True)
class SearchTree:
    """A model as series and parallel components of block numbers.

    Args:
        longest: most stages on a path.
        shapes: of its series and parallel items by id, filled as they are met.
    """

    root: Series
    longest: int
    shapes: dict[int, StageShapes] = field(default_factory=dict)


class SearchTrees:
    """The trees of one model.

    Args:
        costs: of the graph, on its cluster.
        report: told what trees leave out.
    """

    def __init__(self, graph: BlockGraph, costs: CostModel, report: SearchReport) -> None:
        self.graph, self.costs, self.report = graph, costs, report
        numbers = {block.name: i for i, block in enumerate(graph.blocks)}
        dependencies = nx.relabel_nodes(graph.dependencies(), numbers)
        self._component = decompose(dependencies)
        self._longest = int(nx.dag_longest_path_length(dependencies, weight=None, default_weight=1)) + 1
        self._trees: dict[object, SearchTree] = {}

    @property
    def is_in_runs(self) -> bool:
        """Return whether the model is too long for each block to be an item."""
        return coarsening.most_items(self._component) > coarsening.MOST_ITEMS

    def tree(self, rules: BatchRules) -> SearchTree:
        """Return the whole model's tree: blocks in runs where there are very many."""
        key = rules.coupled, tuple(sorted(rules.fixed.items()))
        if key not in self._trees:
            component = self._component
            if self.is_in_runs:
                self.report.leave_out(
                    f"cuts at each of {len(self.graph.blocks)} blocks: runs of blocks were searched, then single "
                    "blocks around the cuts"
                )
                weights = np.add(*self.costs.block_times(rules.loss_unit))
                component = coarsening.in_runs(component, weights.tolist())
            self._trees[key] = self._make(component, rules)
        return self._trees[key]

    def around_cuts(self, rules: BatchRules, groups: Sequence[Sequence[str]]) -> SearchTree:
        """Return the tree with single blocks where stages of ``groups`` meet, and runs elsewhere."""
        stage_of = {block: i for i, names in enumerate(groups) for block in self.costs.indices(names)}
        signatures = block_signatures(self.graph, self.costs, rules)
        return self._make(coarsening.around_cuts(self._component, stage_of, signatures), rules)

    def _make(self, component: Component, rules: BatchRules) -> SearchTree:
        root = build_series(self.graph, self.costs, rules, component)
        if _has_uncounted(root):
            self.report.leave_out(
                "which of very many branches share a stage: each was taken alone, or all together"
            )
        return SearchTree(
            root=root,
            longest=min(self._longest, coarsening.path_items(component)),
        )


def _has_uncounted(series: Series) -> bool:
    return any(
        branches.is_uncounted or any(map(_has_uncounted, branches.kinds))
        for branches in series.branches.values()
    )
