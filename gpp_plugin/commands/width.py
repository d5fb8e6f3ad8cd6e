"""The option --width of commands that draw."""

from __future__ import annotations

import argparse

from gpp_plugin.report.units import screen_columns

WITHOUT_SCREEN = 100
"""Columns of a picture that goes into a pipe or a file."""


def add_width(parser: argparse.ArgumentParser) -> None:
    """Add the option: as wide as the screen by default."""
    parser.add_argument(
        "--width",
        type=_columns,
        help=f"columns of the picture (those of the terminal, or COLUMNS; {WITHOUT_SCREEN} in a pipe)",
    )


def _columns(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not valid; give at least 1")
    return int(text)


def columns_of(args: argparse.Namespace) -> int:
    """Return the columns a picture may take."""
    columns: int = args.width or screen_columns() or WITHOUT_SCREEN
    return columns


def axis_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the columns of a timeline as `format_timeline` takes them: of its time axis, or of the whole screen."""
    screen = None if args.width else screen_columns()
    return {"width": columns_of(args)} if screen is None else {"screen": screen}
