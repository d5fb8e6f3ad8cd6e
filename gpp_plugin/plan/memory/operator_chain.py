"""Costs of every interval of a model's operators in execution order, for planners of memory.

A stage is an interval [start, stop) of the blocks of the graph, which are single operators. What it takes
follows `CostModel`, as prefix sums:

    time    forward + backward of its operators, for one micro-batch
    memory  `memory_formula` of differences of prefix sums; the largest transient from a sparse table

`PipelineShape` has what depends on the stage's place: micro-batches in flight, and versions of the weights.
In a synchronous pipeline only activations grow with what is in flight; in PipeDream's asynchronous one every
micro-batch in flight has weights of its own, the newest of which are the current ones (DawnPiper, B.1,
multiplies the optimizer's state as well, which no implementation does).

Source: DawnPiper (arXiv 2505.05856), section 4, Algorithm 1
Tests: tests/plan/test_dawnpiper.py, tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs.cost_model import CostModel, Floats, prefix_sums
from gpp_plugin.plan.costs.memory_formula import held_bytes, peak_bytes, stashed_bytes, unreduced_bytes

# What autograd keeps of a graph, and what its blocks read of each other: the core of all memory optimization.
#
# Two searches make stages fit: DawnPiper's, over intervals of the whole model's operators (`operator_chain`), and the
# stage graph's, over any set of blocks (`fitting`). Both treat blocks as a *chain*: positions in the order in which
# they run. `GraphTensors` has the tensors by block, once for a graph; `chain_tensors` places them on a chain.
#
# Example: blocks a, b, c in a row; b saves a's result x and c reads it too, c's result is saved by no block.
#
#     whole graph, positions a=0 b=1 c=2     x: made at 0, charged (first saved) at 1, last used at 2
#     stage {b, c}, positions b=1 c=2        x: made at 0, which stands for everything outside: it is never dropped
#     stage {a, b}, positions a=1 b=2        x: made at 0 too, for c outside reads it: this stage must keep it anyway


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """What autograd keeps, as arrays over tensors (positions in the chain).

    Args:
        made, charged: where a tensor is made, and where it is first saved.
        last: the last block that saves or reads it; a segment that ends before leaves it to others.
        bytes: for one micro-batch.
    """

    names: tuple[str, ...]
    made: Ints
    charged: Ints
    last: Ints
    bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedResults:
    """Results that no block saves, as arrays over (result, reader): what a segment must hold to run again."""

    result: Ints
    made: Ints
    reader: Ints
    bytes: Floats


class GraphTensors:
    """What autograd keeps of a graph, by position of blocks, at any number of samples.

    Args:
        savers: by tensor, the blocks that keep it, increasing.
        users: by tensor, the blocks that make, keep or read it; ``spanning``: tensors of more than one.
        results: results that cross between blocks, with the block that makes each and those that read it.
        saved_in: by block, the tensors it keeps; ``entering``: by block, the results it reads.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        graph, position = costs.graph, costs.index
        readers: dict[str, list[int]] = {}
        makers: dict[str, int] = {}
        for edge in graph.edges:
            for name in edge.tensors:
                readers.setdefault(name, []).append(position[edge.dst])
                makers[name] = position[edge.src]
        self.names = [tensor.name for tensor in graph.saved]
        self.made = [position[tensor.made_by] for tensor in graph.saved]
        self.savers = [sorted(position[block] for block in tensor.kept_by) for tensor in graph.saved]
        self.users = [
            {made, *savers, *(r for name in (t.name, *t.views) for r in readers.get(name, ()))}
            for t, made, savers in zip(graph.saved, self.made, self.savers, strict=True)
        ]
        self.spanning = [t for t, users in enumerate(self.users) if len(users) > 1]
        number_of = {name: i for i, t in enumerate(graph.saved) for name in (t.name, *t.views)}
        self.results = [(name, makers[name], sorted(set(blocks))) for name, blocks in readers.items()]
        self.result_tensor = [number_of.get(name, -1) for name, _, _ in self.results]
        self.saved_in: list[list[int]] = [[] for _ in graph.blocks]
        for t, savers in enumerate(self.savers):
            for block in savers:
                self.saved_in[block].append(t)
        self.entering: list[list[int]] = [[] for _ in graph.blocks]
        for r, (_, _, blocks) in enumerate(self.results):
            for block in blocks:
                self.entering[block].append(r)
        self._charged = np.array([savers[0] for savers in self.savers], dtype=np.int64)
        self._bytes = np.array([t.bytes * costs.growth.get(t.name, 1.0) for t in graph.saved], dtype=float)
        self._sizes: dict[float, Floats] = {}
        self._results_at: dict[float, Floats] = {}

    def sizes(self, local: float) -> Floats:
        """Return the bytes of every tensor; they grow as the profile says that the bytes of their block do."""
        found = self._sizes.get(local)
        if found is None:
            found = self._sizes[local] = self._bytes * self.costs.saved_growth(local)[self._charged]
        return found

    def result_sizes(self, local: float) -> Floats:
        """Return the bytes of every result that crosses between blocks."""
        found = self._results_at.get(local)
        if found is None:
            sizes = [self._result_bytes(name, local) for name, _, _ in self.results]
            found = self._results_at[local] = np.array(sizes, dtype=float)
        return found

    def _result_bytes(self, name: str, local: float) -> float:
        spec = self.costs.graph.tensors[name]
        fixed = float(spec.bytes_for(0))
        per_sample = (spec.bytes_for(spec.num_samples) - fixed) / spec.num_samples
        return (fixed + per_sample * local) * self.costs.growth.get(name, 1.0)

    def single_segments(self, local: float) -> tuple[Floats, Floats]:
        """Return by block what it drops as a segment of its own, and what it then holds instead, whatever its stage.

        What another block keeps is taken to be in the same stage: then it need not be held for this one.
        """
        sizes, results = self.sizes(local), self.result_sizes(local)
        dropped, held = np.zeros(len(self.saved_in)), np.zeros(len(self.saved_in))
        for t, users in enumerate(self.users):
            if len(users) == 1:
                dropped[self.made[t]] += sizes[t]
        for r, (_, _, readers) in enumerate(self.results):
            if self.result_tensor[r] < 0:
                held[readers] += results[r]
        return dropped, held


