"""What modules of other ranks return, by the shapes of what they are called with: so that they run on shapes seldom.

A module that another rank runs returns shapes here and grows its caches. Both were the same at the last two tokens, or
they depend on how long the sequences are; so a call is looked up:

    key      shapes of the stage tensors, and what else is no number        decides about the result
    state    shapes of ordinary tensors, numbers, lengths of the caches;    differs from token to token
             without a cache also the numbers in small tensors of integers,
             but for embeddings, which choose a row by each

    known    the same key and state; or two states of the same key that gave the same, with caches as full or empty

Where there are no stage tensors (a tower's inputs are pixels and sizes of images), the state belongs to the key.
It is remembered beyond a generation, and for all its micro-batches: to run forty layers of other ranks on shapes three
times takes as long as many tokens. Where a module keeps notes in a cache of which lengths say nothing (sliding windows,
linear attention), another cache is met anew.

Source: this project
Tests: tests/model/test_shape_memory.py, tests/model/test_lanes.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpp_plugin.integrations.huggingface.generate_calls import cache_layers
from gpp_plugin.model.generation.stage_tensors import ReplicaRun, StageTensor, map_leaves, map_tensors

_Place = tuple[int, int]

_MAX_KEYS = 64
"""Kinds of calls of a module that are remembered, the last ones."""

_MAX_VALUES = 256
"""Elements up to which a tensor of integers (sizes of images, lengths) may decide about the shape of a result."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor that was returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Growth:
    """What a layer of a cache took up: [rows, heads, positions, size] of keys and values."""

    place: _Place
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Seen:
    state: tuple[Any, ...]
    were_empty: tuple[bool, ...]
    result: Any
    growth: tuple[_Growth, ...]


