"""`gpp compare`: trains a model in one process, on stock DeepSpeed and on the graph of stages, side by side."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from gpp_plugin.compare.compare_settings import GRAPH, MODES, CompareSettings, default_config
from gpp_plugin.config import BLOCK, load_deepspeed_json
from gpp_plugin.errors import ConfigError
from gpp_plugin.report.units import format_bytes, format_table

_SIZES = ("mini_batch", "loss_unit", "planner", "stages")
_DEFAULTS = {"mini_batch": 32, "loss_unit": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp compare`."""
    # One option after the other, in the order of --help; nothing here decides anything. Options
    # without a default (--mini-batch, --planner, ...) must tell "not given" from a value: with
    # --config they are refused.
    parser.add_argument(
        "model",
        nargs="?",
        default="clip_tiny",
        help="clip_tiny, t5_tiny, gpt2_tiny; a HuggingFace config.json or its directory; a library model (mmt, dlrm, "
        "candle_uno, two_branch); or module:function of your own, returning (model, batch) where batch is a dict of "
        "tensors, or a function from the step's number to one (%(default)s)",
    )
    parser.add_argument(
        "--config", type=Path, help="a DeepSpeed JSON, with or without a graph_pipeline block"
    )
    parser.add_argument("--devices", type=int, default=4, help="ranks of a pipeline (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each mode (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those (%(default)s)")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="which to run, separated by commas (%(default)s)"
    )
    parser.add_argument("--mini-batch", type=int, help="samples of one step, without --config (32)")
    parser.add_argument("--loss-unit", type=int, help="samples of one loss, without --config (4)")
    parser.add_argument("--planner", help="of the graph, without --config (auto)")
    parser.add_argument(
        "--stages", type=int, help="of both pipelines, without --config (the planners choose)"
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="replace compute by delays of the measured times: shows the schedules of as many devices on few cores",
    )
    parser.add_argument(
        "--scale-time", type=float, metavar="X", help="with --emulate: factor of every measured time (1)"
    )
    parser.add_argument("--length", type=int, default=32, help="tokens of a text (%(default)s)")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a dimension of a library model, e.g. --size branches=2; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="most seconds in all (%(default)g)"
    )
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the modes, and print a table.

    Raises:
        GppError: an option is wrong, or a process failed.
    """
    settings = _settings(args)
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out: {args.out.parent} is no directory; make it first")

    if args.emulate:
        return _finish(args, settings, _emulate(args, settings))
    if args.scale_time is not None:
        raise ConfigError("--scale-time: is for --emulate; real compute takes the time it takes")

    # Imported here, behind all that can be refused: those modules load torch, which takes seconds.
    from gpp_plugin.compare.compare_run import compare_modes, result_rows

    print(
        f"{settings.model}: {settings.mini_batch} samples a step, {settings.loss_unit} a loss; pipelines on "
        f"{settings.num_ranks} ranks, {os.environ.get('OMP_NUM_THREADS', '1')} thread a process; the modes take turns, "
        "step by step",
        flush=True,
    )
    results = compare_modes(settings, tell=lambda text: print(text, flush=True))
    rows = result_rows(results)
    print(f"\n{format_comparison(rows)}")
    return _finish(args, settings, rows)


def _emulate(args: argparse.Namespace, settings: CompareSettings) -> list[dict[str, Any]]:
    from gpp_plugin.compare.emulated import compare_emulated

    print(
        f"{settings.model}: {settings.mini_batch} samples a step, {settings.loss_unit} a loss; pipelines on "
        f"{settings.num_ranks} ranks with delays in place of compute, the optimizer step left out",
        flush=True,
    )
    scale = 1.0 if args.scale_time is None else args.scale_time
    rows = compare_emulated(settings, scale_time=scale, tell=lambda text: print(text, flush=True))
    print(f"\n{format_emulated(rows)}")
    return rows


def _finish(
    args: argparse.Namespace, settings: CompareSettings, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    # A graph step of 80 ms beside stock's 100 ms is 1.25 x as fast: times of the others over the graph's.
    ratios = speed_ups(rows)
    if ratios:
        print("graph: " + ", ".join(f"{ratio:.2f} x as fast as {mode}" for mode, ratio in ratios.items()))
    for line in remarks(rows, cores=os.cpu_count() or 1):
        print(line)
    answer = {"rows": rows, "model": settings.model, "emulated": args.emulate, "speed_up": ratios}
    if args.out is not None:
        args.out.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        print(f"written to {args.out}")
    return answer


def speed_ups(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times quicker the graph's step is than each other mode's."""
    times = {row["mode"]: row["iteration_ms"] for row in rows if "refused" not in row}
    if GRAPH not in times:
        return {}
    return {mode: times[mode] / times[GRAPH] for mode in times if mode != GRAPH}


