"""Layouts of common operators by rule, where the rule is exact and a numeric probe would cost time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples of a tensor lie along ``axis``, whose size is ``outer * samples * rows``.

    ``outer`` above one is a merge such as (length * samples, width): inside a block it is as good as
    any other layout, but no message can cut it.
    """

    axis: int
    rows: int = 1
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same value at every number of samples and for every sample."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A value made from the number of samples alone (``arange(samples)``); known at both sizes."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that depends on several samples at once, or cannot be cut by sample."""


State = Rows | Fixed | Counted | Whole


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: its state and its shape."""

    state: State
    shape: tuple[int, ...]


Operands = dict[fx.Node, Operand]
_ELEMENTWISE = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.contiguous.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.detach_.default, aten.dropout.default,
    aten.feature_dropout.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.type_as.default, aten.expand.default,
}  # fmt: skip


def rule_layout(node: fx.Node, operands: Operands, shape: tuple[int, ...], samples: int) -> Rows | None:
    """Return the layout of the result of ``node``, or None where no rule is sure.

    Args:
        operands: the tensor arguments of the node.
        shape: of the result, at ``samples`` samples.
    """
    if any(isinstance(operand.state, (Counted, Whole)) for operand in operands.values()):
        return None
    target: Any = node.target
    if target in _RESHAPES:
        return _reshape(operands, shape, samples)
    if target in _RULES:
        return _RULES[target](node, operands, shape)
    is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    if target in _ELEMENTWISE or (is_pointwise and not target._schema.is_mutable):
        return _broadcast(list(operands.values()), shape)
    return None


def _broadcast(operands: Sequence[Operand], shape: tuple[int, ...]) -> Rows | None:
    """Elementwise with broadcasting: all operands that have samples must have them on one axis."""
    # Shapes are aligned at the end: [8, 1, 16] and [5, 16] give [8, 5, 16], in which axis 0 of the first is axis 0 and
    # axis 0 of the second is axis 1. All that have samples must agree, and who has none must be of size one there.
    found: set[Rows] = set()
    for operand in operands:
        if isinstance(operand.state, Rows):
            axis = operand.state.axis + len(shape) - len(operand.shape)
            if axis < 0:  # ``a.type_as(b)`` has the type of b and the shape of a
                return None
            found.add(Rows(axis, operand.state.rows, operand.state.outer))
    if len(found) != 1:
        return None
    (rows,) = found
    for operand in operands:
        axis = rows.axis - (len(shape) - len(operand.shape))
        size = operand.shape[axis] if axis >= 0 else 1
        expected = shape[rows.axis] if isinstance(operand.state, Rows) else 1
        if size != expected:
            return None
    return rows


def _reshape(operands: Operands, shape: tuple[int, ...], samples: int) -> Rows | None:
    """Keep the order of elements: in it, samples stand between ``left`` and ``right`` elements."""
    (operand,) = operands.values()
    if not isinstance(operand.state, Rows):
        return None
    # [8 samples, 4 heads, 16, 2] to [32, 16, 2]: left = 1, right = 4 * 16 * 2. Axis 0 of size 32 holds 8 samples of 4
    # rows, followed by 16 * 2 elements: 4 * 32 = right, so Rows(axis 0, 4 rows). [16 tokens, 8 samples, 5] to [128, 5]
    # has left = 16, which ends inside axis 0: outer 16, 1 row.
    old = operand.state
    left = math.prod(operand.shape[: old.axis]) * old.outer
    right = old.rows * math.prod(operand.shape[old.axis + 1 :])
    for axis, size in enumerate(shape):
        outer, rest = divmod(left, math.prod(shape[:axis]))
        if rest or outer == 0 or size % (outer * samples):
            continue
        rows = size // (outer * samples)
        if rows * math.prod(shape[axis + 1 :]) == right:
            return Rows(axis, rows, outer)
    return None


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _get(node: fx.Node, operands: Operands, position: int, name: str) -> Operand | None:
    value = _argument(node, position, name)
    return operands.get(value) if isinstance(value, fx.Node) else None


def _only(first: Operand | None, operands: Operands) -> Rows | None:
    """Return the rows of ``first`` if every other operand is the same for all samples."""
    if first is None or not isinstance(first.state, Rows):
        return None
    others = [operand for operand in operands.values() if operand is not first]
    return first.state if all(isinstance(operand.state, Fixed) for operand in others) else None


