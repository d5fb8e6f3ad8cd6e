"""Along which axis an operator's result is cut where its operands are: one rule for each kind of operator.

Each rule proves that the operator, on a rank's parts of its operands, yields that rank's part of its result.
What it reads whole it says (`OperandReads.whole`), and what must be cut for it too (`OperandReads.cut`); of anything
else it says that it cannot (`NotSharded`).

Source: this project
Tests: tests/capture/test_sharding.py
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AxisCut:
    """An axis and the sizes of its parts, as of `TensorShard`; ``origin`` is the linear operator it comes from."""

    axis: int
    parts: tuple[int, ...]
    origin: fx.Node

    def at(self, axis: int, parts: tuple[int, ...] | None = None) -> AxisCut:
        """Return the same cut along another axis."""
        return AxisCut(axis, self.parts if parts is None else parts, self.origin)


class NotSharded(Exception):
    """An operator cannot compute on parts: why.

    The text is part of the graph's fingerprint: other words refuse saved plans.
    """


class NeedsParts(Exception):
    """A linear operator's result is split: it must be cut part by part."""

    def __init__(self, origin: fx.Node, parts: tuple[int, ...]) -> None:
        super().__init__(f"is taken apart into {parts}")
        self.origin, self.parts = origin, parts


@dataclass(slots=True, kw_only=True)
class OperandReads:
    """How operands are cut so far, and what operators that compute on parts read of them.

    Args:
        parameters: placeholder -> parameter.
    """

    parameters: Mapping[str, str]
    cuts: dict[fx.Node, AxisCut] = field(default_factory=dict)
    of_parts: dict[fx.Node, list[AxisCut]] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)
    losses: list[fx.Node] = field(default_factory=list)
    of_parameters: dict[fx.Node, AxisCut] = field(default_factory=dict)
    sliced: dict[fx.Node, AxisCut] = field(default_factory=dict)
    wholes: dict[fx.Node, None] = field(default_factory=dict)

    def get(self, operand: Any) -> AxisCut | None:
        """Return how an operand is cut."""
        return self.cuts.get(operand) or self.of_parameters.get(operand) or self.sliced.get(operand)

    def whole(self, operand: Any) -> None:
        """Read an operand whole."""
        if not isinstance(operand, fx.Node) or operand.op == "get_attr":
            return
        if self.get(operand) is not None or operand in self.of_parts:
            raise NotSharded("reads parts where it takes a whole")
        self.wholes[operand] = None

    def cut(self, operand: fx.Node, cut: AxisCut) -> None:
        """Read a part of an operand: it must be cut so, or is from now on."""
        known = self.get(operand)
        if known is not None:
            if (known.axis, known.parts) != (cut.axis, cut.parts):
                raise NotSharded("reads parts of unlike axes")
            return
        if operand in self.wholes or operand in self.sums or operand in self.losses:
            raise NotSharded("reads parts of what is whole")
        if operand.name in self.parameters:
            self.of_parameters[operand] = cut
            return
        self.note_sliced(operand)
        self.sliced[operand] = cut

    def note_sliced(self, operand: fx.Node) -> None:
        """Take note that a part is read of a whole operand; raise where something else is to be tried."""


Rule = Callable[[fx.Node, OperandReads], AxisCut | Sequence[AxisCut]]


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's one tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise NotSharded("has several results")
    return tuple(value.shape)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument, positional or by keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _one(node: fx.Node, reads: OperandReads) -> tuple[fx.Node, AxisCut]:
    """Return an operator's first operand, which is cut."""
    operand = node.args[0]
    found = reads.get(operand)
    if not isinstance(operand, fx.Node) or found is None:
        raise NotSharded("reads a part where it takes a whole")
    return operand, found


def _own_axis(axis: Any, dims: int) -> int:
    return int(axis) % dims if dims else 0


def aligned(node: fx.Node, operands: Sequence[Any], reads: OperandReads, *, shape: Sequence[int]) -> AxisCut:
    """Return how a result of ``shape`` is cut that broadcasts its operands.

    scores [B, H, T, S] cut at 1     bias [1, H, T, S]  is cut at 1 too
                                     mask [B, 1, T, S]  is read whole, by all heads
    """
    tensors = [each for each in operands if isinstance(each, fx.Node)]
    known = [(each, found) for each in tensors if (found := reads.get(each)) is not None]
    if not known:
        raise NotSharded("reads a part where it takes a whole")
    first, found = known[0]
    axis = found.axis + len(shape) - len(shape_of(first))
    result = found.at(axis)
    if shape[axis] != sum(result.parts):
        raise NotSharded("repeats what is cut")
    for each in tensors:
        own = shape_of(each)
        place = axis - (len(shape) - len(own))
        if place < 0 or own[place] != shape[axis]:
            if reads.get(each) is not None:
                raise NotSharded("reads parts of unlike axes")
            reads.whole(each)
        else:
            reads.cut(each, result.at(place))
    return result


