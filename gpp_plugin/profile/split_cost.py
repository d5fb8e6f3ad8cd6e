"""What splitting a backward costs: its two parts timed against the whole, on the device at hand."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch

from gpp_plugin.profile.busy_stream import HeadStart, Lap, typical_laps
from gpp_plugin.profile.timing import BUDGET_S, ENOUGH_S, MOST_REPEATS, WARM_UPS, Operands, Stopwatch
from gpp_plugin.runtime.split import BackwardSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCost:
    """Median times of a backward, and of its two parts where it is split."""

    backward_us: float
    input_gradient_us: float
    weight_gradient_us: float

    @property
    def factor(self) -> float:
        """Return the time of both parts over that of the whole."""
        both = self.input_gradient_us + self.weight_gradient_us
        return both / self.backward_us if self.backward_us > 0 else 1.0

    @property
    def input_share(self) -> float:
        """Return the share of the first part in both."""
        both = self.input_gradient_us + self.weight_gradient_us
        return self.input_gradient_us / both if both > 0 else 0.5


NOT_MEASURED = SplitCost(backward_us=0.0, input_gradient_us=0.0, weight_gradient_us=0.0)

CANNOT_SPLIT = SplitCost(backward_us=1.0, input_gradient_us=1e6, weight_gradient_us=1e6)
"""A backward that fails in two parts: a cost at which no schedule that splits it wins."""

UNSPLITTABLE = 1e3
"""Factor from which a backward counts as one that cannot be split."""


def measure_split_cost(operands: Operands, *, device: torch.device, repeats: int = 7) -> SplitCost:
    """Time the backward of one piece of code whole and in two parts, alternated.

    Args:
        operands: the code of a stage or a block; ``takes_gradient`` says whose gradients the first part makes.
        repeats: fewest timed runs; fast code is run more often.
    """
    # ``laps``: one row a run, [whole, first part, second part] in microseconds; alternated, so that a machine that
    # slows down slows all three. The split itself is found in the first run and only executed later
    # (`BackwardSplitter`).
    laps: list[list[Lap]] = []
    splitter = BackwardSplitter()
    ahead_of_whole, ahead_of_parts = HeadStart(), HeadStart()
    started = time.perf_counter()
    for attempt in itertools.count():
        lap = [
            *_whole(operands, device, ahead_of_whole),
            *_parts(operands, device, ahead_of_parts, splitter),
        ]
        elapsed_s = time.perf_counter() - started
        if attempt >= WARM_UPS or (attempt > 0 and elapsed_s > BUDGET_S):
            laps.append(lap)
        is_enough = len(laps) >= repeats and (elapsed_s > ENOUGH_S or len(laps) >= MOST_REPEATS)
        if is_enough or (laps and elapsed_s > BUDGET_S):
            break
    backward_us, input_us, weight_us = (typical.us for typical in typical_laps(laps))
    # medians of columns: of [[9, 5, 5], [8, 5, 4], [30, 6, 4]] they are 9, 5 and 4, a factor of 1.0
    return SplitCost(backward_us=backward_us, input_gradient_us=input_us, weight_gradient_us=weight_us)


def _whole(operands: Operands, device: torch.device, head_start: HeadStart) -> list[Lap]:
    outputs, leaves = operands.forward()
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    seeds = [torch.randn_like(root) for root in roots]
    watch = Stopwatch(device, head_start)
    if roots:
        torch.autograd.backward(roots, seeds)
    watch.mark()
    del leaves
    return watch.laps()


def _parts(
    operands: Operands, device: torch.device, head_start: HeadStart, splitter: BackwardSplitter
) -> list[Lap]:
    outputs, leaves = operands.forward()
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    seeds = [torch.randn_like(root) for root in roots]
    watch = Stopwatch(device, head_start)
    _, pending = splitter.split(roots, [leaf for leaf in leaves if leaf.requires_grad], seeds)
    watch.mark()
    pending.run()
    watch.mark()
    return watch.laps()
