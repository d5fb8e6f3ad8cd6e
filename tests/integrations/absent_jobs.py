"""What each rank runs in the tests of units that lack a branch of the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from tests.integrations.engine_jobs import config_of, make_engine
from tests.integrations.unit_jobs import _losses, _with_weights, one_process
from tests.models import build
from tests.reference import gradient_errors


class TwoTowers(nn.Module):
    """Two towers, either of which may have no input; what there is is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(
        self, labels: Tensor | None = None, left: Tensor | None = None, right: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Return loss and logits."""
        parts = [tower(x) for tower, x in ((self.left, left), (self.right, right)) if x is not None]
        if not parts:
            raise ValueError("give left or right")
        logits = self.head(sum(parts[1:], start=parts[0]))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def tower_units(kinds: str) -> list[dict[str, Any]]:
    """Return a unit for each letter: with both inputs, or the left or right one only; of one to three samples."""
    generator = torch.Generator().manual_seed(len(kinds) + 7)
    units = []
    for index, kind in enumerate(kinds):
        count = 2 + index % 3
        unit: dict[str, Any] = {
            "labels": torch.randint(0, 3, (count,), generator=generator),
            "left": torch.randn(count, 6, generator=generator),
            "right": torch.randn(count, 5, generator=generator),
        }
        lost = {"b": "", "l": "right", "r": "left"}[kind]
        units.append({k: v for k, v in unit.items() if k != lost})
    return units


def mixed_units(has_image: Sequence[bool], seed: int) -> list[dict[str, Any]]:
    """Return units of a LLaVA, of several lengths, with images or as text only."""
    _, make_batch = build("llava")
    units = []
    for index, is_there in enumerate(has_image):
        unit = make_batch(1 + index % 2, 100 * seed + index)
        if not is_there:
            length = unit["input_ids"].shape[1] - index
            unit = {k: v[:, :length].contiguous() for k, v in unit.items() if k != "pixel_values"}
        units.append(unit)
    return units
