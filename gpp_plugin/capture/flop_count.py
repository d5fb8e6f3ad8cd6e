"""Counts floating-point operations of the operators below autograd while they run, on real or fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class FlopCount(TorchDispatchMode):
    """What was computed since ``flops`` was last set to zero."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        # Three kinds: products, counted by torch's own formulas (2 m n k of an m x k by k x n); attention as the CPU
        # runs it, which torch has no formula for; and all else, one operation an element of the result. Views are free.
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif packet is _CPU_ATTENTION:
            self.flops += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif not func.is_view:
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            self.flops += first.numel() if isinstance(first, torch.Tensor) else 0
        return result
