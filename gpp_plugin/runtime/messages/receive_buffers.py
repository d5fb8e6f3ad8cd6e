"""The buffers that messages are received into; on a CUDA device made ahead, so that a receive need not follow a task.

A transfer begins behind what was launched on the current stream before it was posted. On the stream that computes, a
receive posted between two tasks would begin when the first of them ends, though its message came long before:

    compute    F3 -------------| B1 ...              B1 waits for its gradient all the time that it travels
    receive                    |gradient of 1|

It has to wait only until nobody uses the memory of its buffers any more. So buffers are made some receives ahead, on
the stream that computes, where an event marks all that may still use their memory, and the receive is launched on a
stream that waits for that event alone:

    compute    F3 -------------| B1 ...              made before F3, so the gradient travels beside it
    receive      |gradient of 1|

Memory: the buffers of ``ahead`` receives more than are posted. What a task has read goes back to the allocator as
anything else it used: the stream that computes has waited for the transfer by then. The event was recorded before the
receive was posted, so that a receive waits for nothing behind it (`schedule.placement`).

Source: this project
Tests: tests/runtime/test_receive_buffers.py
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]

_HERE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


class ReceiveBuffers:
    """Makes the buffers of each receive of a program, in order.

    Args:
        shapes: by number of the receive, shape and type of each of its tensors.
        ahead: how many receives ahead of their place buffers are made; a CPU has no streams and ignores it.
    """

    def __init__(self, shapes: Sequence[Sequence[Shape]], *, device: torch.device, ahead: int) -> None:
        self._shapes = shapes
        self._device = device
        self._ahead = ahead if device.type == "cuda" else 0
        self._beside = torch.cuda.Stream(device, priority=-1) if self._ahead else None
        self._next = 0
        self._sizes = [sum(_num_bytes(*tensor) for tensor in tensors) for tensors in shapes]
        self.made_bytes = 0
        """Bytes of all that were made since the program began, taken or not."""
        self._made: deque[tuple[list[Tensor], torch.cuda.Event]] = deque()

    def take(self, number: int) -> tuple[list[Tensor], contextlib.AbstractContextManager[object]]:
        """Return the buffers of a receive, and what to post it in; numbers ascend within a program."""
        if self._beside is None:
            self.made_bytes += self._sizes[number]
            return self._make(number), _HERE
        self._next = max(self._next, number)
        while self._next <= min(number + self._ahead, len(self._shapes) - 1):
            made = self._make(self._next)
            self.made_bytes += self._sizes[self._next]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._made.append((made, event))
            self._next += 1
        buffers, unused = self._made.popleft()
        self._beside.wait_event(unused)
        return buffers, torch.cuda.stream(self._beside)

    def _make(self, number: int) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._shapes[number]]

    def clear(self) -> None:
        """Let go of what was made and not taken; the next number is that of a program's first receive."""
        self._made.clear()
        self._next = self.made_bytes = 0


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
