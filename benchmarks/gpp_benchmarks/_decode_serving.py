"""Decode serving, simulated: what a step takes, and continuous batching of requests event by event.

What decoding a token takes on ranks that serve one transformer layer: data, tensor and cache parallel.

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

    arrive ──► wait ──► decode, one token a step, all sequences of a batch together ──► done
                 ▲              │ no block is left for the next positions: the last one that was admitted
                 └── evicted ◄──┘ is copied to the host; it comes back, copied again, before anyone new

Between two events (one ends, memory ends, one arrives for a free place) steps differ in the lengths of the caches
alone, so that many are summed in one go: exactly, with blocks counted whole.

Prompts are in the caches when their requests are admitted: decoding alone is simulated, as in the chapter.

Source: Cache Parallelism (thesis, chapter 4), sections 4.2.3, 4.3 to 4.5; preemption of vLLM, the chapter's server;
    constants that are assumed in `ServedLayer`
Tests: tests/simulate/test_decoding.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from gpp_plugin.errors import ConfigError
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


# ---- continuous batching --------------------------------------------------------------------------------

_Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt of so many tokens that arrives, and what is generated from it."""

    arrival_us: float = 0.0
    prompt: int
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What ranks did until all requests were done.

    Args:
        tokens: that were generated, in ``elapsed_us``.
        token_us: from the admission of a request to its end, over its tokens, in the mean of all tokens.
        times: of a rank that works; the mean of all ranks.
        evict_us: copies to the host and back; ``idle_us``: had nothing to decode; means likewise.
        evictions: of all ranks.
        most_rows: sequences that were decoded together.
    """

    tokens: int
    elapsed_us: float
    token_us: float
    times: StepTimes
    evict_us: float
    idle_us: float
    evictions: int
    most_rows: int

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput."""
        return self.tokens / self.elapsed_us * 1e6


