"""JSON for the dataclasses of `ir`: one schema version, one fingerprint, files written whole, names escaped."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import os
import tempfile
import types
import typing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from gpp_plugin.errors import GppError

SCHEMA_VERSION = 1

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return ``value`` as JSON types; dataclasses become dicts, tuples lists, enums their value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Build ``kind`` (a dataclass or a typing form) from JSON types; the inverse of `to_plain`.

    Raises:
        GppError: a field is missing or unknown.
    """
    # By the type that is expected, not by what the JSON looks like: a list is a tuple of BlockCost where the field says
    # tuple[BlockCost, ...], and a pair where it says tuple[str, int]; an object's keys are integers again where the
    # field is dict[int, float].
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if plain is None:
            return None
        return from_plain(next(a for a in args if a is not type(None)), plain)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(from_plain(args[0], item) for item in plain)
        return tuple(from_plain(a, item) for a, item in zip(args, plain, strict=True))
    if origin is dict:
        return {from_plain(args[0], key): from_plain(args[1], item) for key, item in plain.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(plain)
    if dataclasses.is_dataclass(kind):
        return _dataclass_from_plain(typing.cast(type, kind), plain)
    if kind is int and isinstance(plain, str):
        return int(plain)
    if kind is float and isinstance(plain, int):
        return float(plain)
    return plain


def _dataclass_from_plain(kind: type, plain: Any) -> Any:
    if not isinstance(plain, dict):
        raise GppError(f"{kind.__name__}: expected an object, found {type(plain).__name__}")
    hints, required = _fields_of(kind)
    # fields with defaults may be missing, as files of older releases lack them; unknown ones are another release's
    if not required <= plain.keys() <= hints.keys():
        unknown, missing = sorted(plain.keys() - hints.keys()), sorted(required - plain.keys())
        raise GppError(
            f"{kind.__name__}: unknown fields {unknown}, missing fields {missing}; is the file of this release?"
        )
    return kind(**{name: from_plain(hints[name], item) for name, item in plain.items()})


@functools.cache
def _fields_of(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the fields that must be given."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    required = frozenset(
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return {f.name: hints[f.name] for f in fields}, required


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that depend on every field of ``value``."""
    # sorted keys and no spaces: the text, and so the fingerprint, depends on values alone
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dumps(value: Any) -> str:
    """Return the JSON text of a dataclass of `ir`, with its type and schema version."""
    return json.dumps(
        {"schema": SCHEMA_VERSION, "type": type(value).__name__, "value": to_plain(value)}, indent=1
    )


def loads(kind: type[T], text: str) -> T:
    """Read what `dumps` wrote.

    Raises:
        GppError: the text is not JSON, of another type, or of another schema version.
    """
    try:
        envelope = json.loads(text)
    except json.JSONDecodeError as error:
        raise GppError(f"not a {kind.__name__} file: {error}") from error
    if not isinstance(envelope, dict) or not {"schema", "type", "value"} <= set(envelope):
        raise GppError(f"not a {kind.__name__} file: keys schema, type and value expected")
    if envelope["schema"] != SCHEMA_VERSION:
        raise GppError(
            f"schema {envelope['schema']} of this {kind.__name__} is not {SCHEMA_VERSION}; "
            "write it anew with this release"
        )
    if envelope["type"] != kind.__name__:
        raise GppError(f"the file holds a {envelope['type']}, not a {kind.__name__}")
    try:
        return typing.cast(T, from_plain(kind, envelope["value"]))
    except (TypeError, ValueError, AttributeError) as error:
        raise GppError(f"not a {kind.__name__} file: a value has the wrong form ({error})") from error


def write_text_whole(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all (temporary file, fsync, rename)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, as renaming is only atomic within one file system; synced before, as a rename may reach the
    # disk before the data: after a power cut the file is the old one or the new one.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save(value: Any, path: str | Path) -> None:
    """Write a dataclass of `ir` to a JSON file."""
    write_text_whole(path, dumps(value) + "\n")


def load(kind: type[T], path: str | Path) -> T:
    """Read a dataclass of `ir` from a JSON file.

    Raises:
        GppError: the file is missing or not a ``kind``; the message names the path.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise GppError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise GppError(f"{path}: not a {kind.__name__} file: {error}") from error
    try:
        return loads(kind, text)
    except GppError as error:
        raise GppError(f"{path}: {error}") from error


MOST_CHARACTERS = 120
"""Longer names are cut: file systems take 255 bytes, and what is made of a name adds to it."""


def escape_name(name: str) -> str:
    """Return ``name`` as a part of a file name: letters, digits and ``_-.~`` as they are, all else in percent code.

    `urllib.parse.unquote` gives the name back, unless it was too long: then its end is a hash of the whole.

    >>> escape_name("language_model.2-3+lm_head+loss")
    'language_model.2-3%2Blm_head%2Bloss'
    >>> escape_name("../größe 1")
    '%2E.%2Fgr%C3%B6%C3%9Fe%201'
    """
    escaped = quote(name, safe="")
    if escaped.startswith("."):  # hidden, or the directory itself
        escaped = f"%2E{escaped[1:]}"
    if len(escaped) <= MOST_CHARACTERS:
        return escaped
    return f"{escaped[: MOST_CHARACTERS - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
