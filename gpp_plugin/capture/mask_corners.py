"""Masks at a length from masks at a longer one, of which they are the leading corner.

What a mask is must be known at each length: one of a sliding window is causal up to the window, and no further. To
compute its values for each length would cost milliseconds. But what is made of positions and constants element by
element has, at a smaller size, the values that it has at a larger one, as far as it goes:

    arange(3) <= arange(3)[:, None]        is the corner of        arange(4) <= arange(4)[:, None]
        1 0 0                                                          1 0 0 0
        1 1 0                                                          1 1 0 0
        1 1 1                                                          1 1 1 0
                                                                       1 1 1 1

and corners of masks that hide nothing, or just what comes later, are such masks. So values are computed at one large
size, and at sizes rounded up to powers of two where that does not tell. A mask that is neither at the larger size may
be one at the smaller: then, and where an operator has no corners (a flip, a sum), the sizes themselves decide.

Source: this project
Tests: tests/capture/test_lengths.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from gpp_plugin.capture.mask_values import Mask, MaskFinder, is_elementwise
from gpp_plugin.capture.tracing.symbolic_sizes import SizeTexts, is_open, sizes_in

aten = torch.ops.aten

MAX_KNOWN = 64
MOST_AT_FIRST = 512
"""A length at which masks are looked at before any is asked for: most are up to it what they are there."""

_SIZED = {
    aten.expand.default, aten.ones.default, aten.zeros.default, aten.unsqueeze.default, aten.contiguous.default,
    aten.clone.default, aten.alias.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.detach.default,
}  # fmt: skip
"""Operators whose results have corners, whatever sizes they are told."""
_UNSIZED = {aten.cumsum.default, aten.tril.default, aten.triu.default}
"""Others, where no size is among their arguments."""
_FILLED = {aten.full.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default}
_RESHAPED = {aten.view.default, aten.reshape.default}
_RANGES = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
"""Position of the end among arguments; all else of them must be numbers."""


class MasksAtLengths:
    """Finds attention's masks at any values of a capture's symbols.

    Args:
        finder: of a stage's masks.
    """

    def __init__(self, finder: MaskFinder, texts: SizeTexts) -> None:
        self._finder = finder
        sizes = finder.sizes()
        self._sizes, self._key = texts.compile(sizes), texts.key
        self._keys = [texts.key(size) for size in sizes]
        cut = frozenset(name for name in finder.candidates if _has_corners(finder.made_of(name)))
        self._cut = finder.of(cut)
        # by sizes: what masks with corners are there, and what the others are
        self._larger: OrderedDict[tuple[int, ...], dict[str, Mask]] = OrderedDict()
        self._exact: OrderedDict[tuple[int, ...], dict[str, Mask]] = OrderedDict()
        if self._keys:
            self._look(tuple(MOST_AT_FIRST for _ in texts.symbols))

    def at(self, symbols: tuple[int, ...]) -> dict[str, Mask]:
        """Return the masks at these values of the symbols, by node name."""
        sizes = self._sizes(*symbols)
        found = self._corners(sizes)
        if self._cut.candidates - found.keys() and self._keys:
            self._look(tuple(1 << max(value - 1, 0).bit_length() for value in symbols))
            found = self._corners(sizes)
        missing = self._finder.candidates - found.keys()
        return found | self._remembered(self._exact, sizes, self._finder.of(missing)) if missing else found

    def _look(self, symbols: tuple[int, ...]) -> None:
        """Find out what masks with corners are at larger sizes."""
        self._remembered(self._larger, self._sizes(*symbols), self._cut)

    def _corners(self, sizes: tuple[int, ...]) -> dict[str, Mask]:
        """Return the masks that are corners of known ones."""
        found: dict[str, Mask] = {}
        for above, masks in self._larger.items():
            if all(a >= b for a, b in zip(above, sizes, strict=True)):
                found |= masks
        return found

    def _remembered(
        self,
        known: OrderedDict[tuple[int, ...], dict[str, Mask]],
        sizes: tuple[int, ...],
        finder: MaskFinder,
    ) -> dict[str, Mask]:
        if sizes not in known:
            while len(known) >= MAX_KNOWN:
                known.popitem(last=False)
            size_of = dict(zip(self._keys, sizes, strict=True))
            known[sizes] = finder.find(lambda size: int(size_of[self._key(size)]))
        return known[sizes]


def _has_corners(nodes: Collection[fx.Node]) -> bool:
    return all(node.op != "call_function" or _keeps_corners(node) for node in nodes)


def _keeps_corners(node: fx.Node) -> bool:
    """Return whether a result at smaller sizes is a corner of that at larger ones, if its operands are."""
    target: Any = node.target
    if target in _RANGES:
        end = _RANGES[target]
        return not any(is_open(value) for i, value in enumerate(node.args) if i != end)
    if target in _SIZED:
        return True
    if target in _FILLED:  # the sizes come before the value
        return not any(is_open(value) for value in node.args)
    if target is aten.slice.Tensor:
        start = node.args[2] if len(node.args) > 2 else 0
        return isinstance(start, int) and start >= 0 and len(node.args) < 5
    if target in _RESHAPED:
        (source,) = node.all_input_nodes
        return _extents(source) == _extents(node)
    if target is aten.index.Tensor:  # a table of fixed size has no rows for larger positions
        table: Any = node.args[0]
        return any(is_open(size) for size in table.meta["val"].shape)
    return (target in _UNSIZED or is_elementwise(target)) and not any(sizes_in(node))


def _extents(node: fx.Node) -> list[str]:
    """Return the sizes of a tensor that are not one: with these alike, a view puts in or takes out axes of one."""
    return [str(size) for size in node.meta["val"].shape if is_open(size) or size != 1]
