"""Published runs beside the simulator: bubble rates, steps, throughputs; fitted on one row, the others held out.

    zero-bubble   Qi et al., Tables 5 and 9: all times are given; 1F1B, ZB-1p, ZB-2p and interleaved 1F1B
    optimus       ViT-22B + GPT-175B on 1,536 to 3,072 GPUs, ViT-3B + GPT-11B on 8: an encoder colocated or not
    nccl          bus bandwidths of collectives by nccl-tests, 8 to 40 GPUs, on the shipped clusters
    models        Llama 3 405B under torchtitan (interleaved over 1F1B), MT-NLG 530B on 2,240 to 3,360 GPUs
    gpt           Megatron-LM's Table 1 and Korthikanti et al.: 22B to 1T on 8 to 2,520 A100s, nothing fitted

Every row has the published number, ours and the error: of rates and shares the difference, of others the relative one.
`known` is what the simulator had of it: all times of the run (given), this row (fitted), another row of the same
machines (held out), or sizes and degrees alone (costs), where tasks and whole steps have rows of their own. A row is
assumed where what decides the answer is not published; it is held to no limit. Where an order of ours is shorter than
the published one, a column of its own has it. Below, how far steps that were not fitted are off, beside the errors that
others published of their simulators.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from gpp_benchmarks._options import add_choices
from gpp_benchmarks.published._language_models import gpt_rows, language_model_rows
from gpp_benchmarks.published._nccl import nccl_rows
from gpp_benchmarks.published._optimus import optimus_rows
from gpp_benchmarks.published._rows import COSTED, FITTED, HELD_OUT, Row, count_within, errors_of, format_rows
from gpp_benchmarks.published._zero_bubble import zero_bubble_rows
from gpp_plugin.report.rows_text import PAIRS, RowsChart

SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "zero-bubble": zero_bubble_rows,
    "optimus": optimus_rows,
    "models": language_model_rows,
    "gpt": gpt_rows,
    "nccl": nccl_rows,
}
OTHERS = {"Charon": 0.0535, "Echo, mean": 0.08, "vTrain, 8 GPUs": 0.0837, "vTrain, 512 GPUs": 0.1473}
"""Errors published of other simulators."""
CHART = RowsChart(
    kind=PAIRS, x=("published",), y="ours", series=("source",), panels=("unit",), y_label="ours"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--sources", SOURCES, "what to run (all)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all rows, how many of each that was not fitted are within their limit, and the error of held-out ones."""
    rows: list[Row] = []
    for name in args.sources:
        found = list(SOURCES[name]())
        print(f"{name}\n{format_rows(found)}\n", flush=True)
        rows += found
    counts = count_within(rows)
    print("within the limit, of rows that were not fitted:")
    for quantity, count in counts.items():
        print(f"  {quantity}: {count}")
    errors = {
        "held-out steps": errors_of(rows, HELD_OUT),
        "tasks by costs alone": errors_of(rows, COSTED, quantity="tasks"),
        "steps by costs alone": errors_of(rows, COSTED),
    }
    for name, error in errors.items():
        if error is not None:
            print(
                f"{name}: {error['rows']} rows, {error['mean']:.1%} off in the mean, {error['median']:.1%} in the "
                f"median, {error['worst']:.1%} at worst"
            )
    print(
        "published of other simulators: " + ", ".join(f"{name} {each:.2%}" for name, each in OTHERS.items())
    )
    outside = [row for row in rows if row.known != FITTED and row.is_within is False]
    return {
        "rows": [row.plain() for row in rows],
        "within": counts,
        "errors": errors,
        "published_errors_of_others": OTHERS,
        "outside": [f"{row.source}: {row.case}: {row.quantity}" for row in outside],
    }
