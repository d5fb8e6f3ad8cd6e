"""Models of pairs: images or sounds and texts, by a contrastive or a matching loss over all samples of a batch."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    HEADS,
    IDS,
    IMAGE,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    classes,
    masked_text,
    numbers,
    pair,
    pixels,
    text,
    text_config,
    text_with,
    vision_config,
)

KIND = "retrieval"
MELS = 8


def _patch_pairs(samples: int, length: int) -> Batch:
    """Return images as lists of patches with a mask and each image's shape, and texts."""
    batch = text(samples, length)
    return {
        "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"],
        "pixel_values": numbers(samples, 4, 48),
        "pixel_attention_mask": torch.ones(samples, 4, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[2, 2]] * samples),
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
        "input_ids": batch["input_ids"], "input_ids_masked": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "pixel_values": pixels(samples), "codebook_pixel_values": pixels(samples, 16),
        "bool_masked_pos": torch.tensor([[[1, 0], [0, 1]]] * samples, dtype=torch.int64),
        "mlm_labels": batch["labels"],
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
        name="groupvit", draws=True,
        note="its assignment of groups is drawn (Gumbel)", kind=KIND, model="GroupViTModel", batch=pair,
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
        name="vilt", draws=True, note="the order of patches is drawn", kind=KIND, model="ViltForQuestionAnswering",
        batch=lambda samples, length: {
            **{k: v for k, v in text(samples, length).items() if k != "labels"}, "pixel_values": pixels(samples),
            "pixel_mask": torch.ones(samples, 8, 8, dtype=torch.int64),
            "labels": torch.nn.functional.one_hot(torch.arange(samples) % 3, 3).float(),
        },
        config={
            **LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "image_size": 8,
            "patch_size": 4, "num_labels": 3,
        },
        extra={"num_labels": 3},
    ),
    *(
        ZooModel(
            name=name, kind=KIND, model=model, batch=pair,
            config={"text_config": {**_CLIP_TEXT, **more}, "vision_config": _CLIP_VISION, "projection_dim": WIDTH},
        )
        for name, model, more in (
            ("altclip", "AltCLIPModel", {"project_dim": WIDTH}),
            ("chinese_clip", "ChineseCLIPModel", {}),
            ("clipseg", "CLIPSegModel", {}),
            ("metaclip_2", "MetaClip2Model", {}),
            ("owlvit", "OwlViTModel", {}),
            ("owlv2", "Owlv2Model", {}),
        )
    ),
    ZooModel(
        name="align", kind=KIND, model="AlignModel", batch=lambda samples,
        length: {**pair(samples, length), "pixel_values": pixels(samples, 32)},
        config={
            "text_config": _CLIP_TEXT, "projection_dim": WIDTH,
            "vision_config": {
                "image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 1.0,
                "kernel_sizes": [3, 3], "in_channels": [32, 16],
                "out_channels": [16, 32], "strides": [1, 2], "num_block_repeats": [1, 1],
                "expand_ratios": [1, 2], "hidden_dim": WIDTH,
                "drop_connect_rate": 0.0,
            },
        },
        note="running statistics of batch normalisation are written",
    ),
    ZooModel(
        name="blip_matching", kind=KIND, model="BlipModel", batch=pair,
        config={
            "text_config": {**_CLIP_TEXT, "encoder_hidden_size": WIDTH, "projection_dim": WIDTH},
            "vision_config": {**_CLIP_VISION, "projection_dim": WIDTH},
            "projection_dim": WIDTH,
        },
    ),
    ZooModel(
        name="x_clip", kind=KIND, model="XCLIPModel",
        batch=lambda samples, length: {
            **text(samples, length), "pixel_values": numbers(samples, 2, 3, 8, 8), "return_loss": True,
        },
        config={
            "text_config": _CLIP_TEXT, "projection_dim": WIDTH, "prompt_layers": 1,
            "prompt_num_attention_heads": HEADS,
            "vision_config": {
                **_CLIP_VISION, "mit_hidden_size": WIDTH, "mit_intermediate_size": 64,
                "mit_num_attention_heads": HEADS, "num_frames": 2,
            },
        },
    ),
    ZooModel(
        name="bridgetower_contrastive", kind=KIND, model="BridgeTowerForContrastiveLearning",
        batch=lambda samples,
        length: {**pair(samples, length), "pixel_mask": torch.ones(samples, 8, 8, dtype=torch.int64)},
        config={
            "text_config": {**_CLIP_TEXT, "hidden_size": 64},
            "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 4, "image_size": 8},
            "hidden_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": 2,
            "contrastive_hidden_size": WIDTH, "intermediate_size": 64,
        },
        extra={"logit_scale_init_value": 2.6592},
    ),
    ZooModel(
        name="bridgetower_matching", kind=KIND, model="BridgeTowerForImageAndTextRetrieval",
        batch=lambda samples, length: {
            **pair(samples, length), "pixel_mask": torch.ones(samples, 8, 8, dtype=torch.int64),
            "labels": classes(samples, 2),
        },
        config={
            "text_config": {**_CLIP_TEXT, "hidden_size": 64},
            "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 4, "image_size": 8},
            "hidden_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": 2,
            "contrastive_hidden_size": WIDTH, "intermediate_size": 64,
        },
    ),
    ZooModel(
        name="vilt_words", kind=KIND, model="ViltForMaskedLM",
        batch=lambda samples,
        length: {
            **masked_text(samples, length), "pixel_values": pixels(samples),
            "pixel_mask": torch.ones(samples, 8, 8, dtype=torch.int64),
        },
        config={**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "image_size": 8, "patch_size": 4},
    ),
    ZooModel(
        name="vision_text_dual_encoder", kind=KIND, model="VisionTextDualEncoderModel", batch=pair,
        config={"text_config": text_config("bert"), "vision_config": vision_config("vit"), "projection_dim": WIDTH},
    ),
    ZooModel(
        name="tipsv2", kind=KIND, model="Tipsv2Model", batch=pair,
        config={"text_config": {**_CLIP_TEXT}, "vision_config": {**_CLIP_VISION, "mlp_ratio": 2}},
    ),
    ZooModel(
        name="videoprism", kind=KIND, model="VideoPrismClipModel",
        batch=lambda samples,
        length: {
            **{k: v for k, v in pair(samples, length).items() if k != "pixel_values"},
            "pixel_values_videos": numbers(samples, 2, 3, 8, 8),
        },
        config={
            "text_config": _CLIP_TEXT,
            "vision_config": {
                **LAYERS, "image_size": 8, "num_frames": 2, "tubelet_size": [1, 4, 4],
                "num_spatial_layers": 2, "num_temporal_layers": 1, "num_auxiliary_layers": 1,
            },
        },
    ),
    ZooModel(
        name="blip_2_matching", kind=KIND, model="Blip2Model", batch=lambda samples,
        length: {**text_with(samples, length, count=4), "pixel_values": pixels(samples)},
        config={
            "text_config": {
                "model_type": "t5", "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64,
                "num_layers": 2, "num_heads": HEADS,
                "decoder_start_token_id": 0, "pad_token_id": 0,
            },
            "vision_config": {**_CLIP_VISION, "initializer_range": 0.02}, "num_query_tokens": 4,
            "image_token_index": IMAGE, "image_token_id": IMAGE,
            "qformer_config": {**LAYERS, "vocab_size": VOCABULARY, "encoder_hidden_size": WIDTH},
        },
        note="with an encoder and a decoder of text",
    ),
)  # fmt: skip
