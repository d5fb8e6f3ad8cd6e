"""`gpp compare`: one process, stock DeepSpeed, the best chain and the graph of stages, side by side.

Simulated on a cluster that need not be there, emulated with delays in place of compute, or trained here.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpp_plugin.api import make_request, plan_for
from gpp_plugin.commands.command_parser import (
    add_keys,
    add_size,
    command_names,
    plan_choices,
    plan_keys,
    read_sizes,
)
from gpp_plugin.compare.compare_run import compare_modes
from gpp_plugin.compare.compare_settings import (
    GRAPH,
    MODES,
    SINGLE,
    CompareSettings,
    check_modes,
    default_config,
)
from gpp_plugin.compare.compared_models import TINY, check_model_name, planned_names, trained_names
from gpp_plugin.compare.simulated import plain_line, simulate_mode
from gpp_plugin.config.block import BLOCK
from gpp_plugin.config.key_names import JSON_NAMES, CommandNames, place_of, use_names
from gpp_plugin.config.reader import flat_keys, load_deepspeed_json, nested_keys, read_options
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.ir.serialize import output_path, write_text_whole
from gpp_plugin.launch import require_modules
from gpp_plugin.library.paper_graphs import MODELS
from gpp_plugin.plan.cluster_files import cluster_names
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.report.progress import Step, searching, step
from gpp_plugin.report.rows_text import json_text
from gpp_plugin.report.units import fill_text, format_bytes, format_table

KEYS = (
    "num_devices",
    "cluster",
    "dtype",
    "mini_batch",
    "loss_unit",
    "zero",
    "planner",
    "stages",
    "tensor_parallel",
    "sequence_parallel",
    "memory",
    "lengths.typical",
)
"""Keys of the schema that have options of their own."""
_DEFAULTS = {"num_devices": 4, "mini_batch": 32, "loss_unit": 4}
"""Without a configuration and without a cluster; on a cluster they are those of `gpp plan`."""
_BESIDE_CONFIG = ("num_devices", "cluster", "dtype", "lengths.typical")
"""Keys that a DeepSpeed configuration does not have."""
SAME = 0.02
"""A gain that is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp compare`."""
    parser.add_argument(
        "model",
        nargs="?",
        default="clip_tiny",
        help=f"{', '.join(trained_names())}; a HuggingFace config.json or its directory; module:function of your own, "
        "returning (model, batch) where batch is a dict of tensors, or a function from the step's number to one; or, "
        f"simulated only, {', '.join(planned_names())} (%(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="a DeepSpeed JSON, with or without a graph_pipeline block, in place of keys of the schema",
    )
    usual = {
        path: f"without --cluster {value}" for path, value in {**_DEFAULTS, "lengths.typical": 32}.items()
    }
    clusters = {"cluster": cluster_names()}
    # with a cluster nothing is trained: modes are simulated on it
    defaults = {
        **usual,
        "num_devices": _DEFAULTS["num_devices"],
        "cluster": "none: modes run on this machine",
    }
    add_keys(parser, KEYS, defaults=defaults, names=clusters)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each mode (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those (%(default)s)")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="which to run, separated by commas (%(default)s)"
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="replace compute by delays of the measured times: shows the schedules of as many devices on few cores",
    )
    parser.add_argument(
        "--scale-time", type=float, metavar="X", help="with --emulate: factor of every measured time (1)"
    )
    add_size(parser)
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="most seconds in all (%(default)g)"
    )
    parser.add_argument("--out", type=output_path, help="write the rows there as JSON")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the modes, and print a table.

    Raises:
        GppError: an option is wrong, or a process failed.
    """
    # with --config keys are those of its file
    with use_names(JSON_NAMES if args.config is not None else command_names(args)):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    check_model_name(args.model)
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out: {args.out.parent} is no directory; make it first")
    if args.model in planned_names():
        args.keys = {"cluster": "dgx_h100", **args.keys}
    _check_batch_options(args)
    if args.scale_time is not None and not args.emulate:
        raise ConfigError("--scale-time: is for --emulate; real compute takes the time it takes")
    if "cluster" in args.keys:
        return _finish(args, _simulate(args))
    if "dtype" in args.keys:
        raise ConfigError(f"{place_of('dtype')}: is for --cluster; training has bf16 or fp16 in its --config")
    settings = _settings(args)
    if args.model in TINY or Path(args.model).exists():
        require_modules("transformers")
    if args.emulate:
        return _finish(args, _emulate(args, settings))
    _print_filled(
        f"{settings.model}: {settings.mini_batch} samples a step, {settings.loss_unit} a loss; pipelines on "
        f"{settings.num_ranks} ranks, {os.environ.get('OMP_NUM_THREADS', '1')} thread a process; the modes take turns, "
        "step by step"
    )
    rows = compare_modes(settings, tell=_print_filled)
    print(f"\n{format_modes(rows, TRAINED)}")
    return _finish(args, rows)


def _print_filled(text: str) -> None:
    print(fill_text(text), flush=True)


def _check_batch_options(args: argparse.Namespace) -> None:
    """Refuse what would change nothing: a length, or sizes, of a model that does not take them.

    Raises:
        ConfigError: names the option and what to do.
    """
    if args.size and args.model not in MODELS:
        raise ConfigError(
            f"--size: is for library models ({', '.join(MODELS)}); {args.model} has sizes of its own"
        )
    lengths = [path for path in args.keys if path.startswith("lengths")]
    if not lengths:
        return
    place = place_of(lengths[0])
    if "cluster" in args.keys and args.model in MODELS:
        raise ConfigError(f"{place}: is for HuggingFace models; {args.model} has sizes: --size NAME=VALUE")
    if args.model not in (*trained_names(), *planned_names()) and not Path(args.model).exists():
        raise ConfigError(
            f"{place}: the batches are those that {args.model} returns; make them of that length"
        )


def _simulate(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.config is not None or args.emulate:
        raise ConfigError(
            "--cluster: simulates, without --config and --emulate; leave these or --cluster out"
        )
    modes = _modes(args)
    args.keys = {"num_devices": _DEFAULTS["num_devices"], **args.keys}
    options = read_options(args.keys)
    with step("capture"):
        request = _request(args)

    rows = []
    make_graph = functools.partial(plan_for, **plan_choices(options))
    with step("plan") as progress:
        for mode in modes:
            progress.note(mode)
            with searching(functools.partial(_note, progress, mode)):
                rows.append(simulate_mode(mode, request, make_graph))
    if all("refused" in row for row in rows):
        raise PlanError(f"no mode can run this; {rows[-1]['mode']}: {rows[-1]['refused']}")
    if first := plain_line(rows):
        _print_filled(first)
    _print_filled(
        f"{args.model}: {request.mini_batch} samples a step, {request.loss_unit} a loss, in "
        f"{request.cluster.devices[0].dtype}; simulated on {request.num_ranks} devices of {request.cluster.name}"
    )
    print(f"\n{format_modes(rows, _SIMULATED)}")
    return rows


def _note(progress: Step, mode: str, phase: str) -> None:
    progress.note(f"{mode}, {phase}")


def _request(args: argparse.Namespace) -> PlanRequest:
    """Return the input of planners, for a model that is only planned or for one that could be trained."""
    if args.model in MODELS:
        return make_request(args.model, sizes=read_sizes(args.size), **args.keys)
    if args.model in planned_names() or Path(args.model).exists():
        return make_request(args.model, **args.keys)

    from gpp_plugin.compare.compared_models import build_model

    settings = _settings(args)
    built = build_model(settings)
    keys = {key: value for key, value in args.keys.items() if key != "lengths.typical"}
    keys["loss_unit"] = settings.loss_unit
    return make_request(built.model, sample_batch=built.batch_at(0), **keys)


def _emulate(args: argparse.Namespace, settings: CompareSettings) -> list[dict[str, Any]]:
    from gpp_plugin.compare.emulated import compare_emulated

    _print_filled(
        f"{settings.model}: {settings.mini_batch} samples a step, {settings.loss_unit} a loss; pipelines on "
        f"{settings.num_ranks} ranks with delays in place of compute, the optimizer step left out"
    )
    scale = 1.0 if args.scale_time is None else args.scale_time
    rows = compare_emulated(settings, scale_time=scale, tell=_print_filled)
    print(f"\n{format_modes(rows, _EMULATED)}")
    return rows


def _finish(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    # A graph step of 80 ms beside stock's 100 ms is 1.25 x as fast: times of the others over the graph's.
    ratios = speed_ups(rows)
    if ratios:
        said = ", ".join(f"{ratio:.2f} x as fast as {mode}" for mode, ratio in ratios.items())
        print(fill_text(f"graph: {said}"))
    for line in (*remarks(rows, cores=os.cpu_count() or 1), *what_next(args, ratios)):
        print(fill_text(line))
    answer = {"rows": rows, "model": args.model, "emulated": args.emulate, "speed_up": ratios}
    if args.out is not None:
        write_text_whole(args.out, json_text(answer, indent=2) + "\n")
        print(f"written to {args.out}")
    return answer


def what_next(args: argparse.Namespace, ratios: dict[str, float]) -> list[str]:
    """Return what a reader may do with the answer, one line each."""
    pipelines = {mode: ratio for mode, ratio in ratios.items() if mode != SINGLE}
    if not pipelines:
        return []
    lines = []
    if min(pipelines.values()) < 1 + SAME:
        best = min(pipelines, key=lambda mode: pipelines[mode])
        lines.append(
            f"next: a graph of stages gains little or nothing over {best} here; a larger mini-batch, more devices or "
            "a model with longer branches may differ"
        )
    elif "cluster" in args.keys:
        if args.model in (*MODELS, *planned_names()) or Path(args.model).exists():
            lines.append(
                f"next: gpp plan {args.model}{options_again(args, 'gpp plan')} --out plan.json shows and keeps the "
                'plan; "graph_pipeline": {"enabled": true, "plan": "plan.json"} trains on it'
            )
        else:
            again = options_again(args, "gpp compare --emulate")
            lines.append(
                f"next: gpp compare {args.model}{again} --emulate runs the schedules here, in real processes"
            )
    elif args.emulate:
        again = options_again(args, "gpp compare")
        lines.append(f"next: gpp compare {args.model}{again} trains it, where there are the cores")
    else:
        lines.append('next: "graph_pipeline": {"enabled": true} in your DeepSpeed JSON trains on the graph')
    return lines


def options_again(args: argparse.Namespace, command: str) -> str:
    """Return the options of a comparison as they are typed for another command, with a space in front of each.

    >>> keys = {"num_devices": 8, "cluster": "summit", "mini_batch": 64}
    >>> options_again(argparse.Namespace(keys=keys, size=["branches=2"]), "gpp plan")
    ' --devices 8 --cluster summit --mini-batch 64 --size branches=2'
    """
    is_plan = command == "gpp plan"
    names = CommandNames(options=plan_keys() if is_plan else KEYS)
    simulated = () if is_plan else ("cluster", "dtype")
    keys = {"num_devices": _DEFAULTS["num_devices"], **args.keys}
    words = [names.setting(path, value) for path, value in keys.items() if path not in simulated]
    if command == "gpp compare" and args.config is not None:
        words.append(f"--config {args.config}")
    if not is_plan and args.modes != ",".join(MODES):
        words.append(f"--modes {args.modes}")
    words += [f"--size {text}" for text in args.size]
    return "".join(f" {word}" for word in words)


def speed_ups(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times quicker the graph's step is than each other mode's."""
    ran = {row["mode"]: row for row in rows if "refused" not in row}
    if GRAPH not in ran:
        return {}
    graph = ran.pop(GRAPH)
    # like with like: what was only simulated is held against the graph's simulated time
    keys = {mode: "iteration_ms" if "iteration_ms" in row else "predicted_ms" for mode, row in ran.items()}
    return {mode: ran[mode][key] / graph[key] for mode, key in keys.items() if graph.get(key)}


def _settings(args: argparse.Namespace) -> CompareSettings:
    keys = {path: value for path, value in flat_keys(args.keys.items()).items() if path not in _BESIDE_CONFIG}
    if args.config is not None:
        if keys:
            written = ", ".join(args.spelled[path] for path in args.keys if path not in _BESIDE_CONFIG)
            raise ConfigError(f"{written}: cannot be combined with --config; write it into {args.config}")
        config = load_deepspeed_json(args.config)
        # A configuration of stock DeepSpeed is compared as it is: an empty block means "auto" throughout.
        config.setdefault(BLOCK, {})
    else:
        mini_batch, loss_unit = (keys.pop(key, _DEFAULTS[key]) for key in ("mini_batch", "loss_unit"))
        zero_stage = keys.pop("zero", 0)
        if zero_stage == "auto":
            keys["zero"], zero_stage = "auto", 0
        config = default_config(mini_batch=mini_batch, loss_unit=loss_unit, block=nested_keys(keys))
        if zero_stage:
            config["zero_optimization"] = {"stage": zero_stage}
    return CompareSettings(
        model=args.model,
        ds_config=config,
        num_ranks=args.keys.get("num_devices", _DEFAULTS["num_devices"]),
        modes=_modes(args),
        sizes=read_sizes(args.size),
        length=_length(args),
        warm_up=args.warm_up,
        steps=args.steps,
        seed=args.seed,
        timeout_s=args.timeout,
    )


def _length(args: argparse.Namespace) -> int | None:
    """Return the tokens of a text of batches that are made up."""
    lengths = args.keys.get("lengths.typical")
    if isinstance(lengths, list) and len(lengths) == 1:
        (lengths,) = lengths
    if lengths is not None and not isinstance(lengths, int):
        raise ConfigError(f"{place_of('lengths.typical')}: {lengths} is for --cluster; give one number")
    return lengths


def _modes(args: argparse.Namespace) -> tuple[str, ...]:
    modes = tuple(mode.strip() for mode in args.modes.split(",") if mode.strip())
    check_modes(modes)
    return modes


Row = dict[str, Any]


def _cell(key: str, form: str) -> Callable[[Row, float | None], str]:
    return lambda row, _: "-" if row.get(key) is None else format(row[key], form)


_COLUMNS: dict[str, Callable[[Row, float | None], str]] = {
    "stages": _cell("stages", "d"),
    "depth": _cell("depth", "d"),
    "iteration ms": _cell("iteration_ms", ".1f"),
    "simulated ms": _cell("predicted_ms", ".1f"),
    "start-up s": _cell("startup_s", ".1f"),
    "bubble": _cell("bubble", ".1%"),
    "most bytes of a rank": lambda row, _: format_bytes(row["peak_bytes"]) if "peak_bytes" in row else "-",
    "loss difference": _cell("max_loss_difference", ".1e"),
    "fullest rank": lambda row, _: format_bytes(row["peak_bytes"]) + ("" if row["fits"] else " (too much)"),
    "graph is": lambda row, ratio: "-" if ratio is None else f"{ratio:.2f} x as fast",
}
"""Heading -> the cell of a mode that could run, and of how many times quicker the graph is."""
TRAINED = "stages, iteration ms, simulated ms, start-up s, bubble, most bytes of a rank, loss difference"
"""Columns of a comparison; a chain among its rows is simulated, and has no measured time."""
_EMULATED = "stages, depth, iteration ms, simulated ms, bubble"
_SIMULATED = "stages, depth, iteration ms, fullest rank, graph is"


def format_modes(rows: list[Row], columns: str) -> str:
    """Return the table of modes, with these columns behind mode, how and ranks."""
    names, ratios = columns.split(", "), speed_ups(rows)
    lines = []
    for row in rows:
        cells = ("-" if "refused" in row else _COLUMNS[name](row, ratios.get(row["mode"])) for name in names)
        lines.append([row["mode"], row["how"], str(row["ranks"]), *cells])
    return format_table(["mode", "how", "ranks", *names], lines, left=2)


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
        lines += [f"{row['mode']}: {row['what']}"] if row.get("what") else []
        lines += [f"{row['mode']}: {note}" for note in row["notes"]]
        if not row.get("fits", True):
            lines.append(
                f"{row['mode']}: would not fit: {format_bytes(row['peak_bytes'])} on a device of "
                f"{format_bytes(row['limit_bytes'])}"
            )
    if any(row.get("draws") for row in ran) and sum("losses" in row for row in ran) > 1:
        lines.append(
            "loss difference: the model draws random numbers in training, each mode its own (dropout, most often); "
            "with dropout 0 losses can be compared"
        )
    # Only where compute is real and on the CPU: emulated rows have no memory_measure, and CUDA's is another.
    most = max((row["ranks"] for row in measured), default=1)
    if most > cores and all(row["memory_measure"] == "saved tensors" for row in measured):
        lines.append(
            f"{most} ranks share the {cores} cores of this machine: steps take turns on them, so times and bubbles are "
            "not those of as many devices (--emulate shows those)"
        )
    return lines


def _by_rank(rows: list[dict[str, Any]], key: str) -> str:
    return "; ".join(
        f"{row['mode']} " + ", ".join(format_bytes(b) for b in row[key]) for row in rows if key in row
    )
