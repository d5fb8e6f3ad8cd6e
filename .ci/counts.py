#!/usr/bin/env python3
"""Counts of a checkout: size, comments, import circles, folders, long functions and names that occur twice.

python .ci/counts.py [CHECKOUT] [--package NAME] [--without FOLDER ...] [--json]

Only the standard library is used, and nothing of the checkout is imported, so any revision can be counted:

    git worktree add /tmp/before f000c03 && python .ci/counts.py /tmp/before
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import io
import json
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEPENDENCIES = frozenset(
    "deepspeed hjson huggingface_hub megatron networkx numpy pydantic rich safetensors scipy sklearn tensorboard "
    "tokenizers torch transformers".split()
)
LONG = 60
"""Lines of a function, from ``def`` to its end, above which it is listed."""
LONGEST_FILE = 700
"""Lines of a file, blank ones and documentation included, above which it is listed."""
EXPLAINED = 35
"""Lines above which a function has at least one comment."""
DIRECTIVES = ("# noqa", "# type:", "# fmt:", "#!")
"""What tools read: no comments."""
NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file: its module name, its syntax tree and what each of its lines holds.

    Args:
        code_lines: lines with anything but comments and bare strings (docstrings are bare strings).
        comment_lines: lines that hold a comment and nothing else.
        trailing_lines: lines of code that end in a comment.
    """

    path: Path
    module: str
    tree: ast.Module
    code_lines: frozenset[int]
    comment_lines: frozenset[int]
    trailing_lines: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or method: where it is, how long it is and whether a comment stands inside."""

    place: str
    name: str
    num_lines: int
    has_comment: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """All that is counted of one package; lists name the places."""

    files: int
    code_lines: int
    comment_lines: int
    trailing_comments: int
    comments_per_thousand: float
    single_importers: list[str]
    lone_protocols: list[str]
    files_over_700: list[str]
    circles: list[list[str]]
    longest_folder: str
    longest_folder_files: int
    functions_over_60: list[str]
    functions_over_35_without_comment: list[str]
    duplicate_basenames: dict[str, list[str]]
    duplicate_classes: dict[str, list[str]]
    named_like_a_dependency: list[str]


def count_package(folder: Path, *, without: Sequence[str] = ()) -> Counts:
    """Count the package in ``folder``, but for its sub-folders named in ``without``."""
    sources = [
        _read_source(path, folder)
        for path in sorted(folder.rglob("*.py"))
        if not set(path.relative_to(folder).parts[:-1]) & {*without, "__pycache__"}
    ]
    functions = [function for source in sources for function in _functions(source)]
    code = sum(len(source.code_lines) for source in sources)
    comments = sum(len(source.comment_lines) for source in sources)
    folders = collections.Counter(source.path.parent for source in sources)
    graph = import_graph(sources)
    longest = max(folders, key=lambda each: (folders[each], str(each)), default=folder)
    return Counts(
        files=len(sources),
        code_lines=code,
        comment_lines=comments,
        trailing_comments=sum(len(source.trailing_lines) for source in sources),
        comments_per_thousand=round(1000 * comments / max(code, 1), 1),
        single_importers=_single_importers(graph),
        lone_protocols=_lone_protocols(sources),
        files_over_700=[
            f"{source.module} ({lines} lines)"
            for source in sources
            if (lines := source.path.read_text(encoding="utf-8").count("\n")) > LONGEST_FILE
        ],
        circles=find_circles(graph),
        longest_folder=str(longest.relative_to(folder.parent)),
        longest_folder_files=folders[longest],
        functions_over_60=_listed(function for function in functions if function.num_lines > LONG),
        functions_over_35_without_comment=_listed(
            function for function in functions if function.num_lines > EXPLAINED and not function.has_comment
        ),
        duplicate_basenames=_twice(
            (source.path.name, source.module) for source in sources if source.path.name != "__init__.py"
        ),
        duplicate_classes=_twice(pair for source in sources for pair in _public_classes(source)),
        named_like_a_dependency=[
            source.module
            for source in sources
            if source.path.name != "__init__.py" and source.path.stem in DEPENDENCIES
        ],
    )


def _read_source(path: Path, folder: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    # A bare string is documentation: what stands on its lines is no code, even where it is not the first statement.
    documentation = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not token.string.startswith(DIRECTIVES):
                comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return Source(
        path=path,
        module=".".join(parts[:-1] if parts[-1] == "__init__" else parts),
        tree=tree,
        code_lines=frozenset(code - documentation),
        comment_lines=frozenset(comments - code),
        trailing_lines=frozenset(comments & code),
    )


def _functions(source: Source) -> Iterator[Function]:
    comments = source.comment_lines | source.trailing_lines
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield Function(
                place=f"{source.module}:{node.lineno}",
                name=node.name,
                num_lines=len(lines),
                has_comment=not comments.isdisjoint(lines),
            )


def _public_classes(source: Source) -> Iterator[tuple[str, str]]:
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, source.module


def _listed(functions: Iterable[Function]) -> list[str]:
    longest_first = sorted(functions, key=lambda function: (-function.num_lines, function.place))
    return [f"{function.place} {function.name} ({function.num_lines} lines)" for function in longest_first]


def _twice(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    modules = collections.defaultdict(list)
    for name, module in pairs:
        modules[name].append(module)
    return {name: places for name, places in sorted(modules.items()) if len(places) > 1}


def import_graph(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Return which modules of the package each one imports, wherever in it the statement stands.

    ``from a.b import c`` means module ``a.b.c`` where there is one, and else ``a.b``. That importing ``a.b`` also
    runs ``a/__init__.py`` is not counted: it would join every module to its packages.
    """
    modules = {source.module for source in sources}
    return {source.module: set(_imports(source, modules)) - {source.module} for source in sources}


