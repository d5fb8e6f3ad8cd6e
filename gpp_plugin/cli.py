"""The ``gpp`` command: one sub-command a step of the flow, each printing text and, with --json, one object.

Exit codes: 0 it worked, 1 it did not (one line on standard error says why), 2 wrong usage, or a device that is not
there.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpp_plugin import __version__
from gpp_plugin.errors import DeviceMissing, GppError
from gpp_plugin.report.printable import printable_lines

Runner = Callable[[argparse.Namespace], dict[str, Any]]
BENCHMARKS = "gpp_benchmarks"
"""The package of the benchmarks: `benchmarks/` in a checkout, beside this one in a wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command: the module with its ``add_arguments(parser)`` and ``run(args) -> dict``.

    Modules are imported only for the command that is run, so that ``gpp --help`` needs no torch.
    """

    name: str
    module: str
    help: str


COMMANDS = (
    Command(
        name="demo",
        module="gpp_plugin.demo.demo_run",
        help="train a CLIP on handwritten digits on a graph of stages",
    ),
    Command(
        name="doctor",
        module="gpp_plugin.doctor.checks",
        help="check what is installed and which backends work, and say what to do",
    ),
    Command(
        name="plan",
        module="gpp_plugin.commands.plan_command",
        help="plan a model's stages for a cluster, without weights or devices",
    ),
    Command(
        name="simulate",
        module="gpp_plugin.commands.simulate_command",
        help="predict the timeline of a plan",
    ),
    Command(
        name="rehearse",
        module="gpp_plugin.commands.rehearse_command",
        help="run a plan's processes and messages here, with delays in place of compute",
    ),
    Command(
        name="compare",
        module="gpp_plugin.commands.compare_command",
        help="train a model in one process, on stock DeepSpeed and on the graph, side by side",
    ),
    Command(
        name="report",
        module="gpp_plugin.commands.report_command",
        help="show a plan or a timeline, or write it as a trace",
    ),
    Command(
        name="convert",
        module="gpp_plugin.commands.convert_command",
        help="turn a checkpoint into a single process's, into DeepSpeed's universal one, or back",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, runners = _make_parser(arguments)
    args = parser.parse_args(arguments)
    runner = runners[args.command]
    # Errors that a user can mend are one line with the command's name; everything else is a bug and
    # keeps its traceback. A device that is not there is 2, as wrong usage is: scripts tell "cannot be
    # run here" from "failed" (1).
    name = f"gpp {args.command} {args.bench}" if args.command == "bench" else f"gpp {args.command}"
    try:
        result = runner(args)
    except GppError as error:
        sys.stdout.flush()
        print(f"{name}: {printable_lines(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, DeviceMissing) else 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps({"command": args.command, **result}))
    return 0 if result.get("ok", True) else 1


def _make_parser(
    arguments: Sequence[str],
) -> tuple[argparse.ArgumentParser, dict[str, Runner]]:
    """Return the parser and what runs each command; only the command asked for is imported."""
    parser = argparse.ArgumentParser(
        prog="gpp", description="Train unmodified models as a graph of pipeline stages."
    )
    parser.add_argument("--version", action="version", version=f"gpp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    runners: dict[str, Runner] = {}
    # Parsers of all commands are needed for --help and for errors, but only one is filled: adding options
    # imports the command's module, and with some of them torch. The first word that is no option is the
    # command, since the main parser has no option that takes a value.
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=_sentence(command.help))
        _add_json(sub)
        if command.name == asked:
            module = importlib.import_module(command.module)
            module.add_arguments(sub)
            runners[command.name] = module.run
    names = bench_names()
    if names:
        _add_bench(commands, names, arguments if asked == "bench" else (), runners)
    return parser, runners


def _add_bench(
    commands: Any,
    names: Sequence[str],
    arguments: Sequence[str],
    runners: dict[str, Runner],
) -> None:
    text = "run a benchmark"
    bench = commands.add_parser("bench", help=text, description=_sentence(text))
    benches = bench.add_subparsers(dest="bench", metavar="NAME", required=True)
    asked = next((word for word in arguments if word in names), None)  # "swap" is also an option's value
    for name in names:
        # Read as text, not imported: listing the benchmarks would load torch, DeepSpeed and Megatron.
        text = _docstring(_bench_module(name))
        sub = benches.add_parser(
            name, help=" ".join(text.split("\n\n")[0].split()), description=text, formatter_class=_Paragraphs
        )
        _add_json(sub)
        if name == asked:
            module = importlib.import_module(_bench_module(name))
            module.add_arguments(sub)
            runners["bench"] = _named_runner(module.run)


class _Paragraphs(argparse.HelpFormatter):
    """Fills paragraphs one by one, and leaves indented lines, such as tables, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = [
            block
            if any(line.startswith(" ") for line in block.splitlines())
            else super(_Paragraphs, self)._fill_text(block, width, indent)
            for block in text.split("\n\n")
        ]
        return "\n\n".join(blocks)


def _named_runner(run: Runner) -> Runner:
    def run_named(args: argparse.Namespace) -> dict[str, Any]:
        return {"bench": args.bench, **run(args)}

    return run_named


def bench_names() -> list[str]:
    """Return the benchmarks there are: the public modules of `gpp_benchmarks`; none where it is not installed."""
    spec = importlib.util.find_spec(BENCHMARKS)
    if spec is None or spec.submodule_search_locations is None:
        return []
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return [name.replace("_", "-") for name in names if not name.startswith("_")]


def _bench_module(name: str) -> str:
    return f"{BENCHMARKS}.{name.replace('-', '_')}"


def _docstring(module: str) -> str:
    """Return a module's docstring without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is listed but not found"
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="end standard output with one line of JSON: the result"
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
