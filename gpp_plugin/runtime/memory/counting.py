"""What a forward keeps for its backward, tensor by tensor, and counts of it for the `MemoryCounts` of a mini-batch.

Storages are distinguished by identity, which is safe because what is counted is also held: nothing takes the place
of a storage while its micro-batch is in flight. What a user's module keeps has no names: its storages are numbered
in the order in which they are first saved (`StorageNumbers`).

Source: Chen et al. 2016 (arXiv 1604.06174); Capuchin (ASPLOS 2020, doi 10.1145/3373376.3378505)
Tests: tests/runtime/test_activation_policy.py, tests/runtime/test_memory_ranks.py, tests/plan/test_module_memory.py,
    tests/runtime/test_module_swap.py, tests/stage_graph/test_recompute.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.memory_report import MemoryCounts


def storage_id(tensor: Tensor) -> int:
    """Return what distinguishes the storage of a strided tensor from all others alive."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, those that several share once."""
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class HeldTogether:
    """Adds up what the stages of one rank hold: a storage that one passed to another counts once.

    Of a storage of 4 MB that its maker and its reader keep, the first to keep it adds 4 MB and the last to let go takes
    them off.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[int, int]] = {}
        self._held = self.peak = 0

    def keep(self, key: int, num_bytes: int) -> None:
        """Note that a micro-batch of a stage keeps a storage."""
        holders, _ = self._holders.get(key, (0, 0))
        self._holders[key] = holders + 1, num_bytes
        if not holders:
            self._held += num_bytes
            self.peak = max(self.peak, self._held)

    def let_go(self, key: int) -> None:
        """Note that a micro-batch of a stage keeps a storage no longer."""
        holders, num_bytes = self._holders.pop(key)
        if holders > 1:
            self._holders[key] = holders - 1, num_bytes
        else:
            self._held -= num_bytes


class MemoryCounter:
    """Adds up bytes by micro-batch.

    Args:
        fixed: tensors that are there anyway (parameters, buffers, constants); their storages do not count.
        together: updated as well, where the rank holds other stages.
    """

    def __init__(self, fixed: Iterable[Tensor], together: HeldTogether | None = None) -> None:
        self._fixed = frozenset(storage_id(tensor) for tensor in fixed)
        self._together = together
        self._outer: dict[int, set[int]] = {}
        self._views: dict[int, defaultdict[int, int]] = {}
        self._held_by: dict[int, dict[int, int]] = {}
        self._swapped: defaultdict[int, int] = defaultdict(int)
        self._made_again: defaultdict[int, int] = defaultdict(int)
        self._held = self._most_of_one = self._peak = 0
        self._working = self._peak_working = 0

    def begin(self, micro_batch: int, inputs: Iterable[Tensor], received: Iterable[Tensor] = ()) -> None:
        """Start a forward, or a half of one, on these inputs of the model.

        Args:
            received: tensors of another stage. Of one that is some rows of what a stage of this rank made, those rows
                are this stage's part.
        """
        self._outer.setdefault(micro_batch, set()).update(storage_id(tensor) for tensor in inputs)
        self._held_by.setdefault(micro_batch, {})
        views = self._views[micro_batch] = defaultdict(int)
        for tensor in received:
            if tensor.layout is torch.strided and tensor.nbytes < tensor.untyped_storage().nbytes():
                views[storage_id(tensor)] += tensor.nbytes

    def keep(self, micro_batch: int, tensor: Tensor) -> None:
        """Note that a micro-batch keeps a tensor on the device."""
        if tensor.layout is not torch.strided:
            return
        key = storage_id(tensor)
        held_now = self._held_by[micro_batch]
        if key in held_now or key in self._fixed or key in self._outer[micro_batch]:
            return
        whole = tensor.untyped_storage().nbytes()
        held_now[key] = self._views[micro_batch].get(key, whole)
        self._held += held_now[key]
        self._peak = max(self._peak, self._held)
        if self._together is not None:
            self._together.keep(key, whole)

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
        held_now = self._held_by.pop(micro_batch, {})
        held = sum(held_now.values())
        if self._together is not None:
            for key in held_now:
                self._together.let_go(key)
        self._outer.pop(micro_batch, None)
        self._views.pop(micro_batch, None)
        self._held -= held
        self._most_of_one = max(self._most_of_one, held)

    def counts(self) -> MemoryCounts:
        """Return what was counted."""
        for micro_batch in list(self._held_by):  # not a sum: still in flight
            self._most_of_one = max(self._most_of_one, sum(self._held_by[micro_batch].values()))
        return MemoryCounts(
            held_bytes=self._most_of_one,
            swapped_bytes=max(self._swapped.values(), default=0),
            recomputed_bytes=max(self._made_again.values(), default=0),
            peak_held_bytes=self._peak,
            working_bytes=self._peak_working,
        )


class StorageNumbers:
    """The numbers of the storages that one forward of a user's module keeps, in the order in which it first keeps them.

    A plan names storages by these numbers: who profiles a module and who runs it count alike. A storage that is freed
    while the forward runs never lends its number to another: it is watched, which keeps its address from being used
    again.

    Args:
        fixed: tensors that are there anyway (parameters, buffers, the model's inputs); they have none.
    """

    def __init__(self, fixed: Iterable[Tensor]) -> None:
        self._fixed = {storage_id(tensor) for tensor in fixed if tensor.layout is torch.strided}
        self._numbers: dict[int, int] = {}
        self._watched: list[StorageWeakRef] = []

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a saved tensor's storage; None where it has none."""
        if tensor.layout is not torch.strided:
            return None
        key = storage_id(tensor)
        if key in self._fixed:
            return None
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._watched)
            self._watched.append(StorageWeakRef(tensor.untyped_storage()))
        return found

    def is_free(self, number: int) -> bool:
        """Return whether nobody holds a storage any more."""
        return bool(self._watched[number].expired())


