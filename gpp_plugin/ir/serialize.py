"""JSON for the dataclasses of `ir`: one schema version, one fingerprint, files written whole, names escaped."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import errno
import hashlib
import json
import math
import os
import stat
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from gpp_plugin.errors import ReadError
from gpp_plugin.ir.typed_leaves import WrongLeaf, reader_of, show

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


def from_plain(kind: Any, plain: Any, *, root: str = "") -> Any:
    """Build ``kind`` (a dataclass or a typing form) from JSON types; the inverse of `to_plain`.

    Args:
        root: what the value is called at the beginning of an error's key path.

    Raises:
        ReadError: a field is missing or unknown, or a value has the wrong type or size; one line with its key path.
    """
    try:
        return reader_of(kind)(plain)
    except WrongLeaf as error:
        raise ReadError(error.line(root)) from None


def check_leaves(value: Any) -> None:
    """Refuse a dataclass made in memory that could not be read from a file: the same types and ranges.

    Raises:
        ReadError: as `from_plain`.
    """
    from_plain(type(value), to_plain(value))


DERIVED = {"is_derived": True}
"""Metadata of a dataclass's field that says how others were found, or follows from them: no part of a fingerprint."""


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that depend on every field of ``value`` that is not `DERIVED`."""
    plain = to_plain(value)
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if field.metadata == DERIVED:
            del plain[field.name]
    # sorted keys and no spaces: the text, and so the fingerprint, depends on values alone
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dumps(value: Any) -> str:
    """Return the JSON text of a dataclass of `ir`, with its type and schema version."""
    return json.dumps(
        {"schema": SCHEMA_VERSION, "type": type(value).__name__, "value": to_plain(value)}, indent=1
    )


def loads(kind: type[T], text: str) -> T:
    """Read what `dumps` wrote.

    Raises:
        ReadError: the text is not JSON, of another type, or of another schema version, or a value of it is not valid.
    """
    return from_envelope(kind, parse_json(text, what=f"a {kind.__name__} file"))


def is_envelope(plain: Any) -> bool:
    """Return whether this is what `dumps` writes, whatever it holds."""
    return isinstance(plain, dict) and {"schema", "type", "value"} <= plain.keys()


def from_envelope(kind: type[T], plain: Any) -> T:
    """Build ``kind`` from the JSON types of what `dumps` writes.

    Raises:
        ReadError: as `loads`.
    """
    if not is_envelope(plain):
        raise ReadError(f"not a {kind.__name__} file: keys schema, type and value expected")
    if plain["schema"] != SCHEMA_VERSION:
        raise ReadError(
            f"schema {show(plain['schema'])} of this {kind.__name__} is not {SCHEMA_VERSION}; "
            "write it anew with this release"
        )
    if plain["type"] != kind.__name__:
        held = plain["type"]
        held = held if isinstance(held, str) and held.isidentifier() else show(held)
        raise ReadError(f"the file holds a {held[:80]}, not a {kind.__name__}")
    return typing.cast(T, from_plain(kind, plain["value"], root="value"))


MAX_BYTES = 256 << 20
"""Of a file of ours: the timeline of some thousand devices."""
SMALL_BYTES = 4 << 20
"""Of what people write: configurations, clusters, and plans in place."""
MAX_DEPTH = 64
"""Ours are 10 deep."""
MAX_VALUES = 6_000_000
"""More of them may fill a GiB, however short the text is."""
_MOST_DIGITS = 20
"""Of an integer: 64 bits."""


def read_json(
    path: str | Path,
    *,
    what: str,
    max_bytes: int = SMALL_BYTES,
    may_be_infinite: bool = False,
) -> Any:
    """Return what a JSON file holds; every file that others may have written is read here.

    Args:
        what: what it should be, for errors: ``a plan``.
        may_be_infinite: whether ``Infinity`` is a number, as HuggingFace writes it.

    Raises:
        ReadError: it cannot be read, is too large or too deep, is no JSON, has a key twice or a number that is not
            finite; one line with the path.
    """
    text = read_text(path, what=what, max_bytes=max_bytes)
    try:
        return parse_json(text, what=what, max_bytes=max_bytes, may_be_infinite=may_be_infinite)
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from error.__cause__


def read_text(path: str | Path, *, what: str, max_bytes: int = SMALL_BYTES) -> str:
    """Return what a text file holds.

    Raises:
        ReadError: it cannot be read, is too large or no text; one line with the path.
    """
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(max_bytes + 1)  # a device never ends
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReadError(f"{shown_path(path)}: cannot be read ({reason}); give the path of {what}") from error
    except (ValueError, TypeError) as error:  # a path with a NUL in it; what is no text
        raise ReadError(f"{show(str(path))}: is no path ({error}); give the path of {what}") from error
    if len(content) > max_bytes:
        raise ReadError(
            f"{path}: is larger than {max_bytes:,} bytes, more than {what} may have; is it the right file?"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: is no text ({error.reason}); give the path of {what}") from error


def shown_path(path: str | Path) -> str:
    """Return a path for a message; cut where what was taken for one is very long."""
    return str(path) if len(str(path)) <= MOST_CHARACTERS * 2 else show(str(path))


def parse_json(
    text: str,
    *,
    what: str,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    may_be_infinite: bool = False,
) -> Any:
    """Return what a JSON text holds.

    Raises:
        ReadError: as `read_json`, without a path.
    """
    num_values = text.count(",") + text.count("[") + text.count("{")
    if len(text) > max_bytes or num_values > MAX_VALUES:
        raise ReadError(
            f"not {what}: {len(text):,} characters with about {num_values:,} values; at most {max_bytes:,} and "
            f"{MAX_VALUES:,} are read"
        )
    try:
        plain = json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_float=_finite,
            parse_int=_whole,
            parse_constant=_infinity if may_be_infinite else _refuse_constant,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ReadError(f"not JSON at {place}: {error.msg}; give {what}") from error
    except RecursionError:
        raise ReadError(f"not {what}: nested too deeply; at most {max_depth} levels are read") from None
    _check_depth(plain, what, max_depth)
    if "\\u" in text:
        # "\\ud800" alone is half a character: it could neither be printed nor written
        try:
            json.dumps(plain, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ReadError(f"not {what}: a text has half a character (a lone surrogate)") from None
    return plain


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ReadError(f"key {show(twice)} is there twice in one object; keep one")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ReadError(f"number {show(text)} is too large for 64 bits; give a finite one")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ReadError(f"number {show(text)} is too large for 64 bits; give a smaller one")
    return int(text)


def _refuse_constant(text: str) -> None:
    raise ReadError(f"{text} is no number that a file may hold; give a finite one")


def _infinity(text: str) -> float:
    if text == "NaN":
        _refuse_constant(text)
    return float(text)


def _check_depth(plain: Any, what: str, most: int) -> None:
    # level by level, as the recursion that a deep value would need is what is refused
    level = [plain]
    for _ in range(most + 1):
        containers = [value for value in level if isinstance(value, (dict, list))]
        if not containers:
            return
        level = [
            item
            for value in containers
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, (dict, list))
        ]
    raise ReadError(f"not {what}: nested more than {most} levels deep")


def write_text_whole(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/")
"""What a process has open already: a file behind it is written on, never replaced."""


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield where to write what becomes ``path``, whole, at the end; at an error nothing is left (fsync, rename).

    A device, a pipe or a descriptor (``/dev/stdout``) is written to as it is, and a link's target is what is replaced.
    """
    target = Path(path)
    if str(target).startswith(_DESCRIPTORS) or (target.exists() and not target.is_file()):
        try:
            yield target
        except OSError as error:
            error.filename = error.filename or str(target)  # a full device names none
            raise
        return
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, as renaming is only atomic within one file system; synced before, as a rename may reach the
    # disk before the data: after a power cut the file is the old one or the new one.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb") as written:
            os.fsync(written.fileno())
        # readable by whom any other new file is, or whom the old one was: mkstemp's files are their owner's alone
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def output_path(text: str) -> Path:
    """Return a file to be written, checked before the work begins whose result it would hold: the type of an option.

    Raises:
        argparse.ArgumentTypeError: it cannot be written.
    """
    path = Path(text)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if path.is_socket() or (path.exists() and not os.access(path, os.W_OK)):
            raise PermissionError(errno.EACCES, "a socket" if path.is_socket() else "permission denied")
        if not path.exists():  # its directories are made when it is written
            tempfile.TemporaryFile(
                dir=next(each for each in path.absolute().parents if each.exists())
            ).close()
    except OSError as error:
        why = f"{text} cannot be written ({error.strerror}); give another path"
        raise argparse.ArgumentTypeError(why) from None
    return path


def _umask() -> int:
    try:
        fields = dict(line.partition(":")[::2] for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["Umask"], 8)  # os.umask can only be read by setting it, for other threads too
    except (OSError, KeyError, ValueError):
        return 0o022


def save(value: Any, path: str | Path) -> None:
    """Write a dataclass of `ir` to a JSON file."""
    write_text_whole(path, dumps(value) + "\n")


def load(kind: type[T], path: str | Path) -> T:
    """Read a dataclass of `ir` from a JSON file.

    Raises:
        ReadError: the file is missing or not a ``kind``, or a value of it is not valid; the message names the path.
    """
    plain = read_json(path, what=f"a {kind.__name__} file", max_bytes=MAX_BYTES)
    try:
        return from_envelope(kind, plain)
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from error.__cause__


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
