"""Edges that broke other pipelines, against a single process."""

from __future__ import annotations

from tests.runtime.jobs import by_hand
from tests.runtime.test_equality import check_each

THREE_RANKS = {
    "branches called in another order than their inputs": by_hand("swappable", "left", "right"),
    "a tensor read by two stages": by_hand("diamond", "stem", "up"),
    "a tensor read by two stages, one a skip": by_hand("diamond", "stem", "up+down"),
    "views, int64, bool, no-gradient and mixed dtypes on three stages": by_hand(
        "odd_edges", "stem", "middle"
    ),
    "two root stages, a stage without parameters": by_hand("no_parameters", "left+right", "interaction"),
    "an edge without a batch axis": by_hand("shared_bias", "bias", "first"),
    "an edge without a batch axis, unequal micro-batches": by_hand(
        "shared_bias",
        {"modules": ["bias"], "micro_batch_size": 1},
        {"modules": ["first"], "micro_batch_size": 4},
    ),
    "a frozen stage": by_hand("frozen", "tower", "adapter"),
    "a frozen stage on two ranks": by_hand(
        "frozen", {"modules": ["tower"], "ranks": [0, 1]}, last={"ranks": [2]}
    ),
    "a stage on two ranks whose gradient never comes": by_hand(
        "detached", {"modules": ["tower"], "ranks": [0, 1]}, last={"ranks": [2]}
    ),
    "several sinks": by_hand("multi_sink", "trunk", "classify"),
    "more micro-batches than stages": by_hand("diamond", "stem", "up", mini_batch=24, unit=1),
    "unequal micro-batches everywhere": by_hand(
        "diamond",
        {"modules": ["stem"], "micro_batch_size": 8},
        {"modules": ["up"], "micro_batch_size": 1},
    ),
}


def test_odd_edges_on_three_ranks() -> None:
    check_each(THREE_RANKS, 3)
