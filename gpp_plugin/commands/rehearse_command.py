"""`gpp rehearse`: runs a plan's processes and messages on this machine with delays in place of compute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpp_plugin.api import rehearse, save
from gpp_plugin.commands.command_parser import add_width, axis_of
from gpp_plugin.config.key_names import CommandNames, use_names
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.rehearse.rehearsal import load_rehearsable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp rehearse`."""
    parser.add_argument("plan", type=Path, help="a plan, as gpp plan --out writes it")
    parser.add_argument("--steps", type=int, default=5, help="mini-batches to measure (%(default)s)")
    parser.add_argument(
        "--scale-time", type=float, default=1.0, metavar="X", help="multiply every duration (%(default)s)"
    )
    parser.add_argument(
        "--scale-bytes",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the size of messages and of reduced gradients (%(default)s)",
    )
    parser.add_argument(
        "--trace-path", metavar="OUT", help="write the mini-batch of median length as a trace for Perfetto"
    )
    parser.add_argument("--out", type=Path, help="write its timeline there")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="longest wait for a message, in seconds (by the plan)"
    )
    add_width(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rehearse the plan, and print what was measured beside what the simulator says.

    Raises:
        GppError: an option or the plan is wrong, or a rank failed.
    """
    # The plan is read and checked before torch is loaded: a wrong file is refused at once, not after seconds.
    plan = load_rehearsable(args.plan)
    with use_names(CommandNames(options=(), written={"timeout_s": "--timeout"})):
        return _run(args, plan)


def _run(args: argparse.Namespace, plan: PipelinePlan) -> dict[str, Any]:

    from gpp_plugin.rehearse.rehearsal import format_rehearsal, rehearsal_figures, stage_rows
    from gpp_plugin.report.chrome_trace import write_trace

    # Progress is printed line by line (flush): a rehearsal takes minutes, often into a pipe or a log.
    rehearsal = rehearse(
        plan,
        steps=args.steps,
        scale_time=args.scale_time,
        scale_bytes=args.scale_bytes,
        timeout_s=args.timeout,
        tell=lambda text: print(text, flush=True),
    )
    print(f"\n{format_rehearsal(rehearsal, **axis_of(args))}")
    if args.out is not None:
        save(rehearsal.median_timeline, args.out)
        print(f"timeline written to {args.out}")
    if args.trace_path:
        write_trace(rehearsal.median_timeline, rehearsal.plan, args.trace_path, step=0)
        print(f"trace written to {args.trace_path}; open it in Perfetto")
    return {"rows": stage_rows(rehearsal), **rehearsal_figures(rehearsal)}
