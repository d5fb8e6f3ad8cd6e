"""`gpp backends`: what a model's forward takes on each backend, and what would be chosen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpp_plugin.commands.command_parser import list_of
from gpp_plugin.compare.compare_settings import SINGLE, CompareSettings, default_config
from gpp_plugin.compare.compared_models import build_model, check_model_name, trained_names
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.profile import StageBackend
from gpp_plugin.plugins import BACKENDS
from gpp_plugin.report.progress import step
from gpp_plugin.report.units import fill_text, format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gpp backends`."""
    parser.add_argument(
        "model",
        help=f"a HuggingFace config.json or its directory, one of {', '.join(trained_names())}, or module:function "
        "that returns (model, batch)",
    )
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="PATH",
        help="a module of it, such as vision_model, that would be frozen; may be repeated (the whole model)",
    )
    parser.add_argument(
        "--backends",
        type=list_of(BACKENDS.names()),
        default=list(BACKENDS.names()),
        metavar="A,...",
        help=f"which of {', '.join(BACKENDS.names())} to measure beside torch (all that are installed)",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples of a forward (%(default)s)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text (%(default)s)")
    parser.add_argument("--threads", type=int, help="threads of every backend (torch's)")
    parser.add_argument(
        "--search",
        action="store_true",
        help="look for mixes too: operators placed by their costs, then a search measured end to end; minutes",
    )
    parser.add_argument(
        "--again", action="store_true", help="measure what the log on disk has already, and keep nothing"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print what each backend takes, and the choice.

    Raises:
        ConfigError: an option is wrong, or there is no such model or module.
        CaptureError: the model cannot be captured.
    """
    check_model_name(args.model)
    for option, value in (("samples", args.samples), ("length", args.length), ("threads", args.threads)):
        if value is not None and value < 1:
            raise ConfigError(f"--{option} {value}: give at least 1")

    from gpp_plugin.backends.forward_code import part_codes, use_threads
    from gpp_plugin.backends.measured_backends import BackendLog
    from gpp_plugin.backends.place_forward import place_forward

    threads = use_threads(args.threads)
    with step("capture"):
        settings = CompareSettings(
            model=args.model,
            ds_config=default_config(mini_batch=args.samples, loss_unit=args.samples, block={}),
            num_ranks=1,
            modes=(SINGLE,),
            length=args.length,
        )
        built = build_model(settings)
        codes = part_codes(built.model, built.batch_at(0), args.part)
    # Each part is one forward for itself, as a stage of its own would be: (whole) and vision_model share nothing.
    log = None if args.again else BackendLog()
    chosen = []
    for code in codes:
        with step(f"measure {code.name}"):
            chosen.append(place_forward(code, args.backends, log=log, searches=args.search or None))
    print(format_backends(chosen))
    return {"model": args.model, "threads": threads, **rows_of(chosen)}


def rows_of(chosen: Sequence[StageBackend]) -> dict[str, Any]:
    """Return one row a part and backend, and the choices, as JSON types."""
    rows = [
        {
            "part": one.stage,
            **asdict(cost),
            "over_torch": one_ratio(one.costs[0].us, cost.us),
            "is_chosen": cost.backend == one.backend,
        }
        for one in chosen
        for cost in one.costs
    ]
    choices = [{**asdict(one), "backend": one.backend} for one in chosen]
    return {"rows": rows, "choices": choices}


def one_ratio(torch_us: float, us: float) -> float | None:
    """Return how many times as fast as torch something is; None where it was not measured."""
    return torch_us / us if us and torch_us else None


def format_backends(chosen: Sequence[StageBackend]) -> str:
    """Return the table of each part, and what would be chosen."""
    blocks = []
    # The first cost is torch's, and the others are held against it; a refused one has no time, and its reason stands
    # below the table, where there is space for it.
    for one in chosen:
        lines, refused = [], []
        for cost in one.costs:
            ratio = one_ratio(one.costs[0].us, cost.us)
            if cost.refused:
                refused.append(fill_text(f"{cost.backend}: {cost.refused}"))
                continue
            lines.append(
                [
                    cost.backend,
                    f"{cost.us / 1e3:.3f}" if cost.us else "-",
                    f"{ratio:.2f}" if ratio else "-",
                    f"{cost.error:.0e}",
                    f"{cost.build_s:.1f}",
                ]
            )
        table = format_table([one.stage, "ms", "x as fast", "error", "s to build"], lines)
        saved = one.torch_us - one.us
        text = f"-> {one.backend}"
        if not one.is_torch and saved > 0:
            text += f", {saved / 1e3:.3f} ms less a forward"
        blocks.append("\n".join([table, *refused, text, *map(fill_text, one.notes)]))
    return "\n\n".join(blocks)
