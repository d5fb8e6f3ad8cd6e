"""The papers' models as analytic graphs."""

import pytest
import torch

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.compare.compared_models import MODULES, make_batch
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockSharding
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.library.analytic_models import gemm_us, in_dtype, profile_model
from gpp_plugin.library.paper_graphs import MODELS, build_model
from gpp_plugin.plan.cluster_files import read_cluster
from tests.capture.graphs import captured
from tests.models import TEXT_LENGTH

V100 = read_cluster("summit").devices[0]


@pytest.mark.parametrize(
    ("name", "blocks", "millions"),
    [
        ("mmt", 33, 403), ("dlrm", 4 * 7 + 7 + 5, 1269), ("candle_uno", 29, 470), ("gpt2_345m", 50, 406),
        # tower, projector, embedding, layers, head
        ("llava_34b", 24 + 1 + 1 + 60 + 1, 34_700), ("vl_72b", 32 + 1 + 1 + 80 + 1, 73_300),
        ("vit22b_llama70b", 48 + 1 + 1 + 80 + 1, 92_400), ("omni_7b", 2 * 33 + 34, 8_000), ("two_towers", 83, 15_900),
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_papers(name, blocks, millions):
    """GPT-2's tied head is held once more, by its own stage: 345 M + 51 M + embeddings of positions."""
    model = build_model(name)
    assert len(model.graph.blocks) == blocks
    assert sum(s.parameters for s in model.specs) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_costs_grow_with_the_samples_and_small_batches_are_less_efficient(name):
    model = build_model(name)
    for cost in profile_model(model, V100, largest=16).costs:
        assert list(cost.forward_us) == sorted(cost.forward_us)
        assert cost.forward_us[0] >= cost.forward_us[-1] / 16 * 0.999


def test_bytes_are_those_of_the_type_that_is_trained_in():
    model = build_model("mmt")
    full, half = (profile_model(model, V100, largest=4, dtype=dtype) for dtype in ("fp32", "bf16"))
    for a, b in zip(full.costs, half.costs, strict=True):
        assert b.parameter_bytes == a.parameter_bytes // 2 and b.gradient_bytes == a.gradient_bytes // 2
        assert b.saved_bytes_per_sample == a.saved_bytes_per_sample / 2
        assert b.optimizer_bytes * 2 == a.optimizer_bytes * 3, "Adam's moments in fp32, and weights in fp32"
        assert b.forward_us[-1] < a.forward_us[-1], "fewer bytes are moved"
    graph = in_dtype(model.graph, "bf16")
    assert half.graph == fingerprint(graph)
    assert {spec.dtype for spec in graph.tensors.values()} == {"bfloat16"}
    assert sum(t.bytes for t in graph.saved) * 2 == sum(t.bytes for t in model.graph.saved)


def test_encoders_are_branches_that_meet_in_the_embedding():
    graph = build_model("omni_7b").graph
    before = {edge.src for edge in graph.edges if edge.dst == "embedding"}
    assert before == {"vision.projector", "audio.projector"}
    assert {edge.src for edge in build_model("llava_34b").graph.edges if edge.dst == "embedding"} == {
        "vision.projector"
    }
    assert {edge.src for edge in build_model("two_towers").graph.edges if edge.dst == "head"} == {
        "vision.projection", "text.projection",
    }  # fmt: skip


def test_few_tiles_leave_multiprocessors_idle():
    one = gemm_us(V100, 128, 1024, 1024)
    assert gemm_us(V100, 1024, 1024, 1024) < 8 * one


def test_sublayers_add_up_to_layers():
    layers, parts = build_model("mmt"), build_model("mmt", granularity="sub_layer")
    assert len(parts.graph.blocks) == 65
    assert sum(s.parameters for s in layers.specs) == sum(s.parameters for s in parts.specs)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("mtm", {}, "did you mean 'mmt'"),
        ("mmt", {"branch": 2}, "has no size 'branch'; its sizes are branches"),
        ("mmt", {"branches": 0}, "branches is 0; give a whole number of at least 1"),
        ("mmt", {"granularity": "op"}, "choose layer or sub_layer"),
    ],
)
def test_mistakes_get_one_line(name, sizes, message):
    with pytest.raises(PlanError, match=message):
        build_model(name, **sizes)


