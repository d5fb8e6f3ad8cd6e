"""A timeline as rows of bars: what each rank did, and what it held meanwhile, for any page or picture to paint.

A rank has one row: compute on track 0, sends on track 1, receives on track 2; what is on no track is idle. Memory over
time is computed: the plan's predicted bytes, with saved activations from each forward to the end of its backward in
*this* timeline.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpp_plugin.ir.plan import PipelinePlan, joined_breakdown
from gpp_plugin.ir.timeline import COMPUTE_KINDS, Event, EventKind, Timeline
from gpp_plugin.report.figure import CHAR_WIDTH, Figure, Label, Polygon, Polyline, Rectangle, Shape
from gpp_plugin.report.units import IN_LOGS, LABEL_WIDTH, format_bytes, format_ms, format_table, shorten_name
from gpp_plugin.simulate.timeline_metrics import (
    STRAGGLES,
    RankTime,
    StageMemory,
    Steps,
    joined_spans,
    memory_over_time,
)

# Figures drawn from a timeline: idle time, what each rank did, which stages ran at the same time.


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSummary:
    """What one mini-batch's timeline comes to.

    Args:
        bubble_ratio: idle share of all ranks over the span of compute.
        busy_us: rank -> microseconds it computed; ``communication_us`` it spent in messages and reductions.
    """

    source: str
    iteration_us: float
    bubble_ratio: float
    busy_us: dict[int, float]
    communication_us: dict[int, float]
    bytes_sent: int


def summarize_timeline(timeline: Timeline) -> TimelineSummary:
    """Return the figures of a timeline."""
    communication: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in (EventKind.SEND, EventKind.RECEIVE, EventKind.REDUCE):
            communication[event.rank] += event.end_us - event.start_us
    return TimelineSummary(
        source=timeline.source,
        iteration_us=timeline.iteration_us,
        bubble_ratio=timeline.bubble_ratio(),
        busy_us=dict(sorted(timeline.busy_us().items())),
        communication_us=dict(sorted(communication.items())),
        bytes_sent=sum(event.bytes for event in timeline.events if event.kind is EventKind.SEND),
    )


def forward_overlap_us(timeline: Timeline, stages: Sequence[int]) -> float:
    """Return the microseconds in which every one of ``stages`` was in some forward."""
    return _common_us([_forwards(timeline, stage) for stage in stages])


def forward_overlaps_us(timeline: Timeline, stages: Sequence[int]) -> dict[int, float]:
    """Return micro-batch -> microseconds in which all ``stages`` were in that micro-batch's forward."""
    numbers = {event.micro_batch for stage in stages for event in _forwards(timeline, stage)}
    return {
        number: _common_us([_forwards(timeline, stage, number) for stage in stages])
        for number in sorted(numbers)
    }


def _forwards(timeline: Timeline, stage: int, micro_batch: int | None = None) -> list[Event]:
    return [
        event
        for event in timeline.events
        if event.kind is EventKind.FORWARD
        and event.stage == stage
        and (micro_batch is None or event.micro_batch == micro_batch)
    ]


def _common_us(groups: Sequence[Iterable[Event]]) -> float:
    # ``groups``: by stage, its forwards on all its ranks. A stage runs while any of its ranks does (their union); of
    # [0, 200] and [50, 150] 100 us are common.
    first, *others = (joined_spans((event.start_us, event.end_us) for event in events) for events in groups)
    common = list(first)
    for spans in others:
        common = [(max(a, c), min(b, d)) for a, b in common for c, d in spans if max(a, c) < min(b, d)]
    return sum(end - start for start, end in common)


# Where the time of a step goes on each rank, and what its messages carry: tables of what ranks noted meanwhile.

PHASE_OF = {
    EventKind.FORWARD: "forward",
    EventKind.BACKWARD: "backward",
    EventKind.INPUT_GRADIENT: "backward",
    EventKind.WEIGHT_GRADIENT: "backward",
    EventKind.RECEIVE: "waiting",
    EventKind.SEND: "sending",
    EventKind.GATHER: "gather",
    EventKind.REDUCE: "reduce",
    EventKind.STEP: "step",
}
"""Kind of event -> the phase it belongs to; what is in none (loading, the host's own work) is ``other``."""
PHASES = (*dict.fromkeys(PHASE_OF.values()), "other")
MOST_RANKS = 32
"""Rows of a table of ranks; of more, those that compute least and most."""


