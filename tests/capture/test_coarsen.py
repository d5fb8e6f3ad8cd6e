"""Blocks: a convex partition whose graph is acyclic, with the branches the model has."""

from __future__ import annotations

import sys
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.block_graph import GRANULARITIES, BlockGraph
from gpp_plugin.ir.serialize import dumps, fingerprint, loads
from tests.capture.graphs import Calls, captured
from tests.models import MODELS
from tests.waits import run_program


def _names(graph: BlockGraph) -> list[str]:
    return [block.name for block in graph.blocks]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_a_convex_acyclic_partition(name: str, granularity: str) -> None:
    capture = captured(name)
    graph = coarsen(capture, granularity=granularity)
    assert graph == coarsen(capture, granularity=granularity) == loads(BlockGraph, dumps(graph))
    nodes = {node.name: node for node in capture.op_graph.nodes}
    block_of = {n: block.name for block in graph.blocks for n in block.nodes}
    assert sum(len(block.nodes) for block in graph.blocks) == len(block_of)
    assert set(block_of) == {n for n, node in nodes.items() if not node.is_replicable}
    order = list(nodes)
    assert all(
        [order.index(n) for n in b.nodes] == sorted(order.index(n) for n in b.nodes) for b in graph.blocks
    )
    expected: dict[tuple[str, str], set[str]] = {}
    for node in nodes.values():
        for source in node.inputs:
            ends = (block_of.get(source), block_of.get(node.name))
            if None not in ends and ends[0] != ends[1]:
                expected.setdefault(ends, set()).add(source)
    assert {(e.src, e.dst): set(e.tensors) for e in graph.edges} == expected
    digraph = graph.digraph()
    assert nx.is_directed_acyclic_graph(digraph)  # of a partition: every block is convex
    position = {block: i for i, block in enumerate(_names(graph))}
    assert len(position) == len(graph.blocks)
    assert all(position[e.src] < position[e.dst] for e in graph.edges)
    assert graph.loss_block == block_of[capture.op_graph.loss]
    assert sum(b.flops for b in graph.blocks) >= sum(node.flops for n, node in nodes.items() if n in block_of)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_and_parameters_are_what_running_the_block_takes(name: str) -> None:
    capture = captured(name)
    graph = coarsen(capture)
    keys = {**capture.inputs, **capture.parameters}
    by_name = {node.name: node for node in capture.graph.nodes}
    users: dict[str, list[str]] = {}
    for block in graph.blocks:
        closure = capture.replicated_closure(block.nodes)
        read = {keys[s.name] for n in closure for s in by_name[n].all_input_nodes if s.name in keys}
        assert read == {*block.inputs, *block.parameters}
        for parameter in block.parameters:
            users.setdefault(parameter, []).append(block.name)
    weights = {p.name for p in capture.op_graph.parameters if not p.is_buffer}
    assert graph.tied == {p: tuple(by) for p, by in users.items() if len(by) > 1 and p in weights}


