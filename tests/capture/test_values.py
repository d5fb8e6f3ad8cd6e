"""Python reads values of a batch while a model is traced: recorded, guarded, replayed; never frozen silently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpp_plugin.config.block  # noqa: F401  (the schema, by which keys are named)
from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.recapture import read_values, recapture
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, count_samples, resize_batch
from gpp_plugin.errors import CaptureError
from gpp_plugin.integrations.huggingface.model_inputs import has_prepared_inputs
from gpp_plugin.ir.analysis import RECORDED, WHOLE_UNITS
from gpp_plugin.model.graph.stage_graph import prepare_batch
from tests.capture.graphs import Calls, assert_is_model, counted_exports, run_graph
from tests.integrations.whole_unit_jobs import family, family_units
from tests.reading_models import OneByOne, Reader, reader_batch

TWO = [[2, 1], [1, 2]]


def reader() -> tuple[Reader, CapturedGraph]:
    torch.manual_seed(0)
    model = Reader()
    return model, capture_model(model, WholeUnit(reader_batch(TWO), num_samples=2))


def test_a_model_whose_python_reads_values_is_captured_and_exact() -> None:
    model, capture = reader()
    assert capture.analysis.means == (RECORDED, WHOLE_UNITS)
    assert_is_model(capture, model, reader_batch(TWO))
    assert model.positions is None, "what a forward keeps is kept on a copy, and dropped"
    assert capture.recording is not None
    assert capture.recording.keys == ("ids", "labels", "mask", "sizes"), "no pixel decides about the graph"
    assert {node.is_coupling for node in capture.op_graph.nodes} == {True}


def test_the_graph_holds_for_other_values_that_read_the_same() -> None:
    model, capture = reader()
    assert capture.recording is not None
    for seed in (1, 2):  # images in other places, other labels in other places: as many of each
        batch = reader_batch(TWO, seed=seed)
        assert not torch.equal(batch["ids"] == 63, reader_batch(TWO)["ids"] == 63)
        assert capture.recording.matches(batch)
        assert_is_model(capture, model, batch)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(reader_batch([[1, 2], [2, 1]], seed=3), id="sizes"),
        pytest.param(reader_batch(TWO, seed=3, padded=False), id="padding"),
        pytest.param(reader_batch(TWO, seed=3, labelled=3), id="number of labels"),
    ],
)
def test_other_readings_are_told_and_captured_anew(other: dict[str, Any]) -> None:
    model, capture = reader()
    assert capture.recording is not None
    assert not capture.recording.matches(other)
    again = recapture(model, capture.analysis, WholeUnit(other, num_samples=2))
    assert_is_model(again, model, other)
    assert again.recording is not None
    assert again.recording.matches(other)
    assert not again.recording.matches(reader_batch(TWO))
    assert again.recording.values == read_values(model, capture.analysis, other).values


def test_a_rank_without_the_batch_replays_what_others_read() -> None:
    model, capture = reader()
    other = reader_batch([[1, 2], [2, 1]], seed=3)
    readings = read_values(model, capture.analysis, other).values
    shapes = {key: torch.empty_like(value, device="meta") for key, value in other.items()}
    replayed = recapture(model, capture.analysis, WholeUnit(shapes, num_samples=2, readings=readings))
    again = recapture(model, capture.analysis, WholeUnit(other, num_samples=2))
    assert str(replayed.graph) == str(again.graph)
    assert replayed.op_graph == again.op_graph
    assert_is_model(replayed, model, other)
    for wrong in (readings[:-1], (*readings, 1)):
        with pytest.raises(CaptureError, match="reads other values of this batch than the recording has"):
            recapture(model, capture.analysis, WholeUnit(shapes, num_samples=2, readings=wrong))


def test_another_structure_gets_the_names_of_the_blocks_borders() -> None:
    model, capture = reader()
    other = reader_batch([[2, 1], [1, 1, 1]], padded=False)  # a fourth image, and no mask: other operators
    again = recapture(model, capture.analysis, WholeUnit(other, num_samples=2))
    assert again.analysis.nodes != capture.analysis.nodes
    assert_is_model(again, model, other)
    planned, now = coarsen(capture), coarsen(again)
    assert [block.name for block in planned.blocks] == [block.name for block in now.blocks]
    assert [(e.src, e.dst, e.tensors) for e in planned.edges] == [
        (e.src, e.dst, e.tensors) for e in now.edges
    ]
    assert again.op_graph.loss == capture.op_graph.loss


def _branches(model: Any, x: Tensor, use: Tensor) -> Tensor:
    """Runs a layer where the batch says so."""
    for index, layer in enumerate(model.layers):
        if use[index]:
            x = torch.tanh(layer(x))
    return x.square().mean()


def test_other_blocks_are_refused_in_one_line() -> None:
    model, x = Calls(_branches, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    capture = capture_model(model, WholeUnit({"x": x, "use": torch.tensor([1, 1, 1])}, num_samples=2))
    with pytest.raises(CaptureError, match=r"other blocks .* block layers\.1 is gone; give batches"):
        recapture(model, capture.analysis, WholeUnit({"x": x, "use": torch.tensor([1, 0, 1])}, num_samples=2))


def _written(model: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Reads a tensor that began as known values, and was written with what a weight decides."""
    counts = ids + 1
    view = counts[0]
    view += (model.weight.sum() > 0).long()
    return (x * model.weight).sum() * counts.max().item()


