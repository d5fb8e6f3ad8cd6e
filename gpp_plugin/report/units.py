"""Bytes, microseconds, names and tables as short text for people, whatever characters names have."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import textwrap
from typing import Any, TypeVar

IN_LOGS = 100_000
"""Columns of a table in a log, which has no width."""
LABEL_WIDTH = 40
"""Columns of a stage's name in pictures; tables and errors have the whole one."""
LEAST_TEXT = 16
"""Columns that a cell's text has at least, where it is wrapped."""


def format_bytes(num_bytes: float) -> str:
    """Return a size in powers of 1024 with three digits.

    >>> [format_bytes(n) for n in (0, 512, 2048, 1536 * 1024, 140 * 2**30)]
    ['0 B', '512 B', '2.00 KiB', '1.50 MiB', '140 GiB']
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    # below 1000 of a unit, not 1024, so that no figure has four digits; GiB is the last, whatever comes
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1000 or unit == "GiB":
            break
    digits = 2 if num_bytes < 10 else 1 if num_bytes < 100 else 0
    return f"{num_bytes:.{digits}f} {unit}"


def format_ms(microseconds: float) -> str:
    """Return microseconds as milliseconds with about three digits.

    >>> [format_ms(t) for t in (1.5, 1234.0, 45678.0, 1234567.0, -1e-9, -45678.0)]
    ['0.002', '1.23', '45.7', '1235', '0.000', '-45.7']
    """
    ms = microseconds / 1000
    digits = 3 if abs(ms) < 1 else 2 if abs(ms) < 10 else 1 if abs(ms) < 100 else 0
    return f"{ms:z.{digits}f}"


def shorten_name(name: str, width: int = LABEL_WIDTH) -> str:
    """Return a stage's name in at most ``width`` columns: its first parts and the last ones, ``…`` for the others.

    The last part says most (``loss``), so it is shown first, then parts from both ends in turn.

    >>> shorten_name("vision_model.post_layernorm+visual_projection+loss")
    'vision_model.post_layernorm+…+loss'
    >>> shorten_name("language_model.2-3+lm_head+loss"), shorten_name("a_module_with_a_name", 12)
    ('language_model.2-3+lm_head+loss', 'a_modul…name')
    """
    name = printable(name)
    if len(name) <= width:
        return name
    parts = name.split("+")
    front, back = 0, 1
    for taken in range(1, len(parts)):
        more = (front + 1, back) if taken % 2 else (front, back + 1)
        shown = "+".join([*parts[: more[0]], "…", *parts[len(parts) - more[1] :]])
        if len(shown) > width or sum(more) >= len(parts):
            break
        front, back = more
    if front:
        return "+".join([*parts[:front], "…", *parts[len(parts) - back :]])
    last = width // 3
    return f"{name[: width - 1 - last]}…{name[-last:]}"


def screen_columns() -> int | None:
    """Return the columns of whoever reads: ``COLUMNS``, or those of the terminal; None where it is a pipe or a file."""
    text = os.environ.get("COLUMNS", "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal; closed; replaced by something without a file
        return None
    return columns or None  # 0: a terminal of unknown size


def fill_text(text: str, *, indent: str = "") -> str:
    """Return a sentence in lines as wide as the screen; one line where there is none.

    Args:
        indent: in front of the second line and those behind it.
    """
    width = screen_columns()
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False)


def format_table(header: list[str], rows: list[list[str]], *, left: int = 1, width: int | None = None) -> str:
    """Return rows under a header in aligned columns; the first ``left`` columns align left.

    Args:
        width: columns of text there are; `screen_columns` by default. A table that is wider is cut into several, one
            below the other, each beginning with the first column.

    >>> print(format_table(["stage", "ms"], [["loss", "1.5"], ["text_model", "12"]]))
    stage        ms
    loss        1.5
    text_model   12
    >>> print(format_table(["stage", "ms", "memory"], [["loss", "1.5", "2.00 KiB"]], width=16))
    stage   ms
    loss   1.5
    <BLANKLINE>
    stage    memory
    loss   2.00 KiB
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    width = screen_columns() if width is None else width
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    if width is not None and len(header) > 1 and widths[0] > (most := max(width // 2, 12)):
        # what names the row may take half a line: its two ends say most
        header, rows = [header[0], *header[1:]], [[_shortened(row[0], most), *row[1:]] for row in rows]
        widths[0] = max(len(row[0]) for row in (header, *rows))
    lines: list[str] = []
    for columns in _columns_of_parts(widths, width):
        lines += [""] if lines else []
        left_columns = None if width is None else max(width - widths[0] - 2, LEAST_TEXT)
        for row in (header, *rows):
            if left_columns is not None and len(columns) == 2 and widths[columns[1]] > left_columns:
                # a column that is wider than the screen: its text is continued below
                texts = textwrap.wrap(row[columns[1]], left_columns) or [""]
                names = [row[0], *[""] * (len(texts) - 1)]
                lines += [f"{n:{widths[0]}}  {text}".rstrip() for n, text in zip(names, texts, strict=True)]
                continue
            cells = [
                row[index].ljust(widths[index]) if index < left else row[index].rjust(widths[index])
                for index in columns
            ]
            lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _columns_of_parts(widths: list[int], width: int | None) -> list[list[int]]:
    """Return the columns of each part of a table: the first one, and as many of the others as fit beside it."""
    # widths 6, 9, 9, 9 in 30 columns: [0, 1, 2] take 6 + 2 + 9 + 2 + 9 = 28, [0, 3] the rest; one that is too wide
    # by itself stands alone beside the first
    if width is None or not widths:
        return [list(range(len(widths)))]
    parts, used = [[0]], widths[0]
    for index in range(1, len(widths)):
        if len(parts[-1]) > 1 and used + 2 + widths[index] > width:
            parts.append([0])
            used = widths[0]
        parts[-1].append(index)
        used += 2 + widths[index]
    return parts


def _shortened(text: str, width: int) -> str:
    """Return a name whose number (``3 vision_model+loss``) stays, the rest as `shorten_name` has it."""
    number, space, name = text.partition(" ")
    if not number.isdecimal():
        return shorten_name(text, width)
    return f"{number}{space}{shorten_name(name, width - len(number) - 1)}"


# Text of others in a terminal: a name from a file may not move the cursor, change colours, or hide what is there.

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
