"""The factor on every loss, as DeepSpeed's scalers choose it; the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import get_float16_config

from gpp_plugin.errors import RuntimeFailure

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """Static or dynamic under fp16, else 1.

    Args:
        config: the user's DeepSpeed JSON; its ``fp16`` block is read.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        half = get_float16_config(dict(config))
        self._scaler: Any = CreateLossScaler(
            dtype=torch.half if dtype == torch.float16 else dtype,
            static_loss_scale=half.loss_scale,
            dynamic_scaling=half.loss_scale == 0,
            dynamic_loss_args=half.dynamic_loss_scale_args(),
        )

    @property
    def value(self) -> float:
        """Return the scale in force."""
        return float(self._scaler.loss_scale)

    def update(self, overflow: bool, *, step: int) -> None:
        """Choose the scale of the next mini-batch.

        Raises:
            RuntimeFailure: it cannot sink any further.
        """
        scale = self.value
        try:
            self._scaler.update_scale(overflow)
        except Exception as error:  # DeepSpeed raises a bare Exception
            raise RuntimeFailure(
                f"step {step}: gradients overflow at the smallest loss scale, {scale:g}; "
                "lower the learning rate, use bf16, or lower fp16.min_loss_scale"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: nothing of a static scale."""
        return {key: getattr(self._scaler, key) for key in _STATE if self._scaler.dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._scaler.dynamic:
            vars(self._scaler).update(state)
