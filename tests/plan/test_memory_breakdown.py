"""What fills a stage adds up to the memory its plan claims."""

from __future__ import annotations

import pytest

from gpp_plugin.plan.memory_breakdown import memory_breakdown
from gpp_plugin.plan.registry import PlanRequest, make_plan
from tests.plan.graphs import make_cluster
from tests.plan.test_dawnpiper import BOTH, tight_request


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("planner", ["dawnpiper", "vpipe"])
def test_parts_add_up(planner, mode):
    request: PlanRequest = tight_request(mode=mode, memory_optimization=BOTH)
    plan = make_plan(planner, request)
    for stage, parts in zip(plan.stages, memory_breakdown(plan, request.profile), strict=True):
        assert parts.total == pytest.approx(stage.memory_bytes, abs=stage.in_flight + 2)
        assert parts.stashed_weights == (parts.weights * (stage.in_flight - 1) if mode == "async" else 0)
        assert (parts.working > 0) == (stage.memory is not None)


def test_parts_that_zero_shares_out_add_up_too():
    request = tight_request(
        data_parallel=2, zero_stage=1, micro_batch_sizes={"*": 2}, cluster=make_cluster(4), schedule="gpipe"
    )
    plan = make_plan("dawnpiper", request)
    assert [stage.degree for stage in plan.stages] == [2, 2]
    for stage, parts in zip(plan.stages, memory_breakdown(plan, request.profile, zero_stage=1), strict=True):
        assert parts.total == pytest.approx(stage.memory_bytes, abs=2)
