"""Notes where the host reads a tensor, which on a GPU means to wait for it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = Path(__file__).parents[1] / "gpp_plugin"
_READING_CALLS = {
    Tensor.item: "item",
    Tensor.tolist: "tolist",
    Tensor.cpu: "cpu",
    Tensor.numpy: "numpy",
    Tensor.__bool__: "bool",
    Tensor.__int__: "int",
    Tensor.__float__: "float",
    Tensor.__index__: "index",
    # from a list: on a GPU a copy from pageable memory, which the host waits for
    torch.tensor: "tensor",
    torch.as_tensor: "as_tensor",
}
_READING_OPERATORS = (
    "aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.nonzero", "aten.equal", "aten.masked_select",
    "aten._unique2", "aten.unique_dim", "aten.unique_consecutive", "aten.bincount",
)  # fmt: skip
# Copies that only a CPU's swap link makes: on a GPU they are asynchronous (`runtime.memory.swap`).
_ALLOWED_FILES = ("swap.py",)


class HostReads:
    """The reads of one thread while `watching`, each as what it is and where the package does it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.is_in_call = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of reads."""
        with _Calls(self), _Operators(self):
            yield

    def note(self, what: str) -> None:
        """Take note of one read."""
        frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        if not where.startswith(_ALLOWED_FILES):
            self.found.append(f"{what} at {where}")


class _Calls(TorchFunctionMode):
    """Calls from Python, which on the CPU may end without an operator."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READING_CALLS:
            self._reads.note(_READING_CALLS[func])
            self._reads.is_in_call = True  # its operators are the same read
            try:
                return func(*args, **kwargs)
            finally:
                self._reads.is_in_call = False
        elif func in (Tensor.to, Tensor.cuda) and _names_a_device(args[1:], kwargs):
            self._reads.note("to a device")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Operators, wherever they are called from."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).rpartition(".")[0]
        is_masked = name in ("aten.index", "aten.index_put", "aten.index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (is_masked or name in _READING_OPERATORS) and not self._reads.is_in_call:
            self._reads.note(name)
        return func(*args, **(kwargs or {}))


def _names_a_device(args: Any, kwargs: Mapping[str, Any]) -> bool:
    return "device" in kwargs or any(isinstance(a, (torch.device, str)) for a in args) or not (args or kwargs)
