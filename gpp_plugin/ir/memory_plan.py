"""What fills a stage's memory, and what it does to fit: tensors moved to host memory, tensors made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from gpp_plugin.ir.typed_leaves import Bytes, Micros, SignedMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedTensor:
    """A saved tensor that waits for its backward in host memory.

    Args:
        name: of the `SavedTensor`.
        bytes: of one micro-batch on one rank.
        free_us: from its last use in the forward to its first in the backward, less both transfers
            (Capuchin's FreeTime); negative where the transfers cannot hide.
    """

    name: str
    bytes: Bytes
    free_us: SignedMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedSegment:
    """Consecutive blocks that run again before their backward, as one checkpointed segment.

    What was made outside and is read inside stays; random state is restored.

    Args:
        blocks: in execution order.
        tensors: names of the `SavedTensor`s that are dropped after the forward.
        bytes: of them, for one micro-batch on one rank.
        held_bytes: results of earlier blocks that are held for this segment only.
        recompute_us: time of the second forward.
    """

    blocks: tuple[str, ...]
    tensors: tuple[str, ...]
    bytes: Bytes
    held_bytes: Bytes
    recompute_us: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one stage swaps and recomputes for every micro-batch.

    Args:
        working_bytes: what is back in device memory beside what is saved: the largest segment made again,
            and two swapped tensors, one in use and one on its way.
        swap_us: transfer time of one micro-batch that does not hide behind compute.
    """

    swapped: tuple[SwappedTensor, ...] = ()
    recomputed: tuple[RecomputedSegment, ...] = ()
    working_bytes: Bytes = 0
    swap_us: Micros = 0.0

    @property
    def swapped_bytes(self) -> int:
        """Return bytes in host memory, of one micro-batch on one rank."""
        return sum(tensor.bytes for tensor in self.swapped)

    @property
    def recomputed_bytes(self) -> int:
        """Return bytes not saved for one micro-batch, less what is saved instead."""
        return sum(segment.bytes - segment.held_bytes for segment in self.recomputed)

    @property
    def recompute_us(self) -> float:
        """Return the time of the second forwards of one micro-batch."""
        return sum(segment.recompute_us for segment in self.recomputed)

    @property
    def added_us(self) -> float:
        """Return what one micro-batch takes longer than without."""
        return self.recompute_us + self.swap_us


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Predicted bytes of one rank of a stage at its peak, by what they hold.

    Args:
        weights: the current ones, under ZeRO 3 the rank's part; ``stashed_weights``: older versions (mode async).
        gathered: the rest of them while one of the stage's tasks runs (ZeRO 3).
        activations: saved for backward by all micro-batches in flight, after swap and recompute.
        working: tensors back in use, or on their way to or from the host.
        transient: most that one block holds while it runs, and the gradients that wait for weight gradients.
        inputs: its part of the mini-batch, held while a step runs.
        messages: sent and not gone, and buffers of the next ones to come; beside ``total``, which planners cut by.
        limit: what the plan may use of the stage's smallest rank; 0 where that is not known.
    """

    stage: str
    weights: Bytes
    stashed_weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    working: Bytes
    transient: Bytes
    inputs: Bytes = 0
    gathered: Bytes = 0
    messages: Bytes = 0
    limit: Bytes = 0

    @property
    def total(self) -> int:
        """Return all bytes but those of messages."""
        held = self.weights + self.stashed_weights + self.gradients + self.optimizer
        return held + self.activations + self.working + self.transient + self.inputs + self.gathered


def joined_breakdown(parts: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    """Return what fills a rank that holds several stages: the sum of what each of them does; one stage's as it is.

    Of gathered weights it holds one stage's at a time, the largest, or two where they fit (`schedule.gathers`).
    """
    if len(parts) == 1:
        return parts[0]
    limits = [part.limit for part in parts if part.limit]
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(MemoryBreakdown)
        if field.name not in ("stage", "limit", "gathered")
    }
    joined = MemoryBreakdown(
        stage=", ".join(part.stage for part in parts), limit=min(limits, default=0), **sums
    )
    free_bytes = joined.limit - joined.total - joined.messages
    return replace(joined, gathered=gathered_together([part.gathered for part in parts], free_bytes))


def gathered_together(gathered: Sequence[int], free_bytes: int) -> int:
    """Return the bytes of gathered weights that a rank holds at a time: of two stages, where that fits, or of one.

    Args:
        gathered: of each of its stages.
        free_bytes: bytes for them; 0 or less where no limit is known.

    >>> gathered_together([40, 60, 30], 100), gathered_together([40, 60, 30], 99), gathered_together([40], 0)
    (100, 60, 40)
    """
    *_, second, first = sorted((0, *gathered))
    return first + second if first + second <= free_bytes else first
