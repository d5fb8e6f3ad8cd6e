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

from gpp_plugin.plan.components import Component
from gpp_plugin.plan.costs import Floats
from gpp_plugin.plan.intervals import (
    MAX_PARTIAL_ITEMS,
    Absorbed,
    BinLayer,
    Branches,
    Ints,
    Series,
)
from gpp_plugin.plan.stage_table import NO_LIMIT, StageTable, TableMaker

Group = tuple[int, ...]
Leavings = dict[int, tuple[Ints, Ints, dict[int, tuple[Ints, Ints, Ints]]]]
"""By position: virtual rows or columns, the states they leave over, by kind (which, counts, cuts) of parts."""


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
        self.degrees = np.array(maker.degrees, dtype=float)
        self._tables: dict[int, StageTable] = {}
        self._bins: dict[int, StageTable] = {}
        self._leavings: dict[int, tuple[Leavings, Leavings]] = {}
        self._order: list[Series] = []
        self._collect(root, maker)
        self._solved: dict[int, _Solved] = {}
        self._best: dict[int, Floats] = {}
        # A table's stages in time are the same between two of its times: so are values that rest on them.
        self._sorted_times = {
            key: np.unique(table.us_per_sample) for key, table in (*self._tables.items(), *self._bins.items())
        }
        self._ranks: dict[int, int] = {}
        self._known_solved: dict[tuple[int, object], _Solved] = {}
        self._known_best: dict[tuple[int, object], Floats] = {}
        self._cost_cache: dict[tuple[int, int, int], list[tuple[int, int, Floats]]] = {}
        self._in_time: dict[tuple[int, int], tuple[npt.NDArray[np.bool_], Ints]] = {}
        self._t = -1.0

    def _collect(self, series: Series, maker: TableMaker) -> None:
        if id(series) in self._tables:
            return
        for branches in series.branches.values():
            for kind in branches.kinds:
                self._collect(kind, maker)
            self._bins[id(branches)] = maker.bins(branches)
            if branches.moves is None:
                branches.moves = _bin_moves(branches)
                branches.layers = _bin_layers(branches, branches.moves)
        self._tables[id(series)] = maker.table(series)
        self._leavings[id(series)] = (
            _leavings(series, series.row_extra),
            _leavings(series, series.column_extra),
        )
        self._order.append(series)

    def times(self) -> Floats:
        """Return every time per sample a stage can have, increasing."""
        found = [t.us_per_sample.ravel() for t in (*self._tables.values(), *self._bins.values())]
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
                self._best[id(branches)] = best
            keys[id(series)] = tuple(own)
            solved = self._known_solved.get((id(series), keys[id(series)]))
            if solved is None:
                solved = self._solve(series, is_root)
                self._known_solved[id(series), keys[id(series)]] = solved
            self._solved[id(series)] = solved
        values: Floats = self._solved[id(self.root)].fewest[0, 0, :, 0]
        return values

    # ---- values -------------------------------------------------------------------------------

    def _costs_at(self, key: int, table: StageTable, level: int) -> list[tuple[int, int, Floats]]:
        """Return (first step, step, fewest devices [row, column]) of the stages allowed at a level."""
        in_time = self._in_time.get((key, self._ranks[key]))
        if in_time is None:
            is_in_time = table.us_per_sample <= self._t
            limits = np.unique(table.max_level[is_in_time])
            in_time = self._in_time[key, self._ranks[key]] = is_in_time, limits
        is_in_time, limits = in_time
        if limits.size == 0:
            return []
        # Costs change only at levels where memory begins to limit one of the stages in time.
        bound = int(limits[limits.searchsorted(level)]) if level <= limits[-1] else NO_LIMIT + 1
        cached = self._cost_cache.get((key, self._ranks[key], bound))
        if cached is not None:
            return cached
        fits = is_in_time & (table.max_level >= bound)
        result = []
        steps = {(1, 1)}
        if table.step.max(initial=1) > 1 or table.first_step.max(initial=1) > 1:
            pairs = np.stack([table.first_step[fits], table.step[fits]], axis=1)
            steps = {(int(a), int(b)) for a, b in np.unique(pairs, axis=0)}
        for first, step in sorted(steps):
            allowed = fits if len(steps) == 1 else fits & (table.first_step == first) & (table.step == step)
            if not allowed.any():
                continue
            chosen = allowed.argmax(axis=0)
            cost = np.where(allowed.any(axis=0), self.degrees[chosen], np.inf)
            result.append((first, step, cost))
        self._cost_cache[key, self._ranks[key], bound] = result
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
        table = self._tables[id(series)]
        rests = self._rests(series)
        columns[:, :, 0, :num] = fewest[:, :, 0, 1:]
        for level in range(1, top + 1):
            for first, step, cost in self._costs_at(id(series), table, level):
                after = np.full(columns[:, :, 0].shape, np.inf)
                if level >= step:
                    after = columns[:, :, level - step]
                if level >= first and first != step:
                    after = after.copy()
                    at_sink = columns[:, 0, 0, :]
                    after[:, 0, :] = np.minimum(after[:, 0, :], at_sink)
                value = (cost[None, None] + after[:, :, None, :]).min(axis=3)
                rows[:, :, level] = np.minimum(rows[:, :, level], value)
            own = np.minimum(fewest[:, :, level - 1, :num], rows[:, :, level, :num])
            fewest[:, :, level, :num] = np.minimum(fewest[:, :, level, :num], own)  # keeps 0 at the end
            for place, branches in series.branches.items():
                every = self._best[id(branches)][-1]
                value = (fewest[:, :, :level, place + 1] + every[:level, level]).min(axis=2)
                if place in rests[0] and level > 1:
                    which, rest = rests[0][place]
                    owned = rows[:, :, 1:level, which] + rest[:, 1:level, level].T
                    value = np.minimum(value, owned.min(axis=(2, 3)))
                fewest[:, :, level, place] = np.minimum(fewest[:, :, level, place], value)
            columns[:, :, level, :num] = fewest[:, :, level, 1:]
            for place, (which, rest) in rests[1].items():
                after = fewest[:, :, :level, place + 1, None] + rest[:, :level, level].T
                columns[:, :, level, which] = after.min(axis=2)
        if is_shifted:
            return _Solved(fewest=_shift(fewest), rows=_shift(rows), columns=_shift(columns))
        return _Solved(fewest=fewest, rows=rows, columns=columns)

    def _is_shift_invariant(self, series: Series) -> bool:
        """Return whether costs are the same at every level: one exit then tells all.

        So it is for a chain of blocks none of whose stages in time is limited by memory.
        """
        if series.branches:
            return False
        table = self._tables[id(series)]
        is_in_time = table.us_per_sample <= self._t
        return bool(
            (table.max_level[is_in_time] == NO_LIMIT).all() and (table.first_step[is_in_time] == 1).all()
        )

    def _rests(self, series: Series) -> tuple[dict[int, tuple[Ints, Floats]], ...]:
        """Return by position the virtual rows and columns, and the cost of what each leaves over."""
        result: tuple[dict[int, tuple[Ints, Floats]], ...] = ({}, {})
        for side, leavings in enumerate(self._leavings[id(series)]):
            for place, (which, states, parts) in leavings.items():
                branches = series.branches[place]
                rest = self._best[id(branches)][states]
                for kind, (members, counts, cuts) in parts.items():
                    fewest = self._solved[id(branches.kinds[kind])].fewest
                    part = (
                        fewest[cuts - 1, :, :, 0] if side == 0 else fewest[-1][:, :, cuts].transpose(2, 0, 1)
                    )
                    rest[members] += counts[:, None, None] * part
                is_possible = np.isfinite(rest).any(axis=(1, 2))
                if is_possible.any():
                    result[side][place] = which[is_possible], rest[is_possible]
        return result

    def _rest(self, branches: Branches, extra: Absorbed, *, is_tail: bool) -> Floats:
        rest: Floats = self._best[id(branches)][branches.states.index(_left_over(branches, extra))]
        if extra.kind < 0:
            return rest
        whole: Floats = rest + extra.count * self._part(
            branches.kinds[extra.kind], extra.cut, is_tail=is_tail
        )
        return whole

    def _part(self, kind: Series, cut: int, *, is_tail: bool) -> Floats:
        """Return [exit, level] of what is left of a branch whose tail (or head) is taken away."""
        fewest = self._solved[id(kind)].fewest
        part: Floats = fewest[cut - 1, :, :, 0] if is_tail else fewest[-1, :, :, cut]
        return part

    def _solve_branches(self, branches: Branches) -> Floats:
        """Return [state, exit, level]: the fewest devices for branches counted by the state."""
        top = self.max_level
        best = np.full((len(branches.states), top + 1, top + 1), np.inf)
        for exit_level in range(top + 1):
            best[0, exit_level, exit_level:] = 0.0
        singles = [self._solved[id(kind)].fewest[-1, :, :, 0] for kind in branches.kinds]
        bins = self._bin_costs(branches)
        if len(branches.states) == 2 and sum(branches.counts) > 1:  # too many states: each branch alone
            best[1] = sum(count * single for count, single in zip(branches.counts, singles, strict=True))
            best[1] = np.minimum(best[1], bins[1])
            return best
        assert branches.layers is not None
        for layer in branches.layers:
            packed = np.minimum.reduceat(bins[layer.taken] + best[layer.left], layer.starts, axis=0)
            best[layer.members] = np.minimum(singles[layer.kind] + best[layer.without], packed)
        return best

    def _bin_costs(self, branches: Branches) -> Floats:
        """Return [state, exit, level] of one stage that holds the state's branches whole."""
        top = self.max_level
        table = self._bins[id(branches)]
        bins = np.full((len(branches.states), top + 1, top + 1), np.inf)
        for level in range(1, top + 1):
            for first, step, cost in self._costs_at(id(branches), table, level):
                if level >= step and not (level == step and first != step):
                    bins[:, level - step, level:] = np.minimum(
                        bins[:, level - step, level:], cost[0][:, None]
                    )
                if level == first:
                    bins[:, 0, level:] = np.minimum(bins[:, 0, level:], cost[0][:, None])
        return bins

    # ---- from values back to stages ---------------------------------------------------------------

    def groups(self, level: int) -> list[Group]:
        """Return the blocks of each stage of a solution with that many levels, after `fewest_devices`."""
        return self._groups_of(self.root, -1, 0, level, 0)

    def _groups_of(self, series: Series, end: int, exit_level: int, level: int, place: int) -> list[Group]:
        """Return the stages of items ``place`` on (up to the end of index ``end``)."""
        solved = self._solved[id(series)]
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
        every = self._best[id(branches)][-1]
        pools = [list(members) for members in branches.instances]
        for middle in range(level):
            if every[middle, level] + fewest[middle, place + 1] == target:
                found = self._branch_groups(branches, pools, everything, middle, level)
                return found + self._groups_of(series, end, exit_level, middle, place + 1)
        none = np.zeros(0, dtype=np.int64), np.zeros((0, 1, 1))
        for r, rest in zip(*self._rests(series)[0].get(place, none), strict=True):
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
        solved = self._solved[id(series)]
        target = solved.rows[end, exit_level, level, row]
        for first, step, cost in self._costs_at(id(series), self._tables[id(series)], level):
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
                        return [blocks, *self._groups_of(series, end, exit_level, after, stop)]
                    return self._fork_groups(series, end, exit_level, after, int(c), extra, blocks)
        raise AssertionError("no choice leads to the value")

    def _fork_groups(
        self,
        series: Series,
        end: int,
        exit_level: int,
        level: int,
        column: int,
        extra: Absorbed,
        blocks: Group,
    ) -> list[Group]:
        solved = self._solved[id(series)]
        branches = series.branches[extra.position]
        rest = self._rest(branches, extra, is_tail=False)
        target = solved.columns[end, exit_level, level, column]
        fewest = solved.fewest[end, exit_level]
        pools = [list(members) for members in branches.instances]
        for middle in range(level):
            if rest[middle, level] + fewest[middle, extra.position + 1] == target:
                own, found = self._split_branches(branches, pools, extra, middle, level, is_tail=False)
                after = self._groups_of(series, end, exit_level, middle, extra.position + 1)
                return [blocks + own, *found, *after]
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
                    groups = self._groups_of(series, extra.cut - 1, exit_level, level, 0)
                else:
                    groups = self._groups_of(series, -1, exit_level, level, extra.cut)
                found.extend(_mapped(groups, mapping))
        state = _left_over(branches, extra)
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
        found: list[Group] = []
        best, bins = self._best[id(branches)], self._bin_costs(branches)
        singles = [self._solved[id(kind)].fewest[-1, :, :, 0] for kind in branches.kinds]
        if len(branches.states) == 2 and sum(branches.counts) > 1 and any(state):
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
            assert branches.moves is not None
            taken, left = branches.moves[i]
            values = bins[taken, exit_level, level] + best[left, exit_level, level]
            choice = int(np.flatnonzero(values == target)[0])
            members = branches.states[taken[choice]]
            found.append(
                tuple(b for k, n in enumerate(members) for _ in range(n) for b in pools[k].pop().blocks)
            )
            state = branches.states[left[choice]]
        return found

    def _single_groups(self, series: Series, member: Component, exit_level: int, level: int) -> list[Group]:
        return _mapped(self._groups_of(series, -1, exit_level, level, 0), _mapping(series.component, member))


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


