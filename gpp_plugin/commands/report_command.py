"""`gpp report`: shows plans and timelines, as text, as a page, as pictures, and as a Chrome trace.

The page is one HTML file that needs nothing else: stage graph, timelines beside each other, memory, decisions. What is
drawn comes from `figure` and `timeline_chart`, as in SVG and PNG; the page's script paints the same rows on a canvas
that can be zoomed. Every name is data: escaped in the markup, and in the script's JSON without a ``<``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from gpp_plugin.commands.command_parser import add_width, axis_of, columns_of
from gpp_plugin.errors import GppError, ReadError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import (
    MAX_BYTES,
    fingerprint,
    from_envelope,
    is_envelope,
    output_path,
    read_json,
    to_plain,
    whole_file,
    write_text_whole,
)
from gpp_plugin.ir.timeline import EVENT_OF_TASK, Event, EventKind, Timeline
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.plan.plan_form import check_events, plan_of_envelope, read_plan
from gpp_plugin.plan.request import LEFT_OUT, REJECTED
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.report.figure import Figure, draw_stage_graph, figure_png, figure_svg, stack_figures
from gpp_plugin.report.plan_text import (
    breakdown_table,
    cost_object,
    format_breakdown,
    format_cost,
    format_memory,
    format_plan,
    format_saved_in_flight,
    format_shared_ranks,
    headline,
    rank_table,
    stage_rows,
    stage_table,
)
from gpp_plugin.report.timeline_chart import (
    COLOURS,
    IDLE_COLOUR,
    LIMIT_COLOUR,
    MEMORY_COLOUR,
    RANK_TIMES,
    TRACKS,
    ChartRow,
    TimelineChart,
    chart_timeline,
    draw_memory,
    draw_timeline,
    format_timeline,
    legend_of,
    rank_time_rows,
    summarize_timeline,
)
from gpp_plugin.report.units import format_bytes, format_ms, format_table
from gpp_plugin.simulate.timeline_metrics import RankTime, times_of_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp report`."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="plans and timelines, as the other commands write them",
    )
    parser.add_argument("--plan", type=Path, help="the plan timelines belong to, where no FILE is it")
    parser.add_argument(
        "--html", type=output_path, metavar="OUT", help="also write a page that any browser shows"
    )
    parser.add_argument("--svg", type=output_path, metavar="OUT", help="also write the pictures as SVG")
    parser.add_argument("--png", type=output_path, metavar="OUT", help="also write the pictures as PNG")
    parser.add_argument("--trace", type=output_path, metavar="OUT", help="also write a timeline for Perfetto")
    add_width(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the files' content as a report.

    Raises:
        GppError: a file is neither a plan nor a timeline, or a timeline's plan is missing.
    """
    # One command for both kinds of file: the "type" in its JSON says which. A timeline names ranks and stage
    # numbers only, so it is shown with its plan, and only with the very one that it names:
    #
    #   plan.json                      picture of the stages, table, memory       --trace is refused
    #   timeline.json --plan P         picture over time, summary                 fingerprints must agree
    #   plan.json a.json b.json        all of these, one after the other          the same
    reported = _read(args.files, args.plan)
    timelines = [(each.plan, timeline) for each in reported for _, timeline in each.timelines]
    if args.trace is not None and not timelines:
        name = reported[0].name
        raise GppError(f"--trace: {name} is a plan; gpp simulate {name} --out FILE makes its timeline")
    if args.trace is not None and len(timelines) > 1:
        raise GppError(f"--trace: writes one timeline and {len(timelines)} are there; give one")
    # a plan that only serves its timelines is not shown as text, but belongs to the page
    shown = [each for each in reported if each.name in {str(path) for path in args.files}]
    results = [_show_plan(each.plan, columns_of(args)) for each in shown]
    for each in reported:
        for _, timeline in each.timelines:
            print(format_timeline(timeline, each.plan, **axis_of(args)))
            results.append(
                {
                    "rows": [to_plain(event) for event in timeline.events],
                    "summary": dataclasses.asdict(summarize_timeline(timeline)),
                }
            )
        times = _measured_times(each)
        if times:
            print(
                f"\n{format_table(RANK_TIMES, rank_time_rows(times, each.plan), left=2, width=columns_of(args))}"
            )
            results[-1]["ranks"] = [{"rank": rank, **dataclasses.asdict(t)} for rank, t in times.items()]
    _write(args, reported)
    return results[0] if len(results) == 1 else {"reports": results}


