"""Counts what autograd really keeps from forward to backward, for the `MemoryCounts` of a mini-batch.

Storages are told apart by identity, which is safe because what is counted is also kept: nothing takes the place
of a storage while its micro-batch is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.memory_report import MemoryCounts


def storage_id(tensor: Tensor) -> int:
    """Return what tells the storage of a strided tensor from all others alive."""
    return tensor.untyped_storage()._cdata


class MemoryCounter:
    """Adds up bytes by micro-batch.

    Args:
        fixed: tensors that are there anyway (parameters, buffers, constants); their storages do not count.
    """

    def __init__(self, fixed: Iterable[Tensor]) -> None:
        self._fixed = frozenset(storage_id(tensor) for tensor in fixed)
        self._outer: dict[int, set[int]] = {}
        self._kept: dict[int, dict[int, int]] = {}
        self._swapped: defaultdict[int, int] = defaultdict(int)
        self._made_again: defaultdict[int, int] = defaultdict(int)
        self._held = self._most_of_one = self._peak = 0
        self._working = self._peak_working = 0

    def begin(self, micro_batch: int, inputs: Iterable[Tensor]) -> None:
        """Start a forward, or a half of one, on these inputs of the model."""
        self._outer.setdefault(micro_batch, set()).update(storage_id(tensor) for tensor in inputs)
        self._kept.setdefault(micro_batch, {})

    def keep(self, micro_batch: int, tensor: Tensor) -> None:
        """Note that a micro-batch keeps a tensor on the device."""
        if tensor.layout is not torch.strided:
            return
        key = storage_id(tensor)
        kept = self._kept[micro_batch]
        if key in kept or key in self._fixed or key in self._outer[micro_batch]:
            return
        kept[key] = tensor.untyped_storage().nbytes()
        self._held += kept[key]
        self._peak = max(self._peak, self._held)

    def swap(self, micro_batch: int, num_bytes: int) -> None:
        """Note that a micro-batch moved a storage to the host."""
        self._swapped[micro_batch] += num_bytes

    def make_again(self, micro_batch: int, num_bytes: int) -> None:
        """Note that a micro-batch made storages again that it had dropped."""
        self._made_again[micro_batch] += num_bytes

    def work(self, num_bytes: int) -> None:
        """Note that something came back to the device, or (negative) that it was used up."""
        self._working += num_bytes
        self._peak_working = max(self._peak_working, self._working)

    def end(self, micro_batch: int) -> None:
        """Note the end of a micro-batch's backward."""
        held = sum(self._kept.pop(micro_batch, {}).values())
        self._outer.pop(micro_batch, None)
        self._held -= held
        self._most_of_one = max(self._most_of_one, held)

    def counts(self) -> MemoryCounts:
        """Return what was counted."""
        for micro_batch in list(self._kept):  # not a sum: still in flight
            self._most_of_one = max(self._most_of_one, sum(self._kept[micro_batch].values()))
        return MemoryCounts(
            held_bytes=self._most_of_one,
            swapped_bytes=max(self._swapped.values(), default=0),
            recomputed_bytes=max(self._made_again.values(), default=0),
            peak_held_bytes=self._peak,
            working_bytes=self._peak_working,
        )


class CountingKeeper:
    """Keeps what autograd keeps anyway, and counts it.

    Args:
        whole, half: the stage's code for a micro-batch, and for half of it.
        leaves: positions of the received tensors that take a gradient.
        fixed: as of `MemoryCounter`.
    """

    def __init__(
        self,
        *,
        whole: Callable[..., tuple[Tensor, ...]],
        half: Callable[..., tuple[Tensor, ...]] | None,
        leaves: Sequence[int],
        fixed: Iterable[Tensor],
    ) -> None:
        self._calls = whole, half
        self._leaves = tuple(leaves)
        self._fixed = tuple(fixed)
        self._counter = MemoryCounter(fixed)

    def forward(
        self,
        micro_batch: int,
        half: int | None,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        received: Sequence[Tensor],
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return the leaves of received tensors, and the outputs."""
        counter = self._counter
        counter.begin(micro_batch, (*parameters, *inputs))

        def pack(tensor: Tensor) -> Kept:
            counter.keep(micro_batch, tensor)
            return pack_kept(tensor)

        leaves = [received[index].requires_grad_(True) for index in self._leaves]
        call = self._calls[half is not None]
        assert call is not None, "a program with half forwards needs their code"
        with saved_tensors_hooks(pack, unpack_kept):
            return leaves, call(*parameters, *inputs, *received)

    def begin_backward(self, micro_batch: int) -> None:
        """Do nothing: everything is there."""

    def end_backward(self, micro_batch: int) -> None:
        """Count the micro-batch no longer."""
        self._counter.end(micro_batch)

    def start_counting(self) -> None:
        """Count from zero."""
        self._counter = MemoryCounter(self._fixed)

    def stop_counting(self) -> MemoryCounts:
        """Return what was counted."""
        return self._counter.counts()

    def clear(self) -> None:
        """Do nothing: the graphs hold all there is."""


Kept = tuple[Tensor, int]
"""A saved tensor and its version, which autograd does not check where there are hooks."""


def pack_kept(tensor: Tensor) -> Kept:
    """Return what stands for a saved tensor that stays where it is: not itself, or it would hold its own graph."""
    return tensor.detach(), tensor._version


def unpack_kept(kept: Kept) -> Tensor:
    """Return the tensor.

    Raises:
        RuntimeFailure: it was written meanwhile.
    """
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeFailure(
            f"a tensor of shape {tuple(tensor.shape)} was written in place after it was saved for backward (version "
            f"{version}, now {tensor._version}): a buffer that the forward uses and updates allows one micro-batch "
            "in flight"
        )
    return tensor
