"""`gpp report`: shows a plan or a timeline, and writes a timeline as a Chrome trace."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from gpp_plugin.commands.width import add_width, axis_of, columns_of
from gpp_plugin.errors import GppError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import fingerprint, load, to_plain
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.report.chrome_trace import write_trace
from gpp_plugin.report.plan_text import format_breakdown, format_plan, stage_rows
from gpp_plugin.report.summary import summarize_timeline
from gpp_plugin.report.timeline_text import format_timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp report`."""
    parser.add_argument("file", type=Path, help="a plan or a timeline, as the other commands write them")
    parser.add_argument("--plan", type=Path, help="the plan a timeline belongs to (for a timeline)")
    parser.add_argument("--trace", type=Path, metavar="OUT", help="also write the timeline for Perfetto")
    add_width(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the file's content as a report.

    Raises:
        GppError: the file is neither a plan nor a timeline, or the plan is missing or another one.
    """
    # One command for both kinds of file: the "type" in its JSON says which. A timeline names ranks and stage
    # numbers only, so it is shown with its plan, and only with the very one that it names:
    #
    #   plan.json                  picture of the stages, table, memory       --trace is refused
    #   timeline.json --plan P     picture over time, summary                 fingerprints must agree
    kind = _kind_of(args.file)
    if kind == "PipelinePlan":
        if args.trace is not None:
            raise GppError(
                f"--trace: {args.file} is a plan; gpp simulate {args.file} --out FILE makes its timeline"
            )
        plan = load(PipelinePlan, args.file)
        print(format_plan(plan, width=columns_of(args)))
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
    timeline, plan = load(Timeline, args.file), load(PipelinePlan, args.plan)
    if timeline.plan != fingerprint(plan):
        raise GppError(f"{args.plan}: is plan {fingerprint(plan)}, the timeline is of plan {timeline.plan}")
    print(format_timeline(timeline, plan, **axis_of(args)))
    if args.trace is not None:
        write_trace(timeline, plan, str(args.trace), step=0)
        print(f"trace written to {args.trace}; open it in Perfetto")
    summary = dataclasses.asdict(summarize_timeline(timeline, plan))
    return {"rows": [to_plain(event) for event in timeline.events], "summary": summary}


def _kind_of(path: Path) -> str:
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["type"]
    except OSError as error:
        raise GppError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GppError(f"{path}: is neither a plan nor a timeline of this package") from error
    if kind not in ("PipelinePlan", "Timeline"):
        raise GppError(f"{path}: holds a {kind}; gpp report shows a PipelinePlan or a Timeline")
    return str(kind)
