"""Costs of every stage of a series, for one micro-batch size: matrices over rows and columns (`intervals`).

Source: this project
Tests: tests/plan/test_joined.py, tests/plan/test_stage_chain.py, tests/plan/test_graphpipe.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.ir.plan import ModelGrid
from gpp_plugin.plan.costs.collective_costs import boundary_us, link_us_per_byte
from gpp_plugin.plan.costs.cost_model import CostModel, Floats, us_per_sample
from gpp_plugin.plan.costs.estimate import exposed_us
from gpp_plugin.plan.graphpipe.intervals import (
    NO_LIMIT,
    Bools,
    Branches,
    Counts,
    Ints,
    Series,
    StageShapes,
    bin_shapes,
    series_shapes,
)
from gpp_plugin.plan.memory.fitting import StageFitter
from gpp_plugin.plan.memory.operator_chain import least_added_us
from gpp_plugin.plan.request import BatchRules, PlanRequest, SizeClasses

# The stages of a table that are in time and fit at a level, and the fewest devices of one and of what is behind it.
#
# The rule is a minimum over columns of devices of the stage + devices behind it. With N items that is N x N sums a
# level, most of which cannot be least: of the stages that begin alike on the same devices the longest leaves least
# behind. So it is enough to know the last column of each row and degree:
#
#     row 0, in time     columns  0 1 2 3 4 5            behind column   0 1 2 3 4 5
#       on 1 device               x x . . . .                            9 7 6 4 3 0     (fewer items, fewer devices)
#       on 2                      x x x x . .
#       on 4                      x x x x x x            least of 1 + 7, 2 + 4, 4 + 0: 4
#
# Fewer items may need *more* devices where tensors are large beside the time: a stage that begins behind one has to
# receive it. So the order of what is behind is checked first, and where it is not as above, all sums are made.


class AllowedStages:
    """Stages of one pair of steps: levels they add after a sink (``first``) and after another stage (``step``).

    Args:
        degrees: [variant] devices, not decreasing.
        masks: [variant, row, column] each; allowed are the stages that are in all of them.
        num_ends: the first so many columns are ends between items, in their order; others share items with a fork.
        last: returns [variant, row] the last allowed column among those, -1 where there is none; None: look.
    """

    def __init__(
        self,
        first: int,
        step: int,
        degrees: Counts,
        masks: Sequence[Callable[[slice], Bools]],
        num_ends: int,
        last: Callable[[], Ints] | None,
    ) -> None:
        self.first, self.step = first, step
        self._degrees, self._masks, self._num_ends = degrees, masks, num_ends
        self._last = last

    def _fits(self, columns: slice) -> Bools:
        return functools.reduce(np.logical_and, (mask(columns) for mask in self._masks))

    @functools.cached_property
    def cost(self) -> Counts:
        """Return [row, column] the fewest devices of a stage; inf where there is none."""
        return self._cost_of(self._fits(slice(None)))

    def _cost_of(self, fits: Bools) -> Counts:
        # Variants are by increasing degree, so the first one that fits has the fewest devices.
        chosen = fits.argmax(axis=0)
        return np.where(fits.any(axis=0), self._degrees[chosen], np.inf)

    @functools.cached_property
    def _shared_ends(self) -> Counts:
        """Return [row, column] the costs of stages that end with heads of branches."""
        return self._cost_of(self._fits(slice(self._num_ends, None)))

    @functools.cached_property
    def _longest(self) -> tuple[Ints, Counts]:
        """Return [variant, row] the last column, and the devices of that stage; inf where there is none."""
        last = last_of(self._fits(slice(self._num_ends))) if self._last is None else self._last()
        return np.maximum(last, 0), np.where(last >= 0, self._degrees[:, None], np.inf)

    def fewest_with(self, after: Counts) -> Counts:
        """Return [end, exit, row]: the fewest devices of a stage and of what is behind it.

        Args:
            after: [end, exit, column] devices of what is behind.
        """
        num = self._num_ends
        ends = after[:, :, :num]
        if not (ends[:, :, 1:] <= ends[:, :, :-1]).all():
            every: Counts = (self.cost + after[:, :, None, :]).min(axis=3)
            return every
        last, devices = self._longest
        fewest: Counts = (ends.take(last, axis=2) + devices).min(axis=2)
        if after.shape[2] > num:
            fewest = np.minimum(fewest, (self._shared_ends + after[:, :, None, num:]).min(axis=3))
        return fewest


def last_of(fits: Bools) -> Ints:
    """Return [variant, row] the last column that is true, -1 where none is."""
    last = fits.shape[2] - 1 - fits[:, :, ::-1].argmax(axis=2)
    return np.where(fits.any(axis=2), last, -1)


@dataclass(slots=True)
class InTime:
    """The stages of a table that take at most some time.

    Args:
        is_in_time: [variant, row, column].
        limits: levels above which memory allows fewer of them, increasing.
        last: [variant, row] the last end of one that begins there, -1 where there is none; made when requested.
    """

    is_in_time: Bools
    limits: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64] | None = None


def _ones(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return ones, which take no memory and are not to be written to."""
    return np.broadcast_to(np.int64(1), shape)


