"""Models of pairs: images or sounds and texts, by a contrastive or a matching loss over all samples of a batch."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    IDS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    masked_text,
    numbers,
    pair,
    pixels,
    text,
)

KIND = "retrieval"
MELS = 8


def _patch_pairs(samples: int, length: int) -> Batch:
    """Return images as lists of patches with a mask and each image's shape, and texts."""
    batch = text(samples, length)
    return {
        "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "pixel_values": numbers(samples, 4, 48),
        "pixel_attention_mask": torch.ones(samples, 4, dtype=torch.int64), "spatial_shapes": torch.tensor([[2, 2]] * samples),
        "return_loss": True,
    }  # fmt: skip


def _sound_pairs(samples: int, length: int) -> Batch:
    batch = text(samples, length)
    return {
        "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"],
        "input_features": numbers(samples, 1, 128, MELS), "is_longer": torch.zeros(samples, 1, dtype=torch.bool),
        "return_loss": True,
    }  # fmt: skip


def _flava(samples: int, length: int) -> Batch:
    """Return pairs half of which belong together, with masked words and patches."""
    batch = masked_text(samples, length)
    return {
        "input_ids": batch["input_ids"], "input_ids_masked": batch["input_ids"], "attention_mask": batch["attention_mask"],
        "pixel_values": pixels(samples), "codebook_pixel_values": pixels(samples, 16),
        "bool_masked_pos": torch.tensor([[[1, 0], [0, 1]]] * samples, dtype=torch.int64), "mlm_labels": batch["labels"],
        "itm_labels": torch.arange(samples) % 2, "return_loss": True, "skip_multimodal_encoder": False,
    }  # fmt: skip


_CLIP_TEXT: dict[str, Any] = {**LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_CLIP_VISION: dict[str, Any] = {**LAYERS, "image_size": 8, "patch_size": 4, "num_channels": 3}

MODELS = (
    ZooModel(
        name="clip", kind=KIND, model="CLIPModel", batch=pair,
        config={"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": WIDTH},
    ),
    ZooModel(
        name="siglip", kind=KIND, model="SiglipModel", batch=pair,
        config={"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION},
    ),
    ZooModel(
        name="siglip2", kind=KIND, model="Siglip2Model", batch=_patch_pairs,
        config={
            "text_config": {**_CLIP_TEXT, "projection_size": WIDTH},
            "vision_config": {**LAYERS, "patch_size": 4, "num_channels": 3, "num_patches": 4},
        },
    ),
    ZooModel(
        name="groupvit", kind=KIND, model="GroupViTModel", batch=pair,
        config={
            "text_config": _CLIP_TEXT, "projection_dim": WIDTH, "projection_intermediate_dim": 64,
            "vision_config": {
                **_CLIP_VISION, "depths": [1, 1, 1], "num_hidden_layers": 3, "num_group_tokens": [4, 2, 0],
                "num_output_groups": [4, 2, 0],
            },
        },
    ),
    ZooModel(
        name="clap", kind=KIND, model="ClapModel", batch=_sound_pairs,
        config={
            "text_config": {
                **LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "projection_dim": WIDTH,
            },
            "audio_config": {
                "num_mel_bins": MELS, "spec_size": 32, "patch_size": 4, "patch_stride": [4, 4], "depths": [2, 2],
                "num_attention_heads": [2, 2], "window_size": 4, "hidden_size": WIDTH, "patch_embeds_hidden_size": 16,
                "projection_dim": WIDTH, "num_classes": 4, "enable_fusion": False,
            },
            "projection_dim": WIDTH,
        },
    ),
    ZooModel(
        name="flava", kind=KIND, model="FlavaForPreTraining", batch=_flava,
        config={
            "text_config": {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0},
            "image_config": {**LAYERS, "image_size": 8, "patch_size": 4, "vocab_size": 64, "mask_token": True},
            "multimodal_config": LAYERS, "hidden_size": WIDTH, "projection_dim": WIDTH,
            "image_codebook_config": {"hidden_size": 8, "num_groups": 4, "num_blocks_per_group": 1, "vocab_size": 64},
            "global_backprop_contrastive": False,
        },
    ),
    ZooModel(
        name="vilt", kind=KIND, model="ViltForQuestionAnswering",
        batch=lambda samples, length: {
            **{k: v for k, v in text(samples, length).items() if k != "labels"}, "pixel_values": pixels(samples),
            "pixel_mask": torch.ones(samples, 8, 8, dtype=torch.int64),
            "labels": torch.nn.functional.one_hot(torch.arange(samples) % 3, 3).float(),
        },
        config={**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "image_size": 8, "patch_size": 4, "num_labels": 3},
        extra={"num_labels": 3},
    ),
)  # fmt: skip
