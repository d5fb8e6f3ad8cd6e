"""Arguments and results of a call apart: their tensors in a row, and everything else as a pattern."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.eager.padded_records import TracedRecords, cut_records

Rebuild = Callable[[Sequence[Any]], Any]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.Size)
"""What is compared where a call returns it, and what a custom autograd function may be given beside tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor stood."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """Something that held tensors, and how it is made again of its parts."""

    rebuild: Rebuild
    parts: tuple[Any, ...]


MAX_DEPTH = 3
"""How many objects inside each other are looked into; a configuration may refer to itself."""


def take_apart(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """Return the pattern of a value, its tensors appended to ``tensors``.

    Looks into tuples, lists, mappings, dataclasses and other objects with attributes; what holds no tensor is part of
    the pattern as it is. Of ``(x, {"mask": m, "causal": True})`` tensors are [x, m], and the pattern is a container of
    `Slot(0)` and a container of `Slot(1)` and True.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, PLAIN) or isinstance(value, (type, nn.Module, torch.device)):
        return value
    is_object = not isinstance(value, (tuple, list, Mapping))
    if is_object and depth == MAX_DEPTH:
        return value
    before = len(tensors)
    rebuild, parts = _open(value)
    taken = tuple(take_apart(part, tensors, depth + is_object) for part in parts)
    return Container(rebuild, taken) if len(tensors) > before or _holds_device(taken) else value


Moved = tuple[str, torch.device]
"""A type of devices, and the device that stands for each of that type."""


def put_together(pattern: Any, tensors: Sequence[Any], moved: Moved | None = None) -> Any:
    """Return the value of a pattern with these tensors.

    Args:
        moved: what becomes of devices in the pattern; None leaves them.
    """
    if isinstance(pattern, Slot):
        return tensors[pattern.index]
    if isinstance(pattern, Container):
        return pattern.rebuild([put_together(part, tensors, moved) for part in pattern.parts])
    if isinstance(pattern, torch.device) and moved is not None and pattern.type == moved[0]:
        return moved[1]
    return pattern


def plain_values(pattern: Any) -> tuple[Any, ...]:
    """Return the numbers, texts and the like in a pattern, in order, to be compared with another call's."""
    if isinstance(pattern, Container):
        return tuple(value for part in pattern.parts for value in plain_values(part))
    return (pattern,) if isinstance(pattern, (*PLAIN, Slot)) else ()


def is_plain(pattern: Any) -> bool:
    """Return whether a pattern holds plain values and tensors only: no modules, no functions, no other objects."""
    if isinstance(pattern, Container):
        return all(is_plain(part) for part in pattern.parts)
    if isinstance(pattern, (tuple, list, set, frozenset)):
        return all(is_plain(part) for part in pattern)
    if isinstance(pattern, Mapping):
        return all(is_plain(part) for part in pattern.values())
    return isinstance(pattern, (*PLAIN, Slot, torch.device))


def holds_symbols(pattern: Any) -> bool:
    """Return whether a pattern holds numbers that tracing knows as symbols only."""
    if isinstance(pattern, Container):
        return any(holds_symbols(part) for part in pattern.parts)
    if isinstance(pattern, (tuple, list)):
        return any(holds_symbols(part) for part in pattern)
    return isinstance(pattern, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _open(value: Any) -> tuple[Rebuild, list[Any]]:
    """Return how a value is made of its parts, and those."""
    kind = type(value)
    if isinstance(value, tuple):
        is_named = hasattr(kind, "_fields")
        return (lambda parts: kind(*parts)) if is_named else (lambda parts: kind(parts)), list(value)
    if isinstance(value, TracedRecords):
        fields = value.fields
        return (lambda parts: cut_records(fields, parts)), [
            t for pair in value.tensors.values() for t in pair
        ]
    if isinstance(value, list):
        return (lambda parts: kind(parts)), list(value)
    if isinstance(value, Mapping):
        keys = list(value)
        if dataclasses.is_dataclass(kind):  # a HuggingFace output: both, made by its fields
            return (lambda parts: kind(**dict(zip(keys, parts, strict=True)))), [value[k] for k in keys]
        if isinstance(value, MutableMapping):
            return _refill(value, keys), [value[k] for k in keys]
    attributes = getattr(value, "__dict__", None)
    if callable(value) or not attributes:
        return (lambda parts: value), []
    names = list(attributes)

    # any other object: a copy of it with its attributes replaced; its tensors must not stay in the pattern
    hollow = copy.copy(value)
    for name in names:
        if isinstance(attributes[name], Tensor):
            object.__setattr__(hollow, name, None)

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(hollow)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return rebuild, [attributes[name] for name in names]


def _refill(value: MutableMapping[Any, Any], keys: Sequence[Any]) -> Rebuild:
    """Return what makes a mapping like ``value``, of its own class, of other values."""

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(value)
        made.update(zip(keys, parts, strict=True))
        return made

    return rebuild


def _holds_device(parts: Sequence[Any]) -> bool:
    return any(isinstance(part, (torch.device, Container)) for part in parts)
