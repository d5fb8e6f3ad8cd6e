"""Layer norms for sequence-parallel stages without Apex or Transformer Engine.

megatron-core's own fallback, `WrappedTorchNorm`, refuses sequence parallelism, because torch's norms lack the mark by
which partial gradients are summed over the tensor group. This one sets it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class SequenceParallelNorm:
    """Makes torch's LayerNorm or RMSNorm as ``config.normalization`` says, with Megatron's mark on its parameters."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        """Return the norm; called as Megatron's specs call a norm's class."""
        make: Any = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm: nn.Module = make(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
