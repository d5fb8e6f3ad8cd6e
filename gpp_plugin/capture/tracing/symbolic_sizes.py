"""Sizes that an export left open: symbols in the graph's arguments and shapes, and the formulas they become.

An export with open axes has sizes of torch's own symbols, and operators that compute with them:

    sym_size(ids, 1) -> s0      add(s0, 1) -> s0 + 1      arange(add)

`fold_sizes` puts what such an operator yields where it was read, ``arange(s0 + 1)``, so that the graph has the
operators of one with sizes fixed, and differs from it in static arguments only. `SizeTexts` writes sizes down as
formulas.

Source: this project
Tests: tests/capture/test_lengths.py, tests/capture/test_values.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, statically_known_true
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.printers import PythonPrinter

from gpp_plugin.errors import CaptureError, first_line
from gpp_plugin.ir.size_formulas import Evaluate, SizeConditions, compile_formulas

# Tensors whose values are not known while a model is traced, but lie between two that are.
#
# Which token a frozen codebook finds for a patch depends on its weights; that it is none of the labels' padding does
# not:
#
#     codes = logits.argmax(1)          unknown             low  0  0  0  0       high  9  9  9  9
#     codes[~is_image] = -100           unknown             low  0  0 -100 0      high  9  9 -100 9
#     codes != -100                     known: the two bounds agree everywhere    1  1  0  1
#
# The bounds are tensors of the trace like any other, so that what a comparison finds is known, recorded and guarded as
# all that follows from the batch alone; what nobody reads of them is dead in the graph.

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
        tensors = tensors_in(arguments)
        if name == "argmax" and isinstance(result, Tensor):
            dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
            most = args[0].numel() if dim is None else args[0].shape[dim]
            ends = [
                torch.full(result.shape, n, dtype=result.dtype, device=result.device) for n in (0, most - 1)
            ]
            self._between[id(result)] = _Between(result, *ends)
            return
        is_placed = any(map(self._is_bounded, tensors)) and all(
            self._is_known(tensor) or self._is_bounded(tensor) for tensor in tensors
        )
        if name not in _PLACING or not is_placed:
            return
        low, high = (function(*self._at(args, end), **self._at(kwargs, end)) for end in ("low", "high"))
        for tensor, least, most in zip(*map(tensors_in, (result, low, high)), strict=True):
            if not self._is_bounded(tensor):  # in place: its bounds were written as it was
                self._between[id(tensor)] = _Between(tensor, least, most)

    def forget(self, written: Sequence[Tensor]) -> None:
        """Drop tensors that share memory with some that were written."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        for key, between in list(self._between.items()):
            if between.tensor.untyped_storage()._cdata in storages:
                del self._between[key]

    def is_written_alike(self, name: str, arguments: Any) -> bool:
        """Return whether a call writes the bounds of its first argument as it writes the argument."""
        args, kwargs = arguments
        is_alike = name in ("__setitem__", "masked_fill_") and self._is_bounded(args[0])
        return is_alike and all(map(self._is_known, tensors_in((args[1:], kwargs))))

    def _is_bounded(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._between

    def _at(self, value: Any, end: str) -> Any:
        """Return arguments with one bound of every tensor that has some."""

        def changed(leaf: Any) -> Any:
            return getattr(self._between[id(leaf)], end) if self._is_bounded(leaf) else leaf

        return tree_map(changed, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def made_of_a_shape(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a function makes of the shape and type of its first argument alone; None of any other function.

    ``zeros_like(hidden)`` is known though hidden is not.
    """
    like = args[0] if args else None
    if not isinstance(like, Tensor) or set(kwargs) - {"dtype", "device", "fill_value", "size"}:
        return None
    rest = [*args[1:], *(kwargs[key] for key in ("size", "fill_value") if key in kwargs)]
    if tensors_in(rest):
        return None
    where: dict[str, Any] = {key: kwargs.get(key) or getattr(like, key) for key in ("dtype", "device")}
    makers: dict[str, Any] = {"zeros": torch.zeros, "ones": torch.ones}
    if name in ("zeros_like", "ones_like"):
        return makers[name[:-5]](like.shape, **where)
    if name in ("new_zeros", "new_ones"):
        return makers[name[4:]](*rest, **where)
    if name == "full_like" and len(rest) == 1:
        return torch.full(like.shape, rest[0], **where)
    return torch.full(*rest, **where) if name == "new_full" and len(rest) == 2 else None


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True, eq=False)
class OpenSize:
    """A size that was left open, among the arguments of an operator: a graph takes torch's own symbols for nodes."""

    value: Any

    def __repr__(self) -> str:
        """Return the expression."""
        return str(self.value)


def is_open(size: object) -> bool:
    """Return whether a size, of a shape or among arguments, is a symbol or made of some."""
    return isinstance(size, (*_SYMBOLIC, OpenSize))


def argument_of(size: Any) -> Any:
    """Return a size of a shape as an operator's argument."""
    return OpenSize(size) if isinstance(size, _SYMBOLIC) else size


def has_shape_of(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes' tensors have one shape, whatever the symbols are."""
    a, b = node.meta["val"].shape, other.meta["val"].shape
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def fold_sizes(graph: fx.Graph) -> None:
    """Replace operators that compute sizes by the sizes, where they are read; they are dead then.

    Raises:
        CaptureError: a size is a value of a tensor.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, _SYMBOLIC) or not node.users:
            continue
        if free_unbacked_symbols(value):
            raise CaptureError(f"{node.name} is a size that depends on values")
        fixed = _fixed(value)

        def folded(argument: Any, node: fx.Node = node, fixed: Any = fixed) -> Any:
            return fixed if argument is node else argument

        for user in list(node.users):
            user.args, user.kwargs = map_aggregate(user.args, folded), map_aggregate(user.kwargs, folded)


def _fixed(value: Any) -> Any:
    """Return a size as a plain number where it is one after all."""
    expression = value.node.expr
    if not expression.is_number and expression not in (True, False):
        return OpenSize(value)
    return {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)](expression)


def with_sizes(value: Any, size_of: Callable[[Any], Any]) -> Any:
    """Return an operator's arguments with every symbolic size in them replaced."""
    return map_aggregate(value, lambda part: size_of(part) if is_open(part) else part)


def sizes_in(node: fx.Node) -> Iterator[Any]:
    """Return the symbolic sizes among an operator's arguments."""
    found: list[Any] = []
    with_sizes((node.args, node.kwargs), lambda size: found.append(size) or size)  # type: ignore[func-returns-value]
    return iter(found)


class SizeTexts:
    """Writes the sizes of one export down.

    Args:
        inputs: batch key -> the export's own tensor for it, whose axes' sizes are symbols or numbers.

    Raises:
        CaptureError: a symbol is no size of an axis by itself, or torch says something of it that is no formula.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        sizes: list[Any] = [size for tensor in inputs.values() for size in tensor.shape]
        envs = (size.node.shape_env for size in sizes if isinstance(size, _SYMBOLIC))
        self._env: ShapeEnv | None = next(envs, None)
        # torch's symbol -> ours, in the order of the batch's keys; equal lengths of two keys are one symbol to torch
        self._names: dict[Any, str] = {}
        symbols: dict[str, tuple[str, int]] = {}
        for key, tensor in inputs.items():
            for axis, size in enumerate(tensor.shape):
                expression = self._expression(size)
                if is_open(size) and expression.is_Symbol and expression not in self._names:
                    name = self._names[expression] = f"s{len(self._names)}"
                    symbols[name] = (key, axis)
        shapes = {key: tuple(self.text(size) for size in tensor.shape) for key, tensor in inputs.items()}
        self._symbols, self._shapes = symbols, shapes

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return the names of the symbols."""
        return tuple(self._symbols)

    def conditions(self) -> SizeConditions:
        """Return for which batches the export holds; to be called when nothing looks at its sizes any more.

        Whatever Python code tested of a size (``length > 16``) was decided for the batch that was traced, and is a
        condition; so is what torch assumes of all sizes it leaves open, that they are no 0 and no 1.
        """
        conditions: dict[str, None] = {}
        if self._env is not None:
            for guard in self._env.guards:
                conditions[self._text(self._env.replace(guard.expr))] = None
            for symbol, name in self._names.items():
                bounds = self._env.var_to_range[symbol]
                conditions[f"{name} >= {max(int(bounds.lower), 2)}"] = None
        conditions.pop("True", None)
        return SizeConditions(symbols=self._symbols, shapes=self._shapes, conditions=tuple(conditions))

    def text(self, size: Any) -> str:
        """Return a size as a formula."""
        return self._text(self._expression(size)) if is_open(size) else repr(size)

    def compile(self, sizes: Sequence[Any]) -> Evaluate:
        """Return what evaluates sizes from the values of the symbols, in order."""
        return compile_formulas(self.symbols, [self.text(size) for size in sizes])

    def key(self, size: Any) -> Any:
        """Return what equal sizes have in common."""
        return self._expression(size) if is_open(size) else size

    def _expression(self, size: Any) -> Any:
        if not is_open(size):
            return size
        size = size.value if isinstance(size, OpenSize) else size
        return size.node.shape_env.replace(size.node.expr)

    def _text(self, expression: Any) -> str:
        unknown = set(getattr(expression, "free_symbols", ())) - self._names.keys()
        if unknown:
            raise CaptureError(f"size {expression} is of no axis of the batch")
        try:
            return str(_Renaming(self._names).doprint(expression))
        except Exception as error:  # an expression that torch's printer has no Python for
            raise CaptureError(f"size {expression} has no formula: {first_line(error)}") from error


class _Renaming(PythonPrinter):
    """Prints an expression of torch's symbols with our names of them."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, expr: Any) -> str:
        return self._names[expr]
