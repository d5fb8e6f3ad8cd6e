"""Training with compiled blocks: step times, kept bytes and gradients beside torch's operators, on real ranks.

A CLIP, a GPT-2 and a T5 with random weights train in three ways, by turns: on torch's operators, with `"compile":
true`, and with `"compile": "auto"`. Losses of all steps, and every gradient of the first one by its norm, are held
against one process that runs the model as it is. Beside the worst stands how far that process is itself off fp64 there
("rounding"). It says where a miss is one of fp32: a ReLU at zero. Times are of all steps but the first two of a run.
Bytes are the most that all micro-batches in flight kept for their backwards, summed over ranks, counted and planned.
What a start takes is told for the first run of a way, with nothing in the compiler's cache, and for the last.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpp_benchmarks._backend_training import runs_of_ways, told_of_start, way_table, way_times
from gpp_benchmarks._compile_ranks import WAYS
from gpp_benchmarks._options import add_choices, add_option
from gpp_benchmarks._ranks import bench_ranks
from gpp_plugin.errors import ConfigError
from gpp_plugin.report.progress import step

TABLE = None
"""It prints tables of its own as it goes."""

MODELS = ("clip", "gpt2", "t5")
SETTLING = 2
TIMEOUT_S = 1800.0
TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_choices(parser, "--models", MODELS, "which (all three)")
    add_choices(parser, "--ways", WAYS, "which (all three)")
    add_option(parser, "--ranks", 2, "ranks")
    add_option(parser, "--stages", 2, "stages; 0 leaves them to the planner")
    add_option(parser, "--steps", 8, "steps of a run")
    add_option(parser, "--turns", 2, "runs of each way")
    add_option(parser, "--width", 192, "of hidden states")
    add_option(parser, "--layers", 4, "of each tower")
    add_option(parser, "--length", 64, "tokens of a text")
    parser.add_argument(
        "--cache", help="the compiler's files on disk, to be kept (an empty folder, removed after)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row a model and way.

    Raises:
        ConfigError: an option is wrong.
        RuntimeFailure: a rank failed.
    """
    if min(args.ranks, args.turns, args.width, args.layers, args.length) < 1 or args.steps <= SETTLING:
        raise ConfigError(
            f"--ranks, --turns, --width, --layers and --length must be at least 1, --steps at least {SETTLING + 1}"
        )
    rows: list[dict[str, Any]] = []
    for model in args.models:
        with (
            step(f"train {model}"),
            tempfile.TemporaryDirectory(prefix="gpp_compile_", ignore_cleanup_errors=True) as folder,
        ):
            own = _rows(model, _train(model, args, folder))
        print(f"{model}\n{way_table(own)}", flush=True)
        rows += own
    is_right = all(
        max(row["loss_error"], row["gradient_error"]) <= TOLERANCE
        and (row["num_compiled"] > 0 or row["way"] != "compiled")
        for row in rows
    )
    return {"rows": rows, "ok": is_right}


def _train(model: str, args: argparse.Namespace, folder: str) -> list[Mapping[str, Any]]:
    settings = {
        key: getattr(args, key) for key in ("width", "layers", "length", "steps", "turns", "ways", "stages")
    }
    settings |= {"model": model, "settling": SETTLING, "folder": str(Path(folder) / "costs")}
    cache = {"TORCHINDUCTOR_CACHE_DIR": args.cache or str(Path(folder) / "inductor")}
    options: dict[str, Any] = {"num_ranks": args.ranks, "timeout_s": TIMEOUT_S}
    return list(
        bench_ranks("_compile_ranks", settings, **options, environment={"OMP_NUM_THREADS": "1", **cache})
    )


def _rows(model: str, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for way, runs, loss_error in sorted(runs_of_ways(events), key=lambda found: list(WAYS).index(found[0])):
        worst = max(runs, key=lambda run: run["gradient_error"])
        rows.append(
            {
                "model": model,
                **way_times(way, runs),
                "kept_bytes": sum(runs[0]["kept_bytes"]),
                "planned_bytes": sum(runs[0]["planned_bytes"]),
                "loss_error": loss_error,
                **{key: worst[key] for key in ("gradient_error", "worst", "rounding")},
                "num_compiled": min(run["num_compiled"] for run in runs),
                **told_of_start(runs[0]),
                "start_again_s": runs[-1]["start_s"],
            }
        )
    return rows
