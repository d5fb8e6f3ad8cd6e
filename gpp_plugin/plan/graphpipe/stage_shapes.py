"""Time, memory and free bytes of every stage of a series, at any batch of a rank: matrices over rows and columns.

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs.cost_model import CostModel, Floats
from gpp_plugin.plan.costs.memory_formula import held_bytes, micro_batches_within, peak_bytes, unreduced_bytes
from gpp_plugin.plan.graphpipe.intervals import Branches, Series, whole_blocks
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.memory.graph_tensors import GraphTensors
from gpp_plugin.plan.memory.operator_chain import Savings, savings_of

Bools = npt.NDArray[np.bool_]
NO_LIMIT = 1 << 40


class StageShapes:
    """What the stages of one series hold, whatever the micro-batch size: shared by all its tables.

    Args:
        rows, columns: [row or column, block]: how often a stage that begins (ends) so holds a block.
        largest: returns [row, column] the largest of values [block] over every stage's blocks.
        through: bytes a sample in and out.
    """

    def __init__(
        self,
        costs: CostModel,
        rows: Floats,
        columns: Floats,
        valid: Bools,
        largest: Callable[[Floats], Floats],
        through: Floats,
    ) -> None:
        self.costs, self._rows, self._columns = costs, rows, columns
        self.valid, self.largest, self.through = valid, largest, through
        self.peak = largest(costs.transient_per_sample)
        self.saved, self.saved_fixed = self.total(costs.saved_per_sample), self.total(costs.saved_fixed)
        for blocks, per_sample, fixed in costs.shared:
            flags = np.zeros((2, len(costs.index)))
            flags[0, blocks[0]], flags[1, blocks[1:]] = 1.0, 1.0
            is_held = (self.total(flags[0]) < 0.5) & (self.total(flags[1]) > 0.5)
            self.saved += is_held * per_sample
            self.saved_fixed += is_held * fixed
        self.parameter, self.gradient = self.total(costs.parameter_bytes), self.total(costs.gradient_bytes)
        self.optimizer = self.total(costs.optimizer_bytes)
        self._times: dict[float, Floats] = {}
        self._counts: dict[tuple[float, int, float], Floats] = {}
        self._rooms: dict[tuple[float, int, float], tuple[Floats, Floats]] = {}
        self._savings: dict[float, list[Savings]] = {}
        self._spans: tuple[Floats, Floats] | None = None
        self._at_tensor: dict[int, StageShapes] = {}

    def at_tensor(self, tensor: int) -> StageShapes:
        """Return the shapes of one of the tensor ranks of the same stages (`CostModel.at_tensor`)."""
        costs = self.costs.at_tensor(tensor)
        if costs is self.costs:
            return self
        if tensor not in self._at_tensor:
            self._at_tensor[tensor] = StageShapes(
                costs, self._rows, self._columns, self.valid, self.largest, self.through
            )
        return self._at_tensor[tensor]

    def total(self, values: Floats) -> Floats:
        """Return [row, column] the sum of ``values`` [block] over every stage's blocks."""
        return (self._rows @ values)[:, None] + (self._columns @ values)[None, :]

    def times(self, local: float) -> Floats:
        """Return [row, column] microseconds of forward and backward of ``local`` samples."""
        if local not in self._times:
            forward, backward = self.costs.block_times(local)
            self._times[local] = self.total(forward + backward)
        return self._times[local]

    def micro_batches_that_fit(self, local: float, degree: int, limit: float) -> Floats:
        """Return [row, column] how many micro-batches of ``local`` samples a rank can hold at once."""
        key = self._key(local, degree, limit)
        if key not in self._counts:
            self._counts[key] = micro_batches_within(*self.free_bytes(local, degree, limit), NO_LIMIT)
        return self._counts[key]

    def free_bytes(self, local: float, degree: int, limit: float) -> tuple[Floats, Floats]:
        """Return [row, column] the bytes a rank has for what is saved, and what a micro-batch saves."""
        key = self._key(local, degree, limit)
        if key not in self._rooms:
            zero = self.costs.zero_stage
            held = held_bytes(self.parameter, self.gradient, self.optimizer, degree=degree, zero_stage=zero)
            held = held + self.costs.input_bytes_of(self.total, degree)
            each = self.saved * local + self.saved_fixed
            held = held + unreduced_bytes(self.gradient, each, degree=degree, zero_stage=zero)
            self._rooms[key] = limit - peak_bytes(held, each, 0, transient=self.peak * local), each
        return self._rooms[key]

    def _key(self, local: float, degree: int, limit: float) -> tuple[float, int, float]:
        return local, degree if self.costs.zero_stage or self.costs.inputs else 1, limit

    def savings(self, fitter: StageFitter, local: float) -> list[Savings]:
        """Return what recomputing saves in every stage: all blocks one by one, or the stage as one segment."""
        if local not in self._savings:
            fitter = fitter.on(self.costs)
            single = savings_of(fitter.per_block(local), self.total, self.largest)
            self._savings[local] = [single]
            if fitter.can_recompute:
                dropped, held = self._whole(fitter.everything, local)
                self._savings[local].append(
                    dataclasses.replace(
                        single,
                        net=dropped - held,
                        dropped=dropped,
                        work=dropped,
                        left=0.0,  # what comes from outside, and is small
                        again_us=self.total(self.costs.block_times(local)[0]),
                    )
                )
        return self._savings[local]

    def _whole(self, tensors: GraphTensors, local: float) -> tuple[Floats, Floats]:
        """Return [row, column] what every stage drops and holds as one segment."""
        if self._spans is None:
            self._spans = self._make_spans(tensors)
        inside, entering = self._spans
        dropped = self.total(tensors.single_segments(local)[0])
        dropped = dropped + np.tensordot(tensors.sizes(local)[tensors.spanning], inside, axes=1)
        return dropped, np.tensordot(tensors.result_sizes(local), entering, axes=1)

    def _make_spans(self, tensors: GraphTensors) -> tuple[Floats, Floats]:
        """Return [tensor, row, column] how often the stage has all users, and [result, ...] reads it from outside."""

        def counts(blocks: Iterable[int]) -> Floats:
            flags = np.zeros(len(self.costs.index))
            flags[list(blocks)] = 1.0
            return self.total(flags)

        inside = [
            np.floor(counts(users) / len(users) + 1e-9)
            for users in map(tensors.users.__getitem__, tensors.spanning)
        ]
        entering = []
        for (_, maker, readers), t in zip(tensors.results, tensors.result_tensor, strict=True):
            is_read = (counts(readers) > 0.5) & (counts([maker]) < 0.5)
            if t >= 0:
                is_read &= counts(tensors.savers[t]) < 0.5
            entering.append(is_read.astype(float))
        shape = (0, *self.valid.shape)
        return (
            np.stack(inside) if inside else np.zeros(shape),
            np.stack(entering) if entering else np.zeros(shape),
        )


