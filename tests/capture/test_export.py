"""The captured graph is the model: same loss, same gradients, same names; the model stays as it was."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import recapture
from gpp_plugin.capture.tracing.sample_batches import count_samples, is_clearly_counted, resize_batch
from gpp_plugin.capture.tracing.torch_export import TALKATIVE
from gpp_plugin.errors import CaptureError
from tests.capture.graphs import Calls, assert_is_model, captured, run_graph
from tests.models import MODELS, build
from tests.reference import assert_near, loss_of


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_buffers_are_those_of_the_model(name: str) -> None:
    model, make_batch = build(name)
    assert_is_model(captured(name), model, make_batch(2, 7))


@pytest.mark.parametrize("name", ["t5", "gpt2", "two_branch"])
def test_dropout_draws_the_random_numbers_of_the_model(name: str) -> None:
    model, make_batch = build(name, dropout=0.3)
    capture = captured(name, dropout=0.3)
    batch = make_batch(2)
    torch.manual_seed(5)
    assert_is_model(capture, model, batch)
    assert any(node.is_random for node in capture.op_graph.nodes)


@pytest.mark.parametrize("name", ["t5", "bert", "batch_norm_mlp", "llava"])
def test_evaluation_graph_has_no_dropout_and_no_statistics(name: str) -> None:
    capture = captured(name, training=False, dropout=0.3)
    model, make_batch = build(name, dropout=0.3)
    before = copy.deepcopy(dict(model.named_buffers()))
    batch = make_batch(2)
    with torch.no_grad():
        expected = loss_of(copy.deepcopy(model).eval()(**batch))
        loss = run_graph(capture, model, batch)[capture.op_graph.loss]
    assert_near({"loss": loss}, {"loss": expected})
    assert not any(node.is_random for node in capture.op_graph.nodes)
    assert not any(p.is_mutated for p in capture.op_graph.parameters)
    assert all(torch.equal(before[key], buffer) for key, buffer in model.named_buffers())
    assert not any(n.saved_bytes or (n.output and n.output.requires_grad) for n in capture.op_graph.nodes)


def test_evaluation_without_labels_returns_the_outputs_asked_for() -> None:
    model, make_batch = build("gpt2")
    batch = {k: v for k, v in make_batch(2).items() if k != "labels"}
    capture = capture_model(model, batch, training=False, outputs=("logits",))
    assert capture.op_graph.loss is None
    values = run_graph(capture, model, batch)
    logits = values[capture.op_graph.outputs["logits"]]
    assert_near({"logits": logits}, {"logits": model.eval()(**batch).logits})
    assert coarsen(capture).loss_block is None


@pytest.mark.parametrize("name", ["clip", "t5", "batch_norm_mlp", "frozen_branch"])
def test_parameters_and_buffers_keep_names_order_and_ties(name: str) -> None:
    model, _ = build(name)
    described = captured(name).op_graph.parameters
    names = [key for key, _ in model.named_parameters()] + [key for key, _ in model.named_buffers()]
    assert [p.name for p in described] == names
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for p in described:
        tensor = tensors[p.name]
        assert (p.shape, p.requires_grad) == (tuple(tensor.shape), tensor.requires_grad)
        assert p.bytes == tensor.numel() * tensor.element_size()
        assert {p.name, *p.aliases} == {key for key, other in tensors.items() if other is tensor}
    state = model.state_dict()
    assert {p.name for p in described if p.is_buffer and not p.is_persistent} == {
        key for key, _ in model.named_buffers() if key not in state
    }


def _quantised(model: Any, x: Tensor) -> Tensor:
    """A trained encoder whose output is looked up in a table: no gradient comes back to it."""
    for layer in model.encoder:
        x = x + layer(x)
    hidden = torch.zeros_like(x)
    hidden[:, :2] = model.table(x.argmax(-1))[:, :2]  # read as ``hidden``, not as what writes it
    for layer in model.decoder:
        hidden = hidden + layer(hidden)
    return hidden.pow(2).mean()


def test_a_tensor_that_no_gradient_comes_back_to_carries_none() -> None:
    towers = {name: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for name in ("encoder", "decoder")}
    model = Calls(_quantised, **towers, table=nn.Embedding(4, 4))
    graph = capture_model(model, {"x": torch.randn(4, 3, 4)})
    takes = {
        node.module: node.output.requires_grad for node in graph.op_graph.nodes if node.output is not None
    }
    assert not takes["encoder.0"] and not takes["encoder.1"]
    assert takes["table"] and takes["decoder.0"] and takes["decoder.1"]
    blocks = coarsen(graph)
    crossing = [spec for block in ("encoder.0", "encoder.1") for edge in blocks.edges if edge.src == block
                for name in edge.tensors for spec in [blocks.tensors[name]]]  # fmt: skip
    assert crossing and not any(spec.requires_grad for spec in crossing)


def test_model_is_left_as_it_was() -> None:
    model, make_batch = build("gpt2")
    model.transformer.h[0].eval()
    model.config.use_cache = True
    modes = {key: module.training for key, module in model.named_modules()}
    tensors = {key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()}
    random = torch.random.get_rng_state()
    capture_model(model, make_batch(2), dtype=torch.bfloat16)
    assert {key: module.training for key, module in model.named_modules()} == modes
    assert {key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()} == tensors
    assert model.config.use_cache is True
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_dtype_is_cast_before_tracing() -> None:
    model, make_batch = build("clip")
    capture = capture_model(model, make_batch(2), dtype=torch.bfloat16)
    assert {p.dtype for p in capture.op_graph.parameters if not p.is_buffer} == {"bfloat16"}
    assert next(s for s in capture.op_graph.inputs if s.name == "pixel_values").dtype == "bfloat16"
    boundary = coarsen(capture).tensors
    assert {spec.dtype for spec in boundary.values()} == {"bfloat16"}
    batch = make_batch(2)
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    low = copy.deepcopy(model).bfloat16()
    loss = run_graph(capture, low, batch)[capture.op_graph.loss]
    torch.testing.assert_close(loss, loss_of(low(**batch)))


@pytest.mark.parametrize(
    ("name", "num_samples"),
    [(name, 1) for name in MODELS if name != "batch_norm_mlp"]  # which refuses to train on one sample
    + [("clip", 3), ("batch_norm_mlp", 3), ("sequence_first", 5)],
)
def test_recapture_is_the_capture_at_that_size(name: str, num_samples: int) -> None:
    model, make_batch = build(name)
    batch = make_batch(num_samples)
    again = recapture(model, captured(name).analysis, batch)
    fresh = capture_model(model, batch)
    strip = dict(couplings=())
    assert dataclasses.replace(again.op_graph, **strip) == dataclasses.replace(fresh.op_graph, **strip)
    assert str(again.graph) == str(fresh.graph)
    assert coarsen(again) == coarsen(fresh)


@pytest.mark.parametrize("name", ["two_branch", "t5"])
def test_what_was_exported_for_trials_is_the_recapture_of_another_export(name: str) -> None:
    model, make_batch = build(name)
    batch = make_batch(4)
    capture = capture_model(model, batch)
    assert list(capture.trials) == [2], "of 4 samples and 2; the first is the capture itself"
    small = resize_batch(batch, 2)
    anew = recapture(model, capture.analysis, small)
    found = recapture(model, capture.analysis, small, exported=capture.trials[2])
    assert found.op_graph == anew.op_graph and str(found.graph) == str(anew.graph)
    assert (found.inputs, found.parameters) == (anew.inputs, anew.parameters)
    assert found.masks.keys() == anew.masks.keys()


def _dropping(layerdrop: float) -> Any:
    """Layers that are dropped as in transformers before 5.23: a number is drawn and compared, also at probability 0."""

    def run(model: Any, x: Tensor) -> dict[str, Tensor]:
        for layer in model.layers:
            if model.training and torch.rand([]) < model.layerdrop:
                continue
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}

    return Calls(run, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), layerdrop=layerdrop)


def test_layers_dropped_with_probability_zero_are_captured_and_others_refused() -> None:
    model, batch = _dropping(0.0), {"x": torch.ones(2, 4)}
    capture = capture_model(model, batch)
    assert sum("linear" in str(node.target) for node in capture.graph.nodes) == 2
    assert_is_model(capture, model, batch)
    assert type(model.layerdrop) is float, "the user's model is left alone"
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture_model(_dropping(0.5), batch)


def _filled(model: Any, x: Tensor) -> Tensor:
    """Makes logits full of a number and writes what it found into them, as GroundingDINO does."""
    logits = torch.full((x.shape[0], 6), -5.0)
    logits[:, :4] = model.layers[0](x)
    return model.layers[1](logits[:, 1:5]).square().mean()


def test_a_tensor_written_in_place_takes_the_gradient_of_what_was_written() -> None:
    model = Calls(_filled, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    capture = capture_model(model, {"x": torch.randn(2, 4)})
    (full,) = [node for node in capture.op_graph.nodes if node.target == "aten.full.default"]
    assert full.output is not None
    assert full.output.requires_grad, "who reads it on another rank sends its gradient back"
    evaluated = capture_model(model, {"x": torch.randn(2, 4)}, training=False)
    assert not any(node.output is not None and node.output.requires_grad for node in evaluated.op_graph.nodes)


def _frozen_region(model: Any, x: Tensor) -> Tensor:
    """A no_grad region with layers, BatchNorm and dropout inside, between trainable layers."""
    hidden = model.first(x)
    with torch.no_grad():
        frozen = hidden
        for layer in model.encoder:
            frozen = torch.dropout(torch.tanh(layer(frozen)), 0.2, model.training)
    return (model.head(frozen) + hidden[:, :2]).pow(2).mean()


def test_no_grad_regions_are_made_of_their_operators() -> None:
    torch.manual_seed(0)
    encoder = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)])
    model = Calls(_frozen_region, first=nn.Linear(4, 4), encoder=encoder, head=nn.Linear(4, 2))
    batch = {"x": torch.randn(4, 4)}
    capture = capture_model(model, batch)
    assert_is_model(capture, model, batch)
    run_graph(capture, model, batch)[capture.op_graph.loss].backward()
    untrained = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert untrained == {name for name, _ in model.named_parameters() if name.startswith("encoder")}
    graph = coarsen(capture)
    assert [b.name for b in graph.blocks] == ["first", "encoder.0", "encoder.1", "encoder.2", "head"]
    assert [p.name for p in capture.op_graph.parameters if p.is_mutated and "var" in p.name] == [
        "encoder.1.running_var"
    ]
    crossing = graph.tensors_between(
        ["encoder.0", "encoder.1", "encoder.2"], ["encoder.1", "encoder.2", "head"]
    )
    assert [spec.requires_grad for spec in crossing] == [False, False, False]


def _returning(function: Callable[[Tensor], Any]) -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), Calls(lambda model, x: function(x)))
    return Calls(lambda model, x: model.inner(x), inner=inner)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, ("has shape (2, 4)", "one number")),
        (lambda x: {"logits": x}, ("returned no loss", "labels=")),
        (lambda x: (x @ x.new_zeros(5, 2)).sum(), ("inner.1 (Calls", "x.new_zeros(5, 2)", "cannot be captured")),
    ],
)  # fmt: skip
def test_errors_name_place_and_remedy(function, words, capsys, caplog, monkeypatch) -> None:
    for name in TALKATIVE:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
    with pytest.raises(CaptureError) as error:
        capture_model(_returning(function), {"x": torch.randn(2, 4)})
    text = str(error.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert "def forward" not in capsys.readouterr().err
    assert not [record for record in caplog.records if record.name in TALKATIVE]


def test_a_mode_of_the_callers_sees_nothing_of_a_capture() -> None:
    """CUDA's sanitizer is one: it asks every tensor for its memory, and a fake one that is traced ended the process."""

    class AsksForMemory(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for each in tree_leaves((args, kwargs, result)):
                assert not isinstance(each, FakeTensor), func
            return result

    model, make_batch = build("two_branch")
    with AsksForMemory():
        graph = capture_model(model, make_batch(4, 0))
        recapture(model, graph.analysis, make_batch(2, 0))


def test_missing_loss_says_how_to_get_one() -> None:
    model, make_batch = build("gpt2")
    batch = {k: v for k, v in make_batch(2).items() if k != "labels"}
    with pytest.raises(CaptureError, match=r"GPT2LMHeadModel returned no loss .*labels=.*return_loss=True"):
        capture_model(model, batch)
    with pytest.raises(CaptureError, match=r"outputs=\('logits',\)"):
        capture_model(model, batch, training=False)
    with pytest.raises(CaptureError, match="output 'logit' of GPT2LMHeadModel is NoneType"):
        capture_model(model, make_batch(2), outputs=("logit",))


def test_bad_batches_are_refused() -> None:
    model, make_batch = build("two_branch")
    batch = make_batch(2)
    with pytest.raises(CaptureError, match="batch entry 'y' is a list of tensors"):
        capture_model(model, {**batch, "y": [batch["y"]]})
    with pytest.raises(CaptureError, match=r"TwoBranch cannot be captured.*batch keys must be arguments"):
        capture_model(model, {**batch, "z": batch["y"]})


def test_recapture_of_a_changed_structure_is_refused() -> None:
    model = _returning(lambda x: x.mean() if x.shape[1] == 3 else x.sigmoid().mean())
    model.inner[0] = nn.Identity()
    first = capture_model(model, {"x": torch.randn(2, 3)})
    with pytest.raises(
        CaptureError, match=r"graph changed with the input shapes: operator mean .* in inner.1 is sigmoid"
    ):
        recapture(model, first.analysis, {"x": torch.randn(2, 4)})


def test_batch_keys_may_be_called_like_pythons_own_names() -> None:
    def scaled(model: Any, input: Tensor, max: Tensor) -> dict[str, Tensor]:  # noqa: A002
        return {"loss": (model.linear(input) * max).square().mean()}

    batch = {"input": torch.randn(4, 4), "max": torch.randn(4, 4)}
    captured = capture_model(Calls(scaled, linear=nn.Linear(4, 4)), batch, training=True)
    assert sorted(captured.inputs.values()) == ["input", "max"]
    assert {spec.name for spec in captured.op_graph.inputs} == {"input", "max"}


def test_modules_keep_their_modes_and_a_model_wholly_in_eval_trains() -> None:
    def normed(model: Any, x: Tensor) -> dict[str, Tensor]:
        return {"loss": model.head(model.drop(model.norm(x))).square().mean()}

    def is_in_train_mode(model: nn.Module) -> tuple[bool, bool]:
        capture = capture_model(model, {"x": torch.randn(4, 4)})
        nodes = list(capture.graph.nodes)
        return any(p.is_mutated for p in capture.op_graph.parameters), any("dropout" in n.name for n in nodes)

    model: Any = Calls(normed, norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.5), head=nn.Linear(4, 1))
    assert is_in_train_mode(model) == (True, True)
    model.norm.eval()
    assert is_in_train_mode(model) == (False, True)
    assert is_in_train_mode(model.eval()) == (True, True) and not model.training


