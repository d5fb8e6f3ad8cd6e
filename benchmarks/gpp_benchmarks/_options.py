"""How benchmarks add options that have a default."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any


def add_option(parser: argparse.ArgumentParser, name: str, default: Any, text: str, **more: Any) -> None:
    """Add an option of its default's type, of several values where that is a list; its help ends with the default."""
    if isinstance(default, list):
        more.setdefault("nargs", "+")
    first = default[0] if isinstance(default, list) else default
    parser.add_argument(name, type=type(first), default=default, help=f"{text} (%(default)s)", **more)


def add_choices(parser: argparse.ArgumentParser, name: str, choices: Iterable[str], text: str) -> None:
    """Add an option of several of these names, all of them by default."""
    parser.add_argument(name, nargs="+", choices=list(choices), default=list(choices), help=text)


def add_real_time(parser: argparse.ArgumentParser, when: str) -> None:
    """Add ``--real-time``, for benchmarks that measure delays."""
    text = f"real-time priority while {when}, for a machine with other work (needs root)"
    parser.add_argument("--real-time", action="store_true", help=text)
