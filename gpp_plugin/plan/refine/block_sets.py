"""Stages as bit sets of block positions: what precedes what, circles, heights, and where a set may be cut.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import networkx as nx
import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs.cost_model import CostModel, remembered
from gpp_plugin.plan.make import linear_order, order_stages, split_by_weight

Mask = int
Around = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers before and after a block."""


class BlockSets:
    """Relations between sets of blocks of one graph; results of a set are cached.

    Args:
        before, after: by block, the blocks it reads from and those that read it.
    """

    def __init__(self, costs: CostModel) -> None:
        graph = costs.graph
        self.names = [block.name for block in graph.blocks]
        self.index = costs.index
        num = len(self.names)
        self._num_bytes = -(-num // 8)
        self.before, self.after = [0] * num, [0] * num
        self._gradient_after = [0] * num
        for src, dst, names in costs.block_edges:
            self.after[src] |= 1 << dst
            self.before[dst] |= 1 << src
            if any(graph.tensors[name].requires_grad for name in names):
                self._gradient_after[src] |= 1 << dst
        self._kinds = self._block_kinds(costs)

    def mask_of(self, blocks: Sequence[str]) -> Mask:
        """Return the set of these blocks."""
        return sum(1 << self.index[name] for name in blocks)

    @remembered
    def rows(self, mask: Mask) -> tuple[int, ...]:
        """Return the positions of a set's blocks, increasing."""
        return tuple(np.flatnonzero(self.flags(mask)).tolist())

    def flags(self, mask: Mask) -> npt.NDArray[np.bool_]:
        """Return by block whether it is in the set."""
        packed = np.frombuffer(mask.to_bytes(self._num_bytes, "little"), dtype=np.uint8)
        return np.unpackbits(packed, count=len(self.names), bitorder="little").view(np.bool_)

    @remembered
    def blocks(self, mask: Mask) -> tuple[str, ...]:
        """Return the names of a set's blocks, in the order of the graph."""
        return tuple(self.names[i] for i in self.rows(mask))

    @remembered
    def outputs(self, mask: Mask) -> tuple[Mask, Mask]:
        """Return the blocks outside that read the set, and those of them that return gradients."""
        readers = gradients = 0
        for block in self.rows(mask):
            readers |= self.after[block]
            gradients |= self._gradient_after[block]
        return readers & ~mask, gradients & ~mask

    def shape_of(self, masks: Sequence[Mask]) -> tuple[object, ...]:
        """Return a key that partitions share which differ by a symmetry of the graph.

        Swapping equal branches gives such partitions. Two rounds of colour refinement: by what a set holds,
        then by the colours of the sets around it. (Ranks may be placed otherwise: their times may differ a
        little.)
        """
        colors = [self._kinds_of(mask) for mask in masks]
        around: list[list[tuple[int, ...]]] = [[] for _ in masks]
        readers: list[list[tuple[int, ...]]] = [[] for _ in masks]
        for a, mask in enumerate(masks):
            outputs = self.outputs(mask)[0]
            for b, other in enumerate(masks) if outputs else ():
                if outputs & other:
                    readers[a].append(colors[b])
                    around[b].append(colors[a])
        return tuple(
            sorted(
                (color, tuple(sorted(before)), tuple(sorted(after)))
                for color, before, after in zip(colors, around, readers, strict=True)
            )
        )

    @remembered
    def _kinds_of(self, mask: Mask) -> tuple[int, ...]:
        return tuple(sorted(self._kinds[i] for i in self.rows(mask)))

    def _block_kinds(self, costs: CostModel) -> list[int]:
        """Number the blocks so that those a symmetry of the graph exchanges have equal numbers."""
        # Colour refinement: blocks of one number are distinguished by the numbers around them until that changes
        # nothing.
        # Only what is next to a block whose number has changed is visited again: in a row of equal blocks numbers
        # change from both ends, two a round, and all of them would be half the blocks as many times.
        before = [list(bits(mask)) for mask in self.before]
        after = [list(bits(mask)) for mask in self.after]
        numbers: dict[Hashable, int] = {}
        kinds = [numbers.setdefault(costs.cost_key(i), len(numbers)) for i in range(len(self.names))]
        sizes = Counter(kinds)
        around_of: dict[int, Around] = {}  # what those of a number that are not visited have around them
        changed: set[int] = set(range(len(kinds)))
        while changed:
            met: dict[int, dict[Around, list[int]]] = {}
            for i in changed:
                around = tuple(sorted(kinds[j] for j in before[i])), tuple(sorted(kinds[j] for j in after[i]))
                met.setdefault(kinds[i], {}).setdefault(around, []).append(i)
            renumbered = []
            for kind, groups in met.items():
                if sum(map(len, groups.values())) == sizes[kind]:
                    # all of them: the first ones keep the number
                    around_of[kind] = next(iter(groups))
                groups.pop(around_of[kind], None)
                for around, members in groups.items():
                    fresh = len(sizes)
                    sizes[kind] -= len(members)
                    sizes[fresh], around_of[fresh] = len(members), around
                    renumbered += [(i, fresh) for i in members]
            for i, fresh in renumbered:
                kinds[i] = fresh
            changed = {j for i, _ in renumbered for j in (*before[i], *after[i])}
        return kinds

    def is_acyclic(self, masks: Sequence[Mask]) -> bool:
        """Return whether the sets' graph has no circle (and so every set is convex)."""
        outputs = [self.outputs(mask)[0] for mask in masks]
        done, waiting = 0, list(range(len(masks)))
        while waiting:
            rest = []
            for i in reversed(waiting):
                if outputs[i] & ~done:
                    rest.append(i)
                else:
                    done |= masks[i]
            if len(rest) == len(waiting):
                return False
            waiting = rest[::-1]
        return True

    def heights(self, masks: Sequence[Mask]) -> list[int]:
        """Return for each set of a partition the number of sets on its longest path to a sink, itself included.

        Sets in a circle get the height at which it is met: `order_stages` reports them.
        """
        outputs = [self.outputs(mask)[0] for mask in masks]
        heights = [0] * len(masks)
        done, height, waiting = 0, 0, list(range(len(masks)))
        while waiting:
            height += 1
            rest = [i for i in waiting if outputs[i] & ~done]
            ready = [i for i in waiting if not outputs[i] & ~done] if len(rest) < len(waiting) else waiting
            for i in ready:
                heights[i] = height
            for i in ready:
                done |= masks[i]
            waiting = rest if ready is not waiting else []
        return heights

    def boundary(self, mask: Mask) -> list[int]:
        """Return the blocks of a set that none of its others precede, or none follow."""
        return [
            block for block in self.rows(mask) if not (self.before[block] & mask and self.after[block] & mask)
        ]

    def reach(self, block: int, within: Mask, neighbours: Sequence[Mask]) -> Mask:
        """Return the blocks of a set that can be reached from one of them."""
        reached = frontier = 1 << block
        while frontier:
            low = frontier & -frontier
            frontier ^= low
            fresh = neighbours[low.bit_length() - 1] & within & ~reached
            reached |= fresh
            frontier |= fresh
        return reached

    def between(self, mask: Mask) -> Mask:
        """Return the blocks outside a set that come after some of it and before some of it."""
        everything = (1 << len(self.names)) - 1
        before = after = 0
        for block in bits(mask):
            before |= self.reach(block, everything, self.before)
            after |= self.reach(block, everything, self.after)
        return before & after & ~mask

    def parts(self, mask: Mask) -> list[Mask]:
        """Return the parts of a set that nothing inside it connects."""
        return connected_parts(mask, {block: self.before[block] | self.after[block] for block in bits(mask)})

    @remembered
    def cuts(self, mask: Mask, *, most_blocks: int) -> list[Mask]:
        """Return what may be cut off a set: prefixes of its order, its parts, what precedes or follows a block.

        Args:
            most_blocks: in larger sets only prefixes and parts.
        """
        members = self.rows(mask)
        if len(members) < 2:
            return []
        prefix, prefixes = 0, []
        for block in members[:-1]:
            prefix |= 1 << block
            prefixes.append(prefix)
        prefixes.extend(part for part in self.parts(mask) if part != mask)
        if len(members) <= most_blocks:
            for block in members:
                ancestors = self.reach(block, mask, self.before)
                descendants = self.reach(block, mask, self.after)
                prefixes.extend((ancestors, mask & ~descendants))
        return [p for p in dict.fromkeys(prefixes) if p and p != mask]


def connected_parts(mask: Mask, neighbours: Mapping[int, Mask]) -> list[Mask]:
    """Return the parts of a set that no neighbours inside it connect.

    >>> connected_parts(0b111, {0: 0b010, 1: 0b001, 2: 0b1000})
    [3, 4]
    """
    parts = []
    while mask:
        part = frontier = mask & -mask
        while frontier:
            low = frontier & -frontier
            frontier ^= low
            fresh = neighbours[low.bit_length() - 1] & mask & ~part
            part |= fresh
            frontier |= fresh
        parts.append(part)
        mask &= ~part
    return parts


def bits(mask: Mask) -> Iterator[int]:
    """Yield the positions of the set bits, increasing."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# Which partitions of the blocks into stages are one move away: blocks moved or swapped, stages merged or cut.


MAX_CROSS_BLOCKS = 40
"""Up to so many blocks a block may move to any stage; beyond, to stages next to it."""
MAX_WAYS = 4096
MAX_SHARED_OUT = 32
"""Ways to share stages out among parts that may not be merged: so many are thought of, and so many made."""


def regroupings(sets: BlockSets, masks: list[Mask], order: Sequence[int]) -> Iterator[list[Mask]]:
    """Yield partitions with a boundary block moved, then with a stage cut, then with two merged.

    Args:
        order: stages, those to be relieved first.
    """
    for i in order:
        yield from boundary_moves(sets, masks, i)
    for i in order:
        rest = masks[:i] + masks[i + 1 :]
        for part in cuts(sets, masks[i]):
            yield [*rest, part, masks[i] & ~part]
    for i in order[::-1]:
        for j in range(i + 1, len(masks)):
            merged = _merged(masks, i, j)
            if sets.is_acyclic(merged):
                yield merged


def boundary_moves(sets: BlockSets, masks: list[Mask], i: int) -> Iterator[list[Mask]]:
    """Yield what results when a boundary block of stage ``i`` moves to another stage."""
    own = masks[i]
    if own & (own - 1) == 0:
        return
    is_small = len(sets.names) <= MAX_CROSS_BLOCKS
    for block in sets.boundary(own):
        near = sets.before[block] | sets.after[block]
        for j, other in enumerate(masks):
            if j == i or not (is_small or near & other):
                continue
            changed = list(masks)
            changed[i] = own & ~(1 << block)
            changed[j] = other | 1 << block
            if sets.is_acyclic(changed):
                yield changed


def evened_out(
    sets: BlockSets,
    masks: Sequence[Mask],
    loads: Callable[[Sequence[Mask]], Sequence[float]],
    unevenness: Callable[[Sequence[Mask]], float],
    others: Sequence[Mask] = (),
) -> list[Mask]:
    """Return the stages after moves of boundary blocks that make the heaviest ones lighter.

    Args:
        unevenness: falls with each move: a sum of the loads' eighth powers, which the largest dominates.
        others: sets that are no stages, and stay as they are.
    """
    best, current, fixed = unevenness(masks), list(masks), list(others)
    for _ in range(ROUNDS):
        own = loads(current)
        heaviest = max(range(len(current)), key=own.__getitem__)
        changes = boundary_moves(sets, [*current, *fixed], heaviest)
        options = [
            (unevenness(changed[: len(current)]), number, changed[: len(current)])
            for number, changed in enumerate(changes)
            if changed[len(current) :] == fixed
        ]
        if not options or min(options)[0] >= best * (1 - 1e-12):
            break
        best, _, current = min(options)
    return current


def swaps(sets: BlockSets, masks: list[Mask]) -> Iterator[list[Mask]]:
    """Yield what results when two boundary blocks of different stages change places."""
    if len(sets.names) > MAX_CROSS_BLOCKS:
        return
    edge_blocks = [sets.boundary(mask) for mask in masks]
    for i, j in itertools.combinations(range(len(masks)), 2):
        for a, b in itertools.product(edge_blocks[i], edge_blocks[j]):
            changed = list(masks)
            changed[i] = masks[i] & ~(1 << a) | 1 << b
            changed[j] = masks[j] & ~(1 << b) | 1 << a
            if sets.is_acyclic(changed):
                yield changed


def merged_and_cut(sets: BlockSets, masks: list[Mask], order: Sequence[int]) -> Iterator[list[Mask]]:
    """Yield what results when two stages are merged and another is cut, their number unchanged.

    Args:
        order: stages, those to be merged first.
    """
    for i in order:
        for j in order:
            merged = _merged(masks, i, j) if i < j else []
            if not merged or not sets.is_acyclic(merged):
                continue
            for k, mask in enumerate(merged):
                for part in cuts(sets, mask):
                    yield [*merged[:k], *merged[k + 1 :], part, mask & ~part]


def cuts(sets: BlockSets, mask: Mask) -> list[Mask]:
    """Return what may be cut off a stage."""
    return sets.cuts(mask, most_blocks=MAX_CROSS_BLOCKS)


def reshape(
    sets: BlockSets,
    masks: Sequence[Mask],
    count: int,
    weight: Callable[[Mask], float],
    may_merge: Callable[[Mask, Mask], bool] = lambda one, other: True,
) -> list[Mask] | None:
    """Cut the heaviest stages evenly, or merge the lightest that may be one, until there are ``count``.

    None: impossible.
    """
    masks = list(masks)
    while len(masks) < count:
        for i in sorted(range(len(masks)), key=lambda i: -weight(masks[i])):
            mask = masks[i]
            options = [(max(weight(part), weight(mask & ~part)), part) for part in cuts(sets, mask)]
            if options:
                break
        else:
            return None
        part = min(options)[1]
        masks = [*masks[:i], *masks[i + 1 :], part, mask & ~part]
    while len(masks) > count:
        pairs = [
            (weight(masks[i] | masks[j]), i, j)
            for i, j in itertools.combinations(range(len(masks)), 2)
            if may_merge(masks[i], masks[j]) and sets.is_acyclic(_merged(masks, i, j))
        ]
        if not pairs:
            return None
        _, i, j = min(pairs)
        masks = _merged(masks, i, j)
    return masks


def shared_out(
    sets: BlockSets,
    masks: Sequence[Mask],
    count: int,
    weight: Callable[[Mask], float],
    may_merge: Callable[[Mask, Mask], bool],
) -> Iterator[list[Mask]]:
    """Yield partitions into ``count`` stages, each of them a part of one of ``masks``, or of some merged.

    Args:
        masks: parts of the graph that differ, so that they should not share a stage.
        may_merge: whether two of them may, where there are too few stages for all.
    """
    # A tower and a decoder in five stages: the tower in 1 and the decoder in 4, or 2 and 3, 3 and 2, 4 and 1; those
    # first that share the stages out as the work is. Then the same of the two merged, if they may be.
    parts: list[Mask] | None = list(masks)
    while parts:
        if len(parts) <= count:
            yield from _in_ways(sets, parts, count, weight)
        parts = reshape(sets, parts, len(parts) - 1, weight, may_merge) if len(parts) > 1 else None


def _in_ways(
    sets: BlockSets, parts: Sequence[Mask], count: int, weight: Callable[[Mask], float]
) -> Iterator[list[Mask]]:
    """Yield partitions of these parts into ``count`` stages, the evenest first."""
    total = sum(map(weight, parts)) or 1.0

    def work_spread(nums: Sequence[int]) -> float:
        return sum(abs(weight(part) / total - num / count) for part, num in zip(parts, nums, strict=True))

    ends = itertools.combinations(range(1, count), len(parts) - 1)
    ways = [
        tuple(end - start for start, end in itertools.pairwise((0, *inner, count)))
        for inner in itertools.islice(ends, MAX_WAYS)
    ]
    for nums in sorted(ways, key=work_spread)[:MAX_SHARED_OUT]:
        cut = [reshape(sets, [part], num, weight) for part, num in zip(parts, nums, strict=True)]
        if all(cut):
            yield [mask for masks in cut if masks is not None for mask in masks]


def _merged(masks: Sequence[Mask], i: int, j: int) -> list[Mask]:
    return [mask for n, mask in enumerate(masks) if n not in (i, j)] + [masks[i] | masks[j]]


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
                even = evened_out(
                    self.sets,
                    each,
                    lambda masks: [self.load(mask) for mask in masks],
                    lambda masks: sum(self.load(mask) ** 8 for mask in masks),
                    self._others(each),
                )
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
