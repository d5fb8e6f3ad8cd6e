"""Every figure and table of three papers: the paper's numbers, ours, why they differ, and a picture of both.

    graphpipe   figures 6, 7-left, 7-right and 9, tables A.3, table-1 and table-2
    autopipe    tables table-II, table-III and table-IV, figures 9, 10, 12, 13 and 14
    dawnpiper   tables table-1 and table-2, balance (section 5.4, figure 8)

Ours come from the other benchmarks (throughput, search-time, autopipe, max-batch), with all their cases: some take many
minutes. What a paper only draws has no number here: its text's ranges stand there, and none is read off a picture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpp_benchmarks._options import add_option
from gpp_benchmarks.figures import _autopipe, _dawnpiper, _graphpipe
from gpp_benchmarks.figures._figure_rows import Figure, Options, draw_bars, format_figure, plain_row
from gpp_plugin.errors import ConfigError

PAPERS = {"graphpipe": _graphpipe, "autopipe": _autopipe, "dawnpiper": _dawnpiper}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--paper", choices=list(PAPERS), required=True, help="whose figures")
    parser.add_argument("--figure", nargs="+", metavar="NAME", help="which, as listed above; 7 is both (all)")
    add_option(parser, "--devices", [4, 8, 16, 32], "numbers of devices")
    add_option(parser, "--limit", 60.0, "seconds a search may take")
    add_option(parser, "--out", "figures", "folder of the pictures, SVG")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all rows, and the files of the pictures.

    Raises:
        ConfigError: there is no such figure.
    """
    if args.limit <= 0 or min(args.devices) < 1:
        raise ConfigError(f"--limit {args.limit:g} --devices {args.devices}: both must be above 0")
    chosen = _chosen(args.paper, args.figure)
    options = Options(devices=tuple(args.devices), limit=args.limit)
    rows: list[dict[str, Any]] = []
    pictures = []
    for figure in chosen:
        print(f"{args.paper} {figure.name}: {figure.title} ...", file=sys.stderr, flush=True)
        found = list(figure.rows(options))
        print(f"{format_figure(figure, found)}\n", flush=True)
        rows += [plain_row(figure, row) for row in found]
        path = Path(args.out) / f"{args.paper}_{figure.name.replace('.', '').lower()}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        title = f"{args.paper} {figure.name}: {figure.title}"
        path.write_text(draw_bars(title, found, scale=figure.scale), encoding="utf-8")
        pictures.append(str(path))
    print(f"pictures: {', '.join(pictures)}")
    return {"paper": args.paper, "rows": rows, "pictures": pictures}


def _chosen(paper: str, names: list[str] | None) -> list[Figure]:
    """Return the figures that are asked for; a name stands for all that begin with it and a dash too."""
    known = PAPERS[paper].figures()
    if not names:
        return list(known)
    for name in names:
        if not any(_is_meant(figure, name) for figure in known):
            raise ConfigError(
                f"--figure {name}: {paper} has none; it has {', '.join(figure.name for figure in known)}"
            )
    return [figure for figure in known if any(_is_meant(figure, name) for name in names)]


def _is_meant(figure: Figure, name: str) -> bool:
    return figure.name.lower() == name.lower() or figure.name.startswith(f"{name}-")
