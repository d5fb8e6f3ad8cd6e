"""How long ranks wait for each other: a mini-batch may take longer than one message may."""

import dataclasses

import pytest

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.runtime.ranks.waiting import collective_timeout_s
from tests.ranks import run_kept_ranks
from tests.runtime import late_jobs

PLAN = PipelinePlan(
    model="m",
    graph="g",
    planner="p",
    mini_batch=64,
    loss_unit=1,
    stages=tuple(
        Stage(
            name=f"s{index}",
            blocks=(f"b{index}",),
            ranks=(index,),
            micro_batch_size=1,
            in_flight=2 - index,
            forward_us=0.5e6 * (1 + index),
            backward_us=1e6 * (1 + index),
        )
        for index in range(2)
    ),
    edges=(),
    iteration_us=195.5e6,
)


@pytest.mark.parametrize(
    ("plan", "comm_timeout_s", "limit"),
    [
        (None, 60.0, 600.0),
        (None, 3600.0, 3600.0),
        (PLAN, 60.0, 1955.0),
        (PLAN, 7200.0, 7200.0),
        (dataclasses.replace(PLAN, iteration_us=3e6 * 64), 60.0, 1920.0),
        # a plan without a predicted time: 64 micro-batches of the busiest stage
        (dataclasses.replace(PLAN, iteration_us=0.0), 60.0, 1920.0),
        (dataclasses.replace(PLAN, iteration_us=0.0, stages=()), 60.0, 600.0),
    ],
)
def test_the_limit_is_the_plans_and_not_a_messages(plan, comm_timeout_s, limit):
    assert collective_timeout_s(plan, comm_timeout_s) == pytest.approx(limit)


def test_a_rank_that_is_through_early_waits_for_the_rest_of_a_long_mini_batch():
    """At 37ec3e4 the sum of norms had the limit of a message, and rank 1 gave up."""
    first, second = run_kept_ranks(late_jobs.end_late, 2, 3.0, 5.0)
    assert first["losses"] == second["losses"] and second["seconds"] > 4.0
