"""Collectives as nccl-tests measured them, beside what the shipped clusters say.

One figure of a cluster file is a row here: what 8 H100, and 8 A100, reach among each other. All else follows from the
algorithms (`plan.costs.collective_costs`). Bus bandwidths of large messages, unless a size is given.

Sources: issues of NVIDIA/nccl-tests and NVIDIA/nccl, by number in each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpp_benchmarks.published._rows import ASSUMED, FITTED, HELD_OUT, Row
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.plan.cluster_files import read_cluster
from gpp_plugin.plan.costs.collective_costs import collectives

LIMIT = 0.15
LARGE = 8e9
_FEW = "one rank a node: NCCL's channels through a GPU's own adapter are not described, only its steps"
_BAD = "a fabric that its owner had not tuned: shown for how far one may be off"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A published figure, in GB/s, or in microseconds where ``unit`` is ``us``.

    Args:
        ranks: of the cluster that take part; ``adapters`` of a node where they are not the shipped file's.
    """

    case: str
    cluster: str
    ranks: range
    published: float
    known: str = HELD_OUT
    adapters: int | None = None
    kind: str = "all-reduce"
    num_bytes: float = LARGE
    unit: str = "GB/s"
    limit: float | None = LIMIT
    why: str = ""


H100, A100, RTX = "dgx_h100", "dgx_a100", "rtx3090_100g"
RUNS = (
    _Run(case="1 x 8 H100 (nccl-tests #290)", cluster=H100, ranks=range(8), published=476, known=FITTED),
    _Run(case="2 x 8 H100, 8 x 400 Gb (nccl-tests #309)", cluster=H100, ranks=range(16), published=470),
    _Run(
        case="4 x 8 H100, 8 x 400 Gb (nccl-tests #309)",
        cluster=H100,
        ranks=range(32),
        published=366,
        limit=None,
    ),
    _Run(case="1 x 8 H100 (nccl #1281)", cluster=H100, ranks=range(8), published=350, kind="all-gather"),
    _Run(case="1 x 8 H100 (nccl #1281)", cluster=H100, ranks=range(8), published=360, kind="reduce-scatter"),
    _Run(
        case="5 x 8 H100, 4 x 400 Gb (nccl #1368)", cluster=H100, ranks=range(40), adapters=4, published=190
    ),
    _Run(
        case="2 x 1 H100, one 400 Gb adapter (nccl-tests #290)",
        cluster=H100,
        ranks=range(0, 16, 8),
        published=47,
    ),
    _Run(
        case="2 x 1 H100, 32 MiB (nccl-tests #232)",
        cluster=H100,
        ranks=range(0, 16, 8),
        published=41,
        num_bytes=2.0**25,
        known=ASSUMED,
        limit=None,
        why=_FEW,
    ),
    _Run(
        case="2 x 8 H20, 8 B (nccl #1244)",
        cluster=H100,
        ranks=range(16),
        published=46.5,
        num_bytes=8.0,
        unit="us",
        known=ASSUMED,
        limit=None,
        why="other GPUs with the same switch",
    ),
    _Run(
        case="2 x 8 H100, badly tuned (nccl #2409)",
        cluster=H100,
        ranks=range(16),
        published=216,
        known=ASSUMED,
        limit=None,
        why=_BAD,
    ),
    _Run(
        case="2 x 8 H100, badly tuned (nccl #2409)",
        cluster=H100,
        ranks=range(16),
        published=100,
        kind="all-gather",
        known=ASSUMED,
        limit=None,
        why=_BAD,
    ),
    _Run(case="1 x 8 A100 (nccl-tests #175)", cluster=A100, ranks=range(8), published=232.5, known=FITTED),
    _Run(case="2 x 8 A100, 8 x 200 Gb (nccl #812)", cluster=A100, ranks=range(16), published=192),
    _Run(
        case="2 x 8 A100, 4 x 200 Gb (nccl-tests #100)",
        cluster=A100,
        ranks=range(16),
        adapters=4,
        published=91,
    ),
    _Run(
        case="3 x 8 A100, 4 x 200 Gb (nccl-tests #119)",
        cluster=A100,
        ranks=range(24),
        adapters=4,
        published=96,
    ),
    _Run(
        case="4 nodes, one 100 Gb adapter each (nccl-tests #29)", cluster=RTX, ranks=range(16), published=12.2
    ),
)


def nccl_rows() -> Iterator[Row]:
    """Yield a row a published figure."""
    for run in RUNS:
        cluster = _cluster(run)
        found = collectives(cluster, run.ranks)
        price, turns = (found.all_reduce, 2) if run.kind == "all-reduce" else (found.gather, 1)
        us, n = float(price.us(run.num_bytes)), len(run.ranks)
        yield Row(
            source="nccl-tests",
            case=run.case,
            quantity=run.kind,
            unit=run.unit,
            published=run.published,
            ours=us if run.unit == "us" else turns * (n - 1) / n * run.num_bytes / us / 1e3,
            known=run.known,
            limit=run.limit,
            why=run.why,
        )


def _cluster(run: _Run) -> Cluster:
    cluster = read_cluster(run.cluster, num_devices=run.ranks[-1] + 1)
    if run.adapters is None:
        return cluster
    *inner, outer = cluster.links
    return dataclasses.replace(cluster, links=(*inner, dataclasses.replace(outer, adapters=run.adapters)))
