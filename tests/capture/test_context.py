"""Which operators context ranks compute on parts, and that these parts are those of the whole."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.ir.analysis import HEADS, POSITIONS, ROWS, ContextCut, ContextPart
from tests.capture.graphs import Calls, captured, sources
from tests.models import TEXT_LENGTH, build

aten = torch.ops.aten


# ---- each operator by itself, on the parts of each rank -----------------------------------------------


def repeats(number: int, degree: int) -> int:
    """Return how many ranks hold the same group."""
    return degree // math.gcd(number, degree)


def values_of(capture: CapturedGraph, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what each operator makes, as it is before others write into it."""
    values, kept = dict(sources(capture, model, batch)), {}
    for node in capture.graph.nodes:
        if node.op == "get_attr":
            values[node.name] = capture.attributes[node.target]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n.name])
            values[node.name] = node.target(*args, **kwargs)
        if isinstance(values.get(node.name), (torch.Tensor, tuple, list)):
            own = values[node.name]
            kept[node.name] = (
                own.clone() if isinstance(own, torch.Tensor) else tuple(each.clone() for each in own)
            )
    return kept


class Emulated:
    """Runs single operators of a capture as one of so many context ranks would, on parts of the true operands."""

    def __init__(self, capture: CapturedGraph, values: dict[str, Any], degree: int, samples: int) -> None:
        self.capture, self.values, self.degree, self.samples = capture, values, degree, samples
        self.parts = {part.name: part for part in capture.analysis.sharding.context}
        self.called = {**capture.inputs, **capture.parameters}

    def cut(self, value: torch.Tensor, cut: ContextCut, rank: int, groups: int | None = None) -> torch.Tensor:
        """Return what a rank holds of a whole tensor."""
        size = value.shape[cut.axis]
        if cut.kind == HEADS:
            if groups is not None:
                value = value.repeat_interleave(repeats(groups, self.degree), cut.axis)
            return value.chunk(self.degree, cut.axis)[rank].clone(memory_format=torch.contiguous_format)
        if cut.kind == ROWS:
            apart = value.unflatten(cut.axis, (self.samples, size // self.samples))
            own = self.cut(apart, ContextCut(kind=POSITIONS, axis=cut.axis + 1), rank)
            return own.flatten(cut.axis, cut.axis + 1)
        first, last = size * rank // self.degree, size * (rank + 1) // self.degree
        return value.narrow(cut.axis, first, last - first).clone(memory_format=torch.contiguous_format)

    def wanted(self, node: fx.Node, rank: int) -> torch.Tensor:
        """Return a rank's part of a true result; the whole where ranks have summands."""
        part, value = self.parts[node.name], self.values[node.name]
        if part.result is None:
            return value
        axis = part.result.axis
        own = repeats(value.shape[axis], self.degree) if part.groups else 1
        if own > 1 and node.target is aten.expand.default:
            # the heads of each group are divided among the ranks that hold it
            value = value.unflatten(axis + 1, (own, -1)).flatten(axis, axis + 1)
            return value.chunk(self.degree, axis)[rank]
        return self.cut(value, part.result, rank, value.shape[axis] if own > 1 else None)

    def operand(self, node: fx.Node, reader: ContextPart, rank: int) -> Any:
        name, value = self.called.get(node.name, node.name), self.values[node.name]
        cut = reader.operands.get(name)
        if cut is None or not isinstance(value, torch.Tensor):
            return value
        if name in reader.groups and node.target is aten.expand.default:
            return self.wanted(node, rank)
        return self.cut(value, cut, rank, reader.groups.get(name))

    def run(self, node: fx.Node, rank: int) -> Any:
        """Return what a rank makes of its parts of the operands."""
        if node.target is operator.getitem:
            return self.run(node.args[0], rank)[node.args[1]]
        part, args = self.parts[node.name], list(node.args)
        if node.target in (aten.view.default, aten.reshape.default, aten.expand.default):
            args[1] = list(self.wanted(node, rank).shape)
        if node.target is aten.repeat_interleave.self_int and part.groups:
            (number,) = part.groups.values()
            args[1] //= repeats(number, self.degree)
        if part.sums == "mean":
            args = [*args[:2], None, 2, *args[4:]]  # a sum, which is divided at last
        args, kwargs = fx.map_arg((args, dict(node.kwargs)), lambda n: self.operand(n, part, rank))
        return node.target(*args, **kwargs)

    def check(self) -> set[str]:
        """Hold each operator against the whole; return those that can be cut by this number."""
        checked = set()
        for node in self.capture.graph.nodes:
            part = self.parts.get(node.name)
            if part is None or any(number % self.degree for number in part.heads):
                continue
            checked.add(node.name)
            if not isinstance(self.values[node.name], torch.Tensor):
                assert all(self.parts[user.name].result == part.result for user in node.users)
                continue
            made = [self.run(node, rank) for rank in range(self.degree)]
            if part.sums:
                made = [torch.stack(made).sum(0)]
            if part.sums == "mean":
                made = [made[0] / (self.values[node.args[1].name] != -100).sum()]
            for rank, own in enumerate(made):
                wanted = self.wanted(node, rank)
                assert own.shape == wanted.shape, node.name
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        return checked


# ---- what is cut of models, and what is not -----------------------------------------------------------


def made_of(name: str) -> tuple[CapturedGraph, dict[str, Any]]:
    """Return the capture of a tiny model, and the values of all its operators."""
    model, make_batch = build(name)
    with torch.no_grad():
        return captured(name), values_of(captured(name), model, make_batch(2))


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "t5", "clip", "llava", "whisper", "bert", "sequence_first"]
)
def test_parts_of_each_rank_are_those_of_the_whole(name: str):
    capture, values = made_of(name)
    parts = capture.analysis.sharding.context
    for degree in (2, 3, 4):
        checked = Emulated(capture, values, degree, 2).check()
        of_heads = {part.name for part in parts if any(number % degree for number in part.heads)}
        assert checked | of_heads == {part.name for part in parts}
        assert checked


