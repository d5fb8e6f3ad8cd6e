"""Generation on gloo ranks: what Cache Parallelism sends for a token, and micro-batches that keep stages busy.

Ranks hold the caches of all sequences together, cut along the sequence, and decode. What a rank sends is counted and
compared with the formula of what is implemented, with the chapter's formulas as printed, and with those in equal units
(`gpp_plugin.plan.costs.long_context`). The time of a layer's attention stands beside that of the same sequences with
whole caches, each rank its own. Ranks of one machine share its cores, so it says what is spent here, not what a
cluster does.

The second table is of a model of one layer a stage, whose ranks sleep in place of computing. They sleep as long for
every sequence (``--row-ms``), so that a batch of all prompts takes as long as its parts one after the other. (Where a
step reads weights for longer than it computes, one batch of all prompts is as fast as parts in turns.) One prompt is
measured without sleeping: what the stages' messages cost. ``host_ms`` is processor time of one rank, the busiest, for
a token of a micro-batch.
"""

from __future__ import annotations

import argparse
from typing import Any

from gpp_benchmarks._options import add_option, add_real_time
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import check_priority
from gpp_plugin.plan.costs.long_context import (
    gathered_elements,
    printed_elements,
    printed_tensor_elements,
    sent_elements,
    tensor_elements,
)

START_S = 300.0
SECONDS_PER_STEP = 2.0
TABLE = (
    "ranks", "kv_heads", "sent", "formula", "gathered", "tensor", "sent_to_tensor", "printed", "printed_tensor",
    "sequence_ms", "data_ms", "way", "stages", "prompts", "micro_batches", "seconds", "tokens_per_s", "speedup",
    "host_ms", "one_prompt_ms", "one_process_ms",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=[2, 4], help="that share caches (2 and 4), none: no such rows"
    )
    add_option(parser, "--batch", 8, "sequences of all ranks together")
    add_option(parser, "--heads", 8, "of queries")
    parser.add_argument(
        "--kv-heads",
        nargs="+",
        type=int,
        default=[8, 2],
        help="of keys and values (8 and 2: multi-head, grouped)",
    )
    add_option(parser, "--head-size", 64, "elements of a head")
    add_option(parser, "--length", 512, "of the prompts")
    add_option(parser, "--block", 1, "positions that lie together")
    add_option(parser, "--steps", 16, "tokens that are decoded")
    add_option(parser, "--stages", 4, "that generate, 0 for none")
    add_option(parser, "--prompts", 16, "of a generation")
    add_option(parser, "--micro-batches", 4, "of prompts")
    add_option(parser, "--tokens", 16, "generated of each prompt")
    add_option(parser, "--row-ms", 15.0, "of a stage for one sequence's token")
    add_real_time(parser, "stages generate")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each number of ranks and of key-value heads, and one for each way to generate.

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
    if args.stages and (
        args.stages < 2 or args.micro_batches < 1 or args.prompts % args.micro_batches or args.tokens < 1
    ):
        raise ConfigError(
            f"--stages {args.stages} --prompts {args.prompts} --micro-batches {args.micro_batches} --tokens "
            f"{args.tokens}: give at least 2 stages (or 0), a multiple of the micro-batches as prompts, and tokens"
        )
    if args.real_time:
        check_priority()
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        settings = {name: getattr(args, name) for name in ("batch", "heads", "kv_heads", "head_size")}
        settings |= {name: getattr(args, name) for name in ("length", "block", "steps")}
        timeout_s = START_S + SECONDS_PER_STEP * args.steps * len(args.kv_heads)
        events = bench_ranks("_decode_ranks", settings, num_ranks=ranks, timeout_s=timeout_s)
        rows += [_row(args, ranks, event) for event in events]
    if args.stages:
        rows += _generation_rows(args)
    return {"rows": rows}


def _generation_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = ("prompts", "micro_batches", "tokens", "row_ms", "real_time")
    settings = {name: getattr(args, name) for name in names}
    emulated_s = args.stages * args.prompts * args.tokens * args.row_ms / 1e3
    timeout_s = START_S + 6 * emulated_s + SECONDS_PER_STEP * args.tokens * args.micro_batches
    events = list(bench_ranks("_generation_ranks", settings, num_ranks=args.stages, timeout_s=timeout_s))
    in_turn_s = next(event["seconds"] for event in events if event["way"] == "one after the other")
    return [
        {
            "way": event["way"],
            "stages": args.stages,
            "prompts": args.prompts,
            "micro_batches": 1 if event["way"] == "one batch" else args.micro_batches,
            "seconds": event["seconds"],
            "tokens_per_s": args.prompts * args.tokens / event["seconds"],
            "speedup": in_turn_s / event["seconds"],
            "host_ms": event["host_ms"],
            "one_prompt_ms": event["one_ms"],
            "one_process_ms": event["plain_ms"],
        }
        for event in events
    ]


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