def _leavings(series: Series, extras: list[Absorbed | None]) -> Leavings:
    found: Leavings = {}
    for place, branches in series.branches.items():
        own = [(i, extra) for i, extra in enumerate(extras) if extra is not None and extra.position == place]
        if not own:
            continue
        index = {state: i for i, state in enumerate(branches.states)}
        states = np.array([index[_left_over(branches, extra)] for _, extra in own])
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


def _left_over(branches: Branches, extra: Absorbed) -> tuple[int, ...]:
    return tuple(
        total - whole - (extra.count if kind == extra.kind else 0)
        for kind, (total, whole) in enumerate(zip(branches.counts, extra.whole, strict=True))
    )


def _bin_moves(branches: Branches) -> list[tuple[Ints, Ints]]:
    """Return for each state the bins of two or more branches it may fill next, and what they leave.

    A bin always holds a branch of the state's first kind, so that every packing is met once.
    """
    states = np.array(branches.states)
    # States are numbered like numbers of mixed base; those too many to count have no moves but the last.
    place = np.append(np.cumprod(np.array(branches.counts[:0:-1], dtype=int) + 1)[::-1], 1)
    is_counted = len(states) == int(np.prod(np.array(branches.counts) + 1))
    is_bin = states.sum(axis=1) > 1
    moves: list[tuple[Ints, Ints]] = []
    for state in states:
        fits = is_bin & (states <= state).all(axis=1)
        if state.any():
            fits &= states[:, int((state > 0).argmax())] > 0
        taken = np.flatnonzero(fits)
        left = (state - states[taken]) @ place if is_counted else np.zeros(len(taken), dtype=int)
        moves.append((taken, left))
    return moves


