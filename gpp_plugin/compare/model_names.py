"""What `gpp compare` may be told to compare: names, and a check of them that loads no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.library.named_models import config_names
from gpp_plugin.library.paper_graphs import MODELS

_LAYERS: dict[str, int] = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
TINY: dict[str, dict[str, Any]] = {
    "clip_tiny": {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 64,
        "text_config": {
            **_LAYERS, "num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 32,
            "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 511,
        },
        "vision_config": {**_LAYERS, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8},
    },
    "t5_tiny": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 4,
        "decoder_start_token_id": 0, "dropout_rate": 0.0,
    },
    "gpt2_tiny": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 512, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""Small HuggingFace models to try the command with."""

BUILT = ("mmt", "dlrm", "candle_uno", "two_branch")
"""Library models that can be trained (`library.paper_modules.MODULES`)."""


def trained_names() -> tuple[str, ...]:
    """Return the names of models that are small enough to train on any machine."""
    return (*TINY, *BUILT)


def planned_names() -> tuple[str, ...]:
    """Return the names of models that are planned only: what they take is known, but nobody would train them here."""
    return tuple(name for name in (*config_names(), *MODELS) if name not in BUILT)


def unknown_model(name: str) -> ConfigError:
    """Return the error of a name that is no model, with the nearest that is one."""
    names = (*trained_names(), *planned_names())
    return ConfigError(
        f"model {name!r}: no such file or model{nearest(name, names)} (known: {', '.join(names)}; or a HuggingFace "
        "config.json, or module:function of your own)"
    )


def check_model_name(name: str) -> None:
    """Refuse what is no model, before torch is loaded and any process starts.

    Raises:
        ConfigError: there is no such name, file, module or function.
    """
    if name in (*trained_names(), *planned_names()) or Path(name).exists():
        return
    if ":" not in name:
        raise unknown_model(name)
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        files = [path.stem for path in Path().glob("*.py")]
        raise ConfigError(
            f"model {name!r}: no module {module!r}{nearest(module, files)}; give module:function, importable from the "
            "working directory"
        )
    # read, not imported: what it does when it is imported is for the processes that train it
    source = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    if source is not None and function not in source.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"model {name!r}: {source.name} has no function {function!r}; give module:function")
