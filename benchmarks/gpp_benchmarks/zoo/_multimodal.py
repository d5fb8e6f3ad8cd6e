"""Models of more than two kinds of input, and of newer vision towers: what reads images, videos and sounds by turns."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    AUDIO,
    HEADS,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    LAYERS,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    numbers,
    pixels,
    text_config,
    text_with,
    uniform,
    vision_config,
)
from gpp_benchmarks.zoo._vision_language import KIND, grid_ids, grid_vision, mrope, patches, typed_patches


def _both(samples: int, length: int) -> Batch:
    """Return texts with an image of four tokens and a sound of four tokens each."""
    batch = text_with(samples, length, count=8)
    batch["input_ids"][:, 5:9] = AUDIO
    return batch


def _omni(samples: int, length: int) -> Batch:
    return {
        **_both(samples, length), "pixel_values": numbers(16 * samples, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * samples),
        "input_features": numbers(samples, 8, 16),
        "feature_attention_mask": torch.ones(samples, 16, dtype=torch.int64),
    }  # fmt: skip


def _hybrid(samples: int, length: int) -> Batch:
    return {
        **text_with(samples, length, count=4),
        "pixel_values": pixels(samples),
        "high_res_pixel_values": pixels(samples, 64),
    }


def _strip_of_patches(samples: int, length: int) -> Batch:
    """Return texts with an image of 4 x 8 patches each, two tokens; the patches of all images are one strip."""
    return {
        **text_with(samples, length, count=2),
        "pixel_values": numbers(1, 3, 4, samples * 4 * 8 * 4),
        "target_sizes": torch.tensor([[4, 8]] * samples),
    }


def _sizes(samples: int, length: int) -> Batch:
    return {
        **patches(samples, length, pixels_each=48), "image_merge_sizes": torch.tensor([2] * samples),
    }  # fmt: skip


def _patched(samples: int, length: int) -> Batch:
    """Return images as lists of patches with the place of each."""
    places = torch.tensor([[x, y] for y in range(2) for x in range(2)]).repeat(samples, 1, 1)
    batch = text_with(samples, length, count=1)
    return {
        **batch, "pixel_values": uniform(samples, 4, 48), "image_position_ids": places,
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }  # fmt: skip


def _several_words(samples: int, length: int) -> Batch:
    batch = text_with(samples, length, count=1)
    return {
        "input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": batch["labels"],
        "pixel_values": numbers(samples, 1, 3, 8, 8),
    }  # fmt: skip


def _three(samples: int, length: int) -> Batch:
    """Return texts with a sound each, for Phi-4."""
    return {
        **text_with(samples, length, count=4, token=AUDIO), "audio_input_features": numbers(samples, 32, 16),
        "audio_embed_sizes": torch.tensor([4] * samples),
    }  # fmt: skip


_TOWER: dict[str, Any] = {**LAYERS, "image_size": 8, "patch_size": 4, "num_channels": 3}

MODELS = (
    ZooModel(
        name="qwen3_omni_moe", kind=KIND, model="Qwen3OmniMoeThinkerForConditionalGeneration",
        batch=lambda samples, length: patches(samples, length, pixels_each=96), note="with images alone",
        config={
            "text_config": text_config(
                "qwen3_omni_moe_text", head_dim=8, num_experts=4, moe_intermediate_size=16,
                num_experts_per_tok=2, rope_parameters={**mrope(), "mrope_interleaved": True},
            ),
            "vision_config": {
                **grid_vision(hidden_size=WIDTH, intermediate_size=64, out_hidden_size=WIDTH),
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
            "audio_config": {
                "num_mel_bins": 8, "d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": HEADS,
                "encoder_ffn_dim": 64, "max_source_positions": 16,
                "n_window": 16, "n_window_infer": 32, "output_dim": WIDTH, "downsample_hidden_size": 8,
                "conv_chunksize": 64,
            },
            "audio_token_id": AUDIO, "image_token_id": IMAGE, "video_token_id": VIDEO,
            "vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END,
            "audio_start_token_id": 71, "user_token_id": 73,
        },
    ),
    ZooModel(
        name="qwen2_5_omni_both", kind=KIND, model="Qwen2_5OmniThinkerForConditionalGeneration",
        batch=_omni,
        config={
            "text_config": text_config("qwen2_5_omni_text", rope_parameters=mrope()),
            "vision_config": {
                **grid_vision(hidden_size=WIDTH, intermediate_size=64, out_hidden_size=WIDTH),
                "window_size": 16, "fullatt_block_indexes": [1],
            },
            "audio_config": {
                "num_mel_bins": 8, "d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": HEADS,
                "encoder_ffn_dim": 64, "max_source_positions": 16,
                "n_window": 4, "output_dim": WIDTH,
            },
            "audio_token_index": AUDIO, "image_token_index": IMAGE, "video_token_index": VIDEO,
            "audio_token_id": AUDIO,
            "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IMAGE_START,
            "vision_end_token_id": IMAGE_END,
            "audio_start_token_id": 71, "audio_end_token_id": 72, "user_token_id": 73,
        },
        note="with images and sounds",
    ),
    ZooModel(
        name="qwen3_5_moe", kind=KIND, model="Qwen3_5MoeForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config(
                "qwen3_5_moe_text", head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
                linear_num_key_heads=2, linear_num_value_heads=2,
                layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                rope_parameters={**mrope(), "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            ),
            "vision_config": {
                **grid_vision(hidden_size=WIDTH, intermediate_size=64, out_hidden_size=WIDTH),
                "num_position_embeddings": 16,
            }, **grid_ids(),
        },
    ),
    ZooModel(
        name="glm_ocr", kind=KIND, model="GlmOcrForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config(
                "glm_ocr_text", head_dim=8, rope_parameters={**mrope(), "partial_rotary_factor": 1.0},
            ),
            "vision_config": {
                **grid_vision(hidden_size=WIDTH, intermediate_size=64, out_hidden_size=WIDTH), "image_size": 16,
            }, "image_token_id": IMAGE,
            "video_token_id": VIDEO, "image_start_token_id": IMAGE_START, "image_end_token_id": IMAGE_END,
            "video_start_token_id": VIDEO_START,
            "video_end_token_id": VIDEO_END,
        },
    ),
    ZooModel(
        name="exaone4_5", kind=KIND, model="Exaone4_5_ForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config("exaone4", head_dim=8, sliding_window=6, sliding_window_pattern=2),
            "vision_config": {
                **grid_vision(hidden_size=WIDTH, intermediate_size=64, out_hidden_size=WIDTH),
                "num_key_value_heads": 2, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO,
        },
    ),
    ZooModel(
        name="video_llama_3", kind=KIND, model="VideoLlama3ForConditionalGeneration", batch=_sizes,
        config={
            "text_config": text_config("qwen2"),
            "vision_config": {**LAYERS, "num_channels": 3, "patch_size": 4}, "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
    ),
    ZooModel(
        name="deepseek_vl_hybrid", kind=KIND, model="DeepseekVLHybridForConditionalGeneration", batch=_hybrid,
        config={
            "text_config": text_config(),
            "vision_config": vision_config("siglip_vision_model", image_size=16, patch_size=8),
            "high_res_vision_config": {
                "model_type": "sam_vision_model", "hidden_size": WIDTH, "output_channels": 16,
                "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": 64,
                "patch_size": 8, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64,
            },
            "image_token_id": IMAGE,
        },
    ),
    ZooModel(
        name="modernvbert", kind=KIND, model="ModernVBertForMaskedLM", batch=_several_words,
        config={
            "text_config": text_config("modernbert", local_attention=4, global_attn_every_n_layers=2),
            "vision_config": vision_config("siglip_vision_model"),
            "image_token_id": IMAGE, "pixel_shuffle_factor": 2,
        },
    ),
    ZooModel(
        name="gemma4", kind=KIND, model="Gemma4ForConditionalGeneration", batch=_patched,
        config={
            "text_config": text_config(
                "gemma4_text", head_dim=8, sliding_window=6,
                layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=8, global_head_dim=8,
            ),
            "vision_config": {
                **LAYERS, "num_key_value_heads": HEADS, "head_dim": 8, "patch_size": 4,
                "pooling_kernel_size": 2, "position_embedding_size": 16,
            },
            "audio_config": None, "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO,
            "boi_token_id": IMAGE_START, "eoi_token_id": IMAGE_END,
        },
    ),
    ZooModel(
        name="phi4_multimodal", kind=KIND, model="Phi4MultimodalForCausalLM", batch=_three,
        config={
            **text_config("phi4_multimodal"), "original_max_position_embeddings": 64,
            "vision_config": {**_TOWER, "crop_size": 8, "image_token_id": IMAGE, "feature_layer": -1},
            "audio_config": {
                "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS,
                "num_blocks": 2, "ext_pw_out_channel": WIDTH,
                "depthwise_separable_out_channel": WIDTH, "input_size": 16, "nemo_conv_channels": WIDTH,
                "time_reduction": 8, "bias_max_distance": 8,
                "audio_token_id": AUDIO, "feature_layer": -1,
            },
        },
    ),
    ZooModel(
        name="musicflamingo", kind=KIND, model="MusicFlamingoForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=4, token=AUDIO, before=(71,), after=(72,)),
            "input_features": numbers(samples, 8, 16),
            "input_features_mask": torch.ones(samples, 16, dtype=torch.int64),
        },
        config={
            "text_config": text_config("qwen2"), "audio_token_id": AUDIO, "audio_bos_token_id": 71,
            "audio_eos_token_id": 72,
            "audio_config": {
                "model_type": "audioflamingo3_encoder", **LAYERS, "num_mel_bins": 8, "max_source_positions": 8,
            },
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    ZooModel(
        name="mistral3_two_images", kind=KIND, model="Mistral3ForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=3), "pixel_values": pixels(2 * samples, 16),
            "image_sizes": torch.tensor([[8, 8], [16, 8]] * samples),
        },
        config={
            "text_config": text_config("mistral", head_dim=8), "image_token_index": IMAGE,
            "image_token_id": IMAGE, "spatial_merge_size": 2,
            "vision_config": {**vision_config("pixtral", image_size=16), "head_dim": 8}, "vision_feature_layer": -1,
        },
        note="two images of different sizes a sample",
    ),
    ZooModel(
        name="llava_two_images", kind=KIND, model="LlavaForConditionalGeneration",
        batch=lambda samples, length: {**text_with(samples, length, count=8), "pixel_values": pixels(2 * samples)},
        config={
            "text_config": text_config(), "vision_config": vision_config(), "image_token_index": IMAGE,
            "image_token_id": IMAGE, "vision_feature_layer": -1,
        },
        note="two images a sample",
    ),
    ZooModel(
        name="minicpmv4_6", kind=KIND, model="MiniCPMV4_6ForConditionalGeneration", batch=_strip_of_patches,
        config={
            "text_config": text_config(
                "qwen3_5_text", head_dim=8, layer_types=["full_attention", "full_attention"],
                rope_parameters={**mrope(), "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            ),
            "vision_config": {**LAYERS, "image_size": 32, "patch_size": 4, "num_channels": 3},
            "insert_layer_id": 0, "image_token_id": IMAGE, "image_size": 32,
        },
    ),
)  # fmt: skip
