"""Groups of operators, each on a backend: the candidates there are on a graph, and placements made of them.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.3, listing 1)
Tests: tests/collage/test_patterns.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpp_plugin.collage.operator_graph import OperatorGraph, is_acyclic_cover, run_order
from gpp_plugin.collage.patterns import BasePatternRule, OperatorPattern, generate_groups, match_pattern
from gpp_plugin.errors import ExtensionError
from gpp_plugin.plugins import BACKENDS, find_backend


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """Operators that a backend runs as one.

    Args:
        operators: their set, as of `OperatorGraph`.
    """

    backend: str
    operators: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Groups in an order in which they can run.

    Args:
        cost_us: by the costs of its groups, or as measured.
    """

    groups: tuple[OperatorGroup, ...]
    cost_us: float

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the backends, each once, in the order of their first groups."""
        return tuple(dict.fromkeys(group.backend for group in self.groups))

    def check(self, graph: OperatorGraph) -> None:
        """Assert that each operator is in one group and that no groups wait for each other."""
        assert is_acyclic_cover(graph, [group.operators for group in self.groups]), "not a placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPatterns:
    """What one backend runs.

    Args:
        runs_any: any operators at all, so also the whole graph: what it cannot do is seen when it is built (Collage's
            graph inference libraries).
    """

    backend: str
    patterns: Sequence[OperatorPattern] = ()
    rules: Sequence[BasePatternRule] = ()
    runs_any: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All groups that backends offer on a graph, and the patterns and rules that offer none."""

    groups: tuple[OperatorGroup, ...]
    unmatched: tuple[str, ...]


def find_candidates(graph: OperatorGraph, backends: Iterable[BackendPatterns]) -> Candidates:
    """Return what each backend can run of a graph, each group of a backend once.

    Raises:
        ExtensionError: a rule fails, or names a group that is not convex.
    """
    # Each pattern is tried at each operator as the one that makes its result; each rule grows groups of its own; a
    # backend that runs anything is a candidate for each operator and for all of them together. What two patterns or
    # rules of a backend both name is one candidate.
    groups: dict[OperatorGroup, None] = {}
    unmatched: list[str] = []
    for own in backends:
        for pattern in own.patterns:
            matches = [match_pattern(pattern, graph, operator.key) for operator in graph.operators]
            found = [OperatorGroup(own.backend, mask) for mask in matches if mask is not None]
            groups.update(dict.fromkeys(found))
            if not found:
                unmatched.append(f"pattern {pattern} of backend {own.backend!r}")
        for rule in own.rules:
            found = [
                OperatorGroup(own.backend, mask) for mask in generate_groups(rule, graph, backend=own.backend)
            ]
            groups.update(dict.fromkeys(found))
            if not found:
                unmatched.append(f"rule {type(rule).__name__} of backend {own.backend!r}")
        if own.runs_any:
            every = [1 << i for i in range(len(graph.operators))]
            groups.update(
                dict.fromkeys(OperatorGroup(own.backend, mask) for mask in (*every, graph.everything))
            )
    return Candidates(groups=tuple(groups), unmatched=tuple(unmatched))


def in_run_order(graph: OperatorGraph, groups: Sequence[OperatorGroup], cost_us: float) -> Placement:
    """Return the placement of these groups, in the order in which they run."""
    order = run_order(graph, [group.operators for group in groups])
    assert len(order) == len(groups), "groups wait for each other"
    return Placement(groups=tuple(groups[i] for i in order), cost_us=cost_us)


# What users say that backends run: `add_backend`, `add_backend_pattern` and `add_backend_pattern_rule`.
#
# They hold in the process that calls them; a package that always adds a backend has an entry point
# (`gpp_plugin.plugins`).

_PATTERNS: dict[str, list[OperatorPattern]] = defaultdict(list)
_RULES: dict[str, list[BasePatternRule]] = defaultdict(list)


def add_backend(name: str, backend: Any) -> None:
    """Let a backend be used by this name in this process.

    Args:
        backend: an instance of a class derived from `gpp_plugin.plugins.Backend`.

    Raises:
        ExtensionError: the name is known already, or the object is no backend.
    """
    BACKENDS.add(name, backend)


def add_backend_pattern(backend: str, pattern: OperatorPattern) -> None:
    """Say that a backend runs what matches a pattern as one.

    Raises:
        ExtensionError: there is no such backend, or this is no pattern.
    """
    _check_known(backend)
    if not isinstance(pattern, OperatorPattern):
        raise ExtensionError(
            f"backend {backend!r}: {type(pattern).__name__} is no pattern of an operator; begin with is_op(name)"
        )
    _PATTERNS[backend].append(pattern)


def add_backend_pattern_rule(backend: str, pattern_rule: BasePatternRule) -> None:
    """Say by a rule what a backend runs as one.

    Raises:
        ExtensionError: there is no such backend, or this is no rule.
    """
    _check_known(backend)
    if not isinstance(pattern_rule, BasePatternRule):
        raise ExtensionError(
            f"backend {backend!r}: {type(pattern_rule).__name__} is no rule; give an instance of a class derived from "
            "gpp_plugin.BasePatternRule"
        )
    _RULES[backend].append(pattern_rule)


def patterns_of(name: str) -> BackendPatterns:
    """Return all that a backend runs: what it says itself, and what was added.

    Raises:
        ExtensionError: there is no such backend.
    """
    backend = find_backend(name)
    return BackendPatterns(
        backend=name,
        patterns=(*backend.patterns, *_PATTERNS[name]),
        rules=(*backend.pattern_rules, *_RULES[name]),
        runs_any=backend.is_graph_library,
    )


def forget(name: str) -> None:
    """Forget what was added of a backend: its patterns and rules, and itself unless it is built in or a package's."""
    BACKENDS.remove(name)
    _PATTERNS.pop(name, None)
    _RULES.pop(name, None)


def _check_known(backend: str) -> None:
    if backend not in BACKENDS:
        raise ExtensionError(
            f"no backend {backend!r}{BACKENDS.suggestion(backend)}; add it first with gpp_plugin.add_backend, or give "
            f"one of {', '.join(BACKENDS.names())}"
        )
