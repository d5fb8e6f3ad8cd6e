"""`gpp --completion SHELL`: the script by which a shell completes commands, options, their values and file names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpp_plugin.errors import ConfigError

NEEDED = "--completion: needs shtab, which is not installed: pip install 'gpp_plugin[completion]'"


def completion_script(make_parser: Callable[[], argparse.ArgumentParser], shell: str) -> str:
    """Return the script of a shell.

    Args:
        make_parser: makes the parser whose commands all have their options, which takes seconds.

    Raises:
        ConfigError: shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ConfigError(NEEDED) from error
    parser = make_parser()
    _complete_files(parser, shtab.FILE)
    script: str = shtab.complete(parser, shell)
    return script


def _complete_files(parser: argparse.ArgumentParser, file: Any) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, file)
        elif action.type is Path:
            action.complete = file  # type: ignore[attr-defined]