def chain_tensors(
    everything: GraphTensors, numbers: Iterable[int], sizes: Floats, place: Mapping[int, int]
) -> SavedTensors:
    """Return tensors as a chain of some blocks keeps them; what is made or used outside is made at 0, never dropped.

    Args:
        numbers: of the tensors; each is saved by a block of the chain.
        sizes: by tensor of the graph.
        place: position in the chain of each of its blocks.
    """
    numbers = list(numbers)
    made, charged, last = [], [], []
    for t in numbers:
        users = everything.users[t]
        inside = [place[user] for user in users if user in place]
        made.append(place[everything.made[t]] if len(inside) == len(users) else 0)
        charged.append(min(place[saver] for saver in everything.savers[t] if saver in place))
        last.append(max(inside))
    return SavedTensors(
        names=tuple(everything.names[t] for t in numbers),
        made=np.array(made, dtype=np.int64),
        charged=np.array(charged, dtype=np.int64),
        last=np.array(last, dtype=np.int64),
        bytes=sizes[numbers] if numbers else np.zeros(0),
    )


def chain_results(
    everything: GraphTensors, numbers: Iterable[int], sizes: Floats, place: Mapping[int, int], length: int
) -> tuple[UnsavedResults, Floats]:
    """Return what a chain's blocks read and none of them keeps, and by cut position the bytes that cross it.

    A result crosses the cuts behind its maker (0 if that is outside) up to its last reader, each once: one made at 0
    and read at 1 and 3 crosses cuts 1, 2 and 3 of [0 | 1 | 2 | 3].

    Args:
        numbers: of the results that blocks of the chain read.
        sizes: by result of the graph.
        length: positions of the chain.
    """
    steps = np.zeros(length)
    rows: list[tuple[int, int, int]] = []
    for r in numbers:
        _, maker, readers = everything.results[r]
        inside = [place[reader] for reader in readers if reader in place]
        begin = place.get(maker, 0)
        steps[begin] += sizes[r]
        steps[max(inside)] -= sizes[r]
        t = everything.result_tensor[r]
        if t < 0 or not any(saver in place for saver in everything.savers[t]):
            rows.extend((r, begin, reader) for reader in inside)
    found: Ints = np.array(rows, dtype=np.int64).reshape(-1, 3)
    unsaved = UnsavedResults(
        result=found[:, 0],
        made=found[:, 1],
        reader=found[:, 2],
        bytes=sizes[found[:, 0]] if rows else np.zeros(0),
    )
    return unsaved, prefix_sums(steps)