def test_sizes_are_those_of_the_published_networks():
    """DawnPiper trains 28 M parameters; torchgpipe's AmoebaNet-D (18, 208) has 81.5 M without its classifier."""
    model = build_model("amoebanet")
    assert len(model.graph.blocks) > 1000
    assert sum(s.parameters for s in model.specs) / 1e6 == pytest.approx(28, rel=0.02)
    large = build_model("amoebanet", filters=208)
    assert sum(s.parameters for s in large.specs) / 1e6 == pytest.approx(81.5, rel=0.01)


def test_order_is_topological_and_what_is_kept_adds_up():
    graph = build_model("amoebanet", layers=3, filters=16, image=64).graph
    position = {block.name: i for i, block in enumerate(graph.blocks)}
    assert all(position[edge.src] < position[edge.dst] for edge in graph.edges)
    charged = dict.fromkeys(position, 0)
    for tensor in graph.saved:
        charged[tensor.kept_by[0]] += tensor.bytes
        assert all(position[tensor.made_by] <= position[keeper] for keeper in tensor.kept_by)
    assert charged == {block.name: block.saved_bytes for block in graph.blocks}
    shared = [tensor for tensor in graph.saved if len(tensor.kept_by) > 1]
    assert shared, "a cell's input is kept by several operators and counted once"


@pytest.mark.parametrize("sizes", [{"layers": 4}, {"filters": 20}])
def test_odd_sizes_get_one_line(sizes):
    with pytest.raises(PlanError, match="multiple of 3"):
        build_model("amoebanet", **sizes)


SMALL = {
    "mmt": {"branches": 2, "layers": 2, "hidden": 16, "heads": 2, "inner": 32},
    "candle_uno": {"branches": 3, "layers": 2, "hidden": 16},
    "two_branch": {"layers": 1, "hidden": 16, "heads": 2, "inner": 16},
    "dlrm": {
        "dense": 2, "sparse": 2, "layers": 2, "hidden": 16, "top_layers": 2, "entries": 50, "embedding": 4, "bag": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_parameters_and_blocks_are_those_of_the_analytic_graph(name):
    model, graph = MODULES[name](**SMALL[name]), build_model(name, **SMALL[name])
    count = sum(p.numel() for p in model.parameters())
    assert sum(s.parameters for s in graph.specs) == pytest.approx(count, rel=0.05)

    modules = {path for path, _ in model.named_modules()}
    assert {block.name for block in graph.graph.blocks} <= modules


def test_other_models_need_their_own_batch():
    with pytest.raises(ValueError, match="not a model of this file"):
        make_batch(torch.nn.Linear(1, 1), 2)


SENT = [
    f"{when}_{what}"
    for what in ("sum_bytes", "sums", "gather_bytes", "gathers", "exchange_bytes", "exchanges")
    for when in ("forward", "backward")
] + ["beside_gathers", "beside_gather_bytes"]
"""Of a `BlockSharding`, what ranks send each other; bytes are of a sample here."""


def sent_of(each: BlockSharding, num_samples: int) -> dict[str, float]:
    return {name: getattr(each, name) / (num_samples if name.endswith("bytes") else 1) for name in SENT}


def test_tensor_ranks_divide_what_they_divide_of_the_captured_model():
    """Begun whole and on parts, gathered for a head that pools: block by block."""
    sizes = {**SMALL["mmt"], "hidden": 32, "inner": 96, "layers": 3}
    model = MODULES["mmt"](**sizes)
    traced = coarsen(capture_model(model, make_batch(model, 3, length=10)))
    graph = build_model("mmt", **sizes, length=10).graph
    assert {own.block for own in graph.sharding} == {own.block for own in traced.sharding}
    for own, right in zip(graph.sharding, traced.sharding, strict=True):
        assert own.block == right.block and own.degrees == right.degrees == (2,)
        assert sent_of(own, 1) == sent_of(right, 3)
        assert own.parameter_bytes == right.parameter_bytes
        assert own.trainable_bytes == right.trainable_bytes
        assert own.beside_share == pytest.approx(right.beside_share, rel=1e-6)
        assert own.flop_share == pytest.approx(right.flop_share, abs=0.01)
        assert own.saved_share == pytest.approx(right.saved_share, abs=0.05)
        assert [".layers." in name for name in own.cut_results] == [True] * len(right.cut_results)
    assert {len(own.cut_results) for own in graph.sharding} == {0, 1}, "the last layer's result is gathered"


def total_sent(parts: tuple[BlockSharding, ...], num_samples: int) -> dict[str, float]:
    return {name: sum(sent_of(each, num_samples)[name] for each in parts) for name in SENT}


def test_context_ranks_cut_what_they_cut_of_the_captured_model():
    sizes = {**SMALL["mmt"], "hidden": 36, "heads": 6, "inner": 96, "layers": 3}
    model = MODULES["mmt"](**sizes)
    traced = coarsen(capture_model(model, make_batch(model, 3, length=10)))
    graph = build_model("mmt", **sizes, length=10).graph
    assert total_sent(graph.context, 1) == total_sent(traced.context, 3)
    own = {each.block: each for each in graph.context}
    for right in traced.context:
        each = own[right.block]
        assert each.degrees == right.degrees == (2, 3, 6)
        assert (each.forward_exchanges, len(each.cut_results)) == (4, len(right.cut_results))
        assert each.flop_share == pytest.approx(right.flop_share, abs=0.001)
        assert each.saved_share == pytest.approx(right.saved_share, abs=0.001)
    assert own.keys() - {each.block for each in traced.context} == {"head"}, "which gathers what it pools"
    names = {
        name.rpartition(":")[0]
        for name in graph.position_axes
        if any(name in edge.tensors for edge in graph.edges)
    }
    assert names == own.keys() - {"head"}
    texts = coarsen(captured("gpt2"))
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "inner": 128, "length": TEXT_LENGTH, "vocabulary": 64}
    other = total_sent(build_model("transformer", **sizes).graph.context, 1)
    right = total_sent(texts.context, texts.num_samples)
    # of a loss 16 bytes are summed, whatever the number of samples
    assert other.pop("forward_sum_bytes") == other.pop("backward_sum_bytes") == 16
    assert right.pop("forward_sum_bytes") == right.pop("backward_sum_bytes") == 16 / texts.num_samples
    assert other == right and other["forward_exchange_bytes"] == 2 * 4 * 4 * TEXT_LENGTH * 32


def test_tensor_ranks_of_texts_send_what_those_of_a_captured_llama_do():
    traced = coarsen(captured("llama"))
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "inner": 72, "length": TEXT_LENGTH, "vocabulary": 64}
    graph = build_model("transformer", **sizes).graph
    own, right = (total_sent(of.sharding, of.num_samples) for of in (graph, traced))
    assert own == right
    assert own["forward_gather_bytes"] == 10 * 4 * TEXT_LENGTH * 32, "embedding, two layers of four, head"
    images = build_model("multimodal", **sizes, vision_layers=2, vision_hidden=32, patches=4).graph
    first = {each.block: each for each in images.sharding}
    assert (first["embedding"].forward_sums, first["embedding"].cut_results) == (1, ())
    assert (first["layers.0"].backward_sums, first["layers.0"].forward_gathers) == (1, 3)
    assert first["vision.1"].forward_gathers == 5, "a projector reads the whole"


