"""Rows of a result, dicts of JSON values, as tables for people: what `gpp bench` prints of rows that have no table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.report.units import format_table

# Rows of a result as a picture by matplotlib: what `gpp bench NAME --figure FILE` writes.
#
# A benchmark says in `CHART` which of a row's keys are what; rows without them, or without a number, are left out. A
# panel is a picture of its own beside the others, with a curve or a colour for each series. matplotlib is imported
# where something is drawn, and nowhere else.

SUFFIXES = (".png", ".svg", ".pdf")
COLUMNS = 3
PANEL_INCHES = (4.6, 3.4)
LINES, BARS, PAIRS = "lines", "bars", "pairs"

Point = tuple[Any, float]
Panels = dict[str, dict[str, list[Point]]]
"""Panel -> series -> points, each in the order of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsChart:
    """What of a row is drawn.

    Args:
        kind: `LINES` over numbers, `BARS` over names, or `PAIRS`, points beside the line of equal numbers.
        x, y: keys; of several keys of x the values are one name.
        series, panels: keys that separate curves, and pictures; none: all are one.
        y_label: what y is, with its unit.
        is_log: y has a logarithmic axis.
    """

    kind: str
    x: tuple[str, ...]
    y: str
    series: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    y_label: str
    is_log: bool = False


def check_figure(path: str) -> Path:
    """Return the file to draw into, before anything is computed that is to be drawn.

    Raises:
        ConfigError: its name ends in no format, or its folder is not there.
        ModuleNotFoundError: matplotlib is not installed.
    """
    found = Path(path)
    if found.suffix not in SUFFIXES:
        raise ConfigError(f"--figure {path}: give a name that ends in {', '.join(SUFFIXES)}")
    if not found.parent.is_dir():
        raise ConfigError(f"--figure {path}: there is no directory {found.parent}; make it, or name another")
    import matplotlib  # noqa: F401

    return found


def points_of(rows: Iterable[Mapping[str, Any]], chart: RowsChart) -> Panels:
    """Return what is drawn of the rows.

    >>> chart = RowsChart(kind=LINES, x=("n",), y="s", series=("who",), y_label="s")
    >>> points_of([{"n": 4, "s": 1.5, "who": "a"}, {"n": 8, "s": None, "who": "a"}, {"other": 1}], chart)
    {'': {'a': [(4, 1.5)]}}
    """
    panels: Panels = {}
    keys = {*chart.x, chart.y, *chart.series, *chart.panels}
    for row in rows:
        if not keys <= row.keys():
            continue
        x = row[chart.x[0]] if len(chart.x) == 1 else _name(row, chart.x)
        y = row[chart.y]
        numbers = [y] if chart.kind == BARS else [x, y]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
            continue
        if chart.is_log and y <= 0:
            continue
        panel, series = _name(row, chart.panels), _name(row, chart.series)
        panels.setdefault(panel, {}).setdefault(series, []).append((x, y))
    return panels


def _name(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(str(row[key]) for key in keys)


def draw_rows(rows: Iterable[Mapping[str, Any]], chart: RowsChart, path: Path, *, title: str) -> None:
    """Write the picture.

    Raises:
        ConfigError: no row has what is to be drawn.
    """
    from matplotlib.figure import Figure

    panels = points_of(rows, chart)
    if not panels:
        raise ConfigError(f"--figure {path}: no row has numbers of {chart.y}; run parts that measure it")
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    names = list(dict.fromkeys(series for panel in panels.values() for series in panel))
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for axis, (panel, curves) in zip(axes, panels.items(), strict=False):
        {LINES: _draw_lines, BARS: _draw_bars, PAIRS: _draw_pairs}[chart.kind](axis, curves, colours)
        axis.set_title(panel, fontsize=10)
        axis.set_ylabel(chart.y_label)
        if chart.kind != BARS:
            axis.set_xlabel(" ".join(chart.x).replace("_", " "))
        if chart.is_log:
            axis.set_yscale("log")
        axis.grid(axis="y", alpha=0.3)
        if chart.series:
            axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_lines(axis: Any, curves: Mapping[str, Sequence[Point]], colours: Mapping[str, str]) -> None:
    for name, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", ms=3, label=name, color=colours[name])
    ticks = sorted({x for points in curves.values() for x, _ in points})
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _draw_bars(axis: Any, curves: Mapping[str, Sequence[Point]], colours: Mapping[str, str]) -> None:
    # A group a name of x, a bar a series in it: at group + (series - middle) * width.
    groups = list(dict.fromkeys(x for points in curves.values() for x, _ in points))
    width = 0.8 / len(curves)
    for number, (name, points) in enumerate(curves.items()):
        shift = (number - (len(curves) - 1) / 2) * width
        at = [groups.index(x) + shift for x, _ in points]
        axis.bar(at, [y for _, y in points], width, label=name, color=colours[name])
    axis.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8)


def _draw_pairs(axis: Any, curves: Mapping[str, Sequence[Point]], colours: Mapping[str, str]) -> None:
    for name, points in curves.items():
        axis.scatter(*zip(*points, strict=True), s=14, label=name, color=colours[name])
    values = [value for points in curves.values() for point in points for value in point]
    ends = [min(values), max(values)]
    axis.plot(ends, ends, color="0.6", lw=1, zorder=0)


# Results as JSON that every reader takes.


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return JSON as its standard has it: a number that is not finite, which it cannot say, is null.

    >>> json_text({"loss_difference": float("inf"), "rows": (1, 2.5)})
    '{"loss_difference": null, "rows": [1, 2.5]}'
    """
    return json.dumps(_sayable(value), indent=indent, allow_nan=False)


def _sayable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _sayable(item) for key, item in value.items()}
    return [_sayable(item) for item in value] if isinstance(value, list | tuple) else value


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
    # texts stand left of the numbers, beginning with what distinguishes the rows
    is_text = {key: any(isinstance(row[key], str) for row in rows) for key in keys}
    keys = sorted(keys, key=lambda key: not is_text[key])
    cells = [[_cell(row[key]) for key in keys] for row in rows]
    header = [key.replace("_", " ") for key in keys]
    return format_table(header, cells, left=sum(is_text.values()))


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
