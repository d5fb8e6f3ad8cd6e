"""Costs of every interval of a model's operators in execution order, for planners of memory.

A stage is an interval [start, stop) of the blocks of the graph, which are single operators. What it takes
follows `CostModel`, as prefix sums:

    time    forward + backward of its operators, for one micro-batch
    held    parameters + older versions of those that are trained + gradients + optimizer state
    memory  held + in-flight x saved bytes + largest transient

`PipelineShape` has what depends on the stage's place: micro-batches in flight, and versions of the weights.
In a synchronous pipeline only activations grow with what is in flight; in PipeDream's asynchronous one every
micro-batch in flight has weights of its own, the newest of which are the current ones (DawnPiper, B.1,
multiplies the optimizer's state as well, which no implementation does).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs import CostModel, Floats

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What the place of a stage in a chain of stages decides.

    Args:
        num_micro_batches: of a mini-batch; an asynchronous pipeline never runs dry, and does not look at it.
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
        """Return whether forwards and backwards take turns, so that both ways of a link are busy at a time.

        Otherwise tensors leave during forwards only and come back during backwards only: under GPipe's
        schedule, and where one micro-batch is in flight.
        """
        return self.schedule != "gpipe" and self.in_flight(stage) > 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """What autograd keeps, as arrays over tensors (positions in the chain).

    Args:
        made, charged: where a tensor is made, and where it is first kept.
        last: its last keeper or reader; a segment that ends before leaves it to others.
        bytes: for one micro-batch.
    """

    names: tuple[str, ...]
    made: Ints
    charged: Ints
    last: Ints
    bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsavedResults:
    """Results that nobody keeps, as arrays over (result, reader): what a segment must hold to run again."""

    result: Ints
    made: Ints
    reader: Ints
    bytes: Floats


class OperatorChain:
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
        self.saved = _prefix(saved)
        self._shared = [
            (sorted(places), per_sample * local + fixed) for places, per_sample, fixed in costs.shared
        ]
        self._copied: dict[int, tuple[list[int], list[float]]] = {}
        self._inputs = [
            (sorted(readers), num_bytes / (degree if is_shared_out else 1))
            for readers, num_bytes, is_shared_out in costs.inputs
        ]
        self.parameters, self.trained = _prefix(costs.parameter_bytes), _prefix(costs.gradient_bytes)
        self.held = _prefix(
            costs.held_bytes_of(costs.parameter_bytes, costs.gradient_bytes, costs.optimizer_bytes, degree)
        )
        self._sums = self.held.tolist(), self.trained.tolist(), self.saved.tolist()
        self._transient = _largest_of(costs.transient_per_sample * local)
        self.tensors = _saved_tensors(costs, local)
        self.unsaved = _unsaved_results(costs, local)
        self.crossing = _crossing_bytes(costs, local)
        self.set_tensor_sums()

    def set_times(self, forward_us: Floats, backward_us: Floats) -> None:
        """Set the times of every operator, and with them how many there are."""
        self.num_blocks = len(forward_us)
        self.forward_us, self.backward_us = forward_us, backward_us
        self.forward = _prefix(forward_us)
        self.backward = _prefix(backward_us)
        self.time = _prefix(forward_us + backward_us)

    def set_tensor_sums(self) -> None:
        """Sum up the saved tensors by where they are charged."""
        largest = np.zeros(self.num_blocks)
        np.maximum.at(largest, self.tensors.charged, self.tensors.bytes)
        self._largest_saved = _largest_of(largest)
        self.tensor_bytes = _prefix(sum_by(self.tensors.charged, self.tensors.bytes, self.num_blocks))

    def transient(self, start: int, stop: int) -> float:
        """Return the most that one operator holds while it runs."""
        return _between(self._transient, start, stop)

    def largest_saved(self, start: int, stop: int) -> float:
        """Return the bytes of the largest tensor kept."""
        return _between(self._largest_saved, start, stop)

    def stage_us(self, start: int, stop: int) -> float:
        """Return forward and backward microseconds of one micro-batch."""
        return float(self.time[stop] - self.time[start])

    def held_bytes(self, start: int, stop: int, versions: int) -> float:
        """Return the bytes of weights, gradients, optimizer state and the mini-batch."""
        stash = (versions - 1) * (self.trained[stop] - self.trained[start])
        return float(self.held[stop] - self.held[start] + stash) + self._input_bytes(start, stop)

    def _input_bytes(self, start: int, stop: int) -> float:
        """Return what a rank holds of the mini-batch."""
        return sum(
            num_bytes
            for places, num_bytes in self._inputs
            if bisect_left(places, start) < bisect_left(places, stop)
        )

    def saved_bytes(self, start: int, stop: int) -> float:
        """Return the bytes kept for backward by one micro-batch, copies of what earlier stages keep included."""
        return float(self.saved[stop] - self.saved[start]) + (
            self._copies(start, stop) if self._shared else 0.0
        )

    def _copies(self, start: int, stop: int) -> float:
        """Return the bytes that are charged to an operator before ``start`` and kept in [start, stop) too."""
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

    def memory_bytes(self, start: int, stop: int, stage: int, shape: PipelineShape) -> float:
        """Return the peak of stage ``stage`` without memory optimization."""
        held, trained, saved = self._sums  # lists: single numbers are quicker without numpy
        versions = shape.versions(stage)
        kept = saved[stop] - saved[start]
        if self._shared:
            kept += self._copies(start, stop)
        total = held[stop] - held[start] + shape.in_flight(stage) * kept
        if versions > 1:
            total += (versions - 1) * (trained[stop] - trained[start])
        if self._inputs:
            total += self._input_bytes(start, stop)
        return total + _between(self._transient, start, stop)


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


def _prefix(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _saved_tensors(costs: CostModel, local: float) -> SavedTensors:
    """Return the tensors; they grow with the samples as what their operator saves does."""
    graph, position = costs.graph, costs.index
    readers: dict[str, int] = {}
    for edge in graph.edges:
        for name in edge.tensors:
            readers[name] = max(readers.get(name, -1), position[edge.dst])
    made = np.array([position[t.made_by] for t in graph.saved], dtype=np.int64)
    charged = np.array([position[t.kept_by[0]] for t in graph.saved], dtype=np.int64)
    last = np.array(
        [
            max(position[t.kept_by[-1]], *(readers.get(name, -1) for name in (t.name, *t.views)))
            for t in graph.saved
        ],
        dtype=np.int64,
    )
    sizes = np.array([t.bytes for t in graph.saved], dtype=float)
    return SavedTensors(
        names=tuple(t.name for t in graph.saved),
        made=made,
        charged=charged,
        last=last,
        bytes=sizes * costs.saved_growth(local)[charged],
    )


def _unsaved_results(costs: CostModel, local: float) -> UnsavedResults:
    graph, position = costs.graph, costs.index
    kept = {name for tensor in graph.saved for name in (tensor.name, *tensor.views)}
    number: dict[str, int] = {}
    rows = [
        (number.setdefault(name, len(number)), position[edge.src], position[edge.dst], name)
        for edge in graph.edges
        for name in edge.tensors
        if name not in kept
    ]
    sizes = {name: result_bytes(costs, name, local) for name in number}
    return UnsavedResults(
        result=np.array([row[0] for row in rows], dtype=np.int64),
        made=np.array([row[1] for row in rows], dtype=np.int64),
        reader=np.array([row[2] for row in rows], dtype=np.int64),
        bytes=np.array([sizes[row[3]] for row in rows], dtype=float),
    )


def result_bytes(costs: CostModel, name: str, local: float) -> float:
    """Return the bytes of a result that crosses between blocks, at ``local`` samples."""
    spec = costs.graph.tensors[name]
    fixed = float(spec.bytes_for(0))
    per_sample = (spec.bytes_for(spec.num_samples) - fixed) / spec.num_samples
    return fixed + per_sample * local


def _crossing_bytes(costs: CostModel, local: float) -> Floats:
    """Return by cut position the bytes of all results that cross it, each once."""
    crossing = np.zeros(len(costs.graph.blocks) + 1)
    reach: dict[str, list[int]] = {}
    for edge in costs.graph.edges:
        for name in edge.tensors:
            span = reach.setdefault(name, [costs.index[edge.src], 0])
            span[1] = max(span[1], costs.index[edge.dst])
    for name, (src, dst) in reach.items():
        crossing[src + 1 : dst + 1] += result_bytes(costs, name, local)
    return crossing
