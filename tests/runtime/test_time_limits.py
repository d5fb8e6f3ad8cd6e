"""How long ranks wait for each other: a mini-batch may take longer than one message may."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.runtime.ranks.collectives import collective_timeout_s
from tests.integrations.engine_jobs import B, U, config_of, make_engine, steps
from tests.ranks import run_kept_ranks
from tests.schedule.plans import chain_plan
from tests.stage_graph.graphs import WIDTH, Loss

PLAN = dataclasses.replace(
    chain_plan(2, 64, forward_us=[0.5e6, 1e6], backward_us=[1e6, 2e6]), iteration_us=195.5e6
)


class Late(nn.Module):
    """A layer whose backward of the last micro-batch takes ``seconds``, once these are set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seconds = 0.0
        self._count = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        if self.seconds:
            hidden.register_hook(self._wait)
        return hidden

    def _wait(self, gradient: Tensor) -> None:
        self._count += 1
        if self._count == B // U:
            time.sleep(self.seconds)


def end_late(comm_timeout_s: float, late_s: float) -> dict[str, Any]:
    """Train a mini-batch whose first stage ends ``late_s`` after the second one asks for the norm."""
    import gpp_plugin

    torch.manual_seed(0)
    late = Late()
    graph = gpp_plugin.StageGraph(name="late")
    graph.stage("body", late, inputs={"x": "x"}, outputs=["hidden"], ranks=[0])
    graph.stage("head", Loss(), inputs={"hidden": "hidden", "target": "x"}, outputs=["loss"], ranks=[1])
    batch = {"x": torch.randn(B, WIDTH)}
    config = config_of(block={"comm_timeout_s": comm_timeout_s, "schedule": "1f1b", "slicing": "off"})
    engine = make_engine(graph, batch, config)
    late.seconds = late_s
    start = time.perf_counter()
    losses = steps(engine, [batch])
    seconds = time.perf_counter() - start
    engine.destroy()
    return {"losses": losses, "seconds": seconds}


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
    first, second = run_kept_ranks(end_late, 2, 3.0, 5.0)
    assert first["losses"] == second["losses"] and second["seconds"] > 4.0
