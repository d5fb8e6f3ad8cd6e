"""This machine: its names, and as a cluster what its devices and memory are, and how fast they turn out to be.

Also what was measured on it: a store on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from gpp_plugin.errors import GppError, ProfileError
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import fingerprint, load, save
from gpp_plugin.ir.tensors import TRAINING_DTYPES
from gpp_plugin.plan.cluster_files import USUAL_DTYPE

logger = logging.getLogger(__name__)

T = TypeVar("T")

WIDTH = 1024
CUDA_WIDTH = 4096
"""A product of 1024 x 1024 is over before a GPU is busy."""
CUDA_BURST = 8
"""Operations that are waited for together: what the host needs to notice the end is no part of one."""
COPY_BYTES = 1 << 26
REPEATS = 5
CPU_LINK = Link(name="loopback", span=1, bytes_per_s=2e9, latency_us=100.0)
CUDA_LINK = Link(name="PCIe", span=1, bytes_per_s=2e10, latency_us=10.0)


def read_machine(
    num_devices: int | None = None,
    *,
    sharing: int | None = None,
    device_type: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Cluster:
    """Return this machine as ranks: its CUDA devices, or its memory and cores shared by CPU ranks.

    Multiplication and copying are timed (once a process, a fraction of a second), so speeds are reached ones
    and the efficiency is 1. Links are not timed: 2 GB/s between processes, 20 GB/s between CUDA devices.

    Args:
        num_devices: ranks; by default the CUDA devices, or one a core. More ranks than devices share them.
        sharing: how many of the ranks are on this machine; all by default.
        device_type: ``cpu`` or ``cuda``; by default CUDA where there is any.
        dtype: what the ranks multiply in.
    """
    # Two ranks on a laptop of 2 cores and 8 GB are two devices of 4 GB and half the machine's speed each: they
    # compute at the same time. Four ranks on one GPU have a quarter of it each; one rank on a machine of four GPUs
    # has one of them.
    is_cuda = torch.cuda.is_available() if device_type is None else device_type == "cuda"
    there = torch.cuda.device_count() if is_cuda else os.cpu_count() or 1
    ranks = num_devices if num_devices is not None else there
    here = sharing if sharing is not None else ranks
    if is_cuda:
        properties = torch.cuda.get_device_properties(0)
        name, memory, share = properties.name, properties.total_memory, min(1.0, there / here)
    else:
        name, memory, share = "cpu", host_bytes(), 1 / here
    reached = reached_speeds("cuda" if is_cuda else "cpu", dtype)
    device = make_device(name, int(memory * share), reached, share=share, dtype=dtype)
    link = dataclasses.replace(CUDA_LINK if is_cuda else CPU_LINK, span=ranks)
    return Cluster(name="auto", devices=(device,) * ranks, links=(link,))


def make_device(
    name: str,
    memory_bytes: int,
    reached: tuple[float, float, float],
    *,
    share: float,
    dtype: torch.dtype = torch.float32,
) -> Device:
    """Return a rank's device.

    Args:
        reached: of the whole device, as of `reached_speeds`.
        share: the rank's part of it.
        dtype: in which it was measured.
    """
    flops_per_s, bytes_per_s, launch_us = reached
    short = short_dtype(dtype)
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        flops_per_s=flops_per_s * share,
        dtype=short or USUAL_DTYPE,
        peaks=((short, flops_per_s * share),) if short else (),
        memory_bytes_per_s=bytes_per_s * share,
        efficiency=1.0,
        launch_us=launch_us,
    )


def short_dtype(dtype: torch.dtype) -> str:
    """Return a type as descriptions of devices name it; "" where they do not.

    >>> short_dtype(torch.bfloat16), short_dtype(torch.float64)
    ('bf16', '')
    """
    name = str(dtype).removeprefix("torch.")
    return next((short for short, known in TRAINING_DTYPES.items() if known == name), "")


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_device(device: torch.device, threads: int) -> str:
    """Return the device as a `Profile` names it, e.g. ``cpu (2 threads)``."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({threads} thread{'s' if threads != 1 else ''})"