def pointwise(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Every element by itself."""
    return aligned(node, node.all_input_nodes, reads, shape=shape_of(node))


def same(node: fx.Node, reads: OperandReads) -> AxisCut:
    """The first operand again, perhaps copied or cast; others decide types only."""
    return _one(node, reads)[1]


def feature_dropout(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Whole features, those of the first two axes, dropped together: one draw for all that lies behind."""
    _, found = _one(node, reads)
    if found.axis > 1:
        raise NotSharded("drops as one what is cut")
    return found


def view(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Axes split and joined: what is cut must be, or become, the outermost of those that are joined."""
    operand, found = _one(node, reads)
    before, after = shape_of(operand), shape_of(node)
    # [2, 8, 32] cut at 2 becomes [2, 8, 4, 8]: the group (2) -> (2, 3) has it, and 4 heads are cut in its place.
    # [2, 8, 4, 8] cut at 2 becomes [2, 8, 32]: the group (2, 3) -> (2), as heads are the outer of the two.
    # [2, 4, 8, 8] cut at 1 becomes [8, 8, 8]: refused, as each sample's heads would not be adjacent.
    for old, new in _groups(before, after):
        if found.axis in old:
            return _regrouped(found, [(i, before[i]) for i in old], [(i, after[i]) for i in new])
    raise NotSharded("reshapes what is cut")


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return which axes become which: the shortest runs of both with one product.

    [2, 8, 32] to [2, 8, 4, 8]: (0) (0), (1) (1), (2) (2, 3).
    """
    groups: list[tuple[list[int], list[int]]] = []
    # ``a`` and ``b`` are the products of the group so far: whichever is behind takes its next axis, until they agree.
    # Sizes of one go with the group that they are met in; at the end there may be groups of them alone.
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = list[int](), list[int]()
        a = b = 1
        while True:
            if i < len(before) and (a < b or (not old and a == b)):
                a *= before[i]
                old.append(i)
                i += 1
            elif j < len(after) and (b < a or not new):
                b *= after[j]
                new.append(j)
                j += 1
            elif a == b:
                break
            else:
                raise NotSharded("reshapes what is cut")
        groups.append((old, new))
    return groups


def _regrouped(found: AxisCut, old: list[tuple[int, int]], new: list[tuple[int, int]]) -> AxisCut:
    # ``inner``: elements behind the axis that is cut, inside its group. Of [8, 4 x 8] -> [8, 32] that is 8: parts of 4
    # heads are parts of 32 features, each eight times as long, and the borders between ranks fall together.
    sizes = {axis: size for axis, size in old}
    if any(size != 1 for axis, size in old if axis < found.axis):
        raise NotSharded("joins what is cut behind another axis")
    wide = [(axis, size) for axis, size in new if size != 1]
    inner = math.prod(size for axis, size in old if axis > found.axis)
    if not wide:
        raise NotSharded("reshapes what is cut")
    if len(found.parts) > 1:
        if wide[0][1] == sizes[found.axis] and inner == math.prod(s for _, s in wide[1:]):
            return found.at(wide[0][0])
        # queries, keys and values one behind the other become an axis of their own: [3 x 32] to [3, 4, 8]
        number = len(found.parts)
        if len(set(found.parts)) == 1 and wide[0][1] == number and len(wide) > 1:
            return found.at(wide[1][0], (wide[1][1],))
        raise NotSharded("reshapes what is cut in parts")
    return found.at(wide[0][0], (wide[0][1],))


def permute(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Axes in another order."""
    _, found = _one(node, reads)
    dims = len(shape_of(node))
    if node.target is aten.permute.default:
        order = [_own_axis(axis, dims) for axis in argument(node, 1, "dims")]
    elif node.target is aten.transpose.int:
        order = list(range(dims))
        a, b = _own_axis(node.args[1], dims), _own_axis(node.args[2], dims)
        order[a], order[b] = order[b], order[a]
    else:
        order = list(reversed(range(dims)))
    return found.at(order.index(found.axis))


def unsqueeze(node: fx.Node, reads: OperandReads) -> AxisCut:
    """One axis more."""
    _, found = _one(node, reads)
    new = _own_axis(node.args[1], len(shape_of(node)))
    return found.at(found.axis + (new <= found.axis))


def squeeze(node: fx.Node, reads: OperandReads) -> AxisCut:
    """One axis less."""
    operand, found = _one(node, reads)
    gone = _own_axis(node.args[1], len(shape_of(operand)))
    if gone == found.axis:
        raise NotSharded("takes away the axis that is cut")
    return found.at(found.axis - (gone < found.axis))


def expand(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Axes of one repeated."""
    operand, found = _one(node, reads)
    axis = found.axis + len(shape_of(node)) - len(shape_of(operand))
    if shape_of(node)[axis] != shape_of(operand)[found.axis]:
        raise NotSharded("repeats what is cut")
    return found.at(axis)


def select(node: fx.Node, reads: OperandReads) -> AxisCut:
    """One element of an axis."""
    operand, found = _one(node, reads)
    shape = shape_of(operand)
    axis = _own_axis(argument(node, 1, "dim", 0), len(shape))
    if axis == found.axis:
        _need_parts(found, shape[axis])
    return found.at(found.axis - (axis < found.axis))


def unbind(node: fx.Node, reads: OperandReads) -> Sequence[AxisCut]:
    """Every element of an axis."""
    return [select(node, reads)] * len(node.meta["val"])


def _need_parts(found: AxisCut, number: int) -> None:
    # qkv [2, 5, 3, 4, 8] made of 96 features, of which ``qkv[:, :, 0]`` is taken: three parts of 32, one behind the
    # other, each of which is cut by itself
    features = shape_of(found.origin)[-1]
    if len(found.parts) > 1 or features % number:
        raise NotSharded("takes one element of the axis that is cut")
    raise NeedsParts(found.origin, (features // number,) * number)


def slices(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A stretch of an axis: of another one, or of whole parts of the one that is cut."""
    operand, found = _one(node, reads)
    shape = shape_of(operand)
    axis = _own_axis(argument(node, 1, "dim", 0), len(shape))
    if axis != found.axis:
        return found
    if argument(node, 4, "step", 1) != 1:
        raise NotSharded("takes every other element of the axis that is cut")
    first, last = _stretch(node, shape[axis])
    borders = [0, *itertools.accumulate(found.parts)]
    if first not in borders or last not in borders:
        if shape[axis] != shape_of(found.origin)[-1]:
            raise NotSharded("takes a stretch of the axis that is cut")
        # q = qkv[..., :32], k = qkv[..., 32:64], v = qkv[..., 64:]: the borders of all of them
        others = [user for user in operand.users if user.target is aten.slice.Tensor]
        ends = {end for user in others for end in _stretch(user, shape[axis])}
        new = sorted({*borders, *ends})
        raise NeedsParts(found.origin, tuple(b - a for a, b in itertools.pairwise(new)))
    return found.at(axis, found.parts[borders.index(first) : borders.index(last)])


def _stretch(node: fx.Node, size: int) -> tuple[int, int]:
    first, last, _ = slice(argument(node, 2, "start"), argument(node, 3, "end")).indices(size)
    return first, last


def split(node: fx.Node, reads: OperandReads) -> Sequence[AxisCut]:
    """An axis that is split: another one, or the parts of the one that is cut."""
    operand, found = _one(node, reads)
    axis = _own_axis(argument(node, 2, "dim", 0), len(shape_of(operand)))
    sizes = tuple(int(value.shape[axis]) for value in node.meta["val"])
    if axis != found.axis:
        return [found] * len(sizes)
    # c_attn of a GPT-2: 96 features are split into 32, 32 and 32. Cut as one, a rank would hold 48 of them, one and a
    # half of the three; so the linear operator must be cut part by part, and then each result is cut as a whole.
    if sizes != found.parts:
        if sum(sizes) != shape_of(found.origin)[-1]:
            raise NotSharded("takes apart the axis that is cut")
        raise NeedsParts(found.origin, sizes)
    return [found.at(axis, (size,)) for size in sizes]


def cat(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Tensors one behind the other, along another axis than the one that is cut."""
    tensors: Any = node.args[0]
    known = [found for each in tensors if (found := reads.get(each)) is not None]
    axis = _own_axis(argument(node, 1, "dim", 0), len(shape_of(node)))
    if known[0].axis == axis:
        raise NotSharded("joins tensors along the axis that is cut")
    for each in tensors:
        reads.cut(each, known[0])
    return known[0]


def softmax(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A softmax over another axis."""
    operand, found = _one(node, reads)
    if _own_axis(node.args[1], len(shape_of(operand))) == found.axis:
        raise NotSharded("sums over the axis that is cut")
    return found


def reduction(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A sum, a mean or the like over other axes."""
    operand, found = _one(node, reads)
    dims = len(shape_of(operand))
    axes = argument(node, 1, "dim")
    if axes is None or axes == []:
        axes = range(dims)
    gone = {_own_axis(axis, dims) for axis in (axes if isinstance(axes, (list, tuple, range)) else (axes,))}
    if found.axis in gone:
        raise NotSharded("sums over the axis that is cut")
    keeps = bool(argument(node, 2, "keepdim", False))
    return found if keeps else found.at(found.axis - sum(axis < found.axis for axis in gone))


def norm(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A normalisation over the last axes, with weights of these."""
    operand, found = _one(node, reads)
    if found.axis >= len(shape_of(operand)) - len(argument(node, 1, "normalized_shape")):
        raise NotSharded("normalises over the axis that is cut")
    for each in node.all_input_nodes:
        if each is not operand:
            reads.whole(each)
    return found


def matmul(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A product of matrices, along an axis of many of them, the rows of the left or the columns of the right."""
    left, right = node.args[0], node.args[1]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    shape, dims = shape_of(node), (len(shape_of(left)), len(shape_of(right)))
    if min(dims) < 2:
        raise NotSharded("is a product with a vector")
    cuts = reads.get(left), reads.get(right)
    for operand, found, size, rows in ((left, cuts[0], dims[0], -2), (right, cuts[1], dims[1], -1)):
        if found is None:
            continue
        if found.axis == size + rows:
            other = right if operand is left else left
            if reads.get(other) is not None:
                raise NotSharded("reads parts of unlike axes")
            reads.whole(other)
            return found.at(len(shape) + rows)
        if found.axis >= size - 2:
            raise NotSharded("sums over the axis that is cut")
    # scores [2, 4, 8, 8] of queries and keys cut at 1: each rank multiplies its own heads. A right operand of one head
    # for all ([2, 1, 8, 8]) is read whole by every rank.
    # of many matrices: the axes in front of the last two are broadcast
    known = cuts[0] or cuts[1]
    assert known is not None
    axis = known.axis + len(shape) - (dims[0] if cuts[0] else dims[1])
    for operand, size in ((left, dims[0]), (right, dims[1])):
        place = axis - (len(shape) - size)
        if place < 0 or shape_of(operand)[place] != shape[axis]:
            reads.whole(operand)
        else:
            reads.cut(operand, known.at(place))
    return known.at(axis)


def attention(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Attention of each head by itself; groups of keys and values are cut as the heads that read them."""
    # queries [2, 8, 16, 64] cut at axis 1 (8 heads), keys and values [2, 2, 16, 64] of two groups (``enable_gqa``): cut
    # at axis 1 as well. Rank 0 of 2 has heads 0 to 3, which read group 0: head h reads group h // 4, on each rank too.
    query, key, value = (each for each in node.args[:3] if isinstance(each, fx.Node))
    shape = shape_of(query)
    known = next(found for each in (query, key, value) if (found := reads.get(each)) is not None)
    axis = known.axis
    if axis >= len(shape) - 2 or len(known.parts) > 1 or len(shape_of(key)) != len(shape):
        raise NotSharded("takes parts of heads")
    for each in (query, key, value):
        reads.cut(each, known.at(axis, (shape_of(each)[axis],)))
    mask = argument(node, 3, "attn_mask")
    if isinstance(mask, fx.Node):
        own = shape_of(mask)
        place = axis - (len(shape) - len(own))
        if place < 0 or own[place] == 1:
            reads.whole(mask)
        else:
            reads.cut(mask, known.at(place, (own[place],)))
    return known.at(axis, (shape[axis],))


def repeat_interleave(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Every element of an axis some times over."""
    operand, found = _one(node, reads)
    axis = argument(node, 2, "dim")
    if axis is None or not isinstance(node.args[1], int) or len(found.parts) > 1:
        raise NotSharded("repeats what is cut")
    if _own_axis(axis, len(shape_of(operand))) != found.axis:
        return found
    return found.at(found.axis, (found.parts[0] * node.args[1],))


_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), view),
    **dict.fromkeys((aten.flatten.using_ints, aten.unflatten.int), view),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default), permute),
    **dict.fromkeys((aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default), same),
    **dict.fromkeys((aten.contiguous.default, aten.alias.default, aten.detach.default), same),
    aten.dropout.default: same,
    aten.feature_dropout.default: feature_dropout,
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), pointwise),
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.dim: squeeze,
    aten.expand.default: expand,
    aten.select.int: select,
    aten.unbind.int: unbind,
    aten.slice.Tensor: slices,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default), split),
    aten.cat.default: cat,
    **dict.fromkeys((aten.softmax.int, aten._softmax.default, aten.log_softmax.int), softmax),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default), reduction),
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), norm),
    **dict.fromkeys((aten.matmul.default, aten.bmm.default), matmul),
    aten.scaled_dot_product_attention.default: attention,
    aten.repeat_interleave.self_int: repeat_interleave,
}  # fmt: skip