def _show_plan(plan: PipelinePlan, width: int) -> dict[str, Any]:
    print(format_plan(plan, width=width))
    if plan.memory:
        print(f"\n{format_breakdown(plan.memory)}\n\n{format_table(*rank_table(plan))}")
    return {
        "rows": stage_rows(plan),
        "depth": plan.depth,
        "num_ranks": plan.num_ranks,
        "plan": fingerprint(plan),
        "iteration_us": plan.iteration_us,
        "memory": [{**to_plain(part), "total": part.total} for part in plan.memory],
        "cost": cost_object(plan),
    }


def _measured_times(reported: ReportedPlan) -> dict[int, RankTime]:
    """Return what the tasks of each rank took in a step, the median of the measured timelines; empty without any."""
    busy = [t.busy_us() for _, t in reported.timelines if t.source == "measured"]
    ranks = sorted({rank for each in busy for rank in each})
    return times_of_ranks(
        reported.plan, {rank: median(each.get(rank, 0.0) for each in busy) for rank in ranks}
    )


def _read(files: list[Path], extra: Path | None) -> list[ReportedPlan]:
    """Return the plans among the files, each with the timelines that name it."""
    contents = {path: _read_content(path) for path in files}
    plans = {path: content for path, content in contents.items() if isinstance(content, PipelinePlan)}
    if extra is not None:
        plans[extra] = read_plan(extra)
    by_print = {fingerprint(plan): path for path, plan in plans.items()}
    found: dict[Path, list[tuple[str, Timeline]]] = {path: [] for path in plans}
    for path, timeline in contents.items():
        if not isinstance(timeline, Timeline):
            continue
        if not plans:
            raise GppError(f"{path}: a timeline is shown with its plan; add --plan PLAN.json")
        if timeline.plan not in by_print:
            known = "; ".join(f"{name}: is plan {known}" for known, name in by_print.items())
            raise GppError(f"{known}, the timeline is of plan {timeline.plan} ({path})")
        try:
            check_events(timeline, plans[by_print[timeline.plan]])
        except GppError as error:
            raise type(error)(f"{path}: {error}") from error
        found[by_print[timeline.plan]].append((f"{timeline.source} ({path.name})", timeline))
    return [
        ReportedPlan(name=str(path), plan=plan, timelines=tuple(found[path])) for path, plan in plans.items()
    ]


def _write(args: argparse.Namespace, reported: list[ReportedPlan]) -> None:
    """Write the trace, the page and the pictures of the options."""
    timelines = [(each.plan, timeline) for each in reported for _, timeline in each.timelines]
    if args.trace is not None:
        write_trace(timelines[0][1], timelines[0][0], str(args.trace), step=0)
        print(f"trace written to {args.trace}; open it in Perfetto")
    if args.html is not None:
        write_text_whole(args.html, report_page(reported))
        print(f"page written to {args.html}; open it in a browser")
    if args.svg is not None:
        write_text_whole(args.svg, figure_svg(_pictures(reported)) + "\n")
        print(f"pictures written to {args.svg}")
    if args.png is not None:
        with whole_file(args.png) as temporary:
            temporary.write_bytes(figure_png(_pictures(reported)))
        print(f"pictures written to {args.png}")


def _pictures(reported: list[ReportedPlan]) -> Figure:
    """Return all pictures below each other: stages, timelines on one scale, memory."""
    figures = []
    for each in reported:
        charts = [chart_timeline(timeline, each.plan, title=title) for title, timeline in each.timelines]
        span = max((chart.duration_us for chart in charts), default=0.0)
        figures.append(draw_stage_graph(each.plan))
        figures += [draw_timeline(chart, each.plan, span_us=span) for chart in charts]
        figures += [draw_memory(chart, span_us=span) for chart in charts if chart.has_memory]
    return stack_figures(figures)


