"""What ZeRO makes of a stage's memory and reductions."""

import pytest

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_formula import memory_breakdown
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plugins import PLANNERS
from tests.plan.graphs import GB, chain, make_cluster, make_profile, make_request
from tests.plan.operator_chains import operator_chain


@pytest.mark.parametrize(("zero", "held"), [(0, 100 + 100), (1, 100 + 100), (2, 100 + 25 + 40)])
def test_zero_2_holds_a_part_and_what_one_backward_makes_beyond_what_it_lets_go(zero, held):
    graph = chain(1)
    costs = CostModel(graph, make_profile(graph, saved=60.0, parameter=100), make_cluster(4), zero_stage=zero)
    assert costs.stage_memory([0], degree=4, local=1, in_flight=3) == held + 3 * 60
    if zero == 2:
        assert costs.stage_memory([0], degree=1, local=1, in_flight=3) == 200 + 180, "nothing to share"


def test_reductions_are_worth_half_a_ring_each_and_half_a_ring_for_the_parameters():
    graph = chain(1)
    times = {}
    for zero in (0, 1, 2):
        costs = CostModel(graph, make_profile(graph, parameter=GB), make_cluster(2), zero_stage=zero)
        times[zero] = costs.stage_all_reduce_us([0], (0, 1), 7)
    assert times[0] == times[1] and times[2] == 4 * times[0]


def test_zero_3_gathers_once_where_zero_2_does_and_for_each_task_of_ranks_of_several_stages():
    graph = chain(2)
    twos, threes = (
        CostModel(graph, make_profile(graph, parameter=GB), make_cluster(4), zero_stage=zero)
        for zero in (2, 3)
    )

    def times(costs, *ranks):
        stages = tuple(
            Stage(name=str(i), blocks=(f"layers.{i}",), ranks=own, micro_batch_size=2, in_flight=1)
            for i, own in enumerate(ranks)
        )
        plan = PipelinePlan(
            model="m", graph="", planner="", mini_batch=8, loss_unit=2, stages=stages, edges=()
        )
        return costs.reduce_times(plan)

    assert times(threes, (0, 1), (2, 3)) == pytest.approx(times(twos, (0, 1), (2, 3)))
    one = threes.gather_us([0], (0, 1))
    assert one == pytest.approx(threes.all_reduce_us(GB, (0, 1)) / 2) and twos.gather_us([0], (0, 1)) == 0
    more = times(threes, (0, 1), (0, 1))[0] - times(twos, (0, 1), (0, 1))[0]
    assert more == pytest.approx((2 * 4 - 1) * one), "four micro-batches"


@pytest.mark.parametrize("planner", sorted(set(PLANNERS.names()) - {STOCK}))
def test_planners_keep_within_memory_under_zero_2(planner):
    graph = chain(8)
    profile = make_profile(graph, saved=0.02 * GB, parameter=int(0.05 * GB))
    for limit in (0.9, 0.6):
        request = make_request(
            graph, profile, num_ranks=4, mini_batch=16, zero_stage=2, memory_limit_bytes=int(limit * GB)
        )
        plan = make_plan(planner, request)  # validates
        assert max(stage.memory_bytes for stage in plan.stages) <= limit * GB


@pytest.mark.parametrize("planner", ["dawnpiper", "vpipe"])
@pytest.mark.parametrize("limit", [1600, 1400, 1200])
def test_what_swaps_and_recomputes_leaves_room_for_whole_gradients(planner, limit):
    """Of 400 bytes saved little is left to make room for 200 of gradients: they count beside it."""
    graph, profile = operator_chain([10.0] * 8, saved=100.0, parameters=50)
    request = make_request(
        graph,
        profile,
        num_ranks=4,
        mini_batch=8,
        loss_unit=1,
        micro_batch_sizes={"*": 2},
        data_parallel=2,
        zero_stage=2,
        memory_limit_bytes=limit,
        memory_optimization=("recompute", "swap"),
    )
    plan = make_plan(planner, request)  # validates
    parts = memory_breakdown(plan, profile, zero_stage=2)
    for stage, part in zip(plan.stages, parts, strict=True):
        assert part.total == stage.memory_bytes <= limit
