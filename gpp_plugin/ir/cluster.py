"""The machines a plan is for: devices with memory and speed, links by level."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or CPU rank.

    Args:
        memory_bytes: what a plan may use.
        flops_per_s: dense peak in ``dtype``, the training dtype; ``memory_bytes_per_s`` its memory bandwidth.
        efficiency: fraction of the peak that large matrix products reach.
        launch_us: fixed cost of one operator (kernel launch, Python dispatch).
        host_bytes_per_s: between device and pinned host memory, in each direction, both at a time; the
            default is PCIe 4.0 x16 as measured.
        peaks: (dtype, FLOP/s) of every type that its speed is known in; empty where only that of ``dtype`` is.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    efficiency: float = 0.5
    launch_us: float = 5.0
    host_bytes_per_s: float = 25e9
    dtype: str = "fp32"
    peaks: tuple[tuple[str, float], ...] = ()

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Return what its times follow from: FLOP/s and bytes/s reached, and microseconds of a launch."""
        return self.flops_per_s * self.efficiency, self.memory_bytes_per_s, self.launch_us


def distinct_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return one device of each speed, in the order in which they come."""
    return tuple({device.speeds: device for device in reversed(devices)}.values())[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """One kind of collective as measured over all ranks of a level (`plan.costs.collective_costs`).

    Args:
        bytes_per_s: bus bandwidth of a large one, as nccl-tests count it.
        latency_us: what a very small one takes; None: as the link's ``latency_us`` implies.
    """

    bytes_per_s: float
    latency_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A level of the network: ranks in one group of ``span`` consecutive ranks are joined by it.

    Args:
        span: ranks a group of this level holds; the outermost level spans all.
        bytes_per_s: bandwidth of one rank's link in one direction, or of one adapter; ``latency_us`` per message.
        adapters: of a group of the level inside, a node; its ranks share them evenly, and what they send (or are
            sent) at this level takes turns on them. None: every rank has a link of its own.
        all_reduce, all_gather: as measured, the second of reduce-scatters too; None: as the links imply.
    """

    name: str
    span: int
    bytes_per_s: float
    latency_us: float
    adapters: int | None = None
    all_reduce: MeasuredCollective | None = None
    all_gather: MeasuredCollective | None = None

    def occupied_us(self, num_bytes: Any) -> Any:
        """Return microseconds for which ``num_bytes`` (a number or an array) keep a rank's link busy, one way.

        A message takes the latency on top; the link is free for the next one meanwhile.
        """
        return num_bytes / self.bytes_per_s * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in rank order and links from the innermost level to the outermost."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]

    @property
    def num_devices(self) -> int:
        """Return the number of ranks."""
        return len(self.devices)

    def link_between(self, rank: int, other: int) -> Link:
        """Return the innermost link level whose groups hold both ranks."""
        # Levels (NVLink, span 8) and (InfiniBand, span 32): ranks 3 and 6 are in group 0 of 8; 6 and 9 in groups 0
        # and 1, but both in group 0 of 32.
        for link in self.links:
            if rank // link.span == other // link.span:
                return link
        return self.links[-1]

    @property
    def is_mixed(self) -> bool:
        """Return whether its devices are of several speeds."""
        return len(distinct_devices(self.devices)) > 1

    @property
    def has_adapters(self) -> bool:
        """Return whether ranks share adapters at any level."""
        return any(link.adapters is not None for link in self.links)

    def with_memory(self, memory_bytes: int) -> Cluster:
        """Return the cluster whose devices all have that much memory."""
        devices = tuple(dataclasses.replace(d, memory_bytes=memory_bytes) for d in self.devices)
        return dataclasses.replace(self, devices=devices)

    def port(self, rank: int, link: Link) -> int:
        """Return the number of what a rank's messages at a level take turns on: its own link, or an adapter."""
        # Nodes of 4 ranks with 2 adapters in a cluster of 8: at level 1 ranks 0 and 1 have adapter 0 of node 0, 2 and 3
        # adapter 1, 4 and 5 adapter 0 of node 1. Links of ranks are numbers 0..7, adapters of level 1 are 16..19.
        if link.adapters is None:
            return rank
        level = self.links.index(link)
        inner = self.links[level - 1].span if level else 1
        node, place = divmod(rank, inner)
        return self.num_devices * (level + 1) + node * link.adapters + place * link.adapters // inner

    def sharers(self, ranks: Sequence[int], link: Link) -> int:
        """Return how many of these ranks share a port of a level, where most do."""
        if link.adapters is None:
            return 1
        return max(Counter(self.port(rank, link) for rank in ranks).values())

    def transfer_us(self, rank: int, other: int, num_bytes: float) -> float:
        """Return microseconds for one message of ``num_bytes`` (latency + bytes / bandwidth)."""
        if rank == other:
            return 0.0
        link = self.link_between(rank, other)
        return float(link.latency_us + link.occupied_us(num_bytes))
