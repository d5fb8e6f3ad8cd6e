"""`gpp report`: shows plans and timelines, as text, as a page, as pictures, and as a Chrome trace."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from gpp_plugin.commands.command_parser import add_width, axis_of, columns_of
from gpp_plugin.errors import GppError, ReadError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import (
    MAX_BYTES,
    fingerprint,
    from_envelope,
    is_envelope,
    read_json,
    to_plain,
    write_text_whole,
)
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.plan.plan_form import check_events, plan_of_envelope, read_plan
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.report.figure import Figure, draw_stage_graph, figure_png, figure_svg, stack_figures
from gpp_plugin.report.html_page import ReportedPlan, report_page
from gpp_plugin.report.plan_text import format_breakdown, format_plan, stage_rows
from gpp_plugin.report.timeline_chart import (
    chart_timeline,
    draw_memory,
    draw_timeline,
    format_timeline,
    summarize_timeline,
)


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
    parser.add_argument("--html", type=Path, metavar="OUT", help="also write a page that any browser shows")
    parser.add_argument("--svg", type=Path, metavar="OUT", help="also write the pictures as SVG")
    parser.add_argument("--png", type=Path, metavar="OUT", help="also write the pictures as PNG")
    parser.add_argument("--trace", type=Path, metavar="OUT", help="also write a timeline for Perfetto")
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
    for plan, timeline in timelines:
        print(format_timeline(timeline, plan, **axis_of(args)))
        results.append(
            {
                "rows": [to_plain(event) for event in timeline.events],
                "summary": dataclasses.asdict(summarize_timeline(timeline)),
            }
        )
    _write(args, reported)
    return results[0] if len(results) == 1 else {"reports": results}


def _show_plan(plan: PipelinePlan, width: int) -> dict[str, Any]:
    print(format_plan(plan, width=width))
    if plan.memory:
        print(f"\n{format_breakdown(plan.memory)}")
    return {
        "rows": stage_rows(plan),
        "depth": plan.depth,
        "num_ranks": plan.num_ranks,
        "plan": fingerprint(plan),
        "memory": [{**to_plain(part), "total": part.total} for part in plan.memory],
    }


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
    try:
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
            args.png.write_bytes(figure_png(_pictures(reported)))
            print(f"pictures written to {args.png}")
    except OSError as error:
        raise GppError(f"{error.filename}: cannot be written ({error.strerror})") from error


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
