"""Activation bytes in flight, predicted and counted, on models that are trained for real under several plans.

Small CLIP, T5, GPT-2 and Whisper models in two to four stages, one rank each: branches that meet, an encoder that
every decoder layer reads, chains. Each is planned without memory optimization, with full recompute, and on devices
that have room for a part of the activations, so that recomputing, swapping or both are needed. One step is trained
by the engine; saved-tensor hooks count what autograd keeps, moves and makes again, each storage once a micro-batch.

Counted peaks must be within 2 % of the predicted ones (swapped and recomputed bytes too). With --device cuda two
ranks share a device, each under a cap on its memory: the allocator's peaks are compared with the prediction (8 %),
and the largest batch predicted to fit must train while 1.15 times that batch must not.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from gpp_benchmarks._memory_pairs import CONFIGS, PLANS, MemoryCase
from gpp_benchmarks._options import add_choices
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError, DeviceMissing
from gpp_plugin.plan.costs.memory_formula import TOLERANCE
from gpp_plugin.report.units import format_bytes

TIMEOUT_S = 900.0
COUNTS = ("swapped_bytes", "recomputed_bytes")


TABLE = (
    *("model", "plan", "rank", "stage", "in_flight", "predicted_bytes", "counted_bytes", "ratio"),
    *(f"{which}{count}" for count in COUNTS for which in ("predicted_", "")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--models", CONFIGS, "(%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument(
        "--cap-gb", type=float, default=4.0, help="memory of each rank, on a CUDA device (%(default)s)"
    )
    add_choices(parser, "--plans", PLANS, "(%(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for every rank of every (model, plan) pair, and whether all agree.

    Raises:
        DeviceMissing: a CUDA device is asked for, and there is none.
    """
    if args.device == "cuda":
        return _on_cuda(args.cap_gb)
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for model in args.models:
        case = MemoryCase(model=model, plans=tuple(args.plans))
        print(f"{model}: {case.num_ranks} ranks", flush=True)
        plain, num_ranks = dataclasses.asdict(case), case.num_ranks
        for event in bench_ranks("_memory_ranks", plain, num_ranks=num_ranks, timeout_s=TIMEOUT_S):
            rows += event.get("rows", [])
            if "refused" in event:
                refused.append(event)
                print(f"{event['plan']}: {event['refused']}")
    if not rows:
        raise ConfigError("no plan could be made; see above")
    pairs = {(row["model"], row["plan"]) for row in rows}
    worst = max(abs(row["ratio"] - 1.0) for row in rows)
    off = [row for row in rows if not _is_close(row)]
    print(
        f"\n{len(pairs)} pairs, {len(rows)} ranks: counted peaks are within {100 * worst:.2f} % of the predicted; "
        f"{len(off)} ranks are off by more than {100 * TOLERANCE:.0f} %"
    )
    return {
        "rows": rows,
        "refused": refused,
        "pairs": len(pairs),
        "worst": worst,
        "ok": not off and not refused,
    }


def _on_cuda(cap_gb: float) -> dict[str, Any]:
    import torch

    from gpp_benchmarks._memory_cuda import run_on_cuda

    if not torch.cuda.is_available():
        raise DeviceMissing("bench memory --device cuda needs a CUDA device and finds none; use --device cpu")
    if not cap_gb > 0:
        raise ConfigError(f"--cap-gb {cap_gb}: give a number of GB above 0")
    found = run_on_cuda(cap_gb, lambda line: print(line, flush=True))
    for row in found["rows"]:
        measured, predicted = format_bytes(row["counted_bytes"]), format_bytes(row["predicted_bytes"])
        print(f"{row['unit']} samples, rank {row['rank']}: {measured} measured, {predicted} predicted")
    return found


def _is_close(row: dict[str, Any]) -> bool:
    close = abs(row["ratio"] - 1.0) <= TOLERANCE
    for name in COUNTS:
        planned = row[f"predicted_{name}"]
        close &= abs(row[name] - planned) <= TOLERANCE * planned
    return close
