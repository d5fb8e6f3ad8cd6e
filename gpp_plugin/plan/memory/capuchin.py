"""Swap or recompute, tensor by tensor, so that a stage fits at the least cost (Capuchin, ASPLOS 2020).

Capuchin's model, which DawnPiper (section 4.3) applies to each stage:

    FreeTime  from a tensor's last use in the forward to its first in the backward, less both transfers;
              tensors with the most are swapped first, until the transfers no longer hide behind compute
    MSPS      memory saved per second of running a tensor's operators again; then whichever of the two
              costs less is taken

Here, for a stage with forward f, backward b (recomputation r included) and c micro-batches in flight, of
which s bytes each wait in host memory behind a link of W bytes/s each way:

    hidden    s/W <= f + b where forwards and backwards take turns; else s/W <= f and s/W <= b - each
              way its own phase (GPipe's schedule, one micro-batch in flight)
    memory    held + c (saved - dropped - s) + largest segment made again + two swapped tensors (one in
              use, one on its way) + transient

What to recompute comes from a menu of segments (`find_segments`): every level has a price in bytes a microsecond,
which is a bound on the MSPS of its segments. `StageOptimizer.estimate` mixes two neighbouring levels and
fills the link, in closed form, for thousands of stages of a search; `optimize` makes the choice
tensor by tensor for the stages of a plan.

Deviations: levels are tried from all prices, rather than swapping first whatever hides, because a stage
that must recompute anyway can save its transfers for what is dear to recompute; the result is never worse.

Source: Capuchin (ASPLOS 2020, doi 10.1145/3373376.3378505), as in DawnPiper (arXiv 2505.05856), section 4.3
Tests: tests/plan/test_capuchin.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpp_plugin.ir.plan import MemoryPlan, RecomputedSegment, SwappedTensor
from gpp_plugin.plan.costs.cost_model import Floats
from gpp_plugin.plan.make import layer_bounds
from gpp_plugin.plan.memory.operator_chain import (
    HostLink,
    Ints,
    PipelineShape,
    RangeMax,
    Savings,
    TensorChain,
    lacking_bytes,
    nearest_to_fitting,
    sum_by,
    swapping_us,
)

Interval = tuple[int, int]
NUM_MIXTURES = 4
"""Pairs of levels that `optimize` weighs exactly."""


# Which consecutive operators are worth running again: disjoint segments, at several prices of memory.
#
# A segment [i, j) that runs again before its backward (one checkpointed segment; recomputation stops at the
# last operator that keeps something, as PyTorch's does)
#
#     drops   tensors made in it that no block outside saves or reads
#     holds   results of earlier operators that it reads and no block saves
#     works   with what it drops back in memory, all of it, while its backward runs
#
# At a price of q bytes a microsecond a segment is worth ``drops - holds - q time``; one pass over the chain
# finds the disjoint segments worth most, none of which works with more than a cap. A high price leaves what
# is cheap to make again (Capuchin's memory saved per second of at least q); price 0 drops all that can be
# dropped under the cap. Prices and caps together are a menu of *levels*; a stage picks its level (`StageOptimizer`).
#
# Whole layers are a level too. A stage that begins or ends inside a segment runs its part of it again; what
# a level comes to in any stage are differences of prefix sums (`LevelSums`).
#
# The segments are found once for a graph, at one number of samples, and weighed anew at every other.

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
    known = {(level.starts.tobytes(), level.stops.tobytes()): level for level in found if len(level.starts)}
    return list(known.values())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """A stage that fits, or how far it is from that.

    Args:
        excess_bytes: by how much it exceeds its device; 0 where it fits.
        us: forward, backward and what memory optimization adds, of one micro-batch.
        memory: None where nothing is swapped or recomputed.
    """

    excess_bytes: float
    us: float
    memory_bytes: float
    memory: MemoryPlan | None = None

    @property
    def key(self) -> tuple[float, float]:
        """Return what choices are compared by: fitting first, then time."""
        return self.excess_bytes, self.us


class StageOptimizer:
    """What any stage of one chain costs to fit.

    Args:
        chain: at the number of samples a rank computes.
        menu: of the same graph, at any number of samples; used if ``recompute``.
        recompute, swap: what may be done.
        is_cautious: under ZeRO 2 look for what to swap and recompute as if nothing of what a micro-batch keeps made
            memory for its whole gradients (`unreduced_bytes`); else as if all of it did. What is found is weighed with
            what it leaves, so that a choice that fits does fit.
    """

    def __init__(
        self,
        chain: TensorChain,
        shape: PipelineShape,
        *,
        menu: Sequence[Segments] = (),
        recompute: bool = False,
        swap: bool = False,
        is_cautious: bool = True,
    ) -> None:
        self.chain, self.shape, self._is_cautious = chain, shape, is_cautious
        self.can_recompute, self.can_swap = recompute, swap
        self.host = HostLink(bytes_per_us=shape.host_bytes_per_s / 1e6)
        self._used_link = self.host if swap else HostLink(bytes_per_us=0.0)
        none = Segments(starts=np.zeros(0, dtype=np.int64), stops=np.zeros(0, dtype=np.int64))
        self._levels = [none, *(menu if recompute else ())]
        costs = [segment_costs(chain, level) for level in self._levels]
        self._sums = LevelSums(chain, self._levels, costs)
        self._known: dict[tuple[int, int, int], tuple[float, float]] = {}

    def estimate(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        """Return (bytes too many, microseconds) of stage ``stage`` holding [start, stop)."""
        key = stage, start, stop
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._estimate(stage, start, stop)
        return found

    def _estimate(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        chain, shape = self.chain, self.shape
        compute_us = chain.stage_us(start, stop)
        excess = chain.memory_bytes(start, stop, stage, shape) - shape.limits[stage]
        if excess <= 0 or not (self.can_swap or len(self._levels) > 1):
            return max(excess, 0.0), compute_us
        if self._is_cautious:
            excess = self.excess_before(stage, start, stop)
        s, in_flight = self._savings(stage, start, stop), shape.in_flight(stage)
        needs = lacking_bytes(excess, in_flight, s)
        us = _cheapest_mixture(s.again_us, needs, s.work)
        if self.can_swap:
            in_turn = shape.is_in_turn(stage)
            hidden = in_flight * self.host.hidden_bytes(s.forward_us, s.backward_us + s.again_us, in_turn)
            us = min(
                us,
                _cheapest_mixture(s.again_us, needs + 2 * s.left - hidden, s.work),
                float(swapping_us(needs, in_flight, s, self.host, in_turn).min()),
            )
        if us < np.inf:
            return 0.0, compute_us + us
        return max(nearest_to_fitting(excess, in_flight, s, self._used_link), 1.0), compute_us

    def excess_before(self, stage: int, start: int, stop: int) -> float:
        """Return the bytes too many of a stage that swaps or recomputes, before what that saves."""
        need = self.chain.memory_bytes(start, stop, stage, self.shape, is_optimized=self._is_cautious)
        return need - self.shape.limits[stage]

    def excess_to_swap(self, stage: int, start: int, stop: int, found: StageChoice) -> float:
        """Return the bytes that swapping has to free beside what a choice that does not fit recomputes."""
        less = found.memory.recomputed_bytes if found.memory is not None else 0.0
        reused = self.chain.reused_by_gradients(start, stop, less) if self._is_cautious else 0.0
        return found.excess_bytes + reused

    def _savings(self, stage: int, start: int, stop: int) -> Savings:
        """Return what every level comes to, and last, where recomputing is allowed, the stage as one segment.

        What a level drops is not separated from what it drops less what it holds instead: arrays [level] from prefix
        sums, which are taken for every stage that is considered.
        """
        chain = self.chain
        time, net = self._sums.time_us(start, stop), self._sums.net_bytes(start, stop)
        work = self._sums.work_bytes(start, stop)
        if self.can_recompute:
            tensors = chain.tensors
            dropped = float(tensors.bytes[(tensors.made >= start) & (tensors.last < stop)].sum())
            time = np.append(time, float(chain.forward[stop] - chain.forward[start]))
            net = np.append(net, max(dropped - float(chain.crossing[start]), 0.0))
            work = np.append(work, dropped)
        forward_us = chain.forward[stop] - chain.forward[start]
        largest = chain.largest_saved(start, stop)
        return Savings(
            net=net,
            dropped=net,
            work=work,
            again_us=time,
            saved=chain.tensor_bytes[stop] - chain.tensor_bytes[start],
            largest=largest,
            left=largest,
            forward_us=forward_us,
            backward_us=chain.stage_us(start, stop) - forward_us,
        )

    def optimize(self, stage: int, start: int, stop: int) -> StageChoice:
        """Return the cheapest choice found that fits, tensor by tensor, or the one nearest to fitting."""
        best = self.weigh(stage, start, stop)
        if best.excess_bytes <= 0:
            return best
        inside = [self._inside(level, start, stop) for level in range(len(self._levels))]
        if self.can_recompute:
            inside.append([(start, stop)])
        for level in inside:
            best = min(best, self.fitted(stage, start, stop, level), key=lambda c: c.key)
        for low, high in self._mixtures(stage, start, stop):
            best = min(
                best, self._best_split(stage, start, stop, inside[low], inside[high]), key=lambda c: c.key
            )
        return best

    def _inside(self, level: int, start: int, stop: int) -> list[Interval]:
        segments = self._levels[level]
        begins = np.maximum(segments.starts, start)
        ends = np.minimum(segments.stops, stop)
        saved = begins < ends
        return list(zip(begins[saved].tolist(), ends[saved].tolist(), strict=True))

    def _mixtures(self, stage: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the most promising pairs of levels, the one that does not fit first."""
        s, in_flight = self._savings(stage, start, stop), self.shape.in_flight(stage)
        time, needs = s.again_us, lacking_bytes(self.excess_before(stage, start, stop), in_flight, s)
        if self.can_swap:
            in_turn = self.shape.is_in_turn(stage)
            needs = needs - in_flight * self.host.hidden_bytes(s.forward_us, s.backward_us + time, in_turn)
        scored = []
        for low, high in itertools.permutations(range(len(time)), 2):
            if time[low] < time[high] and needs[low] > max(needs[high], 0.0):
                share = min(needs[low] / (needs[low] - needs[high]), 1.0)
                us = float(time[low] + share * (time[high] - time[low]))
                scored.append((needs[high] > 0, us, low, high))
        return [(low, high) for _, _, low, high in sorted(scored)[:NUM_MIXTURES]]

    def _best_split(
        self, stage: int, start: int, stop: int, low: list[Interval], high: list[Interval]
    ) -> StageChoice:
        """Return the cheapest choice with the segments of one level up to a place and of another after it."""
        places = sorted({start, *(end for _, end in high)})
        first, last = 0, len(places) - 1
        best: StageChoice | None = None
        while first <= last:
            middle = (first + last) // 2
            place = places[middle]
            mixed = [s for s in high if s[1] <= place] + [s for s in low if s[0] >= place]
            found = self.fitted(stage, start, stop, mixed)
            if best is None or found.key < best.key:
                best = found
            is_enough = found.excess_bytes <= 0 and (found.memory is None or found.memory.swap_us <= 0)
            if is_enough:
                last = middle - 1
            else:
                first = middle + 1
        assert best is not None
        return best

    def fitted(self, stage: int, start: int, stop: int, segments: Sequence[Interval]) -> StageChoice:
        """Return the choice with these segments and as few swapped tensors as make it fit."""
        found = self.weigh(stage, start, stop, segments=segments)
        if found.excess_bytes <= 0 or not self.can_swap:
            return found
        candidates = self.swap_candidates(stage, start, stop, segments)
        if not len(candidates):
            return found
        sizes = self.chain.tensors.bytes[candidates]
        in_flight = self.shape.in_flight(stage)
        freed = in_flight * np.cumsum(sizes) - 2 * np.maximum.accumulate(sizes)
        excess = self.excess_to_swap(stage, start, stop, found)
        enough = np.flatnonzero(freed >= excess)
        count = int(enough[0]) + 1 if len(enough) else int(freed.argmax()) + 1
        chosen = _thinned(candidates[:count], sizes[:count], float(freed[count - 1] - excess), in_flight)
        return self.weigh(stage, start, stop, segments=segments, swapped=chosen)

    def swap_candidates(self, stage: int, start: int, stop: int, segments: Sequence[Interval]) -> Ints:
        """Return the tensors that stay, the one with the most FreeTime first."""
        tensors = self.chain.tensors
        saved = (tensors.charged >= start) & (tensors.charged < stop) & (tensors.bytes > 0)
        member = members(self.chain, segments)
        saved &= ~dropped_tensors(self.chain, member)
        rows = np.flatnonzero(saved)
        free = self.free_us(stage, start, stop, rows)
        return rows[np.argsort(-free, kind="stable")]

    def free_us(self, stage: int, start: int, stop: int, rows: Ints) -> Floats:
        """Return Capuchin's FreeTime of tensors saved by a stage."""
        chain, shape = self.chain, self.shape
        after = np.minimum(chain.tensors.last[rows] + 1, stop)
        gap = chain.forward[stop] - chain.forward[after] + chain.backward[stop] - chain.backward[after]
        others = (shape.in_flight(stage) - 1) * chain.stage_us(start, stop)
        if shape.schedule == "gpipe" and shape.mode == "sync":
            others /= 2  # on the average: the last forward's backward comes last, all forwards before
        return gap + others - 2 * chain.tensors.bytes[rows] / self.host.bytes_per_us

    def weigh(
        self,
        stage: int,
        start: int,
        stop: int,
        *,
        segments: Sequence[Interval] = (),
        swapped: Ints | None = None,
        buffer_bytes: float | None = None,
    ) -> StageChoice:
        """Return what a stage costs with these segments run again and these tensors swapped.

        Args:
            buffer_bytes: held for tensors in use and on their way; two of the largest swapped if None.
        """
        chain, shape = self.chain, self.shape
        in_flight = shape.in_flight(stage)
        compute_us = chain.stage_us(start, stop)
        rows = np.zeros(0, dtype=np.int64) if swapped is None else swapped
        recomputed = self._recomputed(segments)
        sizes = chain.tensors.bytes[rows]
        if buffer_bytes is None:
            buffer_bytes = 2 * float(sizes.max(initial=0.0))
        working = max((s.bytes for s in recomputed), default=0) + buffer_bytes
        recompute_us = sum(s.recompute_us for s in recomputed)
        forward_us = chain.forward[stop] - chain.forward[start]
        free = self.free_us(stage, start, stop, rows)
        swap_us = float(
            self.host.exposed_us(
                sizes.sum(), forward_us, compute_us - forward_us + recompute_us, shape.is_in_turn(stage)
            )
        ) + float(np.maximum(-free, 0.0).sum())
        memory = None
        if recomputed or len(rows):
            memory = MemoryPlan(
                swapped=tuple(
                    SwappedTensor(name=chain.tensors.names[t], bytes=round(size), free_us=float(us))
                    for t, size, us in zip(rows.tolist(), sizes.tolist(), free.tolist(), strict=True)
                ),
                recomputed=recomputed,
                working_bytes=round(working),
                swap_us=swap_us,
            )
        less = sum(s.bytes - s.held_bytes for s in recomputed) + float(sizes.sum())
        # `memory_formula` with s less what leaves: linear in it, but for what whole gradients reuse.
        need = chain.memory_bytes(start, stop, stage, shape, is_optimized=True) - in_flight * less + working
        need -= chain.reused_by_gradients(start, stop, less)
        return StageChoice(
            excess_bytes=max(need - shape.limits[stage], 0.0),
            us=compute_us + recompute_us + swap_us,
            memory_bytes=need,
            memory=memory,
        )

    def _recomputed(self, segments: Sequence[Interval]) -> tuple[RecomputedSegment, ...]:
        if not segments:
            return ()
        chain = self.chain
        ordered = sorted(segments)
        wanted = Segments(
            starts=np.array([s for s, _ in ordered], dtype=np.int64),
            stops=np.array([s for _, s in ordered], dtype=np.int64),
        )
        costs: SegmentCosts = segment_costs(chain, wanted, together=True)
        member = members(chain, ordered)
        tensors = chain.tensors
        owner = np.where(member[tensors.made] == member[tensors.last], member[tensors.made], -1)
        names: list[list[str]] = [[] for _ in ordered]
        for t in np.flatnonzero(owner >= 0).tolist():
            names[owner[t]].append(tensors.names[t])
        return tuple(
            RecomputedSegment(
                blocks=tuple(chain.names[begin:end]),
                tensors=tuple(names[i]),
                bytes=round(costs.dropped[i]),
                held_bytes=round(costs.held[i]),
                recompute_us=float(costs.time_us[i]),
            )
            for i, (begin, end) in enumerate(ordered)
        )


