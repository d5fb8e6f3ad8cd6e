"""Asynchronous plans of planners that know synchronous pipelines only."""

import dataclasses

import pytest

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.plan.asynchronous import to_asynchronous
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.schedule.async_1f1b import check_asynchronous
from tests.plan.graphs import branches, chain, make_request


@pytest.mark.parametrize("planner", ["uniform", "graphpipe", "auto", "pipedream"])
def test_every_planner_plans_for_mode_async(planner):
    request = make_request(chain(8), ranks=4, mini_batch=4, num_stages=4, micro_batch_sizes={"*": 1})
    plan = make_plan(planner, dataclasses.replace(request, mode="async"))
    check_asynchronous(plan)
    assert plan.mode == "async"
    assert [stage.in_flight for stage in plan.stages] == [4, 3, 2, 1]
    slowest = max(stage.forward_us + stage.backward_us for stage in plan.stages)
    assert plan.iteration_us == pytest.approx(4 * slowest)


def test_in_flight_is_not_limited_by_the_mini_batch_and_weights_are_stashed():
    request = make_request(chain(4), ranks=4, mini_batch=1, num_stages=4, micro_batch_sizes={"*": 1})
    sync = make_plan("uniform", request)
    made = to_asynchronous(sync, request)
    assert [stage.in_flight for stage in sync.stages] == [1] * 4
    assert [stage.in_flight for stage in made.stages] == [4, 3, 2, 1]
    costs = {cost.block: cost for cost in request.profile.costs}
    for before, after in zip(sync.stages, made.stages, strict=True):
        own = [costs[block] for block in after.blocks]
        weights = sum(c.parameter_bytes for c in own)
        saved = sum(c.saved_bytes_per_sample + c.saved_bytes_fixed for c in own)
        grown = (after.in_flight - 1) * (weights + saved)
        assert after.memory_bytes - before.memory_bytes == pytest.approx(grown)


def test_memory_is_checked_with_the_stashed_weights():
    request = make_request(chain(4), ranks=4, mini_batch=1, num_stages=4, micro_batch_sizes={"*": 1})
    request = dataclasses.replace(request, mode="async")
    need = max(stage.memory_bytes for stage in make_plan("uniform", request).stages)
    make_plan("uniform", dataclasses.replace(request, memory_limit_bytes=need))
    with pytest.raises(PlanInfeasible, match="micro-batches"):
        make_plan("uniform", dataclasses.replace(request, memory_limit_bytes=need - 10))


def test_a_graph_of_branches_holds_by_its_distance_from_the_sink():
    request = make_request(branches(2, 2), ranks=4, mini_batch=8, num_stages=4, micro_batch_sizes={"*": 2})
    plan = make_plan("graphpipe", dataclasses.replace(request, mode="async"))
    behind = plan.digraph()
    for index, stage in enumerate(plan.stages):
        assert stage.in_flight == 1 + max(
            (plan.stages[i].in_flight for i in behind.successors(index)), default=0
        )


def test_deepspeeds_own_pipeline_stays_synchronous():
    request = make_request(chain(4), ranks=2, mini_batch=4)
    stock = dataclasses.replace(make_plan("uniform", request), planner="stock_1f1b")
    with pytest.raises(PlanError, match="DeepSpeed's synchronous pipeline"):
        to_asynchronous(stock, request)
