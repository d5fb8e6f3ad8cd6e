"""The models of `gpp bench lengths`, and loss units of any text length and number of images for them.

Texts are of the given length or shorter by up to a quarter, padded; of LLaVA and Qwen2.5-VL each has so many images in
front of its words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_benchmarks._attention_models import IMAGE, Batch, Size, build_family
from gpp_benchmarks.zoo import _catalogue as zoo

IMAGE_TOKENS = 16
"""Of LLaVA: 4 x 4 patches an image, a token each."""
SIDE = 16
MOST_IMAGES = 3

MakeUnit = Callable[[int, int], Batch]
"""Takes a text length and a number of images a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFamily:
    """A model, and how its units differ.

    Args:
        make: takes a size and the samples of a unit; returns the model and what makes its units.
        most_images: a sample; 0 where there are none.
    """

    make: Callable[[Size], tuple[nn.Module, MakeUnit]]
    most_images: int = 0


def build(name: str, size: Size) -> tuple[nn.Module, MakeUnit]:
    """Return a model in training mode, always the same, and what makes its units of ``size.samples`` samples."""
    return FAMILIES[name].make(size)


def _plain(name: str) -> Callable[[Size], tuple[nn.Module, MakeUnit]]:
    def make(size: Size) -> tuple[nn.Module, MakeUnit]:
        model, make_batch = build_family(name, size)
        whole = make_batch("right")
        return model, lambda length, images: cut(whole, length)

    return make


def cut(batch: Batch, length: int) -> Batch:
    """Return a batch whose longest text has ``length`` tokens, and others as much less."""
    texts = {k: v for k, v in batch.items() if not v.is_floating_point() and v.ndim == 2}
    longest = max(text.shape[1] for text in texts.values())
    short = {k: v[:, : max(v.shape[1] * length // longest, 4)].contiguous() for k, v in texts.items()}
    return {**batch, **short}


def _with_images(ids: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return texts that begin with some tokens, which are no labels, and their labels."""
    samples, length = ids.shape
    if length <= len(tokens):
        raise ValueError(f"a text of {length} tokens has no room for {len(tokens)} of images")
    front = torch.tensor(tokens, dtype=ids.dtype).expand(samples, -1)
    return (
        torch.cat([front, ids[:, len(tokens) :]], dim=1),
        torch.cat([torch.full_like(front, -100), ids[:, len(tokens) :]], dim=1),
    )


def _words(size: Size, length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and their mask."""
    missing = torch.arange(size.samples)[:, None] % (length // 4 + 1)
    mask = (torch.arange(length)[None, :] < length - missing).long()
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 60, (size.samples, length), generator=generator), mask


def _llava(size: Size) -> tuple[nn.Module, MakeUnit]:
    # the family's images are as large as its texts are long: these are 16 x 16 pixels, whatever the length
    model, _ = build_family("llava", dataclasses.replace(size, length=IMAGE_TOKENS))

    def unit(length: int, images: int) -> Batch:
        ids, mask = _words(size, length)
        ids, labels = _with_images(ids, [IMAGE] * (IMAGE_TOKENS * images))
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.where(mask > 0, labels, -100),
            "pixel_values": zoo.numbers(size.samples * images, 3, SIDE, SIDE),
        }

    return model, unit


def _qwen2_5_vl(size: Size) -> tuple[nn.Module, MakeUnit]:
    entry = zoo.CATALOGUE["qwen2_5_vl"]
    config: dict[str, Any] = {
        **entry.config,
        "text_config": {**entry.config["text_config"], "num_hidden_layers": size.layers},
        "vision_config": {
            **entry.config["vision_config"], "depth": size.layers, "fullatt_block_indexes": [size.layers - 1],
        },
    }  # fmt: skip
    model = zoo.build_model(dataclasses.replace(entry, config=config))
    # 4 x 4 patches an image, merged 2 x 2: four tokens
    tokens = [zoo.IMAGE_START, *[IMAGE] * 4, zoo.IMAGE_END]

    def unit(length: int, images: int) -> Batch:
        ids, mask = _words(size, length)
        ids, labels = _with_images(ids, tokens * images)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.where(mask > 0, labels, -100),
            "pixel_values": zoo.numbers(16 * size.samples * images, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * (size.samples * images)),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }

    return model, unit


FAMILIES = {
    "gpt2": LengthFamily(make=_plain("gpt2")),
    "llava": LengthFamily(make=_llava, most_images=MOST_IMAGES),
    "t5": LengthFamily(make=_plain("t5")),
    "whisper": LengthFamily(make=_plain("whisper")),
    "qwen2_5_vl": LengthFamily(make=_qwen2_5_vl, most_images=MOST_IMAGES),
}
