"""Which consecutive operators are worth running again: disjoint segments, at several prices of memory.

A segment [i, j) that runs again before its backward (one checkpointed segment; recomputation stops at the
last operator that keeps something, as PyTorch's does)

    drops   tensors made in it that no block outside saves or reads
    holds   results of earlier operators that it reads and no block saves
    works   with what it drops back in memory, all of it, while its backward runs

At a price of q bytes a microsecond a segment is worth ``drops - holds - q time``; one pass over the chain
finds the disjoint segments worth most, none of which works with more than a cap. A high price leaves what
is cheap to make again (Capuchin's memory saved per second of at least q); price 0 drops all that can be
dropped under the cap. Prices and caps together are a menu of *levels*; a stage picks its level
(`capuchin`).

Whole layers are a level too. A stage that begins or ends inside a segment runs its part of it again; what
a level comes to in any stage are differences of prefix sums (`LevelSums`).

The segments are found once for a graph, at one number of samples, and weighed anew at every other.

Source: Capuchin (ASPLOS 2020, doi 10.1145/3373376.3378505), as in DawnPiper (arXiv 2505.05856), section 4.3
Tests: tests/plan/test_capuchin.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpp_plugin.plan.costs.cost_model import Floats
from gpp_plugin.plan.linear_order import layer_bounds
from gpp_plugin.plan.memory.operator_chain import Ints, RangeMax, TensorChain, sum_by

WINDOW = 128
"""Operators a segment has at most."""
PRICES = (8.0, 3.0, 1.5, 0.8, 0.3)
"""In units of (all saved bytes) / (time of the whole forward)."""
CAPS = (0.25, 0.1, 0.045, 0.025, 0.012)
"""Bytes a segment may work with, in units of all saved bytes."""
LEAST_PRICE = 0.02
FINE_CAPS = tuple(0.008 * 1.25**n for n in range(17))
"""Where memory is what counts: saved and working bytes are to be balanced finely."""
LEVELS = (*itertools.product(PRICES, CAPS), *((LEAST_PRICE, cap) for cap in FINE_CAPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Disjoint segments in order: [start, stop) each."""

    starts: Ints
    stops: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    """What each of some segments drops, holds and takes, for one micro-batch."""

    dropped: Floats
    held: Floats
    time_us: Floats


def find_segments(
    chain: TensorChain,
    levels: Sequence[tuple[float, float]] = LEVELS,
    *,
    layers: bool = True,
    within: tuple[int, int] | None = None,
) -> list[Segments]:
    """Return the menu: the best disjoint segments at every price, under every cap.

    Args:
        levels: prices and caps.
        layers: whole layers are a level too.
        within: the interval segments lie in; the whole chain if None.
    """
    first, last = within or (0, chain.num_blocks)
    num = chain.num_blocks
    window = min(WINDOW, num)
    net, time, work = _windows(chain, window)
    total, whole_us = float(chain.tensor_bytes[-1]), float(chain.forward[-1])
    if total <= 0 or whole_us <= 0:
        return []
    # Weighted interval scheduling, for all levels at once. With arrays [level, stop] and windows [stop, length - 1]:
    #     best[q, j] = max of best[q, j - 1]                                 operator j - 1 in no segment
    #                         best[q, j - n] + net[j, n] - q time[j, n]      the last n operators as one segment
    # where the second is left out if the segment works with more than the level's cap. ``length`` is the n taken, or
    # 0, from which `_trace` reads the segments back from the end. Example: operators that drop 5, 5 and 1 bytes in
    # 1 us each, price 2, segments of at most 1: best = 0, 3, 6, 6 and length = 0, 1, 1, 0: {0}, {1}.
    unit = total / whole_us
    prices = np.array([price * unit for price, _ in levels])
    caps = np.array([cap * total for _, cap in levels])
    best = np.zeros((len(levels), num + 1))
    length = np.zeros((len(levels), num + 1), dtype=np.int64)
    lengths = np.arange(1, window + 1)
    rows = np.arange(len(levels))
    for stop in range(1, num + 1):
        if not first < stop <= last:
            best[:, stop] = best[:, stop - 1]
            continue
        reach = min(window, stop - first)
        value = best[:, stop - lengths[:reach]] + net[stop, :reach] - prices[:, None] * time[stop, :reach]
        value[work[stop, :reach] > caps[:, None]] = -np.inf
        choice = value.argmax(axis=1)
        reached = value[rows, choice]
        is_better = reached > best[:, stop - 1]
        best[:, stop] = np.where(is_better, reached, best[:, stop - 1])
        length[:, stop] = np.where(is_better, choice + 1, 0)
    found = [_trace(row, num) for row in length]
    if layers:
        bounds = np.array(layer_bounds(chain.names), dtype=np.int64)
        found.append(Segments(starts=bounds[:-1], stops=bounds[1:]))
    return _distinct(found)


