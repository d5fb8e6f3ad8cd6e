"""One formula of stage memory: every way to sum up a stage's blocks comes to the same bytes."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.baselines.chain_costs import ChainCosts
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_formula import memory_breakdown
from gpp_plugin.plan.graphpipe.intervals import Component, build_series, series_shapes
from gpp_plugin.plan.memory.memory_chain import StageChain
from gpp_plugin.plan.memory.operator_chain import GraphTensors, OperatorChain, PipelineShape
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import batch_rules
from tests.plan.graphs import GB, chain, make_cluster, make_profile, make_request, uneven_request
from tests.plan.operator_chains import operator_chain

SIZE = 4


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("weight", [0.1, 2.0])  # gradients smaller than what a micro-batch keeps, and larger
def test_a_stage_needs_the_same_however_its_blocks_are_summed_up(zero, degree, weight):
    """Stages of any blocks in a row; parameters that several blocks share count once in a stage, and are left out here:
    prefix sums do not know them."""
    given = uneven_request(5)
    graph = dataclasses.replace(given.graph, tied={}, sharding=())
    bare = tuple(
        dataclasses.replace(cost, gradient_bytes=round(cost.gradient_bytes * weight))
        for cost in given.profile.costs
    )
    profile = dataclasses.replace(given.profile, costs=bare, tied=(), graph=fingerprint(graph))
    num = len(graph.blocks)
    costs = CostModel(graph, profile, given.cluster, zero_stage=zero)
    local, limit = SIZE // degree, 1e9
    request = make_request(
        graph, profile, cluster=given.cluster, num_ranks=2 * degree, mini_batch=16, loss_unit=1, zero_stage=zero,
        micro_batch_sizes={"*": SIZE}, data_parallel=degree,
    )  # fmt: skip
    rules = batch_rules(request)
    leaves = tuple(Component(kind="block", blocks=(i,)) for i in range(num))
    series = build_series(
        graph, costs, rules, Component(kind="series", blocks=tuple(range(num)), children=leaves)
    )
    room, each = series_shapes(series, costs).free_bytes(local, degree, limit)
    linear, operators = ChainCosts(request, costs, rules, SIZE), OperatorChain(costs, local, degree=degree)
    shape = PipelineShape(num_stages=1, num_micro_batches=4, limits=(1,), host_bytes_per_s=1e9, counts=(3,))
    for start in range(num):
        for stop in range(start + 1, num + 1):
            rows = range(start, stop)
            need = pytest.approx(costs.stage_memory(rows, degree=degree, local=local, in_flight=3), abs=1)
            assert limit - room[start, stop - 1] + 3 * each[start, stop - 1] == need
            assert linear.memory(degree, 3)[start, stop] == need
            assert operators.memory_bytes(start, stop, 0, shape) == need
            whole = StageChain(GraphTensors(costs), rows, local, degree=degree)
            assert whole.memory_bytes(*whole.whole, 0, shape) == need
            optimized = costs.stage_memory(rows, degree=degree, local=local, in_flight=3, is_optimized=True)
            assert whole.memory_bytes(*whole.whole, 0, shape, is_optimized=True) == optimized
            found = operators.memory_bytes(start, stop, 0, shape, is_optimized=True)
            assert found == pytest.approx(optimized, abs=1)
            saved, gradient = costs.group_saved_bytes(rows, local), costs.group_gradient_bytes(rows)
            for less in (0.0, 0.25 * saved, saved + 9):
                wanted = min(gradient, max(saved - less, 0.0)) if zero == 2 and degree > 1 else 0.0
                assert operators.reused_by_gradients(start, stop, less) == pytest.approx(wanted)
                assert whole.reused_by_gradients(*whole.whole, less) == pytest.approx(wanted)
            more = min(gradient, saved) if zero == 2 and degree > 1 else 0.0
            assert optimized - need.expected == pytest.approx(more, abs=2)


def test_older_versions_of_what_is_trained_come_on_top():
    graph = chain(3)
    costs = CostModel(graph, make_profile(graph, saved=60.0, parameter=96), make_cluster(3))
    operators = OperatorChain(costs, 1)
    shape = PipelineShape(
        num_stages=3, num_micro_batches=3, limits=(1,) * 3, host_bytes_per_s=1e9, mode="async"
    )
    for stage in range(3):
        plain = costs.stage_memory([stage], degree=1, local=1, in_flight=3 - stage)
        found = operators.memory_bytes(stage, stage + 1, stage, shape)
        assert found == plain + costs.stashed_bytes([stage], 3 - stage) == plain + (2 - stage) * 96


@pytest.mark.parametrize(("zero", "held"), [(0, 100 + 100), (1, 100 + 100), (2, 100 + 25 + 40)])
def test_zero_2_holds_a_part_and_what_one_backward_makes_beyond_what_it_lets_go(zero, held):
    graph = chain(1)
    costs = CostModel(graph, make_profile(graph, saved=60.0, parameter=100), make_cluster(4), zero_stage=zero)
    assert costs.stage_memory([0], degree=4, local=1, in_flight=3) == held + 3 * 60
    if zero == 2:
        assert costs.stage_memory([0], degree=1, local=1, in_flight=3) == 200 + 180, "nothing to share"


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
    assert one == pytest.approx(threes.collectives((0, 1)).all_reduce.us(GB) / 2)
    assert twos.gather_us([0], (0, 1)) == 0
    more = times(threes, (0, 1), (0, 1))[0] - times(twos, (0, 1), (0, 1))[0]
    assert more == pytest.approx((2 * 4 - 1) * one), "four micro-batches"


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
