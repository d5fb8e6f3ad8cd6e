"""What decoding a token takes on ranks that serve one transformer layer: data, tensor and cache parallel.

    data      each rank decodes requests of its own, with all weights and whole caches
    tensor    all ranks decode every request, with their part of weights and heads; two all-reduces
    cache     linear layers as data; of every request's cache each rank has a part of the positions

    a step    = linear layers + attention + messages + block tables + what the host does anyway

    linear        the slower of reading the weights and of multiplying
    attention     reading the keys and values that lie on the rank, and starting a task for each sequence, head and part
    messages      the volume of a formula over a link, and a start of each of two collectives
    block tables  the server's lists of the blocks of each sequence, which are told to the device every step

Legend: as of `plan.costs.cache_parallelism`. Cut tables are a rank's own part: with tensor parallelism every rank has
the whole ones, for heads are cut and positions are not.

Source: Cache Parallelism (thesis, chapter 4), sections 4.3 to 4.5; constants that are assumed in `ServedLayer`
Tests: tests/simulate/test_decoding.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpp_plugin.plan.costs.long_context import (
    gathered_elements,
    printed_elements,
    printed_tensor_elements,
    sent_elements,
    tensor_elements,
)

Kind = Literal["data", "tensor", "cache"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Volumes = Literal["printed", "corrected", "owner"]
"""Formulas of what is sent: the chapter's as printed; in equal units; those, with k and v to their owner alone."""
VOLUMES: tuple[Volumes, ...] = get_args(Volumes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLayer:
    """A layer of Llama 7B on the chapter's machine, four NVIDIA RTX A5000; each constant may be another.

    Args:
        ranks: the chapter's four.
        width, heads, kv_heads, ffn_width: of Llama 7B; three matrices of ``width`` by ``ffn_width``.
        itemsize: bytes of an element: fp16.
        memory_gb, memory_gb_s, tflops: of one A5000, by its data sheet (dense fp16).
        link_gb_s: of one direction of its NVLink bridge, by its data sheet.
        host_gb_s: to host memory over PCIe 4 x16; assumed.
        link_us: a collective takes beside its bytes; assumed.
        step_us: the host takes for a step whatever is in it; assumed.
        entry_ns: the host takes for one entry of a block table: a Python list of lists made a tensor, as the server of
            the chapter's time did it, measured here at 80 to 95.
        task_ns: attention takes to begin one task, of all that a device runs at once; assumed.
        block: positions of a block, as of the server.
    """

    ranks: int = 4
    width: int = 4096
    heads: int = 32
    kv_heads: int = 32
    ffn_width: int = 11008
    itemsize: int = 2
    memory_gb: float = 24.0
    memory_gb_s: float = 768.0
    tflops: float = 111.0
    link_gb_s: float = 56.0
    host_gb_s: float = 25.0
    link_us: float = 15.0
    step_us: float = 100.0
    entry_ns: float = 80.0
    task_ns: float = 15.0
    block: int = 16

    @property
    def kv_width(self) -> int:
        """Return the elements of one position's keys, and of its values."""
        return self.width // self.heads * self.kv_heads

    @property
    def weights(self) -> int:
        """Return the elements of queries, keys, values, output and the three matrices of the FFN."""
        return self.width * (2 * self.width + 2 * self.kv_width + 3 * self.ffn_width)

    def held_weights(self, kind: Kind) -> float:
        """Return the elements of weights on one rank."""
        return self.weights / self.ranks if kind == "tensor" else self.weights

    def token_bytes(self, kind: Kind) -> float:
        """Return the bytes of one cached position on a rank that holds it.

        >>> few = ServedLayer(kv_heads=2)
        >>> few.token_bytes("data"), few.token_bytes("tensor")
        (1024, 512)
        """
        # tensor parallelism cuts heads, and copies them where there are fewer than ranks
        heads = max(1, self.kv_heads // self.ranks) if kind == "tensor" else self.kv_heads
        return 2 * heads * (self.width // self.heads) * self.itemsize

    def rank_blocks(self, kind: Kind) -> int:
        """Return the blocks for which a rank has memory beside its weights."""
        room = self.memory_gb * 1e9 - self.held_weights(kind) * self.itemsize
        return max(0, int(room // (self.block * self.token_bytes(kind))))


def sent_us(layer: ServedLayer, kind: Kind, rows: int, volumes: Volumes) -> float:
    """Return what the two collectives of a step take a rank.

    >>> layer = ServedLayer(link_gb_s=1.0, link_us=0.0)
    >>> round(sent_us(layer, "tensor", 512, "corrected")), round(sent_us(layer, "cache", 512, "owner"))
    (12583, 7913)
    """
    if kind == "data":
        return 0.0
    return 2 * layer.link_us + sent_of(layer, kind, rows, volumes) * layer.itemsize / layer.link_gb_s / 1e3


def sent_of(layer: ServedLayer, kind: Kind, rows: int, volumes: Volumes) -> float:
    """Return the elements that leave a rank in a step, by one of the formulas."""
    n, e, h, k = layer.ranks, layer.width, layer.heads, layer.kv_width
    if kind == "data":
        return 0.0
    if kind == "tensor":
        return printed_tensor_elements(n, rows, e) if volumes == "printed" else tensor_elements(n, rows, e)
    if volumes == "printed":
        return printed_elements(n, rows, e, h)
    found = gathered_elements if volumes == "corrected" else sent_elements
    return found(n, rows, e, h, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What some steps take, in microseconds: on the device, on links, and on the host."""

    linear_us: float = 0.0
    attention_us: float = 0.0
    link_us: float = 0.0
    table_us: float = 0.0
    host_us: float = 0.0

    @property
    def total_us(self) -> float:
        """Return what they take together: one waits for the other."""
        return self.linear_us + self.attention_us + self.link_us + self.table_us + self.host_us


def step_times(
    layer: ServedLayer, kind: Kind, *, rows: int, tokens: float, entries: float, steps: int, volumes: Volumes
) -> StepTimes:
    """Return what some steps of the same sequences take a rank.

    Args:
        rows: sequences: of a rank of data parallelism, else of all ranks together.
        tokens: cached positions that are attended to, summed over rows and steps.
        entries: of block tables, summed likewise.
    """
    #                          data       tensor     cache
    #     weights of a rank    all        1/N        all
    #     rows through them    its own    all        1/N       of those that are decoded together
    #     cached positions     its own    all        1/N       of each some heads, with tensor
    #     tasks of attention   its own    1/N        all       one for each head of each row
    #     block tables         its own    all        1/N
    n, is_cut = layer.ranks, kind == "cache"
    weights = layer.held_weights(kind)
    own_rows = rows / n if is_cut else rows
    linear = max(
        weights * layer.itemsize / layer.memory_gb_s / 1e3, 2 * weights * own_rows / layer.tflops / 1e6
    )
    tasks = rows * layer.heads / (n if kind == "tensor" else 1)
    held = tokens * layer.token_bytes(kind) / (n if is_cut else 1)
    return StepTimes(
        linear_us=steps * linear,
        attention_us=held / layer.memory_gb_s / 1e3 + steps * tasks * layer.task_ns / 1e3,
        link_us=steps * sent_us(layer, kind, rows, volumes),
        table_us=entries / (n if is_cut else 1) * layer.entry_ns / 1e3,
        host_us=steps * layer.step_us,
    )
