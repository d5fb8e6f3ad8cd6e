"""Detection and segmentation with a loss: sets of boxes matched to those of an image, and labels for pixels."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import (
    HEADS,
    IDS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Batch,
    ZooModel,
    integers,
    numbers,
    pixels,
    text,
    uniform,
)

KIND = "detection"


def boxes(samples: int, length: int) -> Batch:
    """Return images of ``length`` pixels a side, and two boxes with classes for each, as a list of dicts."""
    labels = [
        {"class_labels": torch.tensor([i % 3, (i + 1) % 3]), "boxes": 0.25 + 0.5 * uniform(2, 4, seed=i)}
        for i in range(samples)
    ]
    return {"pixel_values": pixels(samples, length), "labels": labels}


RESNET: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
DETR: dict[str, Any] = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "num_queries": 4, "num_labels": 3,
}  # fmt: skip

_SIDES: dict[str, Any] = {"lengths": (64, 96), "means": "pixels of a side"}
_RT_RESNET: dict[str, Any] = {
    "model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1], "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_RT_DETR: dict[str, Any] = {
    "encoder_hidden_dim": WIDTH, "encoder_in_channels": [16, 16, 32], "encoder_ffn_dim": 64,
    "encoder_attention_heads": HEADS, "d_model": WIDTH,
    "num_queries": 4, "decoder_in_channels": [WIDTH, WIDTH, WIDTH], "decoder_ffn_dim": 64,
    "decoder_layers": 2, "decoder_attention_heads": HEADS,
    "num_denoising": 0, "num_labels": 3,
}  # fmt: skip
_SWIN: dict[str, Any] = {
    "model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1],
    "num_heads": [1, 1, 2, 2], "window_size": 2,
    "out_features": ["stage3", "stage4"],
}  # fmt: skip


def masked_boxes(samples: int, length: int) -> Batch:
    """Return images with boxes, classes and a mask for each box."""
    batch = boxes(samples, length)
    for i, found in enumerate(batch["labels"]):
        found["masks"] = uniform(2, length, length, seed=i).round()
    return batch


def _grounded(samples: int, length: int) -> Batch:
    """Return images with boxes, whose classes are phrases of a text: words 1, 2 . 4, 5 ."""
    # 101 [CLS], 102 [SEP] and 1012 full stop are what the model looks for
    ids = torch.tensor([[101, 10, 11, 1012, 12, 13, 1012, 102]]).repeat(samples, 1)
    batch = boxes(samples, length)
    for found in batch["labels"]:
        found["class_labels"] = found["class_labels"] % 2
    return {
        **batch, "input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids),
        "pixel_mask": torch.ones(samples, length, length, dtype=torch.int64),
    }  # fmt: skip


def _instances(samples: int, length: int) -> Batch:
    """Return images with a mask and a class for each of two things, in lists."""
    return {
        "pixel_values": pixels(samples, length),
        "mask_labels": [uniform(2, length, length, seed=i).round() for i in range(samples)],
        "class_labels": [torch.tensor([i % 3, (i + 1) % 3]) for i in range(samples)],
    }  # fmt: skip


def _labelled(samples: int, length: int) -> Batch:
    """Return images with a class for each pixel."""
    return {
        "pixel_values": pixels(samples, length),
        "labels": integers(samples, length, length, first=0, end=3),
    }


MODELS = (
    ZooModel(
        name="detr", kind=KIND, model="DetrForObjectDetection", batch=boxes, lengths=(64, 96),
        means="pixels of a side",
        config={
            **DETR, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
            "backbone_config": RESNET,
        },
    ),
    *(
        ZooModel(
            name=name, kind=KIND, model=model, batch=boxes, **_SIDES,
            config={
                **DETR, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
                "backbone_config": RESNET, **more,
            },
        )
        for name, model, more in (
            ("conditional_detr", "ConditionalDetrForObjectDetection", {}),
            ("table_transformer", "TableTransformerForObjectDetection", {}),
            ("dab_detr", "DabDetrForObjectDetection", {"hidden_size": WIDTH}),
            ("deformable_detr", "DeformableDetrForObjectDetection", {
                "num_feature_levels": 2,
                "backbone_config": {**RESNET, "out_features": ["stage3", "stage4"]}, "disable_custom_kernels": True,
            }),
        )
    ),
    ZooModel(
        name="detr_segmentation", kind=KIND, model="DetrForSegmentation", batch=masked_boxes, **_SIDES,
        config={
            **DETR, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "use_timm_backbone": False,
            "use_pretrained_backbone": False, "backbone": None,
            "backbone_config": {**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        },
    ),
    ZooModel(
        name="yolos", kind=KIND, model="YolosForObjectDetection", batch=boxes, lengths=(16, 24),
        means="pixels of a side",
        config={
            **LAYERS, "image_size": [16, 16], "patch_size": 4, "num_channels": 3, "num_detection_tokens": 4,
            "num_labels": 3,
        },
    ),
    ZooModel(
        name="rt_detr", kind=KIND, model="RTDetrForObjectDetection", batch=boxes, **_SIDES,
        config={**_RT_DETR, "backbone_config": _RT_RESNET}, note="no queries of noised boxes (num_denoising 0)",
    ),
    ZooModel(
        name="rt_detr_v2", kind=KIND, model="RTDetrV2ForObjectDetection", batch=boxes, **_SIDES,
        config={**_RT_DETR, "backbone_config": _RT_RESNET}, note="no queries of noised boxes (num_denoising 0)",
    ),
    ZooModel(
        name="d_fine", kind=KIND, model="DFineForObjectDetection", batch=boxes, **_SIDES,
        config={
            **_RT_DETR, "backbone_config": _RT_RESNET, "max_num_bins": 8, "lqe_hidden_dim": 8,
            "decoder_in_channels": [32, 32, 32], "depth_mult": 1.0,
        },
        note="no queries of noised boxes (num_denoising 0)",
    ),
    ZooModel(
        name="grounding_dino", kind=KIND, model="GroundingDinoForObjectDetection", batch=_grounded, **_SIDES,
        config={
            **DETR, "backbone_config": _SWIN,
            "text_config": {"model_type": "bert", **LAYERS, **IDS, "vocab_size": 1024, "max_position_embeddings": 64},
            "num_feature_levels": 2, "max_text_len": 16, "disable_custom_kernels": True, "use_timm_backbone": False,
        },
    ),
    ZooModel(
        name="maskformer", kind=KIND, model="MaskFormerForInstanceSegmentation", batch=_instances, **_SIDES,
        config={
            "fpn_feature_size": WIDTH, "mask_feature_size": WIDTH, "num_labels": 3,
            "backbone_config": {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
            "decoder_config": {"model_type": "detr", **{k: v for k, v in DETR.items() if k != "num_labels"}},
        },
        note="it is compared without random points: its loss is over all of them",
    ),
    ZooModel(
        name="mask2former", kind=KIND, model="Mask2FormerForUniversalSegmentation", batch=_instances, **_SIDES,
        config={
            "backbone_config": {**_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
            "feature_size": WIDTH, "mask_feature_size": WIDTH,
            "hidden_dim": WIDTH, "encoder_feedforward_dim": 64, "encoder_layers": 2, "decoder_layers": 2,
            "dim_feedforward": 64, "num_attention_heads": HEADS,
            "num_queries": 4, "train_num_points": 16, "num_labels": 3,
        },
        draws=True, note="its loss is over points drawn by torch's generator",
    ),
    ZooModel(
        name="eomt", kind=KIND, model="EomtForUniversalSegmentation", batch=lambda samples,
        length: _instances(samples, 32),
        means="nothing: images are of one size",
        config={
            **LAYERS, "image_size": 32, "patch_size": 8, "num_channels": 3, "mlp_ratio": 2,
            "num_upscale_blocks": 1, "num_blocks": 1, "num_queries": 4,
            "num_register_tokens": 1, "train_num_points": 16, "num_labels": 3,
        },
        draws=True, note="its loss is over points drawn by torch's generator",
    ),
    ZooModel(
        name="segformer", kind=KIND, model="SegformerForSemanticSegmentation", batch=_labelled,
        lengths=(32, 64), means="pixels of a side",
        config={
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3], "strides": [4, 2],
            "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3,
        },
    ),
    ZooModel(
        name="upernet", kind=KIND, model="UperNetForSemanticSegmentation", batch=_labelled, **_SIDES,
        config={
            "backbone_config": {
                "model_type": "convnext", "num_stages": 4, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 16, "auxiliary_channels": 8,
            "num_labels": 3,
        },
    ),
    ZooModel(
        name="beit_segmentation", kind=KIND, model="BeitForSemanticSegmentation", batch=lambda samples,
        length: _labelled(samples, 32),
        means="nothing: images are of one size",
        config={
            **LAYERS, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8, "num_channels": 3,
            "vocab_size": 16, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2],
            "auxiliary_channels": 8, "num_labels": 3, "add_fpn": True,
        },
    ),
    ZooModel(
        name="dpt_segmentation", kind=KIND, model="DPTForSemanticSegmentation", batch=lambda samples,
        length: _labelled(samples, 16),
        means="nothing: images are of one size",
        config={
            **LAYERS, "num_hidden_layers": 4, "image_size": 16, "patch_size": 4, "num_channels": 3,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16, "num_labels": 3, "auxiliary_channels": 8,
        },
    ),
    ZooModel(
        name="mobilevit_segmentation", kind=KIND, model="MobileViTForSemanticSegmentation", batch=_labelled, **_SIDES,
        config={
            "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
            "num_attention_heads": 2, "aspp_out_channels": 16,
            "atrous_rates": [2, 4, 6], "num_labels": 3, "num_channels": 3,
        },
    ),
    ZooModel(
        name="clipseg_segmentation", kind=KIND, model="CLIPSegForImageSegmentation",
        batch=lambda samples, length: {
            **{k: v for k, v in text(samples, length).items() if k != "labels"},
            "pixel_values": pixels(samples), "labels": uniform(samples, 8, 8).round(),
        },
        config={
            "text_config": {**LAYERS, **IDS, "vocab_size": VOCABULARY, "max_position_embeddings": 32},
            "projection_dim": 16,
            "vision_config": {**LAYERS, "image_size": 8, "patch_size": 4, "num_channels": 3},
            "extract_layers": [0, 1], "reduce_dim": 16,
            "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32,
        },
    ),
    ZooModel(
        name="seggpt", kind=KIND, model="SegGptForImageSegmentation",
        batch=lambda samples, length: {
            "pixel_values": pixels(samples, 16), "prompt_pixel_values": numbers(samples, 3, 16, 16, seed=3),
            "prompt_masks": numbers(samples, 3, 16, 16, seed=4),
            "labels": numbers(samples, 3, 16, 16, seed=5),
            "bool_masked_pos": (torch.arange(32) >= 16).repeat(samples, 1),
        },
        means="nothing: images are of one size",
        config={
            **LAYERS, "image_size": [32, 16], "patch_size": 4, "num_channels": 3, "pretrain_image_size": 16,
            "decoder_hidden_size": 8, "merge_index": 0,
            "intermediate_hidden_state_indices": [0, 1], "mlp_dim": 64,
        },
        note="which patches are masked is given",
    ),
    ZooModel(
        name="vit_mae", kind=KIND, model="ViTMAEForPreTraining",
        batch=lambda samples, length: {"pixel_values": pixels(samples, 16), "noise": uniform(samples, 16)},
        means="nothing: images are of one size",
        config={
            **LAYERS, "image_size": 16, "patch_size": 4, "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32,
        },
        note="which patches are masked is given (noise)",
    ),
)  # fmt: skip
