"""States as JSON with tensors beside: what schedulers, counters, random generators and users hand to a checkpoint.

JSON has no tuples, no infinity, no keys but strings and no tensors; each is an object with one key that begins with $:

    (0.9, 0.999)       {"$tuple": [0.9, 0.999]}
    inf                {"$float": "inf"}
    {3: 1}             {"$dict": [[3, 1]]}          Counter({3: 1})    {"$counter": [[3, 1]]}
    b"x"               {"$bytes": "eA=="}           numpy's arrays     {"$array": ["<i8", [1], "AQAAAAAAAAA="]}
    tensor of shape () {"$scalar": ["float32", 7.0]}
    another tensor     {"$tensor": "client_state.mean"}       its name in the file of tensors beside
                       {"$embedded": ["uint8", [1], "AQ=="]}  where there is none

Anything else is refused by name: what would need pickle to be written would run code when it is read.

Source: this project
Tests: tests/checkpoints/test_state_values.py
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpp_plugin.errors import CheckpointError

MOST_LEVELS = 64
"""Deeper states are refused when written, so that a reader may refuse them too."""
MOST_DEPTH = 4 * MOST_LEVELS
"""Of the JSON of such a state: a dict whose keys are no strings is an object, a list and pairs."""


def to_json(value: Any, *, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """Return ``value`` as JSON types, and put its tensors into ``tensors`` under their paths; None: into the JSON.

    Raises:
        CheckpointError: something in it is neither JSON nor a tensor; the message names its path.

    >>> to_json({"best": (float("inf"), 2)}, path="client_state", tensors={})
    {'best': {'$tuple': [{'$float': 'inf'}, 2]}}
    """
    return _to_json(value, path, tensors, 0)


def _to_json(value: Any, path: str, tensors: dict[str, Tensor] | None, level: int) -> Any:
    if level > MOST_LEVELS:
        raise CheckpointError(f"{path}: deeper than {MOST_LEVELS} levels; flatten it")
    if isinstance(value, np.generic):  # numpy's own numbers; its float64 is a float as well
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if type(value) is bytes:
        return {"$bytes": _text_of(value)}
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return {
            "$array": [value.dtype.str, list(value.shape), _text_of(np.ascontiguousarray(value).tobytes())]
        }
    if isinstance(value, Tensor):
        return _tensor_to_json(value, path, tensors)

    def inner(item: Any, at: object) -> Any:
        return _to_json(item, f"{path}.{at}", tensors, level + 1)

    if isinstance(value, Counter):
        return {"$counter": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inner(item, key) for key, item in value.items()}
        return {"$dict": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    if type(value) is list:
        return [inner(item, at) for at, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [inner(item, at) for at, item in enumerate(value)]}
    kind = type(value)
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds numbers, strings, lists, dicts and "
        "tensors, as anything else would run code when it is read; save its parts, or its state_dict()"
    )


def _tensor_to_json(value: Tensor, path: str, tensors: dict[str, Tensor] | None) -> Any:
    if value.is_sparse or value.is_quantized or value.is_complex() or value.is_meta:
        raise CheckpointError(f"{path} is a tensor of {value.dtype}, {value.layout}; save a dense real one")
    if value.dim() == 0 and value.dtype in _SCALARS:
        number = value.item()
        plain = number if not isinstance(number, float) or math.isfinite(number) else repr(number)
        return {"$scalar": [str(value.dtype).removeprefix("torch."), plain]}
    if tensors is None:
        own = value.detach().cpu().contiguous().reshape(-1)
        content = own.view(torch.uint8).numpy().tobytes() if own.numel() else b""
        return {"$embedded": [str(own.dtype).removeprefix("torch."), list(value.shape), _text_of(content)]}
    name = path
    while name in tensors:  # keys with dots may spell the same path
        name += "_"
    tensors[name] = value.detach()
    return {"$tensor": name}


def _text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


_SCALARS = {
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
}


def from_json(plain: Any, *, tensor: Callable[[str], Tensor] | None) -> Any:
    """Return what `to_json` encoded.

    Args:
        tensor: reads a tensor by its name in the file beside; None: there is none.

    Raises:
        CheckpointError: it is not what `to_json` writes.
    """
    if isinstance(plain, list):
        return [from_json(item, tensor=tensor) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not next(iter(plain)).startswith("$"):
        return {key: from_json(item, tensor=tensor) for key, item in plain.items()}
    ((tag, value),) = plain.items()
    make = _MAKE.get(tag)
    if make is None and (tag != "$tensor" or tensor is None):
        raise CheckpointError(
            f"{tag!r} is no kind of value that checkpoints hold; is the file another release's?"
        )
    try:
        if make is None:
            assert tensor is not None
            return tensor(value)
        return make(from_json(value, tensor=tensor))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{tag} of {str(value)[:80]!r} is not as checkpoints write it ({error})"
        ) from error


def _scalar(encoded: list[Any]) -> Tensor:
    name, value = encoded
    kinds = {str(kind).removeprefix("torch."): kind for kind in _SCALARS}
    if name not in kinds:
        raise ValueError(f"no type {name!r}")
    return torch.tensor(float(value) if isinstance(value, str) else value, dtype=kinds[name])


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _array(encoded: list[Any]) -> Any:
    dtype, shape, text = encoded
    return np.frombuffer(_bytes(text), dtype=np.dtype(dtype)).reshape(shape).copy()


def _embedded(encoded: list[Any]) -> Tensor:
    name, shape, text = encoded
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no type {name!r}")
    content = bytearray(_bytes(text))
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _counter(pairs: list[list[Any]]) -> Counter[Any]:
    return Counter({key: count for key, count in pairs})


_MAKE: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$float": float,
    "$dict": lambda pairs: {key: item for key, item in pairs},
    "$counter": _counter,
    "$scalar": _scalar,
    "$bytes": _bytes,
    "$array": _array,
    "$embedded": _embedded,
}
