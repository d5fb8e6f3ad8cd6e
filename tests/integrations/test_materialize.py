"""Values of materialised parameters, against real models, files and other processes."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from gpp_plugin.errors import CheckpointError
from gpp_plugin.model.materialize import materialize_parameters, release_parameters, resident_bytes
from tests.models import MODELS, build
from tests.ranks import run_kept_ranks


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
def test_initialisers_give_the_distributions_of_a_real_model(name: str) -> None:
    """Constants and buffers are equal; random tensors differ, with the standard deviation of real ones."""
    on_meta, _ = build(name, device="meta")
    real = all_tensors(build(name)[0])
    made = materialize_parameters(on_meta, all_tensors(on_meta), device="cpu", seed=3)
    assert sorted(made) == sorted(real)
    assert all(tensor.is_meta for tensor in all_tensors(on_meta).values())
    other = all_tensors(build(name, seed=1)[0])
    num_random = 0
    for key, value in made.items():
        expected = real[key].detach()
        assert value.shape == expected.shape and value.dtype == expected.dtype, key
        assert not value.is_meta
        if torch.equal(expected, other[key]):  # does not depend on the seed: a constant, a table
            torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=key)
            continue
        num_random += 1
        assert not torch.equal(value, expected), key
        if value.numel() >= 256:
            assert 0.8 < float(value.std() / expected.std()) < 1.25, key
    assert num_random > 0


def test_a_value_depends_on_seed_and_name_only() -> None:
    model, _ = build("clip", device="meta")
    names = all_tensors(model)
    whole = materialize_parameters(model, names, device="cpu", seed=5)
    torch.rand(3)  # a different state of the global generator
    before = torch.get_rng_state()
    for name in ("text_projection.weight", "vision_model.encoder.layers.1.mlp.fc1.weight", "logit_scale"):
        alone = materialize_parameters(model, [name], device="cpu", seed=5)
        assert torch.equal(alone[name], whole[name])
    assert torch.equal(torch.get_rng_state(), before)
    other = materialize_parameters(model, ["text_projection.weight"], device="cpu", seed=6)
    assert not torch.equal(other["text_projection.weight"], whole["text_projection.weight"])
    layers = [whole[f"vision_model.encoder.layers.{i}.mlp.fc1.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def _make_on_rank() -> dict[str, list[float]]:
    """Each rank asks for its own stage's names; both hold the tied embedding, under different names."""
    rank = dist.get_rank()
    model, _ = build("t5", device="meta")
    torch.manual_seed(rank)
    names = ["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"]
    if rank == 1:
        names = ["decoder.block.0.layer.0.SelfAttention.q.weight", "lm_head.weight", names[1]]
    made = materialize_parameters(model, names, device="cpu", seed=11)
    return {name: tensor.flatten().tolist() for name, tensor in made.items()}


def test_replicas_and_ties_agree_across_processes() -> None:
    first, second = run_kept_ranks(_make_on_rank, 2)
    replica = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert first[replica] == second[replica]
    assert first["shared.weight"] == second["lm_head.weight"]
    assert first["shared.weight"] != second["decoder.block.0.layer.0.SelfAttention.q.weight"]


def test_real_tensors_are_given_without_a_copy_unless_cast() -> None:
    model, _ = build("gpt2")
    name = "transformer.wte.weight"
    own = model.get_parameter(name)
    assert materialize_parameters(model, [name], device="cpu")[name].data_ptr() == own.data_ptr()
    cast = materialize_parameters(model, [name], device="cpu", dtype=torch.bfloat16)[name]
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, own.detach().bfloat16())


def test_dtype_is_that_of_parameters_and_not_of_buffers() -> None:
    model, _ = build("batch_norm_mlp", device="meta")
    names = ["layers.0.0.weight", "layers.0.1.running_var", "layers.0.1.num_batches_tracked"]
    made = materialize_parameters(model, names, device="cpu", dtype=torch.bfloat16)
    assert [made[n].dtype for n in names] == [torch.bfloat16, torch.float32, torch.int64]


def test_a_cast_keeps_the_values_of_full_precision() -> None:
    model, _ = build("gpt2", device="meta")
    low, _ = build("gpt2", device="meta", dtype=torch.bfloat16)
    name = "transformer.h.0.mlp.c_fc.weight"
    full = materialize_parameters(model, [name], device="cpu")[name]
    assert torch.equal(materialize_parameters(low, [name], device="cpu")[name], full.bfloat16())