def test_positions_of_a_layer_but_for_its_attention():
    capture = captured("llama")
    nodes = {node.name: node for node in capture.graph.nodes}
    parts = {part.name: part for part in capture.analysis.sharding.context}
    assert capture.analysis.sharding.uncut == ()
    linear = next(p for p in parts.values() if nodes[p.name].target is aten.linear.default)
    assert linear.result == ContextCut(kind=POSITIONS, axis=1)
    assert list(linear.operands.values()) == [linear.result]  # its weight is whole
    attention = next(
        p for p in parts.values() if nodes[p.name].target is aten.scaled_dot_product_attention.default
    )
    heads = ContextCut(kind=HEADS, axis=1)
    assert (attention.result, attention.heads, set(attention.operands.values())) == (heads, (4,), {heads})
    # keys are read in two groups, before they are repeated for the heads that share them
    repeated = next(part for part in parts.values() if part.groups)
    (group,) = repeated.operands
    assert (repeated.groups, repeated.heads) == ({group: 2}, (4,))
    assert parts[group].result == ContextCut(kind=POSITIONS, axis=2)
    # what comes first is cut too: embeddings and rotary tables
    assert parts["embedding"].operands == {"input_ids": ContextCut(kind=POSITIONS, axis=1)}
    assert parts["cos"].result == ContextCut(kind=POSITIONS, axis=1)
    loss = parts["cross_entropy_loss"]
    assert (loss.result, loss.sums) == (None, "mean")
    assert set(loss.operands.values()) == {ContextCut(kind=ROWS, axis=0)}


def test_rows_are_of_samples_and_positions():
    parts = {part.name: part for part in captured("gpt2").analysis.sharding.context}
    assert parts["addmm"].result == ContextCut(kind=ROWS, axis=0)
    assert parts["view_2"].operands == {"layer_norm": ContextCut(kind=POSITIONS, axis=1)}
    assert parts["view_3"].result == ContextCut(kind=POSITIONS, axis=1)


def test_what_samples_are_pooled_into_stays_whole_and_is_named():
    blocks = coarsen(captured("clip"))
    assert {name: reason.split(") ", 1)[1] for name, reason in blocks.uncut.items()} == {
        "visual_projection": "reads one row of each sample",
        "text_projection": "reads one row of each sample",
    }
    whole = {each.name: each.reason for each in captured("clip").analysis.sharding.uncut}
    assert whole["select"].endswith("(select) takes one element of the axis that is cut")
    assert not {"loss", "visual_projection"} & {own.block for own in blocks.context if own.flop_share}


def test_a_block_says_what_it_exchanges():
    own = {each.block: each for each in coarsen(captured("llama")).context}
    layer = own["model.layers.0"]
    assert layer.degrees == (2, 4) and own["model.embed_tokens"].degrees == (2, 4)
    queries, groups = 2 * 4 * TEXT_LENGTH * 8 * 4, 2 * 2 * TEXT_LENGTH * 8 * 4
    assert (layer.forward_exchanges, layer.forward_exchange_bytes) == (4, 2 * queries + 2 * groups)
    assert (layer.backward_exchanges, layer.backward_exchange_bytes) == (4, 2 * queries + 2 * groups)
    assert (layer.groups, layer.group_bytes) == (2, 2 * groups)
    assert (layer.forward_gathers, layer.forward_sums, layer.parameter_bytes) == (0, 0, 0)
    assert layer.cut_results == ("add_8",)
    assert layer.flop_share > 0.99 and layer.saved_share > 0.99
    head = own["lm_head"]
    assert (head.forward_sums, head.forward_sum_bytes, head.backward_sums) == (1, 16, 1)