def _bin_layers(branches: Branches, moves: list[tuple[Ints, Ints]]) -> list[BinLayer]:
    """Return the states by first kind and its count, in an order in which values can be computed.

    A move takes at least one branch of the first kind: what is left is in an earlier layer.
    """
    index = {state: i for i, state in enumerate(branches.states)}
    grouped: dict[tuple[int, int], list[int]] = {}
    for i, state in enumerate(branches.states):
        kind = next((k for k, count in enumerate(state) if count), None)
        if kind is not None:
            grouped.setdefault((-kind, state[kind]), []).append(i)
    layers = []
    for (kind, _), members in sorted(grouped.items()):
        less = [tuple(count - (k == -kind) for k, count in enumerate(branches.states[i])) for i in members]
        if any(state not in index for state in less):
            return []  # the branches were too many to count: each is alone, or all share a stage
        # A state that fills no bin takes the empty one, which no stage is: infinitely dear.
        taken = [moves[i][0] if moves[i][0].size else np.zeros(1, dtype=int) for i in members]
        left = [moves[i][1] if moves[i][1].size else np.zeros(1, dtype=int) for i in members]
        lengths = np.array([0, *(len(found) for found in taken[:-1])])
        layers.append(
            BinLayer(
                kind=-kind,
                members=np.array(members),
                without=np.array([index[state] for state in less]),
                taken=np.concatenate(taken),
                left=np.concatenate(left),
                starts=np.cumsum(lengths),
            )
        )
    return layers


def _leaves(component: Component) -> list[int]:
    if not component.children:
        return list(component.blocks)
    return [block for child in component.children for block in _leaves(child)]


def _mapping(representative: Component, member: Component) -> dict[int, int]:
    return dict(zip(_leaves(representative), _leaves(member), strict=True))


def _mapped(groups: list[Group], mapping: dict[int, int]) -> list[Group]:
    return [tuple(mapping[block] for block in group) for group in groups]