def test_what_a_weight_decides_is_not_read() -> None:
    model = Calls(_written, weight=nn.Parameter(torch.ones(4)))
    with pytest.raises(CaptureError, match="depends on (tensor )?values"):
        capture_model(model, {"x": torch.ones(2, 4), "ids": torch.ones(2, 3, dtype=torch.long)})


def _codes(padding: int) -> Any:
    """Tokens for patches, found by a frozen codebook, are what some patches are asked for; a temperature is clamped."""

    def run(model: Any, x: Tensor, asked: Tensor) -> Tensor:
        codes = model.codebook(x).argmax(-1)
        codes[asked.ne(1)] = padding
        flat = codes.view(codes.shape[0], -1)
        places = flat.ne(padding)
        model.scale.data.clamp_(0, 2)
        return nn.functional.cross_entropy(model.layer(x)[places] * model.scale, flat[places])

    codebook, scale = nn.Linear(4, 10).requires_grad_(False), nn.Parameter(torch.tensor(7.0))
    return Calls(run, codebook=codebook, layer=nn.Linear(4, 10), scale=scale)


def test_what_a_weight_decides_is_read_where_all_it_may_be_reads_the_same() -> None:
    """No code is the padding, whichever it is: so many patches are asked for as the batch says."""
    torch.manual_seed(0)
    model = _codes(padding=-100)
    x, asked = torch.randn(2, 5, 4), torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0]])
    capture = capture_model(model, {"x": x, "asked": asked})
    assert capture.analysis.means == (RECORDED, WHOLE_UNITS)
    assert_is_model(capture, model, {"x": x, "asked": asked})
    again = {"x": torch.randn(2, 5, 4), "asked": asked.flip(1)}
    assert capture.recording is not None
    assert capture.recording.keys == ("asked",) and capture.recording.matches(again)
    assert_is_model(capture, model, again)
    assert not capture.recording.matches({"x": x, "asked": 1 - asked})
    trained = copy.deepcopy(model)
    run_graph(capture, trained, again)
    assert trained.scale.item() == 2.0, "what is written through .data is written by the graph"
    with pytest.raises(CaptureError, match="depends on (tensor )?values"):
        capture_model(_codes(padding=3), {"x": x, "asked": asked})  # a code may be 3


