"""Rows of a result, dicts of JSON values, as tables for people: what `gpp bench` prints of rows that have no table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpp_plugin.report.units import format_table


def format_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return a table of each kind of rows: those with the same keys, in the order in which kinds come first.

    Lists and dicts have no place in a cell and are left out, as are keys whose every value is missing.

    Args:
        columns: the keys to show, where not all; a row may lack some.

    >>> print(format_rows([{"planner": "auto", "over_chain": 1.25}, {"planner": "piper", "over_chain": None}]))
    planner  over chain
    auto           1.25
    piper             -
    """
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        keys = [key for key in columns if key in row] if columns else list(row)
        shown = tuple(key for key in keys if not isinstance(row[key], list | tuple | dict))
        kinds.setdefault(shown, []).append(row)
    return "\n\n".join(_format_kind(keys, found) for keys, found in kinds.items())


def _format_kind(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    keys = [key for key in keys if any(row[key] is not None for row in rows)]
    # texts stand left of the numbers, beginning with what tells the rows apart
    is_text = {key: any(isinstance(row[key], str) for row in rows) for key in keys}
    keys = sorted(keys, key=lambda key: not is_text[key])
    cells = [[_cell(row[key]) for key in keys] for row in rows]
    return format_table(
        [key.replace("_", " ") for key in keys], cells, left=sum(is_text[key] for key in keys)
    )


def _cell(value: Any) -> str:
    """Return a value in few characters.

    >>> [_cell(value) for value in (None, True, 12345.678, 0.00123456, 7, "ok")]
    ['-', 'yes', '12346', '0.001235', '7', 'ok']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
