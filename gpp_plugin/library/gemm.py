"""How long matrix products take by their size: the efficiency curve behind micro-batch sizes.

A GPU computes C [m, n] in tiles, one a multiprocessor at a time, in waves. A product of few tiles leaves
multiprocessors idle (tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's
Guide"), which is why larger micro-batches are more efficient:

    time = launch + max(flops / (peak x efficiency x utilisation), bytes / bandwidth)
    utilisation = (tiles' useful part) x tiles / (waves x multiprocessors)

with the better of tiles of 128 x 128, of 64 x 64 (at 0.8 of the rate), and the reduction split in two or
four (at 0.9). The fractions are of the order such kernels show; peak, efficiency, bandwidth and launch
come from the cluster description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpp_plugin.ir.cluster import Device

MULTIPROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "H200": 132, "RTX3090": 82, "CPU": 1}
TILES = ((128, 1.0), (64, 0.8))
SPLITS = ((1, 1.0), (2, 0.9), (4, 0.9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """``count`` products [rows x samples, k] @ [k, n] a forward pass.

    Args:
        rows: rows a sample brings (tokens of a sequence; 1 for a feature vector).
        is_batched: a product of its own for every sample (attention): rows do not add up.
    """

    rows: int
    k: int
    n: int
    count: int = 1
    is_batched: bool = False


def multiprocessors(device: Device) -> int:
    """Return the number of multiprocessors of a device, by the first part of its name; 100 where unknown."""
    return MULTIPROCESSORS.get(device.name.split("-")[0].split(" ")[0], 100)


def gemm_us(device: Device, m: int, n: int, k: int, *, batch: int = 1, element_bytes: int = 4) -> float:
    """Return microseconds of ``batch`` products [m, k] @ [k, n] in one launch; ``element_bytes`` of a number."""
    units = multiprocessors(device)
    # 512 x 1024 x 1024 on the 108 multiprocessors of an A100, utilisation by tile and split. Tiles
    # of 64 are 8 x 16 = 128 in two waves of 108: 0.59, times their rate, 0.8, is 0.47:
    #
    #             split 1               split 2               split 4
    #   128 x 128  32 tiles, 1 wave .30   64, 1 wave  .53   128, 2 waves .53
    #   64 x 64   128, 2 waves .47       256, 3 waves .57   512, 5 waves .68   <- taken
    #
    # With twice the rows the best is .71 (128 x 128, split 4, 3 waves): a larger micro-batch takes less than
    # twice as long. ``useful`` is the part of the tiles inside the result: 100 rows in a tile of 128 waste a
    # fifth.
    best = 0.0
    for tile, rate in TILES:
        rows, columns = math.ceil(m / tile), math.ceil(n / tile)
        useful = m * n / (rows * columns * tile * tile)
        for split, split_rate in SPLITS:
            # A part of the sum must be long enough for the tile to be worth starting.
            if k // split < 64 and split > 1:
                continue
            tiles = rows * columns * split * batch
            waves = math.ceil(tiles / units)
            best = max(best, rate * split_rate * useful * tiles / (waves * units))
    seconds = 2.0 * m * n * k * batch / (device.flops_per_s * device.efficiency * best)
    # Each operand read once and the result written once: a lower bound, reached by small products.
    moved = float(element_bytes) * batch * (m * k + k * n + m * n)
    return device.launch_us + max(seconds, moved / device.memory_bytes_per_s) * 1e6


def forward_us(device: Device, gemm: Gemm, samples: int, *, element_bytes: int = 4) -> float:
    """Return microseconds of the forward products of ``samples`` samples."""
    if gemm.is_batched:
        batch = gemm.count * samples
        return gemm_us(device, gemm.rows, gemm.n, gemm.k, batch=batch, element_bytes=element_bytes)
    return gemm.count * gemm_us(device, gemm.rows * samples, gemm.n, gemm.k, element_bytes=element_bytes)


def backward_us(device: Device, gemm: Gemm, samples: int, *, element_bytes: int = 4) -> float:
    """Return microseconds of the two backward products (gradients of the input and of the weight)."""
    batch = gemm.count * samples if gemm.is_batched else 1
    rows = gemm.rows if gemm.is_batched else gemm.rows * samples
    both = gemm_us(device, rows, gemm.k, gemm.n, batch=batch, element_bytes=element_bytes) + gemm_us(
        device, gemm.k, gemm.n, rows, batch=batch, element_bytes=element_bytes
    )
    return both if gemm.is_batched else gemm.count * both


def weight_share(device: Device, gemm: Gemm, samples: int, *, element_bytes: int = 4) -> float:
    """Return the weight gradient's share in the two backward products; none where both operands are activations."""
    if gemm.is_batched:
        return 0.0
    rows = gemm.rows * samples
    weight = gemm_us(device, gemm.k, gemm.n, rows, element_bytes=element_bytes)
    other = gemm_us(device, rows, gemm.k, gemm.n, element_bytes=element_bytes)
    return weight / (weight + other)
