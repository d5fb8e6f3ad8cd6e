"""What ring attention and experts on ranks of their own would take, on paper: nothing here is built.

Context parallelism. c ranks hold L / c tokens each; keys and values go round in c - 1 steps beside attention to those
that are there, so that a step takes what its longer half does. Causal ranks hold halves that even out (striped), so
each step attends to half of all pairs. Legend: h width of queries, k of keys and values, F FLOP/s reached, b bytes a
number:

    attention of a step   2 (L / c)^2 h / F           scores and values, half of the pairs; the backward 2.5 times
    keys and values       2 (L / c) k b               sent on; in the backward with their gradients, twice as much
    all else              divided by c, nothing is sent; weights' gradients are reduced over c as over data ranks

32,768 tokens, h = k = 4096, 500 TFLOP/s, 4 ranks, 450 GB/s, bf16: attention 1.1 ms a step, keys and values 134 MB,
0.3 ms: sends hide behind attention, and c ranks take a c-th of the time; of what tensor ranks sum nothing is.

Expert parallelism. Of e ranks each holds a part of a layer's experts; a token's vector travels to its t experts and
back, (e - 1) / e of them to other ranks: 2 t h b (e - 1) / e bytes a token and layer, forward, and as much backward.

Source: Ring Attention (arXiv 2310.01889), section 3; GShard (arXiv 2006.16668), section 3.2
Tests: tests/plan/test_tensor_sizes.py, tests/plan/test_long_context.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.plan.costs.collective_costs import collectives

# Cache Parallelism: which rank holds which position of a cache, what ranks send a decoded token, what they hold.
#
# Of N data-parallel ranks that decode B sequences, each computes the linear layers of its own B/N and holds a part of
# every sequence's cache, cut along the sequence. A layer of one step is, over all ranks:
#
#     q of every sequence to all ranks; k, v of its new position to the rank that owns the position
#     on each rank: attention of all B queries over the positions that it holds -> o, max, sum
#     (o, max, sum) back to the sequence's rank, which merges them as FlashDecode does
#
# Legend: N ranks, B sequences, E = heads x head size of the queries, H heads, K = key-value heads x head size. All
# volumes are elements that leave one rank in one layer of one step.
#
# Deviations from the chapter. It gathers k and v on all ranks; here they go to one. Its volumes are of different units:
# as printed, the all-gather's is of one rank's own rows (a sum over what it sends to one peer), the all-reduces' of
# all rows times N. In equal units neither is smaller for plain attention (K = E):
#
#                         printed                               corrected
#     cache parallelism   (N-1) 3BE / N + (N-1) B(E + 2H) / 2   (N-1)/N B (2E + 2H + 2K)
#     tensor parallelism  4 (N-1) B E                           (N-1)/N 4 B E
#     here                                                      (N-1)/N B (2E + 2H + 2K/N)


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
    """Return the blocks that a rank may have to hold, whichever sequence begins on it.

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
    held = held_blocks(length, block=block, ranks=ranks) * block
    return cache_bytes(rows=rows, length=held, kv_width=kv_width, itemsize=itemsize, layers=layers)


BACKWARD = 2.5
"""Times a forward that attention's backward computes: five products for two, scores made again among them."""


SUMS = 4
"""Of a layer on tensor ranks: behind attention and behind the linear layers, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer of a transformer, and one text.

    Args:
        length: tokens of the text.
        width: of a token's vector.
        query_width: of all heads of queries together.
        key_width: of all heads of keys together, and of values.
        chosen_experts: of a token; 0 where the layer has none.
    """

    length: int
    width: int
    query_width: int
    key_width: int
    chosen_experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPaper:
    """What one layer of one text would take on so many ranks, forward and backward, in microseconds.

    Args:
        ring: attention, keys and values going round.
        unhidden: sends in it that nothing hides.
        alone: attention on one rank.
        tensor_sums: what the same number of tensor ranks sum; they compute an equal part of the heads each.
        experts: what tokens take to their experts and back; 0 where there are none.
    """

    ranks: int
    ring: float
    unhidden: float
    alone: float
    tensor_sums: float
    experts: float


def on_paper(
    shape: LayerShape, ranks: Iterable[int], device: Device, link: Link, *, element_bytes: int = 2
) -> list[OnPaper]:
    """Return what context and expert parallelism would take on each number of ranks, beside tensor ranks."""
    alone, _ = ring_attention_us(shape, 1, device, link, element_bytes=element_bytes)
    rows, joined = [], Cluster(name=link.name, devices=(device,), links=(link,))
    for count in ranks:
        sums = collectives(joined, range(count)).all_reduce
        ring, unhidden = ring_attention_us(shape, count, device, link, element_bytes=element_bytes)
        rows.append(
            OnPaper(
                ranks=count,
                ring=ring,
                unhidden=unhidden,
                alone=alone,
                tensor_sums=SUMS * sums.us(shape.length * shape.width * element_bytes),
                experts=expert_exchange_us(
                    shape.length // count,
                    shape.width,
                    shape.chosen_experts,
                    count,
                    link,
                    element_bytes=element_bytes,
                )
                if shape.chosen_experts
                else 0.0,
            )
        )
    return rows


def ring_attention_us(
    shape: LayerShape, ranks: int, device: Device, link: Link, *, element_bytes: int = 2
) -> tuple[float, float]:
    """Return microseconds of one sample's causal attention, forward and backward, and of sends that nothing hides.

    >>> from gpp_plugin.ir.cluster import Cluster, Device, Link
    >>> device = Device(name="d", memory_bytes=1, flops_per_s=1e15, memory_bytes_per_s=1e12)
    >>> link = Link(name="l", span=8, bytes_per_s=4.5e11, latency_us=4.0)
    >>> shape = LayerShape(length=32768, width=4096, query_width=4096, key_width=4096)
    >>> [round(us) for ranks in (1, 4) for us in ring_attention_us(shape, ranks, device, link)]
    [61573, 0, 15393, 0]
    """
    # One rank: no steps, no sends. c ranks: c steps of attention, and c - 1 sends beside the first c - 1 of them; what
    # a send takes longer than the step beside it is waited for. Twice as many tokens a rank are four times the
    # attention and twice the sends: long texts hide them, short ones do not.
    local = shape.length / ranks
    rate = device.flops_per_s * device.efficiency / 1e6
    forward = 2 * local * local * shape.query_width / rate
    sent = 2 * local * shape.key_width * element_bytes
    total = unhidden = 0.0
    for compute, num_bytes in ((forward, sent), (BACKWARD * forward, 2 * sent)):
        sending = link.latency_us + float(link.occupied_us(num_bytes)) if ranks > 1 else 0.0
        total += ranks * compute + (ranks - 1) * max(sending - compute, 0.0)
        unhidden += (ranks - 1) * max(sending - compute, 0.0)
    return total, unhidden


def expert_exchange_us(
    tokens: int, width: int, chosen: int, ranks: int, link: Link, *, element_bytes: int = 2
) -> float:
    """Return microseconds that a rank's tokens take to their experts and back, forward and backward, in one layer.

    >>> link = Link(name="l", span=8, bytes_per_s=4.5e11, latency_us=4.0)
    >>> round(expert_exchange_us(4096, 4096, 2, 8, link))
    634
    """
    elsewhere = tokens * chosen * width * element_bytes * (ranks - 1) / ranks
    return 4 * (link.latency_us * (ranks - 1) + float(link.occupied_us(elsewhere)))
