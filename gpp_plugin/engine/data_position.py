"""Where training is in its data, as JSON: what a checkpoint keeps so that no sample comes twice and none is left out.

    kind "samples"   a dataset with numbers: the epoch's random state as it began, and how many lists of numbers of it
                     are trained; the rest follows by drawing the epoch anew, and no sample is loaded for it
    kind "stream"    an iterable dataset: its own ``state_dict`` after the last mini-batch that was trained, or how many
                     samples are to be read and dropped
    kind "given"     a caller's loader or iterator: its own ``state_dict``, as torchdata has it

A mini-batch is of *lists*, what the loader's batch sampler yields: one, or one for each unit where it is of units.
Positions count mini-batches trained: what workers have loaded ahead, or a frozen branch has run, does not count.

Source: this project
Tests: tests/integrations/test_data_position.py
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpp_plugin.errors import CheckpointError

SAMPLES, STREAM, GIVEN = "samples", "stream", "given"
_TAG = "$"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPoint:
    """A point in an epoch of a dataset with numbers.

    Args:
        mini_batches: trained before it, in all epochs.
        lists: of this epoch's that come before it.
        generator: the loader's random state as the epoch began; None: as it is.
        sampler: the batch sampler's own state as the epoch began, where it has one.
    """

    mini_batches: int = 0
    lists: int = 0
    generator: Tensor | None = None
    sampler: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPoint:
    """A point in an iterable dataset.

    Args:
        mini_batches: trained before it, in all passes.
        passes: over the dataset that are complete.
        state: of the dataset; None: it has none, or is at its beginning.
        dropped: lists to be read and dropped from the very beginning, where there is no state.
    """

    mini_batches: int = 0
    passes: int = 0
    state: Any = None
    dropped: int = 0


def to_json(value: Any) -> Any:
    """Return a state as JSON values: tensors, arrays, bytes and tuples as tagged dictionaries.

    Raises:
        ValueError: it holds an object of another kind.

    >>> to_json({"seed": 3, "at": (1, 2)})
    {'seed': 3, 'at': {'$': 'tuple', 'items': [1, 2]}}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "text": repr(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [to_json(item) for item in value]}
    if isinstance(value, Mapping):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        own = value.detach().cpu().contiguous()
        raw = own.reshape(-1).view(torch.uint8) if own.numel() else own.new_empty(0, dtype=torch.uint8)
        kind, shape, content = str(own.dtype).removeprefix("torch."), list(own.shape), raw.numpy().tobytes()
        return {_TAG: "tensor", "dtype": kind, "shape": shape, "base64": base64.b64encode(content).decode()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "base64": text}
    raise ValueError(f"a {type(value).__name__} cannot be written as JSON")


def from_json(value: Any) -> Any:
    """Return the state that `to_json` was given.

    Raises:
        CheckpointError: it is none that `to_json` wrote.
    """
    try:
        return _decoded(value)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, binascii.Error) as error:
        raise CheckpointError(
            f"the checkpoint's position in the data cannot be read ({type(error).__name__}: {error}); load another tag"
        ) from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decoded(item) for key, item in value.items()}
    if tag == "float":
        return float(value["text"])
    if tag == "tuple":
        return tuple(_decoded(item) for item in value["items"])
    if tag == "dict":
        return {_decoded(key): _decoded(item) for key, item in value["items"]}
    content = base64.b64decode(value["base64"], validate=True)
    if tag == "bytes":
        return content
    if tag == "tensor":
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']} is no dtype")
        empty = torch.empty(0, dtype=dtype)
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else empty
        return flat.reshape(value["shape"])
    if tag == "array":
        return np.frombuffer(content, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    raise ValueError(f"unknown tag {tag!r}")