def _read_content(path: Path) -> PipelinePlan | Timeline:
    plain = read_json(path, what="a plan or a timeline", max_bytes=MAX_BYTES)
    kind = plain["type"] if is_envelope(plain) else None
    if kind not in ("PipelinePlan", "Timeline"):
        held = (
            f"holds a {show(kind)}"
            if kind is not None
            else "is neither a plan nor a timeline of this package"
        )
        raise ReadError(f"{path}: {held}; gpp report shows a PipelinePlan or a Timeline")
    try:
        return plan_of_envelope(plain) if kind == "PipelinePlan" else from_envelope(Timeline, plain)
    except GppError as error:
        raise type(error)(f"{path}: {error}") from error


# ---- the page -------------------------------------------------------------------------------------------------

_KINDS = tuple(EventKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPlan:
    """A plan, and what is to be shown beside it: timelines with their titles."""

    name: str
    plan: PipelinePlan
    timelines: tuple[tuple[str, Timeline], ...] = ()


def report_page(plans: Sequence[ReportedPlan]) -> str:
    """Return the page of some plans and their timelines."""
    charts = [
        [chart_timeline(timeline, each.plan, title=title) for title, timeline in each.timelines]
        for each in plans
    ]
    title = ", ".join(dict.fromkeys(each.plan.model for each in plans))
    body = [f"<h1>{escape(title)}</h1>"]
    body += _comparison(plans)
    for number, (each, drawn) in enumerate(zip(plans, charts, strict=True)):
        body += _chapter(number, each, drawn, is_only=len(plans) == 1)
    letters = {event: task.value for task, event in EVENT_OF_TASK.items()}
    data = {
        "kinds": [
            {"name": name, "colour": colour, "track": TRACKS.get(kind, 0), "letter": letters.get(kind, "")}
            for kind in _KINDS
            for colour, name in [COLOURS[kind]]
        ],
        "idle": IDLE_COLOUR,
        "memory": MEMORY_COLOUR,
        "limit": LIMIT_COLOUR,
        "plans": [_plan_data(each.plan, drawn) for each, drawn in zip(plans, charts, strict=True)],
    }
    # in a script element nothing is unescaped, and "</script" or "<!--" would end it: so no "<" at all
    script = json.dumps(data, separators=(",", ":"), allow_nan=False)
    script = script.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_page_file('page.css')}</style></head><body>",
            *body,
            '<div id="tip"></div>',
            f'<script type="application/json" id="data">{script}</script>',
            f"<script>{_page_file('page.js')}</script></body></html>",
            "",
        ]
    )


def _page_file(name: str) -> str:
    return (resources.files("gpp_plugin.report") / "page" / name).read_text(encoding="utf-8")


def _comparison(plans: Sequence[ReportedPlan]) -> list[str]:
    """Return the table of all timelines, with each one's time over the first one's."""
    listed = [(each, title, timeline) for each in plans for title, timeline in each.timelines]
    if not listed:
        return []
    first = listed[0][2].iteration_us
    rows = []
    for each, title, timeline in listed:
        summary = summarize_timeline(timeline)
        busy = max(summary.busy_us.values(), default=0.0)
        rows.append(
            [
                f"{each.name}: {title}" if len(plans) > 1 else title,
                f"{format_ms(summary.iteration_us)} ms",
                f"{summary.iteration_us / first:.3f}" if first else "-",
                f"{100 * summary.bubble_ratio:.1f} %",
                f"{format_ms(busy)} ms",
                f"{format_ms(max(summary.communication_us.values(), default=0.0))} ms",
                format_bytes(summary.bytes_sent),
            ]
        )
    header = ["timeline", "step", "over the first", "bubble", "busiest rank", "most in messages", "sent"]
    return ["<h2>Steps side by side</h2>", _table(header, rows)]


