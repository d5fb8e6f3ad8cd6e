"""Texts of a new length each step against the same texts at a length that was seen: time of steps, and memory.

Every mini-batch has a text length of its own, drawn once. It is trained on when its length is new, and again one step
later, between two other lengths: both times the step before was of another length, so that caches are as cold. The
ratio is the sum of the first over the sum of the second. Beside it what a length not seen before costs in the host's
processor time, beyond a seen one, and the resident memory of rank 0 along the way. The first lengths, which export
and fill caches, count for neither.

With --memory, each model is planned with ``lengths`` and trained at four of them instead: what autograd keeps on each
rank is counted and must be within 2 % of what is predicted for that length; one that is longer must be refused.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import run_ranks
from gpp_plugin.plan.costs.memory_breakdown import TOLERANCE
from gpp_plugin.report.units import format_bytes, format_table

MODELS = ("gpt2", "llava", "t5", "whisper")
MOST_SECONDS = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which (all)")
    parser.add_argument("--batches", type=int, default=300, help="mini-batches of each (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes, and stages (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of each tower (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the layers (%(default)s)")
    parser.add_argument(
        "--memory", action="store_true", help="activation bytes at four lengths, predicted and counted"
    )
    parser.add_argument(
        "--length", type=int, default=128, help="tokens of a text, with --memory (%(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a model."""
    if args.batches < 8 or min(args.ranks, args.layers) < 1 or args.width % 4:
        raise ConfigError(
            f"--batches {args.batches} --ranks {args.ranks} --layers {args.layers} --width {args.width}: give at least "
            "8 batches, 1 of the others, and a width that 4 heads divide"
        )
    if args.memory:
        return _memory(args)
    rows = []
    for model in args.models:
        settings = {
            "model": model,
            "batches": args.batches,
            "layers": args.layers,
            "width": args.width,
            "stages": args.ranks,
        }
        found: dict[str, Any] = {}
        for event in run_ranks(
            "gpp_benchmarks._lengths_ranks",
            [json.dumps(settings)],
            num_ranks=args.ranks,
            timeout_s=MOST_SECONDS,
            environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        ):
            found = event["found"]
        row = {"model": model, "ranks": args.ranks, "batches": args.batches, **found}
        print(_text(row), flush=True)
        rows.append(row)
    return {"rows": rows}


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for every rank at each of four lengths, and whether all agree."""
    rows, refused = [], []
    for model in args.models:
        settings = {
            "model": model,
            "layers": args.layers,
            "width": args.width,
            "length": args.length,
            "stages": args.ranks,
        }
        for event in run_ranks(
            "gpp_benchmarks._length_memory",
            [json.dumps(settings)],
            num_ranks=args.ranks,
            timeout_s=MOST_SECONDS,
            environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        ):
            found = event["found"]
            rows += found["rows"]
            refused.append(found["refused"])
            print(
                f"{model}: between the lengths measured, predicted over measured is {1 + found['time_error']:.3f} of "
                f"times and {1 + found['byte_error']:.4f} of kept bytes\n{found['refused']}",
                flush=True,
            )
    print(
        format_table(
            ["model", "lengths", "stage", "predicted", "counted", "ratio"],
            [
                [
                    row["model"],
                    row["lengths"],
                    f"{row['rank']} {row['stage']}",
                    format_bytes(row["predicted_bytes"]),
                    format_bytes(row["counted_bytes"]),
                    f"{row['ratio']:.4f}",
                ]
                for row in rows
            ],
            left=3,
        )
    )
    worst = max(abs(row["ratio"] - 1.0) for row in rows)
    print(f"counted bytes are within {100 * worst:.2f} % of the predicted")
    return {"rows": rows, "refused": refused, "worst": worst, "ok": worst <= TOLERANCE and all(refused)}


def _text(row: dict[str, Any]) -> str:
    memory = f"{row['memory_mib'][0]:.0f} to {row['memory_mib'][-1]:.0f} MiB"
    return (
        f"{row['model']}, {row['ranks']} ranks, {row['batches']} lengths from {row['shortest']} to {row['longest']}: "
        f"new over seen {row['new_over_seen']:.3f} of {row['seen_step_ms']:.1f} ms a step, a new length "
        f"{row['new_length_ms']:.2f} ms of the host (most {row['most_new_length_ms']:.2f}), memory {memory}, "
        f"{row['exports']} exports after the start"
    )