def _trace(length: Ints, num: int) -> Segments:
    starts, stops, at = [], [], num
    while at > 0:
        step = int(length[at])
        if step:
            starts.append(at - step)
            stops.append(at)
        at -= max(step, 1)
    return Segments(
        starts=np.array(starts[::-1], dtype=np.int64), stops=np.array(stops[::-1], dtype=np.int64)
    )


def _distinct(levels: list[Segments]) -> list[Segments]:
    known = {(level.starts.tobytes(), level.stops.tobytes()): level for level in levels if len(level.starts)}
    return list(known.values())


def _windows(chain: TensorChain, window: int) -> tuple[Floats, Floats, Floats]:
    """Return by [stop, length - 1]: bytes dropped less bytes held, time, and bytes dropped."""
    num, tensors = chain.num_blocks, chain.tensors
    dropped = np.zeros((num + 1, window + 1))  # [start, length]
    by_maker: list[list[int]] = [[] for _ in range(num)]
    for t, made in enumerate(tensors.made.tolist()):
        by_maker[made].append(t)
    last, sizes = tensors.last.tolist(), tensors.bytes.tolist()
    for start in range(num - 1, -1, -1):
        dropped[start, 1:] = dropped[start + 1, :-1]
        for t in by_maker[start]:
            dropped[start, last[t] - start + 1 :] += sizes[t]
    held = _held_windows(chain, window)
    is_last_run = runs_again_when_last(chain)
    stops, lengths = np.meshgrid(np.arange(num + 1), np.arange(1, window + 1), indexing="ij")
    starts = np.maximum(stops - lengths, 0)
    final = np.maximum(stops - 1, 0)
    time = chain.forward[final] - chain.forward[starts] + is_last_run[final] * chain.forward_us[final]
    work = dropped[starts, lengths]
    return work - held[starts, lengths], time, work


def _held_windows(chain: TensorChain, window: int) -> Floats:
    """Return by [start, length]: bytes of earlier, unsaved results that the segment reads."""
    held = np.zeros((chain.num_blocks + 1, window + 1))
    unsaved = chain.unsaved
    readers: dict[int, list[int]] = {}
    about: dict[int, tuple[int, float]] = {}
    for result, made, reader, size in zip(
        unsaved.result.tolist(),
        unsaved.made.tolist(),
        unsaved.reader.tolist(),
        unsaved.bytes.tolist(),
        strict=True,
    ):
        readers.setdefault(result, []).append(reader)
        about[result] = made, size
    for result, places in readers.items():
        made, size = about[result]
        begin = made + 1
        for reader in sorted(places):
            for start in range(max(begin, reader - window + 1), reader + 1):
                held[start, reader - start + 1 :] += size
            begin = reader + 1
    return held


def runs_again_when_last(chain: TensorChain) -> Floats:
    """Return 1 for operators that keep something of their own: as the last of a segment they must run again."""
    result = np.zeros(chain.num_blocks)
    result[chain.tensors.made[chain.tensors.made == chain.tensors.charged]] = 1.0
    return result