# ---- kinds of tensors, and batches in doubt ------------------------------------------------------------


def _kinds(weight: Tensor, reads: Callable[[Tensor], Tensor], *, is_buffer: bool = False) -> nn.Module:
    """Return a layer and a weight of some kind; ``reads`` makes a real number for each feature of it."""
    trains = weight.is_floating_point() or weight.is_complex()
    held = nn.Buffer(weight) if is_buffer else nn.Parameter(weight, requires_grad=trains)
    return Calls(
        lambda model, x: (model.layer(x) * reads(model.weight)).square().mean(),
        layer=nn.Linear(4, 4),
        weight=held,
    )


def _branch(dtype: torch.dtype) -> nn.Module:
    """Return a branch that may be of another type, and casts to its own weight's."""

    def run(model: Any, x: Tensor) -> Tensor:
        return (model.layer(x) + model.branch(x.to(model.branch.weight.dtype)).float()).square().mean()

    return Calls(run, layer=nn.Linear(4, 4), branch=nn.Linear(4, 4).to(dtype))


def _eight_bits() -> Tensor:
    return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*quant.*")
@pytest.mark.parametrize(
    ("refused", "words", "followed"),
    [
        (
            lambda: _kinds(torch.randn(4, dtype=torch.cfloat), torch.abs),
            "weight: complex tensors",
            lambda: _kinds(torch.randn(4, 2), lambda w: torch.view_as_complex(w).abs()),
        ),
        (
            lambda: _branch(torch.float64),
            "branch.weight and 1 more: float64 tensors",
            lambda: _branch(torch.float64).float(),
        ),
        (
            lambda: _kinds(_eight_bits(), torch.dequantize, is_buffer=True),
            "weight: quantized tensors",
            lambda: _kinds(_eight_bits().int_repr(), lambda w: w.float() * 0.1, is_buffer=True),
        ),
    ],
)
def test_kinds_of_tensors_are_refused_and_the_advice_works(
    refused: Callable[[], nn.Module], words: str, followed: Callable[[], nn.Module]
) -> None:
    batch = {"x": torch.randn(2, 4)}
    with pytest.raises(CaptureError) as told:
        capture_model(refused(), batch, dtype=torch.float32)
    assert words in str(told.value) and "\n" not in str(told.value)
    _assert_same_gradients(followed(), batch)


