"""Collectives as nccl-tests measured them, beside what the shipped clusters say.

One figure of a cluster file is a row here: what 8 H100, and 8 A100, reach among each other. All else follows from the
algorithms (`plan.costs.collective_costs`). Bus bandwidths of large messages, unless a size is given.

Sources: issues of NVIDIA/nccl-tests and NVIDIA/nccl, by number in each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gpp_benchmarks.published._rows import ASSUMED, FITTED, HELD_OUT, Row
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.collective_costs import collectives

LIMIT = 0.15
LARGE = 8e9
_ASSUMED: dict[str, Any] = {"known": ASSUMED, "limit": None}
_FEW = {
    **_ASSUMED,
    "why": "one rank a node: NCCL's channels through a GPU's own adapter are not described, only its steps",
}
_OTHER = {**_ASSUMED, "why": "other GPUs with the same switch"}
_BAD = {**_ASSUMED, "why": "a fabric that its owner had not tuned: shown for how far one may be off"}

H100, A100, RTX = "dgx_h100", "dgx_a100", "rtx3090_100g"
RUNS: tuple[tuple[str, str, range, float, dict[str, Any]], ...] = (
    ("1 x 8 H100 (nccl-tests #290)", H100, range(8), 476, {"known": FITTED}),
    ("2 x 8 H100, 8 x 400 Gb (nccl-tests #309)", H100, range(16), 470, {}),
    ("4 x 8 H100, 8 x 400 Gb (nccl-tests #309)", H100, range(32), 366, {"limit": None}),
    ("1 x 8 H100 (nccl #1281)", H100, range(8), 350, {"kind": "all-gather"}),
    ("1 x 8 H100 (nccl #1281)", H100, range(8), 360, {"kind": "reduce-scatter"}),
    ("5 x 8 H100, 4 x 400 Gb (nccl #1368)", H100, range(40), 190, {"adapters": 4}),
    ("2 x 1 H100, one 400 Gb adapter (nccl-tests #290)", H100, range(0, 16, 8), 47, {}),
    ("2 x 1 H100, 32 MiB (nccl-tests #232)", H100, range(0, 16, 8), 41, {"num_bytes": 2.0**25, **_FEW}),
    ("2 x 8 H20, 8 B (nccl #1244)", H100, range(16), 46.5, {"num_bytes": 8.0, "unit": "us", **_OTHER}),
    ("2 x 8 H100, badly tuned (nccl #2409)", H100, range(16), 216, _BAD),
    ("2 x 8 H100, badly tuned (nccl #2409)", H100, range(16), 100, {"kind": "all-gather", **_BAD}),
    ("1 x 8 A100 (nccl-tests #175)", A100, range(8), 232.5, {"known": FITTED}),
    ("2 x 8 A100, 8 x 200 Gb (nccl #812)", A100, range(16), 192, {}),
    ("2 x 8 A100, 4 x 200 Gb (nccl-tests #100)", A100, range(16), 91, {"adapters": 4}),
    ("3 x 8 A100, 4 x 200 Gb (nccl-tests #119)", A100, range(24), 96, {"adapters": 4}),
    ("4 nodes, one 100 Gb adapter each (nccl-tests #29)", RTX, range(16), 12.2, {}),
)
"""Case, cluster, ranks of it that take part, GB/s or ``us``; and what is not as usual (`_row`)."""


def nccl_rows() -> Iterator[Row]:
    """Yield a row a published figure."""
    for case, name, ranks, published, more in RUNS:
        yield _row(case, name, ranks, published, **more)


def _row(
    case: str,
    name: str,
    ranks: range,
    published: float,
    *,
    kind: str = "all-reduce",
    num_bytes: float = LARGE,
    adapters: int | None = None,
    unit: str = "GB/s",
    known: str = HELD_OUT,
    limit: float | None = LIMIT,
    why: str = "",
) -> Row:
    """Return a row; ``adapters`` of a node where they are not the shipped file's."""
    cluster = read_cluster(name, num_devices=ranks[-1] + 1)
    if adapters is not None:
        *inner, outer = cluster.links
        cluster = dataclasses.replace(cluster, links=(*inner, dataclasses.replace(outer, adapters=adapters)))
    found = collectives(cluster, ranks)
    price, turns = (found.all_reduce, 2) if kind == "all-reduce" else (found.gather, 1)
    us, n = float(price.us(num_bytes)), len(ranks)
    return Row(
        source="nccl-tests",
        case=case,
        quantity=kind,
        unit=unit,
        published=published,
        ours=us if unit == "us" else turns * (n - 1) / n * num_bytes / us / 1e3,
        known=known,
        limit=limit,
        why=why,
    )
