"""From the values of a stage search back to stages: which choices led to the fewest devices.

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py, tests/plan/test_graphpipe.py
"""

from __future__ import annotations

import numpy as np

from gpp_plugin.plan.graphpipe.intervals import Absorbed, Branches, Component, Counts, Series
from gpp_plugin.plan.graphpipe.stage_search import StageSearch, left_over, packing_of

Group = tuple[int, ...]


def read_groups(search: StageSearch, level: int) -> list[Group]:
    """Return the blocks of each stage of a solution with that many levels, after `fewest_devices`."""
    return _Reader(search).groups_of(search.root, -1, 0, level, 0)


class _Reader:
    """Walks through the tables of one search at the time last requested."""

    def __init__(self, search: StageSearch) -> None:
        self.search = search

    def _rest(self, branches: Branches, extra: Absorbed, *, is_tail: bool) -> Counts:
        rest: Counts = self.search.best[id(branches)][branches.states.index(left_over(branches, extra))]
        if extra.kind < 0:
            return rest
        whole: Counts = rest + extra.count * self._part(
            branches.kinds[extra.kind], extra.cut, is_tail=is_tail
        )
        return whole

    def _part(self, kind: Series, cut: int, *, is_tail: bool) -> Counts:
        """Return [exit, level] of what is left of a branch whose tail (or head) is taken away."""
        return self.search.parts(kind, np.array([cut]), is_tail=is_tail)[0]

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
        solved = self.search.solved[id(series)]
        branches = series.branches[extra.position]
        rest = self._rest(branches, extra, is_tail=False)
        target = solved.columns[end, exit_level, level, column]
        fewest = solved.fewest[end, exit_level]
        pools = [list(members) for members in branches.instances]
        for middle in range(level):
            if rest[middle, level] + fewest[middle, extra.position + 1] == target:
                own, found = self._split_branches(branches, pools, extra, middle, level, is_tail=False)
                after = self.groups_of(series, end, exit_level, middle, extra.position + 1)
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
