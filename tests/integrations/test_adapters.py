"""What is saved of a model with peft's adapters is what peft loads; names, files and outputs against peft's own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gpp_plugin.errors import CheckpointError
from gpp_plugin.integrations.huggingface.hf_weights import save_pretrained
from tests.capture.test_one_sample import batch_of, llama
from tests.integrations import adapter_jobs as jobs

peft = pytest.importorskip("peft", reason="peft is not installed")


def save_in_stages(model: nn.Module, directory: Path) -> None:
    """Save a model whose weights two stages hold, from a copy without weights."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = list(state)
    halves: list[dict[str, Tensor]] = [{n: state[n] for n in part} for part in (names[::2], names[1::2])]
    hollow = copy.deepcopy(model).to("meta")
    save_pretrained(directory, model=hollow, states=dict(enumerate(halves)), num_stages=2)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch_of(2)).logits


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}],
    ids=["lora", "bias", "head", "dora"],
)
def test_files_are_those_of_peft(changes: dict[str, Any], tmp_path: Path) -> None:
    base = llama()
    model = jobs.with_lora(base, **changes)
    save_in_stages(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config, wanted = (
        json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in ("ours", "theirs")
    )
    for each in (config, wanted):  # peft writes a set, in the order of this process's hashes
        each["target_modules"] = sorted(each["target_modules"])
    assert config == wanted
    assert not list((tmp_path / "ours").glob("model*")), "no weights of the model itself"
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    assert torch.equal(logits(again), logits(model))
    # over an older save, of an adapter or of a whole model
    jobs.randomise(model)
    save_in_stages(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    assert torch.equal(logits(again), logits(model))
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


def test_several_adapters_have_directories(tmp_path: Path) -> None:
    base = llama()
    model = jobs.with_lora(base)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["o_proj"], task_type="CAUSAL_LM"))
    save_in_stages(model, tmp_path / "ours")
    assert (tmp_path / "ours" / "second" / "adapter_config.json").exists()
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    again.load_adapter(tmp_path / "ours" / "second", "second")
    for name in ("default", "second"):
        model.set_adapter(name)
        again.set_adapter(name)
        assert torch.equal(logits(again), logits(model)), name


def test_an_adapter_added_by_transformers(tmp_path: Path) -> None:
    base = llama()
    model: Any = copy.deepcopy(base)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    jobs.randomise(model)
    save_in_stages(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    assert torch.allclose(logits(again), logits(model), atol=1e-6)


def test_a_learnt_prompt_is_refused(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(llama(), config)
    with pytest.raises(CheckpointError, match="learnt prompt; .* take gather_state_dict"):
        save_in_stages(model, tmp_path / "ours")
    assert not list(tmp_path.iterdir())
