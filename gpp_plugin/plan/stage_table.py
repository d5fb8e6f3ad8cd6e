"""Costs of every stage of a series, for one micro-batch size: matrices over rows and columns (`intervals`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.plan.batches import BatchRules
from gpp_plugin.plan.costs import CostModel, Floats
from gpp_plugin.plan.intervals import Branches, Series, whole_blocks

Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class StageTable:
    """Costs of every stage of one series at one micro-batch size, by degree, row and column.

    Args:
        us_per_sample: time; inf where there is no such stage.
        max_level: the greatest level (stages to the sink, in units of the micro-batch size) at which
            its in-flight micro-batches still fit; ``no_limit`` where all do.
        first_step, step: levels a stage adds after a sink and after another stage.
    """

    us_per_sample: Floats
    max_level: npt.NDArray[np.int64]
    first_step: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]


NO_LIMIT = 1 << 40


class StageShapes:
    """What the stages of one series hold, whatever the micro-batch size: shared by all its tables.

    Args:
        rows, columns: [row or column, block]: how often a stage that begins (ends) so holds a block.
        peak: [row, column] largest transient bytes a sample; ``through`` bytes a sample in and out.
    """

    def __init__(
        self, costs: CostModel, rows: Floats, columns: Floats, valid: Bools, peak: Floats, through: Floats
    ) -> None:
        self.costs, self._rows, self._columns = costs, rows, columns
        self.valid, self.peak, self.through = valid, peak, through
        self.saved, self.saved_fixed = self.total(costs.saved_per_sample), self.total(costs.saved_fixed)
        self.parameter, self.gradient = self.total(costs.parameter_bytes), self.total(costs.gradient_bytes)
        self.optimizer = self.total(costs.optimizer_bytes)
        self._times: dict[float, Floats] = {}
        self._counts: dict[tuple[float, int, float], Floats] = {}

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
        costs = self.costs
        key = (local, degree if costs.zero_stage else 1, limit)
        if key not in self._counts:
            held = costs.held_bytes_of(self.parameter, self.gradient, self.optimizer, degree)
            each = self.saved * local + self.saved_fixed
            held = held + costs.whole_gradient_bytes(self.gradient, each, degree)
            room = limit - held - self.peak * local
            with np.errstate(divide="ignore", invalid="ignore"):
                count = np.where(each > 0, np.floor(room / each + 1e-9), NO_LIMIT)
            self._counts[key] = np.where(room < 0, 0, np.minimum(count, NO_LIMIT))
        return self._counts[key]


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
    transient = costs.transient_per_sample
    items = np.array([transient[list(item.blocks)].max(initial=0.0) for item in series.items])
    peak = np.zeros((num + 1, num + 1))
    for i in range(num):
        peak[i, i + 1 :] = np.maximum.accumulate(items[i:])
    row = np.array([transient[list(blocks)].max(initial=0.0) for blocks in series.row_blocks])
    column = np.array([transient[list(blocks)].max(initial=0.0) for blocks in series.column_blocks])
    return StageShapes(
        costs,
        _block_counts(series.row_blocks, num_blocks) - prefix[start],
        _block_counts(series.column_blocks, num_blocks) + prefix[end],
        valid,
        np.maximum(peak[np.ix_(start, end)], np.maximum(row[:, None], column[None, :])),
        through,
    )


def bin_shapes(parallel: Branches, costs: CostModel) -> StageShapes:
    """Return the shapes of stages that hold whole branches: one row, one column a state."""
    num_blocks = len(costs.index)
    columns = [whole_blocks(parallel, state) for state in parallel.states]
    transient = costs.transient_per_sample
    per_kind = np.array([kind.bytes_through[0, kind.num_items] for kind in parallel.kinds])
    return StageShapes(
        costs,
        np.zeros((1, num_blocks)),
        _block_counts(columns, num_blocks),
        np.array([[len(blocks) > 0 for blocks in columns]]),
        np.array([[transient[list(blocks)].max(initial=0.0) for blocks in columns]]),
        (np.array(parallel.states, dtype=float) @ per_kind)[None, :],
    )


def _block_counts(groups: Sequence[Sequence[int]], num_blocks: int) -> Floats:
    counts = np.zeros((len(groups), num_blocks))
    for i, blocks in enumerate(groups):
        np.add.at(counts[i], list(blocks), 1.0)
    return counts


class TableMaker:
    """Makes the tables of one micro-batch size (``wish``) for all series of a tree.

    Args:
        shapes: of the tree's series and parallel items by id; filled as they are met, and shared by the
            makers of one tree's micro-batch sizes.
    """

    def __init__(
        self,
        graph: BlockGraph,
        costs: CostModel,
        rules: BatchRules,
        *,
        wish: int,
        memory_limit: float,
        link_us_per_byte: float,
        is_gpipe: bool,
        reduce_us_per_byte: Sequence[float],
        degrees: Sequence[int],
        shapes: dict[int, StageShapes],
    ) -> None:
        self.costs, self.rules, self.wish, self.shapes = costs, rules, wish, shapes
        self.memory_limit, self.link_us_per_byte, self.is_gpipe = memory_limit, link_us_per_byte, is_gpipe
        self.degrees, self.reduce_us_per_byte = list(degrees), list(reduce_us_per_byte)
        names = [block.name for block in graph.blocks]
        self.coupled = np.array([name in rules.coupled for name in names], dtype=float)
        self.fixed_sizes = sorted(set(rules.fixed.values()))
        self.fixed = [
            np.array([rules.fixed.get(name) == size for name in names], dtype=float)
            for size in self.fixed_sizes
        ]

    def table(self, series: Series) -> StageTable:
        """Return the table of a series' intervals."""
        if id(series) not in self.shapes:
            self.shapes[id(series)] = series_shapes(series, self.costs)
        return self._make(self.shapes[id(series)])

    def bins(self, parallel: Branches) -> StageTable:
        """Return the table of stages that hold whole branches: one row, one column a state."""
        if id(parallel) not in self.shapes:
            self.shapes[id(parallel)] = bin_shapes(parallel, self.costs)
        return self._make(self.shapes[id(parallel)])

    def _make(self, shapes: StageShapes) -> StageTable:
        mini_batch = self.rules.mini_batch
        shape = (len(self.degrees), *shapes.valid.shape)
        us = np.full(shape, np.inf)
        level = np.zeros(shape, dtype=np.int64)
        first_step, step = np.ones(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
        classes = self._classes(shapes)
        for i, degree in enumerate(self.degrees):
            for (is_coupled, fixed), mask in classes.items():
                size = self._size(is_coupled, fixed, degree)
                if size is None:
                    continue
                local = size / degree
                link = shapes.through * (2 * self.link_us_per_byte / degree)
                reduces = mini_batch // size if self.costs.zero_stage >= 2 else 1
                reduction = shapes.gradient * (self.reduce_us_per_byte[i] * reduces / mini_batch)
                us_here = np.maximum(shapes.times(local) / size, link) + reduction
                count = shapes.micro_batches_that_fit(local, degree, self.memory_limit)
                levels = np.maximum(np.floor(count * (size / self.wish)), 1)
                levels = np.where((count < 1) | self.is_gpipe, 0, levels)
                levels = np.where(count >= mini_batch // size, NO_LIMIT, levels)
                np.copyto(us[i], us_here, where=mask)
                np.copyto(level[i], levels, where=mask, casting="unsafe")
                if size > self.wish:
                    first_step[i][mask] = -(-size // self.wish)
                    step[i][mask] = -(-2 * size // self.wish) - 1
        us[level == 0] = np.inf
        return StageTable(us_per_sample=us, max_level=level, first_step=first_step, step=step)

    def _classes(self, shapes: StageShapes) -> dict[tuple[bool, int | None], Bools]:
        valid = shapes.valid
        coupled = shapes.total(self.coupled) > 0.5
        fixed = [shapes.total(flags) > 0.5 for flags in self.fixed]
        conflict = sum(flags.astype(int) for flags in fixed) > 1 if fixed else np.zeros_like(valid)
        free = ~np.any(fixed, axis=0) if fixed else np.ones_like(valid)
        classes: dict[tuple[bool, int | None], Bools] = {}
        for is_coupled in (False, True):
            base = valid & (coupled == is_coupled) & ~conflict
            classes[is_coupled, None] = base & free
            for size, flags in zip(self.fixed_sizes, fixed, strict=True):
                classes[is_coupled, size] = base & flags
        return {key: mask for key, mask in classes.items() if mask.any()}

    def _size(self, is_coupled: bool, fixed: int | None, degree: int) -> int | None:
        unit = self.rules.loss_unit * degree if is_coupled else None
        size = fixed if fixed is not None else unit if unit is not None else self.wish
        if (unit is not None and size != unit) or size % degree or self.rules.mini_batch % size:
            return None
        return size
