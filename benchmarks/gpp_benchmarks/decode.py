"""Cache Parallelism on gloo ranks: what a layer sends for a decoded token, beside the formulas, and how long it takes.

Ranks hold the caches of all sequences together, cut along the sequence, and decode. What a rank sends is counted and
compared with the formula of what is implemented, with the chapter's formulas as printed, and with those in equal units
(`gpp_plugin.plan.costs.cache_parallelism`). The time of a layer's attention stands beside that of the same sequences
with whole caches, each rank its own: ranks of one machine share its cores, so it says what is spent here, and not what
a cluster does.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import run_ranks
from gpp_plugin.plan.costs.cache_parallelism import (
    gathered_elements,
    printed_elements,
    printed_tensor_elements,
    sent_elements,
    tensor_elements,
)

START_S = 120.0
SECONDS_PER_STEP = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="that share caches (2 and 4)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of all ranks together (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="of queries (%(default)s)")
    parser.add_argument(
        "--kv-heads",
        nargs="+",
        type=int,
        default=[8, 2],
        help="of keys and values (8 and 2: multi-head, grouped)",
    )
    parser.add_argument("--head-size", type=int, default=64, help="elements of a head (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="of the prompts (%(default)s)")
    parser.add_argument("--block", type=int, default=1, help="positions that lie together (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="tokens that are decoded (%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of ranks and of key-value heads.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    for ranks in args.ranks:
        if ranks < 2 or args.batch % ranks:
            raise ConfigError(
                f"--ranks {ranks} --batch {args.batch}: give at least 2 ranks and a multiple of them as batch"
            )
    if any(args.heads % kv for kv in args.kv_heads) or min(args.steps, args.length, args.block) < 1:
        raise ConfigError(
            f"--heads {args.heads} --kv-heads {args.kv_heads} --steps {args.steps} --length {args.length} --block "
            f"{args.block}: heads must be a multiple of the key-value heads, the others at least 1"
        )
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        settings = {name: getattr(args, name) for name in ("batch", "heads", "kv_heads", "head_size")}
        settings |= {name: getattr(args, name) for name in ("length", "block", "steps")}
        for event in run_ranks(
            "gpp_benchmarks._decode_ranks",
            [json.dumps(settings)],
            num_ranks=ranks,
            timeout_s=START_S + SECONDS_PER_STEP * args.steps * len(args.kv_heads),
            environment={"DS_ACCELERATOR": "cpu"},
        ):
            rows.append(_row(args, ranks, event))
            print(_line(rows[-1]), flush=True)
    return {"rows": rows}


def _row(args: argparse.Namespace, ranks: int, event: dict[str, Any]) -> dict[str, Any]:
    width, kv_width = args.heads * args.head_size, event["kv_heads"] * args.head_size
    formula = sent_elements(ranks, args.batch, width, args.heads, kv_width)
    return {
        "ranks": ranks,
        "kv_heads": event["kv_heads"],
        "sent": event["elements"],
        "formula": formula,
        "sent_to_formula": event["elements"] / formula,
        "gathered": gathered_elements(ranks, args.batch, width, args.heads, kv_width),
        "tensor": tensor_elements(ranks, args.batch, width),
        "sent_to_tensor": event["elements"] / tensor_elements(ranks, args.batch, width),
        "printed": printed_elements(ranks, args.batch, width, args.heads),
        "printed_tensor": printed_tensor_elements(ranks, args.batch, width),
        "sequence_ms": event["sequence_ms"],
        "data_ms": event["data_ms"],
        "largest_difference": event["difference"],
    }


def _line(row: dict[str, Any]) -> str:
    return (
        "{ranks} ranks, {kv_heads:>2} kv heads: {sent:9.0f} elements a rank, layer and token, formula {formula:9.0f} "
        "({sent_to_formula:.3f}), {sent_to_tensor:.2f} of tensor parallelism {tensor:9.0f}, all gathered "
        "{gathered:9.0f}; printed {printed:9.0f} and {printed_tensor:9.0f}; {sequence_ms:.2f} ms, whole caches "
        "{data_ms:.2f} ms"
    ).format(**row)