def _chapter(number: int, each: ReportedPlan, charts: Sequence[TimelineChart], *, is_only: bool) -> list[str]:
    plan = each.plan
    parts = [] if is_only else [f"<h2>{escape(each.name)}</h2>"]
    parts += [f'<p class="note">{escape(line)}</p>' for line in headline(plan).splitlines()]
    parts += [
        "<h2>Stages</h2>",
        '<p class="note">an edge: forward bytes of a micro-batch x micro-batches a step</p>',
        f'<div class="scroll whole">{figure_svg(draw_stage_graph(plan))}</div>',
        _table(*stage_table(plan)),
    ]
    extra = [
        format_cost(plan),
        format_memory(plan),
        format_shared_ranks(plan),
        format_saved_in_flight(plan),
    ]
    parts += [f'<p class="note">{escape(line)}</p>' for text in extra for line in text.splitlines()]
    if plan.notes:  # what the planner rejected and why, what it left out, what else it notes
        rejected = [note for prefix in (REJECTED, LEFT_OUT) for note in plan.notes if note.startswith(prefix)]
        lines = [f"<li>{escape(note)}</li>" for note in plan.notes if note not in rejected]
        lines += [f'<li class="rejected">{escape(note)}</li>' for note in rejected]
        parts += ["<h2>What the planner chose, rejected and left out</h2>", "<ul>", *lines, "</ul>"]
    parts += _timelines(number, charts)
    times = _measured_times(each)
    if times:
        parts += [
            "<h2>What the tasks of each rank took in a step</h2>",
            '<p class="note">over the plan: its time over the plan\'s, beside that of the ranks of other stages</p>',
            _table(RANK_TIMES, rank_time_rows(times, plan)),
        ]
    if plan.memory:
        parts += [
            "<h2>Memory at its peak, predicted for one rank of each stage</h2>",
            _table(*breakdown_table(plan.memory)),
            "<h2>Memory of each rank at its peak, all its stages together</h2>",
            _table(*rank_table(plan)),
        ]
    return parts


def _timelines(number: int, charts: Sequence[TimelineChart]) -> list[str]:
    if not charts:
        return []
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in legend_of(charts)
    )
    actions = {"in": "zoom in", "out": "zoom out", "all": "show all", "left": "&larr;", "right": "&rarr;"}
    buttons = "".join(
        f'<button data-plan="{number}" data-action="{action}">{text}</button> '
        for action, text in actions.items()
    )
    parts = [
        "<h2>Timelines</h2>",
        f'<div class="bar"><div class="legend">{legend}</div>{buttons}'
        '<span class="note">drag to pan; ctrl or shift and the wheel, or a double click, to zoom; '
        "in a bar: micro-batch, and its samples in brackets</span></div>",
    ]
    for index, chart in enumerate(charts):
        title = f"{escape(chart.title)}: {format_ms(chart.duration_us)} ms"
        parts += [f"<h3>{title}</h3>", f'<canvas id="bars-{number}-{index}"></canvas>']
    with_memory = [(index, chart) for index, chart in enumerate(charts) if chart.has_memory]
    if with_memory:
        parts += [
            "<h2>Memory over time</h2>",
            '<p class="note">computed: the plan\'s predicted bytes, with saved activations from each forward to the '
            "end of its backward in this timeline; the red line is what the rank may use</p>",
        ]
    for index, chart in with_memory:
        parts += [f"<h3>{escape(chart.title)}</h3>", f'<canvas id="memory-{number}-{index}"></canvas>']
    return parts


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _plan_data(plan: PipelinePlan, charts: Sequence[TimelineChart]) -> dict[str, Any]:
    return {
        "stages": [
            {"name": stage.name, "size": stage.micro_batch_size, "forward": stage.forward_label}
            for stage in plan.stages
        ],
        "edges": [plan.edge_name(edge) for edge in range(len(plan.edges))],
        "charts": [
            {"duration": chart.duration_us, "rows": [_row_data(row, chart, plan) for row in chart.rows]}
            for chart in charts
        ],
    }


def _row_data(row: ChartRow, chart: TimelineChart, plan: PipelinePlan) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "label": row.label,
        "name": f"rank {row.rank}: {plan.names_on_rank(row.rank)}",
        "held": row.held,
        "limit": row.limit_bytes,
        "memory": [[round(time - chart.start_us, 2), round(held)] for time, held in row.memory],
        "bars": [_bar_data(event, chart) for event in row.events],
    }


def _bar_data(event: Event, chart: TimelineChart) -> list[Any]:
    # By position, as page.js unpacks them, without what a task does not use: thousands of bars are most of a page.
    # Times to a tenth of a microsecond.
    bar = [
        round(event.start_us - chart.start_us, 1),
        round(event.end_us - event.start_us, 1),
        _KINDS.index(event.kind),
        event.stage,
        event.micro_batch,
    ]
    if event.task is not None:
        return bar if event.half is None else [*bar, event.half]
    return [*bar, -1, event.edge, event.bytes, event.peer]
