"""Which group of ranks holds which stage: the maps that interleaving and its relatives are made of.

Stages are numbered in the plan's order, groups in the order of ranks. Eight stages on four groups:

    stage          0  1  2  3  4  5  6  7
    round robin    0  1  2  3  0  1  2  3      interleaved 1F1B (Narayanan et al. 2021, section 2.2)
    back and forth 0  1  2  3  3  2  1  0      the V of ZB-V and V-Half (Qi et al. 2024, arXiv 2405.15362)
    in a row       0  0  1  1  2  2  3  3      a branch a group: a plan has the stages of one behind each other

Source: Megatron-LM (arXiv 2104.04473), section 2.2; controllable memory (arXiv 2405.15362)
Tests: tests/plan/test_shared_ranks_plans.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

Map = tuple[int, ...]
"""By stage, the number of its group."""

FEW = 5
"""Stages of which all maps are tried: 90 at most."""


def round_robin(num_stages: int, num_groups: int) -> Map:
    """Return the map of interleaving.

    >>> round_robin(5, 2)
    (0, 1, 0, 1, 0)
    """
    return tuple(stage % num_groups for stage in range(num_stages))


def back_and_forth(num_stages: int, num_groups: int) -> Map:
    """Return the map that turns around at both ends.

    >>> back_and_forth(6, 2)
    (0, 1, 1, 0, 0, 1)
    """
    there = range(num_groups)
    ways = itertools.cycle((tuple(there), tuple(reversed(there))))
    return tuple(itertools.islice(itertools.chain.from_iterable(ways), num_stages))


def in_a_row(num_stages: int, num_groups: int) -> Map:
    """Return the map of consecutive stages on one group.

    >>> in_a_row(5, 2)
    (0, 0, 0, 1, 1)
    """
    return tuple(stage * num_groups // num_stages for stage in range(num_stages))


def evened_out(loads: Sequence[float], num_groups: int) -> Map:
    """Return the map that gives the heaviest stages first, each to the group with least so far.

    >>> evened_out([3.0, 2.0, 2.0, 1.0], 2)
    (0, 1, 1, 0)
    """
    held = [0.0] * num_groups
    groups = [0] * len(loads)
    for stage in sorted(range(len(loads)), key=lambda stage: (-loads[stage], stage)):
        groups[stage] = min(range(num_groups), key=lambda group: (held[group], group))
        held[groups[stage]] += loads[stage]
    return renamed(groups)


def renamed(groups: Sequence[int]) -> Map:
    """Return the map with groups numbered as they are first met: groups are alike but for their links."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(group, len(numbers)) for group in groups)


def usual_maps(loads: Sequence[float], num_groups: int) -> list[Map]:
    """Return the maps that a search starts with, each once: all there are of a few stages.

    Args:
        loads: by stage, its work.
    """
    count = len(loads)
    if count <= FEW:
        return [
            each
            for each in itertools.product(range(num_groups), repeat=count)
            if each == renamed(each) and len(set(each)) == num_groups
        ]
    found = [
        round_robin(count, num_groups),
        back_and_forth(count, num_groups),
        in_a_row(count, num_groups),
        evened_out(loads, num_groups),
    ]
    return [each for each in dict.fromkeys(found) if len(set(each)) == num_groups]


def moved_stages(groups: Sequence[int], num_groups: int) -> Iterator[Map]:
    """Yield the maps with one stage in another group."""
    for stage, group in enumerate(groups):
        for other in range(num_groups):
            if other != group:
                yield (*groups[:stage], other, *groups[stage + 1 :])


def exchanged_stages(groups: Sequence[int]) -> Iterator[Map]:
    """Yield the maps with two stages exchanged."""
    for first, second in itertools.combinations(range(len(groups)), 2):
        if groups[first] != groups[second]:
            changed = list(groups)
            changed[first], changed[second] = changed[second], changed[first]
            yield tuple(changed)
