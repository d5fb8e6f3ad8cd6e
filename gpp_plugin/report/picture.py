"""Draws a layered directed graph as boxes and lines of text.

Boxes of one level stand side by side, edges run downwards. An edge that skips levels runs through a
column of its own in each level it passes (a layered drawing after Sugiyama, Tagawa and Toda, 1981,
without its crossing search: levels are ordered once by the mean position of their predecessors). Every
edge has its own column where it leaves and where it enters, so lines never merge: ``┼`` is a crossing.

    ┌────────────────┐   ┌──────────────┐
    │ 0 vision_model │   │ 1 text_model │
    └─────┬──────────┘   └────┬─────────┘
          │ 2 KiB             │ 2 KiB
          └─────────┐   ┌─────┘
                    ▼   ▼
                 ┌────────┐
                 │ 2 loss │
                 └────────┘
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GAP = 3
UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
GLYPH = {
    UP: "│", DOWN: "│", UP | DOWN: "│", LEFT: "─", RIGHT: "─", LEFT | RIGHT: "─",
    UP | RIGHT: "└", UP | LEFT: "┘", DOWN | RIGHT: "┌", DOWN | LEFT: "┐", UP | DOWN | LEFT | RIGHT: "┼",
}  # fmt: skip


@dataclass(slots=True)
class _Cell:
    """A box, or one level of an edge that passes (then without lines)."""

    node: int | None
    lines: Sequence[str] = ()
    width: int = 0
    left: int = 0
    entries: list[_Edge] = field(default_factory=list)
    exits: list[_Edge] = field(default_factory=list)
    column: int = -1
    """Column of a passing edge, known once the gap above has been drawn."""

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


@dataclass(slots=True)
class _Edge:
    """One segment of an edge, between neighbouring levels."""

    src: _Cell
    dst: _Cell
    label: str = ""
    start: int = 0
    end: int = 0
    track: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBox:
    """Where a node's box stands: its level from the top, its columns from the left, its lines of text."""

    level: int
    left: int
    width: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEdge:
    """An edge's way: the column at which it leaves its box, and one at which it enters each level after that."""

    src: int
    dst: int
    label: str
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLayout:
    """The places of a picture's boxes, by node, and of its edges; ``width`` is in columns."""

    boxes: tuple[PlacedBox, ...]
    edges: tuple[PlacedEdge, ...]
    width: int


def lay_out_graph(boxes: Sequence[Sequence[str]], edges: Mapping[tuple[int, int], str]) -> GraphLayout:
    """Return where `draw_graph` puts boxes and edges, for pictures that are not text.

    >>> layout = lay_out_graph([["a"], ["b"]], {(0, 1): "1 KiB"})
    >>> [(box.level, box.left, box.width) for box in layout.boxes], layout.edges[0].columns
    ([(0, 0, 10), (1, 2, 5)], (2, 4))
    """
    levels = _levels(boxes, edges)
    total = _place(levels)
    for level, below in itertools.pairwise(levels):
        _assign_columns(level, below)
    placed: dict[int, PlacedBox] = {}
    ways = []
    for depth, level in enumerate(levels):
        for cell in level:
            if cell.node is None:
                continue
            lines = tuple(cell.lines)
            placed[cell.node] = PlacedBox(level=depth, left=cell.left, width=cell.width, lines=lines)
            for edge in cell.exits:
                columns, last = [edge.start, edge.end], edge
                while last.dst.node is None:
                    last = last.dst.exits[0]
                    columns.append(last.end)
                way = PlacedEdge(src=cell.node, dst=last.dst.node, label=edge.label, columns=tuple(columns))
                ways.append(way)
    in_order = tuple(placed[node] for node in range(len(boxes)))
    return GraphLayout(boxes=in_order, edges=tuple(ways), width=total)


