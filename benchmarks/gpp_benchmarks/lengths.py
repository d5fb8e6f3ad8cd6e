"""Mini-batches of units of new lengths against the same ones when these were seen: time of steps, memory, losses.

A mini-batch has four units, each of another text length, and of LLaVA and Qwen2.5-VL of its own number of images. It is
trained on when it is new, and again one step later, between two others: both times the step before was of other
lengths, so that caches are as cold. The ratio is the sum of the first over the sum of the second; beside it stands that
of the plain model in one process, which has neither code nor messages to make. What new lengths cost is the host's
processor time for a mini-batch's four together, beyond seen ones: readings, code, executor. No step changes weights,
and each loss is held against the model's own in one process. The first mini-batches, which export and fill caches,
count for no time.
"""

from __future__ import annotations

import argparse
from typing import Any

from gpp_benchmarks._lengths_models import FAMILIES, IMAGE_TOKENS, MOST_IMAGES
from gpp_benchmarks._options import add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError

MOST_SECONDS = 3600.0
SHORTEST = 4 * IMAGE_TOKENS * MOST_IMAGES // 3
TABLE = (
    *("model", "counted", "new_over_seen", "median_ratio", "plain_ratio", "seen_step_ms", "new_length_ms"),
    *("most_new_length_ms", "most_loss_error", "exports"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--models", nargs="+", choices=list(FAMILIES), help="which (all but gpt2)")
    add_option(parser, "--batches", 300, "mini-batches of each")
    add_option(parser, "--ranks", 4, "processes, and stages")
    add_option(parser, "--layers", 2, "of each tower")
    add_option(parser, "--width", 64, "of the layers, but of Qwen2.5-VL")
    add_option(parser, "--longest", 512, "tokens of a text; the shortest has half")


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
    rows: list[dict[str, Any]] = []
    for model in args.models or [name for name in FAMILIES if name != "gpt2"]:
        settings = {key: vars(args)[key] for key in ("batches", "layers", "width", "longest")}
        settings |= {"model": model, "stages": args.ranks}
        plain = _found({**settings, "is_plain": True}, num_ranks=1)
        found = _found({**settings, "is_plain": False}, num_ranks=args.ranks)
        row = {"model": model, "ranks": args.ranks, "batches": args.batches, **found}
        rows.append({**row, "plain_ratio": plain["new_over_seen"]})
    return {"rows": rows}


def _found(settings: dict[str, Any], *, num_ranks: int) -> dict[str, Any]:
    (event,) = bench_ranks("_lengths_ranks", settings, num_ranks=num_ranks, timeout_s=MOST_SECONDS)
    found: dict[str, Any] = event["found"]
    return found
