"""Samples in one row: what is in it, and what is refused."""

from __future__ import annotations

import pytest
import torch

from gpp_plugin.data import flatten
from gpp_plugin.errors import ConfigError


def test_positions_begin_anew_and_first_tokens_have_no_label() -> None:
    first = {"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([5, -100, 7])}
    second = {"input_ids": torch.tensor([8, 9]), "labels": torch.tensor([8, 9])}
    row = {key: value.tolist() for key, value in flatten([first, second]).items()}
    assert row == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "labels": [[-100, -100, 7, -100, 9]],
    }
    assert first["labels"].tolist() == [5, -100, 7], "samples stay as they are"


def test_labels_are_the_tokens_where_there_are_none_and_padding_is_left_out() -> None:
    padded = {"input_ids": torch.tensor([4, 5, 0]), "attention_mask": torch.tensor([1, 1, 0])}
    row = flatten([padded, {"input_ids": torch.tensor([6]), "attention_mask": torch.tensor([1])}])
    assert {key: value.tolist() for key, value in row.items()} == {
        "input_ids": [[4, 5, 6]],
        "position_ids": [[0, 1, 0]],
        "labels": [[-100, 5, -100]],
    }


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no samples"),
        ([{"input_ids": [1, 2]}], "must be a tensor"),
        ([{"input_ids": torch.zeros(2, 2)}], "must be a tensor"),
        ([{"input_ids": torch.ones(2), "pixel_values": torch.ones(3, 4, 4)}], r"pixel_values is \[3, 4, 4\]"),
        ([{"input_ids": torch.ones(2), "name": "a"}], "name is str"),
        (
            [{"input_ids": torch.ones(2)}, {"input_ids": torch.ones(2), "x": torch.ones(2)}],
            "different entries",
        ),
        ([{"input_ids": torch.ones(2), "attention_mask": torch.zeros(2)}], "hides all of its 2"),
    ],
)
def test_what_cannot_lie_in_a_row_is_refused_in_one_line(samples: list[dict], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        flatten(samples)
    assert "\n" not in str(caught.value)
