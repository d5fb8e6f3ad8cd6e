"""What blocks cost at any lengths: polynomials in the lengths of a batch, which every rank evaluates alike.

A *length* is a symbol of `SizeConditions`: ``s0`` the columns of ``input_ids``. Each cost has a coefficient for each
*term*, a product of lengths given by its exponents:

    lengths (s0, s1)      terms (0, 0) (1, 0) (0, 1) (2, 0) (1, 1) (0, 2)      1, s0, s1, s0 s0, s0 s1, s1 s1

Bytes that tensors take are products of sizes, and attention's scores hold two lengths: so bytes are such polynomials
exactly, and times are nearly.

Source: this project
Tests: tests/plan/test_planned_lengths.py
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.ir.size_formulas import SizeConditions

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
        tensors: bytes of what is kept for backward and of results on edges, by name.
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
