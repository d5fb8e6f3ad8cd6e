"""Context sizes of stages: costs, memory, the all-to-all, rules of grids, keys, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import pytest

from gpp_benchmarks.plan_quality import check_tensor
from gpp_plugin import api
from gpp_plugin.commands import plan_command
from gpp_plugin.config.reader import read_config
from gpp_plugin.errors import ConfigError, PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster, Link
from gpp_plugin.ir.plan import ModelGrid
from gpp_plugin.ir.step_cost import EXCHANGES
from gpp_plugin.plan.costs.collective_costs import collectives
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import finished_plan
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, grid_rules
from gpp_plugin.plan.validate_plan import validate_plan
from tests.plan.graphs import make_cluster
from tests.plan.test_tensor_sizes import PARAMETER, divisible, profile_of, request_of, with_context

LENGTH = 6


def cut(num: int, **changes: Any) -> BlockGraph:
    """Return a chain of blocks that tensor ranks divide, and context ranks but for a tenth; 8 heads, 4 groups."""
    graph = with_context(divisible(num))
    tensors = {
        name: dataclasses.replace(spec, shape=(spec.shape[0], LENGTH, *spec.shape[1:]))
        for name, spec in graph.tensors.items()
    }
    return dataclasses.replace(
        graph,
        tensors=tensors,
        context=tuple(dataclasses.replace(each, **changes) for each in graph.context),
        position_axes=dict.fromkeys(tensors, 1),
    )


def asked(graph: BlockGraph, **changes: object) -> PlanRequest:
    return request_of(graph, **{"tensor_parallel": 1, "sequence_parallel": None, **changes})


def test_a_block_takes_its_share_and_the_exchanges_of_its_context_ranks() -> None:
    graph = cut(2)
    costs = CostModel(graph, profile_of(graph), make_cluster(16, bandwidth=1e9, latency=3.0))
    for context in (2, 4):
        # one sample: 100 x (0.1 + 0.9 / n) us; four exchanges of n - 1 steps of 3 us, (n - 1) / n^2 of 8,000 bytes
        exchanged = 4 * 3.0 * (context - 1) + (context - 1) / context**2 * 8.0
        forward, backward = costs.at_grid(ModelGrid(context=context)).stage_times([0], 1.0)
        assert forward == pytest.approx(100.0 * (0.1 + 0.9 / context) + exchanged)
        assert backward == pytest.approx(200.0 * (0.1 + 0.9 / context) + exchanged)
    # eight ranks exchange each of 4 groups twice; so do four beside two tensor ranks, who have 2 groups each
    eight, many, grid = (costs.at_grid(ModelGrid(*sizes)) for sizes in ((8, 1), (4, 2), (2, 2)))
    assert many.context_sums(1.0)[0][0] == pytest.approx(4 * 3.0 * 3 + 3 / 16 * 10.0 / 2)
    assert eight.context_sums(1.0)[0][0] == pytest.approx(4 * 3.0 * 7 + 7 / 64 * 10.0)
    assert grid.context_sums(1.0)[0][0] == pytest.approx(4 * 3.0 + 1 / 4 * 8.0 / 2)
    assert grid.stage_times([0], 1.0)[0] == pytest.approx(
        100.0 * (0.1 + 0.9 / 2) * (0.2 + 0.8 / 2) + 2 * 3.0 + grid.context_sums(1.0)[0][0]
    )
    assert sum(grid.split_times([0], 1.0)) == pytest.approx(grid.stage_times([0], 1.0)[1])


def test_context_ranks_hold_whole_weights_and_parts_of_what_is_saved() -> None:
    graph = cut(2)
    profile = profile_of(graph)
    costs = [CostModel(graph, profile, make_cluster(16), zero_stage=zero) for zero in range(4)]

    def held(zero: int, context: int, degree: int = 1) -> float:
        own = costs[zero].at_grid(ModelGrid(context=context))
        return own.stage_memory([0], degree=degree, local=1, in_flight=2)

    # parameters and gradients of 1000 each; saved 100 x (0.25 + 0.75 / n); of 8 ranks keys and values twice
    assert held(0, 4) == pytest.approx(2000 + 2 * 43.75, abs=1)
    assert held(0, 8) == pytest.approx(2000 + 2 * 100 * (0.25 + 0.75 / 8 + 2_000 / 8 / 80), abs=1)
    # under ZeRO 2 gradients are in 2 x 4 parts; whole ones exceed what their backward frees
    assert held(2, 4, degree=2) == pytest.approx(1000 + 1000 / 8 + 2 * 43.75 + (1000 - 43.75), abs=1)
    assert costs[3].at_grid(ModelGrid(context=4)).sharded_bytes([0], 4) == 1000


def test_an_all_to_all_sends_an_nth_of_an_nth() -> None:
    inner, outer = (
        Link(name=name, span=span, bytes_per_s=rate, latency_us=us)
        for name, span, rate, us in (("in", 4, 1e11, 2.0), ("out", 16, 1e10, 5.0))
    )
    cluster: Cluster = dataclasses.replace(make_cluster(16), links=(inner, outer))
    inside = collectives(cluster, range(4))
    assert inside.exchange.us(1e9) == pytest.approx(3 * 2.0 + 3 / 16 * 1e9 / 1e5)
    assert inside.exchange.us(1e9) - 6.0 == pytest.approx((inside.gather.us(1e9) - 6.0) / 4)
    # on two nodes of four 4 x 4 pairs of eighths of eighths leave each node, over four links of its ranks
    both = collectives(cluster, range(8))
    assert both.exchange.us(1e9) == pytest.approx(6 * 2.0 + 5.0 + 16 / 64 * 1e9 / (4 * 1e4))
    assert collectives(cluster, (5,)).exchange.us(1e9) == 0.0


def test_gradients_are_reduced_over_data_and_context_ranks() -> None:
    graph = cut(1)
    cluster = make_cluster(8, bandwidth=1e9, latency=1.0)
    request = asked(graph, ranks=8, cluster=cluster)
    names = tuple(block.name for block in graph.blocks)

    def stage_of(degree: int, context: int, tensor: int) -> Any:
        draft = StageDraft(
            blocks=names, degree=degree, micro_batch_size=degree, context=context, tensor=tensor
        )
        return build_plan(request, [draft], planner="by hand").stages[0]

    costs = CostModel(graph, request.profile, cluster)
    one, many = stage_of(8, 1, 1), stage_of(2, 4, 1)
    assert one.replicas(0) == many.replicas(0) == tuple(range(8))
    assert costs.reduction_us(one) == costs.on(many).reduction_us(many) > 0
    (alone,) = costs.reductions(
        build_plan(request, [StageDraft(blocks=names, degree=1, micro_batch_size=1)], planner="")
    ).stages
    assert alone.last_us == 0
    mixed = stage_of(2, 2, 2)
    assert mixed.replicas(1) == (1, 3, 5, 7)
    # no sum is early: a backward has collectives of its own
    assert costs.bucket_bytes < math.inf and costs.on(many).bucket_bytes == math.inf


def test_grids_are_those_whose_ranks_divide_heads_together() -> None:
    rules = grid_rules(asked(cut(2), ranks=8, tensor_parallel=None))
    assert set(rules.grids) == {(c, t) for c in (1, 2, 4) for t in (1, 2, 4) if c * t <= 8}
    assert rules.ways[0] == (0, 0) and (2, 2) in rules.ways and (1, 1) not in rules.ways
    # half a head on each of 2 x 4 ranks
    request = asked(cut(2, degrees=(2, 4), groups=8), ranks=16, tensor_parallel=4)
    rules = grid_rules(request)
    assert (2, 4) in rules.grids and rules.allowed(["layers.0"]) == [(1, 4)]
    with pytest.raises(
        PlanError, match=r"sequence_parallel: 2 beside .*tensor_parallel.* does not divide the heads"
    ):
        grid_rules(dataclasses.replace(request, sequence_parallel=2))
    # groups of keys and values need not be divided: there are more of each then
    for groups in (8, 4):
        wide = grid_rules(asked(cut(2, groups=groups), ranks=16, tensor_parallel=4, sequence_parallel=2))
        assert wide.allowed(["layers.0"]) == [(2, 4)] and wide.are_explicit
    only = grid_rules(asked(cut(2), ranks=4))
    assert only.grids == ((1, 1), (2, 1), (4, 1)) and only.ways == ((0, 1), (2, 1), (4, 1))
    listed = grid_rules(asked(cut(3), ranks=4, sequence_parallel={"layers.1": 2}))
    assert listed.allowed(["layers.1", "layers.2"]) == [(2, 1)] and listed.allowed(["layers.0"]) == [(1, 1)]


def test_without_the_key_plans_are_as_of_a_graph_that_knows_no_context() -> None:
    graph = cut(4)
    bare = dataclasses.replace(graph, context=())
    for tensor in (1, None):
        plain = make_plan("auto", request_of(bare, tensor_parallel=tensor, ranks=4))
        plan = make_plan("auto", request_of(graph, tensor_parallel=tensor, ranks=4))
        assert dataclasses.replace(plan, graph=plain.graph) == plain


@pytest.mark.parametrize("planner", ["auto", "graphpipe", "piper"])
def test_one_text_runs_on_context_ranks(planner: str) -> None:
    graph = cut(1, forward_exchange_bytes=0, backward_exchange_bytes=0, group_bytes=0)
    plan = make_plan(planner, asked(graph, ranks=4, mini_batch=1))
    assert [(stage.context, stage.tensor) for stage in plan.stages] == [(4, 1)]
    name = plan.stages[0].name
    assert f"sequence_parallel auto: {name} 4; 1 of 1 blocks can be divided" in plan.notes


def test_memory_asks_for_context_ranks_where_nothing_else_fits() -> None:
    graph = cut(1)
    tight = asked(graph, ranks=4, mini_batch=4, memory_limit_bytes=2_060)
    with pytest.raises(PlanInfeasible):
        make_plan("auto", dataclasses.replace(tight, sequence_parallel=1))
    for planner in ("auto", "graphpipe"):
        plan = make_plan(planner, tight)
        assert plan.stages[0].context == 4 and plan.stages[0].memory_bytes <= 2_060
        validate_plan(plan, graph, profile=tight.profile, memory_limit_bytes=2_060)
    with pytest.raises(PlanInfeasible, match="too much|needs"):
        validate_plan(plan, graph, profile=tight.profile, memory_limit_bytes=2_030)


@pytest.mark.parametrize("seed", range(30))
def test_context_sizes_beside_brute_force(seed: int) -> None:
    row = check_tensor(seed, has_context=True)
    assert (row["us"] is None) == (row["best_us"] is None)
    assert row["us"] is None or row["ratio"] <= 1.05
    if row["whole_us"] is not None:
        assert row["us"] <= row["whole_us"] * (1 + 1e-9)


def test_stages_of_unlike_context_sizes_share_a_plan() -> None:
    graph = cut(4)
    wanted = {"layers.0": 1, "layers.1": 1, "layers.2": 2, "layers.3": 2}
    plan = make_plan("auto", asked(graph, ranks=4, sequence_parallel=wanted, tensor_parallel=1))
    for stage in plan.stages:
        assert {wanted[block] for block in stage.blocks} == {stage.context}
    edge = next(e for e in plan.edges if plan.stages[e.src].context != plan.stages[e.dst].context)
    assert (edge.src_shard_axis, edge.dst_shard_axis) == (None, 1)
    whole = finished_plan(plan, asked(graph, ranks=4))
    assert whole.cost is not None
    (exchanges,) = (each for each in whole.cost.collectives if each.kind == EXCHANGES)
    assert exchanges.total_us == exchanges.exposed_us > 0
    assert sum(whole.cost.parts.values()) == pytest.approx(whole.cost.step_us)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (3, r"sequence_parallel: 3 does not divide the query heads of block 'layers.0'; give 1, 2, 4, 8"),
        (32, "sequence_parallel: 32 is more than the 16 ranks there are; give 1 to 16"),
        (
            8,
            r"sequence_parallel: 8 is more than the 6 positions of 'layers.0:out'; give 1 to 6, or longer texts",
        ),
        ({"layer.0": 2}, r"no module 'layer.0' in the model; the nearest are layers.0"),
        ({"layers.0": 3}, r"sequence_parallel.layers.0: 3 does not divide the query heads"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_a_line(wanted: object, words: str) -> None:
    with pytest.raises(PlanError, match=words) as found:
        make_plan("auto", asked(cut(2), ranks=16, sequence_parallel=wanted))
    assert "\n" not in str(found.value)


def test_models_without_an_axis_of_positions_are_refused_or_left_whole() -> None:
    graph = dataclasses.replace(cut(2), context=(), uncut={"layers.0": "operator 'conv' mixes positions"})
    with pytest.raises(
        PlanError,
        match=r"sequence_parallel: 2, and nothing of block .* context ranks \(operator 'conv' mixes",
    ):
        make_plan("auto", asked(graph, sequence_parallel=2))
    plan = make_plan("auto", asked(graph))
    assert any(
        note.startswith(
            "sequence_parallel auto: 1, as none of the blocks can be divided among ranks: 'layers.0'"
        )
        for note in plan.notes
    )
    assert any(
        "planner uniform supports no context ranks" in n for n in make_plan("uniform", asked(cut(2))).notes
    )


def test_the_validator_refuses_grids_that_heads_cannot_have() -> None:
    graph = cut(1, degrees=(2, 4))
    request = asked(graph, ranks=8)
    draft = StageDraft(blocks=("layers.0",), degree=1, micro_batch_size=1, context=2, tensor=4)
    with pytest.raises(PlanError, match=r"sizes of 2 x 4 do not divide the heads of block 'layers.0'"):
        validate_plan(build_plan(request, [draft], planner="by hand"), graph)


def test_explicit_stages_have_a_context_size() -> None:
    graph = cut(2)
    spec = {"stages": [{"name": "all", "modules": ["*"], "devices": 4, "context": 2}]}
    (stage,) = explicit_plan(spec, asked(graph, ranks=4, mini_batch=4, sequence_parallel=1)).stages
    assert (stage.degree, stage.context, stage.tensor) == (2, 2, 1)
    whole = PARAMETER * 2 * 2
    assert whole < stage.memory_bytes < whole + 2 * 2 * 100


SHIPPED: dict[str, Any] = {"enabled": True, "size": 4, "mode": "ulysses"}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 1),
        ({"sequence_parallel_size": 2}, 2),
        ({"sequence_parallel_size": "auto"}, 1),
        ({"sequence_parallel": SHIPPED}, 4),
        ({"sequence_parallel": {**SHIPPED, "enabled": False}}, 1),
        ({"sequence_parallel": SHIPPED, "sequence_parallel_size": 4}, 4),
        ({"sequence_parallel": SHIPPED, "graph_pipeline": {"sequence_parallel": 4}}, 4),
        ({"graph_pipeline": {"sequence_parallel": "auto"}}, "auto"),
        ({"graph_pipeline": {"sequence_parallel": {"vision": 2}}}, {"vision": 2}),
    ],
)
def test_deepspeeds_own_keys_say_the_context_size(config: dict[str, Any], size: object) -> None:
    found = read_config({"graph_pipeline": {}, **config})
    assert found is not None and found.sequence_parallel == size


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"sequence_parallel_size": 2, "graph_pipeline": {"sequence_parallel": 4}},
            "sequence_parallel_size: 2, and graph_pipeline.sequence_parallel is 4; keep one of them",
        ),
        (
            {"sequence_parallel_size": 2, "sequence_parallel": SHIPPED},
            "sequence_parallel.size: 4, and sequence_parallel_size is 2; keep one of them",
        ),
        (
            {"sequence_parallel_size": 0},
            "sequence_parallel_size: 0 is not valid; write a whole number of at least 1",
        ),
        (
            {"sequence_parallel": {**SHIPPED, "mode": "ring"}},
            'sequence_parallel.mode: "ring" is not possible; write',
        ),
        (
            {"graph_pipeline": {"sequence_parallel": 2, "compile": True}},
            "compile: true does not go with .*sequence_parallel",
        ),
        ({"graph_pipeline": {"sequence_parallel": 0}}, "graph_pipeline.sequence_parallel: 0 is not valid"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        read_config({"graph_pipeline": {}, **config})
    assert "\n" not in str(found.value)


def test_what_has_no_context_ranks_says_so() -> None:
    for changes, words in (
        (
            {"mode": "async"},
            "sequence_parallel: 2 is not possible in mode async, which is planned without context",
        ),
        ({"num_stages": 6}, "sequence_parallel: 2 is not possible where ranks hold several stages"),
    ):
        with pytest.raises(PlanError, match=words):
            make_plan("auto", asked(cut(8), sequence_parallel=2, ranks=4, **changes))


def test_the_api_and_the_command_ask_for_context_sizes() -> None:
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    for text, wanted in (("auto", "auto"), ("4", 4), ("a=2,b.c=4", {"a": 2, "b.c": 4})):
        assert parser.parse_args(["mmt", "--sequence-parallel", text]).keys == {"sequence_parallel": wanted}
    plan = make_plan("auto", asked(cut(2), ranks=4, sequence_parallel=2, num_stages=1))
    assert "(2x2x1)" in api.format_plan(plan)
