"""`gpp simulate`: predicts the timeline of a plan, task by task and message by message."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.serialize import load, save, to_plain
from gpp_plugin.plan.clusters import cluster_names, read_cluster
from gpp_plugin.report.summary import summarize_timeline
from gpp_plugin.report.timeline_text import format_timeline
from gpp_plugin.simulate.engine import simulate_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp simulate`."""
    parser.add_argument("plan", type=Path, help="a plan, as gpp plan writes it")
    parser.add_argument(
        "--cluster",
        help=f"links messages take: a file, or one of {', '.join(cluster_names())} (they take no time)",
    )
    parser.add_argument("--out", type=Path, help="write the timeline there")
    parser.add_argument("--width", type=int, default=100, help="columns of the picture (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the predicted timeline.

    Raises:
        GppError: the plan cannot be read, has no predicted times, or its schedule is unsafe.
    """
    if args.width < 1:
        raise ConfigError(f"--width: {args.width} is not valid; give at least 1")
    plan = load(PipelinePlan, args.plan)
    if not any(stage.forward_us for stage in plan.stages):
        raise ConfigError(f"{args.plan}: its stages have no forward_us; make the plan with gpp plan")
    cluster = read_cluster(args.cluster, num_devices=plan.num_ranks) if args.cluster else None
    timeline = simulate_plan(plan, cluster=cluster)
    print(format_timeline(timeline, plan, width=args.width))
    if args.out is not None:
        save(timeline, args.out)
        print(f"timeline written to {args.out}")
    summary = dataclasses.asdict(summarize_timeline(timeline, plan))
    return {"rows": [to_plain(event) for event in timeline.events], "summary": summary}