def _settings(args: argparse.Namespace) -> CompareSettings:
    if args.config is not None:
        given = [f"--{name.replace('_', '-')}" for name in _SIZES if getattr(args, name) is not None]
        if given:
            raise ConfigError(
                f"{', '.join(given)}: cannot be combined with --config; write it into {args.config}"
            )
        config = load_deepspeed_json(args.config)
        # A configuration of stock DeepSpeed is compared as it is: an empty block means "auto" throughout.
        config.setdefault(BLOCK, {})
    else:
        block = {key: getattr(args, key) for key in ("planner", "stages") if getattr(args, key) is not None}
        sizes = {key: getattr(args, key) or default for key, default in _DEFAULTS.items()}
        config = default_config(**sizes, block=block)
    return CompareSettings(
        model=args.model,
        ds_config=config,
        num_ranks=args.devices,
        modes=tuple(mode.strip() for mode in args.modes.split(",") if mode.strip()),
        sizes=_dimensions(args.size),
        length=args.length,
        warm_up=args.warm_up,
        steps=args.steps,
        seed=args.seed,
        timeout_s=args.timeout,
    )


def _dimensions(given: list[str]) -> dict[str, int]:
    sizes = {}
    for text in given:
        name, _, value = text.partition("=")
        if not value.isdecimal():
            raise ConfigError(f"--size: {text!r} is not NAME=NUMBER, e.g. branches=2")
        sizes[name] = int(value)
    return sizes


def format_comparison(rows: list[dict[str, Any]]) -> str:
    """Return the table of a comparison's rows."""
    header = [
        "mode", "ranks", "stages", "iteration ms", "start-up s", "bubble", "most bytes of a rank", "loss difference",
    ]  # fmt: skip
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["mode"], str(row["ranks"]), *["-"] * 6])
            continue
        bubble, difference = row["bubble"], row["max_loss_difference"]
        lines.append(
            [
                row["mode"],
                str(row["ranks"]),
                str(row["stages"]),
                f"{row['iteration_ms']:.1f}",
                f"{row['startup_s']:.1f}",
                "-" if bubble is None else f"{bubble:.1%}",
                format_bytes(row["peak_bytes"]),
                "-" if difference is None else f"{difference:.1e}",
            ]
        )
    return format_table(header, lines)


def format_emulated(rows: list[dict[str, Any]]) -> str:
    """Return the table of rows with emulated compute."""
    header = ["mode", "ranks", "stages", "depth", "iteration ms", "simulated ms", "bubble"]
    lines = [
        [row["mode"], str(row["ranks"]), *["-"] * 5]
        if "refused" in row
        else [
            row["mode"],
            str(row["ranks"]),
            str(row["stages"]),
            str(row["depth"]),
            f"{row['iteration_ms']:.1f}",
            f"{row['predicted_ms']:.1f}",
            f"{row['bubble']:.1%}",
        ]
        for row in rows
    ]
    return format_table(header, lines)


def remarks(rows: list[dict[str, Any]], *, cores: int) -> list[str]:
    """Return what a reader of the table should know, one line each."""
    lines = [f"{row['mode']} cannot run this: {row['refused']}" for row in rows if "refused" in row]
    ran = [row for row in rows if "refused" not in row]
    measured = [row for row in ran if "memory_measure" in row]
    if measured:
        lines.append(
            f"bytes: {measured[0]['memory_measure']}, by rank: {_by_rank(ran, 'peak_bytes_by_rank')}"
        )
        lines.append(f"parameters and buffers, by rank: {_by_rank(ran, 'parameter_bytes_by_rank')}")
    for row in ran:
        lines += [f"{row['mode']}: {note}" for note in row["notes"]]
    # Only where compute is real and on the CPU: emulated rows have no memory_measure, and CUDA's is another.
    most = max((row["ranks"] for row in measured), default=1)
    if most > cores and all(row["memory_measure"] == "saved tensors" for row in measured):
        lines.append(
            f"{most} ranks share the {cores} cores of this machine: steps take turns on them, so times and bubbles are "
            "not those of as many devices (--emulate shows those)"
        )
    return lines


def _by_rank(rows: list[dict[str, Any]], key: str) -> str:
    return "; ".join(f"{row['mode']} " + ", ".join(format_bytes(b) for b in row[key]) for row in rows)
