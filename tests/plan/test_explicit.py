"""Plans that users write, and what they are told when they are wrong."""

import dataclasses
import itertools
import json

import pytest

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.validate_plan import validate_plan
from tests.plan.graphs import chain, clip, encoder_decoder, make_graph, make_request

TOWERS = {
    "stages": [
        {
            "name": "vision",
            "modules": ["vision_model", "visual_projection"],
            "devices": 2,
            "micro_batch_size": 4,
        },
        {"name": "text", "modules": ["text_model", "text_projection"], "ranks": [3]},
        {"modules": ["*"], "devices": 1},
    ]
}


def test_modules_select_blocks():
    plan = explicit_plan(TOWERS, make_request(clip(), loss_unit=4))
    assert [s.name for s in plan.stages] == ["vision", "text", "head+loss"]
    assert plan.losses == ("head+loss",)
    assert [s.ranks for s in plan.stages] == [(0, 1), (3,), (2,)]
    assert plan.stages[0].blocks == (
        "vision_model.embeddings",
        "vision_model.encoder.layers.0",
        "vision_model.encoder.layers.1",
        "visual_projection",
    )
    assert plan.stages[0].micro_batch_size == 4
    assert plan.stages[2].micro_batch_size == 4  # the coupled loss computes one unit


def test_names_stay_as_given_and_loss_means_what_yields_it():
    named = [TOWERS["stages"][0], TOWERS["stages"][1], {"modules": ["*"], "name": "contrast", "devices": 1}]
    plan = explicit_plan({"stages": named}, make_request(clip(), loss_unit=4))
    assert [s.name for s in plan.stages] == ["vision", "text", "contrast"]
    assert plan.losses == ("contrast",) and plan.stage_index("loss") == 2
    with pytest.raises(
        PlanError,
        match=r"no stage 'head'; its stages are vision, text, contrast \('loss' means 'contrast'\)",
    ):
        plan.stage_index("head")
    named[0] = {**named[0], "name": "loss"}
    with pytest.raises(
        PlanError, match="only the stage that yields the loss is named 'loss'; rename this one"
    ):
        explicit_plan({"stages": named}, make_request(clip(), loss_unit=4))


def test_a_plan_of_an_older_release_names_no_loss():
    """There the stage that yields it was called ``loss``, and `losses` was empty; both are read as they are."""
    request = make_request(clip(), loss_unit=4)
    old = json.loads(dumps(explicit_plan(TOWERS, request)))
    old["value"]["losses"] = []
    old["value"]["stages"][2]["name"] = "loss"
    plan = explicit_plan(old, request)
    assert plan.stages[2].name == "loss" and plan.loss_stages() == (2,) and plan.stage_index("loss") == 2
    old["value"]["losses"] = ["vision"]
    with pytest.raises(PlanError, match=r"yield a loss are \['loss'\], the plan names \['vision'\]"):
        explicit_plan(old, request)


def test_ranks_are_shared_out_where_none_are_given():
    spec = {"stages": [{"name": "a", "modules": ["encoder"]}, {"modules": ["*"]}]}
    plan = explicit_plan(spec, make_request(encoder_decoder(), ranks=4))
    assert plan.num_ranks == 4


def test_a_longer_path_wins_over_a_shorter():
    spec = {
        "stages": [
            {"name": "first", "modules": ["vision_model.embeddings"]},
            {"name": "rest", "modules": ["vision_model", "visual_projection"]},
            {"modules": ["*"]},
        ]
    }
    plan = explicit_plan(spec, make_request(clip(), ranks=3))
    assert {s.name: s.blocks for s in plan.stages}["first"] == ("vision_model.embeddings",)