def test_a_block_that_makes_a_whole_of_parts_gathers_them():
    own = {each.block: each for each in coarsen(captured("llava")).context}
    # images take the places of tokens in the order of all of them
    features = 2 * 4 * 32 * 4
    assert (own["model"].forward_gathers, own["model"].forward_gather_bytes) == (1, features)
    assert own["model"].flop_share == 0.0


def test_fingerprints_do_not_depend_on_what_context_ranks_cut():
    blocks = coarsen(captured("llama"))
    without = dataclasses.replace(blocks, context=(), uncut={})
    assert without.fingerprint == blocks.fingerprint


# ---- operators, one by one ----------------------------------------------------------------------------


def plain_heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 3, 2).transpose(1, 2)


def mixed(kind: str) -> nn.Module:
    """Return a model of two linear operators, with an operator between them."""

    def run(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inner = model.up(x)
        if kind == "cumsum":
            inner = inner.cumsum(1)
        if kind == "softmax":
            inner = inner.softmax(1)
        if kind == "conv":
            inner = model.conv(inner.transpose(1, 2)).transpose(1, 2)
        if kind == "shift":
            inner = torch.cat([inner[:, 1:], inner[:, :1]], 1)
        if kind == "reshape":
            inner = inner.reshape(inner.shape[0], -1, inner.shape[2] * 2).repeat_interleave(2, 1)[..., :6]
        if kind == "causal":  # one head alone
            inner = nn.functional.scaled_dot_product_attention(inner, inner * 2, inner * 3, is_causal=True)
        if kind == "one head":
            inner = nn.functional.scaled_dot_product_attention(inner, inner * 2, inner * 3)
        if kind == "products":
            scores = plain_heads(inner) @ plain_heads(inner * 2).transpose(2, 3)
            inner = (scores.softmax(-1) @ plain_heads(inner * 3)).transpose(1, 2).reshape(inner.shape)
        if kind == "groups":
            heads, groups = (
                inner.view(*inner.shape[:2], 6, 1),
                (inner * 2)[..., :2].view(*inner.shape[:2], 2, 1),
            )
            attention = nn.functional.scaled_dot_product_attention
            read = [each.transpose(1, 2) for each in (heads, groups, groups * 3)]
            inner = attention(*read, enable_gqa=True, is_causal=True).transpose(1, 2).reshape(inner.shape)
        if kind == "in place":
            inner += model.up(x * 2)
            weights, places = inner.topk(6, -1)
            inner = weights.div_(weights.sum(-1, keepdim=True)) * places
        if kind == "written twice":
            inner += model.up(x * 2)
            inner *= 3
        if kind == "turned":
            inner = (inner @ model.down.weight.T) @ model.up.weight.T
        if kind == "summed":
            return model.down(inner).pow(2).sum() + inner.sum((1, 2)).pow(3).sum()
        return ((model.down(torch.relu(inner)) - labels) ** 2).mean()

    return Calls(run, up=nn.Linear(4, 6), down=nn.Linear(6, 4), conv=nn.Conv1d(6, 6, 3, padding=1))


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("none", "mse"),
        ("cumsum", "cumsum"),
        ("softmax", "softmax"),
        ("conv", "conv1d"),
        ("shift", "slice"),
        ("reshape", "reshape"),
        ("causal", "scaled_dot_product_attention"),
        ("one head", ""),
        ("products", ""),
        ("groups", ""),
        ("in place", ""),
        ("written twice", "mul"),
        ("turned", ""),
        ("summed", ""),
    ],
)
def test_an_operator_that_mixes_positions_is_whole(kind: str, whole: str):
    torch.manual_seed(3)
    model = mixed(kind)
    batch = {"x": torch.randn(2, 8, 4), "labels": torch.randn(2, 8, 4)}
    capture = capture_model(model, batch)
    with torch.no_grad():
        values = values_of(capture, model, batch)
    cut = {part.name for part in capture.analysis.sharding.context}
    assert any(name.startswith("linear") for name in cut)
    for degree in (2, 3, 6):
        Emulated(capture, values, degree, 2).check()
    if whole and kind != "none":
        assert not any(name.startswith(whole) for name in cut)
        if kind != "written twice":  # whose linear operator is whole for it
            assert any(whole in each.reason for each in capture.analysis.sharding.uncut)
    else:
        products = [name for name in cut if "attention" in name or "matmul" in name]
        assert len(products) == {"one head": 1, "groups": 1, "products": 2, "turned": 2}.get(kind, 0)
    assert any(name.startswith("topk") for name in cut) == (kind == "in place")
