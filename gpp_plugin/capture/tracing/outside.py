"""What a model could see or draw outside its graph while it is traced: the process group, and random numbers.

A number that Python's `random`, numpy or a real torch generator gives while a model is traced would be in the graph
for ever. So the generators are watched; where one was drawn from, the model is traced again with other numbers, and
a graph that is another one then is refused. What draws without effect (MusicGen asks for a number for every layer, at
``layerdrop=0`` too) or seeds the generator itself before every draw (BigBird) is the same graph again, and stays.

Source: this project
Tests: tests/capture/test_outside.py
"""

from __future__ import annotations

import linecache
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gpp_plugin.errors import CaptureError

_UNIT_DRAWS = (
    (random, "random"),
    (np.random, "rand"),
    (np.random, "random"),
    (np.random, "random_sample"),
)
"""Functions that draw from [0, 1), with a shape as arguments, or none for one number."""
_UNIFORM_DRAWS = ((random, "uniform"), (np.random, "uniform"))
_SEEDS = (20011, 90001)
"""Where the generators start when a model is traced again; any two do."""


@contextmanager
def hidden_process_group() -> Iterator[None]:
    """Let `torch.distributed` look uninitialised: one process computes a loss, whatever other ranks there are.

    A model that gathers features where there is a process group (FLAVA) would be captured with the gathering, and
    its ranks, each of which traces at its own time, would wait for each other.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    # Not by another `is_initialized`: models import that name, `get_rank` and others. All of them ask this attribute.
    world = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = world


TORCH = "torch's CPU generator, outside the graph,"
Draws = dict[str, Any]
"""Generator that was drawn from -> the state that it ended in."""


@contextmanager
def watched_generators(model: nn.Module | None = None) -> Iterator[Draws]:
    """Say afterwards which generators outside the graph were drawn from, and put all back to where they were.

    Python's and numpy's global ones, torch's of the CPU (an operator on fake tensors does not draw from it), and those
    that modules of a model hold.
    """
    seen: Draws = {}
    generators = _generators(model)
    before = [generator.get() for generator in generators]
    try:
        yield seen
    finally:
        for generator, state in zip(generators, before, strict=True):
            end = generator.get()
            if not _is_same(end, state):
                seen[generator.name] = end
                generator.set(state)


def check_draws(model: nn.Module, trace: Callable[[], tuple[str, Draws]], first: tuple[str, Draws]) -> None:
    """Refuse a capture that holds random numbers drawn outside the graph.

    Args:
        trace: traces anew and returns all of the graph as text, and what was drawn meanwhile.
        first: what the first trace returned.

    Raises:
        CaptureError: names the module, the line, what was drawn from, and the fix.
    """
    # Two more traces, whose generators start elsewhere and whose draws from an interval are its least and its greatest
    # number: `random.random() < layerdrop` is decided otherwise at every layerdrop but 0. Any other draw (a
    # permutation, a choice) matters unless the model seeds the generator itself: then it ends where it ended before,
    # wherever it started.
    traced, drawn = first
    again: list[tuple[str, Draws]] = []
    for seed, is_low in zip(_SEEDS, (True, False), strict=True):
        with watched_generators(model), _extreme_draws(is_low=is_low):
            for generator in _generators(model):
                generator.seed(seed)
            again.append(trace())
    (low, after_low), (high, after_high) = again
    if traced == low == high and _is_same(after_low, after_high):
        return
    where = _find_draw(model, trace)
    raise CaptureError(
        f"{type(model).__name__}: {where} draws from {' and '.join(drawn)} while it is captured, and the "
        f"graph would hold these numbers for ever; {_remedy(where)}"
    )


def _remedy(where: str) -> str:
    general = (
        'draw with torch on the CPU or GPU (torch.rand), or keep the module whole: "eager": ["module.path"]'
    )
    if "mask_indices" in where:
        return f"set mask_time_prob=0 and mask_feature_prob=0 in its configuration, {general}"
    if "layerdrop" in where or "dropout_prob" in where:
        return f"set layerdrop=0 in its configuration, {general}"
    return general


# ---- generators ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Generator:
    """One generator, with its state to get and to set."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    seed: Callable[[int], Any]


