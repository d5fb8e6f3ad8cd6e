"""A timeline as a Gantt picture in text: one row per rank, time from left to right; a rank of
several stages has a row for each of them.

A digit is the forward of a micro-batch (its last digit) or half of one, a letter the backward (a is
micro-batch 0); of a split backward the letter is the input gradient and a capital the weight gradient.
``=`` is a reduction, ``#`` the optimizer step, ``.`` idle; messages are not drawn.

    rank 0 vision_model  0123....abcd==#  80 %
    rank 1 text_model    0123....abcd==#  80 %
    rank 2 loss          ..00aa.......=#  40 %
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import COMPUTE_KINDS, Event, EventKind, Timeline
from gpp_plugin.report.summary import summarize_timeline
from gpp_plugin.report.units import LABEL_WIDTH, format_bytes, format_ms, shorten_name

LEGEND = "digit: forward of that micro-batch, letter: backward (a is 0), = reduce, # step, . idle"
SPLIT_LEGEND = "where a backward is split: letter: input gradient, capital: weight gradient"
GATHER_LEGEND = "+ weights are gathered (ZeRO 3)"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def format_timeline(
    timeline: Timeline, plan: PipelinePlan, *, width: int = 96, screen: int | None = None
) -> str:
    """Return the Gantt picture with each row's busy share, and a line of totals.

    Args:
        width: columns of the time axis; a column shows what took most of its time.
        screen: columns of everything; names of stages and the time axis share them, and ``width`` is no matter.
    """
    if not timeline.events:
        return "the timeline holds no events"
    summary = summarize_timeline(timeline, plan)
    # one scale for all ranks, so that what stands in one column happened at the same time
    start = min(event.start_us for event in timeline.events)
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timeline.events:
        rows[event.rank, event.stage].append(event)
    # on 60 columns a name has at most 15 of them: "rank 12 vision_m…loss  0011aabb..  93 %"
    most = LABEL_WIDTH if screen is None else min(LABEL_WIDTH, max(screen // 4, 8))
    labels = {
        (rank, stage): f"rank {rank} {shorten_name(plan.stages[stage].forward_label, most)}"
        for rank, stage in rows
    }
    label_width = max(map(len, labels.values()))
    if screen is not None:
        width = max(screen - label_width - len("    100 %"), 10)
    column_us = timeline.iteration_us / width or 1.0
    lines = [
        f"{timeline.source}: {format_ms(summary.iteration_us)} ms, bubble {100 * summary.bubble_ratio:.0f} %, "
        f"{format_bytes(summary.bytes_sent)} sent; one column is {format_ms(column_us)} ms"
    ]
    for row, events in sorted(rows.items()):
        drawn = _draw_row(events, start, column_us, width)
        busy = sum(event.end_us - event.start_us for event in events if event.kind in COMPUTE_KINDS)
        share = busy / summary.iteration_us if summary.iteration_us else 0.0
        lines.append(f"{labels[row]:<{label_width}}  {drawn}  {100 * share:3.0f} %")
    is_split = any(event.kind is EventKind.WEIGHT_GRADIENT for event in timeline.events)
    gathers = any(event.kind is EventKind.GATHER for event in timeline.events)
    legends = [LEGEND, *([SPLIT_LEGEND] if is_split else []), *([GATHER_LEGEND] if gathers else [])]
    if screen is not None:
        lines[0] = textwrap.fill(lines[0], screen)
        legends = [textwrap.fill(legend, screen) for legend in legends]
    return "\n".join([*lines, *legends])


def _draw_row(events: list[Event], start_us: float, column_us: float, width: int) -> str:
    # By column, what covered most of it so far: an event from column 2.3 to 4.1 covers 0.7 of column 2, all of 3 and
    # 0.1 of 4. Short tasks beside a long one may not show; the busy share at the end of the row counts them.
    longest = [0.0] * width
    row = ["."] * width
    for event in events:
        mark = _mark(event)
        if mark is None:
            continue
        low, high = (event.start_us - start_us) / column_us, (event.end_us - start_us) / column_us
        for column in range(int(low), min(math.ceil(high), width)):
            covered = min(high, column + 1) - max(low, column)
            if covered > longest[column]:
                longest[column] = covered
                row[column] = mark
    return "".join(row)


def _mark(event: Event) -> str | None:
    if event.kind is EventKind.FORWARD:
        return str(event.micro_batch % 10)
    if event.kind in (EventKind.BACKWARD, EventKind.INPUT_GRADIENT):
        return _LETTERS[event.micro_batch % len(_LETTERS)]
    if event.kind is EventKind.WEIGHT_GRADIENT:
        return _LETTERS[event.micro_batch % len(_LETTERS)].upper()
    return {EventKind.GATHER: "+", EventKind.REDUCE: "=", EventKind.STEP: "#"}.get(event.kind)
