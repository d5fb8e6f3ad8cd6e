"""The validator refuses every kind of broken plan, and readers accept what lowering makes programs of, no more."""

import dataclasses
import json
import random

import pytest

from gpp_benchmarks._random_plans import FAMILIES, random_draw
from gpp_plugin import api
from gpp_plugin.errors import GppError, PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.ir.serialize import dumps
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.costs.estimate import finished_plan
from gpp_plugin.plan.explicit_plan import explicit_plan
from gpp_plugin.plan.plan_form import check_form, plan_of_envelope, read_plan, write_plan
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.validate_plan import validate_plan
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from tests import tiers
from tests.plan.graphs import GB, clip, make_cluster, make_graph, make_profile, make_request, with_stage
from tests.plan.test_explicit import TOWERS
from tests.schedule.plans import proven, simple_plan
from tests.tiers import some

GRAPH = clip()
SPEC = {
    "stages": [
        TOWERS["stages"][0],
        {"name": "text", "modules": ["text_model", "text_projection"], "devices": 1, "micro_batch_size": 4},
        {"modules": ["*"], "devices": 1},
    ]
}


def plan_with(**stage_changes: object) -> PipelinePlan:
    """Return the good plan with fields of its first stage changed."""
    plan = explicit_plan(SPEC, make_request(GRAPH, loss_unit=4))
    return with_stage(plan, 0, **stage_changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": ("vision_model.embeddings",)}, "in no stage"),
        ({"blocks": ()}, "has no blocks"),
        ({"blocks": ("nothing",)}, "does not have"),
        ({"name": "text"}, "names repeat"),
        ({"ranks": (0, 0)}, "lists rank 0 twice"),
        ({"ranks": (0, 3)}, r"ranks are 0, 2, 3; they must be 0..2"),
        ({"ranks": (0, 9)}, "must be 0..3"),
        ({"micro_batch_size": 6}, "do not divide the mini-batch"),
        ({"micro_batch_size": 1}, "2 ranks do not divide"),
        ({"tensor": 3}, "a tensor size of 3 does not divide its 2 ranks"),
        ({"in_flight": 0}, "in_flight is 0"),
    ],
)
def test_broken_stages(changes, message):
    with pytest.raises(PlanError, match=message):
        validate_plan(plan_with(**changes), GRAPH)


@pytest.mark.parametrize(
    ("size", "ranks"),
    [(2, 1), (8, 1), (4, 2)],
    ids=["half a unit", "two units, another loss", "half a unit a rank"],
)
def test_a_coupled_stage_computes_one_loss_unit_at_a_time(size, ranks):
    plan = with_stage(plan_with(), 2, micro_batch_size=size, ranks=tuple(range(3, 3 + ranks)))
    with pytest.raises(PlanError, match=f"mixes samples.*set its micro_batch_sizes to {4 * ranks}"):
        validate_plan(plan, GRAPH)


def test_edges_must_be_those_of_the_model():
    plan = plan_with()
    with pytest.raises(PlanError, match="edges differ"):
        validate_plan(dataclasses.replace(plan, edges=plan.edges[:1]), GRAPH)
    edge = dataclasses.replace(plan.edges[0], gradient_tensors=())
    with pytest.raises(PlanError, match="returns gradients"):
        validate_plan(dataclasses.replace(plan, edges=(edge, plan.edges[1])), GRAPH)


def sharded(axis: int, shape: tuple[int, ...]) -> tuple[BlockGraph, PipelinePlan]:
    """Return two stages of one block; the first one's two tensor ranks hold the tensor between them as shards."""
    graph = make_graph([("a", "b")], loss="b")
    tensors = {name: dataclasses.replace(spec, shape=shape) for name, spec in graph.tensors.items()}
    edge = dataclasses.replace(graph.edges[0], src_shard_axis=axis)
    graph = dataclasses.replace(graph, tensors=tensors, edges=(edge,))
    spec = {"stages": [{"modules": ["a"], "devices": 1}, {"modules": ["b"], "devices": 1}]}
    plan = explicit_plan(spec, make_request(graph, ranks=2))
    return graph, with_stage(with_stage(plan, 0, ranks=(0, 1), tensor=2), 1, ranks=(2,))


