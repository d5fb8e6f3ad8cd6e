"""What a plan may use of a CUDA device: what is free when everything but the plan is there, less a reserve.

A device's total is no limit. Before the first tensor of a stage, each process holds a CUDA context, loaded kernels,
what NCCL allocates and the workspaces of cuBLAS; while it trains, more communicators are made and the allocator loses
some to fragmentation. So the first are made, what is free then is asked of the driver, and the rest is reserved:

    usable = free / ranks of the device - communicators to come x bytes of one - a share for fragmentation

    81559 MiB of an H100
      - 1700 context, kernels, NCCL, cuBLAS           measured: not in ``free_bytes``
      = 79859 free
      - 8 x 130 communicators                          one is measured
      - 3993 fragmentation                             5 % of what is free
      = 74826 usable

Source: this project
Tests: tests/profile/test_device_memory.py
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpp_plugin.report.units import format_bytes
from gpp_plugin.runtime.ranks.agree import exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement

logger = logging.getLogger(__name__)

COMMUNICATORS = 8
"""Communicators that a rank is counted with: those of all ranks, of its data positions, of its tensor positions and of
what it shares with other stages, and one a direction with a rank before it and a rank behind it. A stage whose ranks
talk to more has more; each of these has two ranks and is smaller than the one that is measured, of all ranks."""

FRAGMENTATION = 0.05
"""Share of what is free that torch's allocator may hold and not use: it gives out parts of segments of 2 and 20 MiB,
and keeps a segment while any part is used."""

WIDTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What one rank finds of its device's memory, in bytes.

    Args:
        name: the device's model.
        total_bytes, free_bytes: of the whole device; free while its ranks' contexts, loaded kernels and workspaces are
            there.
        sharers: ranks that share the device.
        communicator_bytes: of one more NCCL communicator; 0 where the job has none.
        workspace_bytes: of cuBLAS, for the threads that run forwards and backwards; in use already.
        held_bytes: of tensors that the process had before it was asked; in use too.
    """

    name: str
    total_bytes: int
    free_bytes: int
    sharers: int = 1
    communicator_bytes: int = 0
    workspace_bytes: int = 0
    held_bytes: int = 0

    @property
    def share_bytes(self) -> int:
        """Return this rank's part of what is free: what a limit given by the user may not exceed."""
        return self.free_bytes // self.sharers

    @property
    def reserved_bytes(self) -> int:
        """Return what of the rank's part is left for what is made later than the plan."""
        return COMMUNICATORS * self.communicator_bytes + int(FRAGMENTATION * self.share_bytes)

    @property
    def usable_bytes(self) -> int:
        """Return what a plan may use: ``memory.limit_gb: "auto"``."""
        return max(self.share_bytes - self.reserved_bytes, 0)

    @property
    def explanation(self) -> str:
        """Return the numbers behind `usable_bytes` in one line."""
        shared = f", shared by {self.sharers} ranks" if self.sharers > 1 else ""
        parts = [f"{format_bytes(int(FRAGMENTATION * self.share_bytes))} for fragmentation"]
        if self.communicator_bytes:
            parts.insert(0, f"{COMMUNICATORS} communicators of {format_bytes(self.communicator_bytes)}")
        held = f"{format_bytes(self.held_bytes)} of tensors, " if self.held_bytes else ""
        return (
            f'memory.limit_gb "auto" is {self.usable_bytes / 1e9:.3f} GB a rank on {self.name}: '
            f"{format_bytes(self.free_bytes)} free of {format_bytes(self.total_bytes)} (in use: {held}"
            f"{format_bytes(self.workspace_bytes)} of cuBLAS, contexts, kernels){shared}, less {' and '.join(parts)}"
        )


def least_of_equals(found: Sequence[DeviceMemory]) -> tuple[DeviceMemory, ...]:
    """Return for each rank the device of its model on which a plan may use least.

    A plan is for kinds of devices: two ranks of one kind that could use unlike amounts would make the plan depend on
    which of them is which.
    """
    least: dict[str, DeviceMemory] = {}
    for each in found:
        if each.name not in least or each.usable_bytes < least[each.name].usable_bytes:
            least[each.name] = each
    return tuple(least[each.name] for each in found)


def measure_memory(
    placement: JobPlacement,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype,
    communicator_bytes: int,
) -> tuple[DeviceMemory, ...]:
    """Return what each rank finds on its CUDA device, lowest of equals; collective over all ranks.

    Args:
        group: a CPU group of all ranks; None for a single rank.
        dtype: what the job computes in.
        communicator_bytes: what one takes here (`MeasuredCommunicator`).
    """
    device = placement.own_device
    held = torch.cuda.memory_allocated(device)
    workspace = use_cublas(device, dtype)
    exchange(
        lambda: None, what="the CUDA contexts of all ranks", group=group
    )  # those that share a device, too

    def look() -> DeviceMemory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(
            name=placement.own_place.name,
            total_bytes=total,
            free_bytes=free,
            sharers=placement.own_sharers,
            communicator_bytes=communicator_bytes,
            workspace_bytes=workspace,
            held_bytes=held,
        )

    found = least_of_equals(exchange(look, what="the free memory of the devices", group=group))
    if placement.rank == 0:
        for each in {each.name: each for each in found}.values():
            logger.info("%s", each.explanation)
    return found


def use_cublas(device: torch.device, dtype: torch.dtype) -> int:
    """Multiply matrices forwards and backwards, and return the bytes of workspaces that stay.

    cuBLAS has a handle, and with it a workspace, for each thread that computes: the caller's, and autograd's. Their
    size is CUBLAS_WORKSPACE_CONFIG's, or by the device 8 or 32 MiB, and cuBLASLt's likewise.
    """
    before = torch.cuda.memory_allocated(device)
    left, weight = (
        torch.zeros(WIDTH, WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    bias = torch.zeros(WIDTH, device=device, dtype=dtype, requires_grad=True)
    (F.linear(left, weight, bias) @ weight).sum().backward()  # cuBLASLt, then cuBLAS
    torch.cuda.synchronize(device)
    del left, weight, bias
    return max(torch.cuda.memory_allocated(device) - before, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCommunicator:
    """A NCCL group of all ranks, made to see what one takes on a device; it can be used until it is closed."""

    group: dist.ProcessGroup
    num_bytes: int

    @classmethod
    def make(cls, device: torch.device, timeout_s: float) -> MeasuredCommunicator:
        """Make it; collective over all ranks of the default group."""
        # The first one loads NCCL's kernels as well, which happens once: what the second takes is what one takes.
        made: list[dist.ProcessGroup] = []
        free: list[int] = []
        for _ in range(2):
            group = dist.new_group(backend="nccl", timeout=datetime.timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup), "every rank is in it"
            free.append(torch.cuda.mem_get_info(device)[0])
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            torch.cuda.synchronize(device)
            made.append(group)
        taken = free[1] - torch.cuda.mem_get_info(device)[0]
        dist.destroy_process_group(made[1])
        return cls(group=made[0], num_bytes=max(taken, 0))

    def close(self) -> None:
        """Let go of it."""
        dist.destroy_process_group(self.group)
