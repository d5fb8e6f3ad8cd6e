"""How benchmarks add options that have a default."""

from __future__ import annotations

import argparse
from typing import Any


def add_option(parser: argparse.ArgumentParser, name: str, default: Any, text: str, **more: Any) -> None:
    """Add an option of its default's type, of several values where that is a list; its help ends with the default."""
    if isinstance(default, list):
        more.setdefault("nargs", "+")
    first = default[0] if isinstance(default, list) else default
    parser.add_argument(name, type=type(first), default=default, help=f"{text} (%(default)s)", **more)
