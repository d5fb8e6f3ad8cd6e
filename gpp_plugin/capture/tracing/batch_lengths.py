"""How long the sequences of a batch are, and the same batch with longer or shorter ones.

A length is the last axis of an entry. An entry that is named, or one that texts have, is an *anchor*; integer entries
as long as it go with it:

    input_ids [4, 512]   attention_mask [4, 512]   labels [4, 128]   image_grid_thw [6, 3]   pixel_values [4, 3, 20, 20]
    anchors input_ids and labels: input_ids -> (input_ids, attention_mask), labels -> (labels); the others stay

Source: this project
Tests: tests/capture/test_batch_lengths.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.errors import ConfigError

ANCHORS = ("input_ids", "decoder_input_ids", "labels")
"""Entries that have a length where none is named."""

LengthOf = int | Mapping[str, int]
"""The length of all texts, or of the entries that are named."""


def length_entries(batch: Mapping[str, Any], asked: LengthOf) -> dict[str, tuple[str, ...]]:
    """Return each anchor with the entries that are as long as it, itself included.

    Args:
        asked: a number, or an object whose keys are the anchors.

    Raises:
        ConfigError: an entry that is named is not there, or none is a text.
    """
    texts = {
        key: value.shape[-1]
        for key, value in batch.items()
        if isinstance(value, Tensor) and value.ndim >= 2 and not value.is_floating_point()
    }
    if isinstance(asked, Mapping):
        named = {k: v.shape[-1] for k, v in batch.items() if isinstance(v, Tensor) and v.ndim >= 2}
        missing = sorted(asked.keys() - named.keys())
        if missing:
            raise ConfigError(
                f"graph_pipeline.lengths: {missing[0]!r} is no entry of the batch with a length; give some of "
                f"{', '.join(sorted(named))}"
            )
        anchors = {key: named[key] for key in asked}
    else:
        anchors = {key: texts[key] for key in ANCHORS if key in texts}
        # other names than HuggingFace's: the longest text
        if not anchors and texts:
            longest = max(texts, key=lambda key: texts[key])
            anchors = {longest: texts[longest]}
    if not anchors:
        raise ConfigError(
            f"graph_pipeline.lengths: no entry of the batch ({', '.join(sorted(batch))}) holds texts; name those that "
            'have a length, as {"max": {"input_values": 16000}}, or remove the key'
        )
    found: dict[str, tuple[str, ...]] = {}
    for anchor, size in anchors.items():
        taken = {key for keys in found.values() for key in keys} | anchors.keys()
        found[anchor] = (anchor, *(k for k, length in texts.items() if length == size and k not in taken))
    return found


def length_of(asked: LengthOf, anchor: str) -> int:
    """Return the length that is asked for an anchor."""
    return asked[anchor] if isinstance(asked, Mapping) else asked


def with_lengths(batch: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return a batch whose entries have these lengths: cut at their ends, or their last column repeated.

    Nothing that stands for something else (the place of an image) is there more often than before.

    Args:
        lengths: by entry; others stay as they are.
    """
    # ids [[5, 6, 7]] to 5: [[5, 6, 7, 7, 7]]; the mask of a padded row goes on being 0, that of another 1
    found = dict(batch)
    for key, length in lengths.items():
        value: Tensor = batch[key]
        known = value.shape[-1]
        if length <= known:
            found[key] = value[..., :length].contiguous()
        else:
            last = value[..., -1:].expand(*value.shape[:-1], length - known)
            found[key] = torch.cat([value, last], dim=-1)
    return found


def sample_with_lengths(batch: Mapping[str, Any], typical: tuple[LengthOf, ...]) -> dict[str, Any]:
    """Return a sample batch with the typical lengths that are nearest to their mean.

    Raises:
        ConfigError: as `length_entries`.
    """
    entries = length_entries(batch, typical[0])
    means = {anchor: sum(length_of(one, anchor) for one in typical) / len(typical) for anchor in entries}
    nearest = min(
        typical, key=lambda one: sum(abs(length_of(one, a) / mean - 1) for a, mean in means.items())
    )
    lengths = {key: length_of(nearest, anchor) for anchor, keys in entries.items() for key in keys}
    return with_lengths(batch, lengths)
