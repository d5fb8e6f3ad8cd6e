"""Detection and segmentation with a loss: sets of boxes matched to those of an image, and labels for pixels."""

from __future__ import annotations

from typing import Any

import torch

from gpp_benchmarks.zoo._entries import HEADS, WIDTH, Batch, ZooModel, pixels, uniform

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

MODELS = (
    ZooModel(
        name="detr", kind=KIND, model="DetrForObjectDetection", batch=boxes, lengths=(64, 96), means="pixels of a side",
        config={**DETR, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": RESNET},
    ),
)  # fmt: skip
