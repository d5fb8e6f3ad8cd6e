"""Blocks cut into as many stages as shared ranks are to hold, as even as possible; and branches worth a place of
their own.

Source: Megatron-LM (arXiv 2104.04473), section 2.2; controllable memory (arXiv 2405.15362)
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import networkx as nx

from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.remembered import remembered
from gpp_plugin.plan.linear_order import linear_order, split_by_weight
from gpp_plugin.plan.make import order_stages
from gpp_plugin.plan.refine import moves
from gpp_plugin.plan.refine.block_sets import BlockSets, Mask

# Which group of ranks holds which stage: the maps that interleaving and its relatives are made of.
#
# Stages are numbered in the plan's order, groups in the order of ranks. Eight stages on four groups:
#
#     stage          0  1  2  3  4  5  6  7
#     round robin    0  1  2  3  0  1  2  3      interleaved 1F1B (Narayanan et al. 2021, section 2.2)
#     back and forth 0  1  2  3  3  2  1  0      the V of ZB-V and V-Half (Qi et al. 2024, arXiv 2405.15362)
#     in a row       0  0  1  1  2  2  3  3      a branch a group: a plan has the stages of one behind each other

Map = tuple[int, ...]
"""By stage, the number of its group."""

FEW = 5
"""Stages of which all maps are tried: 90 at most."""


def round_robin(num_stages: int, num_groups: int) -> Map:
    """Return the map of interleaving.

    >>> round_robin(5, 2)
    (0, 1, 0, 1, 0)
    """
    return tuple(stage % num_groups for stage in range(num_stages))


def back_and_forth(num_stages: int, num_groups: int) -> Map:
    """Return the map that turns around at both ends.

    >>> back_and_forth(6, 2)
    (0, 1, 1, 0, 0, 1)
    """
    there = range(num_groups)
    ways = itertools.cycle((tuple(there), tuple(reversed(there))))
    return tuple(itertools.islice(itertools.chain.from_iterable(ways), num_stages))


def in_a_row(num_stages: int, num_groups: int) -> Map:
    """Return the map of consecutive stages on one group.

    >>> in_a_row(5, 2)
    (0, 0, 0, 1, 1)
    """
    return tuple(stage * num_groups // num_stages for stage in range(num_stages))


def evened_out(loads: Sequence[float], num_groups: int) -> Map:
    """Return the map that gives the heaviest stages first, each to the group with least so far.

    >>> evened_out([3.0, 2.0, 2.0, 1.0], 2)
    (0, 1, 1, 0)
    """
    held = [0.0] * num_groups
    groups = [0] * len(loads)
    for stage in sorted(range(len(loads)), key=lambda stage: (-loads[stage], stage)):
        groups[stage] = min(range(num_groups), key=lambda group: (held[group], group))
        held[groups[stage]] += loads[stage]
    return renamed(groups)


def renamed(groups: Sequence[int]) -> Map:
    """Return the map with groups numbered as they are first met: groups are alike but for their links."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(group, len(numbers)) for group in groups)


def usual_maps(loads: Sequence[float], num_groups: int) -> list[Map]:
    """Return the maps that a search starts with, each once: all there are of a few stages.

    Args:
        loads: by stage, its work.
    """
    count = len(loads)
    if count <= FEW:
        return [
            each
            for each in itertools.product(range(num_groups), repeat=count)
            if each == renamed(each) and len(set(each)) == num_groups
        ]
    found = [
        round_robin(count, num_groups),
        back_and_forth(count, num_groups),
        in_a_row(count, num_groups),
        evened_out(loads, num_groups),
    ]
    return [each for each in dict.fromkeys(found) if len(set(each)) == num_groups]


def moved_stages(groups: Sequence[int], num_groups: int) -> Iterator[Map]:
    """Yield the maps with one stage in another group."""
    for stage, group in enumerate(groups):
        for other in range(num_groups):
            if other != group:
                yield (*groups[:stage], other, *groups[stage + 1 :])


def exchanged_stages(groups: Sequence[int]) -> Iterator[Map]:
    """Yield the maps with two stages exchanged."""
    for first, second in itertools.combinations(range(len(groups)), 2):
        if groups[first] != groups[second]:
            changed = list(groups)
            changed[first], changed[second] = changed[second], changed[first]
            yield tuple(changed)


LARGEST_SHARE, LEAST_SHARE = 0.7, 0.002
"""Of all work: what a branch may have that is put on the ranks of the rest."""
MOST_BRANCHES = 4
FEW_BLOCKS = 12
"""Blocks up to which more partitions are tried, and more moves."""
ROUNDS = 64
"""Moves that even out a partition at most."""


