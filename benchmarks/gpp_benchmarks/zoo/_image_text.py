"""More models of images and text: towers in front of language models, cross-attention, captions and documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    AUDIO,
    HEADS,
    IDS,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    LAYERS,
    PAD,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    classes,
    image_text,
    integers,
    masked_text,
    numbers,
    pixels,
    text,
    text_config,
    text_with,
    uniform,
    vision_config,
)
from gpp_benchmarks.zoo._vision_language import (
    KIND,
    grid_ids,
    grid_vision,
    mrope,
    patches,
    tiles,
    typed_patches,
)


def tower(**values: Any) -> dict[str, Any]:
    """Return a vision tower's configuration of a model that has one kind of tower only."""
    found = vision_config(**values)
    del found["model_type"]
    return found


def _with(count: int, *, side: int = 8) -> Callable[[int, int], Batch]:
    """Return what makes texts with ``count`` tokens for an image, and images."""

    def batch(samples: int, length: int) -> Batch:
        return {**text_with(samples, length, count=count), "pixel_values": pixels(samples, side)}

    return batch


def _video(samples: int, length: int) -> Batch:
    """Return videos of two frames of four patches; a class token and they are tokens each."""
    return {
        **text_with(samples, length, count=10, token=VIDEO),
        "pixel_values_videos": numbers(samples, 2, 3, 8, 8),
    }


def _queries(samples: int, length: int) -> Batch:
    """Return a text for the language model, with four tokens for the image, and one for the queries."""
    batch = image_text(samples, length)
    return {
        **batch,
        "qformer_input_ids": integers(samples, 6),
        "qformer_attention_mask": torch.ones(samples, 6, dtype=torch.int64),
    }


def _query_frames(samples: int, length: int) -> Batch:
    batch = text_with(samples, length, count=8, token=VIDEO)
    return {
        **batch, "pixel_values": numbers(samples, 2, 3, 8, 8), "qformer_input_ids": integers(samples, 6),
        "qformer_attention_mask": torch.ones(samples, 6, dtype=torch.int64),
    }  # fmt: skip


def _caption(samples: int, length: int) -> Batch:
    """Return an image and its caption, for models that put the image in front of the text themselves."""
    return {**text(samples, length), "pixel_values": pixels(samples)}


