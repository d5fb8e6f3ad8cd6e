"""The ``gpp`` command: one sub-command a step of the flow, each printing text and, with --json, one object.

Exit codes: 0 it worked, 1 it did not (one line on standard error says why), 2 wrong usage, or a device that is not
there.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import importlib.util
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from gpp_plugin import __version__
from gpp_plugin.commands.command_parser import CommandParser, Paragraphs
from gpp_plugin.errors import ConfigError, DeviceMissing, GppError, needs_extra
from gpp_plugin.report.units import printable_lines

if TYPE_CHECKING:
    from gpp_plugin.report.rows_text import RowsChart

Runner = Callable[[argparse.Namespace], dict[str, Any]]
BENCHMARKS = "gpp_benchmarks"
"""The package of the benchmarks: `benchmarks/` in a checkout, beside this one in a wheel."""


class Command(NamedTuple):  # a dataclass would load `inspect`, a tenth of the time of gpp --help
    """A sub-command."""

    name: str
    help: str

    @property
    def module(self) -> str:
        """Return the module with its ``add_arguments(parser)`` and ``run(args) -> dict``.

        Modules are imported only for the command that is run, so that ``gpp --help`` needs no torch.
        """
        return _ELSEWHERE.get(self.name, f"gpp_plugin.commands.{self.name}_command")


_ELSEWHERE = {"demo": "gpp_plugin.demo.demo_run", "doctor": "gpp_plugin.doctor.checks"}
COMMANDS = (
    Command("demo", "train a CLIP on handwritten digits on a graph of stages"),
    Command("doctor", "check what is installed and which backends work, and say what to do"),
    Command("plan", "plan a model's stages for a cluster, without weights or devices"),
    Command("simulate", "predict the timeline of a plan"),
    Command("rehearse", "run a plan's processes and messages here, with delays in place of compute"),
    Command(
        "compare",
        "one process, stock DeepSpeed, the best chain and the graph: simulated, emulated or trained",
    ),
    Command(
        "backends", "measure what a model's forward takes on each backend, and say which would be chosen"
    ),
    Command("report", "show a plan or a timeline, or write it as a trace"),
    Command("convert", "turn a checkpoint into a single process's, into DeepSpeed's universal one, or back"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_while_read(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    # Errors that a user can mend are one line with the command's name; everything else is a bug and
    # keeps its traceback. A device that is not there is 2, as wrong usage is: scripts distinguish "cannot be
    # run here" from "failed" (1).
    name = f"gpp {_command_of(arguments) or ''}".strip()
    args = argparse.Namespace()
    try:
        parser, runners = _make_parser(arguments)
        args = parser.parse_args(arguments)
        name = f"gpp bench {args.bench}" if args.command == "bench" else f"gpp {args.command}"
        result = runners[args.command](args)
    except (GppError, ModuleNotFoundError) as error:
        said = printable_lines(str(error)) if isinstance(error, GppError) else needs_extra(error)
        if said is None:
            raise
        sys.stdout.flush()
        print(f"{name}: {said}", file=sys.stderr)
        return 2 if isinstance(error, DeviceMissing) else 1
    except OSError as error:
        if error.filename not in map(str, vars(args).values()):  # no file that the user named
            raise
        sys.stdout.flush()
        print(f"{name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    if args.json:
        from gpp_plugin.report.rows_text import json_text  # as late as all that --help does without

        print(json_text({"command": args.command, **result}))
    return 0 if result.get("ok", True) else 1


def _command_of(arguments: Sequence[str]) -> str | None:
    """Return the command: the first word that is no option, since the main parser has no option that takes a value.

    (But ``--completion``, which takes the next word and ends there.)
    """
    return next((word for word in arguments if not word.startswith("-")), None)


def _make_parser(
    arguments: Sequence[str],
) -> tuple[argparse.ArgumentParser, dict[str, Runner]]:
    """Return the parser and what runs each command; only the command that runs is imported."""
    parser = CommandParser(prog="gpp", description="Train unmodified models as a graph of pipeline stages.")
    parser.add_argument("--version", action="version", version=f"gpp {__version__}")
    parser.add_argument(
        "--completion",
        action=_Completion,
        choices=["bash", "zsh", "fish"],
        help="print the script by which a shell completes gpp's commands and options, and exit",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runners: dict[str, Runner] = {}
    # Parsers of all commands are needed for --help and for errors, but only one is filled: adding options
    # imports the command's module, and with some of them torch.
    chosen_command = _command_of(arguments)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=_sentence(command.help))
        if command.name == chosen_command:
            runners[command.name] = _fill(sub, command.module)
    if importlib.util.find_spec(BENCHMARKS) is not None:
        text = "run a benchmark"
        bench = commands.add_parser("bench", help=text, description=_sentence(text))
        if chosen_command == "bench":
            names = bench_names()
            # "swap" is a bench and an option's value as well: the first one counts
            chosen = next((word for word in arguments if word in names), None)
            _add_benches(bench, names, () if chosen is None else (chosen,), runners)
    return parser, runners


class _Completion(argparse.Action):
    """Prints the script, and exits, whatever else is on the command line."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        from gpp_plugin.commands.command_parser import completion_script

        try:
            print(completion_script(full_parser, values))
        except ConfigError as error:
            parser.exit(1, f"gpp: {error}\n")
        parser.exit()