def test_shards_divide_an_axis_that_is_not_the_samples():
    graph, plan = sharded(1, (1, 4, 3))
    assert [(e.src_shard_axis, e.dst_shard_axis) for e in plan.edges] == [(1, None)]
    validate_plan(plan, graph)
    whole = dataclasses.replace(plan.edges[0], src_shard_axis=None)
    with pytest.raises(PlanError, match="edges differ from the model's between stages"):
        validate_plan(dataclasses.replace(plan, edges=(whole,)), graph)
    graph, plan = sharded(2, (1, 4, 3))
    with pytest.raises(PlanError, match=r"'a' holds 'a:out' of shape \(1, 4, 3\) as 2 shards along axis 2"):
        validate_plan(plan, graph)
    graph, plan = sharded(0, (2, 4, 3))
    with pytest.raises(PlanError, match="axis 0 of 'a:out' holds the samples"):
        validate_plan(plan, graph)


def test_a_plan_of_another_graph():
    with pytest.raises(PlanError, match="plan again"):
        validate_plan(plan_with(), make_graph([("a", "b")]))


def test_memory_names_stage_need_limit_and_knob():
    profile = make_profile(GRAPH, saved=1000.0)
    plan = plan_with()
    vision = plan.stages[0]
    # two samples a rank of four blocks of 1,000 bytes; a byte more is rounding
    need = vision.in_flight * 2 * len(vision.blocks) * 1000
    others = [stage for stage in plan.stages[1:] if stage.in_flight * 4 * len(stage.blocks) * 1000 > need]
    fits, tight = (make_cluster(4, memory=(need - less, need - less, GB, GB)) for less in (1, 2))
    assert others, "only the first stage's ranks are short"
    validate_plan(plan, GRAPH, profile=profile, cluster=fits)
    with pytest.raises(
        PlanInfeasible, match="'vision' needs .* on rank 0 .* 2 bytes too many.*lower micro_batch"
    ):
        validate_plan(plan, GRAPH, profile=profile, cluster=tight)


def test_a_unit_tensor_joins_equal_units():
    graph = make_graph([("a", "b"), ("b", "c")], unit_edges=[("b", "c")], coupled=["b"], loss="c")
    spec = {"stages": [{"name": "x", "modules": ["a", "b"], "devices": 1}, {"modules": ["c"], "devices": 1}]}
    plan = explicit_plan(spec, make_request(graph, ranks=2, loss_unit=4))
    assert [s.micro_batch_size for s in plan.stages] == [4, 4]
    for size in (2, 8):
        with pytest.raises(PlanError, match="one value a loss unit"):
            validate_plan(with_stage(plan, 1, micro_batch_size=size), graph)


def test_too_few_in_flight_to_ever_run_a_backward():
    """A stage of 1-sample micro-batches feeds a skip: it must hold 2 while the middle takes 2 at a time."""
    graph = make_graph([("a", "b"), ("b", "c"), ("a", "c")], loss="c")
    spec = {
        "stages": [
            {"name": "first", "modules": ["a"], "devices": 1, "micro_batch_size": 1},
            {"name": "middle", "modules": ["b"], "devices": 1, "micro_batch_size": 2},
            {"modules": ["c"], "devices": 1, "micro_batch_size": 4},
        ]
    }
    plan = explicit_plan(spec, make_request(graph, ranks=3))
    validate_plan(plan, graph)
    with pytest.raises(PlanError, match=r"wait for each other.*raise in_flight of .*\(now 1\)$"):
        validate_plan(with_stage(plan, 1, in_flight=1), graph)
    validate_plan(with_stage(with_stage(plan, 0, in_flight=4), 1, in_flight=2, k=2), graph)


def test_a_plan_is_played_in_the_order_of_its_own_schedule():
    """Under 1F1B the sink's fifth forward comes between the two backwards that the first stage waits for."""
    for schedule, fits in (("1f1b", False), ("zero_bubble", True), ("greedy", True), ("gpipe", True)):
        plan = simple_plan([8, 4], [(0, 1)], mini_batch=64)
        for index, held in enumerate((8, 16) if schedule == "gpipe" else (2, 4)):
            plan = with_stage(plan, index, schedule=schedule, in_flight=held)
        if fits:
            check_form(plan)
        else:
            with pytest.raises(PlanError, match=r"0F2 waits for 0B0 .* raise in_flight of 's0' \(now 2\)$"):
                check_form(plan)


