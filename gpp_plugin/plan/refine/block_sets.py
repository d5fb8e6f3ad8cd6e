"""Stages as bit sets of block positions: what precedes what, circles, heights, and where a set may be cut.

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.remembered import remembered

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
        kinds = _numbered([costs.cost_key(i) for i in range(len(self.names))])
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
                if (
                    sum(map(len, groups.values())) == sizes[kind]
                ):  # all of them: the first ones keep the number
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
        parts, rest = [], mask
        both = [a | b for a, b in zip(self.before, self.after, strict=True)]
        while rest:
            part = self.reach((rest & -rest).bit_length() - 1, mask, both)
            parts.append(part)
            rest &= ~part
        return parts

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


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def bits(mask: Mask) -> Iterator[int]:
    """Yield the positions of the set bits, increasing."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