def _stacked(steps: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return [variant, row, column]; where nothing was written there are ones still."""
    if not any(step.flags.writeable for step in steps):
        return _ones((len(steps), *steps[0].shape))
    return np.stack(steps)


def _rows_of(steps: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return steps[rows] if steps.flags.writeable else steps[: len(rows)]


@dataclass(slots=True)
class _Variant:
    """[row, column] of one variant of a `StageTable`."""

    num_ranks: int
    fitted_level: int
    us: Floats
    level: npt.NDArray[np.int64]
    first_step: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, shape: tuple[int, ...], num_ranks: int, fitted_level: int) -> _Variant:
        """Return a variant without stages."""
        return cls(
            num_ranks=num_ranks,
            fitted_level=fitted_level,
            us=np.full(shape, np.inf),
            level=np.zeros(shape, dtype=np.int64),
            first_step=_ones(shape),
            step=_ones(shape),
        )

    def fill(self, mask: Bools, us: Floats, levels: Floats, size: int, wish: int) -> None:
        """Enter the stages of ``mask``, of micro-batches of ``size``."""
        np.copyto(self.us, us, where=mask)
        np.copyto(self.level, levels, where=mask, casting="unsafe")
        if size > wish:
            if not self.step.flags.writeable:
                self.first_step, self.step = self.first_step.copy(), self.step.copy()
            self.first_step[mask] = -(-size // wish)
            self.step[mask] = -(-2 * size // wish) - 1

    def take_in(self, other: _Variant) -> _Variant | None:
        """Take the stages of another variant of as many ranks where they are better; return what is left of it.

        Better are stages that are no slower, fit at no lower level and add no more levels; of others both stay.
        """
        # Cells of grids 4x1 and 2x2, at micro-batches of 4 samples: (us a sample, level up to which it fits)
        #
        #     4x1   10, 3      10, no limit   -              2x2   11, 6      11, no limit   12, 2
        #     one   10, 3      10, no limit   12, 2          left  11, 6      -              -
        #
        # The first stage is slower on 2x2 and fits at higher levels: both stay. The second is worse in all: it is left
        # out. The third exists as 2x2 alone (4x1 needs too much memory): it is taken in.
        no_worse = [
            (a.us <= b.us) & (a.level >= b.level) & (a.first_step <= b.first_step) & (a.step <= b.step)
            for a, b in ((other, self), (self, other))
        ]
        taken = np.isfinite(other.us) & (~np.isfinite(self.us) | no_worse[0])
        is_left = np.isfinite(other.us) & ~taken & ~no_worse[1]
        if taken.any():
            for name in ("us", "level", "first_step", "step"):
                setattr(self, name, np.where(taken, getattr(other, name), getattr(self, name)))
        if not is_left.any():
            return None
        other.us = np.where(is_left, other.us, np.inf)
        return other


def _merged(variants: Sequence[_Variant]) -> list[_Variant]:
    """Return the variants with those of as many ranks and the same level in one where that loses nothing."""
    # Where memory limits nothing and no block mixes samples, the grids of a number of ranks end as one variant, and the
    # search is as large as without tensor sizes. Where blocks mix samples, 4x1 takes four loss units at a time and 1x4
    # one: fewer levels for more time, and both stay.
    longest: list[_Variant] = []
    for variant in variants:
        left: _Variant | None = variant
        for other in longest:
            if left is not None and (other.num_ranks, other.fitted_level) == (
                left.num_ranks,
                left.fitted_level,
            ):
                left = other.take_in(left)
        if left is not None:
            longest.append(left)
    return longest


@dataclass(kw_only=True)
class StageTable:
    """Costs of every stage of one series at one micro-batch size, by variant, row and column.

    A variant is a number of ranks, and where stages may be made to fit (`fitting`) a level up to which they are. The
    grids of data x context x tensor ranks of one number are one variant, with the best of each stage, where that is
    one; else several.

    Args:
        degrees: ranks of each variant, not decreasing.
        fitted_level: by variant, the level up to which stages are made to fit; 0: stages as they are.
        us_per_sample: time; inf where there is no such stage.
        max_level: the greatest level (stages to the sink, in units of the micro-batch size) at which
            its in-flight micro-batches still fit; ``no_limit`` where all do.
        first_step, step: levels a stage adds after a sink and after another stage.
    """

    degrees: Counts
    fitted_level: npt.NDArray[np.int64]
    us_per_sample: Floats
    max_level: npt.NDArray[np.int64]
    first_step: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    _parts: dict[int, StageTable] = dataclasses.field(default_factory=dict)
    _last_at_level: dict[int, npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def times(self) -> Floats:
        """Return every time a sample that a stage can have, increasing, each once."""
        values = self.us_per_sample.ravel()
        return np.unique(values[np.isfinite(values)])

    @functools.cached_property
    def is_plain(self) -> bool:
        """Return whether memory limits none of the stages, and each adds one level."""
        exists = np.isfinite(self.us_per_sample)
        is_free = bool((self.max_level[exists] == NO_LIMIT).all())
        return is_free and self.steps == [(1, 1)]

    def in_time(self, t: float, most_levels: int) -> InTime:
        """Return which stages take at most ``t``, and the levels (up to one too many) at which memory limits some."""
        is_in_time = self.us_per_sample <= t
        if self.is_plain:
            return InTime(is_in_time=is_in_time, limits=np.array([most_levels + 1]))
        reached = np.minimum(self.max_level[is_in_time], most_levels + 1)
        return InTime(is_in_time=is_in_time, limits=np.flatnonzero(np.bincount(reached)))

    def allowed(self, found: InTime, level: int, num_ends: int) -> list[AllowedStages]:
        """Return the stages in time that fit at a level, by what levels they add.

        Args:
            num_ends: columns that are ends between items.
        """
        masks = [lambda columns: found.is_in_time[:, :, columns]]
        if not self.is_plain:
            masks.append(lambda columns: self.max_level[:, :, columns] >= level)
        last: Callable[[], npt.NDArray[np.int64]] | None = None
        steps = self.steps
        if len(steps) == 1:
            last = functools.partial(self._last, found, level, num_ends)
        return [
            AllowedStages(
                first,
                step,
                self.degrees,
                masks if last is not None else [*masks, self._adds(first, step)],
                num_ends,
                last,
            )
            for first, step in steps
        ]

    def _adds(self, first: int, step: int) -> Callable[[slice], Bools]:
        return lambda columns: (self.first_step[:, :, columns] == first) & (self.step[:, :, columns] == step)

    def _last(self, found: InTime, level: int, num_ends: int) -> npt.NDArray[np.int64]:
        """Return [variant, row] the last end of a stage that is in time and fits at the level, or -1."""
        if found.last is None:
            found.last = last_of(found.is_in_time[:, :, :num_ends])
        if self.is_plain:
            return found.last
        if level not in self._last_at_level:
            self._last_at_level[level] = last_of(self.max_level[:, :, :num_ends] >= level)
        last = np.minimum(found.last, self._last_at_level[level])
        # Longer stages nearly always take more time and memory: then this is the end. Where one does not (it need not
        # receive a large tensor), go on towards the begin.
        variants, rows = np.arange(last.shape[0])[:, None], np.arange(last.shape[1])[None, :]
        while True:
            fits = found.is_in_time[variants, rows, last] & (self.max_level[variants, rows, last] >= level)
            is_too_far = (last >= 0) & ~fits
            if not is_too_far.any():
                return last
            last = last - is_too_far

    @functools.cached_property
    def steps(self) -> list[tuple[int, int]]:
        """Return the pairs of first step and step that there are, in order."""
        if not self.step.flags.writeable or self.step.max() <= 1:  # the first step is 1 then, and only then
            return [(1, 1)]
        exists = np.isfinite(self.us_per_sample)
        pairs = np.stack([self.first_step[exists], self.step[exists]], axis=1)
        return sorted({(int(a), int(b)) for a, b in np.unique(pairs, axis=0)}) or [(1, 1)]

    def part(self, level: int) -> int:
        """Return the least level at or above ``level`` that stages are made to fit at; 0 where none is."""
        at_least = self.fitted_level[self.fitted_level >= level]
        return int(at_least.min(initial=NO_LIMIT)) % NO_LIMIT

    def of_part(self, fitted_level: int) -> StageTable:
        """Return the variants that matter there: stages as they are, and those made to fit no further than needed."""
        if fitted_level not in self._parts:
            rows = np.flatnonzero((self.fitted_level == 0) | (self.fitted_level == fitted_level))
            self._parts[fitted_level] = StageTable(
                degrees=self.degrees[rows],
                fitted_level=self.fitted_level[rows],
                us_per_sample=self.us_per_sample[rows],
                max_level=self.max_level[rows],
                first_step=_rows_of(self.first_step, rows),
                step=_rows_of(self.step, rows),
            )
        return self._parts[fitted_level]


class TableMaker:
    """Makes the tables of one micro-batch size (``wish``) for all series of a tree.

    Args:
        shapes: of the tree's series and parallel items by id; filled as they are met, and shared by the
            makers of one tree's micro-batch sizes.
        fitter: makes stages fit that do not, at the least cost; None: such stages are left out.
        levels: up to which that is worked out, increasing.
    """

    def __init__(
        self,
        request: PlanRequest,
        costs: CostModel,
        rules: BatchRules,
        *,
        wish: int,
        shapes: dict[int, StageShapes],
        fitter: StageFitter | None,
        levels: Sequence[int],
    ) -> None:
        self.fitter, self.levels = fitter, levels
        self._tables: dict[int, StageTable] = {}
        self.costs, self.rules, self.wish, self.shapes = costs, rules, wish, shapes
        cluster, self.grids = request.cluster, rules.grids
        limit = float(max(device.memory_bytes for device in cluster.devices[: request.num_ranks]))
        most = request.memory_limit_bytes
        self.memory_limit = limit if most is None else min(limit, most)
        self.link_us_per_byte = link_us_per_byte(cluster, request.num_ranks)
        self.is_gpipe = request.schedule == "gpipe"
        self.reductions = [costs.reduction(degree, grid) for degree, grid in self.grids]
        names = [block.name for block in request.graph.blocks]

        def flags(blocks: frozenset[str]) -> Floats:
            return np.array([name in blocks for name in names], dtype=float)

        self._refused = {grid: flags(blocks) for grid, blocks in rules.model.refused.items()}
        self._divided = {grid: [flags(each) for each in sets] for grid, sets in rules.model.divided.items()}
        self._size_classes = SizeClasses(rules, names)

    def table(self, item: Series | Branches) -> StageTable:
        """Return the table of a series' intervals, or of stages that hold whole branches: a row, a column a state."""
        if id(item) not in self._tables:
            if id(item) not in self.shapes:
                if isinstance(item, Series):
                    self.shapes[id(item)] = series_shapes(item, self.costs)
                else:
                    self.shapes[id(item)] = bin_shapes(item, self.costs)
            self._tables[id(item)] = self._make(self.shapes[id(item)])
        return self._tables[id(item)]

    def _make(self, shapes: StageShapes) -> StageTable:
        of_class = self._size_classes
        classes = of_class.of(np.stack([shapes.total(flags) for flags in of_class.flags]))
        variants = [v for i in range(len(self.grids)) for v in self._variants(shapes, i, classes)]
        if len(self.rules.model.grids) > 1:
            variants = _merged(variants)
        table = StageTable(
            degrees=np.array([v.num_ranks for v in variants], dtype=np.float32),
            fitted_level=np.array([v.fitted_level for v in variants], dtype=np.int64),
            us_per_sample=np.stack([v.us for v in variants]),
            max_level=np.stack([v.level for v in variants]),
            first_step=_stacked([v.first_step for v in variants]),
            step=_stacked([v.step for v in variants]),
        )
        table.us_per_sample[table.max_level == 0] = np.inf
        return table

    def _variants(self, shapes: StageShapes, i: int, classes: Ints) -> Iterator[_Variant]:
        """Yield the stages of one grid as they are, then those made to fit, level by level.

        Args:
            classes: [row, column] of micro-batch sizes.
        """
        degree, grid = self.grids[i]
        allowed, shapes = self._may_have(shapes, grid), shapes.at_grid(grid)
        exists = shapes.valid if allowed is None else shapes.valid & allowed
        sizes = np.where(exists, self._size_classes.sizes(classes, degree, self.wish), 0)
        masks = {size: sizes == size for size in map(int, np.unique(sizes[sizes > 0]))}
        plain = _Variant.empty(shapes.valid.shape, degree * grid.size, 0)
        for size, mask in masks.items():
            us = self._times(shapes, i, size)
            count = shapes.micro_batches_that_fit(size / degree, degree, self.memory_limit)
            levels = np.maximum(np.floor(count * (size / self.wish)), 1)
            levels = np.where((count < 1) | self.is_gpipe, 0, levels)
            levels = np.where(count >= self.rules.mini_batch // size, NO_LIMIT, levels)
            plain.fill(mask, us, levels, size, self.wish)
        yield plain
        if self.fitter is None or (plain.level >= self.levels[-1]).all():
            return
        for level in self.levels[-1:] if self.is_gpipe else self.levels:
            made = _Variant.empty(shapes.valid.shape, degree * grid.size, level)
            for size, mask in masks.items():
                us, levels = self._fitted(shapes, i, size, level)
                made.fill(mask & (plain.level < level), us, levels, size, self.wish)
            if np.isfinite(made.us).any():
                yield made

    def _may_have(self, shapes: StageShapes, grid: ModelGrid) -> Bools | None:
        """Return [row, column] which stages may be of that grid (`GridRules`); None: all."""
        # Sums over a stage's blocks: none that is refused, and for sizes above 1 one at least that is divided.
        found: Bools | None = None
        if grid in self._refused:
            found = shapes.total(self._refused[grid]) < 0.5
        for flags in self._divided.get(grid, ()):
            is_divided = shapes.total(flags) > 0.5
            found = is_divided if found is None else found & is_divided
        return found

    def _times(self, shapes: StageShapes, i: int, size: int, added_us: Floats | float = 0.0) -> Floats:
        """Return [row, column] microseconds a sample at the micro-batch size ``size`` of the stage."""
        degree, grid = self.grids[i]  # each tensor rank sends and is sent all of its data position's samples
        link = boundary_us(shapes.through, degree * grid.context, self.link_us_per_byte)
        # Under ZeRO 2 the search takes every reduce-scatter for a whole all-reduce, about twice of what
        # `num_reductions` counts and plans are ranked by: that leans it to larger micro-batches, which with little
        # memory have led to plans that are up to a tenth quicker (mmt on 8 ranks).
        reduces = self.rules.mini_batch // size if self.costs.zero_stage >= 2 else 1
        reduction = self.reductions[i].us(shapes.gradient) * (reduces / self.rules.mini_batch)
        backward = shapes.backward_times(size / degree) / self.rules.mini_batch
        reduction = exposed_us(shapes.costs, reduction, backward, shapes.gradient)
        found: Floats = us_per_sample(
            shapes.times(size / degree) + added_us, size, reduce_us=reduction, link_us=link
        )
        return found

    def _fitted(self, shapes: StageShapes, i: int, size: int, level: int) -> tuple[Floats, Floats]:
        """Return [row, column] times of stages made to fit at ``level``, and the level up to which they do."""
        assert self.fitter is not None
        degree = self.grids[i][0]
        local, most = size / degree, self.rules.mini_batch // size
        count = most if self.is_gpipe else min(-(-level * self.wish // size), most)
        free_bytes, each = shapes.free_bytes(local, degree, self.memory_limit)
        in_turn = self.fitter.is_in_turn(count)
        added = np.min(
            [
                least_added_us(count * each - free_bytes, count, savings, self.fitter.host, in_turn)
                for savings in shapes.savings(self.fitter, local)
            ],
            axis=0,
        )
        us = self._times(shapes, i, size, added)
        levels = np.where(np.isfinite(us), NO_LIMIT if count == most else level, 0)
        return us, levels.astype(float)