class ShapeMemory:
    """Remembers one module.

    Args:
        chooses_rows: the module returns a row for each number that it receives (an embedding), whatever the number.
    """

    def __init__(self, *, chooses_rows: bool = False) -> None:
        self._chooses_rows = chooses_rows
        self._seen: dict[Any, list[_Seen]] = {}
        self._touched: set[_Place] = set()
        self._are_lengths_all = True  # that a cache says of itself
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of caches, where they are not
        self._met = 0

    def call(
        self,
        run: ReplicaRun,
        forward: Callable[..., Any],
        owner: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the module returns on shapes, as tensors of the rank that runs it; caches have grown.

        Args:
            run: of this rank's replica, which the returned tensors are of.
            owner: the position that runs the module really.
        """
        key: list[Any] = []
        state: list[Any] = []
        caches: list[Any] = []
        plain: list[Tensor] = []
        _describe((args, kwargs), key, state, caches, plain)
        # A layer with a cache runs for each token, and its tensors are masks and positions; token ids choose rows.
        if not caches and not self._chooses_rows:
            state += [tuple(t.flatten().tolist()) for t in plain if _may_be_sizes(t)]
        if not any(isinstance(part, _Shape) for part in key):
            key.append(tuple(state))
        if not self._are_lengths_all:
            key += [self._number_of(cache) for cache in caches]
        layers = dict(place for cache in caches for place in cache_layers(cache))
        lengths = {place: _length(layers.get(place)) for place in sorted(self._touched)}
        now = (*state, *lengths.values())
        were_empty = tuple(length == 0 for length in lengths.values())
        seen = self._seen.setdefault(tuple(key), [])
        if len(self._seen) > _MAX_KEYS:
            del self._seen[next(iter(self._seen))]
        known = _find(seen, now, were_empty)
        if known is None:
            args, kwargs = map_leaves((args, kwargs), StageTensor, lambda t: _as_shape(t, owner, run))
            made = self._observe(forward, args, kwargs, seen, state, caches)
        else:
            made = known.result
            for growth in known.growth:
                _grow(caches, layers.get(growth.place), growth, owner, run)
        return map_leaves(
            made,
            _Shape,
            lambda s: StageTensor(torch.empty(s.shape, dtype=s.dtype, device="meta"), (owner,), run),
        )

    def _number_of(self, cache: Any) -> int:
        if cache not in self._numbers:
            self._met += 1
            self._numbers[cache] = self._met
        return self._numbers[cache]

    def _observe(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: list[_Seen],
        state: list[Any],
        caches: list[Any],
    ) -> Any:
        """Run the module on shapes, take note of what came of it, and return the shapes."""
        from gpp_plugin.integrations.huggingface.sequence_cache import grows_by_joining

        before = {place: _length(layer) for cache in caches for place, layer in cache_layers(cache)}
        made = map_tensors(forward(*args, **kwargs), lambda t: _Shape(tuple(t.shape), t.dtype))
        # Some caches make their layers when they are first written to.
        layers = dict(place for cache in caches for place in cache_layers(cache))
        grown = {place: _length(layer) - before.get(place, 0) for place, layer in layers.items()}
        self._touched.update(place for place, more in grown.items() if more)
        touched = sorted(self._touched)
        if caches and not (any(grown.values()) and all(grows_by_joining(layers[p]) for p in touched)):
            self._are_lengths_all = False
        lengths = [before.get(place, 0) for place in touched]
        growth = tuple(_growth(place, layers[place], grown[place]) for place in touched if grown.get(place))
        seen.append(
            _Seen(
                (*state, *lengths),
                tuple(length == 0 for length in lengths),
                made,
                growth,
            )
        )
        del seen[:-4]  # of states that are never alike, as where an output grows with the cache, the last few
        return made


def _find(seen: list[_Seen], now: tuple[Any, ...], were_empty: tuple[bool, ...]) -> _Seen | None:
    """Return what a call will come to; None where that is not known.

    A first token fills the cache of what is attended to across, later ones find it full: calls are alike only where
    the same layers were empty.
    """
    alike = [one for one in seen if one.were_empty == were_empty]
    for one in alike:
        if one.state == now:
            return one
    if len(alike) >= 2:
        last, other = alike[-1], alike[-2]
        # two lengths, one result: it does not depend on them
        if last.state != other.state and (last.result, last.growth) == (other.result, other.growth):
            return last
    return None


def _may_be_sizes(tensor: Tensor) -> bool:
    is_whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return is_whole and not tensor.is_meta and tensor.numel() <= _MAX_VALUES


def _describe(values: Any, key: list[Any], state: list[Any], caches: list[Any], plain: list[Tensor]) -> None:
    """Add to a call's key, state, caches and ordinary tensors what its arguments say."""
    if isinstance(values, StageTensor):
        key.append(_Shape(tuple(values.shape), values.dtype))
    elif isinstance(values, Tensor):
        state.append((tuple(values.shape), values.dtype))
        plain.append(values)
    elif isinstance(values, (tuple, list)):
        key.append(len(values))
        for each in values:
            _describe(each, key, state, caches, plain)
    elif isinstance(values, dict):
        key.append(tuple(values))
        for each in values.values():
            _describe(each, key, state, caches, plain)
    elif isinstance(values, (int, float)) and not isinstance(values, bool):
        state.append(values)
    elif hasattr(values, "layers") or hasattr(values, "self_attention_cache"):
        key.append(type(values))
        caches.append(values)
    else:
        key.append(values if isinstance(values, (bool, str, type(None))) else type(values))


def _length(layer: Any) -> int:
    return 0 if layer is None else int(layer.get_seq_length())


def _growth(place: _Place, layer: Any, more: int) -> _Growth:
    keys, values = tuple(layer.keys.shape), tuple(layer.values.shape)
    return _Growth(place, (*keys[:2], more, keys[3]), (*values[:2], more, values[3]), layer.keys.dtype)


def _as_shape(tensor: StageTensor, owner: int, run: ReplicaRun) -> StageTensor:
    """Return an argument as the owner's alone: of what was transferred, copies lie on several ranks."""
    return StageTensor(tensor.value.to("meta"), (owner,), run)


def _grow(caches: list[Any], layer: Any, growth: _Growth, owner: int, run: ReplicaRun) -> None:
    """Let a layer of a cache take up new positions, as shapes.

    Args:
        layer: None where the cache has not made it yet.
    """
    from gpp_plugin.integrations.huggingface.sequence_cache import grows_by_joining

    new = [
        StageTensor(torch.empty(shape, dtype=growth.dtype, device="meta"), (owner,), run)
        for shape in (growth.keys, growth.values)
    ]
    number, across = growth.place
    if across:  # what is attended to across was read
        for cache in caches:
            cache.is_updated[number] = True
    if layer is None:
        name = ("self_attention_cache", "cross_attention_cache")[across]
        getattr(caches[-1], name, caches[-1]).update(*new, number)
    elif grows_by_joining(layer) and isinstance(layer.keys, StageTensor):
        # what `update` would do, without two operators a layer and token
        length = layer.keys.shape[2] + growth.keys[2]
        layer.keys, layer.values = (
            StageTensor(t.value.new_empty((*t.shape[:2], length, t.shape[3])), (owner,), run) for t in new
        )
    else:
        layer.update(*new)
