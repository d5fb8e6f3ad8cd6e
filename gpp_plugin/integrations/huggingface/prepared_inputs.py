"""Inputs that a HuggingFace model would make of a batch in Python, made ahead on the host as entries of the batch.

The Qwen-VL family and its kin number text and image tokens in a loop over samples (``get_rope_index``), which reads
where the images are and which tokens are padding: a capture would hold for one placement of images only. The method
uses integers of the batch and the configuration alone, and the model takes its result as ``position_ids``, so every
rank that reads inputs calls it on each batch.

Tests: tests/capture/test_values.py, tests/integrations/test_units.py
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

POSITIONS = "position_ids"
_GRIDS = ("image_grid_thw", "video_grid_thw")


def has_prepared_inputs(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a batch holds what `prepared_inputs` made of it."""
    without = {key: value for key, value in batch.items() if key != POSITIONS}
    return batch.get(POSITIONS) is not None and _numbering(model, without) is not None


def prepared_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries to add to a batch: those that the model lacks and can have made ahead."""
    numbering = _numbering(model, batch)
    if numbering is None:
        return {}
    parameters = inspect.signature(numbering.get_rope_index).parameters
    given = {name: batch[name] for name in parameters if name in batch}
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if any(name not in given for name in required):
        return {}  # the model says itself what it lacks
    # on a twin without weights: what the method may keep stays out of the model, which may lie on the meta device
    twin: Any = copy.copy(numbering)
    twin.__dict__ = {**vars(numbering), "_modules": {}, "_parameters": {}}
    with torch.no_grad():
        positions, _ = twin.get_rope_index(**given)
    return {POSITIONS: positions}


def _numbering(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the module that numbers the tokens of such a batch, None where none does."""
    if batch.get(POSITIONS) is not None or not any(batch.get(key) is not None for key in _GRIDS):
        return None
    found: Any = next((m for m in model.modules() if callable(getattr(m, "get_rope_index", None))), None)
    is_taken = found is not None and POSITIONS in inspect.signature(model.forward).parameters
    return found if is_taken else None