def _generators(model: nn.Module | None) -> list[_Generator]:
    """Return the global generators and those that are attributes of a model's modules."""
    found = [
        _Generator("Python's random", random.getstate, random.setstate, random.seed),
        _Generator("numpy.random", np.random.get_state, np.random.set_state, np.random.seed),
        _of_torch(TORCH, torch.default_generator),
    ]
    held: dict[int, _Generator] = {}
    for path, module in model.named_modules() if model is not None else ():
        for name, value in vars(module).items():
            called = f"{path}.{name}" if path else name
            if isinstance(value, random.Random):
                held[id(value)] = _Generator(called, value.getstate, value.setstate, value.seed)
            elif isinstance(value, np.random.RandomState):
                held[id(value)] = _Generator(called, value.get_state, value.set_state, value.seed)
            elif isinstance(value, np.random.Generator):
                held[id(value)] = _of_bits(called, value.bit_generator)
            elif isinstance(value, torch.Generator):
                held[id(value)] = _of_torch(called, value)
    return [*found, *held.values()]


def _of_torch(name: str, generator: torch.Generator) -> _Generator:
    """Return torch's kind; its state is a tensor, and must not become one of the trace that is looked into."""

    def get() -> bytes:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return bytes(generator.get_state().numpy())

    def put(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return _Generator(name, get, put, generator.manual_seed)


def _of_bits(name: str, bits: Any) -> _Generator:
    """Return numpy's newer kind, whose state is a property."""

    def put(state: Any) -> None:
        bits.state = state

    return _Generator(name, lambda: bits.state, put, lambda seed: put(type(bits)(seed).state))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two states are equal: tuples and dicts of numbers and arrays, or bytes."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and any(not isinstance(part, int) for part in one):
        return len(one) == len(other) and all(_is_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


@contextmanager
def _extreme_draws(*, is_low: bool) -> Iterator[None]:
    """Let draws from an interval give its least number, or its greatest, and leave the generators alone."""
    share = 0.0 if is_low else math.nextafter(1.0, 0.0)

    def of_unit(*shape: Any) -> Any:
        size = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return share if not size or size == (None,) else np.full(size, share)

    def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        number = low + (high - low) * share
        return number if size is None else np.full(size, number)

    with ExitStack() as patches:
        for owner, name in _UNIT_DRAWS:
            patches.enter_context(mock.patch.object(owner, name, of_unit))
        for owner, name in _UNIFORM_DRAWS:
            patches.enter_context(mock.patch.object(owner, name, uniform))
        yield


# ---- who draws ----------------------------------------------------------------------------------------------


def _find_draw(model: nn.Module, trace: Callable[[], object]) -> str:
    """Return ``module.path (Class, file.py:12: source)`` of the first draw of the model."""
    # Only here, where a capture is refused: Python tells of every line of the model's code and its library's, and
    # the first one after which a generator stands elsewhere is the one that drew, whatever it called.
    paths = {id(module): name for name, module in model.named_modules()}
    generators = _generators(model)
    before = [generator.get() for generator in generators]
    lines: dict[FrameType, int] = {}
    found: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if found or _is_library(frame):
            return None
        if not _is_same([generator.get() for generator in generators], before):
            found.append(_place_of(frame, lines.get(frame, frame.f_lineno), paths))
        lines[frame] = frame.f_lineno
        return look

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        trace()
    finally:
        sys.settrace(tracer)
    return found[0] if found else "the model or what it calls"


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "/gpp_plugin/capture/" in file.replace(os.sep, "/")


_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(np.__file__), random.__file__, "<")
"""Where lines are not the model's, nor those of the library that it comes from."""


def _place_of(frame: FrameType, number: int, paths: dict[int, str]) -> str:
    """Return the module whose method is innermost on the stack, with a line of the frame."""
    file = frame.f_code.co_filename
    source = linecache.getline(file, number).strip()
    line = f"{os.path.basename(file)}:{number} in {frame.f_code.co_name}: {source}"
    outer: FrameType | None = frame
    while outer is not None:
        module = outer.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths:
            return f"{paths[id(module)] or 'the model itself'} ({type(module).__name__}, {line})"
        outer = outer.f_back
    return line