def _cheapest_mixture(time: Floats, needs: Floats, work: Floats) -> float:
    """Return the least time of one level, or of two mixed so that they just fit; inf where none fits.

    Args:
        needs: bytes each level lacks with its own ``work``; negative: fits. A mixture has the larger work.
    """
    fits = needs <= 0
    if not fits.any():
        return float("inf")
    best = float(time[fits].min())
    if fits.all():
        return best
    tempting = ~fits & (time < best)
    if not tempting.any():
        return best
    low, high = time[tempting][:, None], time[fits][None, :]
    more_work = work[fits][None, :] - work[tempting][:, None]
    lacking = needs[tempting][:, None] + np.maximum(more_work, 0.0)
    spare = -needs[fits][None, :] - np.maximum(-more_work, 0.0)
    share = lacking / np.maximum(lacking + spare, 1e-9)
    mixed = np.where((low < high) & (share <= 1.0) & (spare >= 0.0), low + share * (high - low), np.inf)
    return min(best, float(mixed.min()))


def _thinned(rows: Ints, sizes: Floats, spare_bytes: float, in_flight: int) -> Ints:
    """Return the tensors without those that need not go after all, the ones with least FreeTime first."""
    saved = np.ones(len(rows), dtype=bool)
    for i in range(len(rows) - 1, -1, -1):
        if in_flight * sizes[i] <= spare_bytes:
            saved[i] = False
            spare_bytes -= in_flight * float(sizes[i])
    return rows[saved]
