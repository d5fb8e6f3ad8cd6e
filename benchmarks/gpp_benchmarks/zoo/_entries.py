"""What one model of the zoo is, how it is built, and what its batches are made of.

A configuration is data: the name of a class of transformers and what its configuration is given. Nothing is
downloaded, weights are random and the same at every build, and nothing in a model is drawn at random while it trains:
dropout, layer drop and random masks are switched off wherever a configuration names them (`calm`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]

VOCABULARY = 128
WIDTH = 32
HEADS = 4
PAD, START, END = 0, 1, 2
IMAGE = 63
"""The token that stands for an image; tokens of a text are 3 to 59."""
AUDIO, VIDEO, IMAGE_START, IMAGE_END, VIDEO_START, VIDEO_END = 64, 65, 66, 67, 68, 69

LAYERS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}
IDS: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}

_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "router_jitter")
"""Parts of the names by which configurations ask for random numbers; 0 asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One family: how its model is made, and its batches.

    Args:
        name: as transformers calls its folder, and behind it what tells several of one folder apart.
        kind: the class it is counted in.
        model: a class of transformers.
        config: what the model's configuration is given; nested dicts are those of towers.
        batch: makes the batch of some samples at a length.
        lengths: at which it is captured, and another one.
        means: what a length counts.
        note: what was changed so that the loss can be computed twice, and other things a reader may miss.
        draws: whether the loss is of numbers drawn by torch's generator; others are the same whatever its seed.
        extra: what to set on the configuration after it is made.
    """

    name: str
    kind: str
    model: str
    config: Mapping[str, Any]
    batch: Callable[[int, int], Batch]
    lengths: tuple[int, int] = (8, 12)
    means: str = "text tokens"
    note: str = ""
    draws: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


def build_model(entry: ZooModel, *, device: str = "cpu") -> nn.Module:
    """Return a family's model in training mode; on ``meta`` without weights.

    On the CPU no weight is left at a constant: a gate that starts at zero would hide what is behind it.
    """
    on_device: Any = torch.device(device) if device != "cpu" else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), on_device:
        torch.manual_seed(0)
        model = _from_config(entry).train()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0  # some are written into the code
        if device == "cpu":
            _stir(model)
    return model


def transformers_class(name: str) -> Any:
    """Return what transformers calls ``name``."""
    transformers: Any = importlib.import_module("transformers")
    return getattr(transformers, name)


def _from_config(entry: ZooModel) -> nn.Module:
    made = transformers_class(entry.model)
    config = made.config_class(**entry.config)
    for name, value in entry.extra.items():
        setattr(config, name, value)
    calm(config)
    model: nn.Module = made(config)
    return model


def calm(config: Any) -> None:
    """Switch off what a configuration, or one inside it, has drawn at random."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            calm(value)
        elif isinstance(value, dict):
            for key in value:
                if _is_asked_for(key, value[key]):
                    value[key] = type(value[key])(0)
        elif _is_asked_for(name, value):
            setattr(config, name, type(value)(0))
        elif name == "apply_spec_augment":
            config.apply_spec_augment = False


def _is_asked_for(name: Any, value: Any) -> bool:
    """Return whether a value of a configuration asks for random numbers."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and any(part in str(name) for part in _RANDOM)


def _stir(model: nn.Module) -> None:
    """Give weights that all start at one value, or at none, small random differences."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if not bool(torch.isfinite(parameter).all()) or float(parameter.abs().max()) > 1e4:
                parameter.normal_(0.0, 0.02)
            elif bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)


# ---- batches ---------------------------------------------------------------------------------------


def text_config(model_type: str = "llama", **values: Any) -> dict[str, Any]:
    """Return a language tower's configuration."""
    return {
        "model_type": model_type, **LAYERS, **IDS, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, **values,
    }  # fmt: skip


def vision_config(model_type: str = "clip_vision_model", **values: Any) -> dict[str, Any]:
    """Return a vision tower's configuration: images of 8 x 8 in four patches."""
    return {"model_type": model_type, **LAYERS, "image_size": 8, "patch_size": 4, "num_channels": 3, **values}


def integers(*shape: int, first: int = 3, end: int = 60, seed: int = 1) -> Tensor:
    """Return whole numbers from ``first`` up to but not ``end``."""
    return torch.randint(first, end, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 2) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 3) -> Tensor:
    """Return numbers evenly distributed between 0 and 1."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def right_mask(samples: int, length: int) -> Tensor:
    """Return a mask of ones, but for the last token of every second sample."""
    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[1::2, -1] = 0
    return mask


def text(samples: int, length: int) -> Batch:
    """Return a text to go on with: every second sample is padded by a token."""
    ids, mask = integers(samples, length), right_mask(samples, length)
    ids = torch.where(mask > 0, ids, PAD)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def masked_text(samples: int, length: int) -> Batch:
    """Return a text of which every third token is asked for."""
    batch = text(samples, length)
    batch["labels"][:, 1::3] = -100
    batch["labels"][:, 2::3] = -100
    return batch


def pixels(samples: int, side: int = 8, channels: int = 3) -> Tensor:
    """Return images."""
    return numbers(samples, channels, side, side)


def text_with(
    samples: int,
    length: int,
    *,
    count: int,
    token: int = IMAGE,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
) -> Batch:
    """Return texts with ``count`` tokens in each, behind the first word, that stand for something else."""
    # w [before] T T T T [after] w w w: T ask for no word, and are no padding
    batch = text(samples, length)
    inserted = torch.tensor([*before, *([token] * count), *after]).repeat(samples, 1)
    values = {
        "input_ids": inserted,
        "attention_mask": torch.ones_like(inserted),
        "labels": torch.full_like(inserted, -100),
    }
    return {key: torch.cat([batch[key][:, :1], values[key], batch[key][:, 1:]], 1) for key in batch}


def image_text(samples: int, length: int) -> Batch:
    """Return texts with one image each, of four patches that are a token each."""
    return {**text_with(samples, length, count=4), "pixel_values": pixels(samples)}


def pair(samples: int, length: int) -> Batch:
    """Return images and texts that belong together."""
    batch = text(samples, length)
    del batch["labels"]
    return {**batch, "pixel_values": pixels(samples), "return_loss": True}


def classes(samples: int, num: int = 3) -> Tensor:
    """Return a class for each sample."""
    return torch.arange(samples) % num


def to_text(samples: int, length: int) -> Batch:
    """Return texts and what they become, for an encoder and a decoder."""
    batch = text(samples, length)
    labels = integers(samples, max(length // 2, 4), seed=4)
    return {**batch, "labels": labels}
