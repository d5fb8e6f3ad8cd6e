"""The fewest devices for every level of a series-parallel graph within a time (GraphPipe, Algorithm 1).

The paper's DP finds whether d devices suffice and returns the source's in-flight; here devices are the value. A
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
branches. A rule reads lower levels or at later places only, so one pass over the levels is the recursion, from
its end.

Worked example: blocks a, b in a row of 8 and 12 us a sample, a bound of t = 8 us, degrees 1, 2 and 4. In time are
{a} on 1 device, {b} on 2 (6 us each) and {a, b} on 4 (5 us each; on 2 it takes 10):

    level                 0    1    2
    fewest[place 2]       0    0    0      nothing is left
    fewest[place 1]     inf    2    2      {b}
    fewest[place 0]     inf    4    3      {a, b} alone; or {a} at level 2 before {b} at level 1: 1 + 2

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpp_plugin.plan.costs.cost_model import Floats
from gpp_plugin.plan.graphpipe.intervals import (
    MAX_PARTIAL_ITEMS,
    NO_LIMIT,
    Absorbed,
    Branches,
    Component,
    Counts,
    Ints,
    Leavings,
    Packing,
    Series,
)
from gpp_plugin.plan.graphpipe.stage_table import AllowedStages, InTime, StageTable, TableMaker

# Which branches of a parallel item share a stage: bin packing over counts of equal branches.
#
# A *state* counts branches of each kind. The fewest devices of a state are those of one branch alone and of the
# state without it, or those of a stage that holds several (a *bin*) and of the state it leaves. A bin with more
# branches never needs fewer devices (but where the first of them that mixes samples changes the micro-batch
# size), so only bins that cannot take one more for the same devices are tried, with as much of them as the
# state has.


def pack_branches(branches: Branches, singles: Sequence[Counts], bins: Counts) -> Counts:
    """Return [state, exit, level]: the fewest devices for the branches that a state counts.

    Args:
        singles: by kind, [exit, level] of one branch that shares no stage.
        bins: [state, exit, level] of one stage that holds the state's branches whole.
    """
    best = np.full_like(bins, np.inf)
    for exit_level in range(bins.shape[1]):
        best[0, exit_level, exit_level:] = 0.0
    if branches.is_uncounted:
        best[1] = sum(count * single for count, single in zip(branches.counts, singles, strict=True))
        best[1] = np.minimum(best[1], bins[1])
        return best
    packing = packing_of(branches)
    is_full = np.isfinite(bins).any(axis=(1, 2))
    itself = np.arange(len(bins))
    for larger in packing.larger:
        is_full &= (larger == itself) | (bins[larger] != bins).any(axis=(1, 2))
    full = [np.flatnonzero(is_full & has) for has in packing.has_kind]
    for kind, members, without in packing.layers:
        value = singles[kind] + best[without]
        if full[kind].size:
            which = full[kind][:, None], members
            packed = (bins[packing.taken[which]] + best[packing.left[which]]).min(axis=0)
            value = np.minimum(value, packed)
        best[members] = value
    return best


def left_over(branches: Branches, extra: Absorbed) -> tuple[int, ...]:
    """Return how many branches of each kind a stage leaves that takes ``extra`` in."""
    return tuple(
        total - whole - (extra.count if kind == extra.kind else 0)
        for kind, (total, whole) in enumerate(zip(branches.counts, extra.whole, strict=True))
    )


def leavings_of(series: Series) -> tuple[Leavings, Leavings]:
    """Return what the virtual rows and the virtual columns of a series leave over; cached with the series."""
    if series.leavings is None:
        series.leavings = _leavings(series, series.row_extra), _leavings(series, series.column_extra)
    return series.leavings


def _leavings(series: Series, extras: list[Absorbed | None]) -> Leavings:
    found: Leavings = {}
    for place, branches in series.branches.items():
        own = [(i, extra) for i, extra in enumerate(extras) if extra is not None and extra.position == place]
        if not own:
            continue
        index = {state: i for i, state in enumerate(branches.states)}
        states = np.array([index[left_over(branches, extra)] for _, extra in own])
        parts = {}
        for kind in range(len(branches.kinds)):
            of_kind = [(n, extra) for n, (_, extra) in enumerate(own) if extra.kind == kind]
            if of_kind:
                parts[kind] = (
                    np.array([n for n, _ in of_kind]),
                    np.array([extra.count for _, extra in of_kind]),
                    np.array([extra.cut for _, extra in of_kind]),
                )
        found[place] = np.array([i for i, _ in own]), states, parts
    return found


def packing_of(branches: Branches) -> Packing:
    """Return how the states of a parallel item fill bins; cached with the item."""
    if branches.packing is None:
        branches.packing = _make_packing(branches)
    return branches.packing


def _make_packing(branches: Branches) -> Packing:
    states, counts = np.array(branches.states), np.array(branches.counts)
    # States are numbered like numbers of mixed base.
    place = np.append(np.cumprod(counts[:0:-1] + 1)[::-1], 1).astype(int)
    taken = np.minimum(states[:, None], states[None, :])
    first = (states > 0).argmax(axis=1)
    keys = sorted({(-int(first[i]), int(states[i, first[i]])) for i in range(1, len(states))})
    layers = []
    for kind, count in keys:
        is_member = (first == -kind) & (states[:, -kind] == count)
        members = np.flatnonzero(is_member)
        layers.append((-kind, members, members - place[-kind]))
    index = np.arange(len(states))
    return Packing(
        layers=layers,
        taken=taken @ place,
        left=(states[None, :] - taken) @ place,
        larger=[np.where(states[:, k] < counts[k], index + place[k], index) for k in range(len(counts))],
        has_kind=(states > 0).T,
    )


Rests = dict[int, tuple[Ints, Counts]]
"""By position: virtual rows or columns there, and [which, exit, level] of what each leaves over."""


@dataclass(slots=True)
class _Solved:
    """Values of one series, as of the module docstring, and what led to them.

    Args:
        is_shifted: values are of exit 0 only; those of other exits are the same, so many levels higher.
        levels: up to which they are worked out.
    """

    fewest: Counts
    rows: Counts
    columns: Counts
    is_shifted: bool
    levels: int = 0

    def at(self, exit_level: int, level: int) -> tuple[int, int]:
        """Return the exit and the level at which values of that exit and level are stored."""
        return (0, level - exit_level) if self.is_shifted else (exit_level, level)

    def up_to(self, ends: Ints) -> Counts:
        """Return [which, exit, level] of the items up to each of ``ends`` (indices)."""
        return self._spread(self.fewest[ends, :, :, 0])

    def from_places(self, places: Ints) -> Counts:
        """Return [which, exit, level] of the items from each of ``places`` on."""
        return self._spread(self.fewest[-1][:, :, places].transpose(2, 0, 1))

    def _spread(self, values: Counts) -> Counts:
        """Return values [which, exit, level] for every exit: 0 1 5 of exit 0 are inf 0 1 of exit 1."""
        if not self.is_shifted:
            return values
        levels = np.arange(values.shape[2])
        above = levels[None, :] - levels[:, None]
        spread: Counts = np.where(above >= 0, values[:, 0, np.maximum(above, 0)], np.inf)
        return spread


@dataclass(slots=True)
class _AtTime:
    """What is known of one table's stages at the time last requested, which is of that rank among its times.

    Args:
        in_time: by part; ``allowed`` by part and level from which memory limits them.
    """

    rank: int
    in_time: dict[int, InTime] = field(default_factory=dict)
    allowed: dict[tuple[int, int], list[AllowedStages]] = field(default_factory=dict)


class StageSearch:
    """Answers for one graph and one micro-batch size, for any bound on the time a sample.

    Args:
        max_level: levels that are considered; more are never needed.
    """

    def __init__(self, root: Series, maker: TableMaker, max_level: int) -> None:
        self.root = root
        self.max_level = max_level
        self.tables: dict[int, StageTable] = {}
        self._order: list[Series] = []
        self._num_ends: dict[int, int] = {}
        self._collect(root, maker)
        self.solved: dict[int, _Solved] = {}
        self.best: dict[int, Counts] = {}
        self._sorted_times = {key: table.times for key, table in self.tables.items()}
        self._ranks: dict[int, int] = {}
        self._keys: dict[int, object] = {}
        self._known_solved: dict[tuple[int, object], _Solved] = {}
        self._known_best: dict[tuple[int, object], Counts] = {}
        self._at_time: dict[int, _AtTime] = {}
        self._parts_at = {
            key: [table.part(level) for level in range(max_level + 1)] for key, table in self.tables.items()
        }
        self._t = -1.0
        self._top = max_level

    def _collect(self, series: Series, maker: TableMaker) -> None:
        if id(series) in self.tables:
            return
        for branches in series.branches.values():
            for kind in branches.kinds:
                self._collect(kind, maker)
            self.tables[id(branches)] = maker.table(branches)
            self._num_ends[id(branches)] = len(branches.states)
        self.tables[id(series)] = maker.table(series)
        self._num_ends[id(series)] = series.num_items
        self._order.append(series)

    def times(self) -> Floats:
        """Return every time per sample a stage can have, increasing."""
        return np.unique(np.concatenate(list(self._sorted_times.values())))

    def fewest_devices(self, t: float, *, most_levels: int | None = None, enough: float = -1.0) -> Counts:
        """Return [level]: the fewest devices for stages of at most ``t`` us a sample and that many levels.

        The recursion of Algorithm 1 (module docstring), from the innermost branches out and from the last level up.

        Args:
            most_levels: no more are computed.
            enough: of levels above the first at which so many devices suffice nothing is said (inf).
        """
        self._begin(t)
        self._top = self.max_level if most_levels is None else min(most_levels, self.max_level)
        for series in self._order:  # a branch before the series that holds it
            for branches in series.branches.values():
                self._pack(branches)
            key = id(series), self._keys[id(series)]
            known, is_root = self._known_solved.get(key), series is self.root
            if known is None or not (known.levels >= self._top or is_root and _has(known, enough)):
                known = self._known_solved[key] = self._solve(series, enough if is_root else -1.0)
            self.solved[id(series)] = known
        values: Counts = self.solved[id(self.root)].fewest[0, 0, : self._top + 1, 0]
        return values

    def _solve(self, series: Series, enough: float) -> _Solved:
        """Return the values of one series, those of the branches in it being known."""
        is_uniform = self._is_uniform(series)
        is_same_above = is_uniform and not self.tables[id(series)].fitted_level.any()
        found, (tails, heads) = self._behind_the_last(series, is_uniform), self.rests(series)
        for level in range(1, self._top + 1):
            self._add_stages(series, found, level)
            self._add_branches(series, found, level, tails)
            self._open_columns(series, found, level, heads)
            found.levels = level
            if _has(found, enough):
                break
            if is_same_above and (found.fewest[:, :, level] == found.fewest[:, :, level - 1]).all():
                # Every level follows from the one before it by the same rule: so are all above.
                for values in (found.fewest, found.rows, found.columns):
                    values[:, :, level + 1 :] = values[:, :, level, None]
                found.levels = self._top
                break
        return found

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
        if key not in self._known_best or self._known_best[key].shape[2] <= self._top:
            singles = [self.single(kind) for kind in branches.kinds]
            self._known_best[key] = pack_branches(branches, singles, self.bin_costs(branches))
        self.best[id(branches)] = self._known_best[key][:, : self._top + 1, : self._top + 1]

    def single(self, kind: Series) -> Counts:
        """Return [exit, level] of a whole branch that shares no stage."""
        return self.solved[id(kind)].up_to(np.array([-1]))[0, : self._top + 1, : self._top + 1]

    def parts(self, kind: Series, cuts: Ints, *, is_tail: bool) -> Counts:
        """Return [which, exit, level] of what is left of a branch without its tail (or head) from each of ``cuts``."""
        solved = self.solved[id(kind)]
        left = solved.up_to(cuts - 1) if is_tail else solved.from_places(cuts)
        return left[:, : self._top + 1, : self._top + 1]

    def allowed_at(self, key: int, level: int) -> list[AllowedStages]:
        """Return the stages of a table that are allowed at a level, for each pair of steps.

        Allowed are stages in time whose in-flight at this level still fits.
        """
        part, rank = self._parts_at[key][level], self._ranks[key]
        known = self._at_time.get(key)
        if known is None or known.rank != rank:
            known = self._at_time[key] = _AtTime(rank=rank)
        table = self.tables[key].of_part(part)
        if part not in known.in_time:
            known.in_time[part] = table.in_time(self._t, self.max_level)
        found = known.in_time[part]
        limits = found.limits
        if limits.size == 0:
            return []
        # Costs change only at levels where memory begins to limit one of the stages in time.
        bound = int(limits[limits.searchsorted(level)]) if level <= limits[-1] else NO_LIMIT + 1
        if (part, bound) not in known.allowed:
            known.allowed[part, bound] = table.allowed(found, bound, self._num_ends[key])
        return known.allowed[part, bound]

    def _behind_the_last(self, series: Series, is_uniform: bool) -> _Solved:
        """Return the values where nothing is left: no devices at any level from the exit on; inf elsewhere."""
        num, top = series.num_items, self._top
        is_root = series is self.root
        ends = [num] if is_root or not is_short(series) else list(range(1, num + 1))
        is_shifted = not is_root and is_uniform
        exits = 1 if is_root or is_shifted else top + 1
        shape = len(ends), exits, top + 1
        found = _Solved(
            fewest=np.full((*shape, num + 1), np.inf, dtype=np.float32),
            rows=np.full((*shape, len(series.row_start)), np.inf, dtype=np.float32),
            columns=np.full((*shape, len(series.column_end)), np.inf, dtype=np.float32),
            is_shifted=is_shifted,
        )
        for i, end in enumerate(ends):
            for exit_level in range(exits):
                found.fewest[i, exit_level, exit_level:, end] = 0.0
        found.columns[:, :, 0, :num] = found.fewest[:, :, 0, 1:]
        return found

    def _add_stages(self, series: Series, found: _Solved, level: int) -> None:
        """Enter stages of ``level`` as the first: each with what its end leaves at its level less its step.

        A stage is above its exit, so that only exits below ``level`` count; ``after`` is [end, exit, column].
        """
        fewest, rows, columns = found.fewest, found.rows, found.columns
        num, below = series.num_items, min(rows.shape[1], level)
        for stages in self.allowed_at(id(series), level):
            first, step = stages.first, stages.step
            after = columns[:, :below, max(level - step, 0)]
            if first != step or level < step:
                # Stages of larger micro-batches add other levels where nothing follows (Table 2).
                after = after.copy() if level >= step else np.full_like(after, np.inf)
                if level >= first:
                    after[:, 0] = np.minimum(after[:, 0], columns[:, 0, 0])
            rows[:, :below, level] = np.minimum(rows[:, :below, level], stages.fewest_with(after))
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

    def _is_uniform(self, series: Series) -> bool:
        """Return whether costs are the same at every level that is computed: one exit then stands for all.

        So it is for a chain of blocks none of whose stages in time is limited by memory at these levels.
        """
        if series.branches:
            return False
        table = self.tables[id(series)]
        if table.is_plain:
            return True
        is_in_time = table.us_per_sample <= self._t
        return bool(
            (table.max_level[is_in_time] >= self._top).all() and (table.first_step[is_in_time] == 1).all()
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
                    part = self.parts(branches.kinds[kind], cuts, is_tail=side == 0)
                    rest[members] += counts[:, None, None] * part
                is_possible = np.isfinite(rest).any(axis=(1, 2))
                if is_possible.any():
                    result[side][place] = which[is_possible], rest[is_possible]
        return result

    def bin_costs(self, branches: Branches) -> Counts:
        """Return [state, exit, level] of one stage that holds the state's branches whole.

        Its level is its exit plus its step; a higher level than it needs is no worse, so costs spread upwards: a stage
        of 2 devices and step 1 behind exit 1 is [inf, inf, 2, 2, 2] over the levels 0 to 4.
        """
        top = self._top
        bins = np.full((len(branches.states), top + 1, top + 1), np.inf, dtype=np.float32)
        for level in range(1, top + 1):
            for stages in self.allowed_at(id(branches), level):
                first, step, cost = stages.first, stages.step, stages.cost
                if level >= step and not (level == step and first != step):
                    bins[:, level - step, level:] = np.minimum(
                        bins[:, level - step, level:], cost[0][:, None]
                    )
                if level == first:
                    bins[:, 0, level:] = np.minimum(bins[:, 0, level:], cost[0][:, None])
        return bins


def _has(solved: _Solved, enough: float) -> bool:
    """Return whether the whole series needs no more than ``enough`` devices at the level reached."""
    return bool(solved.fewest[0, 0, solved.levels, 0] <= enough)


def is_short(series: Series) -> bool:
    """Return whether parts of a branch like this may be absorbed by a join's stage."""
    return series.num_items <= MAX_PARTIAL_ITEMS


