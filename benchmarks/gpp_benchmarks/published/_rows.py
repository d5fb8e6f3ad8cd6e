"""One published number beside ours: what a row says, and the table of rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpp_plugin.report.units import format_table

GIVEN, FITTED, HELD_OUT, ASSUMED, COSTED = "given", "fitted", "held out", "assumed", "costs"
"""What the simulator knew: every time of the run; this very row; another row of the same machine; no time at all, and
not all that decides; no time at all, but sizes and degrees, and a description of the cluster."""
DIGITS = {"rate": 4, "s": 2, "ratio": 3, "share": 3, "GB/s": 1, "us": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of a published run.

    Args:
        quantity: what was published, with its schedule.
        unit: of ``rate`` (bubble) and ``share`` the error is the difference; of ``s``, ``ratio``, ``GB/s`` and ``us``
            the relative one.
        known: `GIVEN`, `FITTED`, `HELD_OUT`, `ASSUMED` or `COSTED`.
        limit: the largest error that is asked of a row; None where none is.
        shorter: the same quantity under an order of ours that is shorter, where there is one, and what that order is.
        why: where the error is over the limit, or what was assumed.
    """

    source: str
    case: str
    quantity: str
    unit: str
    published: float
    ours: float
    known: str
    limit: float | None = None
    shorter: float | None = None
    shorter_order: str = ""
    why: str = ""

    @property
    def error(self) -> float:
        """Return ours less the published number; of times and ratios relative to it."""
        difference = self.ours - self.published
        return difference if self.unit in ("rate", "share") else difference / self.published

    @property
    def is_within(self) -> bool | None:
        """Return whether the error is one that is asked for, None where none is; rates to four decimals, as printed."""
        if self.limit is None:
            return None
        if self.limit == 0.0:
            return round(self.ours, 4) == round(self.published, 4)
        return abs(self.error) <= self.limit

    def plain(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {**dataclasses.asdict(self), "error": self.error, "is_within": self.is_within}


def format_rows(rows: Iterable[Row]) -> str:
    """Return rows as a table; below it, once each, what is to be known of them."""
    cells, notes = [], dict[str, int]()
    for row in rows:
        digits = DIGITS[row.unit]
        error = f"{row.error:+.4f}" if row.unit in ("rate", "share") else f"{row.error:+.1%}"
        mark = f"[{notes.setdefault(row.why, len(notes) + 1)}]" if row.why else ""
        shorter = "" if row.shorter is None else f"{row.shorter:.{digits}f} ({row.shorter_order})"
        cells.append(
            [
                row.case,
                f"{row.quantity} ({row.unit})",
                row.known,
                f"{row.published:.{digits}f}",
                f"{row.ours:.{digits}f}",
                error + (" !" if row.is_within is False else ""),
                mark,
                shorter,
            ]
        )
    header = ["case", "quantity", "known", "published", "ours", "error", "", "shorter"]
    lines = [f"[{number}] {note}" for note, number in notes.items()]
    return "\n".join([format_table(header, cells, left=3), *lines])


def count_within(rows: Iterable[Row]) -> dict[str, str]:
    """Return by source and quantity how many rows that were not fitted are within their limit."""
    found: dict[str, list[bool]] = {}
    for row in rows:
        if row.limit is not None and row.known != FITTED:
            found.setdefault(f"{row.source}: {row.quantity}", []).append(row.is_within is True)
    return {name: f"{sum(each)} of {len(each)}" for name, each in found.items()}


def errors_of(rows: Iterable[Row], known: str, *, quantity: str = "step") -> dict[str, Any] | None:
    """Return how far such times are off, whatever their limits: mean, median and worst; None: there is none."""
    errors = [
        abs(row.error)
        for row in rows
        if (row.known, row.unit) == (known, "s") and row.quantity.startswith(quantity)
    ]
    if not errors:
        return None
    return {
        "rows": len(errors),
        "mean": statistics.mean(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
    }