def draw_graph(boxes: Sequence[Sequence[str]], edges: Mapping[tuple[int, int], str]) -> str:
    """Return the picture of a directed acyclic graph.

    Args:
        boxes: the lines of text in each node's box; nodes in a topological order.
        edges: (source, target) -> label.
    """
    # Four steps, each with what the next one needs: levels and segments; places of cells in their level; columns at
    # which each edge leaves and enters; rows of text. Columns count from 0 at the left, levels from 0 at the top.
    levels = _levels(boxes, edges)
    total = _place(levels)
    rows: list[str] = []
    for level, below in itertools.zip_longest(levels, levels[1:]):
        if below is not None:
            _assign_columns(level, below)
        rows += _draw_level(level, total)
        segments = [edge for cell in level for edge in cell.exits]
        if segments:
            rows += _draw_gap(segments, total)
    return "\n".join(row.rstrip() for row in rows)


def _levels(boxes: Sequence[Sequence[str]], edges: Mapping[tuple[int, int], str]) -> list[list[_Cell]]:
    # A node's level is the longest way to it: of 0 -> 1 -> 2 and 0 -> 2, node 2 is on level 2, and the second edge is
    # two segments with a passing cell on level 1 between them. Its label stands at the first one.
    depth = [0] * len(boxes)
    for src, dst in sorted(edges, key=lambda edge: edge[1]):
        depth[dst] = max(depth[dst], depth[src] + 1)
    levels: list[list[_Cell]] = [[] for _ in range(max(depth, default=-1) + 1)]
    cells = [_Cell(node=index, lines=lines) for index, lines in enumerate(boxes)]
    for cell, level in zip(cells, depth, strict=True):
        levels[level].append(cell)
    for (src, dst), label in sorted(edges.items()):
        above = cells[src]
        for level in range(depth[src] + 1, depth[dst] + 1):
            below = cells[dst]
            if level < depth[dst]:
                below = _Cell(node=None)
                levels[level].append(below)
            edge = _Edge(src=above, dst=below, label=label if above is cells[src] else "")
            above.exits.append(edge)
            below.entries.append(edge)
            above = below
    return levels


def _place(levels: list[list[_Cell]]) -> int:
    """Order and place the cells of every level; return the width of the picture."""
    # Once from the top: where the cells above stand decides the order below. All levels are centred on the widest.
    for level in levels:
        level.sort(key=lambda cell: _mean([edge.src.middle for edge in cell.entries]))
        left = 0
        for cell in level:
            cell.width = _width(cell)
            cell.left = left
            left += cell.width + GAP
    total = max((level[-1].left + level[-1].width for level in levels if level), default=0)
    for level in levels:
        shift = (total - level[-1].left - level[-1].width) // 2
        for cell in level:
            cell.left += shift
    return total


def _width(cell: _Cell) -> int:
    if cell.node is None:
        return 5
    # the widest of three: the text with its frame, labels of what leaves side by side, and two columns a line that
    # enters
    text = max((len(line) for line in cell.lines), default=0) + 4
    exits = sum(_columns(edge) for edge in cell.exits) + 2
    return max(text, exits, 2 * len(cell.entries) + 3)


def _columns(edge: _Edge) -> int:
    """Return the columns an edge needs below its box: the line, and its label to the right of it."""
    return len(edge.label) + 3


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _assign_columns(level: list[_Cell], below: list[_Cell]) -> None:
    """Give every edge between two levels the column it leaves at and the one it enters at."""
    # Below a box of 30 columns, labels "2 KiB" and "4 KiB" take 8 columns each with line and space; of the 14 that are
    # left over a third goes before each and behind: lines at 5 and 18. Those that lead to the left leave on the left,
    # so that no two cross right below the box.
    taken: set[int] = set()
    for cell in level:
        cell.exits.sort(key=lambda edge: edge.dst.middle)
        if cell.node is None:
            cell.exits[0].start = cell.column
        else:
            slack = cell.width - sum(_columns(edge) for edge in cell.exits)
            left = cell.left + 1
            for index, edge in enumerate(cell.exits):
                share = slack * (index + 1) // (len(cell.exits) + 1)
                edge.start = left + share
                left += _columns(edge)
        taken |= {edge.start for edge in cell.exits}
    for cell in below:
        _assign_entries(cell, taken)


