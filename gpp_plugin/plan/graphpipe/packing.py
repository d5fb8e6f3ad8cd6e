"""Which branches of a parallel item share a stage: bin packing over counts of equal branches.

A *state* counts branches of each kind. The fewest devices of a state are those of one branch alone and of the
state without it, or those of a stage that holds several (a *bin*) and of the state it leaves. A bin with more
branches never needs fewer devices (but where the first of them that mixes samples changes the micro-batch
size), so only bins that cannot take one more for the same devices are tried, with as much of them as the
state has.

Source: GraphPipe (arXiv 2406.17145), section 5, Algorithm 1
Tests: tests/plan/test_graphpipe.py, tests/plan/test_quality.py, tests/plan/test_known_answers.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpp_plugin.plan.graphpipe.intervals import Absorbed, Branches, Counts, Leavings, Packing, Series


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
    """Return what the virtual rows and the virtual columns of a series leave over; kept with the series."""
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
    """Return how the states of a parallel item fill bins; kept with the item."""
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
