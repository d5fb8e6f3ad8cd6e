"""How many bytes a process holds for backward: what autograd saves, while it is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SAVED_TENSORS, ALLOCATOR = "saved tensors", "CUDA allocator"


class PeakMemory:
    """The most bytes held at a time within `watch`.

    On CUDA it is the allocator's peak: everything on the device. On a CPU, which has no such count, it is what
    autograd saves for backward, each storage once, without what is there anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0
        self._bytes = 0
        self._users: Counter[int] = Counter()

    @property
    def measure(self) -> str:
        """Return what is counted."""
        return ALLOCATOR if self._device.type == "cuda" else SAVED_TENSORS

    @contextmanager
    def watch(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Count while the block runs.

        Args:
            tensors: parameters, buffers and the mini-batch, which are held anyway.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        # By storage, not by tensor: a transposed weight, or a view of the batch, is another tensor on bytes
        # that are there anyway, and two nodes that save views of one activation hold it once.
        held = {tensor.untyped_storage().data_ptr() for tensor in tensors}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            # `detach`, or the saved output of a node would hold the node that holds it: the graph
            # would never be freed, and nothing ever counted down. A storage cannot be reused for
            # another key while a `_Saved` refers to it.
            key = tensor.untyped_storage().data_ptr()
            return tensor if key in held else _Saved(self, tensor.detach(), key)

        def unpack(saved: Tensor | _Saved) -> Tensor:
            return saved.tensor if isinstance(saved, _Saved) else saved

        # Peak in time: layer 1 saves 10 B, layer 2 saves 6 B (16), backward frees 6, then 10:
        # peak_bytes is 16. Of nested saved_tensors_hooks torch calls only the innermost pair, so those
        # of a plan that swaps or recomputes would hide its tensors from these:
        # `rank._Pipeline.counted_bytes` asks the plan instead.
        with saved_tensors_hooks(pack, unpack):
            yield

    def add(self, key: int, num_bytes: int) -> None:
        """Count a storage that one more node saves."""
        self._users[key] += 1
        if self._users[key] == 1:
            self._bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def drop(self, key: int, num_bytes: int) -> None:
        """Count one user of a storage less."""
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self._bytes -= num_bytes


class _Saved:
    """A tensor that a node of the graph holds; gone when the node lets go of it."""

    __slots__ = ("_key", "_memory", "_num_bytes", "tensor")

    def __init__(self, memory: PeakMemory, tensor: Tensor, key: int) -> None:
        self.tensor = tensor
        self._memory, self._key, self._num_bytes = memory, key, tensor.untyped_storage().nbytes()
        memory.add(key, self._num_bytes)

    def __del__(self) -> None:
        self._memory.drop(self._key, self._num_bytes)
