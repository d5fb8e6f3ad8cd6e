"""`gpp report`: shows a plan or a timeline, and writes a timeline as a Chrome trace."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from gpp_plugin.errors import GppError, ReadError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import MAX_BYTES, fingerprint, from_envelope, is_envelope, read_json, to_plain
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.ir.typed_leaves import show
from gpp_plugin.plan.plan_form import check_events, plan_of_envelope, read_plan
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.report.plan_text import format_breakdown, format_plan, stage_rows
from gpp_plugin.report.summary import summarize_timeline
from gpp_plugin.report.timeline_text import format_timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp report`."""
    parser.add_argument("file", type=Path, help="a plan or a timeline, as the other commands write them")
    parser.add_argument("--plan", type=Path, help="the plan a timeline belongs to (for a timeline)")
    parser.add_argument("--trace", type=Path, metavar="OUT", help="also write the timeline for Perfetto")
    parser.add_argument("--width", type=int, default=100, help="columns of the picture (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the file's content as a report.

    Raises:
        GppError: the file is neither a plan nor a timeline, or the plan is missing or another one.
    """
    if args.width < 1:
        raise GppError(f"--width: {args.width} is not valid; give at least 1")
    # One command for both kinds of file: the "type" in its JSON says which. A timeline names ranks and stage
    # numbers only, so it is shown with its plan, and only with the very one that it names:
    #
    #   plan.json                  picture of the stages, table, memory       --trace is refused
    #   timeline.json --plan P     picture over time, summary                 fingerprints must agree
    content = _read_content(args.file)
    if isinstance(content, PipelinePlan):
        if args.trace is not None:
            raise GppError(
                f"--trace: {args.file} is a plan; gpp simulate {args.file} --out FILE makes its timeline"
            )
        plan = content
        print(format_plan(plan, width=args.width))
        if plan.memory:
            print(f"\n{format_breakdown(plan.memory)}")
        return {
            "rows": stage_rows(plan),
            "depth": plan.depth,
            "num_ranks": plan.num_ranks,
            "plan": fingerprint(plan),
            "memory": [{**to_plain(part), "total": part.total} for part in plan.memory],
        }
    if args.plan is None:
        raise GppError(f"{args.file}: a timeline is shown with its plan; add --plan PLAN.json")
    timeline, plan = content, read_plan(args.plan)
    if timeline.plan != fingerprint(plan):
        raise GppError(f"{args.plan}: is plan {fingerprint(plan)}, the timeline is of plan {timeline.plan}")
    try:
        check_events(timeline, plan)
    except GppError as error:
        raise type(error)(f"{args.file}: {error}") from error
    print(format_timeline(timeline, plan, width=args.width))
    if args.trace is not None:
        write_trace(timeline, plan, str(args.trace), step=0)
        print(f"trace written to {args.trace}; open it in Perfetto")
    summary = dataclasses.asdict(summarize_timeline(timeline, plan))
    return {"rows": [to_plain(event) for event in timeline.events], "summary": summary}


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
