"""Numbers of the storages that a user's module keeps for backward, in the order in which it first keeps them.

A plan names storages by these numbers: who profiles a module and who runs it count alike. A storage that is freed
while the forward runs never lends its number to another: it is watched, which keeps its address from being used again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gpp_plugin.runtime.counting import storage_id


class StorageNumbers:
    """The numbers of one forward.

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
