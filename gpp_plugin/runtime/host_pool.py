"""Buffers in host memory for tensors that wait there: allocated once, used by every micro-batch.

Page-locked where the stage computes on CUDA, so that copies run beside kernels. A buffer is as long as the class
of sizes it serves, at most an eighth more than asked for, so that batches of other shapes find it useful too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_BYTES = 512


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Bytes in host memory.

    Args:
        read: recorded behind the last copy out of it; who writes next waits for that.
    """

    data: Tensor
    read: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Return its length."""
        return self.data.numel()


class HostPool:
    """Lends host buffers and takes them back.

    Args:
        is_pinned: page-locked memory; needs CUDA, whose allocator rounds it up to a power of two.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._free: dict[int, list[HostBuffer]] = {}
        self.total_bytes = 0

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least ``num_bytes``, for the caller alone until it is given back."""
        size = size_class(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        self.total_bytes += size
        return HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back."""
        self._free.setdefault(buffer.num_bytes, []).append(buffer)


def size_class(num_bytes: int) -> int:
    """Return the length of the buffer that holds ``num_bytes``.

    >>> size_class(100), size_class(1024), size_class(1025), size_class(9000)
    (512, 1024, 1152, 9216)
    """
    if num_bytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    step = 1 << (num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step
