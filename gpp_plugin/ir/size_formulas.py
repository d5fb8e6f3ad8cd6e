"""Sizes as formulas of a batch's lengths: data that is evaluated without a tracer or an algebra system.

A *symbol* is the size of one axis of one entry of the batch: ``s0`` the number of columns of ``input_ids``. A *formula*
is Python text over symbols, as ``4*s0`` or ``s0//2 + 1``. Which texts are formulas is checked when they are compiled:
integers, symbols, arithmetic, comparisons, and the few functions that sizes are made with.

    captured for     input_ids [4, s0], labels [4, s1], where s1 >= 2
    a batch of       input_ids [4, 9], labels [4, 5]          -> (9, 5)
    a batch of       input_ids [4, 9], labels [4, 1]          -> refused: s1 >= 2 does not hold

Source: this project
Tests: tests/ir/test_size_formulas.py, tests/plan/test_planned_lengths.py
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Evaluate = Callable[..., tuple[Any, ...]]
"""Takes the values of all symbols in order and returns those of the formulas."""

_FUNCTIONS: dict[str, Any] = {
    "abs": abs, "bool": bool, "float": float, "int": int, "max": max, "min": min, "round": round,
}  # fmt: skip
_MATH = ("sqrt", "floor", "ceil", "trunc")
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Attribute, ast.Name,
    ast.Constant, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def compile_formulas(symbols: Sequence[str], texts: Sequence[str]) -> Evaluate:
    """Return what evaluates all formulas at once.

    >>> compile_formulas(("s0", "s1"), ("4*s0", "s0 + s1//2", "7"))(3, 5)
    (12, 5, 7)

    Raises:
        ValueError: a text is no formula, or has a symbol without a value.
    """
    for text in texts:
        _check(text, symbols)
    # one function for all: a call of it costs less than a call for each formula
    body = "".join(f"({text}), " for text in texts)
    names = {**_FUNCTIONS, "math": math, "__builtins__": {}}
    evaluate: Evaluate = eval(f"lambda {', '.join(symbols)}: ({body})", names)  # noqa: S307 - checked above
    return evaluate


def _check(text: str, symbols: Sequence[str]) -> None:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise ValueError(f"{text!r} is no formula of sizes") from None
    known = {*symbols, *_FUNCTIONS, "math"}
    for node in ast.walk(tree):
        is_unknown = isinstance(node, ast.Name) and node.id not in known
        is_other = isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATH
        )
        is_text = isinstance(node, ast.Constant) and not isinstance(node.value, (int, float))
        if not isinstance(node, _NODES) or is_unknown or is_other or is_text:
            raise ValueError(f"{text!r} is no formula of the sizes {', '.join(symbols) or '(none)'}")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """In which way a batch is another one: its ``str``, which is put into words only when it is needed."""

    reason: Callable[[], str]

    def __str__(self) -> str:
        return self.reason()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConditions:
    """For which batches something holds that was made for symbols.

    Args:
        symbols: name of each symbol -> the batch's key and the axis that it is the size of.
        shapes: batch key -> a formula for each of its axes.
        conditions: formulas that must be true.
    """

    symbols: Mapping[str, tuple[str, int]]
    shapes: Mapping[str, tuple[str, ...]]
    conditions: tuple[str, ...] = ()

    def solver(self) -> Callable[[Mapping[str, Sequence[int]]], tuple[int, ...] | Mismatch]:
        """Return what finds the values of the symbols in a batch's shapes, or in which way it is another batch.

        Raises:
            ValueError: a shape or a condition is no formula.
        """
        keys, names = tuple(self.shapes), tuple(self.symbols)
        expected = compile_formulas(names, [size for key in keys for size in self.shapes[key]])
        holds = compile_formulas(names, self.conditions)

        def solve(shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...] | Mismatch:
            if any(len(shapes[key]) != len(self.shapes[key]) for key in keys):
                return Mismatch(lambda: "a tensor has another number of axes")
            values = tuple(int(shapes[key][axis]) for key, axis in self.symbols.values())
            found = tuple(int(size) for key in keys for size in shapes[key])
            if found != (wanted := expected(*values)):
                return Mismatch(partial(self._odd_size, keys, found, wanted))
            for text, is_true in zip(self.conditions, holds(*values), strict=True):
                if not is_true:
                    return Mismatch(partial(self._unmet, text))
            return values

        return solve

    def _odd_size(self, keys: Sequence[str], found: Sequence[int], wanted: Sequence[int]) -> str:
        sizes = [(key, axis) for key in keys for axis in range(len(self.shapes[key]))]
        at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        key, axis = sizes[at]
        return (
            f"axis {axis} of {key} is {found[at]}, not {self.in_words(self.shapes[key][axis])} = {wanted[at]}"
        )

    def _unmet(self, text: str) -> str:
        return f"{self.in_words(text)} does not hold"

    def in_words(self, text: str) -> str:
        """Return a formula with what its symbols are: ``input_ids.shape[1] <= 16``."""
        named = ast.parse(text, mode="eval")
        for node in ast.walk(named):
            if isinstance(node, ast.Name) and node.id in self.symbols:
                key, axis = self.symbols[node.id]
                node.id = f"{key}.shape[{axis}]"
        return ast.unparse(named)


# What blocks cost at any lengths: polynomials in the lengths of a batch, which every rank evaluates alike.
#
# A *length* is a symbol of `SizeConditions`: ``s0`` the columns of ``input_ids``. Each cost has a coefficient for each
# *term*, a product of lengths, as its exponents:
#
#     lengths (s0, s1)      terms (0, 0) (1, 0) (0, 1) (2, 0) (1, 1) (0, 2)      1, s0, s1, s0 s0, s0 s1, s1 s1
#
# Bytes that tensors take are products of sizes, and attention's scores hold two lengths: so bytes are such polynomials
# exactly, and times are nearly.

Lengths = tuple[int, ...]
"""Values of the symbols, in order."""
Coefficients = tuple[float, ...]
"""One a term."""


def terms_of(num_lengths: int) -> tuple[tuple[int, ...], ...]:
    """Return all products of at most two lengths, as exponents.

    >>> terms_of(1)
    ((0,), (1,), (2,))
    >>> len(terms_of(2))
    6
    """
    found: list[tuple[int, ...]] = [()]
    for _ in range(num_lengths):
        found = [(*term, power) for term in found for power in range(3 - sum(term))]
    return tuple(sorted(found, key=lambda term: (sum(term), [-power for power in term])))


def products(lengths: Sequence[float], terms: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Return the value of every term.

    >>> products((5, 7), terms_of(2))
    (1.0, 5.0, 7.0, 25.0, 35.0, 49.0)
    """
    return tuple(
        float(math.prod(size**power for size, power in zip(lengths, term, strict=True))) for term in terms
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLengths:
    """One block's costs of one loss unit.

    Args:
        forward_us, backward_us: fitted, with no negative coefficient.
        saved_bytes, transient_bytes: as of `BlockCost`.
    """

    forward_us: Coefficients
    backward_us: Coefficients
    saved_bytes: Coefficients
    transient_bytes: Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCosts:
    """What the blocks of a model cost at any lengths, beside a `Profile` of some lengths.

    Args:
        sizes: which axis each length is, and the shapes of a loss unit of ``num_samples`` samples; no conditions.
        reference: lengths that the profile and the block graph are of; ``typical`` those that times are planned for;
            ``longest`` those that memory is planned for.
        fitted: lengths at which blocks were measured, and ``checked`` where what is predicted was held against it.
        time_error, byte_error: predicted over measured there, less 1, of all blocks together.
        shared: of `Profile.shared`, in its order.
        tensors: bytes of what is saved for backward and of results on edges, by name.
    """

    sizes: SizeConditions
    num_samples: int
    terms: tuple[tuple[int, ...], ...]
    reference: Lengths
    typical: tuple[Lengths, ...]
    longest: Lengths
    fitted: tuple[Lengths, ...]
    checked: Lengths
    time_error: float
    byte_error: float
    blocks: dict[str, BlockLengths]
    shared: tuple[Coefficients, ...]
    tensors: dict[str, Coefficients]

    def in_words(self, lengths: Lengths) -> str:
        """Return lengths with what they are of: ``input_ids 512, labels 128``."""
        return ", ".join(
            f"{key} {size}" for (key, _), size in zip(self.sizes.symbols.values(), lengths, strict=True)
        )


def value_of(coefficients: Coefficients, at: Sequence[float]) -> float:
    """Return a cost at lengths whose terms have the values ``at`` (`products`)."""
    return max(sum(map(operator.mul, coefficients, at)), 0.0)
