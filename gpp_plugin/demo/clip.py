"""The demo's model: a small HuggingFace CLIP with random weights, and its zero-shot accuracy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from gpp_plugin.demo.demo_settings import DemoSettings
from gpp_plugin.demo.digits import (
    DIGIT_NAMES,
    TEMPLATES,
    DigitCaptions,
    DigitData,
    WordTokenizer,
    mini_batches,
)

HIDDEN = 64
LAYERS = 4
HEADS = 4
IMAGE_SIZE = 8
PATCH_SIZE = 2


def make_clip(tokenizer: WordTokenizer, *, seed: int) -> CLIPModel:
    """Return an untouched `transformers.CLIPModel` built from a configuration."""
    tower = {
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "projection_dim": HIDDEN,
    }
    config = CLIPConfig(
        text_config={
            **tower,
            "vocab_size": len(tokenizer.vocabulary),
            "max_position_embeddings": tokenizer.length,
            "pad_token_id": tokenizer.pad_id,
            "bos_token_id": tokenizer.start_id,
            "eos_token_id": tokenizer.end_id,
        },
        vision_config={**tower, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE, "num_channels": 1},
        projection_dim=HIDDEN,
    )
    torch.manual_seed(seed)
    return CLIPModel(config)


@torch.no_grad()
def zero_shot_accuracy(model: CLIPModel, dataset: DigitCaptions) -> float:
    """Return the share of images whose nearest class text is their digit's.

    A class is the mean of its normalised caption embeddings over all templates.
    """
    model.eval()
    texts = [template.format(name) for name in DIGIT_NAMES for template in TEMPLATES]
    text_features = _features(model.get_text_features(**dataset.tokenizer.encode_all(texts)))
    # [60 texts, 64] -> [10 digits, 6 templates, 64] -> mean over templates [10, 64]; texts are
    # digit-major, as the list above is. Against images [360, 64] the product is [360, 10], cosines, since
    # all rows are unit vectors.
    classes = text_features.view(len(DIGIT_NAMES), len(TEMPLATES), -1).mean(dim=1)
    classes = classes / classes.norm(dim=-1, keepdim=True)
    images = _features(model.get_image_features(pixel_values=dataset.images))
    predicted = (images @ classes.T).argmax(dim=1)
    return float((predicted == torch.tensor(dataset.labels)).double().mean())


def _features(output: Tensor) -> Tensor:
    """Return unit vectors; transformers 5 wraps the projected features in an output object."""
    features: Tensor = getattr(output, "pooler_output", output)
    return features / features.norm(dim=-1, keepdim=True)


def train_in_one_process(data: DigitData, settings: DemoSettings, steps: int) -> Iterator[float]:
    """Yield the loss of each of the first ``steps`` steps."""
    model = make_clip(data.tokenizer, seed=settings.seed)
    # "torch_adam" is DeepSpeed's word for torch's AdamW instead of its fused one; torch does not know it.
    params = {k: v for k, v in settings.optimizer_block()["params"].items() if k != "torch_adam"}
    optimizer = torch.optim.AdamW(model.parameters(), **params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.learning_rate_factor)
    model.train()
    for batch in mini_batches(data.train, mini_batch=settings.mini_batch, steps=steps, seed=settings.seed):
        loss = model(**batch, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss.item()