class LevelSums:
    """What every level of a menu drops, holds and takes in any stage [start, stop), in constant time.

    Of a tensor that a segment drops, the part of the segment in the stage drops it if it makes it and has
    its last user. With P the prefix sums of such tensors by where they are made, and Q by their last use, a
    stage drops Q[stop] - P[start], as long as no segment is longer than the stage at both ends.
    """

    def __init__(self, chain: TensorChain, levels: Sequence[Segments], costs: Sequence[SegmentCosts]) -> None:
        shape = chain.num_blocks + 1, len(levels)
        self._made, self._used = np.zeros(shape), np.zeros(shape)
        self._held, self._time = np.zeros(shape), np.zeros(shape)
        self._entering = np.zeros(shape)
        works = np.zeros((chain.num_blocks, len(levels)))
        tensors, last_run = chain.tensors, runs_again_when_last(chain)
        for k, (segments, cost) in enumerate(zip(levels, costs, strict=True)):
            member = members(chain, zip(segments.starts.tolist(), segments.stops.tolist(), strict=True))
            rows = dropped_tensors(chain, member)
            works[member >= 0, k] = cost.dropped[member[member >= 0]]
            self._made[1:, k] = sum_by(tensors.made[rows], tensors.bytes[rows], chain.num_blocks)
            self._used[1:, k] = sum_by(tensors.last[rows], tensors.bytes[rows], chain.num_blocks)
            self._held[segments.starts + 1, k] = cost.held
            time = np.where(member >= 0, chain.forward_us, 0.0)
            time[segments.stops - 1] *= last_run[segments.stops - 1]
            self._time[1:, k] = time
            is_inside = np.zeros(chain.num_blocks + 1, dtype=bool)
            is_inside[1:-1] = (member[1:] >= 0) & (member[1:] == member[:-1])
            self._entering[is_inside, k] = chain.crossing[is_inside]
        for values in (self._made, self._used, self._held, self._time):
            np.cumsum(values, axis=0, out=values)
        self._works = RangeMax(works)

    def work_bytes(self, start: int, stop: int) -> Floats:
        """Return by level the most bytes that one of its segments works with."""
        return self._works(start, stop)

    def net_bytes(self, start: int, stop: int) -> Floats:
        """Return by level the bytes dropped less those held instead, of one micro-batch."""
        dropped = self._used[stop] - self._made[start]
        held = self._held[stop] - self._held[start] + self._entering[start]
        return np.maximum(dropped - held, 0.0)

    def time_us(self, start: int, stop: int) -> Floats:
        """Return by level the time of the second forwards."""
        return self._time[stop] - self._time[start]


def whole_stage(chain: TensorChain, start: int, stop: int) -> tuple[float, float, float]:
    """Return what a stage drops and at most holds as one segment, and its time."""
    tensors = chain.tensors
    dropped = float(tensors.bytes[(tensors.made >= start) & (tensors.last < stop)].sum())
    return dropped, float(chain.crossing[start]), float(chain.forward[stop] - chain.forward[start])


def members(chain: TensorChain, segments: Iterable[tuple[int, int]]) -> Ints:
    """Return for each operator the number of its segment, or -1."""
    member = np.full(chain.num_blocks, -1, dtype=np.int64)
    for i, (begin, end) in enumerate(segments):
        member[begin:end] = i
    return member


def segment_costs(chain: TensorChain, segments: Segments, *, together: bool = False) -> SegmentCosts:
    """Weigh disjoint segments at the chain's number of samples.

    Args:
        together: they are those of one stage: a result that several of them hold counts for the first only.
    """
    count = len(segments.starts)
    member = members(chain, zip(segments.starts.tolist(), segments.stops.tolist(), strict=True))
    tensors, unsaved = chain.tensors, chain.unsaved
    is_dropped = dropped_tensors(chain, member)
    dropped = sum_by(member[tensors.made[is_dropped]], tensors.bytes[is_dropped], count)
    enters = (member[unsaved.reader] >= 0) & (member[unsaved.reader] != member[unsaved.made])
    pairs, index = np.unique(
        np.stack([unsaved.result[enters], member[unsaved.reader[enters]]]), axis=1, return_index=True
    )
    if together:
        first = np.unique(pairs[0], return_index=True)[1]
        pairs, index = pairs[:, first], index[first]
    held = sum_by(pairs[1], unsaved.bytes[enters][index], count)
    final = segments.stops - 1
    is_last_run = runs_again_when_last(chain)
    time = (
        chain.forward[final] - chain.forward[segments.starts] + is_last_run[final] * chain.forward_us[final]
    )
    return SegmentCosts(dropped=dropped, held=held, time_us=time)


def dropped_tensors(chain: TensorChain, member: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which tensors are dropped; ``member`` is the number of each operator's segment, or -1."""
    tensors = chain.tensors
    return (member[tensors.made] >= 0) & (member[tensors.made] == member[tensors.last])
