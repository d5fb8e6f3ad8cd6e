"""Attention without masks that hide nothing, as eager models call it.

Eager HuggingFace looks at the values of ``attention_mask`` and, where nothing is padded, calls
``scaled_dot_product_attention`` without a mask or with ``is_causal``, which the fastest kernels ask for. A capture must
not freeze that: it has the masks, and `without_masks` makes of it what eager would have called for a mini-batch whose
inputs hold ones only. Every other operator stays, under its name.

    as captured                                    attention_mask all ones
    k = reshape(expand(unsqueeze(key)))            attention(q, key, value, is_causal=True, enable_gqa=True)
    attention(q, k, v, mask)
    attention(q, k, v, where(mask, bias, min))     attention(q, k, v, bias)

Source: this project
Tests: tests/capture/test_attention.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from gpp_plugin.capture.mask_values import Mask
from gpp_plugin.capture.tracing.clean import ADDED, copied, written_arguments, written_storages
from gpp_plugin.capture.tracing.symbolic_sizes import argument_of, is_open

aten = torch.ops.aten

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
    return new, _unread(new, idle)


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


def _unread(graph: fx.Graph, idle: Collection[str]) -> frozenset[str]:
    """Return the operators that nobody reads; not those of ``idle``, which nobody ever read."""
    unread: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        is_free = node.op == "call_function" and node.name not in idle and not written_arguments(node)
        if is_free and unread.issuperset(node.users):
            unread.add(node)
    return frozenset(node.name for node in unread)


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
