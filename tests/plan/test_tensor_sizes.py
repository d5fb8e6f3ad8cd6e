"""Tensor sizes of stages: one cost formula, memory, placement, the search beside brute force, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from gpp_benchmarks._oracle_costs import step_us
from gpp_benchmarks._tensor_oracle import grid_plan
from gpp_benchmarks.plan_quality import check_tensor
from gpp_plugin import api
from gpp_plugin.commands import plan_command
from gpp_plugin.errors import ConfigError, PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.plan import ModelGrid
from gpp_plugin.ir.profile import Profile
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.library.paper_graphs import build_model
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.make import StageDraft, assign_ranks, build_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest, blocks_under, grid_rules
from gpp_plugin.plan.validate_plan import validate_plan
from tests.plan.graphs import chain, make_cluster, make_profile, make_request

PARAMETER = 1000


def divisible(
    num: int, *, degrees: tuple[int, ...] = (2, 4), sums: int = 1, num_bytes: int = 0
) -> BlockGraph:
    """Return a chain of blocks that tensor ranks divide but for a fifth of their operations and parameters."""
    graph = chain(num)
    blocks = tuple(
        dataclasses.replace(block, parameter_bytes=PARAMETER, trainable_bytes=PARAMETER)
        for block in graph.blocks
    )
    sharding = tuple(
        BlockSharding(
            block=block.name,
            degrees=degrees,
            flop_share=0.8,
            parameter_bytes=PARAMETER * 4 // 5,
            trainable_bytes=PARAMETER * 4 // 5,
            saved_share=0.5,
            forward_sums=sums,
            forward_sum_bytes=num_bytes,
            backward_sums=2 * sums,
            backward_sum_bytes=num_bytes,
        )
        for block in blocks
    )
    return dataclasses.replace(graph, blocks=blocks, sharding=sharding)


def with_context(graph: BlockGraph) -> BlockGraph:
    """Return the graph with blocks of 8 heads in 4 groups, whose positions context ranks divide but for a tenth."""
    context = tuple(
        BlockSharding(
            block=block.name,
            degrees=(2, 4, 8),
            flop_share=0.9,
            parameter_bytes=0,
            trainable_bytes=0,
            saved_share=0.75,
            forward_sums=0,
            forward_sum_bytes=0,
            backward_sums=0,
            backward_sum_bytes=0,
            forward_exchanges=4,
            forward_exchange_bytes=8_000,
            backward_exchanges=4,
            backward_exchange_bytes=8_000,
            groups=4,
            group_bytes=2_000,
        )
        for block in graph.blocks
    )
    blocks = tuple(dataclasses.replace(block, saved_bytes=80) for block in graph.blocks)
    return dataclasses.replace(graph, blocks=blocks, context=context)


def profile_of(graph: BlockGraph) -> Profile:
    return make_profile(graph, 100.0, saved=100.0, parameter=PARAMETER)


def request_of(graph: BlockGraph, **changes: object) -> PlanRequest:
    return make_request(graph, profile_of(graph), **{"tensor_parallel": None, **changes})


def test_a_block_takes_its_share_and_the_sums_of_its_tensor_ranks() -> None:
    graph = divisible(2, num_bytes=8_000)
    cluster = make_cluster(4, bandwidth=1e9, latency=3.0)
    costs = CostModel(graph, profile_of(graph), cluster)
    # two samples on two ranks: 200 x (0.2 + 0.8 / 2) us, a ring of 2 steps of 3 us, 16,000 bytes at 1,000 a us
    forward, backward = costs.at_grid(ModelGrid(tensor=2)).stage_times([0], 2.0)
    assert forward == pytest.approx(120.0 + 2 * 3.0 + 16.0)
    assert backward == pytest.approx(240.0 + 2 * 2 * 3.0 + 16.0)
    whole = sum(costs.at_grid(ModelGrid(tensor=2)).split_times([0], 2.0))
    assert whole == pytest.approx(backward)
    # half of a backward's 240 us is of weights: a tenth of these hides 12 us of the sums, half all 28
    for share, hidden in ((0.1, 12.0), (0.5, 28.0)):
        own = dataclasses.replace(graph.sharding[0], beside_share=share)
        beside = dataclasses.replace(graph, sharding=(own, *graph.sharding[1:]))
        some = CostModel(beside, profile_of(beside), cluster).at_grid(ModelGrid(tensor=2))
        assert some.stage_times([0], 2.0) == pytest.approx((forward, backward - hidden))
        assert some.hidden_sums(2.0)[0] == pytest.approx(hidden)
        assert sum(some.split_times([0], 2.0)) == pytest.approx(whole), (
            "a first part makes no weight gradient"
        )
    # parameters, gradients 1000 x (0.2 + 0.8 / 4), saved 100 x (0.5 + 0.5 / 4) a sample
    assert (
        costs.at_grid(ModelGrid(tensor=4)).stage_memory([0], degree=1, local=1, in_flight=2)
        == 2 * 400 + 2 * 62.5
    )
    assert costs.stage_memory([0], degree=1, local=1, in_flight=2) == 2 * 1000 + 2 * 100


def test_blocks_without_sharding_cost_what_they_do_on_one_rank() -> None:
    graph = chain(2)
    costs = CostModel(graph, profile_of(graph), make_cluster(4))
    assert costs.at_grid(ModelGrid(tensor=2)) is costs
    mixed = dataclasses.replace(divisible(2), sharding=divisible(2).sharding[:1])
    costs = CostModel(mixed, profile_of(mixed), make_cluster(4))
    assert costs.at_grid(ModelGrid(tensor=2)).stage_times([1], 1.0) == costs.stage_times([1], 1.0)


def test_tensor_ranks_of_a_data_position_stay_in_a_node() -> None:
    def draft(degree: int, tensor: int) -> StageDraft:
        return StageDraft(blocks=("a",), degree=degree, micro_batch_size=degree, tensor=tensor)

    assert assign_ranks([draft(2, 2), draft(1, 4)]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    # in their order ranks 3 and 4 of two nodes of 4 would sum together
    assert assign_ranks([draft(1, 1), draft(1, 4), draft(1, 2), draft(1, 1)]) == [
        (6,),
        (0, 1, 2, 3),
        (4, 5),
        (7,),
    ]


@pytest.mark.parametrize(("tensor", "words"), [(8, "does not divide block"), (4, "can be divided")])
def test_the_validator_refuses_sizes_that_blocks_cannot_have(tensor: int, words: str) -> None:
    graph = divisible(2)
    if tensor == 4:
        graph = dataclasses.replace(graph, sharding=graph.sharding[:1])
    request = request_of(graph, ranks=2 * tensor)
    names = [block.name for block in graph.blocks]
    drafts = [StageDraft(blocks=(name,), degree=1, micro_batch_size=1, tensor=tensor) for name in names]
    with pytest.raises(PlanError, match=words):
        validate_plan(build_plan(request, drafts, planner="by hand"), graph)


@pytest.mark.parametrize("seed", range(40))
def test_tensor_sizes_beside_brute_force(seed: int) -> None:
    row = check_tensor(seed)
    assert (row["us"] is None) == (row["best_us"] is None)
    assert row["us"] is None or row["ratio"] <= 1.05
    if row["whole_us"] is not None:
        assert row["us"] <= row["whole_us"] * (1 + 1e-9)


@pytest.mark.parametrize(
    "grids",
    [
        ((1, 1, 2), (2, 1, 1)),
        ((2, 1, 1), (1, 1, 2)),
        ((1, 1, 4), (1, 1, 4)),
        ((1, 2, 1), (2, 1, 1)),
        ((1, 2, 2), (2, 2, 1)),
    ],
)
def test_the_oracle_of_grids_takes_a_step_as_long_as_the_planner_does(
    grids: tuple[tuple[int, int, int], ...],
) -> None:
    graph = with_context(divisible(4, num_bytes=800))
    cluster = make_cluster(8, bandwidth=1e8, latency=2.0)
    request = request_of(graph, ranks=8, cluster=cluster, micro_batch_sizes={"*": 2})
    names = tuple(block.name for block in graph.blocks)
    groups = names[:2], names[2:]
    drafts = [
        StageDraft(blocks=group, degree=degree, micro_batch_size=2, context=context, tensor=tensor)
        for group, (degree, context, tensor) in zip(groups, grids, strict=True)
    ]
    costs = CostModel(graph, request.profile, cluster)
    plan = build_plan(request, drafts, planner="by hand", costs=costs)
    theirs = grid_plan(request, groups, grids)
    assert [stage.ranks for stage in plan.stages] == [stage.ranks for stage in theirs.stages]
    assert evaluate_us(plan, costs) == pytest.approx(step_us(theirs, cluster))


def test_one_micro_batch_of_one_sample_runs_on_tensor_ranks() -> None:
    request = request_of(divisible(1, sums=0), ranks=4, mini_batch=1)
    plan = make_plan("auto", request)
    assert [stage.tensor for stage in plan.stages] == [4]
    assert plan.iteration_us == pytest.approx(300.0 * (0.2 + 0.8 / 4), rel=1e-5)
    assert any(
        note == f"tensor_parallel auto: {plan.stages[0].name} 4; 1 of 1 blocks can be divided"
        for note in plan.notes
    )


def test_without_the_key_plans_are_as_of_a_graph_that_knows_no_sharding() -> None:
    graph = divisible(4)
    plain = make_plan("auto", request_of(dataclasses.replace(graph, sharding=()), tensor_parallel=1))
    plan = make_plan("auto", request_of(graph, tensor_parallel=1))
    assert dataclasses.replace(plan, graph=plain.graph) == plain


def test_memory_asks_for_tensor_ranks_where_nothing_else_fits() -> None:
    graph = divisible(1)
    tight = request_of(graph, ranks=4, mini_batch=4, memory_limit_bytes=1_500)
    with pytest.raises(PlanInfeasible):
        make_plan("auto", dataclasses.replace(tight, tensor_parallel=1))
    assert make_plan("auto", tight).stages[0].tensor in (2, 4)
    assert make_plan("graphpipe", tight).stages[0].tensor in (2, 4)


def test_recomputing_fits_stages_on_tensor_ranks() -> None:
    model = build_model("transformer", layers=4, hidden=256, heads=4, inner=1024, length=64)
    asked = make_request(
        model.graph,
        make_profile(model.graph, 100.0, saved=float(model.graph.blocks[0].saved_bytes)),
        ranks=2,
        mini_batch=2,
        tensor_parallel=2,
        num_stages=1,
        memory_optimization=("recompute",),
    )
    free = make_plan("graphpipe", asked)
    tight = make_plan(
        "graphpipe", dataclasses.replace(asked, memory_limit_bytes=free.stages[0].memory_bytes * 3 // 5)
    )
    assert [stage.tensor for stage in tight.stages] == [2]
    assert tight.stages[0].memory is not None and tight.stages[0].memory.recomputed


def test_sizes_by_module_are_of_those_stages_alone() -> None:
    graph = divisible(4)
    asked = {"layers.2": 2, "layers.3": 2, "layers.0": 1, "layers.1": 1}
    plan = make_plan("auto", request_of(graph, ranks=4, tensor_parallel=asked))
    assert len(plan.stages) > 1
    for stage in plan.stages:
        assert {asked[block] for block in stage.blocks} == {stage.tensor}


def test_a_module_may_be_given_by_the_end_of_its_path() -> None:
    graph = chain(4)
    names = {block.name: f"model.tower.{block.name}" for block in graph.blocks}
    blocks = tuple(dataclasses.replace(block, name=names[block.name]) for block in graph.blocks)
    graph = dataclasses.replace(graph, blocks=blocks, edges=())
    assert blocks_under(graph, "tower") == blocks_under(graph, "model") == list(names.values())
    assert blocks_under(graph, "layers.1") == ["model.tower.layers.1"]
    two = (*blocks, dataclasses.replace(blocks[0], name="other.layers.0"))
    with pytest.raises(
        PlanError, match=r"'layers' is the end of 2 modules' paths, model.tower.layers, other.layers"
    ):
        blocks_under(dataclasses.replace(graph, blocks=two), "layers")


@pytest.mark.parametrize("planner", ["auto", "graphpipe", "piper"])
@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"layers.1": 2}, [1, 2]),  # in two stages, beside layers.0 or layers.2
        ({"layers.0": 2, "layers.2": 4}, [2, 4]),
    ],
)
def test_what_is_not_listed_goes_with_its_stage(
    planner: str, asked: dict[str, int], sizes: list[int]
) -> None:
    graph = divisible(3)
    # layers.1 is whole on four ranks
    sharding = tuple(
        dataclasses.replace(each, degrees=(2,)) if each.block == "layers.1" else each
        for each in graph.sharding
    )
    graph = dataclasses.replace(graph, sharding=sharding)
    stages = None if planner == "piper" else 2  # which chooses their number itself
    request = request_of(graph, ranks=sum(sizes), tensor_parallel=asked, num_stages=stages, mini_batch=3)
    plan = make_plan(planner, dataclasses.replace(request, data_parallel=1))
    assert stages is None or sorted(stage.tensor for stage in plan.stages) == sizes
    for stage in plan.stages:
        listed = {asked[block] for block in stage.blocks if block in asked}
        assert listed == ({stage.tensor} if stage.tensor > 1 else set())
    validate_plan(plan, graph, profile=request.profile)


@pytest.mark.parametrize(("stages", "ranks", "sizes"), [(2, 3, [1, 2]), (3, 4, [1, 1, 2]), (3, 5, [1, 2, 2])])
def test_a_number_of_stages_is_met_where_the_map_leaves_few_cuts(
    stages: int, ranks: int, sizes: list[int]
) -> None:
    # Two even stages of six layers would both hold listed ones, and need four ranks.
    graph = divisible(6)
    asked = {f"layers.{n}": 2 for n in range(2, 6)}
    plan = make_plan("auto", request_of(graph, ranks=ranks, num_stages=stages, tensor_parallel=asked))
    assert sorted(stage.tensor for stage in plan.stages) == sizes
    validate_plan(plan, graph, profile=profile_of(graph))


def test_what_lies_between_blocks_of_a_size_goes_with_them() -> None:
    # embed (2) and a tower of two blocks (1) -> merge -> layers (2): on three ranks the tower is the one stage of size 1.
    graph = divisible(6)
    names = ("embed", "tower.0", "tower.1", "merge", "layers.0", "layers.1")
    ends = [(0, 3), (1, 2), (2, 3), (3, 4), (4, 5)]
    renamed = dict(zip((block.name for block in graph.blocks), names, strict=True))
    graph = dataclasses.replace(
        graph,
        blocks=tuple(dataclasses.replace(block, name=renamed[block.name]) for block in graph.blocks),
        sharding=tuple(
            dataclasses.replace(each, block=renamed[each.block])
            for each in graph.sharding
            if renamed[each.block] != "merge"
        ),
        edges=tuple(dataclasses.replace(graph.edges[0], src=names[a], dst=names[b]) for a, b in ends),
    )
    asked = {"embed": 2, "layers": 2}
    plan = make_plan("auto", request_of(graph, ranks=3, num_stages=2, tensor_parallel=asked, data_parallel=1))
    by_size = {stage.tensor: set(stage.blocks) for stage in plan.stages}
    assert by_size == {1: {"tower.0", "tower.1"}, 2: {"embed", "merge", "layers.0", "layers.1"}}


def test_blocks_of_unlike_sizes_share_no_stage() -> None:
    request = request_of(divisible(2), ranks=4, num_stages=1, tensor_parallel={"layers.0": 2, "layers.1": 4})
    with pytest.raises(PlanInfeasible, match="4 ranks in 1 stages cannot"):
        make_plan("auto", request)
    rules = grid_rules(
        request_of(divisible(4), ranks=4, tensor_parallel={"layers": 2, "layers.1": 1, "layers.2": 4})
    )
    assert rules.allowed(["layers.0", "layers.3"]) == [(1, 2)] and rules.allowed(["layers.2"]) == [(1, 4)]
    assert rules.allowed(["layers.1"]) == [(1, 1)]
    assert rules.allowed(["layers.0", "layers.1"]) == rules.allowed(["layers.0", "layers.2"]) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (3, r"tensor_parallel: 3 does not divide .* block 'layers.0'; give 1, 2, 4"),
        (8, "tensor_parallel: 8 is more than the 4 ranks there are; give 1 to 4"),
        ({"layer.0": 2}, r"no module 'layer.0' in the model; the nearest are layers.0"),
        ({"layers.0": 3}, r"tensor_parallel.layers.0: 3 does not divide"),
        (
            {"layers.3": 2},
            r"tensor_parallel.layers.3: 2, and nothing of block 'layers.3' can be divided",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(asked: int | dict[str, int], words: str) -> None:
    graph = divisible(4)
    graph = dataclasses.replace(graph, sharding=graph.sharding[:3])
    with pytest.raises(PlanError, match=words):
        make_plan("auto", request_of(graph, tensor_parallel=asked))


def test_a_planner_without_tensor_ranks_says_so() -> None:
    graph = divisible(4)
    with pytest.raises(PlanError, match="planner 'pipedream' gave stage .* use one of auto, graphpipe"):
        make_plan("pipedream", request_of(graph, tensor_parallel=2))
    plan = make_plan("pipedream", request_of(graph))
    assert "tensor_parallel auto: 1, as planner pipedream supports no tensor ranks" in plan.notes
    plan = make_plan("auto", request_of(chain(4)))
    assert any("none of the blocks can be divided" in note for note in plan.notes)
    why = {"layers.1": "aten.cumsum.default (c) takes a whole"}
    plan = make_plan("auto", request_of(dataclasses.replace(chain(4), undivided=why)))
    assert any("divided among ranks: 'layers.1': aten.cumsum.default (c)" in note for note in plan.notes)
    with pytest.raises(
        PlanError, match=r"nothing of block 'layers.1' can be divided .* \(aten.cumsum.default"
    ):
        graph = dataclasses.replace(divisible(4), sharding=divisible(4).sharding[:1], undivided=why)
        make_plan("auto", request_of(graph, tensor_parallel={"layers.1": 2}))


def test_a_saved_plan_is_refused_where_nothing_can_be_divided() -> None:
    graph = divisible(4)
    plan = make_plan("auto", request_of(graph, tensor_parallel=2))
    spec = json.loads(dumps(plan))
    assert explicit_plan(spec, request_of(graph)).stages == plan.stages
    whole = request_of(dataclasses.replace(graph, sharding=()))
    name = plan.stages[0].name
    with pytest.raises(
        PlanError, match=f"stage '{name}' has a tensor size of 2 and nothing of model .* divided"
    ):
        explicit_plan(spec, whole)


def test_ranks_of_several_stages_have_no_tensor_ranks() -> None:
    with pytest.raises(PlanError, match="2 is not possible where ranks hold several stages"):
        make_plan("auto", request_of(divisible(4), ranks=2, tensor_parallel=2, virtual_stages=2))
    with pytest.raises(PlanError, match="is planned without tensor ranks"):
        make_plan("auto", request_of(divisible(4), ranks=2, tensor_parallel=2, mode="async"))
    plan = make_plan("auto", request_of(divisible(4), ranks=2, mode="async", micro_batch_sizes={"*": 2}))
    assert {stage.tensor for stage in plan.stages} == {1}


@pytest.mark.parametrize(("name", "divided"), [("transformer", 4), ("mmt", 4), ("gpt2_345m", 4), ("dlrm", 0)])
def test_the_library_knows_what_its_layers_divide(name: str, divided: int) -> None:
    sizes = (
        {} if name == "dlrm" else {"granularity": "layer"} | ({} if name == "gpt2_345m" else {"layers": 4})
    )
    graph = build_model(name, **sizes).graph
    assert len(graph.sharding) >= divided and (divided or not graph.sharding)
    for each in graph.sharding:
        block = graph.block(each.block)
        assert each.degrees == (2, 4, 8) and 0 < each.parameter_bytes <= block.parameter_bytes
        assert 0 <= each.saved_share <= 1
    rules = grid_rules(request_of(graph, ranks=4))
    assert rules.grids == (((1, 1), (1, 2), (1, 4)) if divided else ((1, 1),))


def test_piper_chooses_both_degrees_as_in_its_paper() -> None:
    graph = divisible(3)
    request = request_of(graph, ranks=4, mini_batch=2, micro_batch_sizes={"*": 1})
    plan = make_plan("piper", request)
    assert {stage.degree for stage in plan.stages} == {1} and plan.num_ranks == 4
    assert any(stage.tensor > 1 for stage in plan.stages)
    forced = make_plan("piper", request_of(graph, ranks=4, tensor_parallel=2))
    assert {stage.tensor for stage in forced.stages} == {2}


def test_the_api_and_the_command_ask_for_sizes() -> None:
    sizes = {"layers": 2, "hidden": 64, "inner": 128, "heads": 4, "length": 16}
    request = api.make_request(
        "transformer", num_devices=2, sizes=sizes, mini_batch=1, tensor_parallel={"layers": 2}
    )
    assert request.tensor_parallel == {"layers": 2}
    plan = api.plan_for(request)
    assert "ranks 0-1 (1x2)" in api.format_plan(plan)
    with pytest.raises(ConfigError, match='"most" is not valid; give "auto", a whole'):
        api.make_request("transformer", num_devices=2, sizes=sizes, tensor_parallel="most")
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    for text, asked in (("auto", "auto"), ("4", 4), ("a=2,b.c=4", {"a": 2, "b.c": 4})):
        assert parser.parse_args(["mmt", "--tensor-parallel", text]).keys == {"tensor_parallel": asked}
    with pytest.raises(SystemExit):
        parser.parse_args(["mmt", "--tensor-parallel", "a=none"])
