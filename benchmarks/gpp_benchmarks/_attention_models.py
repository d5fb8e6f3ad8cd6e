"""Twelve families of HuggingFace models of any size, and batches for them with and without padding.

They cover the ways in which models ask for attention: causal with a padding mask (GPT-2, OPT), with fewer heads of keys
than of queries (Llama), within a window (Mistral), in both directions (BERT, DistilBERT), without masks (ViT), with a
bias that is learnt (T5), across encoder and decoder (T5, Whisper), and several of them in one model (CLIP, SigLIP,
LLaVA).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_benchmarks.zoo._catalogue import transformers_class

Batch = dict[str, Any]
VOCABULARY = 128
HEADS = 4
IMAGE = 63
"""The token that stands for an image."""
PADDINGS = ("none", "left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a model and its batches are; of a text, ``length`` is in tokens."""

    width: int = 32
    layers: int = 2
    length: int = 8
    samples: int = 4

    @property
    def image(self) -> int:
        """Return the side of an image whose patches of 4 x 4 are at most as many as a text has tokens."""
        return 4 * int(self.length**0.5)


@dataclass(frozen=True, slots=True)
class Family:
    """One family: a class of transformers, what makes a batch of a size and a padding, and its configuration.

    Args:
        config: numbers, and names of sizes (`_sized`).
    """

    model: str
    batch: Callable[[Size, str], Batch]
    config: Mapping[str, Any]
    is_padded: bool = True

    def make(self, size: Size) -> nn.Module:
        """Return the model of a size."""
        made = transformers_class(self.model)
        model: nn.Module = made(made.config_class(**_sized(self.config, size)))
        return model


