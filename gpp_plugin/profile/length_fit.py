"""Costs as polynomials in lengths: at which lengths to measure, and what goes through what was measured there.

As many lengths as there are terms determine bytes, which are such polynomials. Times are fitted with no negative
coefficient, so that no longer text is ever cheaper; of all sets of terms that give none, the one with the least squares
of relative errors is taken (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23, by enumeration).

Source: this project
Tests: tests/profile/test_length_fit.py
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.length_costs import Coefficients, Lengths, products, terms_of

LEAST = 4
"""Shorter texts are special cases to some models (one token, no token behind the first)."""
MOST_SUBSETS = 6
"""Terms of which all sets are tried; of more, those of one length and the constant."""


def fit_points(lows: Sequence[int], highs: Sequence[int]) -> tuple[list[Lengths], Lengths]:
    """Return as many lengths as there are terms, so placed that they determine any polynomial, and one more to check.

    >>> fit_points([256], [512])
    ([(256,), (384,), (512,)], (448,))
    """
    # of two lengths, each between low (l) and high (h): ll, ml, hl, lm, lh, hh
    middles = [(low + high) // 2 for low, high in zip(lows, highs, strict=True)]
    points: dict[Lengths, None] = {tuple(lows): None}
    for at in range(len(lows)):
        for value in (middles[at], highs[at]):
            points[(*lows[:at], value, *lows[at + 1 :])] = None
    for one, other in itertools.combinations(range(len(lows)), 2):
        point = list(lows)
        point[one], point[other] = highs[one], highs[other]
        points[tuple(point)] = None
    return list(points), tuple((m + high) // 2 for m, high in zip(middles, highs, strict=True))


def range_of(typical: Sequence[int], longest: int) -> tuple[int, int]:
    """Return between which lengths to measure: the typical ones, or down to half of them where they are alike."""
    # typical 512 and 1024: 512 to 1024; 512 alone: 256 to 512; 6 alone, at most 64: 4 to 12
    high = max(typical)
    low = max(min(min(typical), high // 2), min(LEAST, high))
    if high - low < LEAST:
        high = max(high, min(longest, low + 2 * LEAST))
    return low, high


def exact_fit(points: Sequence[Lengths], values: Sequence[float]) -> Coefficients:
    """Return the polynomial through values at lengths of `fit_points`."""
    matrix, scale = _matrix(points)
    found, *_ = np.linalg.lstsq(matrix, np.asarray(values, dtype=float), rcond=None)
    return tuple((found / scale).tolist())


def nonnegative_fit(
    points: Sequence[Lengths], values: Sequence[float], *, of: Collection[int]
) -> Coefficients:
    """Return the polynomial without negative coefficients that is nearest to positive values, as their share.

    Args:
        of: the lengths, by position, that it may depend on.
    """
    # Times are noisy: an encoder that a decoder's length has nothing to do with would seem to depend on it. Terms of
    # many lengths have too many subsets: then without products of two.
    weights = 1.0 / np.maximum(np.asarray(values, dtype=float), 1e-9)
    matrix, scale = _matrix(points)
    rows = matrix * weights[:, None]
    terms = terms_of(len(points[0]))
    own = [i for i, term in enumerate(terms) if all(at in of for at, power in enumerate(term) if power)]
    usable = [i for i in own if len(own) <= MOST_SUBSETS or max(terms[i]) == sum(terms[i])]
    best: tuple[float, npt.NDArray[np.float64]] = (np.inf, np.zeros(len(terms)))
    for count in range(min(len(usable), MOST_SUBSETS) + 1):
        for chosen in itertools.combinations(usable, count):
            found = np.zeros(len(terms))
            if chosen:
                found[list(chosen)] = np.linalg.lstsq(rows[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(np.square(rows @ found - 1.0).sum())
            if found.min() >= 0.0 and error < best[0] - 1e-12:
                best = error, found
    return tuple((best[1] / scale).tolist())


def _matrix(points: Sequence[Lengths]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return terms by point, each divided by its largest value, and these."""
    terms = terms_of(len(points[0]))
    matrix = np.array([products(point, terms) for point in points])
    scale = np.abs(matrix).max(axis=0)
    return matrix / scale, scale
