"""Vision-language models: an image tower, a projector and a language model that reads both, or text from an image."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    HEADS,
    IDS,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    LAYERS,
    PAD,
    VIDEO,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    image_text,
    numbers,
    pixels,
    text_config,
    text_with,
    vision_config,
)

KIND = "vision-language"


def patches(samples: int, length: int, *, pixels_each: int) -> Batch:
    """Return texts and, as the Qwen family has them, all images' patches in one list with each image's grid."""
    # 4 x 4 patches an image, merged 2 x 2: four tokens an image
    batch = text_with(samples, length, count=4, before=(IMAGE_START,), after=(IMAGE_END,))
    return {
        **batch,
        "pixel_values": numbers(16 * samples, pixels_each),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * samples),
    }


def _qwen2(samples: int, length: int) -> Batch:
    return patches(samples, length, pixels_each=3 * 2 * 4 * 4)


def typed_patches(samples: int, length: int) -> Batch:
    batch = _qwen2(samples, length)
    return {**batch, "mm_token_type_ids": (batch["input_ids"] == IMAGE).long()}


def grid_ids() -> dict[str, Any]:
    """Return the tokens of the Qwen family."""
    return {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IMAGE_START,
        "vision_end_token_id": IMAGE_END,
    }  # fmt: skip


def mrope() -> dict[str, Any]:
    """Return rotary embeddings of time, height and width, of heads of 8."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def grid_vision(**values: Any) -> dict[str, Any]:
    """Return a vision tower that reads all images' patches in one list."""
    return {
        "depth": 2, "num_heads": HEADS, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, **values,
    }  # fmt: skip


def tiles(samples: int, length: int) -> Batch:
    """Return images in two tiles, the whole and its upper left part, as LLaVA-NeXT pads and unpads them."""
    # 8 x 8 pixels: a base tile of 4 patches, and one tile of the grid (8, 8), 2 x 2 patches with a token a row
    return {
        **text_with(samples, length, count=10),
        "pixel_values": numbers(samples, 2, 3, 8, 8),
        "image_sizes": torch.tensor([[8, 8]] * samples),
    }


def _gemma3(samples: int, length: int) -> Batch:
    batch = image_text(samples, length)
    return {**batch, "token_type_ids": (batch["input_ids"] == IMAGE).long()}


def _several(samples: int, length: int) -> Batch:
    """Return two images a sample, each of four patches that become one token, or four that stay."""
    return {**text_with(samples, length, count=2), "pixel_values": numbers(samples, 2, 3, 8, 8)}


def _sized(samples: int, length: int) -> Batch:
    return {**image_text(samples, length), "image_sizes": torch.tensor([[8, 8]] * samples)}


_LLAVA = {"image_token_index": IMAGE, "image_token_id": IMAGE, "vision_feature_layer": -1}
_IDEFICS3_VISION = {k: v for k, v in vision_config("idefics3_vision").items()}

