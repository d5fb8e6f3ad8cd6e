"""The trees of series and parallel components that one model's searches go through, each made once.

A planner searches many times: for several numbers of stages, within memory and without a limit. What differs are ranks,
micro-batch sizes and times; the tree, and what its stages hold, is the same. Long series are in runs.

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_py
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.graphpipe.intervals import (
    Component,
    Series,
    StageShapes,
    block_signatures,
    build_series,
    decompose,
    signature_of,
)
from gpp_plugin.plan.request import BatchRules, SearchReport

# Long series in fewer items: runs of blocks searched as one, and single blocks where stages were cut.
#
# The search's tables grow with the square of a series' items. A model of thousands of blocks is searched twice: first
# in runs of about equal time, then with single blocks around the cuts found and everything between them in one piece:
#
#     blocks        a b c d e f g h i j k l
#     runs          (a b c) (d e f) (g h i) (j k l)        say it is best to cut behind f
#     around cuts   (a b c d) e f g h (i j k l)            now the cut may be behind e, f or g as well
#
# Branches that are alike stay alike: each is cut up as the cuts in any of them ask.

MOST_ITEMS = 256
"""Longer series are searched in runs. The tables of more items take seconds, for each micro-batch size."""
MOST_AROUND = 384
"""Items of the second search, those between cuts included."""


def most_items(component: Component) -> int:
    """Return the number of items of the longest series."""
    own = len(component.children) if component.kind == "series" else 1
    return max([own, *(most_items(child) for child in component.children)])


def path_items(component: Component) -> int:
    """Return the most items on a path: stages on one are no more."""
    if component.kind == "series":
        return sum(path_items(child) for child in component.children)
    return max(map(path_items, component.children)) if component.kind == "parallel" else 1


def in_runs(component: Component, weights: Sequence[float], *, most: int = MOST_ITEMS) -> Component:
    """Return the component with runs of blocks of about equal weight as one item, at most about ``most`` a series.

    Args:
        weights: by block.
    """
    if component.kind not in ("series", "parallel"):
        return component
    children = tuple(in_runs(child, weights, most=most) for child in component.children)
    if component.kind == "parallel" or len(children) <= most:
        return Component(kind=component.kind, blocks=component.blocks, children=children)
    total = sum(weights[block] for child in children if child.kind == "block" for block in child.blocks)
    target = total / most
    begins, run = set(), 0.0
    for i, child in enumerate(children):
        weight = sum(weights[block] for block in child.blocks)
        # nearer to the target without it than with it
        if child.kind != "block" or run == 0.0 or run + weight / 2 > target:
            begins.add(i)
            run = 0.0
        run = run + weight if child.kind == "block" else 0.0
    return _joined(component, children, begins)


def around_cuts(
    component: Component, stage_of: Mapping[int, int], signatures: Sequence[int], *, most: int = MOST_AROUND
) -> Component:
    """Return the component with single blocks on both sides of every cut, and the others in one run each.

    Args:
        stage_of: by block, the number of its stage.
        signatures: by block; equal branches are those whose blocks have equal ones, in order.
    """
    return _around([component], stage_of, signatures, most)[0]


def _around(
    alike: Sequence[Component], stage_of: Mapping[int, int], signatures: Sequence[int], most: int
) -> list[Component]:
    """Return equal components, cut up alike."""
    first = alike[0]
    if first.kind not in ("series", "parallel"):
        return list(alike)
    places: list[list[Component]] = [[] for _ in alike]
    if first.kind == "parallel":
        # Children need not come in the same order: all that are alike, of all these components, go together.
        by_key: dict[object, list[tuple[int, int]]] = {}
        for n, component in enumerate(alike):
            for i, child in enumerate(component.children):
                by_key.setdefault(signature_of(child, signatures), []).append((n, i))
        made: dict[tuple[int, int], Component] = {}
        for where in by_key.values():
            members = [alike[n].children[i] for n, i in where]
            made.update(zip(where, _around(members, stage_of, signatures, most), strict=True))
        places = [[made[n, i] for i in range(len(component.children))] for n, component in enumerate(alike)]
    else:
        for siblings in zip(*(component.children for component in alike), strict=True):
            for place, child in zip(places, _around(siblings, stage_of, signatures, most), strict=True):
                place.append(child)
    children = [tuple(place) for place in places]
    if first.kind == "parallel" or len(children[0]) <= most:
        return [
            Component(kind=c.kind, blocks=c.blocks, children=own)
            for c, own in zip(alike, children, strict=True)
        ]
    begins = set().union(*(_begins(own, stage_of, most // len(alike)) for own in children))
    return [_joined(c, own, begins) for c, own in zip(alike, children, strict=True)]


def _begins(items: Sequence[Component], stage_of: Mapping[int, int], most: int) -> set[int]:
    """Return where items begin that are not joined to the one before: all within a window around each cut."""
    cuts = [
        i
        for i, (a, b) in enumerate(itertools.pairwise(items), start=1)
        if not (a.kind == b.kind == "block" and stage_of[a.blocks[0]] == stage_of[b.blocks[0]])
    ]
    # each cut has a window of w places on both sides and a run behind it
    window = max(1, (most // max(len(cuts), 1) - 1) // 2)
    return {place for cut in cuts for place in range(cut - window, cut + window + 1)} | {0}


def _joined(component: Component, items: Sequence[Component], begins: set[int]) -> Component:
    """Return the series with items joined to the one before them but where ``begins`` says so; blocks only."""
    runs: list[list[Component]] = []
    for i, item in enumerate(items):
        if i in begins or not runs or item.kind != "block" or runs[-1][-1].kind != "block":
            runs.append([])
        runs[-1].append(item)
    children = tuple(run[0] if len(run) == 1 else _run(run) for run in runs)
    return Component(kind="series", blocks=component.blocks, children=children)


def _run(items: Sequence[Component]) -> Component:
    blocks = tuple(sorted(block for item in items for block in item.blocks))
    return Component(kind="run", blocks=blocks, children=tuple(items))


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
        report: notes what trees leave out.
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
        return most_items(self._component) > MOST_ITEMS

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
                component = in_runs(component, weights.tolist())
            self._trees[key] = self._make(component, rules)
        return self._trees[key]

    def around_cuts(self, rules: BatchRules, groups: Sequence[Sequence[str]]) -> SearchTree:
        """Return the tree with single blocks where stages of ``groups`` border on each other, and runs elsewhere."""
        stage_of = {block: i for i, names in enumerate(groups) for block in self.costs.indices(names)}
        signatures = block_signatures(self.graph, self.costs, rules)
        return self._make(around_cuts(self._component, stage_of, signatures), rules)

    def _make(self, component: Component, rules: BatchRules) -> SearchTree:
        root = build_series(self.graph, self.costs, rules, component)
        if _has_uncounted(root):
            self.report.leave_out(
                "which of very many branches share a stage: each was taken alone, or all together"
            )
        return SearchTree(
            root=root,
            longest=min(self._longest, path_items(component)),
        )


def _has_uncounted(series: Series) -> bool:
    return any(
        branches.is_uncounted or any(map(_has_uncounted, branches.kinds))
        for branches in series.branches.values()
    )
