"""What stages are called, and what a user may call them."""

import random

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.plan.explicit_plan import explicit_plan, names_a_stage, resize_stages, stage_sizes
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.stage_names import StageNamer, find_stage, name_stages
from tests.plan.graphs import chain, make_graph, make_profile, make_request

LLAVA = [
    "model.language_model.embed_tokens", "model.vision_tower.embeddings", "model.vision_tower.encoder.layers.0",
    "model.vision_tower.encoder.layers.1", "model.multi_modal_projector", "model",
    *(f"model.language_model.layers.{i}" for i in range(4)), "model.language_model.norm", "lm_head",
]  # fmt: skip
CLIP = [
    "vision_model.embeddings", "vision_model.encoder.layers.0", "vision_model.encoder.layers.1",
    "vision_model.post_layernorm", "visual_projection", "text_model.embeddings", "text_model.encoder.layers.0",
    "text_model.encoder.layers.1", "text_projection", "loss",
]  # fmt: skip
OPERATORS = [
    "wte:embedding", "h.0.attn:view", "h.0.attn:softmax", "h.0:add", "h.1.attn:view_1", "h.1:add_1", "head:linear",
    "view_2", "cross_entropy_loss",
]  # fmt: skip
WRAPPED = [
    "net.stem",
    "net.blocks.0",
    "net.blocks.2",
    "net.blocks.4",
    "net.blocks.6",
    "net",
    "net.head",
    "forward",
]
SEQUENTIAL = ["0", "1", "2", "3"]
WIDE = [*(f"branch{b}.{i}" for b in range(6) for i in range(2)), "top", "loss"]


@pytest.mark.parametrize(
    ("blocks", "loss", "held", "name"),
    [
        (LLAVA, "lm_head", LLAVA[8:], "language_model.2-3+lm_head+loss"),
        (LLAVA, "lm_head", LLAVA[:3], "language_model.embed_tokens+vision_tower.0"),
        (LLAVA, "lm_head", LLAVA[3:8], "vision_tower.1+multi_modal_projector+model.forward+language_model.0-1"),
        (LLAVA, "lm_head", LLAVA, "language_model+vision_tower+2_more+lm_head+loss"),
        (CLIP, "loss", CLIP[:2], "vision_model.0"),
        (CLIP, "loss", CLIP[2:5], "vision_model.1+visual_projection"),
        (CLIP, "loss", CLIP[3:5], "vision_model.post_layernorm+visual_projection"),
        (CLIP, "loss", CLIP[-1:], "loss"),
        (CLIP, None, CLIP[-1:], "loss"),
        (OPERATORS, "cross_entropy_loss", OPERATORS[:3], "wte+h.0"),  # cut inside layer 0: both names have it
        (OPERATORS, "cross_entropy_loss", OPERATORS[3:6], "h.0-1"),
        (OPERATORS, "cross_entropy_loss", OPERATORS[6:], "head+loss"),
        (OPERATORS, "cross_entropy_loss", OPERATORS[7:8], "forward"),
        (WRAPPED, None, WRAPPED[:3], "stem+blocks.0-2"),
        (WRAPPED, None, [WRAPPED[1], WRAPPED[3], WRAPPED[4]], "blocks.0+blocks.4-6"),
        (WRAPPED, None, WRAPPED[1:5], "blocks"),
        (SEQUENTIAL, "3", SEQUENTIAL[:2], "0-1"),
        (SEQUENTIAL, "3", SEQUENTIAL[2:], "2-3+loss"),
        (WIDE, "loss", WIDE, "branch0+branch1+4_more+top+loss"),
        (["layers.0#2", "layers.0", "layers.1"], None, ["layers.0#2", "layers.0"], "layers.0"),
        (["a.x.layers.0", "a.y.layers.0", "x"], None, ["a.x.layers.0"], "a.x"),  # x alone would be two
        (["head"], "head", ["head"], "head+loss"),
    ],
)  # fmt: skip
def test_a_name_tells_what_is_inside(blocks, loss, held, name):
    namer = StageNamer(blocks, [] if loss is None else [loss])
    assert namer.name(held) == namer.name(reversed(held)) == name
    assert namer.may_name(name)


@pytest.mark.parametrize("blocks", [LLAVA, CLIP, OPERATORS, WRAPPED, SEQUENTIAL, WIDE])
def test_names_are_unique_whatever_the_stages(blocks):
    rng = random.Random(0)
    graph = make_graph([], names=blocks, loss=blocks[-1])
    for _ in range(200):
        groups = {}
        for block in blocks:
            groups.setdefault(rng.randrange(5), []).append(block)
        names = name_stages(graph, list(groups.values()))
        assert len(set(names)) == len(names)
        assert all(len(name.split("+")) <= 5 for name in names)
        assert sum(name.endswith("loss") or "loss#" in name for name in names) == 1


