"""What a model could see or draw outside its graph while it is traced: the process group, and random numbers.

A number that Python's `random`, numpy or a real torch generator gives while a model is traced would be in the graph
for ever. So the generators are watched; where one was drawn from, the model is traced again with other numbers, and
a graph that is another one then is refused. What draws without effect (MusicGen draws a number for every layer, at
``layerdrop=0`` too) or seeds the generator itself before every draw (BigBird) is the same graph again, and stays.

Source: this project
Tests: tests/capture/test_outside.py, tests/capture/test_carried_state.py
"""

from __future__ import annotations

import linecache
import math
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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

# Which attributes of its modules a forward reads, and which of these it had written before: noted while it runs.
#
# An attribute that is written first is no state: what the forward before has left there is gone. Of a dict the entries
# count, each by itself, and a list is new once it is cleared:
#
#     self.last = loss                          written
#     self.features["inner"] = hidden           written, also where it is read behind that
#     self.losses.clear(); self.losses += [x]   written
#     self.calls += 1                           read

TORCHS_OWN = frozenset(
    (*vars(nn.Module()), "_is_hf_initialized", "_output_capturing_hooks_installed", "forward")
)
"""Attributes that torch and transformers keep on modules for themselves."""


def refill(container: Any, content: Any) -> None:
    """Replace the contents of a dict, list, deque or set, which stays the same object."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


class _NotedDict(dict[Any, Any]):
    """A module's dict for one forward: notes whether an entry is read that this forward has not put there."""

    # The forward before has left {"inner": a, "outer": b}:
    #
    #     features["inner"] = c      its own from now on
    #     features["inner"]          c: nothing old is read
    #     features["outer"]          b: `is_read`, so that the dict is state

    def __init__(self, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self._own: set[Any] = set()
        self.is_read = False

    def look(self, keys: Iterable[Any]) -> None:
        """Note that entries are read."""
        self.is_read |= any(key not in self._own for key in keys)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Put entries there."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def clear(self) -> None:
        """Begin anew: whatever is found from now on is of this forward."""
        super().clear()
        self._own = set()


class _NotedList(list[Any]):
    """The same of a list: all of it is old until it is cleared."""

    is_read = True

    def clear(self) -> None:
        """Begin anew."""
        super().clear()
        self.is_read = False


def _looking(name: str, keys_of: Callable[..., Iterable[Any]]) -> Any:
    original = getattr(dict, name)

    def method(self: _NotedDict, *args: Any) -> Any:
        self.look(keys_of(self, *args))
        return original(self, *args)

    return method


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault", "__delitem__"):
    setattr(_NotedDict, _name, _looking(_name, lambda held, key, *default: [key]))
for _name in ("__iter__", "__len__", "keys", "values", "items", "copy", "__eq__", "__or__", "popitem"):
    setattr(_NotedDict, _name, _looking(_name, lambda held, *args: list(dict.keys(held))))


@contextmanager
def _noted_containers(model: nn.Module, first: dict[tuple[int, str], bool]) -> Iterator[None]:
    """Count a dict, or a list, as written where a forward reads of it only what it has put there itself."""
    held: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            for name, value in list(vars(module).items()):
                if name not in TORCHS_OWN and type(value) in (dict, list):
                    noted = _NotedDict(value) if type(value) is dict else _NotedList(value)
                    held.append((vars(module), name, value, noted))
                    vars(module)[name] = noted
    try:
        yield
    finally:
        for attributes, name, value, noted in held:
            if attributes.get(name) is noted:
                attributes[name] = value
            refill(value, dict.items(noted) if isinstance(noted, dict) else noted)
            if not noted.is_read:
                first[id(attributes), name] = False


@contextmanager
def noted_accesses(model: nn.Module) -> Iterator[dict[tuple[int, str], bool]]:
    """Note whether each attribute was read before it was written, by the id of the module's ``__dict__``."""
    first: dict[tuple[int, str], bool] = {}
    own, put = object.__getattribute__, nn.Module.__setattr__

    def read(owner: int, name: str) -> None:
        if name not in TORCHS_OWN and not name.startswith("__"):
            first.setdefault((owner, name), True)

    def write(module: nn.Module, name: str, value: Any) -> None:
        first.setdefault((id(own(module, "__dict__")), name), False)
        put(module, name, value)

    patch = mock.patch.object(nn.Module, "__setattr__", write)
    with patch, noted_reads(read), _noted_containers(model, first):
        yield first


@contextmanager
def noted_reads(note: Callable[[int, str], object]) -> Iterator[None]:
    """Call a function at each read of a module's attribute, with the id of its ``__dict__`` and the name; may nest."""
    own, get = object.__getattribute__, nn.Module.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        note(id(own(module, "__dict__")), name)
        return get(module, name)

    with mock.patch.object(nn.Module, "__getattribute__", read):
        yield


_UNIT_DRAWS = ((random, "random"), *((np.random, name) for name in ("rand", "random", "random_sample")))
"""Functions that draw from [0, 1), with a shape as arguments, or none for one number."""
_UNIFORM_DRAWS = ((random, "uniform"), (np.random, "uniform"))
_SEEDS = (20011, 90001)
"""Where the generators start when a model is traced again; any two do."""


@contextmanager
def hidden_process_group() -> Iterator[None]:
    """Make `torch.distributed` look uninitialised: one process computes a loss, whatever other ranks there are.

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
        'draw with torch on the CPU or GPU (torch.rand), or run the module as it is: "eager": ["module.path"]'
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
    """Make draws from an interval give its least number, or its greatest, and leave the generators alone."""
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
    # Only here, where a capture is refused: Python traces every line of the model's code and its library's, and
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
