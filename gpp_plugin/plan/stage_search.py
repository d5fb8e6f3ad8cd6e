"""The fewest devices for every level of a series-parallel graph within a time (GraphPipe, Algorithm 1).

The paper's DP asks whether d devices suffice and returns the source's in-flight; here devices are the
value: ``fewest(series, exit level, entry level, t)``. A *level* is the in-flight of a stage in units of
the micro-batch size: the sink has 1, a stage before one of level e has e + 1 (1F1B; GraphPipe, Table 2,
gives the steps where sizes differ). Branches of a parallel item have the join's level as exit and the
largest of their levels as entry. Equal branches are solved once; whole branches may share a stage (bin
packing over counts), and the stage of a join or a fork may own parts of branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpp_plugin.plan.costs import Floats
from gpp_plugin.plan.intervals import MAX_PARTIAL_ITEMS, Branches, Ints, Series
from gpp_plugin.plan.packing import leavings_of, pack_branches
from gpp_plugin.plan.stage_shapes import NO_LIMIT
from gpp_plugin.plan.stage_table import StageTable, TableMaker


@dataclass(slots=True)
class _Solved:
    """Values of one series: ``fewest[end, exit, level, position]`` and what led to them."""

    fewest: Floats
    rows: Floats
    columns: Floats


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
        # A table's stages in time are the same between two of its times: so are values that rest on them.
        self._sorted_times = {
            key: np.unique(table.us_per_sample) for key, table in (*self.tables.items(), *self._bins.items())
        }
        self._ranks: dict[int, int] = {}
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
        """Return [level]: the fewest devices for stages of at most ``t`` a sample and that many levels."""
        self._t = t
        self._ranks = {
            key: int(times.searchsorted(t, side="right")) for key, times in self._sorted_times.items()
        }
        keys: dict[int, object] = {}
        for series in self._order:
            is_root = series is self.root
            own: list[object] = [self._ranks[id(series)]]
            for branches in series.branches.values():
                key = self._ranks[id(branches)], *(keys[id(kind)] for kind in branches.kinds)
                own.append(key)
                best = self._known_best.get((id(branches), key))
                if best is None:
                    best = self._known_best[id(branches), key] = self._solve_branches(branches)
                self.best[id(branches)] = best
            keys[id(series)] = tuple(own)
            solved = self._known_solved.get((id(series), keys[id(series)]))
            if solved is None:
                solved = self._solve(series, is_root)
                self._known_solved[id(series), keys[id(series)]] = solved
            self.solved[id(series)] = solved
        values: Floats = self.solved[id(self.root)].fewest[0, 0, :, 0]
        return values

    # ---- values -------------------------------------------------------------------------------

    def costs_at(self, key: int, table: StageTable, level: int) -> list[tuple[int, int, Floats]]:
        """Return (first step, step, fewest devices [row, column]) of the stages allowed at a level."""
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

    def _solve(self, series: Series, is_root: bool) -> _Solved:
        num, top = series.num_items, self.max_level
        ends = [num] if is_root or not is_short(series) else list(range(1, num + 1))
        is_shifted = not is_root and self._is_shift_invariant(series)
        exits = 1 if is_root or is_shifted else top + 1
        num_rows, num_columns = len(series.row_start), len(series.column_end)
        fewest = np.full((len(ends), exits, top + 1, num + 1), np.inf)
        rows = np.full((len(ends), exits, top + 1, num_rows), np.inf)
        columns = np.full((len(ends), exits, top + 1, num_columns), np.inf)
        for i, end in enumerate(ends):
            for exit_level in range(exits):
                fewest[i, exit_level, exit_level:, end] = 0.0
        table = self.tables[id(series)]
        rests = self.rests(series)
        columns[:, :, 0, :num] = fewest[:, :, 0, 1:]
        for level in range(1, top + 1):
            below = min(exits, level)  # a stage is above its exit
            for first, step, cost in self.costs_at(id(series), table, level):
                after = columns[:, :below, max(level - step, 0)]
                if first != step or level < step:
                    after = after.copy() if level >= step else np.full_like(after, np.inf)
                    if level >= first:
                        after[:, 0] = np.minimum(after[:, 0], columns[:, 0, 0])
                value = (cost + after[:, :, None, :]).min(axis=3)
                rows[:, :below, level] = np.minimum(rows[:, :below, level], value)
            own = np.minimum(fewest[:, :, level - 1, :num], rows[:, :, level, :num])
            fewest[:, :, level, :num] = np.minimum(fewest[:, :, level, :num], own)  # keeps 0 at the end
            for place, branches in series.branches.items():
                every = self.best[id(branches)][-1]
                value = (fewest[:, :below, :level, place + 1] + every[:level, level]).min(axis=2)
                if place in rests[0] and level > 1:
                    which, rest = rests[0][place]
                    owned = rows[:, :below, 1:level, which] + rest[:, 1:level, level].T
                    value = np.minimum(value, owned.min(axis=(2, 3)))
                fewest[:, :below, level, place] = np.minimum(fewest[:, :below, level, place], value)
            columns[:, :, level, :num] = fewest[:, :, level, 1:]
            for place, (which, rest) in rests[1].items():
                after = fewest[:, :below, :level, place + 1, None] + rest[:, :level, level].T
                columns[:, :below, level, which] = after.min(axis=2)
        if is_shifted:
            return _Solved(fewest=_shift(fewest), rows=_shift(rows), columns=_shift(columns))
        return _Solved(fewest=fewest, rows=rows, columns=columns)

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

    def rests(self, series: Series) -> tuple[dict[int, tuple[Ints, Floats]], ...]:
        """Return by position the virtual rows and columns, and the cost of what each leaves over."""
        result: tuple[dict[int, tuple[Ints, Floats]], ...] = ({}, {})
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

    def _solve_branches(self, branches: Branches) -> Floats:
        """Return [state, exit, level]: the fewest devices for branches counted by the state."""
        singles = [self.solved[id(kind)].fewest[-1, :, :, 0] for kind in branches.kinds]
        return pack_branches(branches, singles, self.bin_costs(branches))

    def bin_costs(self, branches: Branches) -> Floats:
        """Return [state, exit, level] of one stage that holds the state's branches whole."""
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
