"""What fills a stage adds up to the memory its plan claims."""

from __future__ import annotations

import pytest

from gpp_plugin.plan.costs.memory_breakdown import memory_breakdown
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from tests.plan.test_dawnpiper import BOTH, tight_request


@pytest.mark.parametrize("mode", ["sync", "async", "vertical"])
@pytest.mark.parametrize("planner", ["dawnpiper", "vpipe"])
def test_parts_add_up(planner, mode):
    is_synced = mode == "vertical"
    request: PlanRequest = tight_request(
        mode="async" if is_synced else mode, vertical_sync=is_synced, memory_optimization=BOTH
    )
    plan = make_plan(planner, request)
    longest = max(stage.in_flight for stage in plan.stages)
    for stage, parts in zip(plan.stages, memory_breakdown(plan, request.profile), strict=True):
        assert parts.total == pytest.approx(stage.memory_bytes, abs=stage.in_flight + 2)
        older = {"sync": 0, "async": stage.in_flight - 1, "vertical": longest - 1}[mode]
        assert parts.stashed_weights == parts.weights * older
        assert (parts.working > 0) == (stage.memory is not None)