def test_a_saved_plan_is_read_back():
    request = make_request(clip(), loss_unit=4)
    plan = explicit_plan(TOWERS, request)
    assert explicit_plan(json.loads(dumps(plan)), request) == plan
    with pytest.raises(PlanError, match="made for 4 ranks.*plan again"):
        explicit_plan(json.loads(dumps(plan)), make_request(clip(), ranks=8, loss_unit=4))
    with pytest.raises(PlanError, match="losses of 4 samples; the run has 4, 16 and 8; plan again"):
        explicit_plan(json.loads(dumps(plan)), make_request(clip(), loss_unit=8))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"modules": ["vison_model"]}, {"modules": ["*"]}], 'no module "vison_model".*vision_model'),
        ([{"modules": ["vision_model"]}], r"blocks are in no stage .*add \"\*\""),
        ([{"modules": ["*"]}, {"modules": ["*"]}], "only one can"),
        ([{"module": ["*"]}], r"unknown keys \['module'\]"),
        ([{"modules": ["*"], "devices": 0}], "devices: expected a positive integer"),
        ([{"modules": ["*"], "name": ""}], 'name: expected a text of 1 to 200 characters, found ""$'),
        ([{"modules": ["*"], "name": "x" * 201}], "name: expected a text of 1 to 200 characters"),
        ([{"modules": ["*"], "context": 0}], "context: expected a positive integer, found 0"),
        (
            [{"modules": ["*"], "devices": 4, "context": 3}],
            r"stages\[0\].context: 3, and 4 ranks are no multiple of it; give the stage a multiple of 3 ranks",
        ),
        (
            [{"modules": ["*"], "context": 2}],
            "context: 2, and neither ranks nor devices are given; give the stage a multiple of 2 ranks",
        ),
        ([{"modules": ["*"], "k": 2**31}], "k: 2147483648, and a mini-batch of 16 samples .* give 1 to 16"),
        ([{"modules": ["*"], "devices": 3}], "use 3 ranks and the run has 4"),
        ([{"modules": ["*"], "micro_batch_size": 5}], "does not divide the mini-batch of 16"),
        ([{"modules": ["vision_model", "head"]}, {"modules": ["*"]}], "circle"),
        ([], "expected"),
    ],
)
def test_mistakes_get_one_line(stages, message):
    with pytest.raises(PlanError, match=message) as caught:
        explicit_plan({"stages": stages}, make_request(clip()))
    assert "\n" not in str(caught.value)


def with_positions(graph: BlockGraph, *, degrees: tuple[int, ...] = (2, 3, 4)) -> BlockGraph:
    """Return the graph with tensors of 7 positions along axis 1, but what block ``d`` makes; all but ``b`` divisible."""
    nothing = dict.fromkeys(
        (
            "parameter_bytes",
            "trainable_bytes",
            "forward_sums",
            "forward_sum_bytes",
            "backward_sums",
            "backward_sum_bytes",
        ),
        0,
    )
    divided = (b.name for b in graph.blocks if b.name != "b")
    context = tuple(
        BlockSharding(block=name, degrees=degrees, flop_share=1.0, saved_share=1.0, **nothing)
        for name in divided
    )
    return dataclasses.replace(
        graph,
        tensors={name: dataclasses.replace(spec, shape=(1, 7, 8)) for name, spec in graph.tensors.items()},
        context=context,
        position_axes={name: 1 for name in graph.tensors if not name.startswith("d:")},
    )