# ---- what autograd holds in place of a saved tensor ------------------------------------------------

Versioned = tuple[Tensor, int]
"""A saved tensor and its version, which autograd does not check where there are hooks."""


Packed = Versioned | Callable[[], Tensor]
"""What stands for a saved tensor: itself where it stays, else what brings it back from the host or makes it again."""


def pack_versioned(tensor: Tensor) -> Versioned:
    """Return what stands for a saved tensor that stays where it is: not itself, or it would hold its own graph."""
    return tensor.detach(), tensor._version


def unpack(packed: Packed) -> Tensor:
    """Return the tensor that autograd saved.

    Raises:
        RuntimeFailure: it was written meanwhile.
    """
    if not isinstance(packed, tuple):
        return packed()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeFailure(
            f"a tensor of shape {tuple(tensor.shape)} was written in place after it was saved for backward (version "
            f"{version}, now {tensor._version}): a buffer that the forward uses and updates allows one micro-batch "
            "in flight"
        )
    return tensor


class Pass:
    """One forward of a stage's code, of a micro-batch or half of one, and what is saved of it until its backward.

    It holds nothing that autograd or a plan could release earlier: arguments and outputs pass through.

    Args:
        call: the code.
        counter: None where nothing is counted.
    """

    def __init__(
        self, call: Callable[..., tuple[Tensor, ...]], *, micro_batch: int, counter: MemoryCounter | None
    ) -> None:
        self._call = call
        self._micro_batch = micro_batch
        self._counter = counter

    def packer(self) -> Callable[[Tensor], Packed]:
        """Return what takes each tensor that autograd saves, in order, and says what stands for it."""
        return self.keep

    def run(self, fixed: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the code on parameters and the model's inputs, and on what other stages sent; return its outputs."""
        return self._call(*fixed, *received)

    def keep(self, tensor: Tensor) -> Packed:
        """Leave a saved tensor where it is."""
        self.count(tensor)
        return pack_versioned(tensor)

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that stays on the device."""
        if self._counter is not None:
            self._counter.keep(self._micro_batch, tensor)

    def finish(self) -> None:
        """End the forward."""

    def prefetch(self, *, beside_forward: bool = False) -> None:
        """Bring back what the backward needs first; ``beside_forward`` as of `SwapLink.bring`."""

    def call_behind(self, behind: Callable[[], None]) -> None:
        """Call something when the backward uses the last that came back; never where nothing does."""
