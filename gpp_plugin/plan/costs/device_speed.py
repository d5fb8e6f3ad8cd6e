"""How much longer a device takes than another: what blocks take where a cluster's devices are of several speeds.

A profile says what every block takes on one device, the cluster's first. On another one a block takes as many times
longer as the roofline model (Williams, Waterman, Patterson, CACM 2009) says of its operations and bytes:

    us(device) = launches x launch_us + max(flops / reached FLOP/s, bytes / bandwidth)
    time there = time here x us(there) / us(here)

    a block of 64 samples          H100 (495 TFLOP/s, 3.35 TB/s)    A100 (187 TFLOP/s, 2.04 TB/s)
    product, 10 TFLOP, 1 GB        20.2 ms                          53.5 ms       2.6 times
    softmax, 1 GFLOP, 10 GB         3.0 ms                           4.9 ms       1.6 times

A stage computes equal samples on each of its ranks, which go on together: it takes what its slowest rank does.

Source: this project
Tests: tests/plan/test_unlike_devices.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Device
from gpp_plugin.ir.tensors import TensorSpec

Floats = npt.NDArray[np.float64]


def roofline_us(device: Device, *, flops: Any, num_bytes: Any, launches: Any = 1.0) -> Any:
    """Return microseconds of an operator: launches, then the slower of arithmetic and memory traffic.

    Numbers, or arrays of them.
    """
    flops_per_s, bytes_per_s, launch_us = device.speeds
    return launch_us * launches + np.maximum(flops / flops_per_s, num_bytes / bytes_per_s) * 1e6


def distinct_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return one device of each speed, in the order in which they come."""
    return tuple({device.speeds: device for device in reversed(devices)}.values())[::-1]


class DeviceSpeeds:
    """How many times longer each block of a graph takes on each kind of device than on the first one.

    Args:
        kinds: one device of each speed; the first is what the profile is of.
    """

    def __init__(self, graph: BlockGraph, kinds: Sequence[Device]) -> None:
        self.kinds = tuple(kinds)
        self._flops = np.array([block.flops for block in graph.blocks], dtype=float) / graph.num_samples
        self._launches = np.array([max(1, len(block.nodes)) for block in graph.blocks], dtype=float)
        self._fixed, self._moved = _bytes_of(graph)
        # tensors that cross say that blocks are joined, not what they do
        kept = np.array([block.saved_bytes + block.parameter_bytes for block in graph.blocks])
        self._known = (self._flops > 0) | (kept > 0)

    def factors(self, kind: int, local: float) -> Floats:
        """Return by block the times it takes on a kind of device over that on the first, for ``local`` samples."""
        here, there = self.kinds[0], self.kinds[kind]
        work: dict[str, Any] = {
            "flops": self._flops * local,
            "num_bytes": self._fixed + self._moved * local,
            "launches": self._launches,
        }
        # of a block that nothing is known of, only times: it is taken for a matrix product
        plain = here.speeds[0] / there.speeds[0]
        ratio = roofline_us(there, **work) / np.maximum(roofline_us(here, **work), 1e-12)
        return np.where(self._known, ratio, plain)


def _bytes_of(graph: BlockGraph) -> tuple[Floats, Floats]:
    """Return by block the bytes its forward moves whatever the samples, and for each sample.

    Parameters are read, tensors of other blocks read and written, what is kept for backward written and read.
    """
    touched: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    for edge in graph.edges:
        for name in edge.tensors:
            touched[edge.src][f"> {name}"] = touched[edge.dst][f"< {name}"] = graph.tensors[name]
    fixed, moved = [], []
    for block in graph.blocks:
        crossing = sum(spec.bytes_for(graph.num_samples) for spec in touched[block.name].values())
        fixed.append(float(block.parameter_bytes))
        moved.append((crossing + 2.0 * block.saved_bytes) / graph.num_samples)
    return np.array(fixed), np.array(moved)
