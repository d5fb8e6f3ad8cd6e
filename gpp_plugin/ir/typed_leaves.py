"""What may stand at each place of a file: made from a dataclass's own types, with the place in every error.

A type says what is expected, and `Range` in it how large it may be, once for readers and for what is made in memory::

    samples: Annotated[int, Range(low=1)]      [4, -1]  ->  samples[1]: -1 is not valid; give a whole number of ...

A reader is put together once a type: a function from JSON types to the value. A place is found as an error leaves the
containers it lies in, so that what is right costs nothing for it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import functools
import itertools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

LONGEST_TEXT = 10_000
"""Characters of one text of a file: lines of notes are the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers a field may have, both ends included; of a float, none that is not finite either."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high  # false of NaN


@dataclass(frozen=True, slots=True)
class OneOf:
    """The texts a field may have."""

    names: tuple[str, ...]


MOST_COUNT = 2**31 - 1
MOST_BYTES = 1 << 62
MOST_US = 1e15
"""Thirty years: a sum of some of them still has its microseconds in a float."""

Count = Annotated[int, Range(low=1, high=MOST_COUNT)]
"""How many of something there are."""
Index = Annotated[int, Range(low=0, high=MOST_COUNT)]
"""Which of them, or how many where there may be none."""
IndexOrNone = Annotated[int, Range(low=-1, high=MOST_COUNT)]
"""The same, with -1 where it has no meaning."""
Half = Annotated[int, Range(low=0, high=1)]
ZeroStage = Annotated[int, Range(low=0, high=3)]
Bytes = Annotated[int, Range(low=0, high=MOST_BYTES)]
MeanBytes = Annotated[float, Range(low=0.0, high=float(MOST_BYTES))]
"""Of a sample, or over devices: no whole number."""
SignedBytes = Annotated[float, Range(low=-float(MOST_BYTES), high=float(MOST_BYTES))]
"""What is added to other bytes, or taken from them."""
Micros = Annotated[float, Range(low=0.0, high=MOST_US)]
SignedMicros = Annotated[float, Range(low=-MOST_US, high=MOST_US)]
Share = Annotated[float, Range(low=0.0, high=1.0)]
Factor = Annotated[float, Range(low=1e-9, high=1e9)]
Work = Annotated[float, Range(low=0.0, high=1e30)]
"""Floating-point operations."""

Reader = Callable[[Any], Any]


