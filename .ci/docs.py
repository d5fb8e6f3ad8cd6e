#!/usr/bin/env python3
"""Writes the generated pages of docs/: the configuration, the commands, and where each algorithm lives.

.venv/bin/python .ci/docs.py [--check]

The configuration comes from the pydantic model and its docstrings, the commands from their argparse parsers, the index
of algorithms from the ``Source:`` and ``Tests:`` lines of module docstrings. ``--check`` writes nothing; it fails where
a page would change.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
NOTICE = "<!-- Written by .ci/docs.py (make docs) from the source; change that. -->\n"
OURS = "this project"
"""The source of what no paper has."""


def main() -> int:
    """Write or check the pages; return 1 where --check finds an old one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say which pages are not up to date")
    args = parser.parse_args()
    stale = [name for name, text in pages().items() if _put(ROOT / "docs" / name, text, write=not args.check)]
    for name in stale:
        print(f"docs/{name}: {'is out of date; run `make docs`' if args.check else 'written'}")
    return int(args.check and bool(stale))


def pages() -> dict[str, str]:
    """Return the text of every generated page by its name."""
    return {
        "configuration.md": configuration_page(),
        "commands.md": commands_page(),
        "algorithms.md": algorithms_page(),
        "porting.md": with_contract((ROOT / "docs" / "porting.md").read_text(encoding="utf-8")),
        "../ARCHITECTURE.md": with_layers((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")),
    }


def with_layers(text: str) -> str:
    """Return ARCHITECTURE.md with its table of layers as ``.ci/layers.toml`` has them."""
    rooms = tomllib.loads((ROOT / ".ci" / "layers.toml").read_text(encoding="utf-8"))["room"]
    return with_table(
        text, "room", "owns", rows=[[f"`{r['name'].replace('.', '/')}`", r["owns"]] for r in rooms]
    )


def with_contract(text: str) -> str:
    """Return porting.md with its tables of what differs, as the scenarios of `gpp bench peers` have it."""
    from gpp_benchmarks.peers import all_scenarios

    rows: dict[str, list[list[str]]] = {"deepspeed": [], "torch": [], "files": []}
    for own in all_scenarios():
        rows[own.peer].append([own.of, own.what, own.here, own.why])
    text = with_table(text, "of", "DeepSpeed's", "here", "why, or what to use", rows=rows["deepspeed"])
    text = with_table(text, "of", "torch's", "here", rows=[row[:3] for row in rows["torch"]])
    return with_table(text, "project", "its file", "here", "why, or what to use", rows=rows["files"])


def with_table(text: str, *titles: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a page with the rows of the table of these titles written anew."""
    head = f"| {' | '.join(titles)} |\n"
    before, _, rest = text.partition(head)
    if not rest:
        raise SystemExit(f"a page has no table {head}")
    lines = [head.rstrip(), "|---" * len(titles) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return before + "\n".join(lines) + rest[rest.index("\n\n") :]


def _put(path: Path, text: str, *, write: bool) -> bool:
    """Say whether a page differs from what the source says, and write it if asked to."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    if write:
        path.write_text(text, encoding="utf-8")
    return True


# ---- configuration -------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Return the reference of the ``graph_pipeline`` block."""
    from gpp_plugin.commands.command_parser import plan_keys
    from gpp_plugin.config.block import GraphPipelineConfig
    from gpp_plugin.config.key_names import all_keys

    lines = [
        "# Configuration\n",
        NOTICE,
        "The `graph_pipeline` block of the DeepSpeed JSON. Every key is optional; an unknown key, or a value that is "
        "not possible, is refused with the key's path and what to write instead.\n",
        "Beside the block, `train_batch_size` is the samples of one optimizer step over the whole graph. "
        "`train_micro_batch_size_per_gpu` is the *loss unit*: the loss of a step is the mean over losses of that many "
        "samples each. Left out, one loss sees the whole mini-batch, or its part by `gradient_accumulation_steps`.\n",
        'Every other key of the JSON is read by DeepSpeed\'s own classes: what they refuse never trains, and `"auto"` '
        "in a block is their default. A graph of stages honours it, refuses it, or says that it has no effect; "
        "`gpp doctor --keys` lists all of them.\n",
        "`gpp plan --help` lists the planners and schedules there are, those of other packages among them.\n",
    ]
    keys = all_keys()
    lines += _keys([keys[path] for path in GraphPipelineConfig.model_fields])
    for outer in (key for key in keys.values() if key.model is not None):
        lines.append(f"\n## The keys of `{outer.path}`\n")
        lines += _keys([key for path, key in keys.items() if path.startswith(f"{outer.path}.")])
    lines += [
        "\n## The same keys on the command line and in Python\n",
        "`gpp plan` and `gpp compare` take every key as `--set KEY=VALUE`, e.g. `--set memory.limit_gb=8`: a number, a "
        "name, JSON, `a,b` for a list or `a=1,b=2` for an object. `gpp_plugin.api.plan` and `make_request` take them "
        "as arguments. These are the keys that plans depend on; the last of them stand beside the block in the JSON. "
        "By default a plan without a job uses neither `recompute` nor `swap`, and searches all micro-batch sizes.\n",
        "| key | in the DeepSpeed JSON | `gpp plan` | `gpp_plugin.api` |",
        "|---|---|---|---|",
    ]
    for key in (keys[path] for path in plan_keys()):
        lines.append(
            f"| `{key.path}` | {key.json if ' ' in key.json else f'`{key.json}`'} | `{key.option}` | `{key.argument}` |"
        )
    return "\n".join(lines) + "\n"


def _keys(keys: Sequence[Any]) -> Iterator[str]:
    """Yield a table of keys of the schema."""
    from pydantic import BaseModel

    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        default = key.field.default
        shown = "as below" if isinstance(default, BaseModel) else f"`{json.dumps(default)}`"
        yield f"| `{key.path}` | {_cell(key.values)} | {shown} | {_cell(key.meaning)} |"


def _cell(text: str) -> str:
    """Return text as it may stand in a cell: one line, bars escaped, reST's double backticks as Markdown's."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


# ---- commands ------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return the reference of the ``gpp`` command."""
    from gpp_plugin.cli import COMMANDS, bench_names

    lines = [
        "# Commands\n",
        NOTICE,
        "With `--json` the last line of standard output is one JSON object. The exit code is 0 if it worked, 1 if it "
        "did not (one line on standard error says why), 2 for wrong usage or a device that is not there.\n",
    ]
    for command in COMMANDS:
        lines += _command(f"gpp {command.name}", (command.name,))
    lines += ["## gpp bench", "", "Runs a benchmark of the package `gpp_benchmarks`.", ""]
    for name in bench_names():
        lines += _command(f"gpp bench {name}", ("bench", name), level=3)
    return "\n".join(lines).rstrip() + "\n"


def _command(title: str, words: Sequence[str], *, level: int = 2) -> list[str]:
    """Return the section of one command: its usage, its description and a table of its options."""
    parser = find_parser(words)
    actions = [action for action in parser._actions if action.dest not in ("help", "json")]
    positional = [action for action in actions if not action.option_strings]
    usage = " ".join([title, *(_operand(action) for action in positional), "[options]"])
    lines = [f"{'#' * level} {title}", "", f"`{usage}`", "", _description(parser.description or ""), ""]
    if actions:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [_option(action, parser) for action in actions]
        lines.append("")
    return lines


def find_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command or benchmark."""
    from gpp_plugin.cli import _make_parser

    parser, _ = _make_parser(words)
    for word in words:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[word]
    return parser


def _operand(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"[{name}]" if action.nargs in ("?", "*") else name


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    if action.option_strings:
        name = ", ".join(action.option_strings)
        if action.nargs != 0:
            choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
            name += f" {choices or action.metavar or action.dest.upper()}"
    else:
        name = _operand(action)
    # A default that is said in the help already, as (%(default)s), is shown in its own column.
    text = re.sub(r"\s*\(%\((default|shown)\)s\)", "", action.help or "").replace("%%", "%")
    default = getattr(action, "shown", action.default)  # `shown`: of a key of the schema
    has_none = default is None or default is False or default in ([], argparse.SUPPRESS, "")
    shown = "" if has_none else f"`{_default(default)}`"
    return f"| `{_cell(name)}` | {shown} | {_cell(text % {'default': action.default} if '%(' in text else text)} |"


def _default(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _description(text: str) -> str:
    """Return the paragraphs of a description; those with indented lines, such as tables, as they are."""
    blocks = []
    for block in inspect.cleandoc(text).split("\n\n"):
        if any(line.startswith(" ") for line in block.splitlines()):
            blocks.append(textwrap.indent(block, "    "))
        else:
            blocks.append(" ".join(block.replace("``", "`").split()))
    return "\n\n".join(blocks)


# ---- algorithms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What the docstring of a module says of itself."""

    module: str
    summary: str
    source: str
    tests: tuple[str, ...]


def algorithms_page() -> str:
    """Return the index of algorithms: those of papers by source, then the modules without one by folder."""
    lines = [
        "# Where an algorithm lives\n",
        NOTICE,
        "Module docstrings name the paper in `Source:`, with section or algorithm and DOI or arXiv number. "
        "`Tests:` names the files that check it. Deviations from a paper stand in the docstring.\n",
    ]
    by_source: dict[str, list[Algorithm]] = {}
    ours: dict[str, list[str]] = {}
    for algorithm in find_algorithms():
        if algorithm.source == OURS:
            folder, _, name = algorithm.module.rpartition(".")
            ours.setdefault(folder, []).append(name)
        else:
            by_source.setdefault(_work(algorithm.source), []).append(algorithm)
    for work in sorted(by_source, key=lambda each: (each == OURS, each.casefold())):
        lines += [
            "## Partly from papers" if work == OURS else f"## {work[0].upper()}{work[1:]}",
            "",
            "| source | what | module | tests |",
            "|---|---|---|---|",
        ]
        lines += [_row(algorithm) for algorithm in by_source[work]]
        lines.append("")
    lines += [
        "## Without a paper",
        "",
        "These modules have algorithms of this project. Their docstrings say what, why, and which tests check it.",
        "",
        "| folder | modules |",
        "|---|---|",
        *(f"| `{folder}` | {', '.join(f'`{name}`' for name in names)} |" for folder, names in ours.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _work(source: str) -> str:
    """Return the work that a source is a part of: all before the first comma or bracket."""
    return re.split(r"[,(;]", source)[0].strip()


def _row(algorithm: Algorithm) -> str:
    tests = ", ".join(f"`{test}`" for test in algorithm.tests)
    return f"| {_cell(algorithm.source)} | {_cell(algorithm.summary)} | `{algorithm.module}` | {tests} |"


def find_algorithms() -> list[Algorithm]:
    """Return what is said in the docstrings of all modules, in the order of their names."""
    found = []
    for package in (ROOT / "gpp_plugin", ROOT / "benchmarks" / "gpp_benchmarks"):
        for path in sorted(package.rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            fields = read_fields(text)
            if "Source" in fields:
                parts = path.relative_to(package.parent).with_suffix("").parts
                found.append(
                    Algorithm(
                        module=".".join(parts[:-1] if parts[-1] == "__init__" else parts),
                        summary=" ".join(text.split("\n\n")[0].split()).rstrip("."),
                        source=fields["Source"],
                        tests=tuple(fields.get("Tests", "").split(", ")) if fields.get("Tests") else (),
                    )
                )
    return found


def read_fields(docstring: str) -> Mapping[str, str]:
    """Return the ``Source:`` and ``Tests:`` lines of a docstring; indented lines go on with the line above them."""
    fields: dict[str, str] = {}
    last = ""
    for line in docstring.splitlines():
        start = re.match(r"(Source|Tests): (.*)", line)
        if start:
            last = start[1]
            fields[last] = start[2].strip()
        elif last and line.startswith(" "):
            fields[last] += f" {line.strip()}"
        else:
            last = ""
    return fields


if __name__ == "__main__":
    sys.exit(main())