def lowers(plan: PipelinePlan) -> bool:
    """Return whether programs can be made of a plan, as a runtime makes them."""
    try:
        lower_schedules(plan, build_schedules(plan))
    except GppError:
        return False
    return True


def is_read(plan: PipelinePlan) -> bool:
    """Return whether what is written of a plan is read again, to the same plan."""
    try:
        return plan_of_envelope(json.loads(dumps(plan))) == plan
    except GppError:
        return False


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_is_read_exactly_where_it_can_be_lowered(family):
    """Drawn plans of every schedule, some on shared ranks, some with edges without gradients; then counts at random."""
    refused = 0
    for seed in some(range(45), every=9):
        for shares_ranks in (False, True):
            plan = random_draw(seed, family, may_freeze=False, shares_ranks=shares_ranks).plan
            assert is_read(plan), (seed, shares_ranks)
            rng = random.Random(seed)
            for _ in range(3):
                most = [plan.num_micro_batches(i) for i in range(len(plan.stages))]
                drawn = plan.with_each(
                    in_flight=[rng.randint(1, count + 1) for count in most],
                    k=[rng.randint(1, 3) for _ in most],
                )
                assert is_read(drawn) == lowers(drawn), (
                    seed,
                    shares_ranks,
                    [s.in_flight for s in drawn.stages],
                )
                refused += not lowers(drawn)
    assert refused or family in ("zero_bubble", "mixed")


def test_a_stage_that_only_receives_gradient_edges_runs_backwards():
    """What reads a trained stage's results and sends nothing with a gradient on (indices) returns zeros for it."""
    plan = simple_plan([1] * 3, [(0, 1), (0, 2)], mini_batch=4)
    indices = StageEdge(src=1, dst=2, batch_tensors=("i",))
    plan = dataclasses.replace(plan, edges=(*plan.edges, indices)).with_each(in_flight=[3, 2, 1])
    assert is_read(plan)
    schedules, _ = proven(plan)
    assert [task.kind.value for task in schedules[1].tasks].count("B") == 4


def test_what_would_not_be_read_is_not_written(tmp_path):
    plan = simple_plan([2, 2], [(0, 1)], mini_batch=8).with_each(in_flight=[1, 2])
    for write in (write_plan, api.save):
        with pytest.raises(PlanError, match=r"raise in_flight of 's0' \(now 1\)$"):
            write(plan, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


SCHEDULES = ("1f1b", "2f2b", "3f3b", "gpipe", "greedy", "zero_bubble", "auto")
DEVICES = (2, 4, 8, 16, 32, 64)
LARGEST = ("llava_34b", "vl_72b", "vit22b_llama70b")
"""Models that fit on none of these numbers of devices but the last, with recompute."""


@pytest.mark.parametrize("model", MODELS)
def test_plans_of_library_models_are_read_again_and_planned_again(model, tmp_path):
    """Stages are searched once for all schedules: as they are found, and as many as 8 under ZeRO 2."""
    planner, path = "graphpipe" if tiers.is_whole() else "pipedream", tmp_path / "plan.json"
    most = DEVICES[:3] if model == "amoebanet" else DEVICES  # of 1033 blocks a search takes long
    for devices in DEVICES[-1:] if model in LARGEST else some(most, every=6):
        for zero, stages in enumerate(dict.fromkeys(("auto", min(devices, 8)))):
            options = {"stages": stages, "zero_stage": 2 * zero, "mini_batch": 2 * devices}
            if model in LARGEST:
                options["memory"] = ["recompute"]
            request = api.make_request(model, num_devices=devices, **options)
            try:
                made = make_plan(planner, request)
            except PlanInfeasible:
                continue
            # what recomputes has its order, and may only split backwards
            for schedule in ("auto", "zero_bubble") if model in LARGEST else SCHEDULES:
                try:
                    plan = finished_plan(schedule_plan(made, request, schedule=schedule), request)
                except PlanInfeasible:
                    continue
                where = devices, stages, schedule
                api.save(plan, path)
                assert read_plan(path) == plan and plan.cost is not None, where
                assert explicit_plan(json.loads(path.read_text()), request).stages == plan.stages, where
