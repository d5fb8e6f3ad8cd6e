"""Runs another benchmark as `gpp bench` would, and returns what it returns."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Sequence
from typing import Any


def run_bench(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the result of ``gpp bench NAME OPTIONS``, whose own tables are not printed."""
    module = importlib.import_module(f"gpp_benchmarks.{name}")
    parser = argparse.ArgumentParser(prog=name)
    module.add_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()):
        result: dict[str, Any] = module.run(parser.parse_args(list(options)))
    return result