def series_shapes(series: Series, costs: CostModel) -> StageShapes:
    """Return the shapes of a series' intervals."""
    num, num_blocks = series.num_items, len(costs.index)
    start, end = np.array(series.row_start), np.array(series.column_end)
    valid = end[None, :] > start[:, None]
    prefix = np.concatenate(
        [
            np.zeros((1, num_blocks)),
            np.cumsum(_block_counts([item.blocks for item in series.items], num_blocks), axis=0),
        ]
    )
    through = series.bytes_through[start[:, None], np.where(valid, end[None, :], start[:, None])]

    def largest(values: Floats) -> Floats:
        items = np.array([values[list(item.blocks)].max(initial=0.0) for item in series.items])
        peak = np.zeros((num + 1, num + 1))
        for i in range(num):
            peak[i, i + 1 :] = np.maximum.accumulate(items[i:])
        row = np.array([values[list(blocks)].max(initial=0.0) for blocks in series.row_blocks])
        column = np.array([values[list(blocks)].max(initial=0.0) for blocks in series.column_blocks])
        return np.maximum(peak[np.ix_(start, end)], np.maximum(row[:, None], column[None, :]))

    return StageShapes(
        costs,
        _block_counts(series.row_blocks, num_blocks) - prefix[start],
        _block_counts(series.column_blocks, num_blocks) + prefix[end],
        valid,
        largest,
        through,
    )


def bin_shapes(parallel: Branches, costs: CostModel) -> StageShapes:
    """Return the shapes of stages that hold whole branches: one row, one column a state."""
    num_blocks = len(costs.index)
    columns = [whole_blocks(parallel, state) for state in parallel.states]
    per_kind = np.array([kind.bytes_through[0, kind.num_items] for kind in parallel.kinds])
    return StageShapes(
        costs,
        np.zeros((1, num_blocks)),
        _block_counts(columns, num_blocks),
        np.array([[len(blocks) > 0 for blocks in columns]]),
        lambda values: np.array([[values[list(blocks)].max(initial=0.0) for blocks in columns]]),
        (np.array(parallel.states, dtype=float) @ per_kind)[None, :],
    )


def _block_counts(groups: Sequence[Sequence[int]], num_blocks: int) -> Floats:
    counts = np.zeros((len(groups), num_blocks))
    for i, blocks in enumerate(groups):
        np.add.at(counts[i], list(blocks), 1.0)
    return counts
