"""What a stage's factory receives about the place it builds for."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class StageGrid(Protocol):
    """What a context takes of a stage as it was written down: its name, and its ranks, ``tensor`` of them a row."""

    @property
    def name(self) -> str:
        """Return the stage's name."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return its ranks row by row, a data position each."""

    @property
    def tensor(self) -> int:
        """Return how many ranks share out a data position's weights."""


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
        single_group: this rank alone; likewise.
        data_rank, data_size: this rank's data position, and how many there are.
        tensor_rank, tensor_size: this rank's tensor position, and how many there are.
    """

    stage: str
    rank: int
    device: torch.device
    dtype: torch.dtype
    data_group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    single_group: dist.ProcessGroup | None
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups there are."""
        groups = (self.data_group, self.tensor_group, self.single_group)
        return tuple(group for group in groups if group is not None)

    def set_timeout(self, timeout_s: float) -> None:
        """Let collectives in the groups, from now on, wait for so long: the plan's times are known after them."""
        for group in self.groups:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)

    def close(self) -> None:
        """Release the groups; nothing may be under way in them."""
        for group in self.groups:
            dist.destroy_process_group(group)


def make_contexts(
    stages: Sequence[StageGrid],
    *,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float,
    backend: str = "gloo",
) -> dict[str, StageContext]:
    """Return this rank's contexts by stage; collective over all ranks where torch.distributed is initialised.

    Args:
        stages: all of them, in the same order on every rank, their ranks checked.
        timeout_s: how long a collective in its groups waits for its peers.
        backend: what moves the device's tensors (`JobPlacement.backend`).
    """
    own: dict[str, StageContext] = {}
    timeout = datetime.timedelta(seconds=timeout_s)
    for stage in stages:
        rows = [stage.ranks[i : i + stage.tensor] for i in range(0, len(stage.ranks), stage.tensor)]
        columns = [stage.ranks[i :: stage.tensor] for i in range(stage.tensor)]
        # gloo alone serves both, through host memory, where ranks share a device
        both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        tensor_group = _own_group(rows, rank, timeout, backend=both)
        data_group = _own_group(columns, rank, timeout, backend=backend)
        single_group = _own_group([[r] for r in stage.ranks], rank, timeout, backend=backend)
        if rank in stage.ranks:
            data_rank, tensor_rank = divmod(stage.ranks.index(rank), stage.tensor)
            own[stage.name] = StageContext(
                stage=stage.name,
                rank=rank,
                device=device,
                dtype=dtype,
                data_group=data_group,
                tensor_group=tensor_group,
                single_group=single_group,
                data_rank=data_rank,
                data_size=len(rows),
                tensor_rank=tensor_rank,
                tensor_size=stage.tensor,
            )
    assert own, "every rank is in a stage"
    return own


def _own_group(
    members: Sequence[Sequence[int]], rank: int, timeout: datetime.timedelta, *, backend: str
) -> dist.ProcessGroup | None:
    """Create a group of each of ``members`` and return the one that ``rank`` is in."""
    if not dist.is_initialized():
        return None
    found = None
    for ranks in members:
        if len(ranks) == 1 and rank not in ranks:
            continue  # a rank's own is its own affair: of many ranks nobody passes through all of them
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=len(ranks) == 1
        )
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found
