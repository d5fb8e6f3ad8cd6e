"""Storages that wait for their backward in host memory (Capuchin; DawnPiper, section 4.3).

A storage leaves when autograd keeps a tensor in it for the first time, and its device memory is free as soon as
nobody uses it any more. Copies run on two side streams, one each way, with events:

    out      ──wait for compute──copy──►e1          device memory is released behind e1
    compute  ──forward ... ──backward──wait e2──use
    back     ──wait for e1──────copy──►e2           requested early, in backward order

A copy back waits for what the compute stream held when it was requested, as its memory may be in use until then. So
the first one of a backward is requested before the task in front of that backward is launched, and travels beside it:

    compute  ──F2──┬──F3──────────────wait e2──B1──       requested behind F3, it would wait for F3 and hide nothing
    back           └──copy of B1's first──►e2

Storages come back in the order opposite to that in which they were last saved, the next ones while the current
one is in use. Two of the largest one's size are in device memory beside what stays, which is what a plan counts as
its working memory: beside a forward one leaves and one comes back, in a backward one is in use and one comes back. On
the CPU the same code copies at once, without streams.

A storage that several operators keep, in several views, moves once and comes back as one storage; it stays until
its last use, then releases the device again. The host buffer is free when autograd releases all handles.

Host buffers are page-locked where the stage computes on CUDA, so that copies run beside kernels; they are allocated
once and used by every micro-batch (`HostPool`).

Source: Capuchin (ASPLOS 2020, doi 10.1145/3373376.3378505); DawnPiper (arXiv 2505.05856), section 4.3
Tests: tests/runtime/test_swap.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpp_plugin.runtime.memory.counting import MemoryCounter

SMALLEST_BYTES = 512


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Bytes in host memory.

    Args:
        read: recorded behind the last copy out of it; who writes next waits for that.
    """

    data: Tensor
    read: torch.cuda.Event | None = None