def _keeps_all_but(trailing: Callable[[fx.Node], int]) -> Any:
    """Rule of operators that mix only the last ``trailing`` axes of their first operand."""

    def rule(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
        first = _get(node, operands, 0, "input")
        rows = _only(first, operands)
        if rows is None or first is None:
            return None
        return rows if rows.axis < len(first.shape) - trailing(node) else None

    return rule


def _softmax(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    rows = _only(_get(node, operands, 0, "self"), operands)
    dim = _argument(node, 1, "dim")
    return rows if rows is not None and isinstance(dim, int) and dim % len(shape) != rows.axis else None


def _attention(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    parts = [_get(node, operands, i, name) for i, name in enumerate(("query", "key", "value"))]
    if any(part is None or not isinstance(part.state, Rows) for part in parts):
        return None
    # query, key and value [..., length, width]: samples on one and the same leading axis of all three. A mask has them
    # on the same axis, counted from the end, or the same values for all samples (no such axis, or of size one).
    states = {part.state for part in parts if part is not None}
    if len(states) != 1:
        return None
    (rows,) = states
    if not isinstance(rows, Rows) or rows.axis >= len(shape) - 2:
        return None
    mask = _get(node, operands, 3, "attn_mask")
    if mask is None:
        return rows
    axis = rows.axis - (len(shape) - len(mask.shape))
    if isinstance(mask.state, Rows):
        return rows if mask.state == Rows(axis, rows.rows, rows.outer) else None
    return rows if axis < 0 or mask.shape[axis] == 1 else None


def _matmul(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    left, right = _get(node, operands, 0, "self"), _get(node, operands, 1, "other")
    if left is None or right is None or not isinstance(left.state, Rows):
        return None
    # [.., samples, .., k] @ weight [k, m] keeps all axes but the last; [samples, .., m, k] @ [samples, .., k, n], both
    # with samples on one batch axis, is one product a sample. left @ right.T of two towers' features is neither.
    if isinstance(right.state, Fixed) and len(right.shape) == 2 and len(left.shape) >= 2:
        return left.state if left.state.axis < len(left.shape) - 1 else None
    is_batched = len(left.shape) == len(right.shape) >= 3 and left.state == right.state
    return left.state if is_batched and left.state.axis < len(left.shape) - 2 else None


def _transpose(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    (operand,) = operands.values()
    if not isinstance(operand.state, Rows):
        return None
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [int(d) % len(shape) for d in _argument(node, 1, "dims", ())]
    elif node.target is aten.transpose.int:
        a, b = (int(_argument(node, i, f"dim{i - 1}", 0)) % len(shape) for i in (1, 2))
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return dataclasses.replace(operand.state, axis=order.index(operand.state.axis))


def _slice(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    operand = _get(node, operands, 0, "self")
    rows = _only(operand, operands)
    if rows is None or operand is None:
        return None
    dim = int(_argument(node, 1, "dim", 0)) % len(operand.shape)
    # along the samples only a slice of everything is harmless; ``select`` takes its axis out of the shape
    if dim == rows.axis:
        return rows if shape == operand.shape else None
    is_removed = node.target is aten.select.int and dim < rows.axis
    return dataclasses.replace(rows, axis=rows.axis - 1) if is_removed else rows


def _concatenate(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    states = {operand.state for operand in operands.values()}
    dim = int(_argument(node, 1, "dim", 0)) % len(shape)
    if len(states) != 1 or any(len(operand.shape) != len(shape) for operand in operands.values()):
        return None
    (state,) = states
    return state if isinstance(state, Rows) and state.axis != dim else None


def _reduce(node: fx.Node, operands: Operands, shape: tuple[int, ...]) -> Rows | None:
    (operand,) = operands.values()
    rank = len(operand.shape)
    dims = _argument(node, 1, "dim", None)
    if not isinstance(operand.state, Rows) or dims is None or dims == []:
        return None
    # mean over axes (1, 2) of [16, 4, 4, 8 samples]: without keepdim the samples' axis 3 becomes axis 1
    reduced = {int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if operand.state.axis in reduced:
        return None
    gone = sum(d < operand.state.axis for d in reduced) if len(shape) < rank else 0
    return dataclasses.replace(operand.state, axis=operand.state.axis - gone)


def _layer_norm_axes(node: fx.Node) -> int:
    sizes = _argument(node, 1, "normalized_shape")
    return len(sizes) if isinstance(sizes, (list, tuple)) else 1


_RULES: dict[Any, Callable[[fx.Node, Operands, tuple[int, ...]], Rows | None]] = {
    aten.linear.default: _keeps_all_but(lambda node: 1),
    aten.layer_norm.default: _keeps_all_but(_layer_norm_axes),
    aten.rms_norm.default: _keeps_all_but(_layer_norm_axes),
    aten.conv1d.default: _keeps_all_but(lambda node: 2),
    aten.conv2d.default: _keeps_all_but(lambda node: 3),
    aten.conv3d.default: _keeps_all_but(lambda node: 4),
    aten.embedding.default: lambda node, operands, shape: _only(_get(node, operands, 1, "indices"), operands),
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _softmax,
    aten.scaled_dot_product_attention.default: _attention,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.t.default: _transpose,
    aten.numpy_T.default: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _slice,
    aten.cat.default: _concatenate,
    aten.mean.dim: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.amax.default: _reduce,
    aten.argmax.default: _reduce,
}
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
