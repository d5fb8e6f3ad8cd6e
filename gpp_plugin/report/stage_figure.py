"""The stage graph as a figure: boxes by level, edges with the bytes of a micro-batch."""

from __future__ import annotations

import itertools
from collections import defaultdict

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.report.figure import CHAR_WIDTH, Figure, Label, Polyline, Rectangle, Shape
from gpp_plugin.report.picture import GraphLayout, PlacedBox, lay_out_graph
from gpp_plugin.report.plan_text import format_ranks
from gpp_plugin.report.units import format_bytes, format_ms, shorten_name

MARGIN = 12.0
LINE_HEIGHT = 15.0
GAP = 46.0
"""Pixels between two levels, where edges and their labels are."""
STRAIGHT = 18.0
HEADS_APART = 3.0
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
        shapes += _box(box, box_height, LOSS_COLOUR if index in loss_stages else BOX_COLOUR)
    height = 2 * MARGIN + layout.num_levels * (box_height + GAP) - GAP if layout.boxes else 2 * MARGIN
    return Figure(width=2 * MARGIN + (layout.width + 1) * CHAR_WIDTH, height=height, shapes=tuple(shapes))


def _spread_ends(layout: GraphLayout) -> list[float]:
    """Return, of each edge, the column in which it meets its target: its own, or shared out where two are too near."""
    # Edges that end in columns 10, 11 and 20 of a box from 8 to 24 meet it in 12, 16 and 20: a quarter of 16 apart.
    ends = [float(edge.columns[-1]) for edge in layout.edges]
    for index, box in enumerate(layout.boxes):
        into = sorted(
            (number for number, edge in enumerate(layout.edges) if edge.dst == index), key=lambda n: ends[n]
        )
        gaps = [ends[right] - ends[left] for left, right in itertools.pairwise(into)]
        if gaps and min(gaps) < HEADS_APART:
            for place, number in enumerate(into, start=1):
                ends[number] = box.left + box.width * place / (len(into) + 1)
    return ends


def _x(column: float) -> float:
    return MARGIN + column * CHAR_WIDTH


def _top(level: int, box_height: float) -> float:
    return MARGIN + level * (box_height + GAP)


def _box(box: PlacedBox, height: float, colour: str) -> list[Shape]:
    top = _top(box.level, height)
    shapes: list[Shape] = [
        Rectangle(_x(box.left), top, box.width * CHAR_WIDTH, height, colour, frame=FRAME_COLOUR)
    ]
    for row, line in enumerate(box.lines):
        shapes.append(Label(_x(box.left + 1), top + LINE_HEIGHT * (row + 1), line, is_bold=row == 0))
    return shapes


def _lines(plan: PipelinePlan, index: int) -> list[str]:
    stage = plan.stages[index]
    lines = [f"{index} {shorten_name(stage.name)}", format_ranks(stage)]
    lines.append(
        f"{plan.num_micro_batches(index)} micro-batches of {stage.micro_batch_size}, {stage.in_flight} in flight"
    )
    if stage.forward_us or stage.backward_us:
        lines.append(f"{format_ms(stage.forward_us)} ms forward, {format_ms(stage.backward_us)} ms back")
    if stage.runs_on:
        lines.append(f"runs on {stage.runs_on}")
    if stage.memory_bytes:
        lines.append(f"{format_bytes(stage.memory_bytes)} a rank")
    return lines


def _edge_labels(plan: PipelinePlan) -> dict[tuple[int, int], str]:
    # rows go with the producer's micro-batches, what has no rows with each of the consumer's: "512 B x 4 + 8 B x 2"
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
