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

import dataclasses
import datetime
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpp_plugin.ir.cluster import Cluster, MeasuredCollective
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.profile.device_links import MESSAGE_BYTES
from gpp_plugin.profile.machine import COPY_BYTES, reached_speeds, seconds_of
from gpp_plugin.report.units import format_bytes
from gpp_plugin.runtime.ranks.collectives import all_reduce, begin_all_gather, exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import JobPlacement

# What one device of a machine reaches, type by type, and what its ranks reach together: the entries of a cluster file.
#
#     products      of large square matrices, by type                    tflops
#     copies        on the device, and to and from pinned host memory    memory_gb_per_s, host_gb_per_s
#     launches      of one small operator after another                  launch_us
#     collectives   over all ranks of each level of links                all_reduce, all_gather of the link
#
# Speeds are reached ones, so that descriptions made of them have efficiency 1.

MEASURED_DTYPES = {"cuda": ("bf16", "fp16", "fp32"), "cpu": ("fp32", "bf16")}
"""By type of device what is multiplied in, the usual one first; CPUs are not tried in fp16, which most lack."""
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """What one device reaches.

    Args:
        flops_per_s: of products, by type as descriptions name them.
        host_bytes_per_s: one way, to pinned host memory; None on CPUs, which are the host.
    """

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_us: float
    host_bytes_per_s: float | None = None

    def lines(self) -> list[str]:
        """Return it for a user."""
        found = [f"{dtype}: {flops / 1e12:.3g} TFLOP/s" for dtype, flops in self.flops_per_s.items()]
        found.append(f"memory {self.memory_bytes_per_s / 1e9:.3g} GB/s, a launch {self.launch_us:.1f} us")
        if self.host_bytes_per_s is not None:
            found.append(f"to the host {self.host_bytes_per_s / 1e9:.3g} GB/s")
        return found


def measure_device(device: torch.device) -> MeasuredDevice:
    """Return what a device reaches; a second or so."""
    reached = {
        dtype: reached_speeds(device.type, getattr(torch, TRAINING_DTYPES[dtype]))
        for dtype in MEASURED_DTYPES[device.type]
    }
    first = next(iter(reached.values()))
    host = None
    if device.type == "cuda":
        pinned = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        ways = (
            lambda: there.copy_(pinned, non_blocking=True),
            lambda: pinned.copy_(there, non_blocking=True),
        )
        host = min(COPY_BYTES / seconds_of(way, is_cuda=True) for way in ways)
    return MeasuredDevice(
        flops_per_s={dtype: flops for dtype, (flops, _, _) in reached.items()},
        memory_bytes_per_s=first[1],
        launch_us=first[2],
        host_bytes_per_s=host,
    )


def measure_collectives(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[MeasuredCollective, MeasuredCollective]:
    """Return what an all-reduce and an all-gather over a group take: bus bandwidth and latency; collective.

    Args:
        group: NCCL's, with tensors on ``device``, or gloo's.
    """
    backend = "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"
    size, is_cuda = dist.get_world_size(group), backend == "nccl"
    where = device if is_cuda else torch.device("cpu")
    whole = torch.zeros(MESSAGE_BYTES[backend] // size * size, dtype=torch.uint8, device=where)
    part, share = torch.zeros_like(whole[: whole.numel() // size]), (size - 1) / size
    what = "measuring collectives"

    def gather(count: int) -> None:
        begin_all_gather(whole[:count], part[: count // size], group=group, what=what)()

    def reduce(count: int) -> None:
        all_reduce(whole[:count], group=group, what=what)

    # a ring's all-reduce moves each byte over every link twice, an all-gather once, but for the rank's own part
    found = []
    for sent, call in ((2 * share, reduce), (share, gather)):
        small, large = (
            seconds_of(functools.partial(call, count), is_cuda=is_cuda) for count in (size, whole.numel())
        )
        busy = max(large - small, large / 2)
        found.append(MeasuredCollective(bytes_per_s=sent * whole.numel() / busy, latency_us=small * 1e6))
    return found[0], found[1]


def with_measured(
    cluster: Cluster, measured: Mapping[str, MeasuredDevice], shares: Mapping[int, float]
) -> Cluster:
    """Return a cluster whose devices have the speeds that were measured, in all types.

    Args:
        measured: by the device's name.
        shares: by rank, its part of its device; 1 where missing.
    """
    devices = []
    for rank, device in enumerate(cluster.devices):
        found, share = measured[device.name], shares.get(rank, 1.0)
        peaks = {dtype: flops * share for dtype, flops in found.flops_per_s.items()}
        dtype = next(iter(peaks))
        devices.append(
            dataclasses.replace(
                device,
                flops_per_s=peaks[dtype],
                dtype=dtype,
                peaks=tuple(peaks.items()),
                memory_bytes_per_s=found.memory_bytes_per_s * share,
                launch_us=found.launch_us,
                host_bytes_per_s=found.host_bytes_per_s or device.host_bytes_per_s,
            )
        )
    return dataclasses.replace(cluster, devices=tuple(devices))


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
        held_bytes: of tensors that the process had before the measurement; in use too.
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
        """Return this rank's part of what is free: what a limit of the user's may not exceed."""
        return self.free_bytes // self.sharers

    @property
    def usable_bytes(self) -> int:
        """Return what a plan may use: ``memory.limit_gb: "auto"``."""
        # the rest of the rank's part is left for what is made later than the plan
        reserved = COMMUNICATORS * self.communicator_bytes + int(FRAGMENTATION * self.share_bytes)
        return max(self.share_bytes - reserved, 0)

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

    A plan is for kinds of devices: two ranks of one kind with different amounts would make the plan depend on which of
    them is which.
    """
    least: dict[str, DeviceMemory] = {}
    for each in found:
        if each.name not in least or each.usable_bytes < least[each.name].usable_bytes:
            least[each.name] = each
    return tuple(least[each.name] for each in found)


def measure_memory(
    placement: JobPlacement, group: dist.ProcessGroup | None, *, dtype: torch.dtype, communicator_bytes: int
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
    # those that share a device, too
    exchange(lambda: None, what="the CUDA contexts of all ranks", group=group)

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
    shapes = (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)
    left, weight, bias = (torch.zeros(s, device=device, dtype=dtype, requires_grad=True) for s in shapes)
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
        """Destroy the group."""
        dist.destroy_process_group(self.group)