@dataclass(slots=True)
class PhaseTimes:
    """One rank's microseconds by phase, and its messages, added up over steps.

    Args:
        messages: (edge of the plan, or -1 for reductions; kind) -> how many, bytes, microseconds.
    """

    steps: int = 0
    total_us: float = 0.0
    by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    messages: dict[tuple[int, str], tuple[int, int, float]] = field(default_factory=dict)

    def add(self, events: Iterable[Event], total_us: float) -> None:
        """Add one step of this rank's events.

        Args:
            total_us: how long the whole step took.
        """
        known = 0.0
        for event in events:
            took = event.end_us - event.start_us
            self.by_phase[PHASE_OF[event.kind]] += took
            known += took
            if event.kind in (EventKind.SEND, EventKind.RECEIVE, EventKind.REDUCE):
                key = (event.edge, event.kind.value)
                count, size, us = self.messages.get(key, (0, 0, 0.0))
                self.messages[key] = (count + 1, size + event.bytes, us + took)
        self.by_phase["other"] += max(total_us - known, 0.0)
        self.total_us += total_us
        self.steps += 1

    def a_step(self) -> dict[str, float]:
        """Return microseconds by phase of the mean step."""
        return {phase: us / max(self.steps, 1) for phase, us in self.by_phase.items()}


def mean_phases(ranks: Sequence[PhaseTimes]) -> dict[str, float]:
    """Return microseconds by phase of the mean step of the mean rank."""
    steps = [rank.a_step() for rank in ranks]
    return {phase: sum(step[phase] for step in steps) / len(steps) for phase in PHASES}


