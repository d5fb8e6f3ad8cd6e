"""Malformed HuggingFace configurations: `gpp plan` refuses each in one line that names the entry."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from gpp_plugin.api import make_request
from gpp_plugin.errors import GppError
from tests.soak.fuzz import MODELS
from tests.test_malformed import _with

GPT2, CLIP, T5 = MODELS
NAN = float("nan")

ENTRIES: list[tuple[int, str, Any]] = [
    (0, "n_embd", -16), (0, "n_embd", "16"), (0, "n_embd", 0), (0, "n_embd", 17), (0, "n_embd", [16]),
    (0, "n_embd", 2**40), (0, "n_embd", NAN), (0, "n_layer", -1), (0, "n_layer", "two"), (0, "n_layer", 10**6),
    (0, "n_layer", 1.5), (0, "n_head", 0), (0, "n_head", 3), (0, "n_head", -2), (0, "vocab_size", -64),
    (0, "vocab_size", "64"), (0, "vocab_size", 0), (0, "n_positions", -1), (0, "n_positions", 0),
    (0, "activation_function", "gelu_newer"), (0, "activation_function", 3), (0, "attn_pdrop", "0.1"),
    (0, "attn_pdrop", -0.1), (0, "attn_pdrop", 1.5), (0, "architectures", "GPT2LMHeadModel"), (0, "architectures", []),
    (0, "architectures", ["GPT2Model2"]), (0, "architectures", ["pipeline"]), (0, "architectures", [3]),
    (0, "model_type", "gpt-2"), (0, "model_type", 2), (0, "model_type", None), (0, "n_inner", -32),
    (1, "vision_config.hidden_size", -8), (1, "vision_config.patch_size", 0), (1, "vision_config.patch_size", 64),
    (1, "vision_config.num_attention_heads", 3), (1, "vision_config", [1]), (1, "vision_config.image_size", "16"),
    (1, "text_config.num_hidden_layers", -1), (1, "text_config.vocab_size", -1), (1, "projection_dim", -8),
    (1, "text_config.intermediate_size", 0), (2, "d_model", -8), (2, "num_heads", 0), (2, "d_kv", "4"),
    (2, "num_layers", -1), (2, "d_ff", -16), (2, "vocab_size", 1.5),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the models' code beforehand: seconds of the first case of each, and no reader's."""
    for model in MODELS:
        getattr(transformers, model["architectures"][0])


@pytest.mark.parametrize(("model", "path", "value"), [
    pytest.param(*row, id=f"{i}-{row[1]}") for i, row in enumerate(ENTRIES)
])  # fmt: skip
def test_models(model: int, path: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_with(MODELS[model], path, value)))
    key = "" if value != value else path.rpartition(".")[2]
    with pytest.raises(GppError) as caught:
        make_request(file, "dgx_h100", num_devices=2, length=8, mini_batch=4, loss_unit=2)
    line = str(caught.value)
    assert "\n" not in line and 20 < len(line) < 700 and str(file) in line, line
    # where heads do not divide a size, either of the two is at fault
    assert key in line or "divisible" in line or "multiple" in line, line


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model["model_type"]))
def test_whole_models_are_planned(model: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(model))
    assert make_request(file, "dgx_h100", num_devices=2, length=8, mini_batch=4, loss_unit=2).graph.blocks
