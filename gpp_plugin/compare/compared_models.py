"""The model of a comparison and its batches: HuggingFace's, a library model, or from the user's own function."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.tracing.sample_batches import count_samples, resize_batch, rows_per_sample
from gpp_plugin.compare.compare_settings import CompareSettings
from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.integrations.huggingface.hf_models import (
    FIRST_ORDINARY_ID,
    build_model_of,
    check_has_text,
    config_of,
    make_example_batch,
    read_hf_config,
)
from gpp_plugin.library.named_models import config_names
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.library.paper_modules import MODULES, make_batch
from gpp_plugin.model.graph.stage_graph import prepare_batch

# The models that `gpp compare` takes: names, and a check of them that loads no torch.

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
    _add_working_directory()
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


def _add_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model with its weights, and the mini-batch of each step; the same in every process."""

    model: nn.Module
    batch_at: Callable[[int], Batch]


def build_model(settings: CompareSettings) -> BuiltModel:
    """Build the model a user named.

    Raises:
        ConfigError: there is no such model, file or function, or its batch is none.
    """
    name = settings.model
    torch.manual_seed(settings.seed)
    if name in TINY or Path(name).exists():
        built = _huggingface_model(settings)
    elif name in MODULES:
        built = _library_model(settings)
    elif ":" in name:
        built = _own_model(settings)
    else:
        raise unknown_model(name)
    return BuiltModel(
        model=built.model.train(), batch_at=lambda step: prepare_batch(built.model, built.batch_at(step))
    )


def _huggingface_model(settings: CompareSettings) -> BuiltModel:
    name = settings.model
    config = config_of(TINY[name], name) if name in TINY else read_hf_config(name)
    model = build_model_of(config)
    example = make_example_batch(model, num_samples=settings.mini_batch, length=settings.text_length)
    if settings.length is not None:
        check_has_text(model, example)
    # 0 where the batch holds no token ids (a vision model); then nothing below is drawn from it.
    vocabulary = config.get_text_config().vocab_size if "input_ids" in example or "labels" in example else 0

    def batch_at(step: int) -> Batch:
        generator = torch.Generator().manual_seed(settings.seed + step)
        return {key: _drawn(value, vocabulary, generator) for key, value in example.items()}

    return BuiltModel(model=model, batch_at=batch_at)


def _drawn(value: Any, vocabulary: int, generator: torch.Generator) -> Any:
    """Return random values where the example batch has made-up ones."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    # the last id ends texts, and ids below the first ordinary one have meanings of their own
    low, high = FIRST_ORDINARY_ID, max(vocabulary - 1, FIRST_ORDINARY_ID + 1)
    ids = torch.randint(low, high, value.shape, generator=generator)
    return torch.where(value == FIRST_ORDINARY_ID, ids, value)


def _library_model(settings: CompareSettings) -> BuiltModel:
    try:
        model = MODULES[settings.model](**settings.sizes)
    except TypeError as error:
        raise ConfigError(f"--size: {settings.model}: {error}") from error

    def batch_at(step: int) -> Batch:
        return make_batch(model, settings.mini_batch, length=settings.text_length, seed=settings.seed + step)

    return BuiltModel(model=model, batch_at=batch_at)


def _own_model(settings: CompareSettings) -> BuiltModel:
    module_name, _, function_name = settings.model.partition(":")
    # What may come back, checked in this order so that each mistake has its own advice:
    #
    #   module:function                       imported from the working directory, as ``python -m`` would
    #   function() -> (model, batch)          a pair with an nn.Module
    #     batch = {"input_ids": [n, length]}  resized to train_batch_size samples, the same in every step
    #     batch = lambda step: {...}          drawn a step; must have train_batch_size samples itself
    #
    # Every process calls the function with the same torch seed, set by
    # `build_model`: all hold the same weights.
    _add_working_directory()
    where = f"model {settings.model!r}"
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        advice = "give module:function, importable from the working directory"
        raise ConfigError(f"{where}: {error}; {advice}") from error
    if not callable(function):
        raise ConfigError(f"{where}: is a {type(function).__name__}; name a function without arguments")
    try:
        answer = function()
    except Exception as error:
        raise ConfigError(f"{where}: its function raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], nn.Module):
        raise ConfigError(
            f"{settings.model} returned a {type(answer).__name__}; return the pair (model, batch): a torch.nn.Module, "
            "and a dict of tensors or a function from the step's number to one"
        )
    model, source = answer
    if not callable(source) and not isinstance(source, Mapping):
        raise ConfigError(f"{settings.model} returned a batch of type {type(source).__name__}; return a dict")

    def batch_at(step: int) -> Batch:
        if not callable(source):
            return resize_batch(source, settings.mini_batch)
        batch = dict(source(step))
        if count_samples(batch) != settings.mini_batch:
            raise ConfigError(
                f"{settings.model}: the batch of step {step} has {count_samples(batch)} samples, train_batch_size is "
                f"{settings.mini_batch}"
            )
        return batch

    return BuiltModel(model=model, batch_at=batch_at)


def cut_batch(batch: Mapping[str, Any], num_samples: int) -> list[Batch]:
    """Cut a batch into parts of ``num_samples`` samples."""
    rows = rows_per_sample(batch)
    parts = []
    # An entry may have several rows a sample (two images each): count = 2 cuts samples 2..3 as rows 4..7. One
    # without a batch axis (count 0) is whole in every part.
    for first in range(0, count_samples(batch), num_samples):
        part = dict(batch)
        for key, count in rows.items():
            if count:
                part[key] = batch[key][first * count : (first + num_samples) * count]
        parts.append(part)
    return parts
