"""Where a chain of operators may be cut: compute-balanced, memory-balanced, cheap to communicate.

DawnPiper, Theorem 4.1: the best cut of a model in two stages lies between the position that balances
compute and the one that balances memory. Appendix B.1 (Algorithm 2) finds the second by filling stages in
order; B.2 avoids cuts that send much.

Deviations: Algorithm 2 derives each stage's share from ``l / (l - i)`` in one pass, which is exact only
where everything a stage holds grows with what is in flight; here the common limit is found by bisection
with each stage's own memory, synchronous or asynchronous, and ``÷`` divides as real numbers do.

Source: DawnPiper (arXiv 2505.05856), Theorem 4.1, appendix B, Algorithm 2
Tests: tests/plan/test_memory_cuts.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.plan.memory.graph_tensors import Ints
from gpp_plugin.plan.memory.operator_chain import PipelineShape, TensorChain

WIDENING = 2
"""Cut positions looked at beyond both ends of the theorem's interval (it holds for two stages only)."""
MOST_COMMUNICATION = 0.5
"""A cut is left out where sending its tensors takes longer than this share of a stage's even time."""
NEAR = 0.25
NUM_BISECTIONS = 10


def compute_balanced_cut(chain: TensorChain, start: int, stop: int, share: float) -> int:
    """Return the cut that leaves about ``share`` of the interval's time on its left."""
    target = chain.time[start] + share * (chain.time[stop] - chain.time[start])
    right = int(np.searchsorted(chain.time, target))
    left = max(right - 1, start)
    nearest = left if target - chain.time[left] < chain.time[min(right, stop)] - target else right
    return min(max(nearest, start), stop)


def memory_balanced_cuts(
    chain: TensorChain, shape: PipelineShape, start: int, stop: int, stages: Sequence[int]
) -> list[int]:
    """Return the cuts between ``stages`` for which the largest share of a device that one needs is smallest.

    Args:
        stages: consecutive places in the pipeline; a place decides what is in flight.
    """
    low, high = (
        0.0,
        max(chain.memory_bytes(start, stop, stage, shape) / shape.limits[stage] for stage in stages),
    )
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        if _fill(chain, shape, start, stop, stages, middle)[-1] >= stop:
            high = middle
        else:
            low = middle
    return _fill(chain, shape, start, stop, stages, high)[:-1]


def _fill(
    chain: TensorChain, shape: PipelineShape, start: int, stop: int, stages: Sequence[int], share: float
) -> list[int]:
    """Return where each stage ends when stages take, in order, all that fits ``share`` of their device.

    Every stage leaves at least one operator to each of those after it.
    """
    ends: list[int] = []
    at = start
    for i, stage in enumerate(stages):
        low, high = at, stop - (len(stages) - 1 - i)
        limit = share * shape.limits[stage]
        while low < high:
            middle = (low + high + 1) // 2
            if chain.memory_bytes(at, middle, stage, shape) <= limit:
                low = middle
            else:
                high = middle - 1
        at = max(low, min(at + 1, high))
        if chain.memory_bytes(ends[-1] if ends else start, at, stage, shape) > limit:
            at = ends[-1] if ends else start  # not even one operator fits
        ends.append(at)
    return ends


def cut_interval(
    chain: TensorChain, shape: PipelineShape, start: int, stop: int, first: int, last: int
) -> tuple[int, int]:
    """Return the positions between which stages ``first``..``last`` are cut in the middle (Theorem 4.1).

    Both ends are widened by `WIDENING`, and leave an operator to every stage.
    """
    middle = (first + last) // 2
    num_left, num_right = middle - first + 1, last - middle
    balanced = compute_balanced_cut(chain, start, stop, num_left / (num_left + num_right))
    cuts = memory_balanced_cuts(chain, shape, start, stop, range(first, last + 1))
    even_memory = cuts[middle - first]
    low = max(min(balanced, even_memory) - WIDENING, start + num_left)
    high = min(max(balanced, even_memory) + WIDENING, stop - num_right)
    return min(low, high), max(low, high)


def allowed_cuts(chain: TensorChain, shape: PipelineShape) -> Ints:
    """Return the cut positions whose communication hides behind an even stage (B.2), both ends included.

    What crosses wherever near by a cut is made (the least within `NEAR` of an even stage's operators) is
    inevitable, and not held against a cut. Where that leaves fewer positions than stages need, all are allowed.
    """
    num, num_stages = chain.num_blocks, shape.num_stages
    even_us = chain.time[-1] / num_stages
    reach = max(int(NEAR * num / num_stages), 1)
    inner = chain.crossing[1:num]
    padded = np.pad(inner, reach, constant_values=np.inf)
    inevitable = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).min(axis=1)
    send_us = (inner - inevitable) / shape.link_bytes_per_s * 1e6
    allowed = 1 + np.flatnonzero(send_us <= MOST_COMMUNICATION * even_us)
    if len(allowed) < num_stages - 1:
        allowed = np.arange(1, num)
    return np.concatenate([[0], allowed, [num]]).astype(np.int64)
