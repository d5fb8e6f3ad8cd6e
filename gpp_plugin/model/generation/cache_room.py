"""Whether caches have room, and so where those of "auto" lie: a prompt too long is refused before anything runs.

    every rank     what its caches take at their longest, cut along the sequence or not; what is free on it
    all            "data" where that has room on every rank, for it sends nothing; else "sequence", where it can be

Source: this project
Tests: tests/model/test_cache_room.py
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import LongestCaches, attention_weights, kv_width
from gpp_plugin.plan.costs.cache_parallelism import cache_bytes, cut_cache_bytes
from gpp_plugin.report.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeed:
    """What one rank's caches take at their longest, in bytes.

    Args:
        data: where it has whole sequences; ``cut``: where they are cut over the ranks of its stages.
        room: what is free for them and, beside what is held already, for ``weights``: the whole of what tensor ranks
            hold in parts.
    """

    data: int
    cut: int
    room: int
    weights: int = 0

    def missing(self, *, cut: bool) -> int:
        """Return how many bytes there are too few; none or fewer: they have room."""
        return (self.cut if cut else self.data) + self.weights - self.room


def need_of(
    model: Any,
    longest: LongestCaches,
    *,
    held: Collection[str],
    names: Mapping[str, str],
    rows: int,
    prompts: int,
    ranks: int,
    block: int,
    itemsize: int,
    room: int,
    weights: int,
) -> CacheNeed:
    """Return what the caches of this rank's layers take.

    Args:
        held: the parameters of this rank; ``names``: every name that one has in the model -> its name there.
        rows: prompts that this rank decodes itself, of ``prompts``.
        ranks: that share caches which are cut, in blocks of ``block``.
    """
    width, data, cut = kv_width(model), 0, 0
    for (_, across), name in attention_weights(model).items():
        if names.get(name, name) not in held:
            continue
        length = longest.across if across else longest.own
        common = {"length": length, "kv_width": width, "itemsize": itemsize}
        data += cache_bytes(rows=rows * longest.each, **common)
        cut += cut_cache_bytes(rows=prompts * longest.each, block=block, ranks=ranks, **common)
    return CacheNeed(data=data, cut=cut, room=room, weights=weights)


def is_cut(asked: str, needs: Sequence[CacheNeed], *, why_not: str | None) -> bool:
    """Return whether caches are cut along the sequence.

    Args:
        asked: "data", "sequence" or "auto".
        needs: of all ranks; none where nobody knows what is free.
        why_not: the reason for which they cannot be.

    Raises:
        ConfigError: they have no room: names the rank and the bytes that are missing.

    >>> one = CacheNeed(data=100, cut=50, room=60)
    >>> is_cut("auto", [one], why_not=None), is_cut("auto", [], why_not=None)
    (True, False)
    """
    # With cut caches a rank holds a part of every prompt, in whole blocks: hardly less than whole ones of its own
    # prompts where all ranks have as many, and the more less the fewer prompts there are.
    fits_data = all(need.missing(cut=False) <= 0 for need in needs)
    chosen = asked == "sequence" or (asked == "auto" and not fits_data and why_not is None)
    rank, worst = max(enumerate(needs), key=lambda item: item[1].missing(cut=chosen), default=(0, None))
    missing = 0 if worst is None else worst.missing(cut=chosen)
    if worst is None or missing <= 0:
        return chosen
    takes = worst.cut if chosen else worst.data
    beside = f" and {format_bytes(worst.weights)} of weights that tensor ranks join" if worst.weights else ""
    other = "" if chosen or why_not is not None or asked == "auto" else ', set generate.cache to "sequence"'
    raise ConfigError(
        f"engine.generate: the caches take {format_bytes(takes)} on rank {rank}, which has {format_bytes(worst.room)} "
        f"for them{beside}: {missing} bytes are missing; give fewer or shorter prompts, lower max_new_tokens or "
        f"num_beams{other}"
    )