# What may be done to make stages fit, and in closed form about the least that it adds; numbers or arrays.


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What may be done about one micro-batch of a stage, in bytes and microseconds; numbers or arrays.

    Args:
        net: dropped less held instead; ``dropped``; ``work``: back in memory while it runs again.
        again_us: of the second forwards.
        saved: bytes of all its saved tensors; ``largest`` of them; ``left``: largest of those not dropped.
        forward_us, backward_us: without memory optimization.
    """

    net: Any
    dropped: Any
    work: Any
    again_us: Any
    saved: Any
    largest: Any
    left: Any
    forward_us: Any
    backward_us: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Whether and how quickly tensors leave.

    Args:
        bytes_per_us: each way; 0: nothing is swapped.
    """

    bytes_per_us: float

    def exposed_us(self, num_bytes: Any, forward_us: Any, backward_us: Any, in_turn: Any) -> Any:
        """Return what transfers of ``num_bytes`` each way take beyond the compute they hide behind."""
        transfer = num_bytes / self.bytes_per_us
        if in_turn is True:  # one stage of thousands: numpy would work out both
            return np.maximum(transfer - forward_us - backward_us, 0.0)
        separate = np.maximum(transfer - forward_us, 0.0) + np.maximum(transfer - backward_us, 0.0)
        if in_turn is False:
            return separate
        return np.where(in_turn, np.maximum(transfer - forward_us - backward_us, 0.0), separate)

    def hidden_bytes(self, forward_us: Any, backward_us: Any, in_turn: Any) -> Any:
        """Return the bytes of one micro-batch whose transfers hide."""
        if in_turn is True:
            return self.bytes_per_us * (forward_us + backward_us)
        separate = np.minimum(forward_us, backward_us)
        return self.bytes_per_us * np.where(in_turn, forward_us + backward_us, separate)


def is_in_turn(schedule: str, in_flight: Any) -> Any:
    """Return whether forwards and backwards of a stage take turns, so that both ways of a link are busy at a time.

    Otherwise tensors leave during forwards only and come back during backwards only: under GPipe's schedule, and
    where one micro-batch is in flight.

        1F1B, two in flight    F0 F1 B0 F2 B1 F3     out of F2 and in for B1 hide behind F2 and B1 together
        GPipe                  F0 F1 F2 B2 B1 B0     all go out behind F, all come in behind B
    """
    return (in_flight > 1) & (schedule != "gpipe")


def lacking_bytes(excess: Any, count: Any, savings: Savings) -> Any:
    """Return how many bytes are too many after recomputing, before any swap; negative: it fits.

    Every micro-batch in flight drops ``net``; one at a time works with what it has made again.
    """
    return excess + savings.work - count * savings.net


def nearest_to_fitting(excess: float, count: int, savings: Savings, host: HostLink) -> float:
    """Return the least bytes that any choice leaves too many: recomputing alone, or with all the rest swapped."""
    needs = lacking_bytes(excess, count, savings)
    if host.bytes_per_us:
        # Two of the largest left are in device memory at a time: one in use, one on its way.
        swapped = needs + 2 * savings.left - count * (savings.saved - savings.dropped)
        needs = np.minimum(needs, swapped)
    return float(needs.min())


def added_us(excess: Any, count: Any, savings: Savings, host: HostLink, in_turn: Any) -> Any:
    """Return what a choice of segments adds, and the swaps that it still needs; inf where it does not fit.

    Args:
        excess: bytes too many without memory optimization, with ``count`` micro-batches in flight.
        in_turn: whether forwards and backwards take turns.
    """
    s = savings
    needs = lacking_bytes(excess, count, s)
    plain = np.where(needs <= 0, s.again_us, np.inf)
    return np.minimum(plain, swapping_us(needs, count, s, host, in_turn)) if host.bytes_per_us else plain


