"""Text of others in a terminal: a name from a file may not move the cursor, change colours, or hide what is there."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

T = TypeVar("T")

# control characters, marks that turn the direction of text, ends of lines, characters of no width, half characters
_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return one line of text with what a terminal would obey as escapes.

    >>> printable("vision\x1b[2J\r\n")
    'vision\\x1b[2J\\r\\n'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def printable_lines(text: str) -> str:
    """Return the same of text whose line ends are its own."""
    return "\n".join(map(printable, text.split("\n")))


def with_printable(value: T) -> T:
    """Return a dataclass of `ir` with every text in it printable; itself where all are."""
    made: Any = value
    if isinstance(value, str):
        made = printable(value)
    elif isinstance(value, tuple):
        items = tuple(map(with_printable, value))
        made = items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        new = {name: with_printable(item) for name, item in fields.items()}
        changed = {name: item for name, item in new.items() if item is not fields[name]}
        made = dataclasses.replace(value, **changed) if changed else value
    return made