def format_phases(ranks: Mapping[int, PhaseTimes], plan: PipelinePlan) -> str:
    """Return the table of ranks and phases, milliseconds a step.

    >>> from gpp_plugin.ir.plan import PipelinePlan, Stage
    >>> stage = Stage(name="loss", blocks=("a",), ranks=(0,), micro_batch_size=2, in_flight=1)
    >>> plan = PipelinePlan(
    ...     model="m", graph="", planner="", mini_batch=4, loss_unit=2, stages=(stage,), edges=()
    ... )
    >>> times = PhaseTimes()
    >>> times.add([Event(rank=0, stage=0, kind=EventKind.FORWARD, start_us=0.0, end_us=1500.0)], 2000.0)
    >>> print(format_phases({0: times}, plan))
    rank  stage  forward  backward  waiting  sending  gather  reduce   step  other  total ms
    0     loss      1.50     0.000    0.000    0.000   0.000   0.000  0.000  0.500      2.00
    """
    shown = sorted(ranks)
    left_out = ""
    if len(shown) > MOST_RANKS:
        phases = {rank: ranks[rank].by_phase for rank in shown}
        busiest = sorted(shown, key=lambda rank: -(phases[rank]["forward"] + phases[rank]["backward"]))
        shown = sorted([*busiest[: MOST_RANKS // 2], *busiest[-MOST_RANKS // 2 :]])
        left_out = f"\n{len(ranks) - MOST_RANKS} ranks that compute neither least nor most are left out"
    rows = []
    for rank in shown:
        step = ranks[rank].a_step()
        total = ranks[rank].total_us / max(ranks[rank].steps, 1)
        rows.append(
            [
                str(rank),
                shorten_name(plan.names_on_rank(rank)),
                *(format_ms(step[phase]) for phase in PHASES),
                format_ms(total),
            ]
        )
    return format_table(["rank", "stage", *PHASES, "total ms"], rows, left=2, width=IN_LOGS) + left_out


def describe_rank_time(time: RankTime) -> str:
    """Return a rank's time and what makes it a straggler, in words.

    >>> describe_rank_time(RankTime(us=48e3, planned_us=20e3, over_plan=1.4, over_replicas=1.6))
    "48.0 ms a step, 1.40 times the plan's beside other stages, 1.60 times its replicas'"
    """
    parts = [f"{format_ms(time.us)} ms a step"]
    if time.over_plan > STRAGGLES:
        parts.append(f"{time.over_plan:.2f} times the plan's beside other stages")
    if time.over_replicas > STRAGGLES:
        parts.append(f"{time.over_replicas:.2f} times its replicas'")
    return ", ".join(parts)


RANK_TIMES = ["rank", "stage", "tasks ms", "planned ms", "over the plan", "over replicas", ""]
"""The header of `rank_time_rows`."""


def rank_time_rows(times: Mapping[int, RankTime], plan: PipelinePlan) -> list[list[str]]:
    """Return a row a rank: what its tasks took in a step, beside the plan's time and its replicas', and who is slow."""
    return [
        [
            str(rank),
            shorten_name(plan.names_on_rank(rank)),
            format_ms(time.us),
            format_ms(time.planned_us) if time.planned_us else "-",
            f"{time.over_plan:.2f}" if time.over_plan else "-",
            f"{time.over_replicas:.2f}" if time.over_replicas else "-",
            "slow" if time.slowness > STRAGGLES else "",
        ]
        for rank, time in sorted(times.items())
    ]


def format_messages(ranks: Mapping[int, PhaseTimes], plan: PipelinePlan) -> str:
    """Return the table of what was sent along each edge and reduced within stages, of all ranks, a step."""
    steps = max((times.steps for times in ranks.values()), default=0) or 1
    sums: dict[tuple[int, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for times in ranks.values():
        for key, (count, size, us) in times.messages.items():
            before = sums[key]
            sums[key] = (before[0] + count, before[1] + size, before[2] + us)
    rows = []
    for (edge, kind), (count, size, us) in sorted(sums.items()):
        name = plan.edge_name(edge) if edge >= 0 else "gradients within stages"
        rows.append(
            [
                name,
                kind,
                f"{count / steps:.0f}",
                format_bytes(size / steps),
                format_bytes(size / count),
                format_ms(us / steps),
                format_ms(us / count),
            ]
        )
    header = ["messages", "what", "a step", "bytes a step", "each", "ms a step", "ms each"]
    return format_table(header, rows, left=2, width=IN_LOGS)


# A timeline as a Gantt picture in text: one row per rank, time from left to right; a rank of
# several stages has a row for each of them.
#
# A digit is the forward of a micro-batch (its last digit) or half of one, a letter the backward (a is
# micro-batch 0); of a split backward the letter is the input gradient and a capital the weight gradient.
# ``=`` is a reduction, ``#`` the optimizer step, ``.`` idle; messages are not drawn.
#
#     rank 0 vision_model  0123....abcd==#  80 %
#     rank 1 text_model    0123....abcd==#  80 %
#     rank 2 loss          ..00aa.......=#  40 %

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
    summary = summarize_timeline(timeline)
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
    letter = _LETTERS[event.micro_batch % len(_LETTERS)]
    marks = {EventKind.GATHER: "+", EventKind.REDUCE: "=", EventKind.STEP: "#"}
    marks |= {EventKind.FORWARD: str(event.micro_batch % 10), EventKind.WEIGHT_GRADIENT: letter.upper()}
    marks |= dict.fromkeys((EventKind.BACKWARD, EventKind.INPUT_GRADIENT), letter)
    return marks.get(event.kind)


COLOURS = {
    EventKind.FORWARD: ("#4285f4", "forward"),
    EventKind.BACKWARD: ("#2e9e5b", "backward"),
    EventKind.INPUT_GRADIENT: ("#12796f", "input gradient"),
    EventKind.WEIGHT_GRADIENT: ("#9ccc65", "weight gradient"),
    EventKind.SEND: ("#f29900", "send"),
    EventKind.RECEIVE: ("#f6c667", "receive"),
    EventKind.GATHER: ("#c2185b", "gather weights"),
    EventKind.REDUCE: ("#8e5bd0", "reduce"),
    EventKind.STEP: ("#455a64", "optimizer step"),
}
"""Of every kind of event: its colour and what it is called in legends."""
IDLE_COLOUR, MEMORY_COLOUR, LIMIT_COLOUR = "#e4e7eb", "#90b4e8", "#d93025"
TRACKS = {EventKind.SEND: 1, EventKind.RECEIVE: 2}
RANK_LABEL_WIDTH = 34
"""Columns of a row's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRow:
    """One rank: its events in order of time, and the steps of its memory (empty where the plan predicts none).

    Args:
        limit_bytes: what the plan may use of the rank; 0 where that is not known.
    """

    rank: int
    label: str
    events: tuple[Event, ...]
    memory: Steps
    limit_bytes: int

    @property
    def held(self) -> str:
        """Return the most the rank holds, and its limit, where there is one."""
        limit = f" of {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        return f"rank {self.rank}: {format_bytes(self.peak_bytes)}{limit}"

    @property
    def peak_bytes(self) -> float:
        """Return the most the rank holds."""
        return max((held for _, held in self.memory), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """A timeline's rows by rank; times count from ``start_us``."""

    title: str
    start_us: float
    duration_us: float
    rows: tuple[ChartRow, ...]

    @property
    def has_memory(self) -> bool:
        """Return whether memory over time is known."""
        return any(row.memory for row in self.rows)


def chart_timeline(timeline: Timeline, plan: PipelinePlan, *, title: str) -> TimelineChart:
    """Return the rows of a timeline of ``plan``."""
    memory = memory_over_time(plan, timeline, _stage_memory(plan)) if plan.memory else {}
    rows = []
    for rank in sorted({event.rank for event in timeline.events}):
        stages = plan.stages_of_rank(rank)
        names = ", ".join(f"{stage} {plan.stages[stage].forward_label}" for stage in stages)
        events = sorted((e for e in timeline.events if e.rank == rank), key=lambda e: (e.start_us, e.end_us))
        limit = joined_breakdown([plan.memory[stage] for stage in stages]).limit if plan.memory else 0
        rows.append(
            ChartRow(
                rank=rank,
                label=shorten_name(f"rank {rank}: {names}", RANK_LABEL_WIDTH),
                events=tuple(events),
                memory=memory.get(rank, ()),
                limit_bytes=limit,
            )
        )
    return TimelineChart(
        title=title,
        start_us=min((event.start_us for event in timeline.events), default=0.0),
        duration_us=timeline.iteration_us,
        rows=tuple(rows),
    )


def _stage_memory(plan: PipelinePlan) -> list[StageMemory]:
    # A breakdown's activations are those of all micro-batches in flight: each holds its part from forward to backward.
    # What a block needs in passing is there while a task runs, and so is the rest of gathered weights.
    static = ("weights", "stashed_weights", "gradients", "optimizer", "inputs", "working")
    return [
        StageMemory(
            static_bytes=sum(getattr(part, name) for name in static),
            saved_bytes_fixed=part.activations / max(stage.in_flight, 1),
            transient_bytes_per_sample=(part.transient + part.gathered) / max(stage.local_batch_size, 1),
        )
        for part, stage in zip(plan.memory, plan.stages, strict=True)
    ]


def event_text(event: Event, plan: PipelinePlan) -> str:
    """Return what an event is, for a reader who points at it.

    >>> from gpp_plugin.ir.plan import PipelinePlan, Stage
    >>> stage = Stage(name="loss", blocks=("a",), ranks=(0,), micro_batch_size=2, in_flight=1)
    >>> plan = PipelinePlan(
    ...     model="m", graph="", planner="", mini_batch=4, loss_unit=2, stages=(stage,), edges=()
    ... )
    >>> event = Event(rank=0, stage=0, kind=EventKind.FORWARD, micro_batch=1, start_us=0.0, end_us=1500.0)
    >>> event_text(event, plan)
    '0F1 forward of loss, micro-batch 1 of 2 samples, 1.50 ms'
    """
    name, stage = COLOURS[event.kind][1], plan.stages[event.stage]
    took = f"{format_ms(event.end_us - event.start_us)} ms"
    if event.task is not None:
        half = f", half {event.half}" if event.half is not None else ""
        of = stage.forward_label if event.kind is EventKind.FORWARD else stage.name
        return (
            f"{event.task} {name} of {of}, micro-batch {event.micro_batch}{half} of "
            f"{stage.micro_batch_size} samples, {took}"
        )
    size = f", {format_bytes(event.bytes)}" if event.bytes else ""
    if event.edge < 0:
        return f"{name} of {stage.name}{size}, {took}"
    other = f" with rank {event.peer}" if event.peer >= 0 else ""
    return f"{name} on {plan.edge_name(event.edge)}{other}, micro-batch {event.micro_batch}{size}, {took}"


WIDTH = 1200.0
LEFT = RANK_LABEL_WIDTH * CHAR_WIDTH + 16
HEAD = 42.0
ROW, MESSAGE, SPACE = 14.0, 4.0, 3.0
"""Pixels of a row's compute, of each of its two message tracks, and between rows."""


def draw_timeline(chart: TimelineChart, plan: PipelinePlan, *, span_us: float = 0.0) -> Figure:
    """Return a timeline as a figure: a row a rank, with a legend above.

    Args:
        span_us: what the width stands for, so that several figures have one scale; 0: the timeline's own duration.
    """
    scale = (WIDTH - LEFT - 8) / (span_us or chart.duration_us or 1.0)
    height = ROW + 2 * MESSAGE
    shapes: list[Shape] = [
        Label(8, 14, f"{chart.title}: {format_ms(chart.duration_us)} ms", is_bold=True),
    ]
    x = LEFT
    for colour, name in legend_of([chart]):
        shapes += [Rectangle(x, 22, 10, 10, colour), Label(x + 14, 31, name)]
        x += 28 + len(name) * CHAR_WIDTH
    for index, row in enumerate(chart.rows):
        top = HEAD + index * (height + SPACE)
        shapes.append(Label(LEFT - 8, top + ROW - 3, row.label, is_end=True))
        shapes.append(Rectangle(LEFT, top, chart.duration_us * scale, ROW, IDLE_COLOUR))
        for event in row.events:
            x = LEFT + (event.start_us - chart.start_us) * scale
            length = (event.end_us - event.start_us) * scale
            track = TRACKS.get(event.kind, 0)
            y, thick = (top, ROW) if track == 0 else (top + ROW + (track - 1) * MESSAGE, MESSAGE - 0.5)
            colour, tip = COLOURS[event.kind][0], event_text(event, plan)
            shapes.append(Rectangle(x, y, max(length, 0.3), thick, colour, tip=tip))
            text = str(event.micro_batch)
            if event.task is not None and length > len(text) * CHAR_WIDTH + 2:
                middle = x + (length - len(text) * CHAR_WIDTH) / 2
                shapes.append(Label(middle, top + ROW - 3, text, colour="#ffffff"))
    return Figure(width=WIDTH, height=HEAD + len(chart.rows) * (height + SPACE) + 8, shapes=tuple(shapes))


def legend_of(charts: Sequence[TimelineChart]) -> list[tuple[str, str]]:
    """Return the colours of what is in these charts, and their names."""
    kinds = {event.kind for chart in charts for row in chart.rows for event in row.events}
    return [*(entry for kind, entry in COLOURS.items() if kind in kinds), (IDLE_COLOUR, "idle")]


def draw_memory(chart: TimelineChart, *, span_us: float = 0.0) -> Figure:
    """Return what each rank holds over time, with its limit as a dashed line, where there is one."""
    scale = (WIDTH - LEFT - 8) / (span_us or chart.duration_us or 1.0)
    rows = [row for row in chart.rows if row.memory]
    title = f"{chart.title}: memory over time, computed from the plan"
    shapes: list[Shape] = [Label(8, 14, title, is_bold=True)]
    height, pitch = ROW + 2 * MESSAGE, ROW + 2 * MESSAGE + SPACE
    # the bytes that a row's full height stands for: the largest peak or limit of all rows
    most = max([1.0, *(bytes_ for row in rows for bytes_ in (row.peak_bytes, float(row.limit_bytes)))])
    for index, row in enumerate(rows):
        bottom = HEAD + index * pitch + height
        shapes.append(Label(LEFT - 8, bottom - 8, row.held, is_end=True))
        points = [(LEFT, bottom)]
        held = 0.0
        for time, value in row.memory:
            x = LEFT + max(time - chart.start_us, 0.0) * scale
            points += [(x, bottom - height * held / most), (x, bottom - height * value / most)]
            held = value
        end = LEFT + chart.duration_us * scale
        points += [(end, bottom - height * held / most), (end, bottom)]
        shapes.append(Polygon(tuple(points), MEMORY_COLOUR))
        if row.limit_bytes:
            y = bottom - height * row.limit_bytes / most
            shapes.append(Polyline(((LEFT, y), (end, y)), LIMIT_COLOUR, is_dashed=True))
    return Figure(width=WIDTH, height=HEAD + len(rows) * pitch + 8, shapes=tuple(shapes))