def test_other_kinds_are_trained() -> None:
    """A whole model in double precision becomes one of the job's; what takes no gradient may be complex or whole."""
    batch = {"x": torch.randn(2, 4)}
    double = _branch(torch.float64).double()
    capture = capture_model(double, batch, dtype=torch.float32)
    assert capture.op_graph.loss
    double.layer.float()  # as a rank whose stage has this layer alone, in evaluation and at other shapes of training
    assert capture_model(double, batch, dtype=torch.float32, training=False).op_graph.loss
    assert recapture(double, capture.analysis, {"x": torch.randn(6, 4)}).op_graph.loss
    _assert_same_gradients(_kinds(torch.arange(4).to(torch.int8), lambda w: w.float()), batch)
    _assert_same_gradients(_kinds(torch.randn(4, dtype=torch.cfloat), torch.abs, is_buffer=True), batch)


def _assert_same_gradients(model: nn.Module, batch: dict[str, Tensor]) -> None:
    assert_is_model(capture_model(model, batch, dtype=torch.float32), model, batch)


def _sparse_gradients(model: Any, ids: Tensor) -> Tensor:
    second = nn.functional.embedding(ids, model.second, sparse=True)
    return (model.first(ids) * second + model.bag(ids).unsqueeze(1)).square().mean()


