"""How far two runs' losses are apart; what is no number is no agreement.

Source: this project
Tests: tests/compare/test_run.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def loss_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference of a step's loss; inf where one of the two is not finite."""
    apart = (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, wanted, strict=True))
    return max(map(error_or_inf, apart), default=0.0)


def error_or_inf(error: float) -> float:
    """Return an error as it is, inf for nan: `max` passes over nan, all comparisons with which are false."""
    return error if math.isfinite(error) else math.inf