def _assign_entries(cell: _Cell, taken: set[int]) -> None:
    """Spread the columns edges enter a cell at, on none that another edge leaves at.

    Edges leave at least three columns apart, so a cell always has enough columns that are not taken.
    """
    # From left to right, each as near to its share of the width as is free, with columns left for the ones to come
    # (``most``); straight down where it comes from a column inside.
    cell.entries.sort(key=lambda edge: edge.start)
    inside = range(cell.left + 1, cell.left + cell.width - 1)
    free = [column for column in inside if column not in taken]
    last = cell.left
    for index, edge in enumerate(cell.entries):
        later = len(cell.entries) - index - 1
        most = free[len(free) - later] if later else inside.stop
        if edge.start in inside and last < edge.start < most:
            edge.end = edge.start  # straight down
        else:
            wanted = cell.left + round(cell.width * (index + 1) / (len(cell.entries) + 1))
            edge.end = min((c for c in free if last < c < most), key=lambda c: abs(c - wanted))
        last = cell.column = edge.end


def _draw_level(level: list[_Cell], total: int) -> list[str]:
    height = max(len(cell.lines) for cell in level) + 2
    canvas = [[" "] * total for _ in range(height)]
    for cell in level:
        if cell.node is None:
            for row in canvas:
                row[cell.column] = "│"
            continue
        inner = cell.width - 2
        filled = [*(f" {line}" for line in cell.lines), *[""] * (height - 2 - len(cell.lines))]
        text = (f"│{line.ljust(inner)}│" for line in filled)
        box = ["┌" + "─" * inner + "┐", *text, "└" + "─" * inner + "┘"]
        for row, line in zip(canvas, box, strict=True):
            row[cell.left : cell.left + cell.width] = line
        for edge in cell.exits:
            canvas[-1][edge.start] = "┬"
    return ["".join(row) for row in canvas]


def _draw_gap(segments: list[_Edge], total: int) -> list[str]:
    """Draw the lines between two levels: labels, one or more tracks to the side, arrow heads."""
    # ``marks``: tracks from top to bottom x columns, each the sides of a character at which a line ends, added up: DOWN
    # from above plus RIGHT is └, and all four are a crossing. An edge runs down to its track, along it, and down on.
    #     start │        track 0: └────┐  end
    num_tracks = _assign_tracks(segments)
    marks = [[0] * total for _ in range(num_tracks)]
    for edge in segments:
        if edge.track < 0:
            for row in marks:
                row[edge.start] |= UP | DOWN
            continue
        for row in marks[: edge.track]:
            row[edge.start] |= UP | DOWN
        for row in marks[edge.track + 1 :]:
            row[edge.end] |= UP | DOWN
        track = marks[edge.track]
        low, high = sorted((edge.start, edge.end))
        track[edge.start] |= UP | (RIGHT if edge.end > edge.start else LEFT)
        track[edge.end] |= DOWN | (LEFT if edge.end > edge.start else RIGHT)
        for column in range(low + 1, high):
            track[column] |= LEFT | RIGHT
    labels = [" "] * total
    heads = [" "] * total
    for edge in segments:
        text = f"│ {edge.label}" if edge.label else "│"
        labels += [" "] * (edge.start + len(text) - len(labels))
        labels[edge.start : edge.start + len(text)] = text
        heads[edge.end] = "▼" if edge.dst.node is not None else "│"
    lines = ["".join(GLYPH.get(mark, " ") if mark else " " for mark in row) for row in marks]
    return ["".join(labels), *lines, "".join(heads)]


def _assign_tracks(segments: list[_Edge]) -> int:
    """Give each edge that moves sideways the first row where its span is free; return the rows."""
    # shortest first, as they fit between others: spans (2, 5), (7, 9) share row 0, (4, 8) needs row 1
    tracks: list[list[tuple[int, int]]] = []
    for edge in sorted(segments, key=lambda edge: abs(edge.end - edge.start)):
        if edge.start == edge.end:
            edge.track = -1
            continue
        low, high = sorted((edge.start, edge.end))
        for index, spans in enumerate(tracks):
            if all(high < a or low > b for a, b in spans):
                edge.track = index
                break
        else:
            edge.track = len(tracks)
            tracks.append([])
        tracks[edge.track].append((low, high))
    return len(tracks)
