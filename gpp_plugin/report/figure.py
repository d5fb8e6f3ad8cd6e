"""Figures made of rectangles, lines and text, and the two ways to write them: SVG, and PNG by Pillow.

What a picture shows is laid out once, by who makes the `Figure`; a writer only paints its shapes in their order.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from gpp_plugin.errors import GppError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.report.picture import GraphLayout, lay_out_graph
from gpp_plugin.report.plan_text import format_ranks
from gpp_plugin.report.units import format_bytes, format_ms, shorten_name

FONT_SIZE = 11
CHAR_WIDTH = 6.6
"""Pixels a character of `FONT_SIZE` takes in the fixed-width font of figures."""
PNG_SCALE = 2
"""Pixels of a PNG for one of the figure, so that small text is readable; 1 where that would be too many."""
STACK_GAP = 24.0
MOST_PIXELS = 50_000_000
"""Of a PNG: what many viewers still open."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled rectangle, with a frame where ``frame`` is a colour."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    frame: str = ""
    tip: str = ""
    """What a browser shows where the mouse stands on it."""


@dataclass(frozen=True, slots=True)
class Polyline:
    """A line through points; ``has_head`` ends it with an arrow head that points down."""

    points: tuple[Point, ...]
    colour: str
    is_dashed: bool = False
    has_head: bool = False


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled area."""

    points: tuple[Point, ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose base line begins, or with ``is_end`` ends, at a point."""

    x: float
    y: float
    text: str
    colour: str = "#1d2733"
    is_end: bool = False
    is_bold: bool = False


Shape = Rectangle | Polyline | Polygon | Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Shapes on a white ground, painted in their order; pixels count from the upper left corner."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def stack_figures(figures: Sequence[Figure]) -> Figure:
    """Return figures one below the other as one."""
    shapes: list[Shape] = []
    top = 0.0
    for figure in figures:
        shapes += [_moved(shape, top) for shape in figure.shapes]
        top += figure.height + STACK_GAP
    width = max((figure.width for figure in figures), default=0.0)
    return Figure(width=width, height=max(top - STACK_GAP, 0.0), shapes=tuple(shapes))


def _moved(shape: Shape, down: float) -> Shape:
    if isinstance(shape, Rectangle | Label):
        return dataclasses.replace(shape, y=shape.y + down)
    return dataclasses.replace(shape, points=tuple((x, y + down) for x, y in shape.points))


def figure_svg(figure: Figure) -> str:
    """Return the figure as an SVG element; names in it are escaped."""
    size = f'width="{figure.width:.0f}" height="{figure.height:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {figure.width:.0f} {figure.height:.0f}" '
        f'font-family="monospace" font-size="{FONT_SIZE}">'
    )
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *map(_svg, figure.shapes), "</svg>"])


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rectangle):
        frame = f" stroke={quoteattr(shape.frame)}" if shape.frame else ""
        ends = f"><title>{_text(shape.tip)}</title></rect>" if shape.tip else "/>"
        return (
            f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}" '
            f"fill={quoteattr(shape.fill)}{frame}{ends}"
        )
    if isinstance(shape, Label):
        anchor = ' text-anchor="end"' if shape.is_end else ""
        weight = ' font-weight="bold"' if shape.is_bold else ""
        return (
            f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" fill={quoteattr(shape.colour)}{anchor}{weight} '
            f'xml:space="preserve">{_text(shape.text)}</text>'
        )
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
    if isinstance(shape, Polygon):
        return f'<polygon points="{points}" fill={quoteattr(shape.fill)}/>'
    dashes = ' stroke-dasharray="4 3"' if shape.is_dashed else ""
    line = f'<polyline points="{points}" fill="none" stroke={quoteattr(shape.colour)}{dashes}/>'
    return line + (_svg(_head(shape)) if shape.has_head else "")


def _text(text: str) -> str:
    # control characters are no part of XML, whatever is done to escape them
    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def _head(line: Polyline) -> Polygon:
    x, y = line.points[-1]
    return Polygon(((x - 4, y - 7), (x + 4, y - 7), (x, y)), line.colour)


