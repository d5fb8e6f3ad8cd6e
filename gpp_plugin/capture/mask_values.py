"""What the boolean masks of a captured graph are where inputs hold ones only, and attention without those masks.

A mask from ``attention_mask`` and positions has no value at capture. Under the assumption that ``attention_mask`` is
all ones it has one, and that can be looked at: it hides nothing, or just what comes later, or something else. Whoever
runs the graph checks the assumption for each mini-batch (`inputs_of_ones`). Looked at on the CPU: inputs of ones may be
indices beyond a table, which a GPU does not survive (`trial_run`).

Source: this project
Tests: tests/capture/test_attention.py, tests/capture/test_lengths.py
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from gpp_plugin.capture.eager.trial_run import CPU
from gpp_plugin.capture.layouts import is_random
from gpp_plugin.capture.tracing.clean import (
    ADDED,
    copied,
    may_alias,
    on_device,
    written_arguments,
    written_storages,
)
from gpp_plugin.capture.tracing.symbolic_sizes import SizeTexts, argument_of, is_open, sizes_in, with_sizes
from gpp_plugin.errors import first_line

logger = logging.getLogger(__name__)
aten = torch.ops.aten

MAX_VALUES = 1 << 28
"""Masks with more elements that differ are not looked at; attention keeps them."""

_ELEMENTWISE = {
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__and__.Scalar, aten.__or__.Scalar, aten.where.ScalarOther,
    aten.where.ScalarSelf, aten.where.Scalar,
}  # fmt: skip
"""Operators that torch does not mark as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A mask that hides nothing, or just what comes later, as long as some inputs hold ones only.

    Args:
        inputs: batch keys of these inputs; none where the mask is made of positions alone.
        is_causal: query i sees keys 0 to i, as by ``is_causal`` of attention; else every key.
    """

    inputs: frozenset[str]
    is_causal: bool


def is_elementwise(target: Any) -> bool:
    """Return whether an operator makes each element of its result of those at the same place."""
    return target in _ELEMENTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def inputs_of_ones(batch: Mapping[str, Any], keys: Iterable[str] | None = None) -> frozenset[str]:
    """Return the entries of a batch, of those called ``keys``, that hold whole numbers or truths, all ones."""
    return frozenset(key for key in (batch if keys is None else keys) if _holds_ones(batch[key]))


def _holds_ones(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_meta:
        return False
    if isinstance(value, FakeTensor) or not value.numel():  # a fake one has no values
        return False
    # of most inputs, which are no masks, one element says so
    return bool(value.reshape(-1)[0] == 1) and bool((value == 1).all())


class MaskFinder:
    """Says which of the candidates are masks that ``Mask`` describes, at any sizes that were left open.

    Args:
        graph: shapes are those of ``node.meta["val"]``.
        inputs: placeholder -> batch key, of the model's own inputs.
        constants: placeholder -> its values.
        traced_on: the device that operators refer to.
    """

    def __init__(
        self,
        graph: fx.Graph,
        candidates: Iterable[fx.Node],
        *,
        inputs: Mapping[str, str],
        constants: Mapping[str, Tensor],
        traced_on: torch.device,
    ) -> None:
        self._traced_on = traced_on
        self._constants = {name: value.to(CPU) for name, value in constants.items()}
        self._sources = _sources(graph, inputs, constants)
        self._order = {node: position for position, node in enumerate(graph.nodes)}
        self._candidates = [node for node in dict.fromkeys(candidates) if self._has_values(node)]

    def _has_values(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return node in self._sources and isinstance(value, Tensor) and value.dtype is torch.bool

    def of(self, nodes: Collection[str]) -> MaskFinder:
        """Return what looks at some of the candidates alone."""
        found = copy.copy(self)
        found._candidates = [node for node in self._candidates if node.name in nodes]
        return found

    @property
    def candidates(self) -> frozenset[str]:
        """Return the nodes that may be such masks."""
        return frozenset(node.name for node in self._candidates)

    def made_of(self, *names: str) -> list[fx.Node]:
        """Return candidates, and all that they are made of, in the order of the graph."""
        needed: set[fx.Node] = set()
        pending = [node for node in self._candidates if node.name in names]
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        return sorted(needed, key=self._order.__getitem__)

    def sizes(self) -> list[Any]:
        """Return the sizes that were left open among those that the candidates are made with."""
        return [
            size
            for node in self.made_of(*self.candidates)
            for size in (*sizes_in(node), *getattr(node.meta.get("val"), "shape", ()))
            if is_open(size)
        ]

    def find(self, size_of: Callable[[Any], int] = int) -> dict[str, Mask]:
        """Return the masks by node name.

        Args:
            size_of: the value of a size that was left open.
        """
        values, found = _Values(self, size_of), {}
        for node in self._candidates:
            try:
                mask = values.mask(node)
            except Exception as error:  # whatever an operator raises: the mask then is what it was
                logger.debug("mask %s has no value of its own: %s", node.name, first_line(error))
                continue
            if mask is not None:
                found[node.name] = mask
        return found


class _Values:
    """Values of the nodes that depend on inputs of ones, constants and sizes alone.

    Each is held with every axis along which it does not differ cut to one: of a mask [8, 1, 512, 512] that is the same
    for all samples, [1, 1, 512, 512] is held and looked at.
    """

    def __init__(self, finder: MaskFinder, size_of: Callable[[Any], int]) -> None:
        self._finder, self._size_of = finder, size_of
        self._known: dict[fx.Node, Tensor] = {}

    def _shape(self, node: fx.Node) -> torch.Size:
        return torch.Size([self._size_of(s) if is_open(s) else s for s in node.meta["val"].shape])

    def mask(self, node: fx.Node) -> Mask | None:
        """Return what a node masks, None if that is not known or something else than `Mask` can say."""
        sources = self._finder._sources[node]
        held = self._value(node)
        if bool(held.all()):
            return Mask(inputs=sources, is_causal=False)
        if held.dim() < 2 or held.numel() != held.shape[-1] * held.shape[-2]:
            return None  # samples or heads differ
        square = held.reshape(held.shape[-2:]).expand(self._shape(node)[-2:])
        is_causal = torch.equal(square, torch.ones_like(square).tril())
        return Mask(inputs=sources, is_causal=True) if is_causal else None

    def _value(self, wanted: fx.Node) -> Tensor:
        missing: set[fx.Node] = set()
        pending = [wanted]
        while pending:
            node = pending.pop()
            if node not in self._known and node not in missing:
                missing.add(node)
                pending.extend(node.all_input_nodes)
        for node in sorted(missing, key=self._finder._order.__getitem__):
            self._known[node] = _compact(self._compute(node))
        return self._known[wanted]

    def _compute(self, node: fx.Node) -> Tensor:
        target: Any = node.target
        if node.op == "placeholder":
            if node.name in self._finder._constants:
                return self._finder._constants[node.name]
            dtype = node.meta["val"].dtype
            return torch.ones((), dtype=dtype).expand(self._shape(node))
        # Operators on elements compute with what is held, [1, 1, 1, 8] <= [1, 1, 8, 1]; others with all of it, expanded
        # without a copy.
        by_element = is_elementwise(target)
        shape = self._shape(node)
        argument = self._known.__getitem__ if by_element else self._whole
        operands = (self._known[source].shape for source in node.all_input_nodes)
        held = torch.broadcast_shapes(*operands) if by_element else shape
        if held.numel() > MAX_VALUES and not may_alias(node):
            raise ValueError(f"{node.name} has shape {tuple(held)}, more than {MAX_VALUES} elements")
        placed = on_device((node.args, node.kwargs), CPU, of_type=self._finder._traced_on.type)
        args, kwargs = with_sizes(placed, self._size_of)
        result = target(*fx.map_arg(args, argument), **fx.map_arg(kwargs, argument))
        return result.expand(shape) if by_element else result

    def _whole(self, node: fx.Node) -> Tensor:
        return self._known[node].expand(self._shape(node))


def _sources(
    graph: fx.Graph, inputs: Mapping[str, str], constants: Collection[str]
) -> dict[fx.Node, frozenset[str]]:
    """Return the batch keys that each node depends on, of those that depend on nothing else but sizes."""
    written = written_storages(graph)
    sources: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node in written or not isinstance(value, Tensor) and node.name not in constants:
            continue
        if node.op == "placeholder":
            if node.name in constants:
                sources[node] = frozenset()
            elif node.name in inputs and not value.is_floating_point():
                sources[node] = frozenset((inputs[node.name],))
        elif node.op == "call_function" and not is_random(node):
            read = node.all_input_nodes
            if all(source in sources for source in read):
                sources[node] = frozenset().union(*(sources[source] for source in read))
    return sources


def _compact(value: Tensor) -> Tensor:
    """Return a tensor with the axes along which nothing differs cut to one."""
    for axis, size in enumerate(value.shape):
        if size > 1:
            first = value.narrow(axis, 0, 1)
            if value.stride(axis) == 0 or bool((value == first).all()):
                value = first
    return value


# Masks at a length from masks at a longer one, of which they are the leading corner.
#
# What a mask is must be known at each length: one of a sliding window is causal up to the window, and no further. To
# compute its values for each length would cost milliseconds. But what is made of positions and constants element by
# element has, at a smaller size, the values that it has at a larger one, within its own size:
#
#     arange(3) <= arange(3)[:, None]        is the corner of        arange(4) <= arange(4)[:, None]
#         1 0 0                                                          1 0 0 0
#         1 1 0                                                          1 1 0 0
#         1 1 1                                                          1 1 1 0
#                                                                        1 1 1 1
#
# and corners of masks that hide nothing, or just what comes later, are such masks. So values are computed at one large
# size, and at sizes rounded up to powers of two where that is not enough. A mask that is neither at the larger size
# may be one at the smaller: then, and where an operator has no corners (a flip, a sum), the sizes themselves decide.


MAX_KNOWN = 64
MOST_AT_FIRST = 512
"""A length at which masks are computed first: most are the same at all lengths up to it."""

_SIZED = {
    aten.expand.default, aten.ones.default, aten.zeros.default, aten.unsqueeze.default, aten.contiguous.default,
    aten.clone.default, aten.alias.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.detach.default,
}  # fmt: skip
"""Operators whose results have sub-masks, whatever sizes are among their arguments."""
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
        cut = [
            name
            for name in finder.candidates
            if all(node.op != "call_function" or _keeps_corners(node) for node in finder.made_of(name))
        ]
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
        self, known: OrderedDict[tuple[int, ...], dict[str, Mask]], sizes: tuple[int, ...], finder: MaskFinder
    ) -> dict[str, Mask]:
        if sizes not in known:
            while len(known) >= MAX_KNOWN:
                known.popitem(last=False)
            size_of = dict(zip(self._keys, sizes, strict=True))
            known[sizes] = finder.find(lambda size: int(size_of[self._key(size)]))
        return known[sizes]


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


# Attention without masks that hide nothing, as eager models call it.
#
# Eager HuggingFace looks at the values of ``attention_mask`` and, where nothing is padded, calls
# ``scaled_dot_product_attention`` without a mask or with ``is_causal``, which the fastest kernels ask for. A capture
# must not freeze that: it has the masks, and `without_masks` makes of it what eager would have called for a mini-batch
# whose inputs hold ones only. Every other operator stays, under its name.
#
#     as captured                                    attention_mask all ones
#     k = reshape(expand(unsqueeze(key)))            attention(q, key, value, is_causal=True, enable_gqa=True)
#     attention(q, k, v, mask)
#     attention(q, k, v, where(mask, bias, min))     attention(q, k, v, bias)


_ATTENTION = aten.scaled_dot_product_attention.default
_MASK = 3
"""Position of the mask among attention's arguments; behind it stand the rate of dropout and ``is_causal``."""
_COPIES = {aten.contiguous.default, aten.clone.default, aten.alias.default}
_CHOICES = {aten.where.self, aten.where.ScalarOther}
_MAX_GROUPED_WIDTH = 256
"""Widest head for which eager code has attention repeat keys and values itself: wider ones have no kernel for it."""


