"""One number of a paper's figure or table beside ours, and how both are printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpp_plugin.report.units import format_table

PICTURE_ONLY = "in the picture only"
"""What the paper says of numbers that its text does not have; none is read off a picture here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One number.

    Args:
        case: what it is of: model, devices, size.
        quantity: what it is, with its unit.
        paper: the paper's number, where it has one.
        paper_says: what else its text says of it: a range, or that it is only drawn.
        ours: our number; None where there is none, for the reason in ``note``.
        note: what is to be known of this row alone.
        is_drawn: whether the picture has it.
    """

    case: str
    quantity: str
    paper: float | None = None
    paper_says: str = ""
    ours: float | None = None
    note: str = ""
    is_drawn: bool = True

    @property
    def difference(self) -> float | None:
        """Return ours over the paper's, less one."""
        return None if self.paper in (None, 0) or self.ours is None else self.ours / self.paper - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure or table of a paper.

    Args:
        name: what ``--figure`` calls it.
        title: what it shows.
        why: why our numbers and the paper's differ.
        rows: makes the rows.
        scale: of the picture: ``linear``, or ``log`` where numbers are orders of magnitude apart.
    """

    name: str
    title: str
    why: str
    rows: Callable[[Options], Iterable[FigureRow]]
    scale: str = "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may limit: the numbers of devices, and the seconds that one search may take."""

    devices: tuple[int, ...] = (4, 8, 16, 32)
    limit: float = 60.0

    @property
    def search(self) -> list[str]:
        """Return the options as `gpp bench throughput` and `search-time` take them."""
        return ["--limit", f"{self.limit:g}", "--devices", *map(str, self.devices)]


def format_figure(figure: Figure, rows: Iterable[FigureRow]) -> str:
    """Return a figure as text: its title, the rows, and why they differ."""
    header = ["case", "quantity", "paper", "ours", "difference", ""]
    lines = [
        [
            row.case,
            row.quantity,
            " ".join(filter(None, [_number(row.paper), row.paper_says])) or "-",
            _number(row.ours) or "-",
            "" if row.difference is None else f"{row.difference:+.1%}",
            row.note,
        ]
        for row in rows
    ]
    return (
        f"{figure.name}: {figure.title}\n{format_table(header, lines, left=6)}\nwhy they differ: {figure.why}"
    )


def _number(value: float | None) -> str:
    """Return a number with four digits.

    >>> _number(1.25), _number(39815.0), _number(0.012)
    ('1.25', '39815', '0.012')
    """
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def plain_row(figure: Figure, row: FigureRow) -> dict[str, Any]:
    """Return a row as JSON has it."""
    return {"figure": figure.name, **dataclasses.asdict(row), "difference": row.difference, "why": figure.why}
