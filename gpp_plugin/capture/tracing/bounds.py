"""Tensors whose values are not known while a model is traced, but lie between two that are.

Which token a frozen codebook finds for a patch depends on its weights; that it is none of the labels' padding does not:

    codes = logits.argmax(1)          unknown             low  0  0  0  0       high  9  9  9  9
    codes[~is_asked] = -100           unknown             low  0  0 -100 0      high  9  9 -100 9
    codes != -100                     known: the two bounds agree everywhere    1  1  0  1

The bounds are tensors of the trace like any other, so that what a comparison finds is known, recorded and guarded as
all that follows from the batch alone; what nobody reads of them is dead in the graph.

Source: this project
Tests: tests/capture/test_values.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_PLACING = frozenset(
    ("__getitem__", "__setitem__", "masked_fill", "masked_fill_", "where", "cat", "stack", "clone", "contiguous")
    + ("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as")
    + ("repeat", "permute", "transpose", "movedim", "select", "narrow", "index_select", "gather", "detach", "long")
    + ("int", "unbind", "split", "chunk")
)  # fmt: skip
"""Functions that put elements elsewhere and change none: what lies between two tensors does so behind them."""
_MONOTONE = {
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "__lt__": torch.lt, "__le__": torch.le, "__gt__": torch.gt, "__ge__": torch.ge,
}  # fmt: skip
_EQUAL = {"eq": True, "__eq__": True, "ne": False, "__ne__": False}
"""Comparisons; the value that equal operands give."""


@dataclass(slots=True)
class _Between:
    """A tensor, held so that its id stays its own, and its bounds."""

    tensor: Tensor
    low: Tensor
    high: Tensor


class Bounds:
    """What is known of tensors that are not.

    Args:
        is_known: whether a tensor's values are.
    """

    def __init__(self, is_known: Callable[[Tensor], bool]) -> None:
        self._is_known = is_known
        self._between: dict[int, _Between] = {}

    def compare(self, name: str, args: Sequence[Any]) -> Tensor | None:
        """Return what a comparison yields if that is the same whatever the unknown values are; to be called traced."""
        if len(args) != 2 or (name not in _MONOTONE and name not in _EQUAL):
            return None
        bounded, other = args
        if not self._is_bounded(bounded) or (isinstance(other, Tensor) and not self._is_known(other)):
            return None
        between = self._between[id(bounded)]
        if name in _MONOTONE:
            value, at_most = (_MONOTONE[name](bound, other) for bound in (between.low, between.high))
            is_decided = value == at_most
        else:
            is_equal = (between.low == other) & (between.high == other)
            is_decided = is_equal | (between.low > other) | (between.high < other)
            value = is_equal if _EQUAL[name] else ~is_equal
        return value if bool(is_decided.all()) else None

    def follow(self, name: str, function: Callable[..., Any], arguments: Any, result: Any) -> None:
        """Learn the bounds of what a function made of unknown values, called where it is traced.

        Args:
            arguments: positional ones and those by keyword; what is written has been.
        """
        args, kwargs = arguments
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if name == "argmax" and isinstance(result, Tensor):
            dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
            most = args[0].numel() if dim is None else args[0].shape[dim]
            made = [
                torch.full(result.shape, n, dtype=result.dtype, device=result.device) for n in (0, most - 1)
            ]
            self._between[id(result)] = _Between(result, *made)
            return
        is_placed = any(map(self._is_bounded, tensors)) and all(
            self._is_known(tensor) or self._is_bounded(tensor) for tensor in tensors
        )
        if name not in _PLACING or not is_placed:
            return
        low, high = (function(*self._at(args, end), **self._at(kwargs, end)) for end in ("low", "high"))
        leaves = [
            [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)] for made in (result, low, high)
        ]
        for tensor, least, most in zip(*leaves, strict=True):
            if not self._is_bounded(tensor):  # in place: its bounds were written as it was
                self._between[id(tensor)] = _Between(tensor, least, most)

    def forget(self, written: Sequence[Tensor]) -> None:
        """Forget tensors that share memory with some that were written."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        for key, between in list(self._between.items()):
            if between.tensor.untyped_storage()._cdata in storages:
                del self._between[key]

    def is_written_alike(self, name: str, arguments: Any) -> bool:
        """Return whether a call writes the bounds of its first argument as it writes the argument."""
        args, kwargs = arguments
        rest = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        is_alike = name in ("__setitem__", "masked_fill_") and all(self._is_known(tensor) for tensor in rest)
        return is_alike and self._is_bounded(args[0])

    def _is_bounded(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._between

    def _at(self, value: Any, end: str) -> Any:
        """Return arguments with one bound of every tensor that has some."""

        def changed(leaf: Any) -> Any:
            return getattr(self._between[id(leaf)], end) if self._is_bounded(leaf) else leaf

        return tree_map(changed, value)


def made_of_a_shape(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a function makes of the shape and type of its first argument alone; None of any other function.

    ``zeros_like(hidden)`` is known though hidden is not.
    """
    like = args[0] if args else None
    if not isinstance(like, Tensor) or set(kwargs) - {"dtype", "device", "fill_value", "size"}:
        return None
    rest = [*args[1:], *(kwargs[key] for key in ("size", "fill_value") if key in kwargs)]
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(rest)):
        return None
    where: dict[str, Any] = {
        "dtype": kwargs.get("dtype") or like.dtype,
        "device": kwargs.get("device") or like.device,
    }
    if name in ("zeros_like", "ones_like"):
        return (torch.zeros if name == "zeros_like" else torch.ones)(like.shape, **where)
    if name == "full_like" and len(rest) == 1:
        return torch.full(like.shape, rest[0], **where)
    if name in ("new_zeros", "new_ones"):
        return (torch.zeros if name == "new_zeros" else torch.ones)(*rest, **where)
    if name == "new_full" and len(rest) == 2:
        return torch.full(*rest, **where)
    return None
