"""How far numbers are from those they are compared with: the one definition of a relative error.

    difference 0                         0.0, from zeros as well
    difference > 0 from zeros alone      inf, unless a least scale is given
    nan or inf on either side            inf: what is no number is no agreement

Source: this project
Tests: tests/test_relative_errors.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Key = TypeVar("Key")

LEAST_SHARE = 1e-3
"""Gradients below this share of the largest one's norm are compared by it: a key's bias is rounding around zero."""
LEAST_LOSS = 1e-12


def relative_error(difference: float, norm: float, *, least: float = 0.0) -> float:
    """Return a difference over the norm of what it is a difference from.

    Args:
        least: the scale where the norm is smaller.

    >>> relative_error(0.0, 0.0), relative_error(1.0, 4.0), relative_error(1.0, 0.0)
    (0.0, 0.25, inf)
    >>> relative_error(1.0, 0.0, least=2.0)
    0.5
    """
    if difference == 0.0:
        return 0.0
    scale = max(norm, least)
    return error_or_inf(difference / scale) if scale else math.inf


def error_or_inf(error: float) -> float:
    """Return an error as it is, inf for nan: `max` passes over nan, all comparisons with which are false."""
    return error if math.isfinite(error) else math.inf


def loss_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference of a step's loss; inf where one of the two is not finite."""
    pairs = zip(losses, wanted, strict=True)
    return max((relative_error(abs(a - b), abs(b), least=LEAST_LOSS) for a, b in pairs), default=0.0)


def tensor_error(found: Tensor, wanted: Tensor, *, least: float = 0.0) -> float:
    """Return ||found - wanted|| / max(||wanted||, least), in double precision, wherever the two are."""
    own, right = found.detach().double().cpu(), wanted.detach().double().cpu()
    return relative_error(float((own - right).norm()), float(right.norm()), least=least)


def least_scale(gradients: Iterable[Tensor]) -> float:
    """Return the scale by which small gradients are compared: `LEAST_SHARE` of the largest one's norm."""
    return LEAST_SHARE * max((float(g.detach().double().norm()) for g in gradients), default=0.0)


def gradient_errors(
    found: Mapping[Key, Tensor], wanted: Mapping[Key, Tensor], *, least: float | None = None
) -> dict[Key, float]:
    """Return the error of every gradient on either side; one that is missing on one side is zeros there.

    Args:
        least: as of `tensor_error`; None: `least_scale` of ``wanted``.
    """
    scale = least_scale(wanted.values()) if least is None else least
    errors = {}
    for key in dict.fromkeys([*wanted, *found]):
        right = wanted[key] if key in wanted else found[key].new_zeros(())
        errors[key] = tensor_error(found.get(key, right.new_zeros(())), right, least=scale)
    return errors
