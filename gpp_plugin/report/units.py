"""Bytes and microseconds as short text for people."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Return a size in powers of 1024 with three digits.

    >>> [format_bytes(n) for n in (0, 512, 2048, 1536 * 1024, 140 * 2**30)]
    ['0 B', '512 B', '2.00 KiB', '1.50 MiB', '140 GiB']
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
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


def format_table(header: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """Return rows under a header in aligned columns; the first ``left`` columns align left.

    >>> print(format_table(["stage", "ms"], [["loss", "1.5"], ["text_model", "12"]]))
    stage        ms
    loss        1.5
    text_model   12
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
