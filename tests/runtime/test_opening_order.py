"""Channels are opened in rounds of which no rank is in twice, in as few as the most channels of a rank allow."""

import itertools
import random

import pytest

from gpp_plugin.runtime.messages.sockets import opening_order, opening_rounds


def chain(num_ranks):
    return [pair for a in range(num_ranks - 1) for pair in ((a, a + 1), (a + 1, a))]


@pytest.mark.parametrize("seed", range(5))
def test_rounds_are_matchings_of_all_channels(seed):
    generator = random.Random(seed)
    channels = generator.sample(list(itertools.permutations(range(12), 2)), 40)
    rounds = opening_rounds(channels)
    assert sorted(itertools.chain(*rounds)) == sorted(channels)
    for each in rounds:
        ranks = list(itertools.chain(*each))
        assert len(set(ranks)) == len(ranks)
    most = max(sum(rank in channel for channel in channels) for rank in range(12))
    assert most <= len(rounds) <= 2 * most - 1
    generator.shuffle(channels)
    assert opening_rounds(channels) == rounds, "every rank has the same, in whatever order its set is"


def test_a_long_chain_opens_in_as_many_rounds_as_a_short_one():
    assert len(opening_rounds(chain(1024))) == len(opening_rounds(chain(4))) == 4
    assert opening_order([]) == []
