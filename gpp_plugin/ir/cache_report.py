"""What the caches of the last generation took on each rank, predicted and counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCaches:
    """The caches of one rank.

    Args:
        layers: of attention, whose caches lie there.
        rows: sequences, or parts of sequences, that are cached there.
        length: of the longest one.
        predicted_bytes: from the model's configuration, rows and lengths.
        counted_bytes: of the tensors that were there at the end.
    """

    rank: int
    layers: int
    rows: int
    length: int
    predicted_bytes: int
    counted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The caches of the last generation.

    Args:
        cache: "data" or "sequence".
        micro_batches: of prompts, that were generated from in turns; the figures are of all of them together.
        ranks: of the job, in order.
    """

    cache: str
    micro_batches: int
    ranks: tuple[RankCaches, ...]
