"""save_pretrained by stages against from_pretrained; names against HuggingFace's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from gpp_benchmarks.zoo import CATALOGUE
from gpp_benchmarks.zoo import build as build_of_zoo
from gpp_plugin.errors import CheckpointError
from gpp_plugin.integrations.huggingface import hf_models
from gpp_plugin.integrations.huggingface.hf_weights import (
    checkpoint_keys,
    save_pretrained,
    saved_names,
    tied_names,
)
from tests.models import build
from tests.ranks import run_kept_ranks

PRETRAINED = ("clip", "siglip", "llava", "whisper", "t5", "gpt2", "bert")


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def files_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118 (not a dict)
                assert key not in found
                found[key] = reader.get_tensor(key)
    return found


def save_alone(directory: Path, model: nn.Module, state: dict[str, Tensor], num_stages: int = 1) -> None:
    save_pretrained(directory, model=model, states={0: state}, num_stages=num_stages)


def reloaded(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    transformers.utils.logging.disable_progress_bar()
    return type(model).from_pretrained(directory).state_dict()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PRETRAINED)
def test_one_process_writes_what_huggingface_writes(name: str, tmp_path: Path) -> None:
    model, _ = build(name)
    on_meta, _ = build(name, device="meta")
    save_alone(tmp_path / "ours", on_meta, all_tensors(model))
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    ours, theirs = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    config, reference = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("ours", "theirs"))
    assert config == reference
    has_generation = (tmp_path / "theirs" / "generation_config.json").exists()
    assert (tmp_path / "ours" / "generation_config.json").exists() == has_generation


STAGES = {"t5": "decoder", "clip": "vision_model"}
"""Model -> what the names of its second stage contain."""


def _stage_names(name: str) -> list[list[str]]:
    """Return the names of two stages; T5's shared embedding is on both, on the second under another name."""
    names = list(all_tensors(build(name, device="meta")[0]))
    stages = [[n for n in names if STAGES[name] not in n], [n for n in names if STAGES[name] in n]]
    return [stages[0], [*stages[1], "lm_head.weight"]] if name == "t5" else stages


def _save_in_stages(directory: str) -> None:
    """Ranks 0 and 1 are replicas of stage 0; rank 2 is stage 1."""
    rank = dist.get_rank()
    stage = 1 if rank == 2 else 0
    for name in STAGES:
        model, _ = build(name, dtype=torch.bfloat16)
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        save_pretrained(
            Path(directory) / name,
            model=model,
            states={stage: {n: tensors[n] for n in _stage_names(name)[stage]}} if rank != 1 else {},
            num_stages=2,
            group=dist.group.WORLD,
            timeout=60,
        )


def test_stages_reload_bit_equal(tmp_path: Path) -> None:
    for name in STAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("kept")
        (tmp_path / name / "model-00007-of-00009.safetensors").write_text("of an older save")
    run_kept_ranks(_save_in_stages, 3, str(tmp_path))
    for name in STAGES:
        target = tmp_path / name
        files = {path.name for path in target.iterdir()}
        shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
        assert shards | {"tokenizer.json", "config.json", "model.safetensors.index.json"} <= files
        assert "model-00007-of-00009.safetensors" not in files
        model, _ = build(name, dtype=torch.bfloat16)
        expected, got = model.state_dict(), reloaded(model, target)
        assert sorted(got) == sorted(expected)
        assert all(got[k].dtype == v.dtype and torch.equal(got[k], v) for k, v in expected.items())
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in files_of(target).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(STAGES)


def _save_with_a_failure(directory: str) -> str:
    rank = dist.get_rank()
    model, _ = build("gpt2")
    tensors = all_tensors(model)
    state = {n: t for n, t in tensors.items() if (".h.1." in n) == (rank == 1)}
    if rank == 1:
        state["transformer.h.1.ln_1.weight"] = torch.empty(32, device="meta")
    with pytest.raises(CheckpointError) as caught:
        save_pretrained(
            directory, model=model, states={rank: state}, num_stages=2,
            group=dist.group.WORLD, timeout=30,
        )  # fmt: skip
    return str(caught.value)