def test_stages_of_context_ranks_hold_what_crosses_in_parts_of_the_positions():
    """Block ``b`` is not divided, and what ``d`` makes has no positions: both cross whole."""
    groups = [["a"], ["b0", "b"], ["c"], ["d"], ["e"]]
    graph = with_positions(make_graph([*itertools.pairwise(sum(groups, [])), ("a", "e")], loss="e"))
    sizes = [(2, 2), (2, 2), (1, 1), (4, 4), (3, 3)]
    spec = {
        "stages": [
            {"modules": group, "devices": devices, "context": context}
            for group, (devices, context) in zip(groups, sizes, strict=True)
        ]
    }
    request = make_request(graph, ranks=12)
    plan = explicit_plan(spec, request)
    assert [(stage.context, stage.degree, len(stage.ranks)) for stage in plan.stages] == [
        (2, 1, 2), (2, 1, 2), (1, 1, 1), (4, 1, 4), (3, 1, 3)
    ]  # fmt: skip
    assert [(e.src, e.dst, e.src_shard_axis, e.dst_shard_axis) for e in plan.edges] == [
        (0, 1, 1, 1), (0, 4, 1, 1), (1, 2, None, None), (2, 3, None, 1), (3, 4, None, None)
    ]  # fmt: skip
    assert explicit_plan(json.loads(dumps(plan)), request) == plan
    whole = dataclasses.replace(plan.edges[0], dst_shard_axis=None)
    with pytest.raises(
        PlanError, match="edges differ from the model's between stages .*, in what they send or the axes"
    ):
        validate_plan(dataclasses.replace(plan, edges=(whole, *plan.edges[1:])), graph)
    spec["stages"][4]["context"] = 1  # three data positions then
    assert [e.dst_shard_axis for e in explicit_plan(spec, make_request(graph, ranks=12, mini_batch=12)).edges] == [
        1, None, None, 1, None
    ]  # fmt: skip


def test_a_context_size_that_blocks_do_not_have_is_refused():
    graph = with_positions(make_graph([("a", "c")], loss="c"), degrees=(2, 4))
    spec = {"stages": [{"modules": [name], "devices": 3, "context": 3} for name in ("a", "c")]}
    with pytest.raises(
        PlanError, match=r"a context size of 3 does not divide block 'a', .* by 2, 4, nor any other"
    ):
        explicit_plan(spec, make_request(graph, ranks=6))


def test_a_coupled_stage_needs_whole_units():
    spec = {"stages": [{"modules": ["*"], "micro_batch_size": 8}]}
    with pytest.raises(PlanInfeasible, match="loss units of 4"):
        explicit_plan(spec, make_request(clip(), loss_unit=4))


def test_degrees_that_a_loss_over_all_samples_does_not_allow_come_with_two_ways_on():
    request = make_request(clip(), mini_batch=8, loss_unit=8, ranks=2, data_parallel=2)
    message = 'remove data_parallel 2, or write "train_micro_batch_size_per_gpu": 4 beside graph_pipeline$'
    with pytest.raises(PlanInfeasible, match=message):
        make_plan("uniform", request)
    for ways_on in ({"data_parallel": None}, {"loss_unit": 4}):
        make_plan("uniform", dataclasses.replace(request, **ways_on))


def test_a_saved_plan_is_fitted_to_other_shapes_but_not_to_other_blocks():
    made = make_plan("graphpipe", make_request(chain(6), num_stages=3, mini_batch=12, ranks=3))
    wide = make_graph([(f"layers.{i}", f"layers.{i + 1}") for i in range(5)], bytes_per_sample=64)
    request = make_request(wide, num_stages=3, mini_batch=12, ranks=3)
    fitted = explicit_plan(json.loads(dumps(made)), request)
    assert [stage.blocks for stage in fitted.stages] == [stage.blocks for stage in made.stages]
    assert [edge.bytes_per_sample for edge in fitted.edges] == [64.0, 64.0]
    assert "made for other shapes" in fitted.notes[-1] and fitted.iteration_us > 0.0
    longer = make_request(chain(7), num_stages=3, mini_batch=12, ranks=3)
    with pytest.raises(PlanError, match=r"1 blocks differ, such as 'layers.6'; plan again"):
        explicit_plan(json.loads(dumps(made)), longer)


@pytest.mark.parametrize("name", ["x", "x" * 200])
def test_a_name_may_be_short_or_long(name):
    plan = explicit_plan({"stages": [{"modules": ["*"], "name": name}]}, make_request(chain(2), ranks=1))
    assert [stage.name for stage in plan.stages] == [name]
