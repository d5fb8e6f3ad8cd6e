"""Branches on overflow while a model is traced: ``if not isfinite(x).all(): x = clamp(x)`` becomes a choice of values.

Encoders of BART, Marian, LED, the DETR family and others clamp what half precision cannot hold, in a Python branch on
the values of an activation. While such a model is traced, the branch is entered, and the clamp in it gives

    torch.where(isfinite(x).all(), x, torch.clamp(x, low, high))

which is x to the bit where the branch would not have been entered, and the clamped tensor where it would. A branch that
holds no clamp of the tensor that it checks is refused.

Source: this project
Tests: tests/capture/test_values.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpp_plugin.errors import CaptureError

_CLAMPS = frozenset(("clamp", "clip"))


class OverflowMode(TorchFunctionMode):
    """Enters branches on overflow and makes the clamp in them depend on what they check."""

    def __init__(self) -> None:
        super().__init__()
        # id of a check's tensor -> (it, the tensor that it is of, whether it says that all is well); held, so that
        # ids stay their own
        self._checks: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._entered: tuple[Tensor, Tensor, bool] | None = None

    def close(self) -> None:
        """Refuse a branch whose clamp did not come.

        Raises:
            CaptureError: there is one.
        """
        if self._entered is not None:
            raise CaptureError(
                "the Python code depends on tensor values: a branch on isfinite() or isinf() does something else than "
                "clamp the tensor that it checks; use torch.where"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; note checks for overflow, and decide a branch on one."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return func(*args, **kwargs)
        if name == "__bool__" and id(first) in self._checks and first.dim() == 0:
            self.close()
            self._entered = self._checks[id(first)]
            return not self._entered[2]
        if name in _CLAMPS and self._entered is not None and first is self._entered[1]:
            check, _, is_well = self._entered
            self._entered = None
            return torch.where(check if is_well else ~check, first, func(*args, **kwargs))
        result = func(*args, **kwargs)
        if name in ("isfinite", "isinf") and isinstance(result, Tensor):
            self._checks[id(result)] = result, first, name == "isfinite"
        elif name in ("all", "any") and id(first) in self._checks and len(args) == 1 and not kwargs:
            _, checked, is_well = self._checks[id(first)]
            if is_well == (name == "all"):
                self._checks[id(result)] = result, checked, is_well
        return result
