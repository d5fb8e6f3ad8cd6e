"""How `gpp` reads its command line: whole option names only, one line for a mistake, with the nearest name there is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gpp_plugin.errors import nearest

LIST_METAVAR = ",..."
"""How the metavar of an option ends that takes several values, with commas between them."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose sub-parsers are of its kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation that works today names two options when one is added: scripts would break by it.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what is left over: of a sub-command, by the parser that knows its options."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._about_rest(rest))
        return found, rest

    def _about_rest(self, rest: Sequence[str]) -> str:
        option = next((word for word in rest if word.startswith("-")), None)
        if option is not None:
            name = option.partition("=")[0]
            options = [text for action in self._actions for text in action.option_strings]
            return f"there is no option {name}{nearest(name, options)}"
        lists = [
            action.option_strings[-1]
            for action in self._actions
            if action.option_strings and str(action.metavar).endswith(LIST_METAVAR)
        ]
        advice = f"; several values of {' or '.join(lists)} have commas between them" if lists else ""
        return f"{' '.join(rest)}: not expected here{advice}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            names = [str(choice) for choice in choices]
            raise argparse.ArgumentError(
                action, f"no {value!r}{nearest(str(value), names)} (choose from {', '.join(names)})"
            )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class Paragraphs(argparse.HelpFormatter):
    """Fills paragraphs one by one, and leaves indented lines, such as tables, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = [
            block
            if any(line.startswith(" ") for line in block.splitlines())
            else super(Paragraphs, self)._fill_text(block, width, indent)
            for block in text.split("\n\n")
        ]
        return "\n\n".join(blocks)


def list_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads ``a,b`` as a list of some of the choices, each once."""

    def read(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in choices:
                hint = nearest(word, choices)
                raise argparse.ArgumentTypeError(f"no {word!r}{hint} (choose from {', '.join(choices)})")
        return list(dict.fromkeys(words))

    return read


def list_of_numbers(text: str) -> list[int]:
    """Return the whole numbers of at least 1 in ``512,1024``."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give numbers of at least 1, as in 512,1024")
    return [int(word) for word in words]
