"""The papers' models as analytic graphs."""

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.library.analytic_models import gemm_us, in_dtype, profile_model
from gpp_plugin.library.paper_graphs import MODELS, build_model
from gpp_plugin.plan.cluster_files import read_cluster

V100 = read_cluster("summit").devices[0]


@pytest.mark.parametrize(
    ("name", "blocks", "millions"),
    [("mmt", 33, 403), ("dlrm", 4 * 7 + 7 + 5, 1269), ("candle_uno", 29, 470), ("gpt2_345m", 50, 406)],
)
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
