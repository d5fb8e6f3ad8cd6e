"""The machines a plan is for: devices with memory and speed, links by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or CPU rank.

    Args:
        memory_bytes: what a plan may use.
        flops_per_s: dense peak in the training dtype; ``memory_bytes_per_s`` its memory bandwidth.
        efficiency: fraction of the peak that large matrix products reach.
        launch_us: fixed cost of one operator (kernel launch, Python dispatch).
        host_bytes_per_s: between device and pinned host memory, in each direction, both at a time; the
            default is PCIe 4.0 x16 as measured.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    efficiency: float = 0.5
    launch_us: float = 5.0
    host_bytes_per_s: float = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A level of the network: ranks in one group of ``span`` consecutive ranks are joined by it.

    Args:
        span: ranks a group of this level holds; the outermost level spans all.
        bytes_per_s: bandwidth of one rank's link in one direction; ``latency_us`` per message.
    """

    name: str
    span: int
    bytes_per_s: float
    latency_us: float

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

    def transfer_us(self, rank: int, other: int, num_bytes: float) -> float:
        """Return microseconds for one message of ``num_bytes`` (latency + bytes / bandwidth)."""
        if rank == other:
            return 0.0
        link = self.link_between(rank, other)
        return float(link.latency_us + link.occupied_us(num_bytes))
