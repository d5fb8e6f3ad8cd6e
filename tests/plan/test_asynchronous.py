"""Asynchronous plans of planners that know synchronous pipelines only."""

import dataclasses
import json

import pytest

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.plan.explicit_plan import explicit_plan, to_asynchronous
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.schedule.orders.async_1f1b import check_asynchronous
from tests.plan.graphs import GB, branches, chain, make_cluster, make_profile, make_request


def heavy_request():
    """Return one for a chain of four stages of 1,000 bytes of weights, which save 100 bytes a micro-batch."""
    graph = chain(4)
    profile = make_profile(graph, saved=100.0, parameter=1_000)
    return make_request(graph, profile, ranks=4, mini_batch=1, num_stages=4, micro_batch_sizes={"*": 1})


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
    request = heavy_request()
    sync = make_plan("uniform", request)
    made = to_asynchronous(sync, request)
    assert [stage.in_flight for stage in sync.stages] == [1] * 4
    assert [stage.in_flight for stage in made.stages] == [4, 3, 2, 1]
    synced = to_asynchronous(sync, dataclasses.replace(request, mode="async", vertical_sync=True))
    assert [made.num_versions(i) for i in range(4)] == [4, 3, 2, 1]
    assert [synced.num_versions(i) for i in range(4)] == [4] * 4
    costs = {cost.block: cost for cost in request.profile.costs}
    for index, before in enumerate(sync.stages):
        own = [costs[block] for block in before.blocks]
        trained = sum(c.gradient_bytes for c in own)
        saved = sum(c.saved_bytes_per_sample + c.saved_bytes_fixed for c in own)
        for plan in (made, synced):
            stage = plan.stages[index]
            grown = (plan.num_versions(index) - 1) * trained + (stage.in_flight - 1) * saved
            assert stage.memory_bytes - before.memory_bytes == pytest.approx(grown)


def test_memory_is_checked_with_the_stashed_weights():
    request = dataclasses.replace(heavy_request(), mode="async")
    need = max(stage.memory_bytes for stage in make_plan("uniform", request).stages)
    make_plan("uniform", dataclasses.replace(request, memory_limit_bytes=need))
    with pytest.raises(PlanInfeasible, match="4 micro-batches .* and 4 versions of its weights"):
        make_plan("uniform", dataclasses.replace(request, memory_limit_bytes=need - 10))
    # the last stage, which stashes nothing of its own, holds as many with vertical sync
    request = dataclasses.replace(request, cluster=make_cluster(4, memory=(GB, GB, GB, 5_000)))
    make_plan("uniform", request)
    with pytest.raises(PlanInfeasible, match="rank 3 .* 1 micro-batches .* and 4 versions of its weights"):
        make_plan("uniform", dataclasses.replace(request, vertical_sync=True))


def test_a_graph_of_branches_holds_by_its_distance_from_the_sink():
    request = make_request(branches(2, 2), ranks=4, mini_batch=8, num_stages=4, micro_batch_sizes={"*": 2})
    plan = make_plan("graphpipe", dataclasses.replace(request, mode="async"))
    behind = plan.digraph()
    for index, stage in enumerate(plan.stages):
        assert stage.in_flight == 1 + max(
            (plan.stages[i].in_flight for i in behind.successors(index)), default=0
        )


def test_a_saved_plan_runs_with_the_versions_it_was_made_for():
    request = dataclasses.replace(make_request(chain(4), ranks=2, mini_batch=4), mode="async")
    saved = json.loads(dumps(make_plan("uniform", request)))
    assert explicit_plan(saved, request).vertical_sync is False
    with pytest.raises(PlanError, match="made without vertical sync, and the run is with"):
        explicit_plan(saved, dataclasses.replace(request, vertical_sync=True))
    with pytest.raises(PlanError, match="vertical_sync: has no meaning in mode sync"):
        make_plan("uniform", dataclasses.replace(request, mode="sync", vertical_sync=True))


def test_deepspeeds_own_pipeline_stays_synchronous():
    request = make_request(chain(4), ranks=2, mini_batch=4)
    stock = dataclasses.replace(make_plan("uniform", request), planner="stock_1f1b")
    with pytest.raises(PlanError, match="DeepSpeed's synchronous pipeline"):
        to_asynchronous(stock, request)
