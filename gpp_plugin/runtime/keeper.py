"""What may stand between a stage's forward and what autograd keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gpp_plugin.ir.memory_report import MemoryCounts


class Keeper(Protocol):
    """Runs a stage's forwards, and decides or counts what stays on the device for their backwards."""

    def forward(
        self,
        micro_batch: int,
        half: int | None,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Run the stage's code.

        Args:
            half: 0 or 1 where ``inputs`` and ``received`` are half a micro-batch's.

        Returns:
            For each received tensor that takes a gradient the leaf it arrives at, and the outputs.
        """

    def begin_backward(self, micro_batch: int) -> None:
        """Get ready for the micro-batch's backward, which comes next."""

    def end_backward(self, micro_batch: int) -> None:
        """Let go of the micro-batch."""

    def start_counting(self) -> None:
        """Count what the forwards from now on keep."""

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer, and return what was counted."""

    def clear(self) -> None:
        """Forget all micro-batches: a mini-batch ended or failed."""
