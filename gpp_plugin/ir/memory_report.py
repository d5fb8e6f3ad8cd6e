"""Memory of every rank of a job: what was counted while it ran, and that beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gpp_plugin.ir.plan import MemoryBreakdown

# What the caches of the last generation took on each rank, predicted and counted.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCaches:
    """The caches of one rank.

    Args:
        layers: of attention, whose caches lie there.
        rows: sequences, or parts of sequences, that are cached there.
        length: of the longest one.
        predicted_bytes: from the model's configuration, rows and lengths.
        counted_bytes: of the tensors that were there at the end.
    """

    rank: int
    layers: int
    rows: int
    length: int
    predicted_bytes: int
    counted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The caches of the last generation.

    Args:
        cache: "data" or "sequence".
        micro_batches: of prompts, that were generated from in turns; the figures are of all of them together.
        ranks: of the job, in order.
    """

    cache: str
    micro_batches: int
    ranks: tuple[RankCaches, ...]


ALLOCATOR = "CUDA allocator"
COUNTED = "counted: known tensors and what autograd kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Bytes that autograd saved from forward to backward, counted while a mini-batch ran.

    Every storage counts once for each micro-batch, whole, however many operators keep it or a part of it.

    In: what the stage's operators keep - their own results and what they read, received tensors and masks
    included, and what they keep beside (dropout masks, statistics) - and, in a stage that recomputes,
    results held for a segment only. Out: parameters, buffers and constants of the model, the model's inputs
    (cut, but as they came) and whatever is a view of these; results that no operator saves; random states.

    Args:
        held_bytes: of one micro-batch, held on the device between its forward and its backward.
        swapped_bytes: of one micro-batch, moved to host memory in between.
        recomputed_bytes: of one micro-batch, dropped after the forward and made again.
        peak_held_bytes: most that all micro-batches in flight held at once, each as of ``held_bytes``.
        working_bytes: most that was back on the device at once beside what is held: made again or returned from
            the host, from then to its last use.
        stashed_bytes: most that older versions of the weights took beside the present ones (asynchronous mode).
    """

    held_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    peak_held_bytes: int
    working_bytes: int = 0
    stashed_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        """Return no less than all of it ever took at once."""
        # each at its own most, which need not be the same moment: a bound, not a peak
        return self.peak_held_bytes + self.working_bytes + self.stashed_bytes


def joined_counts(parts: Sequence[MemoryCounts]) -> MemoryCounts | None:
    """Return what the stages of a rank keep together, each at its own most; None of none."""
    if not parts:
        return None
    return MemoryCounts(
        **{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(MemoryCounts)}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes of tensors that a rank really holds beside activations.

    Args:
        gradients: at their most, before the optimizer's step.
        optimizer: its state, and weights of its own in higher precision.
        buffers: this rank's part of the mini-batch.
        gathered: weights beside the rank's part of them, at their most while tasks ran (ZeRO 3).
        messages: sent and not gone, or received and not read, at their most while tasks ran.
        ahead: what frozen stages sent for the next mini-batch, from one to the other.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int = 0
    messages: int = 0
    ahead: int = 0

    @property
    def total(self) -> int:
        """Return all bytes."""
        held = self.weights + self.gathered + self.gradients + self.optimizer
        return held + self.buffers + self.messages + self.ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's memory.

    Args:
        stage: name of its stage; of several, their names with commas between, and all figures are their sums.
        predicted: None where the plan says nothing of memory.
        held: what was found there.
        counts: of the first mini-batch; None before it, and for stages without backwards.
        measured_peak_bytes: in the measure of the report; 0 before the first mini-batch.
        prefetched_bytes: predicted, beside the plan, of what frozen stages send for the next mini-batch.
    """

    rank: int
    stage: str
    predicted: MemoryBreakdown | None
    held: HeldBytes
    counts: MemoryCounts | None
    measured_peak_bytes: int
    prefetched_bytes: int = 0

    @property
    def predicted_peak_bytes(self) -> int:
        """Return the plan's figure, messages, and what comes early; 0 where nothing is predicted."""
        # the sum of the parts: all are there at once at the end of the last forward of a full stage
        part = self.predicted
        return 0 if part is None else part.total + part.messages + self.prefetched_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What `engine.memory_report` returns: the same on every rank.

    Args:
        measure: what the measured peaks are of (`ALLOCATOR`, `COUNTED`).
        ranks: in rank order.
        differences: a line for every rank that keeps, swaps or recomputes something else than planned.
        advice: what to change so that more fits.
        lengths: what was predicted is of batches like this.
    """

    measure: str
    ranks: tuple[RankMemory, ...]
    differences: tuple[str, ...]
    advice: tuple[str, ...]
    lengths: str = ""
