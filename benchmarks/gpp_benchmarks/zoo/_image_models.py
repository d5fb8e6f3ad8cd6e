"""Models of images and videos alone: classes, depth and larger images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpp_benchmarks.zoo._entries import (
    HEADS,
    LAYERS,
    WIDTH,
    Batch,
    ZooModel,
    classes,
    integers,
    numbers,
    pixels,
    uniform,
)

KIND = "image"


def _image_class(side: int, channels: int = 3) -> Callable[[int, int], Batch]:
    """Return what makes images of one size with a class each."""
    return lambda samples, length: {
        "pixel_values": pixels(samples, side, channels),
        "labels": classes(samples),
    }


def _sided_class(samples: int, length: int) -> Batch:
    return {"pixel_values": pixels(samples, length), "labels": classes(samples)}


def _depths(samples: int, length: int) -> Batch:
    return {"pixel_values": pixels(samples, length), "labels": 1.0 + uniform(samples, length, length)}


_ONE_SIZE = "nothing: images are of one size"
_SIDE = "pixels of a side"
_TOWER: dict[str, Any] = {**LAYERS, "image_size": 8, "patch_size": 4, "num_channels": 3}
_VIT: dict[str, Any] = {**_TOWER, "num_labels": 3}

MODELS = (
    *(
        ZooModel(
            name=name, kind=KIND, model=model, batch=_image_class(8), means=_ONE_SIZE,
            config={"num_labels": 3, **(more if "vision_config" in more else {**_VIT, **more})},
        )
        for name, model, more in (
            ("vit", "ViTForImageClassification", {}),
            ("deit", "DeiTForImageClassification", {}),
            ("beit", "BeitForImageClassification", {"use_relative_position_bias": True}),
            ("data2vec_vision", "Data2VecVisionForImageClassification", {}),
            ("dinov2", "Dinov2ForImageClassification", {"mlp_ratio": 2}),
            (
                "dinov2_with_registers", "Dinov2WithRegistersForImageClassification",
                {"mlp_ratio": 2, "num_register_tokens": 2},
            ),
            ("ijepa", "IJepaForImageClassification", {}),
            ("vit_msn", "ViTMSNForImageClassification", {}),
            ("clip_class", "CLIPForImageClassification", {"vision_config": _TOWER}),
            ("siglip_class", "SiglipForImageClassification", {"vision_config": _TOWER}),
        )
    ),
    *(
        ZooModel(
            name=name, kind=KIND, model=model, batch=_sided_class, lengths=(32, 64), means=_SIDE,
            config={"num_labels": 3, **more}, note=note,
        )
        for name, model, note, more in (
            (
                "resnet", "ResNetForImageClassification", "",
                {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
            ),
            (
                "regnet", "RegNetForImageClassification", "",
                {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
            ),
            (
                "bit", "BitForImageClassification", "",
                {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
            ),
            (
                "convnext", "ConvNextForImageClassification", "",
                {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
            ),
            (
                "convnextv2", "ConvNextV2ForImageClassification", "",
                {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
            ),
            ("cvt", "CvtForImageClassification", "", {
                "patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1],
                "embed_dim": [8, 16], "num_heads": [1, 2], "depth": [1, 2],
                "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0], "drop_rate": [0.0, 0.0],
                "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True],
                "cls_token": [False, True], "qkv_projection_method": ["dw_bn", "dw_bn"],
                "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
                "padding_q": [1, 1], "stride_q": [1, 1],
            }),
            ("poolformer", "PoolFormerForImageClassification", "", {
                "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
                "padding": [2, 1], "num_encoder_blocks": 2,
            }),
            ("efficientnet", "EfficientNetForImageClassification", "", {
                "width_coefficient": 1.0, "depth_coefficient": 1.0, "kernel_sizes": [3, 3],
                "in_channels": [32, 16], "out_channels": [16, 24],
                "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 2], "hidden_dim": 1280,
            }),
            ("mobilenet_v1", "MobileNetV1ForImageClassification", "", {"depth_multiplier": 0.125}),
            ("mobilenet_v2", "MobileNetV2ForImageClassification", "", {"depth_multiplier": 0.25}),
            ("focalnet", "FocalNetForImageClassification", "", {
                "image_size": 32, "patch_size": 4, "embed_dim": 8, "hidden_sizes": [8, 16],
                "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3],
            }),
            (
                "swin", "SwinForImageClassification", "",
                {
                    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2],
                    "num_heads": [2, 2], "window_size": 4,
                },
            ),
            (
                "swinv2", "Swinv2ForImageClassification", "",
                {
                    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2],
                    "num_heads": [2, 2], "window_size": 4,
                },
            ),
            ("segformer_class", "SegformerForImageClassification", "", {
                "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
                "patch_sizes": [7, 3], "strides": [4, 2],
                "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
            }),
        )
    ),
    ZooModel(
        name="hiera", kind=KIND, model="HieraForImageClassification", batch=_image_class(32), means=_ONE_SIZE,
        config={
            "image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 8, "depths": [1, 1],
            "num_heads": [1, 2], "num_query_pool": 1, "masked_unit_size": [4, 4],
            "masked_unit_attention": [True, False], "num_labels": 3,
        },
    ),
    ZooModel(
        name="pvt", kind=KIND, model="PvtForImageClassification", batch=_image_class(32), means=_ONE_SIZE,
        config={
            "image_size": 32, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2],
            "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2, "num_labels": 3,
        },
    ),
    ZooModel(
        name="levit", kind=KIND, model="LevitForImageClassification", batch=_image_class(64), means=_ONE_SIZE,
        config={
            "image_size": 64, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1],
            "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8], "num_labels": 3,
        },
    ),
    ZooModel(
        name="mobilevit", kind=KIND, model="MobileViTForImageClassification", batch=_sided_class,
        lengths=(64, 96), means=_SIDE,
        config={
            "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
            "num_attention_heads": 2, "num_labels": 3,
            "num_channels": 3,
        },
    ),
    ZooModel(
        name="imagegpt", kind=KIND, model="ImageGPTForCausalImageModeling",
        batch=lambda samples,
        length: {
            "input_ids": integers(samples, length, first=0, end=31),
            "labels": integers(samples, length, first=0, end=31),
        },
        config={"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": HEADS}, means="colours",
    ),
    ZooModel(
        name="perceiver_image", kind=KIND, model="PerceiverForImageClassificationLearned",
        batch=_image_class(8), means=_ONE_SIZE,
        config={
            "image_size": 8, "num_latents": 4, "d_latents": 32, "d_model": 512, "num_blocks": 1,
            "num_self_attends_per_block": 2, "num_self_attention_heads": 2,
            "num_cross_attention_heads": 1, "num_labels": 3,
        },
    ),
    ZooModel(
        name="glpn", kind=KIND, model="GLPNForDepthEstimation", batch=_depths, lengths=(64, 96), means=_SIDE,
        config={
            "depths": [1, 1, 1, 1], "sr_ratios": [2, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16],
            "patch_sizes": [7, 3, 3, 3], "strides": [4, 2, 2, 2],
            "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 16,
        },
    ),
    ZooModel(
        name="videomae", kind=KIND, model="VideoMAEForVideoClassification", means=_ONE_SIZE,
        batch=lambda samples, length: {"pixel_values": numbers(samples, 2, 3, 8, 8), "labels": classes(samples)},
        config={**_VIT, "num_frames": 2, "tubelet_size": 2},
    ),
    ZooModel(
        name="vivit", kind=KIND, model="VivitForVideoClassification", means=_ONE_SIZE,
        batch=lambda samples, length: {"pixel_values": numbers(samples, 2, 3, 8, 8), "labels": classes(samples)},
        config={**_VIT, "num_frames": 2, "tubelet_size": [2, 4, 4]},
    ),
    ZooModel(
        name="timesformer", kind=KIND, model="TimesformerForVideoClassification", means=_ONE_SIZE,
        batch=lambda samples, length: {"pixel_values": numbers(samples, 2, 3, 8, 8), "labels": classes(samples)},
        config={**_VIT, "num_frames": 2},
    ),
    ZooModel(
        name="patchtst", kind=KIND, model="PatchTSTForPrediction",
        means="nothing: a past has the length that the model is made for",
        batch=lambda samples,
        length: {"past_values": numbers(samples, 16, 2), "future_values": numbers(samples, 4, 2, seed=3)},
        config={
            "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
            "num_hidden_layers": 2, "d_model": WIDTH, "num_attention_heads": HEADS,
            "ffn_dim": 64, "prediction_length": 4, "loss": "mse",
        },
    ),
    ZooModel(
        name="patchtsmixer", kind=KIND, model="PatchTSMixerForPrediction",
        means="nothing: a past has the length that the model is made for",
        batch=lambda samples,
        length: {"past_values": numbers(samples, 16, 2), "future_values": numbers(samples, 4, 2, seed=3)},
        config={
            "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
            "num_layers": 2, "d_model": 16, "prediction_length": 4, "loss": "mse",
        },
    ),
)  # fmt: skip
