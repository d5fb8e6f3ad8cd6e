"""Batches with other lengths: what goes together, what stays, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpp_plugin.capture.tracing.sample_batches import length_entries, sample_with_lengths, with_lengths
from gpp_plugin.errors import ConfigError


def t5_batch() -> dict[str, Any]:
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "image_grid_thw": torch.ones(5, 2, dtype=torch.int64),
        "pixel_values": torch.zeros(2, 3, 4, 4),
        "return_loss": True,
    }


def test_entries_as_long_as_a_text_go_with_it_and_others_stay() -> None:
    assert length_entries(t5_batch(), 9) == {
        "input_ids": ("input_ids", "attention_mask"),
        "labels": ("labels",),
    }
    named = length_entries(t5_batch(), {"labels": 9})
    assert named == {"labels": ("labels",)}


def test_texts_are_cut_or_their_last_column_is_repeated() -> None:
    batch = t5_batch()
    longer = with_lengths(batch, {"input_ids": 6, "attention_mask": 6, "labels": 2})
    assert longer["input_ids"].tolist() == [[0, 1, 2, 3, 3, 3], [4, 5, 6, 7, 7, 7]]
    assert longer["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert longer["labels"].tolist() == [[5, 6], [8, 9]]
    assert longer["pixel_values"] is batch["pixel_values"] and longer["return_loss"] is True


def test_the_sample_takes_the_typical_lengths_nearest_to_their_mean() -> None:
    sample = sample_with_lengths(t5_batch(), (2, 7, 9))
    assert sample["input_ids"].shape == (2, 7) == sample["attention_mask"].shape
    assert sample["labels"].shape == (2, 7) and sample["image_grid_thw"].shape == (5, 2)
    sample = sample_with_lengths(t5_batch(), ({"input_ids": 3}, {"input_ids": 30}, {"input_ids": 20}))
    assert sample["input_ids"].shape == (2, 20) and sample["labels"].shape == (2, 3)


def test_an_entry_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'input_idz' is no entry of the batch .* input_ids, labels"):
        length_entries(t5_batch(), {"input_idz": 4})
    with pytest.raises(ConfigError, match="holds texts; name those that have a length"):
        length_entries({"x": torch.zeros(2, 3)}, 4)
    assert length_entries({"x": torch.zeros(2, 3)}, {"x": 4}) == {"x": ("x",)}