MODELS = (
    ZooModel(
        name="qwen2_vl", kind=KIND, model="Qwen2VLForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config("qwen2_vl_text", rope_parameters=mrope()), **grid_ids(),
            "vision_config": {**grid_vision(), "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2},
        },
    ),
    ZooModel(
        name="qwen2_5_vl", kind=KIND, model="Qwen2_5_VLForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config("qwen2_5_vl_text", rope_parameters=mrope()), **grid_ids(),
            "vision_config": {
                **grid_vision(), "hidden_size": WIDTH, "intermediate_size": 64, "out_hidden_size": WIDTH,
                "window_size": 16, "fullatt_block_indexes": [1],
            },
        },
    ),
    ZooModel(
        name="qwen3_vl", kind=KIND, model="Qwen3VLForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config(
                "qwen3_vl_text", head_dim=8, rope_parameters={**mrope(), "mrope_interleaved": True}
            ),
            **grid_ids(),
            "vision_config": {
                **grid_vision(), "hidden_size": WIDTH, "intermediate_size": 64, "out_hidden_size": WIDTH,
                "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            },
        },
    ),
    ZooModel(
        name="glm4v", kind=KIND, model="Glm4vForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config("glm4v_text", rope_parameters={**mrope(), "partial_rotary_factor": 1.0}),
            "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": IMAGE_START,
            "image_end_token_id": IMAGE_END, "video_start_token_id": 68, "video_end_token_id": 69,
            "vision_config": {
                **grid_vision(), "hidden_size": WIDTH, "intermediate_size": 64, "out_hidden_size": WIDTH,
                "image_size": 16,
            },
        },
    ),
    ZooModel(
        name="llava", kind=KIND, model="LlavaForConditionalGeneration", batch=image_text,
        config={"text_config": text_config(), "vision_config": vision_config(), **_LLAVA},
    ),
    ZooModel(
        name="llava_next", kind=KIND, model="LlavaNextForConditionalGeneration", batch=tiles,
        config={
            "text_config": text_config(), "vision_config": vision_config(), **_LLAVA,
            "image_grid_pinpoints": [[8, 8]],
        },
    ),
    ZooModel(
        name="llava_onevision", kind=KIND, model="LlavaOnevisionForConditionalGeneration", batch=tiles,
        config={
            "text_config": text_config("qwen2"), "vision_config": vision_config("siglip_vision_model"), **_LLAVA,
            "image_grid_pinpoints": [[8, 8]], "video_token_index": VIDEO, "video_token_id": VIDEO,
        },
    ),
    ZooModel(
        name="gemma3", kind=KIND, model="Gemma3ForConditionalGeneration", batch=_gemma3,
        config={
            "text_config": text_config(
                "gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=6,
                layer_types=["sliding_attention", "full_attention"],
            ),
            "vision_config": vision_config("siglip_vision_model"), "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE, "boi_token_index": IMAGE_START, "eoi_token_index": IMAGE_END,
        },
    ),
    ZooModel(
        name="paligemma", kind=KIND, model="PaliGemmaForConditionalGeneration", batch=_gemma3,
        config={
            "text_config": text_config("gemma", head_dim=8), "projection_dim": WIDTH, "hidden_size": WIDTH,
            "vision_config": vision_config("siglip_vision_model", projection_dim=WIDTH), "image_token_index": IMAGE,
            "image_token_id": IMAGE, "vocab_size": VOCABULARY,
        },
    ),
    ZooModel(
        name="idefics2", kind=KIND, model="Idefics2ForConditionalGeneration", batch=_several,
        config={
            "text_config": text_config("mistral", sliding_window=None), "image_token_id": IMAGE,
            "vision_config": {k: v for k, v in vision_config().items() if k != "model_type"},
            "perceiver_config": {
                "hidden_size": WIDTH, "resampler_n_latents": 1, "resampler_depth": 2, "resampler_n_heads": 2,
                "resampler_head_dim": 8, "num_key_value_heads": 1,
            },
        },
    ),
    ZooModel(
        name="idefics3", kind=KIND, model="Idefics3ForConditionalGeneration", batch=_several,
        config={
            "text_config": text_config(), "image_token_id": IMAGE, "scale_factor": 2,
            "vision_config": {k: v for k, v in vision_config().items() if k != "model_type"},
        },
        extra={"pad_token_id": PAD},
    ),
    ZooModel(
        name="smolvlm", kind=KIND, model="SmolVLMForConditionalGeneration", batch=_several,
        config={
            "text_config": text_config(), "image_token_id": IMAGE, "scale_factor": 2,
            "vision_config": {k: v for k, v in vision_config().items() if k != "model_type"},
        },
    ),
    ZooModel(
        name="internvl", kind=KIND, model="InternVLForConditionalGeneration",
        batch=lambda samples, length: {**text_with(samples, length, count=1), "pixel_values": pixels(samples)},
        config={
            "text_config": text_config("qwen2"), "image_token_id": IMAGE, "image_seq_length": 1,
            "downsample_ratio": 0.5,
            "vision_config": vision_config("internvl_vision", image_size=[8, 8], patch_size=[4, 4]),
        },
    ),
    ZooModel(
        name="blip_2", kind=KIND, model="Blip2ForConditionalGeneration", batch=image_text,
        config={
            "text_config": {
                "model_type": "opt", **LAYERS, **IDS, "ffn_dim": 64, "vocab_size": VOCABULARY,
                "max_position_embeddings": 64,
                "word_embed_proj_dim": WIDTH,
            },
            "vision_config": {k: v for k, v in vision_config(initializer_range=0.02).items() if k != "model_type"},
            "qformer_config": {**LAYERS, "vocab_size": VOCABULARY, "encoder_hidden_size": WIDTH},
            "num_query_tokens": 4,
            "image_token_index": IMAGE, "image_token_id": IMAGE,
        },
    ),
    ZooModel(
        name="mistral3", kind=KIND, model="Mistral3ForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=1), "pixel_values": pixels(samples),
            "image_sizes": torch.tensor([[8, 8]] * samples),
        },
        config={
            "text_config": text_config("mistral", head_dim=8), "image_token_index": IMAGE, "image_token_id": IMAGE,
            "vision_config": {**vision_config("pixtral"), "head_dim": 8}, "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
    ),
    ZooModel(
        name="emu3", kind=KIND, model="Emu3ForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=6), "pixel_values": pixels(samples),
            "image_sizes": torch.tensor([[8, 8]] * samples),
        },
        config={
            "text_config": text_config("emu3_text_model"),
            "vq_config": {
                "codebook_size": 16, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
                "channel_multiplier": [1, 1, 1],
                "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 32, "num_attention_heads": 1,
                "temporal_downsample_factor": 1,
            },
            "vocabulary_map": {
                "<image>": IMAGE, **{f"<|visual token {i:06d}|>": 80 + i for i in range(16)}, "<|extra_200|>": 70,
            },
        },
    ),
)  # fmt: skip
