"""What one rank of a stage needs at its peak: the one formula, for numbers and for numpy arrays alike.

    M  =  P / p + (v - 1) G + G / g + O / o + I held all the time
          + P - P / p                           while one of the stage's tasks runs
          + c s                                 kept for backward by the micro-batches in flight
          + w + t + r                           beside that, for a moment

Legend, all in bytes of one rank unless said otherwise:

    P, G, O  parameters, gradients and optimizer state of the stage's blocks
    g, o     ranks that share gradients and optimizer state out: 1, or the stage's degree (ZeRO 2: both; 1: o)
    p        ranks that share parameters out: 1, or under ZeRO 3 the stage's degree. So of one stage a rank needs at its
             peak what it needs under ZeRO 2; of several it holds one whole at a time, the largest (`rank_bytes`)
    v        versions of its weights: older ones are stashed of what is trained, G is as large (mode async)
    I        its part of the mini-batch
    c        micro-batches in flight (a number)
    s        what one micro-batch keeps for backward, less what is swapped or recomputed
    w        tensors back from the host, or made again, while they are used
    t        the most that one block holds while it runs
    r        under ZeRO 2 a backward's gradients are whole until they are reduced behind it. They are made while what
             the same micro-batch saved is let go, so only what they exceed it by comes on top: max(G - s, 0)

Example: P = G = 100, O = 200, two ranks under ZeRO 2, s = 40, c = 3, t = 7, nothing else:

    held 100 + 100 / 2 + 200 / 2 = 250;  in flight 3 x 40 = 120;  r = 100 - 40 = 60;  M = 250 + 120 + 7 + 60 = 437

Callers sum P, G, O, s over their blocks first: a stage's own blocks (`CostModel.stage_memory`), every interval of a
series as a matrix (`StageShapes.room`), differences of prefix sums (`OperatorChain.memory_bytes`, `ChainCosts.memory`).
All terms but t and r are linear, so the sums may be taken before or after. `memory_breakdown` has the terms one by
one. The validator and the oracles of the benchmarks have formulas of their own, on purpose.

Source of r: ours; what ZeRO shares out: Rajbhandari et al., ZeRO, section 5 (arXiv 1910.02054); v: PipeDream,
section 3.3 (arXiv 1806.03377).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def adam_bytes(dtype: str) -> int:
    """Return what Adam holds of a trained parameter: two fp32 moments, and fp32 weights beside those of half precision.

    >>> adam_bytes("fp32"), adam_bytes("bf16")
    (8, 12)
    """
    return 8 if dtype == "fp32" else 12


def shared_out(gradient: Any, optimizer: Any, *, degree: int, zero_stage: int) -> tuple[Any, Any]:
    """Return G / g and O / o: what one of ``degree`` ranks holds of gradients and optimizer state.

    >>> shared_out(100, 200, degree=2, zero_stage=1)
    (100, 100.0)
    """
    return (
        gradient / degree if zero_stage >= 2 else gradient,
        optimizer / degree if zero_stage >= 1 else optimizer,
    )


def held_bytes(parameter: Any, gradient: Any, optimizer: Any, *, degree: int, zero_stage: int) -> Any:
    """Return P + G / g + O / o: what a rank holds of the present weights while a task of the stage runs.

    >>> held_bytes(100, 100, 200, degree=2, zero_stage=2)
    250.0
    """
    own_gradient, own_optimizer = shared_out(gradient, optimizer, degree=degree, zero_stage=zero_stage)
    return parameter + own_gradient + own_optimizer


def sharded_bytes(parameter: Any, *, degree: int, zero_stage: int) -> Any:
    """Return P where the ranks of a stage share its parameters out; 0 where each holds them whole.

    >>> sharded_bytes(100, degree=2, zero_stage=3), sharded_bytes(100, degree=1, zero_stage=3)
    (100, 0)
    """
    return parameter if zero_stage >= 3 and degree > 1 else 0


def rank_bytes(peaks: Sequence[tuple[float, float]]) -> float:
    """Return M of a rank that holds several stages: the sum of theirs, but of what is gathered the largest alone.

    Args:
        peaks: by stage, M and of it P - P / p.

    >>> rank_bytes([(100, 40), (80, 30)])
    150
    """
    return sum(most - gathered for most, gathered in peaks) + max(gathered for _, gathered in peaks)


def stashed_bytes(gradient: Any, num_versions: int) -> Any:
    """Return (v - 1) G: older versions of the weights that are trained (mode async)."""
    return (num_versions - 1) * gradient


def unreduced_bytes(gradient: Any, saved: Any, *, degree: int, zero_stage: int) -> Any:
    """Return r: whole gradients beyond what the backward that makes them lets go.

    Args:
        saved: s; 0 where what is saved may be swapped or recomputed, and so leaves no room for them.

    >>> float(unreduced_bytes(100.0, 40.0, degree=2, zero_stage=2))
    60.0
    """
    return np.maximum(gradient - saved, 0.0) if zero_stage >= 2 and degree > 1 else 0.0 * gradient


def peak_bytes(held: Any, saved: Any, in_flight: int, *, transient: Any, working: Any = 0.0) -> Any:
    """Return held + c s + w + t.

    Args:
        held: all that does not grow with what is in flight: held all the time, and r.

    >>> peak_bytes(250 + 60, 40, 3, transient=7)
    437.0
    """
    return held + in_flight * saved + transient + working


def micro_batches_within(room: Any, saved: Any, most: int) -> Any:
    """Return the largest c whose c s goes into ``room``, at most ``most``; 0 where not even the rest fits.

    A millionth of a micro-batch is allowed for: rooms are differences of large sums.

    >>> micro_batches_within(np.array([130.0, 80.0, -1.0]), np.array([40.0, 40.0, 40.0]), 9).tolist()
    [3.0, 2.0, 0.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.where(saved > 0, np.floor(room / saved + 1e-9), most)
    return np.where(room < 0, 0, np.minimum(count, most))