def test_a_rank_that_fails_fails_all_and_leaves_the_old_files(tmp_path: Path) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / "model.safetensors.index.json").write_text("old")
    messages = run_kept_ranks(_save_with_a_failure, 2, str(target))
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0] and "meta device" in messages[0]
    assert [path.name for path in target.iterdir()] == ["model.safetensors.index.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_disk_that_refuses_is_reported_and_cleaned_up(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    (tmp_path / "export").write_text("a file, not a directory")
    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        save_alone(tmp_path / "export", model, all_tensors(model))
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_incomplete_state_is_refused(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    state = all_tensors(model)
    del state["transformer.ln_f.weight"]
    unheld = r"no stage holds 1 tensors of the model: \['transformer.ln_f.weight'\]"
    with pytest.raises(CheckpointError, match=unheld):
        save_alone(tmp_path / "x", model, state)
    with pytest.raises(CheckpointError, match="'wte'"):
        save_alone(tmp_path / "x", model, {"wte": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"stages \[0\] write the model, of 2 stages"):
        save_alone(tmp_path / "x", model, all_tensors(model), num_stages=2)
    assert not list(tmp_path.iterdir())


def test_a_plain_model_is_saved_without_a_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build("batch_norm_mlp")
    save_alone(tmp_path / "x", model, all_tensors(model))
    assert "not a transformers PreTrainedModel" in caplog.text
    assert not (tmp_path / "x" / "config.json").exists()
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert "no transformers config" in index["metadata"]["note"]
    files = files_of(tmp_path / "x")
    assert sorted(files) == sorted(model.state_dict())
    assert all(torch.equal(files[k], v) for k, v in model.state_dict().items())


def test_views_of_a_flat_buffer_are_saved_alone(tmp_path: Path) -> None:
    """ZeRO keeps parameters as views of one buffer; a shard must not hold the buffer."""
    model, _ = build("two_branch")
    state = all_tensors(model)
    flat = torch.cat([t.detach().flatten() for t in state.values()])
    parts = flat.split([t.numel() for t in state.values()])
    views = {name: part.view(t.shape) for (name, t), part in zip(state.items(), parts, strict=True)}
    save_alone(tmp_path / "x", model, views)
    files = files_of(tmp_path / "x")
    assert all(torch.equal(files[k], state[k]) for k in state)
    assert next((tmp_path / "x").glob("*.safetensors")).stat().st_size < flat.numel() * 4 + 8192


def test_ties_go_by_the_first_name_and_are_saved_under_huggingfaces() -> None:
    model, _ = build("whisper", device="meta")
    names = tied_names(model)
    assert names["proj_out.weight"] == names["model.decoder.embed_tokens.weight"]
    bert, _ = build("bert", device="meta")
    saved = saved_names(bert)
    assert saved[tied_names(bert)["cls.predictions.decoder.bias"]] == "cls.predictions.bias"

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a = nn.Linear(4, 4), nn.Linear(4, 4)
            self.a.weight = self.b.weight

    assert tied_names(Tied())["a.weight"] == "b.weight"
    assert saved_names(Tied())["b.weight"] == "b.weight"


def test_keys_of_older_checkpoints_are_renamed() -> None:
    model, _ = build("llava", device="meta")
    older = ["language_model.model.norm.weight", "language_model.lm_head.weight"]
    plain, converted = checkpoint_keys(model, older)
    assert plain == {
        "model.language_model.norm.weight": "language_model.model.norm.weight",
        "lm_head.weight": "language_model.lm_head.weight",
    }
    assert converted == {}
    base: Any = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    head, _ = build("gpt2", device="meta")
    keys, _ = checkpoint_keys(head, [key for key in base.state_dict() if key.startswith("h.0.ln_1")])
    assert keys == {f"transformer.h.0.ln_1.{leaf}": f"h.0.ln_1.{leaf}" for leaf in ("weight", "bias")}


def test_a_models_own_checkpointing_is_noticed_without_a_warning_of_its_own() -> None:
    from gpp_plugin.integrations.deepspeed.dispatch import _checkpoints_activations

    model, _ = build("gpt2")
    assert not _checkpoints_activations(model)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    assert _checkpoints_activations(model)
    assert not _checkpoints_activations(torch.nn.Linear(1, 1))


@pytest.fixture
def small_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and sound of models that take any size: small ones, for models of a few layers."""
    for name, value in (("_USUAL_SIDE", 64), ("_USUAL_FRAMES", 96), ("_USUAL_WAVE", 4096)):
        monkeypatch.setattr(hf_models, name, value)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        # 3 samples of 16 x 16 patches of 3 * 2 * 4 * 4 numbers; 4 patches are a place
        ("qwen2_5_vl", {"pixel_values": (768, 96), "image_grid_thw": (3, 3), "input_ids": (3, 64 + 8)}),
        ("llava_next", {"pixel_values": (3, 2, 3, 8, 8), "image_sizes": (3, 2), "input_ids": (3, 10 + 8)}),
        ("blip_2", {"pixel_values": (3, 3, 8, 8), "input_ids": (3, 4 + 8)}),
        ("idefics3", {"pixel_values": (3, 1, 3, 8, 8), "input_ids": (3, 1 + 8)}),
        ("aya_vision", {"pixel_values": (3, 3, 8, 8), "input_ids": (3, 1 + 8)}),
        ("lfm2_vl", {"pixel_values": (3, 4, 48), "spatial_shapes": (3, 2), "input_ids": (3, 1 + 8)}),
        ("qwen2_audio", {"input_features": (3, 8, 16), "input_ids": (3, 4 + 8)}),
        ("speech_to_text", {"input_features": (3, 96, 8), "labels": (3, 8)}),
        ("wav2vec2", {"input_values": (3, 4096), "labels": (3, 8)}),
        ("segformer", {"pixel_values": (3, 3, 32, 32), "labels": (3, 32, 32)}),
        ("bert_questions", {"input_ids": (3, 8), "start_positions": (3,), "end_positions": (3,)}),
        ("roberta_choice", {"input_ids": (3, 2, 8), "labels": (3,)}),
        ("videomae", {"pixel_values": (3, 2, 3, 8, 8), "labels": (3,)}),
    ],
)
def test_example_batches_have_a_loss(
    small_examples: None, name: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    model, _ = build_of_zoo(name)
    batch = hf_models.make_example_batch(model, num_samples=3, length=8)
    assert {key: tuple(batch[key].shape) for key in shapes} == shapes
    assert torch.isfinite(model(**batch).loss)


def test_most_families_have_an_example_batch(small_examples: None) -> None:
    found = {}
    for name in CATALOGUE:
        model, _ = build_of_zoo(name)
        model.config.use_cache = False  # type: ignore[union-attr]
        try:
            result = model(**hf_models.make_example_batch(model, num_samples=2, length=8))
            found[name] = result["loss"] is not None
        except Exception:  # refused in a line, or what a model says of inputs that do not fit
            found[name] = False
    of_vision = [found[name] for name, entry in CATALOGUE.items() if entry.kind == "vision-language"]
    assert sum(found.values()) >= 260
    assert sum(of_vision) >= 55
