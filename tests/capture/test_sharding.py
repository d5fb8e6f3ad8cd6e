"""Which operators of a captured model tensor ranks can share out, and which are in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.analysis import TensorShard
from gpp_plugin.ir.block_graph import BlockSharding
from tests.capture.graphs import Calls, captured
from tests.models import TEXT_LENGTH


def test_attention_of_grouped_heads_and_a_gated_mlp():
    graph = captured("llama")
    attention = "model.layers.0.self_attn"
    first, second = (
        next(r for r in graph.analysis.sharding.regions if weight in {p.name for p in r.parameters})
        for weight in (f"{attention}.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
    )
    assert {p.name: (p.axis, p.parts) for p in first.parameters} == {
        f"{attention}.q_proj.weight": (0, (32,)),
        f"{attention}.k_proj.weight": (0, (16,)),
        f"{attention}.v_proj.weight": (0, (16,)),
        f"{attention}.o_proj.weight": (1, (32,)),
    }
    assert first.size == 2  # groups of keys and values
    assert (len(first.sums), len(first.shared), first.sliced) == (1, 1, ())
    assert {p.name.rpartition(".mlp.")[2] for p in second.parameters} == {
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    }
    own = {each.block: each for each in coarsen(graph).sharding}
    assert own.keys() == {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"}
    assert own["model.norm"].degrees == own["model.layers.1"].degrees  # on parts of its positions
    layer = own["model.layers.0"]
    assert layer.degrees == (2,)
    hidden = 2 * TEXT_LENGTH * 32 * 4  # two samples
    assert layer == BlockSharding(
        block="model.layers.0",
        degrees=(2,),
        flop_share=layer.flop_share,
        parameter_bytes=4 * (32 * 32 * 2 + 16 * 32 * 2 + 48 * 32 * 3),
        trainable_bytes=4 * (32 * 32 * 2 + 16 * 32 * 2 + 48 * 32 * 3),
        saved_share=layer.saved_share,
        forward_sums=0,
        forward_sum_bytes=0,
        backward_sums=0,
        backward_sum_bytes=0,
        beside_share=layer.beside_share,
        # of attention and MLP each: what goes in is gathered, the result is scattered; backward the other way round, and
        # what went in once more for its weights' gradients
        forward_gathers=4,
        forward_gather_bytes=4 * hidden,
        backward_gathers=6,
        backward_gather_bytes=6 * hidden,
        beside_gathers=4,
        beside_gather_bytes=4 * hidden,
        cut_results=("add_8",),
    )
    # q, k, v of q, k, v, o; gate and up of gate, up and down
    assert layer.beside_share == pytest.approx(
        (32 + 16 + 16 + 48 + 48) / (32 + 16 + 16 + 32 + 3 * 48), rel=0.01
    )
    # norms and residuals too; whole are rotary tables alone, which the first layer is charged with
    assert layer.flop_share == pytest.approx(1, abs=0.01) and 0.95 < layer.saved_share < 1
    assert own["model.layers.1"].saved_share == 1, "what it keeps of the layer before is in parts as well"


def test_a_weight_of_queries_keys_and_values_is_cut_part_by_part():
    region = captured("gpt2").analysis.sharding.regions[0]
    name = "transformer.h.0.attn.c_attn"
    assert TensorShard(name=f"{name}.weight", axis=1, parts=(32, 32, 32)) in region.parameters
    assert TensorShard(name=f"{name}.bias", axis=0, parts=(32, 32, 32)) in region.parameters
    assert region.size == 4


def test_each_rank_reads_its_heads_of_a_bias():
    sharding = captured("t5").analysis.sharding
    cross = next(r for r in sharding.regions if any("EncDecAttention.q" in p.name for p in r.parameters))
    assert len(cross.shared) == 2  # decoder and encoder
    own = next(r for r in sharding.regions if "decoder.block.0.layer.0" in r.parameters[0].name)
    assert [shard.axis for shard in own.sliced] == [1] and own.sliced[0].name in own.shared


@pytest.mark.parametrize("name", ["clip", "siglip", "whisper", "bert", "llava"])
def test_every_layer_of_other_models_is_shared_out(name):
    blocks = coarsen(captured(name))
    layers = {b.name for b in blocks.blocks if b.name.rpartition(".")[2].isdigit()}
    assert layers and layers <= {each.block for each in blocks.sharding}


def test_a_vocabulary_is_shared_out_with_all_that_read_its_weight():
    graph = captured("gpt2")
    name = "transformer.wte.weight"
    of_weight = [r for r in graph.analysis.sharding.regions if name in {p.name for p in r.parameters}]
    assert len(of_weight) == 2  # embedding and head
    assert all(TensorShard(name=name, axis=0, parts=(64,)) in r.parameters for r in of_weight)
    head = next(r for r in of_weight if r.losses)
    assert head.losses == ("cross_entropy_loss",) and head.sums == () and len(head.shared) == 1
    own = next(each for each in coarsen(graph).sharding if each.block == "lm_head")
    assert (own.forward_sums, own.forward_sum_bytes) == (2, 3 * 4 * 2 * TEXT_LENGTH)


def odd(kind: str) -> nn.Module:
    """Return a module with an operator between two linear ones that mixes features."""

    def run(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inner = model.up(x)
        if kind == "cumsum":
            inner = inner.cumsum(-1)
        if kind == "softmax":
            inner = inner.softmax(-1)
        if kind == "dropout":
            inner = nn.functional.dropout1d(inner)
        if kind == "twice":
            inner = torch.relu(inner) + nn.functional.linear(x, model.down.weight.t())
        return ((model.down(torch.relu(inner)) - labels) ** 2).mean()

    return Calls(run, up=nn.Linear(4, 8), down=nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("cumsum", "cumsum"),
        ("softmax", "softmax"),
        ("dropout", "drops as one what is cut"),
        ("twice", "is read whole by others too"),
    ],
)
def test_what_is_in_the_way_is_named(kind, operator):
    sharding = capture_model(
        odd(kind), {"x": torch.randn(4, 3, 4), "labels": torch.randn(4, 3, 4)}
    ).analysis.sharding
    assert sharding.regions == ()
    assert operator in next(each for each in sharding.whole).reason


def test_a_plain_pair_is_shared_out():
    sharding = capture_model(
        odd("none"), {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    ).analysis.sharding
    (region,) = sharding.regions
    assert region.size == 8 and region.shared == ()  # nobody asks for the gradient of the batch


def folded_heads(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention by matrices, one a sample and head, with a bias by key."""
    samples, length, _ = x.shape

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.view(samples, length, 4, 2).transpose(1, 2).reshape(samples * 4, length, 2)

    bias = mask.view(samples, 1, 1, length).expand(-1, 4, -1, -1).reshape(samples * 4, 1, length)
    scores = torch.bmm(heads(model.q(x)), heads(model.k(x)).transpose(1, 2)) + bias
    made = torch.bmm(scores.softmax(-1), heads(model.v(x)))
    made = made.view(samples, 4, length, 2).transpose(1, 2).reshape(samples, length, 8)
    return (model.o(made) ** 2).mean()


def test_what_is_shared_out_is_the_same_from_a_batch_of_one_sample():
    torch.manual_seed(0)
    model = Calls(folded_heads, **{name: nn.Linear(8, 8) for name in "qkvo"})
    one, two = (
        capture_model(model, {"x": torch.randn(n, 5, 8), "mask": torch.randn(n, 5)}).analysis for n in (1, 2)
    )
    assert one.means == two.means == ()  # both know where samples lie
    assert one.sharding == two.sharding
    assert not any(shard.name == "q.weight" for r in one.sharding.regions for shard in r.parameters)