def test_sparse_gradients_become_dense_ones_of_the_same_numbers() -> None:
    first, second = nn.Embedding(8, 4, sparse=True), nn.Parameter(torch.randn(8, 4))
    bag = nn.EmbeddingBag(8, 4, mode="sum", sparse=True)
    model = Calls(_sparse_gradients, first=first, second=second, bag=bag)
    _assert_same_gradients(model, {"ids": torch.tensor([[1, 5, 1], [0, 7, 2]])})


def _writes_input(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    early = model.first(x.sum(1, keepdim=True))
    x[:, 1:] -= x.mean(1, keepdim=True)
    labels[labels < 2] = -100
    return nn.functional.cross_entropy(early + model.second(x.mul_(2.0)), labels)


def test_forward_writes_into_copies_of_the_batch() -> None:
    """What reads the input before the write and behind it reads what the model does; the batch stays as it is."""
    batch = {"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 2, 3])}
    before = {key: value.clone() for key, value in batch.items()}
    _assert_same_gradients(Calls(_writes_input, first=nn.Linear(1, 4), second=nn.Linear(4, 4)), batch)
    assert all(torch.equal(batch[key], before[key]) for key in batch)


def test_samples_are_counted_beside_packed_rows_and_graphs() -> None:
    row = torch.zeros(1, 8, dtype=torch.long)
    packed = {"input_ids": row, "labels": row, "position_ids": row, "cu_seq_lens_q": torch.tensor([0, 3, 8])}
    packed["cu_seq_lens_k"] = packed["cu_seq_lens_q"]
    assert count_samples(packed) == 1  # of two texts, three numbers say where they lie
    nodes, edges = torch.zeros(12, 4), torch.zeros(2, 20, dtype=torch.long)
    graph = {"x": nodes, "edge_index": edges, "y": torch.zeros(1)}
    assert not is_clearly_counted(graph)
    assert not is_clearly_counted(
        {"x": nodes, "batch": nodes[:, 0], "edge_index": edges, "y": torch.zeros(2)}
    )
    texts = {"input_ids": torch.zeros(8, 4), "labels": torch.zeros(8, 4), "pixel_values": torch.zeros(16, 3)}
    assert is_clearly_counted(texts) and count_samples(texts) == 8
    assert count_samples({**texts, "position_ids": row}) == 8
