"""Twelve families of HuggingFace models of any size, and batches for them with and without padding.

They cover the ways in which models ask for attention: causal with a padding mask (GPT-2, OPT), with fewer heads of keys
than of queries (Llama), within a window (Mistral), in both directions (BERT, DistilBERT), without masks (ViT), with a
bias that is learnt (T5), across encoder and decoder (T5, Whisper), and several of them in one model (CLIP, SigLIP,
LLaVA).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: ``make`` builds the model, ``batch`` a batch of a size and a padding."""

    make: Callable[[Size], nn.Module]
    batch: Callable[[Size, str], Batch]
    is_padded: bool = True


def build_family(name: str, size: Size, *, seed: int = 0) -> tuple[nn.Module, Callable[[str], Batch]]:
    """Return a family's model in training mode, without dropout, and what makes its batches by their padding."""
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.make(size).train()
    return model, lambda padding: family.batch(size, padding)


def _make(model: str, config: str, **values: Any) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
    return made


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


def _gpt2(size: Size) -> nn.Module:
    return _make(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=size.length, n_embd=size.width,
        n_layer=size.layers, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def _layers(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width, "intermediate_size": 4 * size.width, "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
    }  # fmt: skip


def _llama(size: Size) -> nn.Module:
    return _make(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=VOCABULARY,
        num_key_value_heads=HEADS // 2,
        **_layers(size),
    )


def _mistral(size: Size) -> nn.Module:
    return _make(
        "MistralForCausalLM", "MistralConfig", vocab_size=VOCABULARY, num_key_value_heads=HEADS // 2,
        sliding_window=size.length // 2, **_layers(size),
    )  # fmt: skip


def _opt(size: Size) -> nn.Module:
    return _make(
        "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, max_position_embeddings=size.length,
        hidden_size=size.width, word_embed_proj_dim=size.width, ffn_dim=4 * size.width, num_hidden_layers=size.layers,
        num_attention_heads=HEADS, dropout=0.0,
    )  # fmt: skip


def _bert(size: Size) -> nn.Module:
    return _make(
        "BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, max_position_embeddings=size.length,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_layers(size),
    )  # fmt: skip


def _distilbert(size: Size) -> nn.Module:
    return _make(
        "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCABULARY, max_position_embeddings=size.length,
        dim=size.width, hidden_dim=4 * size.width, n_layers=size.layers, n_heads=HEADS, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip


def _vision(size: Size) -> dict[str, Any]:
    return {**_layers(size), "image_size": size.image, "patch_size": 4, "num_channels": 3}


def _vit(size: Size) -> nn.Module:
    return _make(
        "ViTForImageClassification", "ViTConfig", num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **_vision(size),
    )  # fmt: skip


def _vit_batch(size: Size, padding: str) -> Batch:
    return {"pixel_values": _pixels(size), "labels": torch.arange(size.samples) % 10}


def _clip(size: Size) -> nn.Module:
    text = {
        **_layers(size), "vocab_size": VOCABULARY, "max_position_embeddings": size.length, "eos_token_id": 2,
        "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return _make(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config=_vision(size), projection_dim=size.width
    )


def _siglip(size: Size) -> nn.Module:
    text = {**_layers(size), "vocab_size": VOCABULARY, "max_position_embeddings": size.length}
    return _make("SiglipModel", "SiglipConfig", text_config=text, vision_config=_vision(size))


def _pair(size: Size, padding: str) -> Batch:
    return {
        "input_ids": _ids(size), "attention_mask": _mask(size, padding), "pixel_values": _pixels(size),
        "return_loss": True,
    }  # fmt: skip


def _t5(size: Size) -> nn.Module:
    return _make(
        "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=size.width, d_kv=size.width // HEADS,
        d_ff=4 * size.width, num_layers=size.layers, num_heads=HEADS, decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip


def _t5_batch(size: Size, padding: str) -> Batch:
    half = max(size.length // 2, 4)
    mask = _mask(size, padding, half)
    return {
        "input_ids": _ids(size), "attention_mask": _mask(size, padding), "decoder_attention_mask": mask,
        "labels": torch.where(mask > 0, _ids(size, half), -100),
    }  # fmt: skip


def _whisper(size: Size) -> nn.Module:
    return _make(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, num_mel_bins=8, d_model=size.width,
        encoder_layers=size.layers, decoder_layers=size.layers, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=4 * size.width, decoder_ffn_dim=4 * size.width,
        max_source_positions=size.length, max_target_positions=size.length, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip


def _whisper_batch(size: Size, padding: str) -> Batch:
    mask = _mask(size, padding)
    generator = torch.Generator().manual_seed(2)
    return {
        "input_features": torch.randn(size.samples, 8, 2 * size.length, generator=generator),
        "decoder_attention_mask": mask,
        "labels": torch.where(mask > 0, _ids(size), -100),
    }


def _llava(size: Size) -> nn.Module:
    text = {
        **_layers(size), "model_type": "llama", "num_key_value_heads": HEADS // 2, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return _make(
        "LlavaForConditionalGeneration", "LlavaConfig", text_config=text, image_token_index=IMAGE,
        vision_config={**_vision(size), "model_type": "clip_vision_model"}, image_token_id=IMAGE,
        vision_feature_layer=-1,  # of the last but one, eager models run the last layer and drop what it makes
    )  # fmt: skip


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


FAMILIES: dict[str, Family] = {
    "gpt2": Family(make=_gpt2, batch=_text),
    "llama": Family(make=_llama, batch=_text),
    "mistral": Family(make=_mistral, batch=_text),
    "opt": Family(make=_opt, batch=_text),
    "bert": Family(make=_bert, batch=_text),
    "distilbert": Family(make=_distilbert, batch=_text),
    "vit": Family(make=_vit, batch=_vit_batch, is_padded=False),
    "clip": Family(make=_clip, batch=_pair),
    "siglip": Family(make=_siglip, batch=_pair),
    "t5": Family(make=_t5, batch=_t5_batch),
    "whisper": Family(make=_whisper, batch=_whisper_batch),
    "llava": Family(make=_llava, batch=_llava_batch),
}