def serve(
    layer: ServedLayer, kind: Kind, requests: Sequence[Request], *, max_batch: int, volumes: Volumes = "owner"
) -> Served:
    """Return how requests are served.

    Args:
        max_batch: sequences that all ranks together decode at a time.

    Raises:
        ConfigError: a request alone has no room, or generates nothing.
    """
    if any(one.new < 1 or one.prompt < 0 for one in requests):
        raise ConfigError("a request generates at least one token from a prompt of none or more")
    # Data parallelism: as many groups as ranks, which know nothing of each other; a request goes to the one with the
    # fewest tokens of prompts so far (of these with the fewest requests), for how long answers become nobody knows.
    # Else one group of all ranks.
    ranks = layer.ranks
    is_data = kind == "data"
    groups: list[list[Request]] = [[] for _ in range(ranks if is_data else 1)]
    load = [(0, 0)] * len(groups)
    for request in sorted(requests, key=lambda one: one.arrival_us):
        at = load.index(min(load))
        groups[at].append(request)
        load[at] = (load[at][0] + request.prompt, len(groups[at]))
    blocks = layer.rank_blocks(kind) * (ranks if kind == "cache" else 1)
    done = [
        _Group(layer, kind, max_batch // ranks if is_data else max_batch, blocks, volumes).run(group)
        for group in groups
    ]
    elapsed = max((one.elapsed_us for one in done), default=0.0)
    tokens = sum(one.tokens for one in done)
    mean = 1 / len(done)
    return Served(
        tokens=tokens,
        elapsed_us=elapsed,
        token_us=sum(one.token_us * one.tokens for one in done) / max(tokens, 1),
        times=_scaled([one.times for one in done], mean),
        evict_us=mean * sum(one.evict_us for one in done),
        # what a group waits for is the end of the last one, too
        idle_us=mean * sum(one.idle_us + elapsed - one.elapsed_us for one in done),
        evictions=sum(one.evictions for one in done),
        most_rows=sum(one.most_rows for one in done),
    )


def _scaled(times: Sequence[StepTimes], scale: float) -> StepTimes:
    """Return the sum of times, scaled."""
    return StepTimes(
        **{field.name: scale * sum(getattr(one, field.name) for one in times) for field in fields(StepTimes)}
    )


def sum_of_blocks(lengths: _Lengths, steps: int, block: int) -> int:
    """Return the blocks of sequences, summed over steps each of which makes every sequence one longer.

    >>> sum_of_blocks(np.array([3, 4]), 2, 4)  # 1 + 2 of lengths 4 and 5, then 2 + 2 of 5 and 6
    7
    """
    return int((_blocks_up_to(lengths + steps, block) - _blocks_up_to(lengths, block)).sum())


def _blocks_up_to(length: _Lengths, block: int) -> _Lengths:
    """Return ceil(1 / block) + ceil(2 / block) + ... + ceil(length / block)."""
    whole, rest = np.divmod(length, block)
    result: _Lengths = block * whole * (whole + 1) // 2 + rest * (whole + 1)
    return result


class _Group:
    """Ranks that decode one batch together, and what they have room for."""

    def __init__(self, layer: ServedLayer, kind: Kind, slots: int, blocks: int, volumes: Volumes) -> None:
        self._layer, self._kind, self._volumes = layer, kind, volumes
        self._slots, self._blocks = max(1, slots), blocks
        # What is copied of a block leaves all ranks that have a part of it at once.
        held = layer.token_bytes(kind) / (layer.ranks if kind == "cache" else 1)
        self._copy_us = layer.block * held / layer.host_gb_s / 1e3
        self._clock = self._evict_us = self._idle_us = 0.0
        self._evictions = self._most_rows = 0
        self._times: list[StepTimes] = []
        # of the sequences that are decoded, in the order in which they were admitted
        self._lengths = np.zeros(0, np.int64)
        self._left = np.zeros(0, np.int64)
        self._numbers: list[int] = []

    def run(self, requests: Sequence[Request]) -> Served:
        """Serve requests, which are in the order of their arrival."""
        # Turns of this loop are events; a turn begins with whoever may be admitted now.
        block = self._layer.block
        worst = max((-(-(one.prompt + one.new) // block) for one in requests), default=0)
        if worst > self._blocks:
            raise ConfigError(
                f"a request of {worst * block} tokens needs {worst} blocks of {block}, ranks have {self._blocks}; give "
                "shorter ones, or more memory_gb"
            )
        begun: dict[int, float] = {}
        spent, waiting = 0.0, deque(enumerate(requests))
        evicted: deque[tuple[int, int, int]] = deque()
        while waiting or evicted or self._numbers:
            self._admit(waiting, evicted, begun)
            if not self._numbers:
                arrival = waiting[0][1].arrival_us
                self._idle_us += arrival - self._clock
                self._clock = arrival
                continue
            steps = self._steps_with_room(int(self._left.min()))
            if steps == 0:
                evicted.appendleft(self._evict())
                continue
            if waiting and not evicted and len(self._numbers) < self._slots:
                steps = self._steps_until(waiting[0][1].arrival_us, steps)
            self._advance(steps)
            is_done = self._left == 0
            if is_done.any():
                spent += sum(self._clock - begun[self._numbers[at]] for at in np.flatnonzero(is_done))
                self._keep(~is_done)
        tokens = sum(one.new for one in requests)
        return Served(
            tokens=tokens,
            elapsed_us=self._clock,
            token_us=spent / max(tokens, 1),
            times=_scaled(self._times, 1.0),
            evict_us=self._evict_us,
            idle_us=self._idle_us,
            evictions=self._evictions,
            most_rows=self._most_rows,
        )

    def _admit(
        self,
        waiting: deque[tuple[int, Request]],
        evicted: deque[tuple[int, int, int]],
        begun: dict[int, float],
    ) -> None:
        """Take up sequences while there are places, and blocks for the next position of all of them."""
        # Those that were evicted come first. Whoever cannot be admitted blocks the ones behind it: nobody starves.
        while len(self._numbers) < self._slots:
            if evicted:
                number, length, left = evicted[0]
            elif waiting and waiting[0][1].arrival_us <= self._clock:
                number, request = waiting[0]
                length, left = request.prompt, request.new
            else:
                return
            if self._needed(1) + -(-(length + 1) // self._layer.block) > self._blocks:
                return
            if evicted:
                evicted.popleft()
                self._copy(length)
            else:
                waiting.popleft()
                begun[number] = self._clock
            self._numbers.append(number)
            self._lengths, self._left = np.append(self._lengths, length), np.append(self._left, left)

    def _evict(self) -> tuple[int, int, int]:
        last = (self._numbers[-1], int(self._lengths[-1]), int(self._left[-1]))
        self._copy(last[1])
        self._evictions += 1
        self._keep(np.arange(len(self._numbers)) < len(self._numbers) - 1)
        return last

    def _copy(self, length: int) -> None:
        took = -(-length // self._layer.block) * self._copy_us
        self._clock += took
        self._evict_us += took

    def _keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        self._lengths, self._left = self._lengths[is_kept], self._left[is_kept]
        self._numbers = [n for n, kept in zip(self._numbers, is_kept, strict=True) if kept]

    def _needed(self, steps: int) -> int:
        """Return the blocks of all sequences after some steps."""
        return int((-(-(self._lengths + steps) // self._layer.block)).sum())

    def _steps_with_room(self, most: int) -> int:
        """Return for how many of the next steps there are blocks."""
        if self._needed(most) <= self._blocks:
            return most
        low, high = 0, most - 1  # there are for `low`
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._needed(middle) <= self._blocks else (low, middle - 1)
        return low

    def _steps_until(self, arrival_us: float, most: int) -> int:
        """Return after how many steps a request has arrived."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            has_come = self._clock + self._taken(middle).total_us >= arrival_us
            low, high = (low, middle) if has_come else (middle + 1, high)
        return low

    def _taken(self, steps: int) -> StepTimes:
        rows = len(self._numbers)
        return step_times(
            self._layer,
            self._kind,
            rows=rows,
            tokens=steps * int(self._lengths.sum()) + rows * steps * (steps + 1) // 2,
            entries=sum_of_blocks(self._lengths, steps, self._layer.block),
            steps=steps,
            volumes=self._volumes,
        )

    def _advance(self, steps: int) -> None:
        took = self._taken(steps)
        self._times.append(took)
        self._clock += took.total_us
        self._lengths, self._left = self._lengths + steps, self._left - steps
        self._most_rows = max(self._most_rows, len(self._numbers))