class Partitioner:
    """Cuts sets of blocks of one graph into stages.

    Args:
        local: samples a rank computes at a time, at which work is weighed.
    """

    def __init__(self, costs: CostModel, local: float) -> None:
        self.costs = costs
        self.sets = BlockSets(costs)
        forward, backward = costs.block_times(local)
        self._weights = (forward + backward).tolist()
        self._chain = linear_order(costs.graph)

    @remembered
    def load(self, mask: Mask) -> float:
        """Return the work of a set of blocks on one micro-batch."""
        return float(sum(self._weights[row] for row in self.sets.rows(mask)))

    def partitions(self, groups: Sequence[Sequence[str]], count: int) -> list[tuple[tuple[str, ...], ...]]:
        """Return ways to cut the blocks of ``groups`` into ``count`` stages: from these groups, and as a chain.

        Args:
            groups: stages of a plan; blocks that are in none of them precede all of theirs.
        """
        masks = [self.sets.mask_of(group) for group in groups]
        distinct: dict[tuple[tuple[str, ...], ...], None] = {}
        for each in (self._reshaped(masks, count), self._chained(masks, count)):
            if each is not None:
                even = self._evened_out(each)
                distinct[self.ordered(even)] = None
                for near in self._near(even) if len(self.sets.names) <= FEW_BLOCKS else ():
                    distinct[self.ordered(near)] = None
        return list(distinct)

    def _near(self, masks: Sequence[Mask]) -> Iterator[list[Mask]]:
        """Yield partitions one move away: of few blocks the most even one is rarely the best on shared ranks."""
        others = self._others(masks)
        for i in range(len(masks)):
            for changed in moves.boundary_moves(self.sets, [*masks, *others], i):
                if changed[len(masks) :] == others:
                    yield changed[: len(masks)]

    def _others(self, masks: Sequence[Mask]) -> list[Mask]:
        """Return what is in none of these sets, as one: it precedes all of them, or follows them."""
        rest = (1 << len(self.sets.names)) - 1 & ~sum(masks)
        return [rest] if rest else []

    def _reshaped(self, masks: Sequence[Mask], count: int) -> list[Mask] | None:
        """Return as many stages, some of them cut or merged."""
        if len(masks) <= count:
            return moves.reshape(self.sets, masks, count, self.load)
        # what is merged must not make a circle with the blocks that are in none of them, which stay separate
        others = self._others(masks)
        found = moves.reshape(
            self.sets,
            [*masks, *others],
            count + len(others),
            lambda mask: float("inf") if any(mask & other for other in others) else self.load(mask),
        )
        return None if found is None else [mask for mask in found if mask not in others]

    def ordered(self, masks: Sequence[Mask]) -> tuple[tuple[str, ...], ...]:
        """Return the blocks of stages, producers first."""
        parts = [self.sets.blocks(mask) for mask in masks]
        covered = {name for part in parts for name in part}
        rest = [(block.name,) for block in self.costs.graph.blocks if block.name not in covered]
        order = order_stages(self.costs.graph, [*rest, *parts], costs=self.costs)
        return tuple(parts[i - len(rest)] for i in order if i >= len(rest))

    def _chained(self, masks: Sequence[Mask], count: int) -> list[Mask] | None:
        """Return consecutive pieces of the linear order, the largest as small as possible."""
        everything = sum(masks)
        names = [name for name in self._chain if everything >> self.sets.index[name] & 1]
        if len(names) < count:
            return None
        bounds = split_by_weight([self._weights[self.sets.index[name]] for name in names], count)
        return [self.sets.mask_of(names[start:stop]) for start, stop in bounds]

    def _evened_out(self, masks: Sequence[Mask]) -> list[Mask]:
        """Return the stages after moves of boundary blocks that make the heaviest ones lighter."""
        # The sum of the loads' eighth powers falls with each move, which the largest dominates.
        best, current, others = self._unevenness(masks), list(masks), self._others(masks)
        for _ in range(ROUNDS):
            heaviest = max(range(len(current)), key=lambda i: self.load(current[i]))
            changes = moves.boundary_moves(self.sets, [*current, *others], heaviest)
            options = [
                (self._unevenness(changed[: len(current)]), number, changed[: len(current)])
                for number, changed in enumerate(changes)
                if changed[len(current) :] == others
            ]
            if not options or min(options)[0] >= best * (1 - 1e-12):
                break
            best, _, current = min(options)
        return current

    def _unevenness(self, masks: Sequence[Mask]) -> float:
        return sum(self.load(mask) ** 8 for mask in masks)

    def branches(self) -> list[tuple[str, ...]]:
        """Return branches that nothing but their own blocks precedes, those with most work first.

        At a join each of what it joins, with all before it, is one, and so are all of them but the heaviest together.
        """
        # CLIP's loss joins a vision and a text tower: each is one. LLaVA's first layer joins vision and embeddings:
        # each is one, and the vision tower is worth a place. What precedes a branch stays with it, so that the rest is
        # a graph too, which reads from the branch and never the other way.
        graph = self.costs.graph.dependencies()
        everything = self.load(self.sets.mask_of(list(graph.nodes)))
        found: dict[Mask, float] = {}
        for join in graph.nodes:
            before = list(graph.predecessors(join))
            if len(before) < 2:
                continue
            masks = sorted(
                (self.sets.mask_of([*nx.ancestors(graph, name), name]) for name in before), key=self.load
            )
            others = 0
            for mask in masks[:-1]:
                others |= mask
            for mask in (*masks, others):
                if LEAST_SHARE * everything <= self.load(mask) <= LARGEST_SHARE * everything:
                    found[mask] = self.load(mask)
        heaviest = sorted(found, key=lambda mask: (-found[mask], mask))[:MOST_BRANCHES]
        return [self.sets.blocks(mask) for mask in heaviest]
