"""What a stage's factory is told of the place it builds for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gpp_plugin.stage_graph.graph import StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """One rank's place in a stage's grid of data x tensor positions.

    Args:
        stage: the stage's name.
        rank: this global rank.
        device: where the stage computes; the factory may build there or anywhere else, it is moved.
        dtype: training precision; floating parameters are cast to it.
        data_group: ranks of the same tensor position, which hold the same weights and take other samples; None
            only where torch.distributed is not initialised.
        tensor_group: ranks of the same data position, which share out the weights; likewise. It takes tensors of the
            device and of the CPU.
        data_rank, data_size: this rank's data position, and how many there are.
        tensor_rank, tensor_size: this rank's tensor position, and how many there are.
    """

    stage: str
    rank: int
    device: torch.device
    dtype: torch.dtype
    data_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int


def make_context(
    stages: Sequence[StageSpec], *, rank: int, device: torch.device, dtype: torch.dtype
) -> StageContext:
    """Return this rank's context; collective over all ranks where torch.distributed is initialised.

    Args:
        stages: all of them, in the same order on every rank, their ranks checked.
    """
    own: StageContext | None = None
    for stage in stages:
        rows = [stage.ranks[i : i + stage.tensor] for i in range(0, len(stage.ranks), stage.tensor)]
        columns = [stage.ranks[i :: stage.tensor] for i in range(stage.tensor)]
        both = "cpu:gloo,cuda:nccl" if device.type == "cuda" else None
        tensor_group, data_group = _own_group(rows, rank, backend=both), _own_group(columns, rank)
        if rank in stage.ranks:
            data_rank, tensor_rank = divmod(stage.ranks.index(rank), stage.tensor)
            own = StageContext(
                stage=stage.name,
                rank=rank,
                device=device,
                dtype=dtype,
                data_group=data_group,
                tensor_group=tensor_group,
                data_rank=data_rank,
                data_size=len(rows),
                tensor_rank=tensor_rank,
                tensor_size=stage.tensor,
            )
    assert own is not None, "every rank is in a stage"
    return own


def _own_group(
    members: Sequence[Sequence[int]], rank: int, *, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create a group of each of ``members`` and return the one that ``rank`` is in."""
    if not dist.is_initialized():
        return None
    found = None
    for ranks in members:
        group = dist.new_group(list(ranks), backend=backend)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found
