"""Activation bytes each stage holds, measured and planned, with warm-up counted from the sink and from the source.

A model of two feed-forward branches of unequal length that meet in a loss, a stage a layer, trained by the
executor over gloo. What a stage holds is what autograd keeps for backward, each storage once; what the plan
says is its micro-batches in flight times the profiled bytes of one. Counted from the sink, as here, a stage
holds what its successors need; counted from the source, a short branch warms up as if it were the long one.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import run_ranks
from gpp_plugin.report.units import format_bytes, format_table

TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--long", type=int, default=3, metavar="LAYERS", help="of the long branch (%(default)s)"
    )
    parser.add_argument(
        "--short", type=int, default=1, metavar="LAYERS", help="of the short one (%(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=256, help="width of the layers (%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of one iteration (%(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=32, help="samples of one (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a stage and rule, whether any exceeds its plan, and what the short branch saves."""
    if not 1 <= args.short <= args.long or min(args.hidden, args.micro_batches, args.micro_batch_size) < 1:
        raise ConfigError(
            f"--long {args.long} --short {args.short}: give at least 1 layer, no more in the short branch than in "
            "the long one, and positive sizes"
        )
    settings = {
        "long_layers": args.long,
        "short_layers": args.short,
        "hidden": args.hidden,
        "num_micro_batches": args.micro_batches,
        "micro_batch_size": args.micro_batch_size,
    }
    num_ranks = args.long + args.short + 1
    print(f"{num_ranks} ranks: branches of {args.long} and {args.short} layers", flush=True)
    rows: list[dict[str, Any]] = []
    for event in run_ranks(
        "gpp_benchmarks._in_flight_ranks", [json.dumps(settings)], num_ranks=num_ranks, timeout_s=TIMEOUT_S
    ):
        rows += event["rows"]
        print(f"\n{_table(event['rows'])}", flush=True)
    short = {
        rule: sum(r["measured_bytes"] for r in rows if r["rule"] == rule and r["stage"].startswith("short"))
        for rule in ("from sink", "from source")
    }
    saved = 1.0 - short["from sink"] / short["from source"]
    exceeding = [[r["rule"], r["stage"]] for r in rows if r["measured_bytes"] > r["planned_bytes"]]
    print(
        f"\nthe short branch holds {format_bytes(short['from sink'])} instead of "
        f"{format_bytes(short['from source'])}: {100 * saved:.0f} % less; stages above their plan: {len(exceeding)}"
    )
    return {"rows": rows, "short_branch_saving": saved, "stages_above_plan": exceeding, "ok": not exceeding}


def _table(rows: list[dict[str, Any]]) -> str:
    return format_table(
        ["warm-up", "stage", "in flight", "planned", "measured"],
        [
            [
                row["rule"],
                row["stage"],
                str(row["in_flight"]),
                format_bytes(row["planned_bytes"]),
                format_bytes(row["measured_bytes"]),
            ]
            for row in rows
        ],
        left=2,
    )