LAYERS = {
    "clip": [
        "vision_model.embeddings", "vision_model.pre_layrnorm", "vision_model.encoder.layers.0",
        "vision_model.encoder.layers.1", "vision_model.post_layernorm", "visual_projection",
        "text_model.embeddings", "text_model.encoder.layers.0", "text_model.encoder.layers.1",
        "text_model.final_layer_norm", "text_projection", "loss",
    ],
    "llava": [
        "model.language_model.embed_tokens", "model.vision_tower.embeddings", "model.vision_tower.pre_layrnorm",
        "model.vision_tower.encoder.layers.0", "model.multi_modal_projector", "model",
        "model.language_model.layers.0", "model.language_model.layers.1", "model.language_model.norm", "lm_head",
    ],
    "t5": [
        "encoder.embed_tokens", "encoder.block.0", "encoder.block.1", "encoder.final_layer_norm",
        "decoder.embed_tokens", "decoder.block.0", "decoder.block.1", "decoder.final_layer_norm", "lm_head",
    ],
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"],
    "dlrm": [*(f"embeddings.{i}" for i in range(7)), "bottom.0", "bottom.2", "top.0", "top.2"],
    "two_branch": ["left.0", "left.1", "right.0", "right.1", "right.2", "head"],
}  # fmt: skip
PARTS = {
    "clip": ["vision_model.encoder.layers.0.self_attn", "vision_model.encoder.layers.0.mlp"],
    "t5": ["decoder.block.1.layer.0", "decoder.block.1.layer.1", "decoder.block.1.layer.2"],
    "whisper": [
        "model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn", "model.decoder.layers.0.fc1",
    ],
    "bert": ["bert.encoder.layer.0.attention", "bert.encoder.layer.0.intermediate"],
    "gpt2": ["transformer.h.1.attn", "transformer.h.1.mlp"],
    "llava": ["model.language_model.layers.1.self_attn", "model.language_model.layers.1.mlp"],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer_blocks(name: str) -> None:
    assert _names(coarsen(captured(name))) == LAYERS[name]


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_layer_come_in_turn_and_leave_the_rest(name: str) -> None:
    layers, parts = coarsen(captured(name)), coarsen(captured(name), granularity="sub_layer")
    names = _names(parts)
    first = names.index(PARTS[name][0])
    assert names[first : first + len(PARTS[name])] == PARTS[name]
    lists = tuple(f"{path}." for path in captured(name).analysis.layer_lists)
    assert [n for n in names if not n.startswith(lists)] == [
        n for n in _names(layers) if not n.startswith(lists)
    ]
    chain = list(zip(PARTS[name], PARTS[name][1:], strict=False))
    assert all(len(parts.tensors_between([a], [b])) == 1 for a, b in chain)  # the residual stream alone


def test_clip_has_two_branches_that_meet_in_the_loss() -> None:
    graph = coarsen(captured("clip"))
    reduced = graph.dependencies()
    reduced.remove_node("loss")
    branches = sorted(nx.weakly_connected_components(reduced), key=lambda names: sorted(names)[0])
    assert [{n.split(".")[0].split("_")[0] for n in names} for names in branches] == [
        {"text"},
        {"vision", "visual"},
    ]
    assert [e.src for e in graph.edges if e.dst == "loss"] == ["visual_projection", "text_projection"]
    loss = graph.block("loss")
    assert loss.is_coupled
    assert loss.parameters == ("logit_scale",)
    assert [b.name for b in graph.blocks if b.is_coupled] == ["loss"]
    assert {s.shape_for(8) for s in graph.tensors_between(_names(graph), ["loss"])} == {(8, 16), (16, 8)}


def test_t5_decoder_waits_for_the_encoder_once() -> None:
    graph = coarsen(captured("t5"))
    into = {e.dst for e in graph.edges if e.src == "encoder.final_layer_norm"}
    assert into == {"decoder.block.0", "decoder.block.1"}
    bias = graph.tensors_between(["encoder.block.0"], ["encoder.block.1"])
    assert {(s.layout.kind.value, s.shape) for s in bias} == {
        ("batch", (2, 8, 32)),
        ("uniform", (1, 4, 8, 8)),
    }
    assert graph.tied == {"shared.weight": ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")}
    assert graph.block("decoder.block.1").inputs == ("attention_mask",)


def test_blocks_do_not_depend_on_the_order_of_hashes() -> None:
    call = "[fingerprint(coarsen(captured('dlrm'), granularity=g)) for g in GRANULARITIES]"
    script = (
        "from tests.capture.graphs import captured\n"
        "from gpp_plugin.capture.coarsen import GRANULARITIES, coarsen\n"
        f"from gpp_plugin.ir.serialize import fingerprint\nprint({call})"
    )
    other = run_program(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == str(
        [fingerprint(coarsen(captured("dlrm"), granularity=g)) for g in GRANULARITIES]
    )


def _glue(model: Any, x: Tensor) -> Tensor:
    """Own code before, between and after: forks must stay forks."""
    hidden = torch.tanh(model.stem(x * 2))
    return (torch.sin(model.left(hidden)) * torch.cos(model.right(hidden)) * model.scale).mean()


def test_glue_does_not_join_branches() -> None:
    linears = {name: nn.Linear(4, 4) for name in ("stem", "left", "right")}
    model = Calls(_glue, **linears, scale=nn.Parameter(torch.ones(4)))
    graph = coarsen(capture_model(model, {"x": torch.randn(2, 4)}))
    assert _names(graph) == ["stem", "left", "right", "loss"]
    assert not nx.has_path(graph.digraph(), "left", "right")
    assert not nx.has_path(graph.digraph(), "right", "left")
    assert {n.split(".")[-1] for n in graph.block("stem").nodes} == {"linear", "tanh"}


def _again(model: Any, x: Tensor) -> Tensor:
    """A layer that runs twice with another in between: its block is split, not made cyclic."""
    first, second = model.layers
    return first(second(first(x))).pow(2).mean()


def test_recurring_layers_are_split_and_tied() -> None:
    model = Calls(_again, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    graph = coarsen(capture_model(model, {"x": torch.randn(2, 4)}))
    assert _names(graph) == ["layers.0", "layers.1", "layers.0#2"]
    assert graph.tied == {f"layers.0.{p}": ("layers.0", "layers.0#2") for p in ("weight", "bias")}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["t5", "gpt2", "clip"])
def test_saved_tensors_add_up_to_what_blocks_keep(name, granularity):
    """Each storage once, charged to the first that keeps it; what replicated masks hold is left out."""
    capture = captured(name)
    graph = coarsen(capture, granularity=granularity)
    position = {block.name: i for i, block in enumerate(graph.blocks)}
    charged = dict.fromkeys(position, 0)
    for tensor in graph.saved:
        charged[tensor.kept_by[0]] += tensor.bytes
        assert position[tensor.made_by] <= position[tensor.kept_by[0]]
        assert list(tensor.kept_by) == sorted(tensor.kept_by, key=position.__getitem__)
    assert all(charged[block.name] <= block.saved_bytes for block in graph.blocks)
    assert sum(charged.values()) >= 0.9 * sum(block.saved_bytes for block in graph.blocks)
    assert len({tensor.name for tensor in graph.saved}) == len(graph.saved)


def test_saved_tensors_are_the_same_at_every_granularity() -> None:
    found = [coarsen(captured("t5"), granularity=granularity).saved for granularity in GRANULARITIES]
    assert len({frozenset((t.name, t.bytes, t.views) for t in saved) for saved in found}) == 1
    block_of = {n: b.name for b in coarsen(captured("t5")).blocks for n in b.nodes}
    assert all(t.made_by == block_of[t.name.removesuffix(":inside")] for t in found[0])
