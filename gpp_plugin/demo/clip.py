"""The demo's model: a small HuggingFace CLIP with random weights, and its zero-shot accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import CLIPConfig, CLIPModel

# The demo's data: scikit-learn's 1,797 handwritten digits, each with a written caption.
#
# Everything ships in a package; nothing is downloaded. A caption is a template with the digit's name; the
# tokenizer is the list of words that occur.

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a photo of the digit {}",
    "the number {} , handwritten",
    "a handwritten {}",
    "someone wrote a {}",
    "a small picture of the figure {}",
    "{} , drawn with a pen",
)
HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0


class WordTokenizer:
    """Turns captions into ids, one per word.

    CLIP pools its text at the end-of-text token, which old checkpoints find as the highest id of the row;
    so the end has the highest id here (and is not 2, which would select that old behaviour).
    """

    def __init__(self, templates: Sequence[str] = TEMPLATES, names: Sequence[str] = DIGIT_NAMES) -> None:
        words = {word for template in templates for word in template.replace("{}", "").split()}
        # Sorted, so that ids do not depend on the hash seed of a process: every rank
        # builds its own tokenizer.
        self.vocabulary = ("<pad>", "<start>", *sorted(words | set(names)), "<end>")
        self._ids = {word: index for index, word in enumerate(self.vocabulary)}
        self.pad_id, self.start_id, self.end_id = 0, 1, len(self.vocabulary) - 1
        self.length = max(len(template.split()) for template in templates) + 2

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids and attention mask of one caption, padded to `length`.

        Raises:
            ValueError: a word is not in the vocabulary.
        """
        unknown = [word for word in text.split() if word not in self._ids]
        if unknown:
            raise ValueError(f"words {unknown} are not in the vocabulary {self.vocabulary}")
        ids = [self.start_id, *(self._ids[word] for word in text.split()), self.end_id]
        padding = self.length - len(ids)
        return ids + [self.pad_id] * padding, [1] * len(ids) + [0] * padding

    def encode_all(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` [texts, length] (int64)."""
        ids, masks = zip(*(self.encode(text) for text in texts), strict=True)
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


class DigitCaptions(Dataset[dict[str, Tensor]]):
    """Pairs of image and caption as a HuggingFace CLIP takes them.

    Args:
        images: normalised, [samples, 1, 8, 8] float32; ``labels`` the digits [samples].
    """

    def __init__(self, images: Tensor, labels: Sequence[int], tokenizer: WordTokenizer) -> None:
        self.images = images
        self.labels = tuple(int(label) for label in labels)
        self.tokenizer = tokenizer
        self._texts = tokenizer.encode_all([self.caption(index) for index in range(len(self))])

    def __len__(self) -> int:
        return len(self.labels)

    def caption(self, index: int) -> str:
        """Return the caption of one image; the templates take turns."""
        return TEMPLATES[index % len(TEMPLATES)].format(DIGIT_NAMES[self.labels[index]])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        texts = {key: value[index] for key, value in self._texts.items()}
        return {**texts, "pixel_values": self.images[index]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitData:
    """The digits to train on and those held out."""

    train: DigitCaptions
    held_out: DigitCaptions
    tokenizer: WordTokenizer


def load_digit_captions() -> DigitData:
    """Return the data, split by class with a fixed seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train, held_out = train_test_split(
        np.arange(len(digits.target)),
        test_size=HELD_OUT_SHARE,
        stratify=digits.target,
        random_state=SPLIT_SEED,
    )
    # [1797, 8, 8] -> [1797, 1, 8, 8]: one channel. Mean and deviation are the training images' alone.
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    mean, std = images[train].mean(), images[train].std()
    images = (images - mean) / std
    tokenizer = WordTokenizer()
    return DigitData(
        train=DigitCaptions(images[train], digits.target[train], tokenizer),
        held_out=DigitCaptions(images[held_out], digits.target[held_out], tokenizer),
        tokenizer=tokenizer,
    )


def mini_batches(
    dataset: DigitCaptions, *, mini_batch: int, steps: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Yield ``steps`` shuffled mini-batches; the same sequence for the same seed on every rank."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        # Epochs run on: 1,437 images are 22 mini-batches of 64 and 29 images, which begin the next one. Every
        # sample is used once an epoch, and no mini-batch is short (training refuses those).
        if len(order) < mini_batch:
            order += torch.randperm(len(dataset), generator=generator).tolist()
        chosen, order = order[:mini_batch], order[mini_batch:]
        yield default_collate([dataset[index] for index in chosen])


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