def processor_name() -> str:
    """Return the CPU's model; a home directory, and the store in it, may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} x {os.cpu_count()}"


@functools.cache
def reached_speeds(device_type: str, dtype: torch.dtype = torch.float32) -> tuple[float, float, float]:
    """Return FLOP/s of products in ``dtype``, bytes/s and microseconds of a launch that the device reaches."""
    kind = torch.device(device_type)
    # a separate generator: the caller's dropout must not depend on what was measured
    own = torch.Generator(device=kind).manual_seed(0)
    timed = functools.partial(seconds_of, is_cuda=torch.cuda.is_available())
    width = CUDA_WIDTH if kind.type == "cuda" else WIDTH
    left, right = torch.rand(2, width, width, device=kind, generator=own).to(dtype)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    tiny = torch.zeros(1, device=kind)
    # a product of two n x n matrices is 2 n^3 operations; a copy moves every byte twice, in and out
    return (
        2 * width**3 / timed(lambda: left @ right),
        2 * COPY_BYTES / timed(lambda: target.copy_(source)),
        timed(lambda: tiny.add_(1)) * 1e6,
    )


def seconds_of(operation: Callable[[], object], *, is_cuda: bool) -> float:
    """Return the shortest of a few runs of an operation, after one that does not count."""
    best, count = float("inf"), CUDA_BURST if is_cuda else 1
    for i in range(REPEATS + 1):
        begin = time.perf_counter()
        for _ in range(count):
            operation()
        if is_cuda:
            torch.cuda.synchronize()
        if i:
            best = min(best, (time.perf_counter() - begin) / count)
    return best


# The store of measurements: one JSON file each, under a key of all that they depend on.


def default_directory() -> Path:
    """Return ``gpp_plugin/profiles`` under the user's cache directory (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "gpp_plugin" / "profiles"


class MeasurementStore:
    """Measurements of one kind on disk, by what they depend on.

    Args:
        directory: where the files are; it is made when first written to.
        what: what a file holds, for the warning that it cannot be read.
        lost: the warning where the disk refuses: of the directory and the reason.
        prefix: of the files' names.
    """

    def __init__(self, directory: str | Path, *, what: str, lost: str, prefix: str = "") -> None:
        self.directory = Path(directory)
        self._what, self._lost, self._prefix = what, lost, prefix

    def path(self, key: Mapping[str, object]) -> Path:
        """Return the file for ``key``: what the measurement depends on, as JSON types."""
        # The file's name is the fingerprint of the key alone: another torch, processor, graph or release is another
        # file, and nothing is ever compared or thrown away.
        return self.directory / f"{self._prefix}{fingerprint(dict(key))}.json"

    def look_up(self, key: Mapping[str, object], read: Callable[[Path], T]) -> T | None:
        """Return what is stored; None where there is nothing, or, with a warning, none that can be read."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            return read(path)
        except GppError as error:
            logger.warning("ignoring %s that cannot be read; measuring again: %s", self._what, error)
            return None

    def keep(self, key: Mapping[str, object], write: Callable[[Path], None]) -> None:
        """Store a measurement; where the disk refuses, warn and continue without."""
        try:
            write(self.path(key))
        except OSError as error:
            logger.warning(self._lost, self.directory, error)


class CostStore(MeasurementStore):
    """Profiles on disk.

    Args:
        directory: where the files are; `default_directory` if None.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        lost = (
            "the profile could not be stored in %s (%s); it will be measured again next time, or set "
            "graph_pipeline.profile_dir to a directory that can be written"
        )
        super().__init__(directory or default_directory(), what="a stored profile", lost=lost)

    def find(self, key: Mapping[str, object]) -> Profile | None:
        """Return the stored profile, or None."""
        return self.look_up(key, _read_profile)

    def put(self, key: Mapping[str, object], profile: Profile) -> None:
        """Store a profile."""
        self.keep(key, functools.partial(save, profile))

    def find_or_measure(self, key: Mapping[str, object], measure: Callable[[], Profile]) -> Profile:
        """Return the stored profile, or measure one and store it.

        Raises:
            ProfileError: ``measure`` failed.
        """
        stored = self.find(key)
        if stored is not None:
            logger.info("using the profile stored in %s", self.path(key))
            return stored
        profile = measure()
        if not profile.costs:
            raise ProfileError("the profile measured has no blocks; is the BlockGraph empty?")
        self.put(key, profile)
        return profile


def _read_profile(path: Path) -> Profile:
    profile = load(Profile, path)
    profile.check()
    return profile