class HostPool:
    """Lends host buffers and takes them back.

    A buffer is as long as the class of sizes it serves, at most an eighth more than requested, so that batches of other
    shapes find it useful too.

    Args:
        is_pinned: page-locked memory; needs CUDA, whose allocator rounds it up to a power of two.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._free: dict[int, list[HostBuffer]] = {}
        self.total_bytes = 0

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least ``num_bytes``, for the caller alone until it receives back."""
        size = size_class(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        self.total_bytes += size
        return HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back."""
        self._free.setdefault(buffer.data.numel(), []).append(buffer)


def size_class(num_bytes: int) -> int:
    """Return the length of the buffer that holds ``num_bytes``.

    >>> size_class(100), size_class(1024), size_class(1025), size_class(9000)
    (512, 1024, 1152, 9216)
    """
    if num_bytes <= SMALLEST_BYTES:
        return SMALLEST_BYTES
    step = 1 << (num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step


class SwapLink:
    """Copies storages between the device and a pool of host buffers."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self.pool = HostPool(is_pinned=is_cuda)
        self._out = torch.cuda.Stream(device) if is_cuda else None
        self._back = torch.cuda.Stream(device) if is_cuda else None
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._largest_bytes = 0

    def send(self, data: Tensor) -> tuple[HostBuffer, torch.cuda.Event | None]:
        """Copy bytes to the host; they stay on the device until they are copied, at most the largest ones' worth.

        Args:
            data: all bytes of a storage on the device.

        Returns:
            Where they are, and the event behind the copy.
        """
        buffer = self.pool.take(data.numel())
        if self._out is None:
            buffer.data[: data.numel()].copy_(data)
            return buffer, None
        # The copy must come behind what made the bytes (``wait_stream``) and behind the last read of the buffer that
        # it writes to (``buffer.read``): host memory is lent on before its last copy back has run.
        compute = torch.cuda.current_stream(self.device)
        self._out.wait_stream(compute)
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
        with torch.cuda.stream(self._out):
            buffer.data[: data.numel()].copy_(data, non_blocking=True)
            copied = self._out.record_event()
        self._leaving.append((copied, data))
        self._largest_bytes = max(self._largest_bytes, data.numel())
        self._let_go(self._largest_bytes)
        return buffer, copied

    def _let_go(self, limit_bytes: int) -> None:
        """Release what was copied, and make compute wait where more than ``limit_bytes`` are on their way.

        Compute is where all these storages were allocated, and so where their memory is used again.
        """
        # Storages of 4, 4 and 2 MB leave, limit 4: when the second is sent, 8 are on their way, so compute waits for
        # the first copy and releases it; with the third, 6, it waits for the second. So the device never holds more
        # than the largest one's worth of what has left, which is what a plan counts.
        leaving = self._leaving
        while leaving and leaving[0][0].query():
            leaving.popleft()
        total = sum(data.numel() for _, data in leaving)
        while total > limit_bytes:
            copied, data = leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(copied)
            total -= data.numel()

    def bring(
        self,
        buffer: HostBuffer,
        num_bytes: int,
        copied: torch.cuda.Event | None,
        *,
        beside_forward: bool = False,
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copy bytes back to the device.

        Args:
            copied: behind the copy to the host.
            beside_forward: a forward comes next, and nothing that is back is in use: copies may go both ways.

        Returns:
            The bytes, and the event that whoever uses them must wait for.
        """
        if self._back is None:
            return buffer.data[:num_bytes].to(self.device, copy=True), None
        if not beside_forward:
            self._let_go(0)  # a backward begins: what comes back may have the place of what has left
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._back.wait_stream(torch.cuda.current_stream(self.device))  # the memory may still be in use there
        if copied is not None:
            self._back.wait_event(copied)
        with torch.cuda.stream(self._back):
            data.copy_(buffer.data[:num_bytes], non_blocking=True)
            buffer.read = self._back.record_event()
        return data, buffer.read

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream continue behind an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def clear(self) -> None:
        """Release all device memory; buffers stay for reuse."""
        if self._leaving:
            self._let_go(0)


class SwappedStorage:
    """One storage in host memory.

    Args:
        source: any tensor in it.
        counter: updated with what comes back to the device; None where nothing is counted.
    """

    __slots__ = ("_buffer", "_copied", "_counter", "_data", "_link", "_returned", "_uses", "num_bytes")

    def __init__(self, link: SwapLink, source: Tensor, counter: MemoryCounter | None) -> None:
        storage = source.untyped_storage()
        self.num_bytes = storage.nbytes()
        data = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
        self._link = link
        self._buffer, self._copied = link.send(data)
        self._data: Tensor | None = None
        self._returned: torch.cuda.Event | None = None
        self._uses = 0
        self._counter = counter

    def view(self, tensor: Tensor) -> SwappedView:
        """Return a handle of a tensor in this storage: one more use."""
        self._uses += 1
        return SwappedView(
            storage=self,
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )

    @property
    def is_due(self) -> bool:
        """Return whether it will be used and is not on its way yet."""
        return self._uses > 0 and self._data is None

    def bring(self, *, beside_forward: bool = False) -> None:
        """Start the copy back; ``beside_forward`` as of `SwapLink.bring`."""
        self._data, self._returned = self._link.bring(
            self._buffer, self.num_bytes, self._copied, beside_forward=beside_forward
        )
        if self._counter is not None:
            self._counter.work(self.num_bytes)

    def use(self) -> torch.UntypedStorage:
        """Return the storage on the device, for one use; held for the next ones."""
        if self._data is None:
            self.bring()
        assert self._data is not None
        self._link.wait(self._returned)
        storage = self._data.untyped_storage()
        self._uses -= 1
        if self._uses <= 0:
            self._let_go()
        return storage

    def forgo(self) -> None:
        """Take one use back."""
        self._uses -= 1

    def _let_go(self) -> None:
        if self._data is not None and self._counter is not None:
            self._counter.work(-self.num_bytes)
        self._data = None

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is not None:
            if self._data is not None:  # requested, and never used
                self._link.wait(self._returned)
                self._let_go()
            self._link.pool.give(buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedView:
    """A tensor in a storage that is on the host."""

    storage: SwappedStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor in its storage, back on the device."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class ReturnQueue:
    """Brings the swapped storages of one forward back before their use."""

    def __init__(self) -> None:
        self._order: list[SwappedStorage] = []
        self._coming: dict[SwappedStorage, None] = {}
        self._largest_bytes = 0
        self.behind: Callable[[], None] | None = None
        """Called when the last of them is in use: what the next backward needs first may come."""

    def add(self, storage: SwappedStorage) -> None:
        """Note that the forward saved something in a storage."""
        self._order.append(storage)
        self._largest_bytes = max(self._largest_bytes, storage.num_bytes)

    def prefetch(self, *, beside_forward: bool = False) -> None:
        """Bring back what is used next, as much as may be on its way; ``beside_forward`` as of `SwapLink.bring`."""
        # Saved in the order a, b, c of 2, 4 and 3 MB, so the backward uses c, b, a. Budget 4: c (3) comes; b does not
        # fit beside it and waits, and so does a, as nothing overtakes. When c is used its 3 are free again: b comes.
        budget = self._largest_bytes - sum(storage.num_bytes for storage in self._coming)
        while self._order:
            storage = self._order[-1]
            if storage.is_due:
                budget -= storage.num_bytes
                if budget < 0:
                    return
                storage.bring(beside_forward=beside_forward)
                self._coming[storage] = None
            self._order.pop()

    def get(self, view: SwappedView) -> Tensor:
        """Return a tensor for its use in the backward, and start bringing back the next ones."""
        tensor = view.on(view.storage.use())
        self._coming.pop(view.storage, None)
        self.prefetch()
        if self.behind is not None and not self._order and not self._coming:
            behind, self.behind = self.behind, None
            behind()
        return tensor
