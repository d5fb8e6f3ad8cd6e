"""What one device of a machine reaches, type by type, and what its ranks reach together: the entries of a cluster file.

    products      of large square matrices, by type                    tflops
    copies        on the device, and to and from pinned host memory    memory_gb_per_s, host_gb_per_s
    launches      of one small operator after another                  launch_us
    all-reduce    over all ranks: bytes over the slowest link          told, not written: it follows from the links

Speeds are reached ones, so that descriptions made of them have efficiency 1. What is of CUDA here has not been run on
the machines this project is developed on; `reached_speeds` is the same code on both.

Source: this project
Tests: tests/profile/test_device_speeds.py
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.profile.device_links import MESSAGE_BYTES
from gpp_plugin.profile.machine import COPY_BYTES, reached_speeds, seconds_of

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


def measure_all_reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bytes a second that a ring all-reduce over all ranks moves on its slowest link; collective.

    Args:
        group: of all ranks: NCCL's, with tensors on ``device``, or gloo's.
    """
    backend = "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"
    size = dist.get_world_size(group)
    where = device if backend == "nccl" else torch.device("cpu")
    block = torch.zeros(MESSAGE_BYTES[backend], dtype=torch.uint8, device=where)
    best = float("inf")
    for i in range(REPEATS + 1):  # the first one connects
        start = time.perf_counter()
        dist.all_reduce(block, group=group)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        if i:
            best = min(best, time.perf_counter() - start)
    # each of 2 (n - 1) steps of a ring moves an n-th of the bytes over every link
    return 2 * (size - 1) / size * block.numel() / best


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