def figure_png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file.

    Raises:
        GppError: Pillow is not installed, or the picture would be too large to open.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise GppError(
            "PNG pictures need Pillow; pip install 'gpp_plugin[report]', or write SVG, which needs nothing"
        ) from error
    is_large = figure.width * figure.height * PNG_SCALE**2 > MOST_PIXELS
    scale = 1 if is_large else PNG_SCALE
    size = (round(figure.width * scale), round(figure.height * scale))
    if size[0] * size[1] > MOST_PIXELS:
        pixels = f"{size[0]} x {size[1]} pixels"
        raise GppError(f"a PNG of {pixels} is too large to open; write SVG or HTML instead")
    image = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE * scale)
    for shape in figure.shapes:
        _paint(draw, font, shape, scale)
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def _paint(draw: Any, font: Any, shape: Shape, scale: int) -> None:
    if isinstance(shape, Rectangle):
        left, top = shape.x * scale, shape.y * scale
        right, bottom = left + max(shape.width * scale - 1, 0), top + max(shape.height * scale - 1, 0)
        draw.rectangle((left, top, right, bottom), fill=shape.fill, outline=shape.frame or None)
    elif isinstance(shape, Label):
        anchor = "rs" if shape.is_end else "ls"
        draw.text((shape.x * scale, shape.y * scale), shape.text, fill=shape.colour, font=font, anchor=anchor)
    elif isinstance(shape, Polygon):
        draw.polygon([(x * scale, y * scale) for x, y in shape.points], fill=shape.fill)
    else:
        for (x0, y0), (x1, y1) in zip(shape.points, shape.points[1:], strict=False):
            for a, b in _dashes((x0, y0), (x1, y1)) if shape.is_dashed else [((x0, y0), (x1, y1))]:
                draw.line([(x * scale, y * scale) for x, y in (a, b)], fill=shape.colour, width=scale)
        if shape.has_head:
            _paint(draw, font, _head(shape), scale)


def _dashes(start: Point, end: Point) -> list[tuple[Point, Point]]:
    """Return the pieces of a dashed line: 4 pixels each, with gaps of 3."""
    (x0, y0), (x1, y1) = start, end
    length = max(abs(x1 - x0), abs(y1 - y0), 1e-9)

    def at(share: float) -> Point:
        return x0 + share * (x1 - x0), y0 + share * (y1 - y0)

    begins = range(0, int(length) + 1, 7)
    return [(at(begin / length), at(min((begin + 4) / length, 1.0))) for begin in begins]


# The stage graph as a figure: boxes by level, edges with the bytes of a micro-batch.

MARGIN = 12.0
LINE_HEIGHT = 15.0
GAP = 46.0
"""Pixels between two levels, where edges and their labels are."""
STRAIGHT = 18.0
LEAST_HEAD_GAP = 3.0
"""Columns between the heads of two arrows, at least: nearer ones look like one."""
BOX_COLOUR, FRAME_COLOUR, LOSS_COLOUR, EDGE_COLOUR = "#e8f0fe", "#5b7aa8", "#fde8d7", "#5f6b7a"


