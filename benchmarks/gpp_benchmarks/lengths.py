"""Mini-batches of units of new lengths against the same ones when these were seen: time of steps, memory, losses.

A mini-batch has four units, each of another text length, and of LLaVA and Qwen2.5-VL of its own number of images. It is
trained on when it is new, and again one step later, between two others: both times the step before was of other
lengths, so that caches are as cold. The ratio is the sum of the first over the sum of the second; beside it stands that
of the plain model in one process, which has neither code nor messages to make. What new lengths cost is the host's
processor time for a mini-batch's four together, beyond seen ones: readings, code, executor. No step changes weights,
and each loss is held against the model's own in one process. The first mini-batches, which export and fill caches,
count for no time.

With --memory, each model is planned with ``lengths`` and trained at four of them instead: what autograd keeps on each
rank is counted and must be within 2 % of what is predicted for that length; one that is longer must be refused.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gpp_benchmarks import _attention_models
from gpp_benchmarks._lengths_models import FAMILIES, IMAGE_TOKENS, MOST_IMAGES
from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import run_ranks
from gpp_plugin.plan.costs.memory_formula import TOLERANCE
from gpp_plugin.report.units import format_bytes, format_table

MOST_SECONDS = 3600.0
SHORTEST = 4 * IMAGE_TOKENS * MOST_IMAGES // 3
COLUMNS = (
    ("model", "model", "12"), ("counted", "batches", "7"), ("new_over_seen", "new/seen", "8.3f"),
    ("median_ratio", "median", "6.3f"), ("plain_ratio", "plain", "6.3f"), ("seen_step_ms", "step ms", "8.1f"),
    ("new_length_ms", "4 new ms", "8.2f"), ("most_new_length_ms", "most", "6.2f"),
    ("most_loss_error", "loss error", "10.1e"), ("exports", "exports", "7"),
)  # fmt: skip
"""Of the table: entry of a row, heading, form."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    names = list(FAMILIES)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=names,
        help="which (all but gpt2; with --memory those of gpp bench attention)",
    )
    parser.add_argument("--batches", type=int, default=300, help="mini-batches of each (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes, and stages (%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of each tower (%(default)s)")
    parser.add_argument(
        "--width", type=int, default=64, help="of the layers, but of Qwen2.5-VL (%(default)s)"
    )
    parser.add_argument(
        "--longest", type=int, default=512, help="tokens of a text; the shortest has half (%(default)s)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="activation bytes at four lengths, predicted and counted"
    )
    parser.add_argument(
        "--length", type=int, default=128, help="tokens of a text, with --memory (%(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a model.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    least = 2 * SHORTEST
    if args.batches < 8 or min(args.ranks, args.layers) < 1 or args.width % 4 or args.longest < least:
        raise ConfigError(
            f"--batches {args.batches} --ranks {args.ranks} --layers {args.layers} --width {args.width} --longest "
            f"{args.longest}: give at least 8 batches, 1 of ranks and layers, a width that 4 heads divide, and texts "
            f"of at least {least}"
        )
    if args.memory:
        return _memory(args)
    rows: list[dict[str, Any]] = []
    for model in args.models or [name for name in FAMILIES if name != "gpt2"]:
        settings = {key: vars(args)[key] for key in ("batches", "layers", "width", "longest")}
        settings |= {"model": model, "stages": args.ranks}
        plain = _found({**settings, "is_plain": True}, num_ranks=1)
        found = _found({**settings, "is_plain": False}, num_ranks=args.ranks)
        row = {"model": model, "ranks": args.ranks, "batches": args.batches, **found}
        row["plain_ratio"] = plain["new_over_seen"]
        if not rows:
            print(_heading())
        print(_line(row), flush=True)
        rows.append(row)
    return {"rows": rows}


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for every rank at each of four lengths, and whether all agree."""
    rows, refused = [], []
    known = [name for name in FAMILIES if name in _attention_models.FAMILIES]
    if set(args.models or ()) - set(known):
        raise ConfigError(f"--memory --models {' '.join(args.models)}: choose among {', '.join(known)}")
    for model in args.models or known:
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


def _found(settings: dict[str, Any], *, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for event in run_ranks(
        "gpp_benchmarks._lengths_ranks",
        [json.dumps(settings)],
        num_ranks=num_ranks,
        timeout_s=MOST_SECONDS,
        environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    ):
        found = event["found"]
    return found


def _heading() -> str:
    return "  ".join(f"{title:>{form.partition('.')[0]}}" for _, title, form in COLUMNS) + "  memory MiB"


def _line(row: dict[str, Any]) -> str:
    columns = "  ".join(f"{row[entry]:>{form}}" for entry, _, form in COLUMNS)
    return f"{columns}  {row['memory_mib'][0]:.0f} to {row['memory_mib'][-1]:.0f}"
