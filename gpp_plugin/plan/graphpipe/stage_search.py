"""The fewest devices for every level of a series-parallel graph within a time (GraphPipe, Algorithm 1).

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py, tests/plan/test_known_answers.py

The paper's DP asks whether d devices suffice and returns the source's in-flight; here devices are the value. A
*level* is the in-flight of a stage in units of the micro-batch size: the sink has 1, a stage before one of level e
has e + 1 (1F1B; GraphPipe, Table 2, gives the steps where sizes differ). Levels are numbers of micro-batches, values
are numbers of devices, inf where it cannot be done.

    fewest[end, exit, level, place]   the fewest devices for the items from ``place`` on up to ``end`` if what follows
                                      has at most level ``exit`` (0: nothing follows) and their first stage ``level``
    rows[end, exit, level, row]       ... if their first stage begins as ``row`` says (`intervals`) and has ``level``
    columns[end, exit, level, column] ... of what a stage leaves that ends as ``column`` says; ``level`` is that of the
                                      first stage after it

``end`` is an index: only short branches, parts of which may join another stage, need more than their whole. The rules:

    rows[level, row]      = min over columns: devices of the stage [row, column] + columns[level - step, column]
    fewest[level, place]  = min of fewest[level - 1, place]                                    (deeper is no worse)
                                   rows[level, place]                                          (a stage first)
                                   branches[middle, level] + fewest[middle, place + 1]         (a parallel item first)
    columns[level, stop]  = fewest[level, stop]; with heads of branches, those plus what is left of the item

Branches of a parallel item have the join's level as exit (``middle``) and the largest of their levels as entry. Equal
branches are solved once; whole branches may share a stage (`packing`); the stage of a join or a fork may own parts of
branches. A rule looks at lower levels or at later places only, so one pass over the levels is the recursion, from
its end.

Worked example: blocks a, b in a row of 8 and 12 us a sample, a bound of t = 8 us, degrees 1, 2 and 4. In time are
{a} on 1 device, {b} on 2 (6 us each) and {a, b} on 4 (5 us each; on 2 it takes 10):

    level                 0    1    2
    fewest[place 2]       0    0    0      nothing is left
    fewest[place 1]     inf    2    2      {b}
    fewest[place 0]     inf    4    3      {a, b} alone; or {a} at level 2 before {b} at level 1: 1 + 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs.cost_model import Floats
from gpp_plugin.plan.graphpipe.intervals import MAX_PARTIAL_ITEMS, Branches, Ints, Series
from gpp_plugin.plan.graphpipe.packing import leavings_of, pack_branches
from gpp_plugin.plan.graphpipe.stage_shapes import NO_LIMIT
from gpp_plugin.plan.graphpipe.stage_table import StageTable, TableMaker

Rests = dict[int, tuple[Ints, Floats]]
"""By position: virtual rows or columns there, and [which, exit, level] of what each leaves over."""


@dataclass(slots=True)
class _Solved:
    """Values of one series, as of the module docstring, and what led to them.

    Args:
        is_shifted: values are of exit 0 only; those of other exits are the same, so many levels higher.
    """

    fewest: Floats
    rows: Floats
    columns: Floats
    is_shifted: bool

    def spread(self) -> _Solved:
        """Return the values for every exit."""
        if not self.is_shifted:
            return self
        fewest, rows, columns = _shift(self.fewest), _shift(self.rows), _shift(self.columns)
        return _Solved(fewest=fewest, rows=rows, columns=columns, is_shifted=False)


class StageSearch:
    """Answers for one graph and one micro-batch size, for any bound on the time a sample.

    Args:
        max_level: levels that are considered; more are never needed.
    """

    def __init__(self, root: Series, maker: TableMaker, max_level: int) -> None:
        self.root = root
        self.max_level = max_level
        self.tables: dict[int, StageTable] = {}
        self._bins: dict[int, StageTable] = {}
        self._order: list[Series] = []
        self._collect(root, maker)
        self.solved: dict[int, _Solved] = {}
        self.best: dict[int, Floats] = {}
        self._sorted_times = {
            key: np.unique(table.us_per_sample) for key, table in (*self.tables.items(), *self._bins.items())
        }
        self._ranks: dict[int, int] = {}
        self._keys: dict[int, object] = {}
        self._known_solved: dict[tuple[int, object], _Solved] = {}
        self._known_best: dict[tuple[int, object], Floats] = {}
        self._cost_cache: dict[tuple[int, int, int, int], list[tuple[int, int, Floats]]] = {}
        self._in_time: dict[tuple[int, int, int], tuple[npt.NDArray[np.bool_], Ints]] = {}
        self._parts_at = {
            key: [table.part(level) for level in range(max_level + 1)]
            for key, table in (*self.tables.items(), *self._bins.items())
        }
        self._t = -1.0

    def _collect(self, series: Series, maker: TableMaker) -> None:
        if id(series) in self.tables:
            return
        for branches in series.branches.values():
            for kind in branches.kinds:
                self._collect(kind, maker)
            self._bins[id(branches)] = maker.bins(branches)
        self.tables[id(series)] = maker.table(series)
        self._order.append(series)

    def times(self) -> Floats:
        """Return every time per sample a stage can have, increasing."""
        found = [t.us_per_sample.ravel() for t in (*self.tables.values(), *self._bins.values())]
        values = np.unique(np.concatenate(found))
        return values[np.isfinite(values)]

    def fewest_devices(self, t: float) -> Floats:
        """Return [level]: the fewest devices for stages of at most ``t`` us a sample and that many levels.

        The recursion of Algorithm 1 (module docstring), from the innermost branches out and from the last level up.
        """
        self._begin(t)
        for series in self._order:  # a branch before the series that holds it
            for branches in series.branches.values():
                self._pack(branches)
            key = id(series), self._keys[id(series)]
            if key not in self._known_solved:
                found, (tails, heads) = self._behind_the_last(series), self.rests(series)
                for level in range(1, self.max_level + 1):
                    self._add_stages(series, found, level)
                    self._add_branches(series, found, level, tails)
                    self._open_columns(series, found, level, heads)
                self._known_solved[key] = found.spread()
            self.solved[id(series)] = self._known_solved[key]
        values: Floats = self.solved[id(self.root)].fewest[0, 0, :, 0]
        return values

    def _begin(self, t: float) -> None:
        """Set the time, and by series and parallel item what its values depend on.

        A table's stages in time are the same between two of its times, and so is all that rests on them: a series'
        key are the ranks of ``t`` among the times of its own table and of all tables below it.
        """
        self._t = t
        self._ranks = {
            key: int(times.searchsorted(t, side="right")) for key, times in self._sorted_times.items()
        }
        self._keys = {}
        for series in self._order:
            own: list[object] = [self._ranks[id(series)]]
            for branches in series.branches.values():
                key = self._ranks[id(branches)], *(self._keys[id(kind)] for kind in branches.kinds)
                self._keys[id(branches)] = key
                own.append(key)
            self._keys[id(series)] = tuple(own)

    def _pack(self, branches: Branches) -> None:
        """Solve a parallel item: [state, exit, level] for the branches that each state counts."""
        key = id(branches), self._keys[id(branches)]
        if key not in self._known_best:
            singles = [self.solved[id(kind)].fewest[-1, :, :, 0] for kind in branches.kinds]
            self._known_best[key] = pack_branches(branches, singles, self.bin_costs(branches))
        self.best[id(branches)] = self._known_best[key]

    def costs_at(self, key: int, table: StageTable, level: int) -> list[tuple[int, int, Floats]]:
        """Return (first step, step, fewest devices [row, column]) of the stages allowed at a level.

        Allowed are stages in time whose in-flight at this level still fits. Tables are [variant, row, column] with
        variants by increasing degree, so the first that is allowed has the fewest devices.
        """
        part = self._parts_at[key][level]
        table, rank = table.of_part(part), self._ranks[key]
        in_time = self._in_time.get((key, rank, part))
        if in_time is None:
            is_in_time = table.us_per_sample <= self._t
            reached = np.minimum(table.max_level[is_in_time], self.max_level + 1)
            in_time = self._in_time[key, rank, part] = is_in_time, np.flatnonzero(np.bincount(reached))
        is_in_time, limits = in_time
        if limits.size == 0:
            return []
        # Costs change only at levels where memory begins to limit one of the stages in time.
        bound = int(limits[limits.searchsorted(level)]) if level <= limits[-1] else NO_LIMIT + 1
        cached = self._cost_cache.get((key, rank, part, bound))
        if cached is not None:
            return cached
        fits = is_in_time & (table.max_level >= bound)
        result = []
        steps = table.steps
        for first, step in steps:
            allowed = fits if len(steps) == 1 else fits & (table.first_step == first) & (table.step == step)
            if not allowed.any():
                continue
            chosen = allowed.argmax(axis=0)
            cost = np.where(allowed.any(axis=0), table.degrees[chosen], np.inf)
            result.append((first, step, cost))
        self._cost_cache[key, rank, part, bound] = result
        return result

    def _behind_the_last(self, series: Series) -> _Solved:
        """Return the values where nothing is left: no devices at any level from the exit on; inf elsewhere."""
        num, top = series.num_items, self.max_level
        is_root = series is self.root
        ends = [num] if is_root or not is_short(series) else list(range(1, num + 1))
        is_shifted = not is_root and self._is_shift_invariant(series)
        exits = 1 if is_root or is_shifted else top + 1
        shape = len(ends), exits, top + 1
        found = _Solved(
            fewest=np.full((*shape, num + 1), np.inf),
            rows=np.full((*shape, len(series.row_start)), np.inf),
            columns=np.full((*shape, len(series.column_end)), np.inf),
            is_shifted=is_shifted,
        )
        for i, end in enumerate(ends):
            for exit_level in range(exits):
                found.fewest[i, exit_level, exit_level:, end] = 0.0
        found.columns[:, :, 0, :num] = found.fewest[:, :, 0, 1:]
        return found

    def _add_stages(self, series: Series, found: _Solved, level: int) -> None:
        """Enter stages of ``level`` as the first: each with what its end leaves at its level less its step.

        A stage is above its exit, so that only exits below ``level`` are looked at. ``cost`` is [row, column], what
        follows [end, exit, column]; the sum is [end, exit, row, column].
        """
        fewest, rows, columns = found.fewest, found.rows, found.columns
        num, below = series.num_items, min(rows.shape[1], level)
        for first, step, cost in self.costs_at(id(series), self.tables[id(series)], level):
            after = columns[:, :below, max(level - step, 0)]
            if first != step or level < step:
                # Stages of larger micro-batches add other levels where nothing follows (Table 2).
                after = after.copy() if level >= step else np.full_like(after, np.inf)
                if level >= first:
                    after[:, 0] = np.minimum(after[:, 0], columns[:, 0, 0])
            value = (cost + after[:, :, None, :]).min(axis=3)
            rows[:, :below, level] = np.minimum(rows[:, :below, level], value)
        own = np.minimum(fewest[:, :, level - 1, :num], rows[:, :, level, :num])
        fewest[:, :, level, :num] = np.minimum(fewest[:, :, level, :num], own)  # keeps 0 at the end

    def _add_branches(self, series: Series, found: _Solved, level: int, tails: Rests) -> None:
        """Enter parallel items as the first, their branches up to ``level`` and what follows at any level below.

        ``value`` is [end, exit]. Where the stage behind the item owns tails of branches, it is a virtual row, and
        ``owned`` is [end, exit, its level, row].
        """
        fewest, below = found.fewest, min(found.rows.shape[1], level)
        for place, branches in series.branches.items():
            every = self.best[id(branches)][-1]
            value = (fewest[:, :below, :level, place + 1] + every[:level, level]).min(axis=2)
            if place in tails and level > 1:
                which, rest = tails[place]
                owned = found.rows[:, :below, 1:level, which] + rest[:, 1:level, level].T
                value = np.minimum(value, owned.min(axis=(2, 3)))
            fewest[:, :below, level, place] = np.minimum(fewest[:, :below, level, place], value)

    def _open_columns(self, series: Series, found: _Solved, level: int, heads: Rests) -> None:
        """Let stages above ``level`` end here: before an item, or with heads of a parallel item's branches.

        ``after`` is [end, exit, level behind the item, column]: the rest of the branches, and the items behind.
        """
        fewest, columns = found.fewest, found.columns
        num, below = series.num_items, min(columns.shape[1], level)
        columns[:, :, level, :num] = fewest[:, :, level, 1:]
        for place, (which, rest) in heads.items():
            after = fewest[:, :below, :level, place + 1, None] + rest[:, :level, level].T
            columns[:, :below, level, which] = after.min(axis=2)

    def _is_shift_invariant(self, series: Series) -> bool:
        """Return whether costs are the same at every level: one exit then tells all.

        So it is for a chain of blocks none of whose stages in time is limited by memory.
        """
        if series.branches:
            return False
        table = self.tables[id(series)]
        is_in_time = table.us_per_sample <= self._t
        return bool(
            (table.max_level[is_in_time] == NO_LIMIT).all() and (table.first_step[is_in_time] == 1).all()
        )

    def rests(self, series: Series) -> tuple[Rests, Rests]:
        """Return by position the virtual rows and columns, and the devices for what each leaves over.

        A stage that takes the last two items of one of three equal branches leaves the state of two whole branches,
        and once the first items of that branch: [which, exit, level] is the sum of both.
        """
        result: tuple[Rests, Rests] = ({}, {})
        for side, leavings in enumerate(leavings_of(series)):
            for place, (which, states, parts) in leavings.items():
                branches = series.branches[place]
                rest = self.best[id(branches)][states]
                for kind, (members, counts, cuts) in parts.items():
                    fewest = self.solved[id(branches.kinds[kind])].fewest
                    part = (
                        fewest[cuts - 1, :, :, 0] if side == 0 else fewest[-1][:, :, cuts].transpose(2, 0, 1)
                    )
                    rest[members] += counts[:, None, None] * part
                is_possible = np.isfinite(rest).any(axis=(1, 2))
                if is_possible.any():
                    result[side][place] = which[is_possible], rest[is_possible]
        return result

    def bin_costs(self, branches: Branches) -> Floats:
        """Return [state, exit, level] of one stage that holds the state's branches whole.

        Its level is its exit plus its step; a higher level than it needs is no worse, so costs spread upwards: a stage
        of 2 devices and step 1 behind exit 1 is [inf, inf, 2, 2, 2] over the levels 0 to 4.
        """
        top = self.max_level
        table = self._bins[id(branches)]
        bins = np.full((len(branches.states), top + 1, top + 1), np.inf)
        for level in range(1, top + 1):
            for first, step, cost in self.costs_at(id(branches), table, level):
                if level >= step and not (level == step and first != step):
                    bins[:, level - step, level:] = np.minimum(
                        bins[:, level - step, level:], cost[0][:, None]
                    )
                if level == first:
                    bins[:, 0, level:] = np.minimum(bins[:, 0, level:], cost[0][:, None])
        return bins


def _shift(values: Floats) -> Floats:
    """Return [end, exit, level, ...] from the values at exit 0: level counted from the exit."""
    ends, _, levels, width = values.shape
    result = np.full((ends, levels, levels, width), np.inf)
    for exit_level in range(levels):
        result[:, exit_level, exit_level:] = values[:, 0, : levels - exit_level]
    return result


def is_short(series: Series) -> bool:
    """Return whether parts of a branch like this may be absorbed by a join's stage."""
    return series.num_items <= MAX_PARTIAL_ITEMS