def full_parser() -> argparse.ArgumentParser:
    """Return the parser with the options of all commands and benchmarks, whose modules are imported for it."""
    parser, _ = _make_parser(())
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in COMMANDS:
        _fill(commands.choices[command.name], command.module)
    if "bench" in commands.choices:
        _add_benches(commands.choices["bench"], bench_names(), bench_names(), {})
    return parser


def _fill(parser: argparse.ArgumentParser, name: str) -> Runner:
    """Add the options of a command's module to its parser, and return what runs it."""
    module = importlib.import_module(name)
    parser.add_argument(
        "--json", action="store_true", help="end standard output with one line of JSON: the result"
    )
    module.add_arguments(parser)
    runner: Runner = module.run
    return runner


def _add_benches(
    bench: argparse.ArgumentParser, names: Sequence[str], filled: Sequence[str], runners: dict[str, Runner]
) -> None:
    import ast  # imported for benchmarks alone
    from pathlib import Path

    benches = bench.add_subparsers(dest="bench", metavar="NAME", required=True)
    for name in names:
        # Read as text, not imported: listing the benchmarks would load torch, DeepSpeed and Megatron.
        spec = importlib.util.find_spec(_bench_module(name))
        assert spec is not None and spec.origin is not None, f"{name} is listed but not found"
        text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
        sub = benches.add_parser(
            name, help=" ".join(text.split("\n\n")[0].split()), description=text, formatter_class=Paragraphs
        )
        if name in filled:
            runner = _fill(sub, _bench_module(name))
            module = sys.modules[_bench_module(name)]
            chart = getattr(module, "CHART", None)
            if chart is not None:
                sub.add_argument(
                    "--figure", metavar="FILE", help="draw the rows into a .png, .svg or .pdf (extra plots)"
                )
            runners["bench"] = _bench_runner(runner, getattr(module, "TABLE", None), chart)


def _bench_runner(run: Runner, columns: Sequence[str] | None, chart: RowsChart | None) -> Runner:
    """Return what runs a benchmark.

    Args:
        columns: of the table of its rows; None: it prints one of its own.
        chart: how `--figure` draws its rows; None: it has no such option.
    """

    def run_and_show(args: argparse.Namespace) -> dict[str, Any]:
        from gpp_plugin.report.progress import step
        from gpp_plugin.report.rows_text import check_figure, draw_rows

        path = None if chart is None or args.figure is None else check_figure(args.figure)
        with step(f"bench {args.bench}"):
            result = run(args)
        if columns is not None:
            from gpp_plugin.report.rows_text import format_rows

            print(format_rows(result["rows"], columns))
        if path is not None and chart is not None:
            draw_rows(result["rows"], chart, path, title=f"gpp bench {args.bench}")
            print(f"figure: {path}")
        return {"bench": args.bench, **result}

    return run_and_show


def bench_names() -> list[str]:
    """Return the benchmarks there are: the public modules of `gpp_benchmarks`; none where it is not installed."""
    import pkgutil  # imported for benchmarks alone

    spec = importlib.util.find_spec(BENCHMARKS)
    if spec is None or spec.submodule_search_locations is None:
        return []
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return [name.replace("_", "-") for name in names if not name.startswith("_")]


def _bench_module(name: str) -> str:
    return f"{BENCHMARKS}.{name.replace('-', '_')}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


# ---- streams: encodings that lack characters, readers that go ------------------------------------------------

BROKEN_PIPE = 141
"""The exit code where nobody reads any more: 128 + SIGPIPE, what a shell reports of other programs."""

ASCII = {
    **dict.fromkeys("┌┐└┘┼├┤┬┴╭╮╰╯", "+"),
    **dict.fromkeys("│┃╎", "|"),
    **dict.fromkeys("─━╌–—−", "-"),  # noqa: RUF001 - what is to be replaced
    **dict.fromkeys("█▓▒■", "#"),
    **dict.fromkeys("░·•", "."),
    "▼": "v", "▲": "^", "▶": ">", "→": ">", "◀": "<", "←": "<", "…": "~", "×": "x", "µ": "u", "✓": "+", "✗": "x",
    "’": "'", "≤": "<", "≥": ">",
}  # fmt: skip
"""One character each, or pictures would lose their columns."""


def prepare_streams() -> None:
    """Let output that its encoding lacks characters for be drawn in ASCII, instead of failing half-way."""
    codecs.register_error("gpp_ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if not codecs.lookup(encoding).name.startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="gpp_ascii")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(char, "?") for char in error.object[error.start : error.end]), error.end


def run_while_read(run: Callable[[], int]) -> int:
    """Return the exit code of ``run``; where standard output's reader has gone (``| head -1``), quietly `BROKEN_PIPE`.

    Raises:
        BrokenPipeError: another pipe broke.
    """
    try:
        try:
            return run()
        finally:  # --help and --version raise SystemExit with their text still in the buffer
            sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise
        # the interpreter flushes once more as it ends, and would complain
        for stream in closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return BROKEN_PIPE


def _is_closed(stream: TextIO) -> bool:
    """Return whether nobody reads the pipe behind a stream; its buffer, which may be lost by now, is no sign."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # no file behind it
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
