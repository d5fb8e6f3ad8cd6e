"""Cache Parallelism: which rank holds which position of a cache, what ranks send a decoded token, what they hold.

Of N data-parallel ranks that decode B sequences, each computes the linear layers of its own B/N and holds a part of
every sequence's cache, cut along the sequence. A layer of one step is, over all ranks:

    q of every sequence to all ranks; k, v of its new position to the rank that owns the position
    on each rank: attention of all B queries over the positions that it holds -> o, max, sum
    (o, max, sum) back to the sequence's rank, which merges them as FlashDecode does

Legend: N ranks, B sequences, E = heads x head size of the queries, H heads, K = key-value heads x head size. All
volumes are elements that leave one rank in one layer of one step.

Deviations from the chapter. It gathers k and v on all ranks; here they go to one. Its volumes are of unlike units: as
printed, the all-gather's is of one rank's own rows (a sum over what it sends to one peer), the all-reduces' of all
rows times N. In equal units neither is smaller for plain attention (K = E):

                        printed                               corrected
    cache parallelism   (N-1) 3BE / N + (N-1) B(E + 2H) / 2   (N-1)/N B (2E + 2H + 2K)
    tensor parallelism  4 (N-1) B E                           (N-1)/N 4 B E
    here                                                      (N-1)/N B (2E + 2H + 2K/N)

Source: Cache Parallelism (thesis, chapter 4), section 4.4, corrected
Tests: tests/plan/test_cache_parallelism.py
"""

from __future__ import annotations

import math


def owner_of(position: int, row: int, *, block: int, ranks: int) -> int:
    """Return the rank that holds a position of a sequence: blocks go round, each sequence begins one rank later.

    >>> [owner_of(position, 1, block=2, ranks=2) for position in range(6)]
    [1, 1, 0, 0, 1, 1]
    """
    return (position // block + row) % ranks


def held_positions(length: int, row: int, rank: int, *, block: int, ranks: int) -> int:
    """Return how many of a sequence's first positions a rank holds.

    >>> [held_positions(5, 0, rank, block=2, ranks=2) for rank in (0, 1)]
    [3, 2]
    """
    whole, rest = divmod(length, block)
    first = (rank - row) % ranks  # the first block of the sequence on this rank
    blocks = max(0, -(-(whole - first) // ranks))
    return blocks * block + (rest if whole % ranks == first else 0)


def held_blocks(length: int, *, block: int, ranks: int) -> int:
    """Return the blocks for which a rank has room, whichever sequence begins on it.

    >>> held_blocks(33, block=16, ranks=2)
    2
    """
    return math.ceil(math.ceil(length / block) / ranks)


def printed_elements(ranks: int, batch: int, width: int, heads: int) -> float:
    """Return the volume of cache parallelism as the chapter prints it."""
    return (ranks - 1) * 3 * batch * width / ranks + (ranks - 1) * batch * (width + 2 * heads) / 2


def printed_tensor_elements(ranks: int, batch: int, width: int) -> float:
    """Return the volume of tensor parallelism as the chapter prints it."""
    return 4 * (ranks - 1) * batch * width


def gathered_elements(ranks: int, batch: int, width: int, heads: int, kv_width: int) -> float:
    """Return the volume of the chapter's cache parallelism in the unit of `tensor_elements`.

    >>> gathered_elements(4, 512, 4096, 32, 4096) / tensor_elements(4, 512, 4096)
    1.00390625
    """
    return (ranks - 1) / ranks * batch * (2 * width + 2 * kv_width + 2 * heads)


def tensor_elements(ranks: int, batch: int, width: int) -> float:
    """Return the volume of tensor parallelism: two all-reduces, each a scatter and a gather of all rows."""
    return (ranks - 1) / ranks * 4 * batch * width


def sent_elements(ranks: int, batch: int, width: int, heads: int, kv_width: int) -> float:
    """Return the volume where k and v go to the owner of their position alone, owners being evenly spread.

    >>> round(sent_elements(4, 512, 4096, 32, 4096) / tensor_elements(4, 512, 4096), 3)
    0.629
    >>> round(sent_elements(4, 512, 4096, 32, 1024) / tensor_elements(4, 512, 4096), 3)
    0.535
    """
    return (ranks - 1) / ranks * batch * (2 * width + 2 * heads + 2 * kv_width / ranks)


def cache_bytes(*, rows: int, length: int, kv_width: int, itemsize: int, layers: int = 1) -> int:
    """Return what the keys and values of some layers take, each row of its whole length."""
    return 2 * layers * rows * length * kv_width * itemsize


def cut_cache_bytes(
    *, rows: int, length: int, kv_width: int, itemsize: int, block: int, ranks: int, layers: int = 1
) -> int:
    """Return what one of ``ranks`` holds of the caches of all their rows, in whole blocks.

    >>> cut_cache_bytes(rows=4, length=64, kv_width=8, itemsize=4, block=16, ranks=2)
    8192
    """
    room = held_blocks(length, block=block, ranks=ranks) * block
    return cache_bytes(rows=rows, length=room, kv_width=kv_width, itemsize=itemsize, layers=layers)
