"""Blocks cut into as many stages as shared ranks are to hold, as even as possible; and branches worth a place of
their own.

Source: Megatron-LM (arXiv 2104.04473), section 2.2; controllable memory (arXiv 2405.15362); Optimus (ATC 2025)
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batch_rules import BatchRules
from gpp_plugin.plan.costs.cost_model import CostModel, remembered
from gpp_plugin.plan.linear_order import linear_order, split_by_weight
from gpp_plugin.plan.make import StageDraft, order_stages
from gpp_plugin.plan.refine.block_sets import BlockSets, Mask, boundary_moves, reshape
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.shared.shared_evaluator import Drafts

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
            for changed in boundary_moves(self.sets, [*masks, *others], i):
                if changed[len(masks) :] == others:
                    yield changed[: len(masks)]

    def _others(self, masks: Sequence[Mask]) -> list[Mask]:
        """Return what is in none of these sets, as one: it precedes all of them, or follows them."""
        rest = (1 << len(self.sets.names)) - 1 & ~sum(masks)
        return [rest] if rest else []

    def _reshaped(self, masks: Sequence[Mask], count: int) -> list[Mask] | None:
        """Return as many stages, some of them cut or merged."""
        if len(masks) <= count:
            return reshape(self.sets, masks, count, self.load)
        # what is merged must not make a circle with the blocks that are in none of them, which stay separate
        others = self._others(masks)
        found = reshape(
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
        cuts = split_by_weight([self._weights[self.sets.index[name]] for name in names], count)
        return [self.sets.mask_of(names[start:stop]) for start, stop in itertools.pairwise(cuts)]

    def _evened_out(self, masks: Sequence[Mask]) -> list[Mask]:
        """Return the stages after moves of boundary blocks that make the heaviest ones lighter."""
        # The sum of the loads' eighth powers falls with each move, which the largest dominates.
        best, current, others = self._unevenness(masks), list(masks), self._others(masks)
        for _ in range(ROUNDS):
            heaviest = max(range(len(current)), key=lambda i: self.load(current[i]))
            changes = boundary_moves(self.sets, [*current, *others], heaviest)
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


# Where a search for plans of shared ranks starts: interleaved stages, branches on the ranks of others, and both.
#
# N ranks, the first four of eight here, in p groups of d; v stages a group:
#
#     interleaved      v p stages of d ranks each, put on groups by the maps of `maps`
#     colocated        a branch on the ranks of the rest, which is planned on all ranks as p or v p stages:
#                      over all ranks, over those of the first groups or the last, or cut into p stages, one a group


VIRTUAL = (2, 3, 4)
"""Stages a group of ranks that are tried where the number is left open."""
AS_PLANNED = "stages of ranks of their own, some moved to those of others"
BRANCH_SIZES = 3
"""Micro-batch sizes of a branch that are tried beside one of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Stages with ranks, and what to call their way to share these."""

    drafts: Drafts
    how: str


class StartMaker:
    """Makes starts for one request from a plan whose ranks hold one stage each.

    Args:
        plan: the best such plan known.
        most_groups: of equal size, into which ranks are divided.
    """

    def __init__(
        self,
        request: PlanRequest,
        rules: BatchRules,
        partitioner: Partitioner,
        plan: PipelinePlan,
        *,
        most_groups: int | None = None,
    ) -> None:
        self._most_groups = request.num_ranks if most_groups is None else most_groups
        self._request, self._rules, self._partitioner = request, rules, partitioner
        self._plan = plan
        self._groups = [stage.blocks for stage in plan.stages]
        self._num_blocks = len(request.graph.blocks)

    def starts(self) -> Iterator[Start]:
        """Yield all starts the request allows."""
        request = self._request
        if not request.must_share_ranks:
            yield Start(drafts=drafts_of(self._plan), how=AS_PLANNED)
        if request.virtual_stages != 1 or request.must_share_ranks:
            for degree, count in self._counts():
                yield from self.interleaved(degree, count)
        if request.colocate and request.num_stages is None:
            for branch in self._partitioner.branches():
                yield from self.colocated(branch)

    def _counts(self) -> Iterator[tuple[int, int]]:
        """Yield (ranks of a group, stages in all) that are requested or worth trying."""
        # 8 ranks, virtual stages "auto": groups of 1, 2 and 4 with 2, 3 and 4 stages each: (1, 16), (1, 24) ...
        request = self._request
        for degree in self._degrees():
            groups = request.num_ranks // degree
            if request.num_stages is not None:
                is_even = request.num_stages == (request.virtual_stages or 0) * groups
                if request.num_stages > groups and (is_even or request.virtual_stages in (None, 1)):
                    yield degree, request.num_stages
                continue
            virtual = VIRTUAL if request.virtual_stages in (None, 1) else (request.virtual_stages,)
            for each in virtual:
                if each is not None and each * groups <= self._num_blocks:
                    yield degree, each * groups

    def _degrees(self) -> list[int]:
        """Return the sizes of groups, equal ones, that make at least two groups; all ranks as one where none do."""
        total = self._request.num_ranks
        fitting = [degree for degree in self._rules.degrees() if total % degree == 0]
        fitting = [degree for degree in fitting if total // degree <= self._most_groups] or fitting
        return [degree for degree in fitting if degree < total] or fitting

    def interleaved(self, degree: int, count: int) -> Iterator[Start]:
        """Yield starts of ``count`` stages of ``degree`` ranks each."""
        groups = self._request.num_ranks // degree
        for parts in self._partitioner.partitions(self._groups, count):
            loads = [self._load(part) for part in parts]
            for placed in usual_maps(loads, groups):
                for wish in self._wishes(degree):
                    drafts = self.on_groups(parts, placed, degree, wish)
                    if drafts is not None:
                        how = f"{count} stages on {_counted(groups, 'group')} of {_counted(degree, 'rank')}"
                        yield Start(drafts=drafts, how=how)

    def colocated(self, branch: Sequence[str]) -> Iterator[Start]:
        """Yield starts with a branch on the ranks of the rest."""
        own = frozenset(branch)
        rest = [tuple(name for name in group if name not in own) for group in self._groups]
        rest = [group for group in rest if group]
        left = sum(map(len, rest))
        virtual = self._request.virtual_stages
        for degree in self._degrees():
            groups = self._request.num_ranks // degree
            for each in (1, 2) if virtual is None else (virtual,):
                if each * groups > left:
                    continue
                for parts in self._partitioner.partitions(rest, each * groups):
                    trunk = parts, round_robin(len(parts), groups)
                    for wish in self._wishes(degree):
                        yield from self._with_branch(branch, trunk, degree, wish)

    def _with_branch(
        self, branch: Sequence[str], trunk: tuple[tuple[tuple[str, ...], ...], Map], degree: int, wish: int
    ) -> Iterator[Start]:
        """Yield a trunk on all groups with the branch on some of them."""
        parts, placed = trunk
        total = self._request.num_ranks
        stages = self.on_groups(parts, placed, degree, wish)
        if stages is None:
            return
        groups = total // degree
        spans = {(0, total): "all ranks"}
        for num in {1, groups // 2} - {0, groups}:
            spans[0, num * degree] = f"the first {num * degree} ranks"
            spans[total - num * degree, total] = f"the last {num * degree} ranks"
        first = branch[0]
        for (begin, end), where in spans.items():
            for size in self._branch_sizes(branch, end - begin, wish):
                draft = StageDraft(
                    blocks=tuple(branch),
                    degree=end - begin,
                    micro_batch_size=size,
                    ranks=tuple(range(begin, end)),
                )
                yield Start(drafts=(draft, *stages), how=f"{first} and what follows on {where}")
        if 1 < groups <= len(branch):
            for pieces in self._partitioner.partitions([branch], groups):
                cut = self.on_groups(pieces, round_robin(groups, groups), degree, wish)
                if cut is not None:
                    yield Start(
                        drafts=(*cut, *stages), how=f"{first} and what follows, a stage on each group"
                    )

    def on_groups(
        self, parts: Sequence[tuple[str, ...]], placed: Map, degree: int, wish: int
    ) -> Drafts | None:
        """Return stages of ``degree`` ranks each on the groups of a map; None where a stage has no micro-batch size."""
        drafts = []
        for part, group in zip(parts, placed, strict=True):
            size = self._rules.micro_batch_size(part, degree, wish)
            if size is None:
                return None
            ranks = tuple(range(group * degree, (group + 1) * degree))
            drafts.append(StageDraft(blocks=part, degree=degree, micro_batch_size=size, ranks=ranks))
        return tuple(drafts)

    def _branch_sizes(self, branch: Sequence[str], degree: int, wish: int) -> list[int]:
        """Return micro-batch sizes of a branch: the least that its ranks and the rest's divide, and larger ones."""
        found = []
        for other in self._rules.wishes():
            size = self._rules.micro_batch_size(branch, degree, other)
            if size is not None and size >= wish:
                found.append(size)
        return sorted(set(found))[:BRANCH_SIZES]

    def _wishes(self, degree: int) -> list[int]:
        """Return micro-batch sizes of stages of ``degree`` ranks."""
        return [wish for wish in self._rules.wishes() if wish % degree == 0] or self._rules.wishes()

    def _load(self, part: Sequence[str]) -> float:
        return self._partitioner.load(self._partitioner.sets.mask_of(part))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def drafts_of(plan: PipelinePlan) -> Drafts:
    """Return the stages of a plan, on their ranks."""
    drafts = (StageDraft.of(stage) for stage in plan.stages)
    return tuple(
        dataclasses.replace(draft, ranks=stage.ranks)
        for draft, stage in zip(drafts, plan.stages, strict=True)
    )
