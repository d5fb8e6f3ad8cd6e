"""Changes modules of the package as they are imported: a fault is planted, or probes note which code a test reaches.

`GPP_FAULT` holds one fault as JSON. `GPP_REACH` names a folder: each block of statements then sets a byte when it runs,
and `note` appends what was set since the last call to a file of the process, under the name of the test.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.faults import ROOT, Fault, changed, functions, place_of

PACKAGE = "gpp_plugin"
HITS = bytearray()
"""A byte a block of the package, in the order of `block_places`."""


def install() -> None:
    """Make this process's imports of the package change as the environment says; once, however often it is called."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "GPP_FAULT" in os.environ:
        fault = Fault(**json.loads(os.environ["GPP_FAULT"]))
        sys.meta_path.insert(0, _Finder(_Planted(fault, place_of(fault)[0])))
    else:
        probed = _Probed()
        HITS.extend(bytes(probed.size))
        builtins.__gpp_hits__ = HITS  # type: ignore[attr-defined]  # a module that runs as __main__ finds it too
        sys.meta_path.insert(0, _Finder(probed))
        atexit.register(note)
        leave = os._exit

        def exit_noted(status: int) -> None:
            note()
            leave(status)

        os._exit = exit_noted  # type: ignore[assignment]


def come_first() -> None:
    """Stand before pytest's own finder, which takes modules that are named on the command line."""
    sys.meta_path.sort(key=lambda finder: not isinstance(finder, _Finder))


def note(label: str | None = None) -> None:
    """Write which blocks ran since the last call, under a test's name, and begin anew."""
    if not HITS:
        return
    found = [number for number, hit in enumerate(HITS) if hit] if any(HITS) else []
    HITS[:] = bytes(len(HITS))
    label = label or os.environ.get("PYTEST_CURRENT_TEST")
    if found and label:
        with open(os.path.join(os.environ["GPP_REACH"], f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps([label, found]) + "\n")


def block_places(package: Path = ROOT / PACKAGE) -> list[tuple[str, int, int]]:
    """Return file, first and last line of every block, by its number."""
    places = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        for block in _blocks(ast.parse(path.read_text())):
            places.append((name, block[0].lineno, block[-1].end_lineno or block[-1].lineno))
    return places


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements in functions, in a fixed order."""
    for _, function in functions(tree):
        stack: list[ast.AST] = [function]
        while stack:
            node = stack.pop()
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    yield block
            inner = ast.iter_child_nodes(node)
            stack += [each for each in inner if not isinstance(each, ast.expr) and not _is_definition(each)]


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


class _Planted:
    """One file with a fault in it."""

    def __init__(self, fault: Fault, path: Path) -> None:
        self._fault = fault
        self._path = path

    def tree(self, path: Path, source: str) -> ast.Module | None:
        return changed(source, self._fault)[0] if path == self._path else None


class _Probed:
    """Every file with a probe in each block."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        places = block_places()
        self.size = len(places)
        for number, (name, _, _) in enumerate(places):
            self._first.setdefault(name, number)

    def tree(self, path: Path, source: str) -> ast.Module | None:
        name = path.relative_to(ROOT / PACKAGE).as_posix()
        if name not in self._first:
            return None
        tree = ast.parse(source)
        for number, block in enumerate(list(_blocks(tree)), self._first[name]):
            probe = ast.parse(f"__gpp_hits__[{number}] = 1").body[0]
            is_docstring = isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant)
            for each in ast.walk(probe):
                ast.copy_location(each, block[0])
            block.insert(1 if is_docstring else 0, probe)
        return tree


class _Finder:
    """Finds modules of the package where the others find them, and gives them a loader that changes their code."""

    def __init__(self, change: _Planted | _Probed) -> None:
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        for finder in sys.meta_path:  # pytest's own has another loader
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = _Loader(spec.loader.name, spec.loader.path, self._change)
                return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, change: _Planted | _Probed) -> None:
        super().__init__(name, path)
        self._change = change

    def get_code(self, fullname: str) -> CodeType | None:
        path = Path(self.path)
        if path.is_relative_to(ROOT / PACKAGE):
            tree = self._change.tree(path, path.read_text())
            if tree is not None:
                return compile(tree, str(path), "exec", dont_inherit=True)
        return super().get_code(fullname)
