"""Which partitions of the blocks into stages are one move away: blocks moved or swapped, stages merged or cut.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from gpp_plugin.plan.refine.block_sets import BlockSets, Mask

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
