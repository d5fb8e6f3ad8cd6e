"""What a job runs in: its ranks, device, precision and sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gpp_plugin.config import BatchSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a job runs in: ranks, device, precision, sizes.

    Args:
        group: a CPU process group of all ranks for small agreements; None for a single rank.
        dtype: training precision of parameters and floating inputs.
        optimizer_bytes: optimizer state, master copy and gradient sum for each trainable parameter.
    """

    rank: int
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    sizes: BatchSizes
    zero_stage: int
    optimizer_bytes: float
    group: dist.ProcessGroup | None