def test_context_ranks_exchange_heads_and_gather_what_is_read_whole():
    """A vision tower of 4 heads, whose features are put between the words of a text of 12 heads."""
    sizes = {"layers": 2, "hidden": 48, "heads": 12, "inner": 72, "length": 10, "vocabulary": 64}
    graph = build_model(
        "multimodal", **sizes, vision_layers=1, vision_hidden=32, vision_heads=4, patches=6
    ).graph
    cut = {each.block: each for each in graph.context}
    assert cut.keys() == {block.name for block in graph.blocks}
    assert {name: each.degrees for name, each in cut.items() if name.endswith(".0")} == {
        "vision.0": (2, 4), "layers.0": (2, 3, 4, 6, 12),
    }  # fmt: skip
    for name, length, width in (("vision.0", 6, 32), ("layers.0", 10, 48), ("layers.1", 10, 48)):
        assert (cut[name].forward_exchanges, cut[name].backward_exchanges) == (4, 4)
        assert cut[name].forward_exchange_bytes == cut[name].backward_exchange_bytes == 4 * 4 * length * width
        assert (cut[name].flop_share, cut[name].saved_share, cut[name].parameter_bytes) == (1, 1, 0)
    assert (cut["embedding"].flop_share, cut["embedding"].forward_gathers) == (0, 1)
    assert cut["embedding"].forward_gather_bytes == cut["embedding"].backward_gather_bytes == 4 * 6 * 48
    assert (cut["head"].forward_sums, cut["head"].backward_sums) == (1, 1)
    assert sum(each.forward_gathers for each in cut.values()) == 1
    assert graph.position_axes == {f"{name}:out": 1 for name in cut if name != "embedding"}
    half = in_dtype(graph, "bf16").context
    assert [each.forward_exchange_bytes * 2 for each in half] == [
        each.forward_exchange_bytes for each in graph.context
    ]
    assert build_model("dlrm").graph.context == ()
