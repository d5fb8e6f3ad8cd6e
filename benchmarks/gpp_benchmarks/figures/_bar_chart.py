"""Bars of the paper's numbers beside ours, as SVG: a file that any browser shows, made of text alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from gpp_benchmarks.figures._figure_rows import FigureRow

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