def _imports(source: Source, modules: set[str]) -> Iterator[str]:
    is_package = source.path.name == "__init__.py"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _nearest(alias.name, modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the module's own package
                parts = source.module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *filter(None, [base])])
            for alias in node.names:
                yield from _nearest(f"{base}.{alias.name}", modules, least=base)


def _nearest(name: str, modules: set[str], *, least: str = "") -> Iterator[str]:
    while name and name not in modules:
        if name == least:
            return
        name = name.rpartition(".")[0]
    if name:
        yield name


def _single_importers(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules that exactly one other module of the package imports, with that one."""
    importers = collections.defaultdict(list)
    for module, others in graph.items():
        for other in others:
            importers[other].append(module)
    return [f"{module} <- {by[0]}" for module, by in sorted(importers.items()) if len(by) == 1]


def _lone_protocols(sources: Sequence[Source]) -> list[str]:
    """Return the Protocols that at most one class of the package fulfils: it derives, or has all public members."""
    classes = [
        (source, node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    protocols = [(source, node) for source, node in classes if "Protocol" in map(_last_name, node.bases)]
    members = {node.name: _members(node) for _, node in classes}
    bases = {node.name: {*map(_last_name, node.bases)} for _, node in classes}

    def inherited(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        above = (inherited(base, seen | {name}) for base in bases.get(name, set()) - seen - {name})
        return members.get(name, set()).union(*above)

    others = [node for source, node in classes if not any(node is protocol for _, protocol in protocols)]
    return [
        f"{source.module} {node.name}"
        for source, node in protocols
        if sum(node.name in bases[each.name] or _members(node) <= inherited(each.name) for each in others) < 2
        and "__call__" not in _members(node)
    ]


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _members(node: ast.ClassDef) -> set[str]:
    """Return what a class defines: methods, annotated names and attributes set on ``self``."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    names |= {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    names |= {
        target.id
        for each in node.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    names |= {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return {name for name in names if not name.startswith("_") or name == "__call__"}


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or not (Tarjan's components of two or more)."""
    # `low` is the earliest module on the stack that a module's imports lead back to; a module whose `low` is itself
    # ends a component: all above it on the stack. E.g. a -> b -> c -> b: low[b] = low[c] = b, so {b, c} is one.
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                circles.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return sorted(circles)


def format_counts(counts: Counts) -> str:
    """Return one line a count, and below it the places it is made of."""
    lines = []
    for name, value in dataclasses.asdict(counts).items():
        title = name.replace("_", " ")
        if isinstance(value, list | dict):
            lines.append(f"{title:36}{len(value)}")
            lines += [f"    {_place(each, value)}" for each in value]
        else:
            lines.append(f"{title:36}{value}")
    return "\n".join(lines)


def _place(each: object, value: object) -> str:
    if isinstance(value, dict):
        return f"{each}: {', '.join(value[each])}"
    return ", ".join(each) if isinstance(each, list) else str(each)


def main() -> None:
    """Print the counts of the checkout named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--package", default="gpp_plugin", help="the package in it that is counted")
    parser.add_argument(
        "--without", nargs="*", default=["bench"], help="sub-folders that are left out (until f000c03: bench)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    folder = args.checkout.resolve() / args.package
    if not folder.is_dir():
        parser.error(f"{folder} is no folder; name a checkout, and with --package the package in it")
    counts = count_package(folder, without=args.without)
    print(json.dumps(dataclasses.asdict(counts)) if args.json else format_counts(counts))


if __name__ == "__main__":
    main()