@pytest.mark.parametrize("name", ["clip", "llava", "t5", "whisper"])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_read_from_a_directory(name: str, shards: int, tmp_path: Path) -> None:
    model, _ = build(name)
    total = sum(t.numel() * 4 for t in model.state_dict().values())
    model.save_pretrained(tmp_path, max_shard_size=total // shards + 1)  # type: ignore[operator]
    on_meta, _ = build(name, device="meta")
    made = materialize_parameters(on_meta, all_tensors(on_meta), device="cpu", weights=tmp_path)
    assert all(torch.equal(made[key], value) for key, value in all_tensors(model).items())


def test_only_the_files_of_wanted_tensors_are_opened(tmp_path: Path) -> None:
    model, _ = build("gpt2")
    model.save_pretrained(tmp_path, max_shard_size=20_000)  # type: ignore[operator]
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = "transformer.h.1.mlp.c_fc.weight"
    for path in tmp_path.glob("*.safetensors"):
        if path.name != where[wanted]:
            path.write_bytes(b"not a safetensors file")
    on_meta, _ = build("gpt2", device="meta")
    made = materialize_parameters(on_meta, [wanted], device="cpu", weights=tmp_path)
    assert torch.equal(made[wanted], model.get_parameter(wanted))


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "..", "", "a\\\\b", "a\\0b", 3])
def test_an_index_leads_nowhere_else(name: object, tmp_path: Path) -> None:
    on_meta, _ = build("gpt2", device="meta")
    wanted = "transformer.h.0.mlp.c_fc.weight"
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({wanted: torch.ones(32, 128)}, tmp_path / "x.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {wanted: name}}))
    with pytest.raises(CheckpointError, match="is no name of a file beside it"):
        materialize_parameters(on_meta, [wanted], device="cpu", weights=inside)


def test_errors_name_the_tensor_and_the_fix(tmp_path: Path) -> None:
    on_meta, _ = build("gpt2", device="meta")
    name = "transformer.h.0.mlp.c_fc.weight"
    with pytest.raises(
        CheckpointError, match=r"no 'transformer.h.0.mlp.c_fx.weight'; the nearest names are \['"
    ):
        materialize_parameters(on_meta, ["transformer.h.0.mlp.c_fx.weight"], device="cpu")
    with pytest.raises(CheckpointError, match="give a directory that save_pretrained wrote"):
        materialize_parameters(on_meta, [name], device="cpu", weights=tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        materialize_parameters(on_meta, [name], device="cpu", weights=tmp_path / "no.safetensors")
    save_file({"transformer.h.0.mlp.c_fc.bias": torch.ones(7)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no 'transformer.h.0.mlp.c_fc.weight'; the nearest names"):
        materialize_parameters(on_meta, [name], device="cpu", weights=tmp_path)
    with pytest.raises(CheckpointError, match=r"has shape \(7,\), the model wants \(128,\)"):
        materialize_parameters(on_meta, ["transformer.h.0.mlp.c_fc.bias"], device="cpu", weights=tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r'files that are not there: "gone.safetensors"'):
        materialize_parameters(on_meta, [name], device="cpu", weights=tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not an index of safetensors files"):
        materialize_parameters(on_meta, [name], device="cpu", weights=tmp_path)


class Custom(nn.Module):
    """A plain module without a way to initialise its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_what_nothing_sets_is_refused() -> None:
    with torch.device("meta"):
        model = Custom()
    linear = ["linear.weight", "linear.bias"]
    assert sorted(materialize_parameters(model, linear, device="cpu")) == sorted(linear)
    for name in ("scale", "table"):
        with pytest.raises(CheckpointError, match=rf"nothing sets '{name}' .*reset_parameters\(\)"):
            materialize_parameters(model, [name], device="cpu")
    model.reset_parameters = lambda: nn.init.ones_(model.scale)  # type: ignore[assignment]
    assert materialize_parameters(model, ["scale"], device="cpu")["scale"].tolist() == [1.0] * 4


def test_initialising_one_parameter_leaves_real_ones_alone() -> None:
    model, _ = build("clip")
    before = {name: tensor.detach().clone() for name, tensor in all_tensors(model).items()}
    release_parameters(model, keep=[n for n in all_tensors(model) if "fc1" not in n])
    materialize_parameters(model, all_tensors(model), device="cpu", seed=2)
    for name, tensor in all_tensors(model).items():
        if "fc1" not in name:
            assert torch.equal(tensor, before[name])


def test_release_frees_what_other_stages_own() -> None:
    model, _ = build("t5")
    whole = resident_bytes(model)
    keep = {n for n, _ in model.named_parameters() if n.startswith("encoder")} | {"lm_head.weight"}
    own = sum(t.numel() * 4 for n, t in model.named_parameters() if n in keep or n == "shared.weight")
    storages = [weakref.ref(t) for n, t in model.named_parameters() if n.startswith("decoder")]
    frozen = model.get_parameter("decoder.final_layer_norm.weight")
    frozen.requires_grad_(False)
    del frozen
    released = release_parameters(model, keep)
    gc.collect()
    assert resident_bytes(model) == own
    assert released == whole - own
    assert storages and all(reference() is None for reference in storages)
    assert not model.get_parameter("decoder.final_layer_norm.weight").requires_grad
    assert model.get_parameter("shared.weight") is model.get_parameter("lm_head.weight")
    assert not model.get_parameter("shared.weight").is_meta
    assert release_parameters(model, keep) == 0