def _crossed(samples: int, length: int) -> Batch:
    """Return texts that look at one image by cross-attention."""
    return {
        **text(samples, length), "pixel_values": numbers(samples, 1, 1, 3, 8, 8),
        "aspect_ratio_ids": torch.ones(samples, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(samples, 1, 1, dtype=torch.int64),
        "cross_attention_mask": torch.ones(samples, length, 1, 1, dtype=torch.int64),
    }  # fmt: skip


def _looked_at(samples: int, length: int) -> Batch:
    return {
        **text(samples, length), "pixel_values": numbers(samples, 1, 3, 8, 8),
        "image_attention_mask": torch.ones(samples, length, 1, dtype=torch.int64),
    }  # fmt: skip


def _kosmos(samples: int, length: int) -> Batch:
    batch = text_with(samples, length, count=4)
    return {
        **batch,
        "pixel_values": pixels(samples),
        "image_embeds_position_mask": (batch["input_ids"] == IMAGE).long(),
    }


def _flat_patches(samples: int, count: int = 4) -> torch.Tensor:
    """Return patches with their row and column, counted from 1, in front."""
    places = torch.tensor([[1 + i // 2, 1 + i % 2] for i in range(count)]).float().repeat(samples, 1, 1)
    return torch.cat([places, numbers(samples, count, 48)], -1)


def _kosmos_patches(samples: int, length: int) -> Batch:
    batch = text_with(samples, length, count=4)
    return {
        **batch, "flattened_patches": _flat_patches(samples),
        "image_embeds_position_mask": (batch["input_ids"] == IMAGE).long(),
    }  # fmt: skip


def _shaped_patches(samples: int, length: int) -> Batch:
    return {
        **text_with(samples, length, count=1), "pixel_values": numbers(samples, 4, 48),
        "pixel_attention_mask": torch.ones(samples, 4, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[2, 2]] * samples),
    }  # fmt: skip


def _rendered(samples: int, length: int) -> Batch:
    """Return rendered pages as patches, and ``length`` tokens of text."""
    return {
        "flattened_patches": _flat_patches(samples), "attention_mask": torch.ones(samples, 4),
        "labels": integers(samples, length),
    }  # fmt: skip


def _document(samples: int, length: int, *, high: int = 60) -> Batch:
    """Return words with their boxes on a page, and the page."""
    corners = integers(samples, length, 4, first=0, end=high, seed=6).sort(-1).values
    batch = text(samples, length)
    return {**batch, "bbox": corners[..., [0, 1, 2, 3]]}


def _document_page(samples: int, length: int) -> Batch:
    return {
        **_document(samples, length),
        "pixel_values": pixels(samples),
        "labels": integers(samples, length, end=3, first=0),
    }


def _document_words(samples: int, length: int) -> Batch:
    return {**_document(samples, length), "labels": integers(samples, length, end=3, first=0)}


def _document_to_text(samples: int, length: int) -> Batch:
    batch = _document(samples, length)
    return {
        **batch,
        "bbox": batch["bbox"] / 60.0,
        "pixel_values": pixels(samples),
        "labels": integers(samples, 4, seed=4),
    }


def _regions(samples: int, length: int) -> Batch:
    """Return texts and features of four regions of an image."""
    return {
        **masked_text(samples, length), "visual_embeds": numbers(samples, 4, WIDTH),
        "visual_attention_mask": torch.ones(samples, 4, dtype=torch.int64),
        "visual_token_type_ids": torch.ones(samples, 4, dtype=torch.int64),
    }  # fmt: skip


def _lxmert(samples: int, length: int) -> Batch:
    return {
        **masked_text(samples, length), "visual_feats": numbers(samples, 4, 16), "visual_pos": uniform(samples, 4, 4),
        "matched_label": classes(samples, 2), "ans": classes(samples, 5),
    }  # fmt: skip


def _visual_bert(samples: int, length: int) -> Batch:
    batch = _regions(samples, length)
    labels = torch.cat([batch["labels"], torch.full((samples, 4), -100)], 1)
    return {**batch, "labels": labels}


_MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_OPT: dict[str, Any] = {
    "model_type": "opt", **LAYERS, **IDS, "ffn_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "word_embed_proj_dim": WIDTH,
}  # fmt: skip
_QFORMER: dict[str, Any] = {
    **LAYERS,
    "vocab_size": VOCABULARY,
    "encoder_hidden_size": WIDTH,
    "max_position_embeddings": 32,
}
_ONE_TOKEN: dict[str, Any] = {"image_token_index": IMAGE, "image_token_id": IMAGE}
_MOE_GRID = grid_vision(hidden_size=WIDTH, intermediate_size=64, out_hidden_size=WIDTH)
_LAYOUT: dict[str, Any] = {
    **LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "max_2d_position_embeddings": 64, "num_labels": 3,
    "coordinate_size": 6, "shape_size": 4,
}  # fmt: skip

MODELS = (
    ZooModel(
        name="vipllava", kind=KIND, model="VipLlavaForConditionalGeneration", batch=_with(4),
        config={
            "text_config": text_config(), "vision_config": vision_config(), **_ONE_TOKEN,
            "vision_feature_layer": [-1, -2],
        },
    ),
    ZooModel(
        name="llava_next_video", kind=KIND, model="LlavaNextVideoForConditionalGeneration", batch=tiles,
        config={
            "text_config": text_config(), "vision_config": vision_config(), **_ONE_TOKEN,
            "image_grid_pinpoints": [[8, 8]],
            "video_token_index": VIDEO, "video_token_id": VIDEO, "vision_feature_layer": -1,
        },
    ),
    ZooModel(
        name="video_llava", kind=KIND, model="VideoLlavaForConditionalGeneration", batch=_video,
        config={
            "text_config": text_config(), "vision_config": vision_config(), **_ONE_TOKEN, "video_token_index": VIDEO,
            "video_token_id": VIDEO, "vision_feature_layer": -1,
        },
    ),
    ZooModel(
        name="aya_vision", kind=KIND, model="AyaVisionForConditionalGeneration", batch=_with(1),
        config={
            "text_config": text_config("cohere2", sliding_window=6, head_dim=8),
            "vision_config": vision_config("siglip_vision_model"),
            **_ONE_TOKEN, "downsample_factor": 2, "alignment_intermediate_size": 64,
        },
    ),
    ZooModel(
        name="cohere2_vision", kind=KIND, model="Cohere2VisionForConditionalGeneration", batch=_with(1),
        config={
            "text_config": text_config("cohere2", sliding_window=6, head_dim=8),
            "vision_config": vision_config("siglip_vision_model"),
            **_ONE_TOKEN, "downsample_factor": 2, "alignment_intermediate_size": 64,
        },
    ),
    ZooModel(
        name="aria", kind=KIND, model="AriaForConditionalGeneration", batch=_with(4),
        config={
            "text_config": text_config("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            "vision_config": vision_config("idefics3_vision"), **_ONE_TOKEN, "vision_feature_layer": -1,
            "projector_patch_to_query_dict": {4: 4},
        },
    ),
    ZooModel(
        name="deepseek_vl", kind=KIND, model="DeepseekVLForConditionalGeneration", batch=_with(4),
        config={"text_config": text_config(), "vision_config": vision_config("siglip_vision_model"), **_ONE_TOKEN},
    ),
    ZooModel(
        name="janus", kind=KIND, model="JanusForConditionalGeneration", batch=_with(4),
        config={
            "text_config": text_config(), "image_token_id": IMAGE,
            "vision_config": {**tower(), "projection_dim": WIDTH, "num_image_tokens": 4, "mlp_ratio": 2.0},
            "vq_config": {
                "embed_dim": 4, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1, "num_patches": 4, "projection_dim": WIDTH,
                "image_token_embed_dim": WIDTH, "num_hidden_layers": 2,
            },
        },
    ),
    ZooModel(
        name="chameleon", kind=KIND, model="ChameleonForConditionalGeneration", batch=_with(16),
        config={
            **text_config("chameleon"), "vq_config": {
                "embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "resolution": 8, "base_channels": 32,
                "channel_multiplier": [1, 1], "num_res_blocks": 1,
            },
            # an image's tokens are called by their numbers, written with A for 0, B for 1
            "vocabulary_map": {
                "<image>": IMAGE,
                **{f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": 80 + i for i in range(16)},
            },
        },
        note="an image's tokens are read from a table that Python makes",
    ),
    ZooModel(
        name="got_ocr2", kind=KIND, model="GotOcr2ForConditionalGeneration", batch=_with(1, side=16),
        config={
            "text_config": text_config("qwen2"), **_ONE_TOKEN, "image_seq_length": 1,
            "vision_config": {
                "hidden_size": WIDTH, "output_channels": 16, "num_hidden_layers": 2,
                "num_attention_heads": HEADS, "image_size": 16,
                "patch_size": 4, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64,
            },
        },
    ),
    ZooModel(
        name="ovis2", kind=KIND, model="Ovis2ForConditionalGeneration", batch=_with(4),
        config={
            "text_config": text_config("qwen2"), "vocab_size": VOCABULARY, "hidden_size": WIDTH,
            "image_token_id": IMAGE,
            "visual_indicator_token_ids": [70, 71, 72, 73, 74],
            "vision_config": {**tower(), "vocab_size": 24, "hidden_stride": 1, "num_visual_indicator_tokens": 5},
        },
    ),
    ZooModel(
        name="lfm2_vl", kind=KIND, model="Lfm2VlForConditionalGeneration", batch=_shaped_patches,
        config={
            "text_config": text_config("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8),
            "vision_config": {
                "model_type": "siglip2_vision_model", **LAYERS, "patch_size": 4, "num_channels": 3, "num_patches": 4,
                "vision_use_head": False,
            },
            "image_token_id": IMAGE, "downsample_factor": 2, "projector_hidden_size": 64,
        },
    ),
    ZooModel(
        name="lighton_ocr", kind=KIND, model="LightOnOcrForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=1), "pixel_values": pixels(samples),
            "image_sizes": torch.tensor([[8, 8]] * samples),
        },
        config={
            "text_config": text_config("qwen3", head_dim=8), "image_token_id": IMAGE,
            "vision_config": {**vision_config("pixtral"), "head_dim": 8}, "spatial_merge_size": 2,
        },
    ),
    ZooModel(
        name="llama4", kind=KIND, model="Llama4ForConditionalGeneration", batch=_with(1),
        config={
            "text_config": text_config(
                "llama4_text", head_dim=8, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8,
                interleave_moe_layer_step=1, attn_temperature_tuning=False,
            ),
            "vision_config": {
                **tower(), "vision_output_dim": WIDTH, "projector_input_dim": WIDTH, "projector_output_dim": WIDTH,
                "intermediate_size": 128, "pixel_shuffle_ratio": 0.5,
            },
            "image_token_index": IMAGE, "image_token_id": IMAGE, "boi_token_index": IMAGE_START,
            "eoi_token_index": IMAGE_END,
        },
    ),
    ZooModel(
        name="mllama", kind=KIND, model="MllamaForConditionalGeneration", batch=_crossed,
        config={
            "text_config": text_config(
                "mllama_text_model", cross_attention_layers=[1],
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            "vision_config": {
                **tower(), "attention_heads": HEADS, "num_global_layers": 1, "vision_output_dim": 2 * WIDTH,
                "max_num_tiles": 1,
                "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
            },
            "image_token_index": 100,
        },
    ),
    ZooModel(
        name="idefics", kind=KIND, model="IdeficsForVisionText2Text", batch=_looked_at,
        config={
            **text_config("idefics"), "vision_config": {
                "embed_dim": WIDTH, "image_size": 8, "patch_size": 4, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": HEADS,
            },
            "perceiver_config": {
                "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8,
            },
            "use_resampler": False, "alpha_initializer": "ones", "freeze_text_layers": False,
            "freeze_vision_layers": False,
        },
    ),
    ZooModel(
        name="qwen2_5_omni", kind=KIND, model="Qwen2_5OmniThinkerForConditionalGeneration",
        batch=lambda samples, length: patches(samples, length, pixels_each=96),
        config={
            "text_config": text_config("qwen2_5_omni_text", rope_parameters=mrope()),
            "vision_config": {
                **grid_vision(), "hidden_size": WIDTH, "intermediate_size": 64, "out_hidden_size": WIDTH,
                "window_size": 16, "fullatt_block_indexes": [1],
            },
            "audio_config": {
                "num_mel_bins": 8, "d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": HEADS,
                "encoder_ffn_dim": 64,
                "max_source_positions": 16, "n_window": 4, "output_dim": WIDTH,
            },
            "audio_token_index": AUDIO, "image_token_index": IMAGE, "video_token_index": VIDEO,
            "audio_token_id": AUDIO,
            "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IMAGE_START,
            "vision_end_token_id": IMAGE_END,
            "audio_start_token_id": 71, "audio_end_token_id": 72, "user_token_id": 73,
        },
    ),
    ZooModel(
        name="qwen3_5", kind=KIND, model="Qwen3_5ForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config(
                "qwen3_5_text", head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
                linear_num_value_heads=2, layer_types=["linear_attention", "full_attention"],
                rope_parameters={**mrope(), "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            ),
            "vision_config": {**_MOE_GRID, "num_position_embeddings": 16}, **grid_ids(),
        },
    ),
    ZooModel(
        name="qwen3_vl_moe", kind=KIND, model="Qwen3VLMoeForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config(
                "qwen3_vl_moe_text", head_dim=8, num_experts=4, **_MOE,
                rope_parameters={**mrope(), "mrope_interleaved": True},
            ),
            "vision_config": {
                **_MOE_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            }, **grid_ids(),
        },
    ),
    ZooModel(
        name="glm4v_moe", kind=KIND, model="Glm4vMoeForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config(
                "glm4v_moe_text", head_dim=8, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, **_MOE,
                rope_parameters={**mrope(), "partial_rotary_factor": 1.0},
            ),
            "vision_config": {**_MOE_GRID, "image_size": 16}, "image_token_id": IMAGE, "video_token_id": VIDEO,
            "image_start_token_id": IMAGE_START, "image_end_token_id": IMAGE_END, "video_start_token_id": VIDEO_START,
            "video_end_token_id": VIDEO_END,
        },
    ),
    ZooModel(
        name="glm46v", kind=KIND, model="Glm46VForConditionalGeneration", batch=typed_patches,
        config={
            "text_config": text_config("glm4v_text", rope_parameters={**mrope(), "partial_rotary_factor": 1.0}),
            "vision_config": {"model_type": "glm4v_vision", **_MOE_GRID, "image_size": 16}, "image_token_id": IMAGE,
            "video_token_id": VIDEO, "image_start_token_id": IMAGE_START, "image_end_token_id": IMAGE_END,
            "video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END,
        },
    ),
    ZooModel(
        name="ernie4_5_vl_moe", kind=KIND, model="Ernie4_5_VLMoeForConditionalGeneration",
        batch=lambda samples, length: _ernie(samples, length),
        config={
            "text_config": text_config(
                "ernie4_5_vl_moe_text", moe_intermediate_size=[16, 16], moe_k=2, moe_num_experts=4,
                moe_num_shared_experts=1,
                mlp_layer_types=["dense", "sparse"],
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            ),
            "vision_config": {
                "depth": 2, "num_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 64,
                "in_channels": 3, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_merge_size": 2,
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": IMAGE_START,
            "image_end_token_id": IMAGE_END,
            "video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END,
        },
    ),
    ZooModel(
        name="paddleocr_vl", kind=KIND, model="PaddleOCRVLForConditionalGeneration", batch=lambda samples,
        length: _ocr(samples, length),
        config={
            "text_config": text_config("paddleocr_vl_text", head_dim=8, rope_parameters=mrope()),
            "vision_config": {**tower(image_size=16), "spatial_merge_size": 2}, **grid_ids(),
        },
    ),
    ZooModel(
        name="instructblip", kind=KIND, model="InstructBlipForConditionalGeneration", batch=_queries,
        config={
            "text_config": _OPT, "vision_config": tower(initializer_range=0.02), "qformer_config": _QFORMER,
            "num_query_tokens": 4,
            **_ONE_TOKEN,
        },
    ),
    ZooModel(
        name="instructblipvideo", kind=KIND, model="InstructBlipVideoForConditionalGeneration", batch=_query_frames,
        config={
            "text_config": _OPT, "vision_config": tower(initializer_range=0.02), "qformer_config": _QFORMER,
            "num_query_tokens": 4,
            "video_token_index": VIDEO, "video_token_id": VIDEO,
        },
    ),
    ZooModel(
        name="blip", kind=KIND, model="BlipForConditionalGeneration", batch=_caption,
        config={
            "text_config": {
                **LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
                "encoder_hidden_size": WIDTH, "projection_dim": WIDTH,
            },
            "vision_config": {**tower(), "projection_dim": WIDTH}, "projection_dim": WIDTH,
        },
    ),
    ZooModel(
        name="git", kind=KIND, model="GitForCausalLM", batch=_caption,
        config={**LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "vision_config": tower()},
    ),
    ZooModel(
        name="kosmos2", kind=KIND, model="Kosmos2ForConditionalGeneration", batch=_kosmos,
        config={
            "text_config": {
                **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "embed_dim": WIDTH,
                "layers": 2, "ffn_dim": 64, "attention_heads": HEADS,
            },
            "vision_config": tower(), "latent_query_num": 4,
        },
    ),
    ZooModel(
        name="kosmos2_5", kind=KIND, model="Kosmos2_5ForConditionalGeneration", batch=_kosmos_patches,
        config={
            "text_config": {
                **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "embed_dim": WIDTH,
                "layers": 2, "ffn_dim": 64, "attention_heads": HEADS,
            },
            "vision_config": {
                **LAYERS, "patch_embed_hidden_size": 48, "head_dim": 8, "max_num_patches": 16,
            }, "latent_query_num": 4,
        },
    ),
    ZooModel(
        name="florence2", kind=KIND, model="Florence2ForConditionalGeneration",
        batch=lambda samples, length: {
            **text_with(samples, length, count=5), "pixel_values": pixels(samples, 16),
            "labels": integers(samples, 4, seed=4),
        },
        config={
            "text_config": {
                "model_type": "bart", **IDS, "vocab_size": VOCABULARY, "d_model": WIDTH,
                "encoder_layers": 2, "decoder_layers": 2,
                "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "max_position_embeddings": 64, "decoder_start_token_id": START,
            },
            "vision_config": {
                "depths": [1, 1], "patch_size": [3, 3], "patch_stride": [4, 2], "patch_padding": [1, 1],
                "patch_prenorm": [False, True],
                "embed_dim": [16, 32], "num_heads": [2, 4], "num_groups": [2, 4], "window_size": 2,
                "projection_dim": WIDTH,
                "max_temporal_embeddings": 4, "max_position_embeddings": 8,
            },
            "image_token_id": IMAGE, "is_encoder_decoder": True,
        },
    ),
    ZooModel(
        name="fuyu", kind=KIND, model="FuyuForCausalLM",
        batch=lambda samples,
        length: {**text_with(samples, length, count=4), "image_patches": numbers(samples, 4, 48)},
        config={
            "text_config": text_config("persimmon"), "patch_size": 4, "num_channels": 3, "image_token_id": IMAGE,
        },
    ),
    ZooModel(
        name="pix2struct", kind=KIND, model="Pix2StructForConditionalGeneration", batch=_rendered,
        config={
            "text_config": {
                "vocab_size": VOCABULARY, "hidden_size": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2,
                "num_heads": HEADS,
                "decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": START,
            },
            "vision_config": {**LAYERS, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8, "seq_len": 16},
        },
    ),
    ZooModel(
        name="udop", kind=KIND, model="UdopForConditionalGeneration", batch=_document_to_text,
        config={
            "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2,
            "num_heads": HEADS, "image_size": 8,
            "patch_size": 4, "max_2d_position_embeddings": 64, "decoder_start_token_id": PAD, "pad_token_id": PAD,
        },
    ),
    ZooModel(
        name="layoutlm", kind=KIND, model="LayoutLMForTokenClassification", batch=_document_words,
        config={k: v for k, v in _LAYOUT.items() if k not in ("coordinate_size", "shape_size")},
    ),
    ZooModel(
        name="layoutlmv3", kind=KIND, model="LayoutLMv3ForTokenClassification", batch=_document_page,
        config={**_LAYOUT, "input_size": 8, "patch_size": 4, "num_channels": 3},
    ),
    ZooModel(
        name="lilt", kind=KIND, model="LiltForTokenClassification", batch=_document_words,
        config={
            **{k: v for k, v in _LAYOUT.items() if k not in ("coordinate_size", "shape_size")},
            "channel_shrink_ratio": 2, "hidden_size": 24,
        },
    ),
    ZooModel(
        name="bros", kind=KIND, model="BrosForTokenClassification",
        batch=lambda samples, length: {**_document_words(samples, length), "bbox": uniform(samples, length, 4)},
        config={
            **LAYERS, **IDS, "hidden_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
            "num_labels": 3,
        },
    ),
    ZooModel(
        name="lxmert", kind=KIND, model="LxmertForPreTraining", batch=_lxmert,
        config={
            **IDS, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS,
            "intermediate_size": 64,
            "max_position_embeddings": 64, "num_qa_labels": 5, "num_object_labels": 5, "num_attr_labels": 5,
            "l_layers": 2, "x_layers": 1,
            "r_layers": 1, "visual_feat_dim": 16, "task_obj_predict": False,
        },
    ),
    ZooModel(
        name="visual_bert", kind=KIND, model="VisualBertForPreTraining", batch=_visual_bert,
        config={
            **LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "visual_embedding_dim": WIDTH,
        },
    ),
    ZooModel(
        name="vision_encoder_decoder", kind=KIND, model="VisionEncoderDecoderModel",
        batch=lambda samples, length: {"pixel_values": pixels(samples), "labels": integers(samples, length)},
        config={
            "encoder": vision_config("vit"),
            "decoder": {
                "model_type": "gpt2", **IDS, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
                "n_positions": 64, "vocab_size": VOCABULARY,
                "add_cross_attention": True, "is_decoder": True,
            },
            "decoder_start_token_id": START, "pad_token_id": PAD, "eos_token_id": 2,
        },
    ),
)  # fmt: skip


def _ernie(samples: int, length: int) -> Batch:
    # patches of one frame: 4 x 4 of 48 numbers
    batch = patches(samples, length, pixels_each=48)
    kinds = (batch["input_ids"] == IMAGE).long()
    return {**batch, "mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds}


def _ocr(samples: int, length: int) -> Batch:
    batch = patches(samples, length, pixels_each=48)
    return {
        **batch, "pixel_values": batch["pixel_values"].reshape(-1, 3, 4, 4),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }  # fmt: skip
