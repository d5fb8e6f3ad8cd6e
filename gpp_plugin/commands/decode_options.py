"""`gpp simulate --decode`: the options of the simulated decoding, and its tables."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.report.rows_text import format_rows
from gpp_plugin.report.units import fill_text
from gpp_plugin.simulate.decode_costs import ServedLayer
from gpp_plugin.simulate.decode_figures import FIGURES, Traffic, remarks

TITLES = {
    "4.1": "bytes that leave a GPU in a step of a layer, one byte an element",
    "4.2": "tokens a second of a layer, by the length of prompts",
    "4.3": "tokens a second of a layer, by the length of answers",
    "4.4": "tokens a second of a layer and milliseconds a token, as the largest batch grows",
    "4.5": "seconds of a rank by what they are spent on",
}


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of simulated decoding."""
    parser.add_argument(
        "--decode",
        action="store_true",
        help="no plan: decoding by data, tensor and cache parallelism, Figures 4.1 to 4.5 of the thesis",
    )
    parser.add_argument(
        "--figure", nargs="+", choices=sorted(FIGURES), help="with --decode: these figures (all)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="with --decode: a constant of the layer, the machine or the requests; a list as 1000,4000",
    )


def run_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Print the figures as tables.

    Raises:
        ConfigError: a constant is unknown or wrong.
    """
    layer, traffic = _constants(args.set)
    rows: list[dict[str, Any]] = []
    said: dict[str, list[str]] = {}
    for figure in args.figure or FIGURES:
        found = FIGURES[figure](layer, traffic)
        said[figure] = remarks(found)
        print(fill_text(f"Figure {figure}: {TITLES[figure]}"))
        print(format_rows([{k: v for k, v in row.items() if k != "figure"} for row in found]))
        print("".join(f"{fill_text(line, indent='  ')}\n" for line in said[figure]))
        rows += found
    constants = {**dataclasses.asdict(layer), **dataclasses.asdict(traffic)}
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in constants.items())
    print(fill_text(f"constants (--set): {shown}", indent="  "))
    return {"rows": rows, "remarks": said, "constants": constants}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def _constants(texts: list[str]) -> tuple[ServedLayer, Traffic]:
    """Return the constants with what was set.

    Raises:
        ConfigError: names the one that is unknown or wrong.
    """
    kinds = (ServedLayer(), Traffic())
    known = {field.name: getattr(kind, field.name) for kind in kinds for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise ConfigError(
                f"--set {text}: there is no constant {name!r}{nearest(name, known)} ({', '.join(known)})"
            )
        given[name] = _read(text, value, known[name])
    layer, traffic = ServedLayer(**_of(ServedLayer, given)), Traffic(**_of(Traffic, given))
    if layer.heads % layer.kv_heads or layer.width % layer.heads:
        raise ConfigError(
            f"--set width={layer.width} heads={layer.heads} kv_heads={layer.kv_heads}: heads divide the width, and "
            "key-value heads the heads"
        )
    return layer, traffic


def _of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}


MAY_BE_ZERO = {"entry_ns", "task_ns", "link_us", "step_us", "rate", "spread", "seed", "prefix"}


def _read(text: str, value: str, default: Any) -> Any:
    kind = type(default[0]) if isinstance(default, tuple) else type(default)
    try:
        read = [kind(part) for part in (value.split(",") if isinstance(default, tuple) else [value])]
    except ValueError:
        what = "whole numbers, as 1,2" if isinstance(default, tuple) else f"{kind.__name__}"
        raise ConfigError(f"--set {text}: {value!r} is no value of the kind {what}") from None
    least = 0 if text.partition("=")[0] in MAY_BE_ZERO else None
    if any(one < 0 or (one == 0 and least is None) or one != one for one in read):
        raise ConfigError(f"--set {text}: give {'at least 0' if least == 0 else 'more than 0'}")
    return tuple(read) if isinstance(default, tuple) else read[0]
