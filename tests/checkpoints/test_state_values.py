"""States as JSON with tensors beside: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from gpp_plugin.engine.checkpoints.checkpoint_files import MOST_LEVELS, from_json, to_json
from gpp_plugin.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_json(value, path="state", tensors=tensors), allow_nan=False)
    return from_json(json.loads(text), tensor=lambda name: tensors[name])


@pytest.mark.parametrize(
    "value",
    [
        None,
        -7,
        math.inf,
        "größe\u0000",
        [1, [2.5, None]],
        (0.9, 0.999),
        {"a": {"b": (1, [2])}, "": 0},
        {3: 1, "3": 2, (1, 2): "pair", None: 0},
        {"$tuple": [1]},
        Counter({30: 2, 80: 1}),
    ],
)
def test_what_goes_in_comes_out(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


def test_numbers_keep_their_bits() -> None:
    assert math.isnan(there_and_back(math.nan))
    tensors = [torch.tensor(7.1), torch.tensor(math.nan), torch.arange(3), torch.rand(2, 3).bfloat16()]
    for one, other in zip(tensors, there_and_back(tensors), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one, other) or bool(one.isnan())


def test_tensors_whose_paths_are_spelt_alike_stay_apart() -> None:
    value = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}
    found = there_and_back(value)
    assert torch.equal(found["a"]["b"], torch.ones(2)) and torch.equal(found["a.b"], torch.zeros(2))


def test_tensors_in_place() -> None:
    value = {
        "tensor": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "others": [b"x", np.int64(7), torch.tensor(2.5)],
    }
    text = json.dumps(to_json(value, path="state", tensors=None), allow_nan=False)
    found = from_json(json.loads(text), tensor=None)
    assert torch.equal(found["tensor"], value["tensor"]) and found["empty"].shape == (0, 3)
    assert found["array"].dtype == np.uint32 and found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["others"] == [b"x", 7, torch.tensor(2.5)]


class Anything:
    """What would need pickle."""


@pytest.mark.parametrize("value", [Anything(), Anything, len, np.array([None]), {1, 2}, 1j, range(3)])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\.best\.1 is a .*would run code when it is read"):
        to_json({"best": [0, value]}, path="state", tensors={})


def test_endless_states_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match=f"deeper than {MOST_LEVELS} levels"):
        to_json(endless, path="state", tensors={})
    deepest: Any = 1
    for _ in range(MOST_LEVELS):
        deepest = [deepest]
    assert to_json(deepest, path="state", tensors={}) == deepest
    with pytest.raises(CheckpointError, match="flatten it"):
        to_json([deepest], path="state", tensors={})


@pytest.mark.parametrize(
    "plain",
    [
        {"$eval": "1"},
        {"$tuple": 3},
        {"$dict": [1]},
        {"$scalar": ["object", 1]},
        {"$float": "x"},
        {"$embedded": ["load", [], ""]},
        {"$array": ["O", [1], "AAAAAAAAAAA="]},
        {"$bytes": "?"},
        {"$array": 3},
    ],
)
def test_what_was_not_written_so_is_refused(plain: Any) -> None:
    with pytest.raises(CheckpointError):
        from_json(plain, tensor=lambda name: torch.zeros(1))
