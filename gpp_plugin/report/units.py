"""Bytes and microseconds as short text for people."""

from __future__ import annotations

from gpp_plugin.report.printable import printable

LABEL_WIDTH = 40
"""Columns of a stage's name in pictures; tables and errors have the whole one."""


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

    >>> [format_ms(t) for t in (1.5, 1234.0, 45678.0, 1234567.0)]
    ['0.002', '1.23', '45.7', '1235']
    """
    ms = microseconds / 1000
    digits = 3 if ms < 1 else 2 if ms < 10 else 1 if ms < 100 else 0
    return f"{ms:.{digits}f}"


def shorten_name(name: str, width: int = LABEL_WIDTH) -> str:
    """Return a stage's name in at most ``width`` columns: its first parts and the last ones, ``…`` for the others.

    The last part is what tells most (``loss``), so it is kept first, then parts from both ends in turn.

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


def format_table(header: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """Return rows under a header in aligned columns; the first ``left`` columns align left.

    >>> print(format_table(["stage", "ms"], [["loss", "1.5"], ["text_model", "12"]]))
    stage        ms
    loss        1.5
    text_model   12
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
