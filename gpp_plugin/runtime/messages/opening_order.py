"""In which order the ranks of a job open the channels between them, so that many are opened at once.

Opening a channel takes both of its ranks, which wait for each other. Every rank visits the channels in one order,
so that whoever waits for another waits for somebody at an earlier one: no circle. But a sorted order is a queue. Of a
chain of four ranks, r opening with r + 1, seen by the time at which each is opened:

    sorted      (0,1) at 1    (1,2) at 2    (2,3) at 3          n - 1 one after another
    in rounds   (0,1) at 1    (1,2) at 2    (2,3) at 1          as many as a rank has channels, twice that at most

A round is a matching: no rank is in it twice. Greedily, each channel joins the first round that has neither of its
ranks; where no rank has more than k channels there are at most 2 k - 1 rounds, as each of a channel's ranks takes up
k - 1 others at most.

Source: greedy edge colouring (Vizing, 1964, has k + 1 colours for simple graphs; no rank waits for that)
Tests: tests/runtime/test_opening_order.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from gpp_plugin.plugins import Channel


def opening_rounds(channels: Collection[Channel]) -> list[list[Channel]]:
    """Return the channels in rounds that follow each other; within one no rank occurs twice.

    Args:
        channels: (source rank, target rank), each once; both directions of a pair are channels of their own.

    >>> opening_rounds([(0, 1), (1, 2), (2, 3), (3, 2)])
    [[(0, 1), (2, 3)], [(1, 2)], [(3, 2)]]
    """
    rounds: list[list[Channel]] = []
    taken: dict[int, set[int]] = defaultdict(set)  # by rank, the rounds that it is in
    for channel in sorted(set(channels)):
        busy = taken[channel[0]] | taken[channel[1]]
        number = next(number for number in range(len(busy) + 1) if number not in busy)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(channel)
        for rank in channel:
            taken[rank].add(number)
    return rounds


def opening_order(channels: Collection[Channel]) -> list[Channel]:
    """Return the channels as every rank visits them: round by round."""
    return [channel for each in opening_rounds(channels) for channel in each]
