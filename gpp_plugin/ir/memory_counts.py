"""What one rank really kept for backward in one mini-batch, to compare with the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Bytes that autograd kept from forward to backward, counted while a mini-batch ran.

    Every storage counts once for each micro-batch, whole, however many operators keep it or a part of it.

    In: what the stage's operators keep - their own results and what they read, received tensors and masks
    included, and what they keep beside (dropout masks, statistics) - and, in a stage that recomputes,
    results held for a segment only. Out: parameters, buffers and constants of the model, the model's inputs
    (cut, but as they came) and whatever is a view of these; results nobody keeps; random states.

    Args:
        held_bytes: of one micro-batch, kept on the device between its forward and its backward.
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
        return self.peak_held_bytes + self.working_bytes + self.stashed_bytes
