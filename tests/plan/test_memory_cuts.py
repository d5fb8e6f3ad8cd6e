"""Balanced cuts against closed forms, and against every cut at the same costs."""

from __future__ import annotations

import itertools
import random

import pytest

from gpp_plugin.plan.memory.dawnpiper import (
    allowed_cuts,
    compute_balanced_cut,
    cut_interval,
    memory_balanced_cuts,
)
from tests.plan.graphs import make_cluster
from tests.plan.operator_chains import factory, operator_chain, random_chain


def optimizer_of(num: int, stages: int, **options: object):
    graph, profile = operator_chain([1.0] * num, saved=100.0)
    return factory(graph, profile, [10**6] * stages, **options).at(1, stages)


def test_compute_balance_is_the_nearest_share():
    o = optimizer_of(12, 3)
    assert [compute_balanced_cut(o.chain, 0, 12, share) for share in (1 / 3, 1 / 2, 0.6)] == [4, 6, 7]
    assert compute_balanced_cut(o.chain, 4, 12, 1 / 4) == 6


def test_memory_balance_of_equal_operators_is_algorithm_2s():
    """l : l-1 : ... : 1 in flight, real division: with 25 operators on 4 stages 3, 4, 6 and 12."""
    o = optimizer_of(25, 4)
    cuts = memory_balanced_cuts(o.chain, o.shape, 0, 25, range(4))
    assert cuts == [3, 7, 13]
    unit = 1 / sum(1 / (4 - i) for i in range(4))  # M_1 : l M_1 / (l - x + 1)
    assert [round(25 * unit * sum(1 / (4 - i) for i in range(x + 1))) for x in range(3)] == cuts


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_memory_balance_is_exact(mode):
    for seed in range(10):
        graph, profile = random_chain(random.Random(seed), 11)
        o = factory(graph, profile, [10**6] * 3, mode=mode).at(1, 3)

        def worst(cuts: tuple[int, ...]) -> float:
            pairs = itertools.pairwise((0, *cuts, 11))
            return max(o.chain.memory_bytes(a, b, s, o.shape) for s, (a, b) in enumerate(pairs))  # noqa: B023

        best = min(worst(cuts) for cuts in itertools.combinations(range(1, 11), 2))
        found = tuple(memory_balanced_cuts(o.chain, o.shape, 0, 11, range(3)))
        assert worst(found) == pytest.approx(best, rel=1e-3)


def test_the_interval_lies_between_both_and_leaves_every_stage_an_operator():
    o = optimizer_of(25, 4, mode="async")
    low, high = cut_interval(o.chain, o.shape, 0, 25, 0, 3)
    assert (low, high) == (7 - 2, 13 + 2)
    assert cut_interval(o.chain, o.shape, 0, 4, 0, 3) == (2, 2)


def test_cuts_that_send_much_are_left_out_unless_all_near_by_do():
    graph, profile = operator_chain([10.0] * 20, output=40)
    tensors = {
        name: spec if i % 2 else type(spec)(
            name=spec.name, dtype=spec.dtype, shape=(1, 10_000), num_samples=1, layout=spec.layout
        )
        for i, (name, spec) in enumerate(graph.tensors.items())
    }  # fmt: skip
    import dataclasses

    from gpp_plugin.ir.serialize import fingerprint

    graph = dataclasses.replace(graph, tensors=tensors)
    profile = dataclasses.replace(profile, graph=fingerprint(graph))
    slow = factory(graph, profile, [10**9] * 4, make_cluster(4, bandwidth=1e8)).at(1, 4)
    assert allowed_cuts(slow.chain, slow.shape).tolist() == [0, *range(2, 20, 2), 20]
    quick = factory(graph, profile, [10**9] * 4, make_cluster(4, bandwidth=1e12)).at(1, 4)
    assert allowed_cuts(quick.chain, quick.shape).tolist() == list(range(21))
