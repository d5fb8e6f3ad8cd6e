"""One GPT-2 on two gloo ranks of this machine, one core each: captured and in parts, and of Megatron-core's own layers.

Forward and backward, in turn. What tensor ranks win on modelled devices is a column of `gpp bench winners`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError
from gpp_plugin.launch import require_modules
from gpp_plugin.report.rows_text import format_rows

VOCABULARY = 2048
RANKS = 2
START_S, ROUND_S = 180.0, 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_option(
        parser,
        "--shape",
        "512:8:4:128:4",
        "of the model that is measured",
        metavar="HIDDEN:HEADS:LAYERS:LENGTH:SAMPLES",
    )
    add_option(parser, "--rounds", 15, "timed steps of each")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return what a step takes, captured and of Megatron-core's own layers, on the same ranks in turn."""
    require_modules("megatron.core", "transformers")
    names = "hidden", "heads", "layers", "length", "samples"
    try:
        shape = dict(zip(names, map(int, args.shape.split(":")), strict=True))
    except ValueError:
        shape = {}
    is_sound = shape and min(*shape.values(), args.rounds) > 0
    if not is_sound or shape["hidden"] % shape["heads"] or shape["heads"] % RANKS:
        raise ConfigError(
            f"--shape {args.shape} --rounds {args.rounds}: give {':'.join(names).upper()}, like 512:8:4:128:4, with "
            f"heads that {RANKS} divides and that divide the width, and at least 1 round"
        )
    settings = {**shape, "vocabulary": VOCABULARY, "rounds": args.rounds}
    timeout_s = START_S + ROUND_S * args.rounds
    (event,) = bench_ranks("_tensor_ranks", settings, num_ranks=RANKS, timeout_s=timeout_s)
    megatron, rows = event["times"]["megatron"], []
    for name, times in event["times"].items():
        wall, cpu = (statistics.median(each[i] for each in times) for i in (0, 1))
        # rounds side by side: what else the machine does falls on both
        ratios = [
            statistics.median(own[i] / other[i] for own, other in zip(times, megatron, strict=True))
            for i in (0, 1)
        ]
        measured = {"ms": wall * 1e3, "cpu_ms": cpu * 1e3, "ratio": ratios[0], "cpu_ratio": ratios[1]}
        rows.append({"name": name, **measured, "parameters": event["parameters"][name]})
    print(format_rows(rows))
    return {"rows": rows, "shape": args.shape, "rounds": args.rounds}
