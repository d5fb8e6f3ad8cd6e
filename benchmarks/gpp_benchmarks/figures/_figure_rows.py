"""One number of a paper's figure or table beside ours, and how both are printed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from gpp_plugin.report.units import format_table

# Runs another benchmark as `gpp bench` would, and returns what it returns.


def run_bench(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the result of ``gpp bench NAME OPTIONS``, whose own tables are not printed."""
    module = importlib.import_module(f"gpp_benchmarks.{name}")
    parser = argparse.ArgumentParser(prog=name)
    module.add_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = module.run(parser.parse_args(list(options)))
    return result


PICTURE_ONLY = "in the picture only"
"""What the paper says of numbers that its text does not have; none is read off a picture here."""


@dataclass(frozen=True, slots=True)
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
    _: dataclasses.KW_ONLY
    paper: float | None = None
    paper_says: str = ""
    ours: float | None = None
    note: str = ""
    is_drawn: bool = True

    @property
    def difference(self) -> float | None:
        """Return ours over the paper's, less one."""
        return None if self.paper in (None, 0) or self.ours is None else self.ours / self.paper - 1.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure or table of a paper.

    Args:
        name: what ``--figure`` calls it.
        title: what it shows.
        rows: makes the rows.
        why: why our numbers and the paper's differ.
        scale: of the picture: ``linear``, or ``log`` where numbers are orders of magnitude apart.
    """

    name: str
    title: str
    rows: Callable[[Options], Iterable[FigureRow]]
    _: dataclasses.KW_ONLY
    why: str
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


# Bars of the paper's numbers beside ours, as SVG: a file that any browser shows, made of text alone.

WIDTH, LABELS, NUMBERS = 900, 380, 80
"""Pixels of the picture, of the names on the left and of the numbers on the right."""
BAR, GAP, TOP = 9, 8, 46
COLOURS = {"paper": "#9aa5b1", "ours": "#1f6fb2"}
WORDS = "#5c6873"


def draw_bars(title: str, rows: Sequence[FigureRow], *, scale: str = "linear") -> str:
    """Return the picture: two bars a row, the paper's above ours; where the paper has no number, what its text says.

    Args:
        scale: ``log`` starts at the power of ten below the smallest number.
    """
    # y of row r:   TOP + r (2 BAR + GAP)   paper's bar
    #               ... + BAR               ours
    drawn = [row for row in rows if row.is_drawn and (row.paper is not None or row.ours is not None)]
    values = [v for row in drawn for v in (row.paper, row.ours) if v is not None and v > 0]
    height = TOP + len(drawn) * (2 * BAR + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="13">{escape(title)}</text>',
    ]
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LABELS + 80 * index
        parts.append(f'<rect x="{x}" y="26" width="{BAR}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="34">{name}</text>')
    for index, row in enumerate(drawn):
        y = TOP + index * (2 * BAR + GAP)
        label = escape(f"{row.case}: {row.quantity}")
        parts.append(f'<text x="{LABELS - 8}" y="{y + BAR + 3}" text-anchor="end">{label}</text>')
        if row.paper is None and row.paper_says:
            parts.append(
                f'<text x="{LABELS + 4}" y="{y + BAR - 2}" fill="{WORDS}">{escape(row.paper_says)}</text>'
            )
        for offset, name, value in ((0, "paper", row.paper), (BAR, "ours", row.ours)):
            if value is None:
                continue
            length = (WIDTH - LABELS - NUMBERS) * _share(value, values, scale)
            parts.append(
                f'<rect x="{LABELS}" y="{y + offset}" width="{length:.1f}" height="{BAR - 1}" '
                f'fill="{COLOURS[name]}"/>'
            )
            parts.append(f'<text x="{LABELS + length + 4:.1f}" y="{y + offset + BAR - 1}">{value:.4g}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _share(value: float, values: Sequence[float], scale: str) -> float:
    """Return the length of a bar over the longest one.

    >>> _share(1.0, [1.0, 4.0], "linear"), _share(10.0, [5.0, 100.0], "log")
    (0.25, 0.5)
    """
    largest = max(values, default=1.0)
    if value <= 0:
        return 0.0
    if scale == "linear":
        return value / largest
    low = math.floor(math.log10(min(values)) - 1e-9)
    return (math.log10(value) - low) / max(math.log10(largest) - low, 1e-9)
