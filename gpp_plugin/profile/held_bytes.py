"""Bytes a piece of code holds: what it saves for backward, and its peak while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class SavedStorages:
    """The storages autograd saved while `recording` was open, each once, by data pointer.

    Args:
        exclude: tensors whose storages do not count (parameters, constants).
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {storage_key(tensor) for tensor in exclude}
        self._held: list[Tensor] = []
        self.bytes_of: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[SavedStorages]:
        """Count what is saved inside the block; the tensors are held until `clear`, so no pointer recurs."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield self

    def _pack(self, tensor: Tensor) -> Tensor:
        # Each storage once, however many views of it are saved; a sparse tensor has none and is rare enough to leave
        # out
        key = storage_key(tensor)
        if key not in self._excluded and tensor.layout is torch.strided:
            self._held.append(tensor.detach())
            self.bytes_of[key] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an operator that held its own result would hold its graph, for ever

    def clear(self) -> None:
        """Release the tensors held."""
        self._held.clear()

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all storages."""
        return sum(self.bytes_of.values())


def storage_key(tensor: Tensor) -> int:
    """Return what identifies the memory of ``tensor`` while it lives."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make while it is active, and their peak.

    Sees every operator's results, of the backward too, but not scratch memory inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[weakref.ref[Any], int] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of ``tensors`` should an operator return them."""
        for tensor in (t for t in tensors if t.layout is torch.strided):
            self._sizes.setdefault(weakref.ref(tensor.untyped_storage(), self._forget), 0)

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak_bytes = self.live_bytes

    def _forget(self, reference: weakref.ref[Any]) -> None:
        self.live_bytes -= self._sizes.pop(reference, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A weak reference is called when the storage is freed: live bytes are those made and not freed yet. Views and
        # results in place have a storage that is known already.
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                reference = weakref.ref(storage, self._forget)
                if reference not in self._sizes:
                    self._sizes[reference] = storage.nbytes()
                    self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result