# From the values of a stage search back to stages: which choices led to the fewest devices.

Group = tuple[int, ...]


def read_groups(search: StageSearch, level: int) -> list[Group]:
    """Return the blocks of each stage of a solution with that many levels, after `fewest_devices`."""
    return _Reader(search).groups_of(search.root, -1, 0, level, 0)


class _Reader:
    """Walks through the tables of one search at the time last requested."""

    def __init__(self, search: StageSearch) -> None:
        self.search = search

    def _rest(self, branches: Branches, extra: Absorbed) -> Counts:
        """Return [exit, level] of what is left of branches whose heads are taken away."""
        rest: Counts = self.search.best[id(branches)][branches.states.index(left_over(branches, extra))]
        if extra.kind >= 0:
            part = self.search.parts(branches.kinds[extra.kind], np.array([extra.cut]), is_tail=False)[0]
            rest = rest + extra.count * part
        return rest

    def groups_of(self, series: Series, end: int, exit_level: int, level: int, place: int) -> list[Group]:
        """Return the stages of items ``place`` on (up to the end of index ``end``)."""
        solved = self.search.solved[id(series)]
        exit_level, level = solved.at(exit_level, level)
        fewest = solved.fewest[end, exit_level]
        num = series.num_items
        stop = num if end in (-1, num - 1) else end + 1
        if place == stop:
            return []
        target = fewest[level, place]
        assert np.isfinite(target)
        while level > 0 and fewest[level - 1, place] == target:
            level -= 1
        if solved.rows[end, exit_level, level, place] == target:
            return self._row_groups(series, end, exit_level, level, place, ())
        branches = series.branches[place]
        everything = branches.states[-1]
        every = self.search.best[id(branches)][-1]
        pools = [list(members) for members in branches.instances]
        for middle in range(level):
            if every[middle, level] + fewest[middle, place + 1] == target:
                found = self._branch_groups(branches, pools, everything, middle, level)
                return found + self.groups_of(series, end, exit_level, middle, place + 1)
        none = np.zeros(0, dtype=np.int64), np.zeros((0, 1, 1))
        for r, rest in zip(*self.search.rests(series)[0].get(place, none), strict=True):
            for middle in range(1, level):
                if solved.rows[end, exit_level, middle, r] + rest[middle, level] == target:
                    extra = series.row_extra[r]
                    assert extra is not None
                    own, found = self._split_branches(branches, pools, extra, middle, level, is_tail=True)
                    return found + self._row_groups(series, end, exit_level, middle, r, own)
        raise AssertionError("no choice leads to the value")

    def _row_groups(
        self, series: Series, end: int, exit_level: int, level: int, row: int, own: Group
    ) -> list[Group]:
        """Return the stage that begins as ``row`` says (``own``: what it absorbs) and all after it."""
        solved = self.search.solved[id(series)]
        target = solved.rows[end, exit_level, level, row]
        for stages in self.search.allowed_at(id(series), level):
            first, step, cost = stages.first, stages.step, stages.cost
            afters = [level - step] if level >= step else []
            if level >= first and first != step and exit_level == 0:
                afters.append(0)
            for after in afters:
                values = cost[row] + solved.columns[end, exit_level, after]
                for c in np.flatnonzero(values == target):
                    stop = series.column_end[c]
                    items = series.items[series.row_start[row] : stop]
                    blocks = own + tuple(block for item in items for block in item.blocks)
                    extra = series.column_extra[c]
                    if extra is None:
                        return [blocks, *self.groups_of(series, end, exit_level, after, stop)]
                    branches, behind = series.branches[extra.position], extra.position + 1
                    pools = [list(members) for members in branches.instances]
                    # by the level of what is behind the fork's branches
                    left = self._rest(branches, extra)[:after, after]
                    left = left + solved.fewest[end, exit_level, :after, behind]
                    middle = int(np.flatnonzero(left == solved.columns[end, exit_level, after, c])[0])
                    heads, found = self._split_branches(branches, pools, extra, middle, after, is_tail=False)
                    rest = self.groups_of(series, end, exit_level, middle, behind)
                    return [blocks + heads, *found, *rest]
        raise AssertionError("no choice leads to the value")

    def _split_branches(
        self,
        branches: Branches,
        pools: list[list[Component]],
        extra: Absorbed,
        exit_level: int,
        level: int,
        *,
        is_tail: bool,
    ) -> tuple[Group, list[Group]]:
        """Return the blocks a join or fork takes in, and the stages of what is left of its branches."""
        own: list[int] = []
        found: list[Group] = []
        for kind, count in enumerate(extra.whole):
            for _ in range(count):
                own.extend(pools[kind].pop().blocks)
        if extra.kind >= 0:
            series = branches.kinds[extra.kind]
            for _ in range(extra.count):
                mapping = _mapping(series.component, pools[extra.kind].pop())
                part = series.items[extra.cut :] if is_tail else series.items[: extra.cut]
                own.extend(mapping[block] for item in part for block in item.blocks)
                if is_tail:
                    groups = self.groups_of(series, extra.cut - 1, exit_level, level, 0)
                else:
                    groups = self.groups_of(series, -1, exit_level, level, extra.cut)
                found.extend(_mapped(groups, mapping))
        state = left_over(branches, extra)
        found.extend(self._branch_groups(branches, pools, state, exit_level, level))
        return tuple(own), found

    def _branch_groups(
        self,
        branches: Branches,
        pools: list[list[Component]],
        state: tuple[int, ...],
        exit_level: int,
        level: int,
    ) -> list[Group]:
        """Return the stages of so many branches of each kind, from ``exit_level`` up to ``level``.

        Args:
            pools: by kind, the branches not assigned yet; those of ``state`` are taken from their ends.
        """
        # Backwards through `pack_branches`: best[state, exit, level] is its table, bins[state, exit, level] the devices
        # of one stage that holds all of a state, singles[kind][exit, level] those of a branch alone. Whatever was
        # added up to the value is found again by adding it up once more, so values are compared for equality. State
        # (2, 1), two branches A and one B, where one stage for A and B is best:
        #
        #     best (2, 1) = singles A + best (1, 1)?   yes: one A by itself, go on with (1, 1)
        #     best (1, 1) = singles A + best (0, 1)?   no;  = bins (1, 1) + best (0, 0)?  yes: {A, B}, done
        found: list[Group] = []
        best, bins = self.search.best[id(branches)], self.search.bin_costs(branches)
        singles = [self.search.single(kind) for kind in branches.kinds]
        if branches.is_uncounted and any(state):
            if bins[1, exit_level, level] == best[1, exit_level, level]:
                return [tuple(b for pool in pools for member in pool for b in member.blocks)]
            for kind, series in enumerate(branches.kinds):
                for _ in range(state[kind]):
                    found.extend(self._single_groups(series, pools[kind].pop(), exit_level, level))
            return found
        while any(state):
            i = branches.states.index(state)
            kind = next(k for k, count in enumerate(state) if count)
            without = tuple(c - (k == kind) for k, c in enumerate(state))
            target = best[i, exit_level, level]
            rest = best[branches.states.index(without), exit_level, level]
            if singles[kind][exit_level, level] + rest == target:
                found.extend(self._single_groups(branches.kinds[kind], pools[kind].pop(), exit_level, level))
                state = without
                continue
            packing = packing_of(branches)
            taken, left = packing.taken[:, i], packing.left[:, i]
            values = np.where(packing.has_kind[kind], bins[taken, exit_level, level], np.inf)
            choice = int(np.flatnonzero(values + best[left, exit_level, level] == target)[0])
            members = branches.states[taken[choice]]
            found.append(
                tuple(b for k, n in enumerate(members) for _ in range(n) for b in pools[k].pop().blocks)
            )
            state = branches.states[left[choice]]
        return found

    def _single_groups(self, series: Series, member: Component, exit_level: int, level: int) -> list[Group]:
        return _mapped(self.groups_of(series, -1, exit_level, level, 0), _mapping(series.component, member))


def _leaves(component: Component) -> list[int]:
    if not component.children:
        return list(component.blocks)
    return [block for child in component.children for block in _leaves(child)]


def _mapping(representative: Component, member: Component) -> dict[int, int]:
    return dict(zip(_leaves(representative), _leaves(member), strict=True))


def _mapped(groups: list[Group], mapping: dict[int, int]) -> list[Group]:
    return [tuple(mapping[block] for block in group) for group in groups]