def _sized(config: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """Return a configuration whose names of sizes are numbers."""
    numbers = {
        "width": size.width,
        "4 width": 4 * size.width,
        "head": size.width // HEADS,
        "layers": size.layers,
        "length": size.length,
        "half": size.length // 2,
        "image": size.image,
    }
    return {
        key: _sized(value, size)
        if isinstance(value, Mapping)
        else numbers[value]
        if isinstance(value, str) and value in numbers
        else value
        for key, value in config.items()
    }


def build_family(name: str, size: Size, *, seed: int = 0) -> tuple[nn.Module, Callable[[str], Batch]]:
    """Return a family's model in training mode, without dropout, and what makes its batches by their padding."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.make(size).train()
    return model, lambda padding: family.batch(size, padding)


def _mask(size: Size, padding: str, length: int | None = None) -> Tensor:
    """Return a mask of ones, or one whose sample i lacks i tokens of a quarter of them at one end."""
    length = length or size.length
    missing = torch.arange(size.samples)[:, None] % (length // 4 + 1)
    position = torch.arange(length)[None, :]
    if padding == "none":
        return torch.ones(size.samples, length, dtype=torch.int64)
    return ((position >= missing) if padding == "left" else (position < length - missing)).long()


def _ids(size: Size, length: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 60, (size.samples, length or size.length), generator=generator)


def _pixels(size: Size, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(size.samples, channels, size.image, size.image, generator=generator)


def _text(size: Size, padding: str) -> Batch:
    ids, mask = _ids(size), _mask(size, padding)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def _vit_batch(size: Size, padding: str) -> Batch:
    return {"pixel_values": _pixels(size), "labels": torch.arange(size.samples) % 10}


def _pair(size: Size, padding: str) -> Batch:
    return {
        "input_ids": _ids(size), "attention_mask": _mask(size, padding), "pixel_values": _pixels(size),
        "return_loss": True,
    }  # fmt: skip


def _t5_batch(size: Size, padding: str) -> Batch:
    half = max(size.length // 2, 4)
    mask = _mask(size, padding, half)
    return {
        "input_ids": _ids(size), "attention_mask": _mask(size, padding), "decoder_attention_mask": mask,
        "labels": torch.where(mask > 0, _ids(size, half), -100),
    }  # fmt: skip


def _whisper_batch(size: Size, padding: str) -> Batch:
    mask = _mask(size, padding)
    generator = torch.Generator().manual_seed(2)
    return {
        "input_features": torch.randn(size.samples, 8, 2 * size.length, generator=generator),
        "decoder_attention_mask": mask,
        "labels": torch.where(mask > 0, _ids(size), -100),
    }


def _llava_batch(size: Size, padding: str) -> Batch:
    # images in the middle, where no padding is
    patches = (size.image // 4) ** 2
    long = Size(width=size.width, layers=size.layers, length=size.length + patches, samples=size.samples)
    batch = _text(long, padding)
    first = size.length // 2
    batch["input_ids"][:, first : first + patches] = IMAGE
    batch["labels"][:, first : first + patches] = -100
    batch["attention_mask"][:, first : first + patches] = 1
    return {**batch, "pixel_values": _pixels(size)}


# ---- configurations ------------------------------------------------------------------------------------------

_LAYERS = {
    "hidden_size": "width", "intermediate_size": "4 width", "num_hidden_layers": "layers", "num_attention_heads": HEADS,
}  # fmt: skip
_VISION = {**_LAYERS, "image_size": "image", "patch_size": 4, "num_channels": 3}
_WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": "length"}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_LAYERS, "vocab_size": VOCABULARY, "num_key_value_heads": HEADS // 2}

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", _text, {
        "vocab_size": VOCABULARY, "n_positions": "length", "n_embd": "width", "n_layer": "layers", "n_head": HEADS,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "llama": Family("LlamaForCausalLM", _text, _GROUPED),
    "mistral": Family("MistralForCausalLM", _text, {**_GROUPED, "sliding_window": "half"}),
    "opt": Family("OPTForCausalLM", _text, {
        **_WORDS, "hidden_size": "width", "word_embed_proj_dim": "width", "ffn_dim": "4 width",
        "num_hidden_layers": "layers", "num_attention_heads": HEADS, "dropout": 0.0,
    }),
    "bert": Family("BertForMaskedLM", _text, {
        **_WORDS, **_LAYERS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "distilbert": Family("DistilBertForMaskedLM", _text, {
        **_WORDS, "dim": "width", "hidden_dim": "4 width", "n_layers": "layers", "n_heads": HEADS, "dropout": 0.0,
        "attention_dropout": 0.0,
    }),
    "vit": Family("ViTForImageClassification", _vit_batch, {
        **_VISION, "num_labels": 10, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }, is_padded=False),
    "clip": Family("CLIPModel", _pair, {
        "text_config": {**_LAYERS, **_WORDS, **_IDS}, "vision_config": _VISION, "projection_dim": "width",
    }),
    "siglip": Family("SiglipModel", _pair, {"text_config": {**_LAYERS, **_WORDS}, "vision_config": _VISION}),
    "t5": Family("T5ForConditionalGeneration", _t5_batch, {
        "vocab_size": VOCABULARY, "d_model": "width", "d_kv": "head", "d_ff": "4 width", "num_layers": "layers",
        "num_heads": HEADS, "decoder_start_token_id": 0, "dropout_rate": 0.0,
    }),
    "whisper": Family("WhisperForConditionalGeneration", _whisper_batch, {
        **_IDS, "vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": "width", "encoder_layers": "layers",
        "decoder_layers": "layers", "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": "4 width", "decoder_ffn_dim": "4 width", "max_source_positions": "length",
        "max_target_positions": "length", "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    }),
    "llava": Family("LlavaForConditionalGeneration", _llava_batch, {
        "text_config": {**_GROUPED, "model_type": "llama"}, "image_token_index": IMAGE, "image_token_id": IMAGE,
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "vision_feature_layer": -1,  # of the last but one, eager models run the last layer and drop what it makes
    }),
}  # fmt: skip