def _kinds(model: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Asks which numbers there are, and how many of each: tensors whose sizes the values decide, and that are read."""
    kinds, counts = ids.unique(return_counts=True)
    return (model.table[kinds] * counts[:, None]).square().sum() * x.mean() / int(counts.max())


def test_tensors_whose_sizes_values_decide_are_what_was_read() -> None:
    model = Calls(_kinds, table=nn.Parameter(torch.arange(12.0).view(6, 2)))
    batch = {"x": torch.ones(2, 4), "ids": torch.tensor([[5, 1, 1], [3, 1, 3]])}
    capture = capture_model(model, WholeUnit(batch, num_samples=2))
    assert_is_model(capture, model, batch)
    assert capture.recording is not None
    assert capture.recording.matches({**batch, "ids": batch["ids"].flip(0)})
    assert not capture.recording.matches({**batch, "ids": batch["ids"] - 1})


def _places(model: Any, x: Tensor, mask: Tensor, pairs: Tensor) -> Tensor:
    """Selects by masks beside unknown tensors, and writes where a list of pairs says, into what has a tensor's shape."""
    hidden = model.layer(x)
    is_free = torch.full_like(hidden[:, :, 0], True).bool()
    rows, columns = zip(*pairs, strict=True)
    is_free[rows, columns] = False
    kept = torch.cat([hidden[i][is_free[i]] for i in range(len(is_free))])
    return hidden.masked_select(mask[..., None] != 0).mean() + kept.pow(2).mean()


def test_places_beside_unknown_tensors_are_known() -> None:
    torch.manual_seed(0)
    model = Calls(_places, layer=nn.Linear(4, 4))
    batch = {
        "x": torch.randn(3, 4, 4),
        "mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]),
        "pairs": torch.tensor([[0, 1], [0, 1], [2, 3], [1, 1], [1, 2], [0, 0]]),
    }
    capture = capture_model(model, batch)
    assert_is_model(capture, model, batch)
    assert capture.recording is not None
    assert capture.recording.matches({**batch, "mask": batch["mask"].flip(0)})
    assert not capture.recording.matches({**batch, "pairs": batch["pairs"] * 0})


def _lengths(model: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Reads a number that was written into memory through a view."""
    table = torch.zeros(2, 3, dtype=torch.long)
    table[1].add_(ids.amax(0))
    return (x * model.weight).sum() * int(table.max())


def test_the_guard_follows_values_through_views_and_writes() -> None:
    model, ids = Calls(_lengths, weight=nn.Parameter(torch.ones(4))), torch.tensor([[1, 2, 3], [3, 1, 1]])
    capture = capture_model(model, {"x": torch.ones(2, 4), "ids": ids})
    assert_is_model(capture, model, {"x": torch.rand(2, 4), "ids": ids})
    assert capture.recording is not None
    assert capture.recording.matches({"ids": ids.flip(1)})
    assert not capture.recording.matches({"ids": ids + 1})


def test_a_structure_that_differs_with_the_samples_takes_whole_units() -> None:
    torch.manual_seed(0)
    model = OneByOne()
    capture = capture_model(model, {"x": torch.randn(3, 4)})
    assert capture.analysis.means == (WHOLE_UNITS,)
    assert_is_model(capture, model, {"x": torch.randn(3, 4)})
    with pytest.raises(CaptureError, match="cannot be run on 2; keep train_micro_batch_size_per_gpu"):
        resize_batch(WholeUnit({"x": torch.randn(3, 4)}, num_samples=3), 2)
    assert count_samples(WholeUnit({"patches": torch.ones(7, 2)}, num_samples=3)) == 3


def _categories(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=model.layer(x)).log_prob(labels).mean()


def test_checks_of_distributions_are_off_while_a_model_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    # whatever a library that was loaded before has done
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = Calls(_categories, layer=nn.Linear(4, 3))
    batch = {"x": torch.randn(2, 4), "labels": torch.tensor([0, 2])}
    capture = capture_model(model, batch)
    assert capture.analysis.means == ()
    assert_is_model(capture, model, batch)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def _clamped(clamps: bool = True) -> nn.Module:
    """Asks whether something overflowed, as encoders do that train in half precision."""

    def run(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x)
            if not torch.isfinite(x).all():
                x = torch.clamp(x, min=-10.0, max=10.0) if clamps else x * 0
            if torch.isinf(x).any():
                x = torch.clamp(x, min=-5.0, max=5.0)
        return x.square().mean()

    return Calls(run, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))


@pytest.mark.parametrize("largest", [1.0, 1e38, float("inf")])
def test_branches_on_overflow_are_choices_of_values(largest: float) -> None:
    torch.manual_seed(0)
    model = _clamped()
    capture = capture_model(model, {"x": torch.randn(2, 4)})
    x = torch.randn(2, 4)
    x[0, 0] = largest
    expected = model(x)
    loss = run_graph(capture, model, {"x": x})[capture.op_graph.loss]
    torch.testing.assert_close(loss, expected, equal_nan=True)
    if largest == 1.0:
        assert_is_model(capture, model, {"x": x})
    with pytest.raises(CaptureError, match="does something else than clamp"):
        capture_model(_clamped(clamps=False), {"x": torch.randn(2, 4)})


def test_what_one_export_needed_the_others_begin_with() -> None:
    with counted_exports() as exported:
        capture_model(_clamped(), {"x": torch.randn(2, 4)})
    assert len(exported) == 3, "one fails at the branch on overflow; then 2 samples, and 4"


class _KeepsPrecision(nn.Module):
    """A router that says in every forward which precision it is in, as NLLB-MoE and Switch do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(self.dtype)
        return self.gate(x.to(self.dtype)).float().square().mean()


def test_a_conversion_that_changes_nothing_is_none() -> None:
    torch.manual_seed(0)
    model, batch = _KeepsPrecision(torch.float32), {"x": torch.randn(2, 4)}
    before = nn.Module.to
    assert_is_model(capture_model(model, batch), model, batch)
    assert nn.Module.to is before
    with pytest.raises(CaptureError, match=r"cannot be captured at gate .*self\.gate\.to"):
        capture_model(_KeepsPrecision(torch.bfloat16), batch)


def test_a_mask_that_nobody_asked_for_is_not_made() -> None:
    import transformers.masking_utils as masking
    from transformers import BertConfig, BertForMaskedLM

    before = masking._ignore_bidirectional_mask_sdpa
    model = BertForMaskedLM(
        BertConfig(
            **{k: v for k, v in _text("bert").items() if k not in ("model_type", "num_key_value_heads")}
        )
    ).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(3, 60, (2, 6))
    capture = capture_model(model, {"input_ids": ids, "labels": ids})
    attention = torch.ops.aten.scaled_dot_product_attention.default
    calls = [node for node in capture.graph.nodes if node.target is attention]
    assert len(calls) == 2
    assert all(len(node.all_input_nodes) == 3 for node in calls), "queries, keys and values"
    assert masking._ignore_bidirectional_mask_sdpa is before


def _text(kind: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return {
        "model_type": kind, **sizes, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


def test_gemma3_makes_its_masks_by_broadcasting() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "image_size": 8,
        "num_attention_heads": 4, "num_hidden_layers": 1, "patch_size": 4,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"]
    text = _text("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=6, layer_types=kinds)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=61, image_token_id=61
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).train()
    ids = torch.randint(3, 60, (2, 12))
    ids[:, 2:6] = 61
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    batch = {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": (ids == 61).long(),
        "pixel_values": torch.randn(2, 3, 8, 8), "labels": ids.masked_fill(ids == 61, -100),
    }  # fmt: skip
    capture = capture_model(model, batch)
    assert capture.analysis.means == ()
    assert_is_model(capture, model, batch)
    import transformers.masking_utils as masking

    assert masking._vmap_expansion_sdpa.__module__ == masking.__name__, "as it was"


def _qwen() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 1, "num_heads": 4, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=_text("qwen2_vl_text", rope_parameters=sections), vision_config=vision, image_token_id=61,
        video_token_id=62, vision_start_token_id=59, vision_end_token_id=60,
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(3, 59, (2, 12))
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 59, 61, 60
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    batch = {
        "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids > 58, -100),
        "mm_token_type_ids": (ids == 61).long(), "pixel_values": torch.randn(32, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }  # fmt: skip
    return Qwen2VLForConditionalGeneration(config).train(), batch


def test_positions_made_ahead_leave_images_where_they_stand_out_of_the_readings() -> None:
    model, batch = _qwen()
    prepared = prepare_batch(model, batch)
    assert set(prepared) - set(batch) == {"position_ids"}
    assert model.model.rope_deltas is None
    assert has_prepared_inputs(model, prepared)
    assert not has_prepared_inputs(model, batch)
    assert prepare_batch(model, {**batch, "image_grid_thw": None}).get("position_ids") is None
    capture = capture_model(model, WholeUnit(prepared, num_samples=2))
    assert_is_model(capture, model, prepared)
    assert capture.recording is not None
    assert capture.recording.keys == ("image_grid_thw", "input_ids")
    moved = {
        key: batch[key].roll(1, 1) for key in ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
    }
    other = prepare_batch(model, {**batch, **moved})
    assert not torch.equal(other["position_ids"], prepared["position_ids"])
    assert capture.recording.matches(other)
    # the model makes its positions itself
    assert_is_model(capture, model, {**batch, **moved}, prepared=other)


def test_blocks_end_where_images_are_joined_however_many_there_are() -> None:
    # LLaVA-NeXT projects all tiles together, takes them apart image by image, and joins them again
    model = family("llava_next")
    two, four = (family_units("llava_next", 0)[i] for i in (0, 2))
    capture = capture_model(model, WholeUnit(two, num_samples=2))
    again = recapture(model, capture.analysis, WholeUnit(four, num_samples=2))
    for found in (capture, again):
        graph = coarsen(found)
        (edge,) = (e for e in graph.edges if e.src == "model.multi_modal_projector")
        assert edge.dst == "model.language_model.layers.0" and len(edge.tensors) == 1
        projector = next(block for block in graph.blocks if block.name == edge.src)
        assert "model.image_newline" in projector.parameters


def ctc(logits: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    lengths = torch.full((len(logits),), logits.shape[1])
    return nn.functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1), labels.masked_select(mask), lengths, mask.sum(-1)
    )


class Spoken(nn.Module):
    """Reads of its labels, and so does its loss function, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.loss_function = ctc

    def forward(self, frames: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if labels.max() >= 5:
            raise ValueError("no such label")
        return {"loss": self.loss_function(self.head(frames), labels)}


def test_what_a_function_that_runs_as_it_is_reads_is_no_reading() -> None:
    torch.manual_seed(0)
    model = Spoken()
    labels = torch.tensor([[1, 3, 2], [4, -100, -100]])
    batch = {"frames": torch.randn(2, 9, 4), "labels": labels}
    capture = capture_model(model, WholeUnit(batch, num_samples=2))
    assert capture.analysis.eager == ("loss_function",)
    assert capture.recording is not None and capture.recording.values == (False,)
    other = {"frames": torch.randn(2, 9, 4), "labels": labels.flip(0)}
    assert_is_model(capture, model, other)
    empty = {key: torch.empty_like(value, device="meta") for key, value in batch.items()}
    lacking = WholeUnit(empty, num_samples=2, readings=capture.recording.values)
    assert_is_model(recapture(model, capture.analysis, lacking), model, other)