def mask_candidates(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield what may be the masks of attention that eager models leave out."""
    for node in graph.nodes:
        mask = _mask_of(node)
        if mask is not None:
            source = mask
            while source.target in _COPIES:
                source = source.all_input_nodes[0]
            yield source.all_input_nodes[0] if source.target in _CHOICES else mask


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask that a node calls attention with."""
    if node.target is not _ATTENTION:
        return None
    mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def without_masks(
    graph: fx.Graph, masks: Mapping[str, Mask], ones: Collection[str]
) -> tuple[fx.Graph, frozenset[str]]:
    """Return a copy of a graph, or of part of it, whose attention has no masks where eager would have none.

    Args:
        masks: as `MaskFinder` finds them; those that the graph lacks are of other parts.
        ones: batch keys of the inputs that hold ones only.

    Returns:
        The copy, and the operators in it that nobody reads any more.
    """
    new = copied(graph.nodes)
    assert all(a.name == b.name for a, b in zip(graph.nodes, new.nodes, strict=True)), (
        "a copy has the same names"
    )
    idle = {n.name for n in graph.nodes if not n.users}
    known = {name: mask for name, mask in masks.items() if mask.inputs.issubset(ones)}
    if known:
        written = written_storages(new)
        for node in list(new.nodes):
            if node.target in _CHOICES:
                _skip_choice(node, known, written)
        for node in list(new.nodes):
            mask = _mask_of(node)
            if mask is not None and mask.name in known:
                _drop_mask(node, is_causal=known[mask.name].is_causal, written=written)
    # what nobody reads any more
    unread: set[fx.Node] = set()
    for node in reversed(list(new.nodes)):
        is_free = node.op == "call_function" and node.name not in idle and not written_arguments(node)
        if is_free and unread.issuperset(node.users):
            unread.add(node)
    return new, frozenset(node.name for node in unread)


def without_choices(
    graph: fx.Graph, masks: Mapping[str, Mask], ones: Collection[str], *, of: Collection[str]
) -> fx.Graph:
    """Return a copy of a graph whose attention reads biases as they are, where masks hide nothing of them.

    Args:
        masks, ones: as of `without_masks`.
        of: the operators that may be left out.
    """
    new = copied(graph.nodes)
    known = {name: m for name, m in masks.items() if m.inputs.issubset(ones) and not m.is_causal}
    written = written_storages(new)
    for node in list(new.nodes):
        if node.name in of and node.target in _CHOICES:
            _skip_choice(node, known, written)
    return new


def repeated_operands(graph: fx.Graph, masks: Collection[str]) -> list[tuple[str, str]]:
    """Return the keys and values that attention repeats where it has its mask, as (repeated, as they are)."""
    found = []
    for node in graph.nodes:
        mask = _mask_of(node)
        for operand in node.args[1:_MASK] if mask is not None and mask.name in masks else ():
            source = _unrepeated(operand)
            if source is not None:
                found.append((operand.name, source.name))
    return found


def sizes_of_bias(node: fx.Node) -> list[Any]:
    """Return the symbolic sizes that code without masks may name and the operator itself does not."""
    if node.target not in _CHOICES or not _is_attention_bias(node):
        return []
    return [size for size in node.meta["val"].shape[-2:] if is_open(size)]


def drop_operators(graph: fx.Graph, names: Collection[str]) -> None:
    """Erase operators that nobody but one of them reads."""
    for node in reversed(list(graph.nodes)):
        if node.name in names:
            graph.erase_node(node)


def _drop_mask(node: fx.Node, *, is_causal: bool, written: Collection[fx.Node]) -> None:
    """Call attention without its mask, and with keys and values as they are before they are repeated for its heads."""
    operands: Any = node.args
    query, key, value, *rest = operands
    kwargs = {name: value for name, value in node.kwargs.items() if name != "attn_mask"}
    rate = rest[1] if len(rest) > 1 else kwargs.pop("dropout_p", 0.0)
    few = [_unrepeated(operand) for operand in (key, value)]
    widths = [operand.meta["val"].shape[-1] for operand in (key, value)]
    is_narrow = bool(widths[0] == widths[1] <= _MAX_GROUPED_WIDTH)
    if all(source is not None and source not in written for source in few) and is_narrow:
        key, value = few
        kwargs["enable_gqa"] = True
    kwargs.pop("is_causal", None)
    node.args, node.kwargs = (query, key, value, None, rate, is_causal), kwargs


def _unrepeated(operand: Any) -> fx.Node | None:
    """Return the keys or values [B, G, T, D] of which ``operand`` [B, G x n, T, D] has each n times."""
    # repeat_kv: [B, G, T, D] unsqueeze [B, G, 1, T, D] expand [B, G, n, T, D] reshape [B, G x n, T, D]
    if operand.target is not aten.reshape.default or operand.args[0].target is not aten.expand.default:
        return None
    repeated, one = operand.args[0], operand.args[0].args[0]
    if one.target is not aten.unsqueeze.default or one.args[1] not in (2, -3):
        return None
    before, after = repeated.meta["val"].shape, operand.meta["val"].shape
    is_joined = len(before) == 5 and tuple(after) == (before[0], before[1] * before[2], *before[3:])
    return one.args[0] if is_joined and one.meta["val"].shape[2] == 1 else None


def _skip_choice(node: fx.Node, known: Mapping[str, Mask], written: Collection[fx.Node]) -> None:
    """Replace ``where(mask, bias, least)`` by the bias, or hide of it what comes later, for attention that reads it."""
    condition, bias = node.args[0], node.args[1]
    if not isinstance(condition, fx.Node) or condition.name not in known:
        return
    mask = known[condition.name]
    if not isinstance(bias, fx.Node) or bias in written or not _is_attention_bias(node):
        return
    if not mask.is_causal:
        node.replace_all_uses_with(bias)
        return
    # eager makes this mask in the attention itself: [T, T], where the captured one has every sample's, [B, 1, T, T]
    size = [argument_of(length) for length in node.meta["val"].shape[-2:]]
    graph = node.graph
    with graph.inserting_before(node):
        ones = graph.call_function(aten.new_ones.default, (bias, size), {"dtype": torch.bool})
        causal = graph.call_function(aten.tril.default, (ones,))
    ones.meta[ADDED] = causal.meta[ADDED] = True
    node.replace_input_with(condition, causal)


def _is_attention_bias(node: fx.Node) -> bool:
    """Return whether a result is read by attention alone, as a mask, which may be the same for all samples."""
    return bool(node.users) and all(
        _is_attention_bias(user)
        if user.target in _COPIES
        else _mask_of(user) is node and list(user.all_input_nodes).count(node) == 1
        for user in node.users
    )
