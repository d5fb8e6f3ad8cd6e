"""How `gpp` reads its command line: whole option names only, one line for a mistake, with the nearest name there is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpp_plugin.errors import ConfigError, nearest
from gpp_plugin.report.units import screen_columns

if TYPE_CHECKING:  # `gpp --help` needs no schema
    from gpp_plugin.config.block import PlanOptions
    from gpp_plugin.config.key_names import CommandNames, SchemaKey

LIST_METAVAR = ",..."
"""How the metavar of an option ends that takes several values, with commas between them."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose sub-parsers are of its kind."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation that works today names two options when one is added: scripts would break by it.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what is left over: of a sub-command, by the parser with its options."""
        found, rest = super().parse_known_args(args, namespace)
        if not rest:
            return found, rest
        option = next((word for word in rest if word.startswith("-")), None)
        if option is not None:
            name = option.partition("=")[0]
            options = [text for action in self._actions for text in action.option_strings]
            self.error(f"there is no option {name}{nearest(name, options)}")
        lists = [
            action.option_strings[-1]
            for action in self._actions
            if action.option_strings and str(action.metavar).endswith(LIST_METAVAR)
        ]
        advice = f"; several values of {' or '.join(lists)} have commas between them" if lists else ""
        self.error(f"{' '.join(rest)}: not expected here{advice}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices and not isinstance(action, _KeyOption):
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


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the option for dimensions of a library model."""
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a dimension of a library model, e.g. --size branches=2; may be repeated",
    )


def read_sizes(texts: Sequence[str]) -> dict[str, int | str]:
    """Return the dimensions of a library model in ``["branches=8"]``: numbers as numbers, the rest as text.

    Raises:
        ConfigError: one has no name or no value.
    """
    sizes: dict[str, int | str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"--size: {text!r} is not NAME=VALUE, e.g. branches=8")
        sizes[name] = int(value) if value.isdecimal() else value
    return sizes


# ---- keys of the schema as options ---------------------------------------------------------------------------


def add_keys(
    parser: argparse.ArgumentParser,
    paths: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Add an option for each of these keys, and ``--set`` for all keys; ``args.keys`` is then path -> value.

    Args:
        paths: keys of `config.key_names.all_keys`, in the order of ``--help``.
        defaults: where they differ from those of plans without a job; only shown.
        names: of keys that take more than names, what the help lists.
    """
    from gpp_plugin.config.block import PLAN_DEFAULTS
    from gpp_plugin.config.key_names import all_keys

    shown = {**PLAN_DEFAULTS, **(defaults or {})}
    parser.set_defaults(keys={}, spelled={}, named=tuple(paths))
    for path in paths:
        key = all_keys()[path]
        listed = key.choices or (names or {}).get(path, ())
        default = shown.get(path, key.field.default)
        parser.add_argument(key.option, action=_KeyOption, key=key, default=default, names=listed)
    parser.add_argument(
        "--set",
        action=_KeyOption,
        metavar="KEY=VALUE",
        help="any key of the graph_pipeline block (docs/configuration.md), e.g. memory.limit_gb=8; may be repeated",
    )


def command_names(args: argparse.Namespace) -> CommandNames:
    """Return how the user of a command spells keys."""
    from gpp_plugin.config.key_names import CommandNames

    return CommandNames(options=args.named, written=args.spelled)


def plan_keys() -> tuple[str, ...]:
    """Return the keys of the schema on which plans depend: each is an option of `gpp plan`."""
    from gpp_plugin.config.key_names import all_keys

    return tuple(path for path, key in all_keys().items() if key.extra.get("plans"))


def plan_choices(options: PlanOptions) -> dict[str, Any]:
    """Return the planner, order, slices and transport of the options, as `api.plan_for` takes them."""
    return {name: getattr(options, name) for name in ("planner", "schedule", "slicing", "p2p")}


class _KeyOption(argparse.Action):
    """Reads the value of a key by its schema.

    Args:
        key: whose option it is; None is ``--set``, which says the key itself.
        default, names: what the help shows beside what the key means.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        key: SchemaKey | None = None,
        default: Any = None,
        names: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        self.key, self.shown = key, ""
        if key is not None:
            from gpp_plugin.config.key_names import option_text

            if isinstance(default, (str, int, float)) and default is not False:
                self.shown = option_text(default)
            kind = str(key.field.annotation)
            if key.field.annotation is bool:
                rest["nargs"] = 0
            elif key.is_closed:
                rest["choices"] = key.plan_choices
            elif "list[" in kind or key.model is not None:
                rest["metavar"] = "N" + LIST_METAVAR if "int" in kind else "A" + LIST_METAVAR
            elif "int" in kind or "float" in kind:
                rest["metavar"] = "N"
            text = key.meaning.replace("`", "").rstrip(".").replace("%", "%%")
            listed = "" if key.is_closed or not names else f"; names: {', '.join(names)}"
            rest["help"] = f"{text}{listed}{' (%(shown)s)' if self.shown else ''}"
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **rest)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Keep a value, or refuse it in one line."""
        from gpp_plugin.config.key_names import CommandNames, use_names
        from gpp_plugin.config.reader import find_key, from_json, read_text

        key, text, spelling = self.key, values, self.option_strings[0]
        try:
            if key is None:
                name, equals, text = values.partition("=")
                if not equals:
                    raise ConfigError(f"--set: {values!r} is not KEY=VALUE, e.g. memory.limit_gb=8")
                with use_names(command_names(namespace)):
                    key = find_key(name, from_json(text))
                spelling = f"--set {name}"
            with use_names(CommandNames(options=namespace.named, written={key.path: spelling})):
                value = True if self.nargs == 0 else read_text(key.path, text)
        except ConfigError as error:
            parser.error(str(error).splitlines()[0])
        before = namespace.spelled.get(key.path, spelling)
        if before != spelling:
            parser.error(f"{spelling}: {before} is there already; leave one of them out")
        namespace.spelled = {**namespace.spelled, key.path: spelling}
        namespace.keys = {**namespace.keys, key.path: value}


# ---- the width of pictures ------------------------------------------------------------------------------------

WITHOUT_SCREEN = 100
"""Columns of a picture in a pipe or a file."""


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


# ---- completion -----------------------------------------------------------------------------------------------

_SHTAB = "--completion: needs shtab, which is not installed: pip install 'gpp_plugin[completion]'"


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
        raise ConfigError(_SHTAB) from error
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