def rule_of(node: fx.Node) -> Rule:
    """Return the rule of an operator.

    Raises:
        NotSharded: there is none.
    """
    rule = _RULES.get(node.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return pointwise
    if rule is None:
        raise NotSharded("has no rule for parts of its operands")
    return rule


_OF_POSITIONS = frozenset((pointwise, same, feature_dropout, norm, softmax, reduction))
"""Rules of operators that take no sizes: they compute on any part of another axis, however long it is."""


def position_rule_of(node: fx.Node) -> Rule:
    """Return the rule of an operator that treats positions alike.

    Raises:
        NotSharded: it does not, or it takes their number.
    """
    if node.target is aten.slice.Tensor:
        begin, end = argument(node, 2, "start"), argument(node, 3, "end")
        if begin in (0, None) and (end is None or (isinstance(end, int) and end >= 1 << 62)):
            if argument(node, 4, "step", 1) == 1:
                return same
        return _other_slice
    rule = rule_of(node)
    if rule not in _OF_POSITIONS:
        raise NotSharded("takes the number of positions, or mixes them")
    return rule


def _other_slice(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A stretch of another axis."""
    operand, found = _one(node, reads)
    if _own_axis(argument(node, 1, "dim", 0), len(shape_of(operand))) == found.axis:
        raise NotSharded("takes a stretch of the positions")
    return found


def _of_rows(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A linear operator, whatever its weights are: every row by itself."""
    operand: Any = node.args[1] if node.target is aten.addmm.default else node.args[0]
    found, shape = reads.get(operand), shape_of(node)
    if found is None or found.axis == len(shape) - 1:
        raise NotSharded("sums over the axis that is cut")
    for each in node.all_input_nodes:
        if each is not operand:
            reads.whole(each)
    if node.target is aten.addmm.default and len(shape_of(node.args[0])) == 2:
        raise NotSharded("adds a matrix")
    return found


def _added_product(node: fx.Node, reads: OperandReads) -> AxisCut:
    """A product of many matrices, and what is added to it, by rows of the left ones."""
    added, left, right = node.args[:3]
    found = reads.get(left)
    if found is None or found.axis != 1:
        raise NotSharded("sums over the axis that is cut")
    reads.whole(right)
    assert isinstance(added, fx.Node)
    own = shape_of(added)
    if len(own) < 2 or own[-2] == 1:
        reads.whole(added)
    else:
        reads.cut(added, found.at(len(own) - 2))
    return found


def _lookup(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Rows of a table, by numbers that are cut."""
    table, numbers = node.args[0], node.args[1]
    found = reads.get(numbers)
    if found is None:
        raise NotSharded("reads a part where it takes a whole")
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        raise NotSharded("counts how often a row is read")
    reads.whole(table)
    return found


def _reshaped(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Axes split and joined; of samples and positions, in this order, rows are made, and the other way round."""
    operand, found = _one(node, reads)
    before, after = shape_of(operand), shape_of(node)
    for old, new in _groups(before, after):
        wide = [axis for axis in new if after[axis] != 1]
        if found.axis not in old or len(found.parts) > 1 or len(wide) != 1:
            continue
        outer = [before[axis] for axis in old if axis < found.axis]
        inner = [before[axis] for axis in old if axis > found.axis]
        if math.prod(inner) == 1 and math.prod(outer) > 1:
            return found.at(wide[0], found.parts * math.prod(outer))
    return view(node, reads)


def _largest(node: fx.Node, reads: OperandReads) -> Sequence[AxisCut]:
    """The largest numbers along another axis, and where they are."""
    operand, found = _one(node, reads)
    if _own_axis(argument(node, 2, "dim", -1), len(shape_of(operand))) == found.axis:
        raise NotSharded("mixes what is cut")
    return [found] * len(node.meta["val"])


def _picked(node: fx.Node, reads: OperandReads) -> AxisCut:
    """One element of another axis for each number, which are cut as what they are taken from."""
    operand, found = _one(node, reads)
    numbers = node.args[2]
    assert isinstance(numbers, fx.Node)
    if _own_axis(node.args[1], len(shape_of(operand))) == found.axis:
        raise NotSharded("mixes what is cut")
    reads.cut(numbers, found)
    return found


def _indexed(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Elements of other axes, one beside the other, by numbers that are read whole."""
    _, found = _one(node, reads)
    numbers: Any = node.args[1]
    axes = [axis for axis, each in enumerate(numbers) if each is not None]
    if found.axis in axes or axes != list(range(axes[0], axes[-1] + 1)):
        raise NotSharded("takes elements of the axis that is cut")
    for axis in axes:
        reads.whole(numbers[axis])
    made = max(len(shape_of(numbers[axis])) for axis in axes)
    return found if found.axis < axes[0] else found.at(found.axis - len(axes) + made)


def _queries(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Attention of some queries to all keys."""
    query, found = _one(node, reads)
    shape, mask = shape_of(query), argument(node, 3, "attn_mask")
    if found.axis != len(shape) - 2 or argument(node, 5, "is_causal", False):
        raise NotSharded("mixes what is cut")
    for each in node.args[1:3]:
        reads.whole(each)
    if isinstance(mask, fx.Node):
        own = shape_of(mask)
        if own[-2] == 1:
            reads.whole(mask)
        else:
            reads.cut(mask, found.at(len(own) - 2))
    return found


def _labels(node: fx.Node, reads: OperandReads) -> AxisCut:
    """Cross entropy of every row by itself."""
    logits, target = node.args[0], node.args[1]
    found, dims = reads.get(logits), len(shape_of(logits))
    if found is None or not isinstance(target, fx.Node) or len(shape_of(target)) != dims - 1:
        raise NotSharded("reads a part where it takes a whole")
    is_plain = argument(node, 2, "weight") is None and not argument(node, 5, "label_smoothing", 0.0)
    if found.axis == min(dims - 1, 1) or not is_plain:
        raise NotSharded("has parts of classes, weights of them, or smoothed labels")
    reads.cut(target, found.at(found.axis - (found.axis > 1)))
    return found.at(found.axis - (found.axis > 1))


_OF_CONTEXT: Mapping[Any, Rule] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _reshaped),
    **dict.fromkeys((aten.flatten.using_ints, aten.unflatten.int), _reshaped),
    **dict.fromkeys((aten.linear.default, aten.addmm.default), _of_rows),
    aten.mm.default: matmul,
    aten.baddbmm.default: _added_product,
    aten.topk.default: _largest,
    aten.gather.default: _picked,
    aten.index.Tensor: _indexed,
    aten.argmax.default: reduction,
    aten.cumsum.default: softmax,
    aten.embedding.default: _lookup,
    aten.scaled_dot_product_attention.default: _queries,
    aten.cross_entropy_loss.default: _labels,
}
"""Rules of positions alone: no part of a head is made of them."""


def context_rule_of(node: fx.Node) -> Rule:
    """Return the rule of an operator of which each context rank computes its positions, or rows made of them.

    Raises:
        NotSharded: there is none.
    """
    rule = _OF_CONTEXT.get(node.target)
    if rule is not None:
        return rule
    return position_rule_of(node) if node.target is aten.slice.Tensor else rule_of(node)


FLATTENS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)


def flattened(node: fx.Node) -> fx.Node | None:
    """Return what an operator makes rows of: [2, 5, 32] of [10, 32]; None where it does anything else."""
    source = node.args[0] if node.target in FLATTENS else None
    if not isinstance(source, fx.Node):
        return None
    before, after = shape_of(source), shape_of(node)
    return source if len(after) == 2 and len(before) == 3 and before[-1] == after[-1] else None


def is_part(node: fx.Node) -> bool:
    """Return whether a node takes one of several results."""
    return node.target is operator.getitem
