"""The ranks that hold the caches of one stage together, cut along the sequence, and what they send each other.

    rank 0 of 2, block 2             positions of prompt 0: 0 1 . . 4 5 . .        of prompt 1: . . 2 3 . . 6 7
    rank 1 of 2                                             . . 2 3 . . 6 7                     0 1 . . 4 5 . .

Sequences of one prompt (beams) lie alike, so that reordering them moves nothing between ranks. All ranks decode the
same number of sequences and go through the same steps: ranks without prompts of their own decode copies of the first
one, which have no cache.

Source: Cache Parallelism (thesis, chapter 4), section 4.4; deviations in plan/costs/long_context.py
Tests: tests/model/test_cut_cache.py, tests/integrations/test_generation.py, tests/model/test_cache_room.py
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.huggingface.generate_calls import LongestCaches, attention_weights, kv_width
from gpp_plugin.plan.costs.long_context import cache_bytes, cut_cache_bytes, held_blocks
from gpp_plugin.report.units import format_bytes
from gpp_plugin.runtime.ranks.collectives import own_name, wait_for

# Whether caches fit, and so where those of "auto" lie: a prompt too long is refused before anything runs.
#
#     every rank     what its caches take at their longest, cut along the sequence or not; what is free on it
#     all            "data" where that fits on every rank, for it sends nothing; else "sequence", where it can be


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeed:
    """What one rank's caches take at their longest, in bytes.

    Args:
        data: where it has whole sequences; ``cut``: where they are cut over the ranks of its stages.
        free_bytes: what is free for them and, beside what is held already, for ``weights``: the whole of what tensor
            ranks hold in parts.
    """

    data: int
    cut: int
    free_bytes: int
    weights: int = 0

    def missing(self, *, cut: bool) -> int:
        """Return how many bytes there are too few; none or fewer: they fit."""
        return (self.cut if cut else self.data) + self.weights - self.free_bytes


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
    free_bytes: int,
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
    return CacheNeed(data=data, cut=cut, free_bytes=free_bytes, weights=weights)


def is_cut(requested: str, needs: Sequence[CacheNeed], *, why_not: str | None) -> bool:
    """Return whether caches are cut along the sequence.

    Args:
        requested: "data", "sequence" or "auto".
        needs: of all ranks; none where it is unknown what is free.
        why_not: the reason for which they cannot be.

    Raises:
        ConfigError: the caches do not fit: names the rank and the missing bytes.

    >>> one = CacheNeed(data=100, cut=50, free_bytes=60)
    >>> is_cut("auto", [one], why_not=None), is_cut("auto", [], why_not=None)
    (True, False)
    """
    # With cut caches a rank holds a part of every prompt, in whole blocks: hardly less than whole ones of its own
    # prompts where all ranks have as many, and the more less the fewer prompts there are.
    fits_data = all(need.missing(cut=False) <= 0 for need in needs)
    chosen = requested == "sequence" or (requested == "auto" and not fits_data and why_not is None)
    rank, worst = max(enumerate(needs), key=lambda item: item[1].missing(cut=chosen), default=(0, None))
    missing = 0 if worst is None else worst.missing(cut=chosen)
    if worst is None or missing <= 0:
        return chosen
    takes = worst.cut if chosen else worst.data
    beside = f" and {format_bytes(worst.weights)} of weights that tensor ranks join" if worst.weights else ""
    other = (
        "" if chosen or why_not is not None or requested == "auto" else ', set generate.cache to "sequence"'
    )
    raise ConfigError(
        f"engine.generate: the caches take {format_bytes(takes)} on rank {rank}, which has "
        f"{format_bytes(worst.free_bytes)} for them{beside}: {missing} bytes are missing; give fewer or "
        f"shorter prompts, lower max_new_tokens or num_beams{other}"
    )


@dataclass(slots=True, kw_only=True)
class CachePeers:
    """One rank of a stage, among those that share its caches.

    Args:
        position: of this rank, of ``number``.
        prompts: of each rank, copies among them; ``samples`` are real, those of the first ranks.
        block: neighbouring positions that lie together.
        group: of the ranks; ``staging`` is where it wants tensors.
        timeout_s: how long ranks at work are waited for, at most.
        sent_bytes: what this rank has sent to others.
    """

    position: int
    number: int
    prompts: int
    samples: int
    block: int
    group: dist.ProcessGroup | None
    staging: torch.device
    timeout_s: float
    sent_bytes: int = 0

    @property
    def has_prompts(self) -> bool:
        """Return whether this rank has prompts that are no copies: by these ranks it is known when all have ended."""
        return self.position * self.prompts < self.samples

    def cached_rows(self, rows: int) -> int:
        """Return how many of all ranks' sequences have a cache, the first ones; the others are copies.

        Args:
            rows: sequences of one rank, ``rows / prompts`` for each of its prompts.
        """
        return self.samples * (rows // self.prompts)

    def originals(self, rows: int) -> list[int]:
        """Return the sequence of which each one of all ranks is a copy: itself, or one of the first prompt.

        >>> one = CachePeers(position=0, number=2, prompts=2, samples=3, block=1, group=None, staging=None, timeout_s=1)
        >>> one.originals(4)
        [0, 1, 2, 3, 4, 5, 0, 1]
        """
        each, cached = rows // self.prompts, self.cached_rows(rows)
        return [row if row < cached else row % each for row in range(self.number * rows)]

    def owners(self, positions: Tensor, rows: int) -> Tensor:
        """Return which rank holds these positions of each sequence of all ranks, -1 of copies.

        Returns:
            [number, rows, positions]
        """
        row = torch.arange(self.number * rows, device=positions.device)[:, None]
        prompt = row // (rows // self.prompts)
        owner = (positions[None, :] // self.block + prompt) % self.number
        return owner.masked_fill(row >= self.cached_rows(rows), -1).view(self.number, rows, -1)

    def slots(self, positions: Tensor) -> Tensor:
        """Return where the rank that holds a position has it; every rank fills its places from the first on."""
        return positions // self.block // self.number * self.block + positions % self.block

    def capacity(self, length: int) -> int:
        """Return the places that sequences of this length need on a rank."""
        return held_blocks(length, block=self.block, ranks=self.number) * self.block

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send each rank its part and return what each of them sent, flat; collective over the group.

        Args:
            parts: flat, of one type; the one for this rank itself among them.
            sizes: elements that come from each rank.

        Raises:
            CommTimeout: a rank did not come in time, or is gone.
        """
        device = parts[0].device
        itemsize = parts[0].element_size()
        sent = torch.cat(list(parts)).to(self.staging)
        received = torch.empty(sum(sizes), dtype=sent.dtype, device=self.staging)
        counts = [part.numel() for part in parts]
        # as bytes: no backend lacks these, whatever the model's type is
        self._wait(
            dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [size * itemsize for size in sizes],
                [count * itemsize for count in counts],
                group=self.group,
                async_op=True,
            ),
            "a layer's attention over the caches of a stage's ranks",
        )
        self.sent_bytes += itemsize * (sum(counts) - counts[self.position])
        return list(received.to(device).split(list(sizes)))

    def gathered(self, own: Tensor) -> Tensor:
        """Return a tensor of the same shape from each rank, stacked; collective over the group."""
        flat = own.reshape(-1)
        parts = self.swap([flat] * self.number, [flat.numel()] * self.number)
        return torch.stack([part.view(own.shape) for part in parts])

    def any(self, is_so: bool) -> bool:
        """Return whether something is so on any of the ranks; collective over the group."""
        found = torch.tensor([int(is_so)], dtype=torch.int64, device=self.staging)
        self._wait(
            dist.all_reduce(found, group=self.group, async_op=True), "the end of a step of a generation"
        )
        return bool(int(found))

    def _wait(self, work: Any, what: str) -> None:
        assert self.group is not None
        wait_for(
            work,
            what=what,
            who=own_name(),
            group=self.group,
            most_s=self.timeout_s,
            is_polled=self.staging.type != "cpu",
        )