def swapping_us(needs: Any, count: Any, savings: Savings, host: HostLink, in_turn: Any) -> Any:
    """Return what a choice of segments adds with the swaps it still needs; inf where not enough is left to swap.

    Args:
        needs: `lacking_bytes` of the choice.
    """
    s = savings
    wanted = np.maximum(needs + 2 * s.left, 0.0) / count
    exposed = host.exposed_us(wanted, s.forward_us, s.backward_us + s.again_us, in_turn)
    return np.where(wanted <= s.saved - s.dropped, s.again_us + exposed, np.inf)


def least_added_us(excess: Any, count: Any, savings: Savings, host: HostLink, in_turn: Any) -> Any:
    """Return about the least that fitting adds, as arrays; 0 where it fits, inf where nothing makes it.

    Blocks are taken as divisible: as large a part as is needed is recomputed, alone or beside what the link
    takes for nothing; or nothing or everything is, and the rest swapped.

    Args:
        savings: of recomputing every block.
    """
    s = savings
    none = dataclasses.replace(s, net=0.0, dropped=0.0, work=0.0, again_us=0.0, left=s.largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.minimum(
            added_us(excess, count, none, host, in_turn), added_us(excess, count, s, host, in_turn)
        )
        needs = excess + s.work
        parts = [needs]
        if host.bytes_per_us:
            hidden = np.minimum(host.hidden_bytes(s.forward_us, s.backward_us, in_turn), s.saved - s.dropped)
            parts.append(np.maximum(needs + 2 * s.largest - count * np.maximum(hidden, 0.0), 0.0))
        for lacking in parts:
            share = lacking / (count * s.net)
            least = np.minimum(least, np.where((s.net > 0) & (share <= 1.0), share * s.again_us, np.inf))
    return np.where(excess <= 0, 0.0, least)


def savings_of(block: Savings, total: Any, peak: Any) -> Savings:
    """Return the savings of many stages from those of blocks.

    Args:
        total, peak: sum and largest, over every stage's blocks, of values by block.
    """
    names = [each.name for each in dataclasses.fields(Savings)]
    largest = ("work", "largest", "left")
    return Savings(**{name: (peak if name in largest else total)(getattr(block, name)) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What the place of a stage in a chain of stages decides.

    Args:
        num_micro_batches: of a mini-batch; an asynchronous pipeline never runs dry, and does not use it.
        mode: ``sync`` or ``async``; schedule: ``1f1b`` or ``gpipe``; vertical_sync: as of `PipelinePlan`.
        limits: bytes that one rank of each stage may use.
        host_bytes_per_s: of one rank's link to host memory, each way.
        link_bytes_per_s: of the slowest link between stages.
        counts: micro-batches that each stage holds, where that follows from a graph of stages and not from its
            place in a chain.
    """

    num_stages: int
    num_micro_batches: int
    limits: tuple[int, ...]
    host_bytes_per_s: float
    link_bytes_per_s: float = float("inf")
    mode: str = "sync"
    schedule: str = "1f1b"
    counts: tuple[int, ...] = ()
    vertical_sync: bool = False

    def in_flight(self, stage: int) -> int:
        """Return the micro-batches that stage ``stage`` holds."""
        if self.counts:
            return self.counts[stage]
        if self.mode == "async":
            return self.num_stages - stage
        if self.schedule == "gpipe":
            return self.num_micro_batches
        return min(self.num_stages - stage, self.num_micro_batches)

    def versions(self, stage: int) -> int:
        """Return the versions of its weights that stage ``stage`` holds, the current one included."""
        if self.mode == "sync":
            return 1
        return self.num_stages - (0 if self.vertical_sync else stage)

    def is_in_turn(self, stage: int) -> bool:
        """Return whether forwards and backwards of a stage take turns."""
        return bool(is_in_turn(self.schedule, self.in_flight(stage)))


class RangeMax:
    """The largest of any interval of rows, column by column, in constant time (sparse table)."""

    def __init__(self, values: Floats) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= len(values):
            last = self._levels[-1]
            self._levels.append(np.maximum(last[:-width], last[width:]))
            width *= 2

    def __call__(self, start: int, stop: int) -> Floats:
        """Return the largest of rows [start, stop), which must not be empty."""
        level = (stop - start).bit_length() - 1
        values = self._levels[level]
        return np.maximum(values[start], values[stop - (1 << level)])


class TensorChain:
    """Operators, or blocks, in the order in which they run, with what they take and keep: what can be fitted.

    Positions are of operators; cut position i lies before operator i, so that prefix sums have one entry more. Who
    makes one sets ``costs``, ``local``, ``names``, times, ``tensors``, ``unsaved`` and ``crossing``.

    Args:
        local: samples that one rank computes at a time.
        crossing: by cut position, the bytes of all results that cross it, each once.
    """

    costs: CostModel
    local: float
    names: list[str]
    tensors: SavedTensors
    unsaved: UnsavedResults
    crossing: Floats

    def set_times(self, forward_us: Floats, backward_us: Floats) -> None:
        """Set the times of every operator, and with them how many there are."""
        self.num_blocks = len(forward_us)
        self.forward_us, self.backward_us = forward_us, backward_us
        self.forward = prefix_sums(forward_us)
        self.backward = prefix_sums(backward_us)
        self.time = prefix_sums(forward_us + backward_us)

    def set_tensor_sums(self) -> None:
        """Sum up the saved tensors by where they are charged."""
        largest = np.zeros(self.num_blocks)
        np.maximum.at(largest, self.tensors.charged, self.tensors.bytes)
        self._largest_saved = _largest_of(largest)
        self.tensor_bytes = prefix_sums(sum_by(self.tensors.charged, self.tensors.bytes, self.num_blocks))

    def largest_saved(self, start: int, stop: int) -> float:
        """Return the bytes of the largest saved tensor."""
        return _between(self._largest_saved, start, stop)

    def stage_us(self, start: int, stop: int) -> float:
        """Return forward and backward microseconds of one micro-batch."""
        return float(self.time[stop] - self.time[start])

    def memory_bytes(
        self, start: int, stop: int, stage: int, shape: PipelineShape, *, is_optimized: bool = False
    ) -> float:
        """Return the peak of stage ``stage`` before what memory optimization saves of it (`memory_formula`).

        Args:
            is_optimized: as of `CostModel.stage_memory`.
        """
        raise NotImplementedError

    def reused_by_gradients(self, start: int, stop: int, less: float) -> float:
        """Return what one micro-batch still saves that its whole gradients reuse; 0 below ZeRO 2.

        So much less than `memory_bytes` says for ``is_optimized`` does a stage need.

        Args:
            less: bytes of it that are swapped or recomputed.
        """
        raise NotImplementedError


class OperatorChain(TensorChain):
    """One graph at one number of samples a rank.

    Args:
        local: samples that one rank computes at a time.
        degree: ranks of a stage, among which ZeRO shares out what is held.
    """

    def __init__(self, costs: CostModel, local: float, *, degree: int = 1) -> None:
        graph = costs.graph
        self.costs, self.local = costs, local
        self.names = [block.name for block in graph.blocks]
        self.set_times(*costs.block_times(local))
        saved = costs.saved_per_sample * local + costs.saved_fixed
        self.saved = prefix_sums(saved)
        self._shared = [
            (sorted(places), per_sample * local + fixed) for places, per_sample, fixed in costs.shared
        ]
        self._copied: dict[int, tuple[list[int], list[float]]] = {}
        self._inputs = [
            (sorted(readers), num_bytes / (degree if is_shared_out else 1))
            for readers, num_bytes, is_shared_out in costs.inputs
        ]
        self.parameters, self.trained = prefix_sums(costs.parameter_bytes), prefix_sums(costs.gradient_bytes)
        self._replicas, self._zero_stage = degree * costs.grid.context, costs.zero_stage
        parts = costs.parameter_bytes, costs.gradient_bytes, costs.optimizer_bytes
        self.held = prefix_sums(held_bytes(*parts, degree=self._replicas, zero_stage=costs.zero_stage))
        self._sums = self.held.tolist(), self.trained.tolist(), self.saved.tolist()
        self._transient = _largest_of(costs.transient_per_sample * local)
        everything = GraphTensors(costs)
        place = {row: row for row in range(self.num_blocks)}
        self.tensors = chain_tensors(everything, range(len(everything.names)), everything.sizes(local), place)
        numbers, sizes = range(len(everything.results)), everything.result_sizes(local)
        self.unsaved, self.crossing = chain_results(everything, numbers, sizes, place, self.num_blocks)
        self.set_tensor_sums()

    def transient(self, start: int, stop: int) -> float:
        """Return the most that one operator holds while it runs."""
        return _between(self._transient, start, stop)

    def held_bytes(self, start: int, stop: int, versions: int) -> float:
        """Return the bytes of weights, gradients, optimizer state and the mini-batch."""
        stash = stashed_bytes(self.trained[stop] - self.trained[start], versions)
        return float(self.held[stop] - self.held[start] + stash) + self._input_bytes(start, stop)

    def _input_bytes(self, start: int, stop: int) -> float:
        """Return what a rank holds of the mini-batch."""
        return sum(
            num_bytes
            for places, num_bytes in self._inputs
            if bisect_left(places, start) < bisect_left(places, stop)
        )

    def saved_bytes(self, start: int, stop: int) -> float:
        """Return the bytes saved for backward by one micro-batch, copies of what earlier stages keep included."""
        return float(self.saved[stop] - self.saved[start]) + (
            self._copies(start, stop) if self._shared else 0.0
        )

    def _copies(self, start: int, stop: int) -> float:
        """Return the bytes that are charged to an operator before ``start`` and saved in [start, stop) too."""
        found = self._copied.get(start)
        if found is None:
            again = sorted(
                (places[bisect_left(places, start)], num_bytes)
                for places, num_bytes in self._shared
                if places[0] < start <= places[-1]
            )
            sums = [0.0, *itertools.accumulate(num_bytes for _, num_bytes in again)]
            found = self._copied[start] = [place for place, _ in again], sums
        places, sums = found
        return sums[bisect_left(places, stop)]

    def memory_bytes(
        self, start: int, stop: int, stage: int, shape: PipelineShape, *, is_optimized: bool = False
    ) -> float:
        """Return the peak, from prefix sums."""
        holds, trained, saved = self._sums  # lists, and few calls: very many stages are considered
        held, inside = holds[stop] - holds[start], saved[stop] - saved[start]
        gradient, versions = trained[stop] - trained[start], shape.versions(stage)
        if self._shared:
            inside += self._copies(start, stop)
        if versions > 1:
            held += stashed_bytes(gradient, versions)
        if self._inputs:
            held += self._input_bytes(start, stop)
        if self._zero_stage >= 2:
            reusable = 0.0 if is_optimized else inside
            held += float(
                unreduced_bytes(gradient, reusable, degree=self._replicas, zero_stage=self._zero_stage)
            )
        transient = _between(self._transient, start, stop)
        need: float = peak_bytes(held, inside, shape.in_flight(stage), transient=transient)
        return need

    def reused_by_gradients(self, start: int, stop: int, less: float) -> float:
        """Return the bytes, from prefix sums."""
        if self._zero_stage < 2 or self._replicas == 1:
            return 0.0
        gradient = float(self.trained[stop] - self.trained[start])
        return min(gradient, max(self.saved_bytes(start, stop) - less, 0.0))


def _largest_of(values: Floats) -> list[list[float]]:
    """Return the rows of a sparse table as lists: single numbers are quicker without numpy."""
    rows = [values.tolist()]
    width = 1
    while 2 * width <= len(values):
        last = rows[-1]
        rows.append([max(a, b) for a, b in zip(last, last[width:], strict=False)])
        width *= 2
    return rows


def _between(rows: list[list[float]], start: int, stop: int) -> float:
    if stop <= start:
        return 0.0
    level = (stop - start).bit_length() - 1
    row = rows[level]
    return max(row[start], row[stop - (1 << level)])


def sum_by(places: Ints, values: Floats, length: int) -> Floats:
    """Return the sums of the values at each place."""
    return np.bincount(places, weights=values, minlength=length).astype(np.float64)
