"""Predicted and measured memory of every rank of a job, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.ir.memory_counts import MemoryCounts
from gpp_plugin.ir.memory_plan import MemoryBreakdown

ALLOCATOR = "CUDA allocator"
COUNTED = "counted: known tensors and what autograd kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes of tensors that a rank really holds beside activations.

    Args:
        gradients: at their most, before the optimizer's step.
        optimizer: its state, and weights of its own in higher precision.
        buffers: this rank's part of the mini-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Return all bytes."""
        return self.weights + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory.

    Args:
        stage: name of its stage.
        predicted: None where the plan says nothing of memory.
        held: what was found there.
        counts: of the first mini-batch; None before it, and for a stage without backwards.
        measured_peak_bytes: in the measure of the report; 0 before the first mini-batch.
    """

    rank: int
    stage: str
    predicted: MemoryBreakdown | None
    held: HeldBytes
    counts: MemoryCounts | None
    measured_peak_bytes: int

    @property
    def predicted_peak_bytes(self) -> int:
        """Return the plan's figure; 0 where nothing is predicted."""
        return 0 if self.predicted is None else self.predicted.total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What `engine.memory_report` returns: the same on every rank.

    Args:
        measure: what the measured peaks are of (`ALLOCATOR`, `COUNTED`).
        ranks: in rank order.
        differences: a line for every rank that keeps, swaps or recomputes something else than planned.
        advice: what to change so that more fits.
    """

    measure: str
    ranks: tuple[RankMemory, ...]
    differences: tuple[str, ...]
    advice: tuple[str, ...]
