"""What an executor takes over from the window before, and leaves to the next one (asynchronous mode)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from gpp_plugin.ir.program import Message
from gpp_plugin.runtime.pending import Pending
from gpp_plugin.schedule.windows import shift_message


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlace:
    """Where a program stands among the windows of an asynchronous pipeline.

    Args:
        carried: messages received before it that it reads, or passes on.
        first_micro_batch: that of its first forward; its inputs are counted from there.
        is_trained: whether the stage runs backwards, in this window or another one.
    """

    carried: tuple[Message, ...]
    first_micro_batch: int
    is_trained: bool


@dataclass(slots=True, kw_only=True)
class Carry:
    """What stays between two windows.

    Args:
        received: message -> its buffers and what completes them; not read yet.
        sends: posted, perhaps not gone; ``sends_of`` those of a stage without backwards by micro-batch.
        shift: how many micro-batches came before those that the window's program names.
    """

    received: dict[Message, tuple[list[Tensor], Pending]] = field(default_factory=dict)
    sends: deque[Pending] = field(default_factory=deque)
    sends_of: dict[int, list[Pending]] = field(default_factory=dict)
    shift: int = 0

    def clear(self) -> None:
        """Let go of everything."""
        self.received.clear()
        self.sends.clear()
        self.sends_of.clear()

    def renumber(self, micro_batches: int, samples: int) -> None:
        """Name what was received as a program does that counts so many micro-batches more."""
        self.received = {
            shift_message(message, micro_batches, samples): held for message, held in self.received.items()
        }
