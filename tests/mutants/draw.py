"""Draws the faults: a seed, the same number a layer, no two in one function.

    python -m tests.mutants.draw --seed 31 --each 9

Changes of operators, comparisons, numbers, arguments and conditions are mutmut's; those that pipelines ask for are here: a
statement left out, ``max`` for ``min``, ``sum`` for ``max``. A change that only alters a text is not drawn, nor one that
any call would fail by. mutmut comes with ``make install``: it is of the extra ``dev``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import fnmatch
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import libcst as cst
from mutmut.mutation import mutators

from tests.mutants.faults import LIST, ROOT, DoesNotApply, Fault, changed, functions

LAYERS: dict[str, tuple[str, ...]] = {
    "costs": ("plan/costs/*",),
    "search": (
        "plan/graphpipe/*", "plan/refine/*", "plan/memory/*", "plan/auto.py",
        "plan/choose_schedule.py",
    ),
    "lowering": (
        "schedule/lower.py", "schedule/messages.py", "schedule/gathers.py", "schedule/program_sets.py",
        "schedule/build*.py", "schedule/orders/*",
    ),
    "validators": ("schedule/checks/*", "plan/validate_plan.py", "plan/request.py"),
    "messages": ("runtime/messages/*", "runtime/executor.py", "runtime/split.py"),
    "gradients": (
        "engine/gradient_store.py", "engine/partitioned_gradients.py", "engine/stage_step.py",
        "engine/sharded_weights.py", "engine/rank_engine.py", "integrations/deepspeed/stage_optimizer.py",
    ),
    "checkpoints": ("engine/checkpoints/*",),
    "data": ("engine/loading/*", "data.py"),
    "units": (
        "plan/costs/planned_lengths.py", "runtime/stage_runner.py", "runtime/unit_patterns.py",
        "runtime/batches.py",
    ),
    "guards of capture": ("capture/*.py", "capture/tracing/*", "capture/eager/*", "model/verification.py"),
    "guards of steps": (
        "runtime/ranks/agreement.py", "engine/model_watch.py", "engine/memory_watch.py",
        "engine/metrics.py",
    ),
    "activations": ("runtime/memory/*", "runtime/random_streams.py", "runtime/compute.py"),
    "evaluation": ("engine/mini_batch_runner.py", "runtime/rank_programs.py", "schedule/orders/gpipe.py"),
    "generation": ("model/generation/*", "integrations/huggingface/generate_calls.py"),
}  # fmt: skip
"""Which files make up a layer, below the package. What is drawn is then addressed by function."""
OPERATORS = {
    mutators.operator_number: 1.0,
    mutators.operator_name: 1.0,
    mutators.operator_augmented_assignment: 0.5,
    mutators.operator_remove_unary_ops: 1.0,
    mutators.operator_arg_removal: 1.0,
    mutators.operator_keywords: 1.0,
    mutators.operator_swap_op: 3.0,
    mutators.operator_if_exp: 1.0,
}
"""mutmut's changes, and how often a kind is drawn beside the others."""
WEIGHTS = {each.__name__: weight for each, weight in OPERATORS.items()} | {"drop": 1.5, "swap call": 1.5}
SWAPPED = {"max": "min", "min": "max", "sum": "max"}
TEXTS = ("raise ", "logger.", "log.", "warnings.", "_LOG.", "assert ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    kind: str
    before: ast.AST
    after: ast.AST


def draw(*, seed: int, each: int, package: Path = ROOT / "gpp_plugin") -> list[Fault]:
    """Return ``each`` faults of every layer."""
    rng = random.Random(seed)
    taken: set[str] = set()
    drawn: list[Fault] = []
    for layer, patterns in LAYERS.items():
        drawn += _draw_layer(rng, layer, _places(package, patterns), each, taken)
    return drawn


def _places(package: Path, patterns: Iterable[str]) -> list[tuple[Path, str]]:
    """Return file and qualified name of every function of some files that computes something."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not any(fnmatch.fnmatch(name, each) and name.count("/") == each.count("/") for each in patterns):
            continue
        for qualified, node in functions(ast.parse(path.read_text())):
            if node.end_lineno is not None and node.end_lineno - node.lineno >= 3:
                found.append((path, qualified))
    return found


def _draw_layer(
    rng: random.Random, layer: str, places: list[tuple[Path, str]], each: int, taken: set[str]
) -> Iterator[Fault]:
    left = each
    while left and places:
        path, name = places.pop(rng.randrange(len(places)))
        fault = _fault(rng, layer, path, name)
        if fault is not None and fault.function not in taken:
            taken.add(fault.function)
            left -= 1
            yield fault


def _fault(rng: random.Random, layer: str, path: Path, name: str) -> Fault | None:
    source = path.read_text()
    node = dict(functions(ast.parse(source)))[name]
    changes = list(_changes(cst.parse_module(ast.unparse(node)), node))
    weights = Counter(each.kind for each in changes)
    rng.shuffle(changes)
    for _ in range(len(changes)):
        kind = rng.choices(sorted(weights), [WEIGHTS[k] for k in sorted(weights)])[0]
        change = next((each for each in changes if each.kind == kind), None)
        if change is None:
            del weights[kind]
            if not weights:
                return None
            continue
        changes.remove(change)
        before, after = ast.unparse(change.before), ast.unparse(change.after)
        fault = Fault(layer=layer, function=f"{path.stem}.{name}", before=before, after=after)
        try:
            compile(changed(source, fault)[0], str(path), "exec")
        except (DoesNotApply, SyntaxError, ValueError):
            continue
        return fault
    return None


def _changes(module: cst.Module, function: ast.AST) -> Iterator[_Change]:
    """Yield the changes of one function, as pairs of the smallest syntax that differs."""
    original = ast.parse(module.code)
    for node in _walk(module):
        for kind, operator in mutators.mutation_operators:
            if operator not in OPERATORS or not isinstance(node, kind):
                continue
            for other in operator(node):
                mutated = module.deep_replace(node, other)
                with_fault = _parsed(mutated.code)
                pair = with_fault and _difference(original, with_fault)
                if pair and not _is_crude(*pair) and not _is_text(original, pair[0]):
                    yield _Change(kind=operator.__name__, before=pair[0], after=pair[1])
    for node in ast.walk(original):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
            name = ast.Name(SWAPPED[node.func.id], ast.Load())
            after = ast.Call(func=name, args=node.args, keywords=node.keywords)
            yield _Change(kind="swap call", before=node, after=after)
        if isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            if not ast.unparse(node).startswith(TEXTS):
                yield _Change(kind="drop", before=node, after=ast.Pass())


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        if not isinstance(child, cst.Annotation | cst.Decorator | cst.Parameters):
            yield from _walk(child)


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def _difference(one: ast.AST, other: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """Return the smallest expression or statement that differs between two trees; None if none or several do."""
    if ast.dump(one) == ast.dump(other):
        return None
    if type(one) is type(other):
        inner = []
        for name in one._fields:
            mine, others = getattr(one, name, None), getattr(other, name, None)
            if isinstance(mine, list) and isinstance(others, list) and len(mine) == len(others):
                inner += [(a, b) for a, b in zip(mine, others, strict=True) if _dumped(a) != _dumped(b)]
            elif _dumped(mine) != _dumped(others):
                inner.append((mine, others))
        if len(inner) == 1 and isinstance(inner[0][0], ast.AST) and isinstance(inner[0][1], ast.AST):
            deeper = _difference(*inner[0])
            if deeper is not None:
                return deeper
    if isinstance(one, ast.expr) and isinstance(other, ast.expr):
        return one, other
    simple = isinstance(one, ast.stmt) and not hasattr(one, "body")
    return (one, other) if simple and isinstance(other, ast.stmt) else None


def _dumped(node: object) -> str:
    if isinstance(node, list):
        return repr([_dumped(each) for each in node])
    return ast.dump(node) if isinstance(node, ast.AST) else repr(node)


def _is_crude(before: ast.AST, after: ast.AST) -> bool:
    """Return whether any call of the function would fail: an argument that has become None, a positional one left out."""
    if isinstance(after, ast.Constant) and after.value is None:
        return True
    both_calls = isinstance(before, ast.Call) and isinstance(after, ast.Call)
    return both_calls and len(before.args) != len(after.args)


def _is_text(tree: ast.AST, node: ast.AST) -> bool:
    """Return whether a change only alters what an error or a log line says."""
    text = ast.unparse(node)
    for each in ast.walk(tree):
        is_said = isinstance(each, ast.Raise | ast.JoinedStr) or (
            isinstance(each, ast.Expr) and ast.unparse(each).startswith(TEXTS)
        )
        if is_said and text in ast.unparse(each):
            return True
    return False


def main() -> None:
    """Draw and write the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--each", type=int, default=9, help="faults a layer")
    args = parser.parse_args()
    faults = draw(seed=args.seed, each=args.each)
    rows = [{k: v for k, v in dataclasses.asdict(each).items() if v not in ("", 0)} for each in faults]
    LIST.write_text(json.dumps({"seed": args.seed, "faults": rows}, indent=1) + "\n")
    print(f"seed {args.seed}: {len(faults)} faults in {len(LAYERS)} layers")
    for each in faults:
        print(each)


if __name__ == "__main__":
    main()
