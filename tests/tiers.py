"""What `make test` leaves to `make test-all`: named in tests/tiers.toml, applied as tests are collected.

A table inside of one test is thinned by `some`. All of both runs with `--tier all`, which `make test-all` says; a test
that is named on the command line (`pytest path::test`) runs whatever its tier.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".toml")
Case = TypeVar("Case")
Kept = int | list[str]

_is_whole = False


class TiersError(ValueError):
    """tests/tiers.toml names what is not there."""


def set_whole(is_whole: bool) -> None:
    """Say, before any test is imported, whether all tiers run."""
    global _is_whole
    _is_whole = is_whole


def is_whole() -> bool:
    """Return whether all tiers run."""
    return _is_whole


def some(cases: Iterable[Case], *, every: int) -> list[Case]:
    """Return one case of ``every`` so many, the first included; all of them where all tiers run."""
    return list(cases)[:: 1 if _is_whole else every]


def read_kept(text: str) -> dict[str, Kept]:
    """Return what of each named test, file or folder the default tier keeps.

    Raises:
        TiersError: the file is written otherwise.
    """
    kept = tomllib.loads(text).get("kept", {})
    for name, value in kept.items():
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not is_list and not (type(value) is int and value > 1):
            raise TiersError(
                f"tests/tiers.toml: {name!r} = {value!r}; give a list of what is kept ([]: nothing), or a number N > 1: "
                "one of every N cases"
            )
    return dict(kept)


def left_out(kept: Mapping[str, Kept], names: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return which of these node ids the default tier leaves out, and one line for each entry that names nothing.

    The longest entry that names a test decides. An entry of a file none of whose tests is here is not judged.
    """
    found: set[str] = set()
    lines = []
    files = {name.partition("::")[0] for name in names}
    below: dict[str, list[str]] = {key: [] for key in kept}
    for name in names:
        holders = [key for key in kept if _is_below(name, key)]
        if holders:
            below[max(holders, key=len)].append(name)
    for key, value in kept.items():
        if not below[key]:
            if key.partition("::")[0] in files:
                lines.append(f"{key!r} names no test, or another entry names all of them")
        elif isinstance(value, int):
            found.update(name for number, name in enumerate(below[key]) if number % value)
        else:
            seen = Counter({case: 0 for case in value})
            for name in below[key]:
                keepers = [case for case in value if _matches(_rest(name, key), case)]
                seen.update(keepers)
                if not keepers:
                    found.add(name)
            lines += [
                f"{key!r} keeps {case!r}, which is none of its tests" for case, n in seen.items() if not n
            ]
    return found, lines


def missing_files(kept: Mapping[str, Kept]) -> list[str]:
    """Return a line for each entry whose file or folder is not there."""
    return [f"{key!r}: there is no such file" for key in kept if not (ROOT / key.partition("::")[0]).exists()]


def is_named(name: str, arguments: Iterable[str]) -> bool:
    """Return whether a command line names this test, its function or its class."""
    given = (argument.removeprefix("./") for argument in arguments if "::" in argument)
    return any(_is_below(name, _relative(each)) for each in given)


def _relative(argument: str) -> str:
    path, _, rest = argument.partition("::")
    whole = Path(path).resolve()
    return f"{whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else path}::{rest}"


def _is_below(name: str, key: str) -> bool:
    rest = name.removeprefix(key)
    return name.startswith(key) and (rest == "" or rest.startswith(("::", "[", "/")) or key.endswith("/"))


def _rest(name: str, key: str) -> str:
    """Return what distinguishes a test below an entry: the case of a function, the test of a file."""
    rest = name.removeprefix(key)
    return rest[1:-1] if rest.startswith("[") else rest.removeprefix("::").removeprefix("/")


def _matches(text: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None
