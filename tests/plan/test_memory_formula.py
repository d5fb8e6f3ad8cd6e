"""One formula of stage memory: every way to sum up a stage's blocks comes to the same bytes, and to the validator's."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.ir.profile import InputCost
from gpp_plugin.plan.baselines.chain_costs import ChainCosts
from gpp_plugin.plan.batch_rules import batch_rules
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.memory_breakdown import memory_breakdown
from gpp_plugin.plan.graphpipe.components import Component
from gpp_plugin.plan.graphpipe.intervals import build_series
from gpp_plugin.plan.graphpipe.stage_shapes import series_shapes
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.graph_tensors import GraphTensors
from gpp_plugin.plan.memory.operator_chain import OperatorChain, PipelineShape
from gpp_plugin.plan.memory.stage_chain import StageChain
from gpp_plugin.plan.validate_plan import _stage_bytes
from tests.plan.graphs import chain, make_cluster, make_profile, make_request

NUM, SIZE = 5, 4


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("parameter", "has_inputs"), [(96, False), (960, True)])
def test_a_stage_needs_the_same_however_its_blocks_are_summed_up(zero, degree, parameter, has_inputs):
    graph = chain(NUM)
    names = [block.name for block in graph.blocks]
    profile = make_profile(graph, saved=60.0, parameter=parameter)
    costs_of_blocks = tuple(
        dataclasses.replace(c, optimizer_bytes=4 * parameter, saved_bytes_fixed=8.0 * i,
                            transient_bytes_per_sample=12.0)
        for i, c in enumerate(profile.costs)
    )  # fmt: skip
    inputs = (InputCost(blocks=(names[0], names[3]), bytes=640, is_shared_out=True),) if has_inputs else ()
    profile = dataclasses.replace(profile, costs=costs_of_blocks, inputs=inputs)
    costs = CostModel(graph, profile, make_cluster(4), zero_stage=zero)
    local, limit = SIZE // degree, 1e9
    request = make_request(
        graph, profile, num_ranks=2 * degree, mini_batch=16, loss_unit=1, zero_stage=zero,
        micro_batch_sizes={"*": SIZE}, data_parallel=degree,
    )  # fmt: skip
    rules = batch_rules(request)
    leaves = tuple(Component(kind="block", blocks=(i,)) for i in range(NUM))
    series = build_series(
        graph, costs, rules, Component(kind="series", blocks=tuple(range(NUM)), children=leaves)
    )
    room, each = series_shapes(series, costs).room(local, degree, limit)
    linear, operators = ChainCosts(request, costs, rules, SIZE), OperatorChain(costs, local, degree=degree)
    for start in range(NUM):
        for stop in range(start + 1, NUM + 1):
            rows = range(start, stop)
            need = costs.stage_memory(rows, degree=degree, local=local, in_flight=3)
            column = stop - 1
            assert limit - room[start, column] + 3 * each[start, column] == need
            assert linear.memory(degree, 3)[start, stop] == need
            shape = PipelineShape(
                num_stages=1, num_micro_batches=4, limits=(1,), host_bytes_per_s=1e9, counts=(3,)
            )
            assert operators.memory_bytes(start, stop, 0, shape) == need
            whole = StageChain(GraphTensors(costs), rows, local, degree=degree)
            assert whole.memory_bytes(*whole.whole, 0, shape) == need
            optimized = costs.stage_memory(rows, degree=degree, local=local, in_flight=3, is_optimized=True)
            assert whole.memory_bytes(*whole.whole, 0, shape, is_optimized=True) == optimized
            assert operators.memory_bytes(start, stop, 0, shape, is_optimized=True) == optimized
            saved = 60 * local * len(rows) + 8 * sum(rows)
            more = min(parameter * len(rows), saved) if zero == 2 and degree > 1 else 0
            assert optimized - need == more
    drafts = [
        StageDraft(blocks=tuple(names[a:b]), degree=degree, micro_batch_size=SIZE)
        for a, b in ((0, 2), (2, NUM))
    ]
    plan = build_plan(request, drafts, planner="", costs=costs)
    for stage, part in zip(plan.stages, memory_breakdown(plan, profile, zero_stage=zero), strict=True):
        assert part.total == stage.memory_bytes == _stage_bytes(stage, graph, profile, zero, num_versions=1)


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
