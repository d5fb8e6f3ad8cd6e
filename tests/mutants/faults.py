"""A fault: one small change of one function, addressed by the function's name and the syntax it changes.

So a fault survives a file that moves and lines that shift. It no longer applies once its expression is rewritten;
`make mutants` then says so, and it is drawn anew.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.json")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class DoesNotApply(ValueError):
    """The function is gone, or no longer holds the expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault.

    Args:
        layer: what the function belongs to, e.g. ``costs``.
        function: the qualified name behind the file's basename, e.g. ``kfkb.kfkb_schedule``.
        before: the expression or statement, as `ast.unparse` writes it.
        after: what stands there instead.
        occurrence: which of several equal ones in the function.
        equivalent: the proof, where no test can see it; it is then struck from the score.
    """

    layer: str
    function: str
    before: str
    after: str
    occurrence: int = 0
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.layer}: {self.function}: `{_short(self.before)}` -> `{_short(self.after)}`"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else line[:67] + "..."


def read_faults(path: Path = LIST) -> list[Fault]:
    """Return the faults of the list."""
    return [Fault(**row) for row in json.loads(path.read_text())["faults"]]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield all functions below a node with their qualified names, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def place_of(fault: Fault, package: Path = ROOT / "gpp_plugin") -> tuple[Path, int]:
    """Return the file that holds the fault's function, and the line: basenames occur once in the package.

    Raises:
        DoesNotApply: no file of that name, or it no longer holds the function or the expression.
    """
    basename = fault.function.split(".")[0]
    for path in package.rglob(f"{basename}.py"):
        return path, changed(path.read_text(), fault)[1]
    raise DoesNotApply(f"{fault}: no file {basename}.py")


def changed(source: str, fault: Fault) -> tuple[ast.Module, int]:
    """Return the syntax tree of a file with the fault planted, and the line where it is.

    Raises:
        DoesNotApply: the file does not hold the function, or the function not the expression.
    """
    tree = ast.parse(source)
    name = fault.function.split(".", 1)[1]
    for found, function in functions(tree):
        if found == name:
            swap = _Swap(fault)
            for number, statement in enumerate(function.body):
                function.body[number] = swap.visit(statement)
            if swap.left >= 0:
                raise DoesNotApply(f"{fault}: the function no longer holds it")
            return ast.fix_missing_locations(tree), swap.line
    raise DoesNotApply(f"{fault}: no such function")


class _Swap(ast.NodeTransformer):
    """Puts what a fault says in place of one occurrence."""

    def __init__(self, fault: Fault) -> None:
        before, after = ast.parse(fault.before).body[0], ast.parse(fault.after).body[0]
        if isinstance(before, ast.Expr) and isinstance(after, ast.Expr):
            before, after = before.value, after.value
        self.before = ast.unparse(before)
        self.kind = ast.expr if isinstance(before, ast.expr) else ast.stmt
        self.after = after
        self.left = fault.occurrence
        self.line = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if self.left >= 0 and isinstance(node, self.kind) and ast.unparse(node) == self.before:
            self.left -= 1
            if self.left < 0:
                self.line = node.lineno  # type: ignore[attr-defined]
                return ast.copy_location(self.after, node)
        return self.generic_visit(node)