def draw_stage_graph(plan: PipelinePlan) -> Figure:
    """Return the picture of the stages: ranks, micro-batches, times and memory in the boxes.

    An edge shows the forward bytes of one micro-batch, and how many micro-batches a mini-batch has.
    """
    # Columns are the text picture's (`lay_out_graph`), a character wide; a level is as high as its highest box:
    #     x = MARGIN + column * CHAR_WIDTH        y = MARGIN + level * (box height + GAP)
    boxes = [_lines(plan, index) for index in range(len(plan.stages))]
    layout = lay_out_graph(boxes, _edge_labels(plan))
    box_height = LINE_HEIGHT * max(map(len, boxes), default=0) + 8
    loss_stages = set(plan.loss_stages())
    shapes: list[Shape] = []
    ends = _spread_ends(layout)
    for number, placed in enumerate(layout.edges):
        source, target = layout.boxes[placed.src], layout.boxes[placed.dst]
        points = []
        for step, column in enumerate(placed.columns):
            level = source.level + step
            top = _top(level, box_height)
            # leaves straight, with its label beside it, before it turns to the side
            below = top + box_height
            if not step:
                points += [(_x(column), below), (_x(column), below + STRAIGHT)]
            else:
                points.append((_x(ends[number] if level == target.level else column), top))
            if step and level < target.level:
                points.append((_x(column), below))
        shapes.append(Polyline(tuple(points), EDGE_COLOUR, has_head=True))
        if placed.label:
            shapes.append(Label(points[0][0] + 5, points[0][1] + LINE_HEIGHT - 2, placed.label, EDGE_COLOUR))
    for index, box in enumerate(layout.boxes):
        top, colour = _top(box.level, box_height), LOSS_COLOUR if index in loss_stages else BOX_COLOUR
        width = box.width * CHAR_WIDTH
        shapes.append(Rectangle(_x(box.left), top, width, box_height, colour, frame=FRAME_COLOUR))
        for row, line in enumerate(box.lines):
            shapes.append(Label(_x(box.left + 1), top + LINE_HEIGHT * (row + 1), line, is_bold=row == 0))
    levels = max((box.level for box in layout.boxes), default=-1) + 1
    height = 2 * MARGIN + levels * (box_height + GAP) - GAP if layout.boxes else 2 * MARGIN
    return Figure(width=2 * MARGIN + (layout.width + 1) * CHAR_WIDTH, height=height, shapes=tuple(shapes))


def _spread_ends(layout: GraphLayout) -> list[float]:
    """Return, of each edge, the column in which it enters its target: its own, or spread where two are too near."""
    # Edges that end in columns 10, 11 and 20 of a box from 8 to 24 enter it in 12, 16 and 20, a quarter of 16 each.
    ends = [float(edge.columns[-1]) for edge in layout.edges]
    for index, box in enumerate(layout.boxes):
        into = [number for number, edge in enumerate(layout.edges) if edge.dst == index]
        into.sort(key=lambda number: ends[number])
        gaps = [ends[right] - ends[left] for left, right in itertools.pairwise(into)]
        if gaps and min(gaps) < LEAST_HEAD_GAP:
            for place, number in enumerate(into, start=1):
                ends[number] = box.left + box.width * place / (len(into) + 1)
    return ends


def _x(column: float) -> float:
    return MARGIN + column * CHAR_WIDTH


def _top(level: int, box_height: float) -> float:
    return MARGIN + level * (box_height + GAP)


def _lines(plan: PipelinePlan, index: int) -> list[str]:
    stage = plan.stages[index]
    count = plan.num_micro_batches(index)
    lines = [
        f"{index} {shorten_name(stage.name)}",
        format_ranks(stage),
        f"{count} micro-batches of {stage.micro_batch_size}, {stage.in_flight} in flight",
    ]
    if stage.forward_us or stage.backward_us:
        lines.append(f"{format_ms(stage.forward_us)} ms forward, {format_ms(stage.backward_us)} ms back")
    if stage.runs_on:
        lines.append(f"runs on {stage.runs_on}")
    if stage.memory_bytes:
        lines.append(f"{format_bytes(stage.memory_bytes)} a rank")
    return lines


def _edge_labels(plan: PipelinePlan) -> dict[tuple[int, int], str]:
    # rows are sent with the producer's micro-batches, the rest with each of the consumer's: "512 B x 4 + 8 B x 2"
    rows: dict[tuple[int, int], float] = defaultdict(float)
    whole: dict[tuple[int, int], float] = defaultdict(float)
    for edge in plan.edges:
        rows[edge.src, edge.dst] += edge.bytes_per_sample * plan.stages[edge.src].micro_batch_size
        whole[edge.src, edge.dst] += edge.bytes_fixed
    labels = {}
    for src, dst in rows:
        parts = [
            f"{format_bytes(size)} x {plan.num_micro_batches(stage)}"
            for size, stage in ((rows[src, dst], src), (whole[src, dst], dst))
            if size
        ]
        labels[src, dst] = " + ".join(parts)
    return labels
