"""Emulated graphs: their bounds are what the simulator says, and their chains carry what stock must."""

import pytest

from gpp_benchmarks._emulated_graphs import (
    bound_us,
    branch_links,
    chain_links,
    emulated_plan,
    linear_bytes,
    linear_plan,
)
from gpp_plugin.rehearse.rehearsal import check_rehearsable
from gpp_plugin.simulate.predict import predict_iteration_us

JOINT = [*chain_links(3), *chain_links(3, 3), (2, 6), (5, 6)]
T5 = [*chain_links(8), (3, 5), (3, 6), (3, 7)]
CASES = {  # links, degrees, depth
    "chain": (chain_links(8), {}, 8),
    "two branches": (branch_links(2, 4, has_own_join=False), {}, 5),
    "joint end": (JOINT, {6: 2}, 4),
    "seven branches": (branch_links(7, 1, has_own_join=True), {}, 2),
    "mmt": (branch_links(4, 2, has_own_join=False), {}, 3),
    "t5": (T5, {}, 8),
}


def plan_of(name, **options):
    links, degrees, _ = CASES[name]
    return emulated_plan(name, links, num_micro_batches=16, degrees=degrees, message_bytes=100, **options)


@pytest.mark.parametrize("name", CASES)
def test_the_bound_is_reached_where_messages_take_no_time(name):
    plan = plan_of(name, forward_us=20.0, backward_us=40.0)
    check_rehearsable(plan)
    assert plan.num_ranks == 8 and plan.depth == CASES[name][2]
    assert bound_us(plan) == (16 + CASES[name][2] - 1) * 60.0
    assert predict_iteration_us(plan) == pytest.approx(bound_us(plan))
    line = linear_plan(plan)
    assert (line.depth, line.num_ranks) == (8, 8)
    assert predict_iteration_us(line) == pytest.approx((16 + 7) * 60.0)


def test_a_chain_carries_what_is_made_before_and_read_behind_each_boundary():
    assert linear_bytes(plan_of("chain")) == (100,) * 7
    # The end of branch a goes through all of branch b to the last stage.
    assert linear_bytes(plan_of("two branches")) == (100, 100, 100, 100, 200, 200, 200)
    assert linear_bytes(plan_of("seven branches")) == (100, 200, 300, 400, 500, 600, 700)
    # The encoder's output goes along to the last decoder stage.
    assert linear_bytes(plan_of("t5")) == (100, 100, 100, 100, 200, 200, 200)
    # Two ranks at the end are two stages of the chain: both branches reach the second as well.
    assert linear_bytes(plan_of("joint end")) == (100, 100, 100, 200, 200, 200, 200)