class WrongLeaf(Exception):
    """A value has the wrong form; the keys on the way to it are added from the inside out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.keys: list[str | int] = []

    def line(self, root: str) -> str:
        """Return the error with its place below ``root``: ``value.stages[2].ranks: ...``."""
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(self.keys))
        return f"{(root + place).lstrip('.') or 'the whole'}: {self.what}"


def show(value: Any) -> str:
    """Return a value as a message shows it: JSON, and short."""
    if isinstance(value, str):
        value = value[:_MOST_SHOWN]
    text = json.dumps(value, default=repr) if _is_small(value) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


_MOST_SHOWN = 60


def _is_small(value: Any, depth: int = 4) -> bool:
    # a list of a million entries is not written out to be cut; neither are lists in lists without end
    if isinstance(value, (dict, list, tuple)):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and len(value) <= 20 and all(_is_small(item, depth - 1) for item in inner)
    return True


def nearest_key(name: object, known: Sequence[str]) -> str:
    """Return ``did you mean 'ranks'?``, or which names there are."""
    close = difflib.get_close_matches(str(name)[:100], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(known)}"


@functools.cache
def reader_of(kind: Any) -> Reader:
    """Return what makes a ``kind`` (a dataclass or a typing form) of JSON types; it raises `WrongLeaf`."""
    # By the type that is expected, not by what the JSON looks like: a list is a tuple of BlockCost where the field says
    # tuple[BlockCost, ...], and a pair where it says tuple[str, int]; an object's keys are integers again where the
    # field is dict[int, float].
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _limited(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return _optional(reader_of(next(a for a in args if a is not type(None))))
    if origin is tuple:
        return _sequence(reader_of(args[0])) if args[-1] is Ellipsis else _fixed([reader_of(a) for a in args])
    if origin in (dict, collections.abc.Mapping):
        return _mapping(_key_reader(args[0]), reader_of(args[1]))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind)
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    if kind is Any:
        return lambda plain: plain
    return _PLAIN_READERS[kind]


def _limited(kind: type, limit: Range | OneOf) -> Reader:
    read = reader_of(kind)
    if isinstance(limit, OneOf):
        wanted = f"one of {', '.join(limit.names)}"
        allowed: Any = limit.names
    else:
        number = "whole number" if kind is int else "number"
        wanted, allowed = f"a {number} from {limit.low:.10g} to {limit.high:.10g}", limit

    def read_limited(plain: Any) -> Any:
        value = read(plain)
        if value not in allowed:
            raise WrongLeaf(f"{show(plain)} is not valid; give {wanted}")
        return value

    return read_limited


def _optional(read: Reader) -> Reader:
    return lambda plain: None if plain is None else read(plain)


def _listed(plain: Any) -> list[Any]:
    if not isinstance(plain, (list, tuple)):
        raise WrongLeaf(f"{show(plain)} is not valid; give a list")
    return typing.cast("list[Any]", plain)


def _read_each(pairs: Iterable[tuple[Reader, Any]]) -> tuple[Any, ...]:
    made: list[Any] = []
    try:
        for read, item in pairs:
            made.append(read(item))  # noqa: PERF401 - how many there are is where the error lies
    except WrongLeaf as error:
        error.keys.append(len(made))
        raise
    return tuple(made)


def _sequence(read: Reader) -> Reader:
    return lambda plain: _read_each(zip(itertools.repeat(read), _listed(plain), strict=False))


def _fixed(readers: Sequence[Reader]) -> Reader:
    def read_fixed(plain: Any) -> tuple[Any, ...]:
        items = _listed(plain)
        if len(items) != len(readers):
            raise WrongLeaf(f"has {len(items)} entries; give {len(readers)}")
        return _read_each(zip(readers, items, strict=True))

    return read_fixed


def _mapping(read_key: Reader, read: Reader) -> Reader:
    def read_mapping(plain: Any) -> dict[Any, Any]:
        made = {}
        key: Any = ""
        if not isinstance(plain, dict):
            raise WrongLeaf(f"{show(plain)} is not valid; give an object")
        try:
            for key, item in plain.items():
                made[read_key(key)] = read(item)
        except WrongLeaf as error:
            error.keys.append(show(key).strip('"'))
            raise
        return made

    return read_mapping


def _key_reader(kind: Any) -> Reader:
    if kind is not int:
        return reader_of(kind)

    def read_number(key: Any) -> int:
        try:
            return int(key)
        except ValueError:
            raise WrongLeaf("is no number; keys are whole numbers here") from None

    return read_number


def _member(kind: type[enum.Enum]) -> Reader:
    names = [str(member.value) for member in kind]

    def read_member(plain: Any) -> enum.Enum:
        try:
            return kind(plain)
        except ValueError:
            raise WrongLeaf(f"{show(plain)} is not valid; give one of {', '.join(names)}") from None

    return read_member


@functools.cache
def fields_of(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the required fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    required = frozenset(
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return {f.name: hints[f.name] for f in fields}, required


def _record(kind: type) -> Reader:
    hints, required = fields_of(kind)
    readers = {name: reader_of(hint) for name, hint in hints.items()}

    def read_record(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise WrongLeaf(f"{show(plain)} is not valid; give an object, a {kind.__name__}")
        # fields with defaults may be missing, as files of older releases lack them; unknown ones are another release's
        if not required <= plain.keys() <= readers.keys():
            _refuse_keys(kind, plain, readers, required)
        made = {}
        name = ""
        try:
            for name, item in plain.items():
                made[name] = readers[name](item)
        except WrongLeaf as error:
            error.keys.append(name)
            raise
        return kind(**made)

    return read_record


def _refuse_keys(
    kind: type, plain: dict[Any, Any], known: typing.Collection[str], required: frozenset[str]
) -> None:
    unknown = sorted(str(key) for key in plain.keys() - set(known))
    missing = sorted(required - plain.keys())
    parts = []
    if unknown:
        parts.append(f"unknown keys {show(unknown)}: {nearest_key(unknown[0], list(known))}")
    if missing:
        parts.append(f"missing keys {show(missing)}")
    raise WrongLeaf(f"of a {kind.__name__}: {'; '.join(parts)} (is the file of this release?)")


def _read_text(plain: Any) -> str:
    if not isinstance(plain, str):
        raise WrongLeaf(f"{show(plain)} is not valid; give a text")
    if len(plain) > LONGEST_TEXT:
        raise WrongLeaf(f"has {len(plain)} characters; give at most {LONGEST_TEXT}")
    return plain


def _read_int(plain: Any) -> int:
    if not isinstance(plain, int) or isinstance(plain, bool):
        raise WrongLeaf(f"{show(plain)} is not valid; give a whole number")
    return plain


def _read_float(plain: Any) -> float:
    if not isinstance(plain, (int, float)) or isinstance(plain, bool):
        raise WrongLeaf(f"{show(plain)} is not valid; give a number")
    try:
        value = float(plain)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise WrongLeaf(f"{show(plain)} is not finite; give a number")
    return value


def _read_bool(plain: Any) -> bool:
    if not isinstance(plain, bool):
        raise WrongLeaf(f"{show(plain)} is not valid; give true or false")
    return plain


_PLAIN_READERS: dict[Any, Reader] = {str: _read_text, int: _read_int, float: _read_float, bool: _read_bool}