def test_given_names_stay_and_are_not_taken_by_others():
    graph = make_graph([], names=["a.0", "a.1", "b"])
    assert name_stages(graph, [["a.0"], ["a.1"], ["b"]], [None, "a.0", "+ é/"]) == ["a.0#2", "a.0", "+ é/"]


def test_a_stage_is_meant_by_its_name_by_loss_and_by_a_part_of_its_name():
    graph = make_graph(list(zip(CLIP, CLIP[1:], strict=False)), loss="loss")
    request = make_request(graph, ranks=2, mini_batch=12)
    plan = explicit_plan(
        {"stages": [{"modules": ["vision_model", "visual_projection"]}, {"modules": ["*"]}]}, request
    )
    assert [stage.name for stage in plan.stages] == [
        "vision_model+visual_projection", "text_model+text_projection+loss",
    ]  # fmt: skip
    for key in ("loss", "text_model.1", "text_projection", plan.stages[1].name):
        assert find_stage(plan, graph, key) == 1
    assert stage_sizes(plan, graph, {"loss": 4, "text_model.0": 4, "vision_model.1": 2}) == {1: 4, 0: 2}
    with pytest.raises(
        PlanError, match=r"'text_model.0' sets 2 samples at a time for stage 'text_model\+text_proj"
    ):
        stage_sizes(plan, graph, {"loss": 4, "text_model.0": 2})


def test_a_part_of_several_names_is_refused():
    graph = chain(6)
    plan = make_plan("uniform", make_request(graph, ranks=3, num_stages=3, mini_batch=12))
    assert find_stage(plan, graph, "layers.3") == 1
    with pytest.raises(
        PlanError, match="'layers' is in stages 'layers.0-1' and 'layers.2-3' and 'layers.4-5'; give"
    ):
        find_stage(plan, graph, "layers")
    with pytest.raises(
        PlanError, match="no stage 'layers.7'; its stages are layers.0-1, layers.2-3, layers.4-5 "
    ):
        find_stage(plan, graph, "layers.7")


def request_of(graph, **options):
    return make_request(graph, make_profile(graph), num_ranks=3, mini_batch=12, num_stages=3, **options)


def test_which_keys_name_stages():
    graph = chain(6, "tower.layers.")
    assert not names_a_stage(graph, "tower")
    assert not names_a_stage(graph, "tower.layers.0")
    assert not names_a_stage(graph, "*")
    assert names_a_stage(graph, "tower.0")
    with pytest.raises(PlanError, match=r"no module or stage 'tovver' in the model; the nearest are tower"):
        names_a_stage(graph, "tovver")
    assert names_a_stage(graph, "tower.0-1") and names_a_stage(graph, "tower.2-5#2")
    with pytest.raises(PlanError, match=r"no module or stage 'tovver.0' in the model; the nearest are tower"):
        names_a_stage(graph, "tovver.0")
    with pytest.raises(PlanError, match=r"no module or stage 'tower.0-1\+heat' in the model"):
        names_a_stage(graph, "tower.0-1+heat")


def test_a_numbered_stage_takes_its_size():
    graph = chain(6)
    request = request_of(graph, micro_batch_sizes={"*": 2})
    plan = make_plan("graphpipe", request)
    assert [stage.name for stage in plan.stages] == ["layers.0-1", "layers.2-3", "layers.4-5"]
    resized = resize_stages(plan, request, {"layers.2-3": 4})
    assert [stage.micro_batch_size for stage in resized.stages] == [2, 4, 2]
    assert resized.stages[1].forward_us == 2 * plan.stages[1].forward_us
    assert [s.in_flight for s in resized.stages] != [s.in_flight for s in plan.stages]


def test_what_a_stage_cannot_take_is_refused():
    graph = make_graph([("a.0", "a.1"), ("a.1", "b.0"), ("b.0", "loss")], loss="loss", coupled=["loss"])
    request = request_of(graph, micro_batch_sizes={"a": 4, "b": 4}, loss_unit=4)
    plan = make_plan("graphpipe", request)
    listed = ", ".join(stage.name for stage in plan.stages)
    with pytest.raises(PlanError) as caught:
        resize_stages(plan, request, {"c.9": 4})
    assert (
        str(caught.value) == f"the plan has no stage 'c.9'; its stages are {listed} ('loss' means 'b+loss')"
    )
    with pytest.raises(PlanError, match="it mixes samples and takes 4 at a time"):
        resize_stages(plan, request, {"loss": 2})
