"""What users say that backends run: `add_backend`, `add_backend_pattern` and `add_backend_pattern_rule`.

They hold in the process that calls them; a package that always adds a backend has an entry point (`gpp_plugin.doors`).

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.3, listing 1)
Tests: tests/collage/test_patterns.py
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gpp_plugin.collage.candidates import BackendPatterns
from gpp_plugin.collage.pattern_rules import BasePatternRule
from gpp_plugin.collage.patterns import OperatorPattern
from gpp_plugin.errors import ExtensionError
from gpp_plugin.extensions import BACKENDS, find_backend

_PATTERNS: dict[str, list[OperatorPattern]] = defaultdict(list)
_RULES: dict[str, list[BasePatternRule]] = defaultdict(list)


def add_backend(name: str, backend: Any) -> None:
    """Let a backend be used by this name in this process.

    Args:
        backend: an instance of a class derived from `gpp_plugin.doors.Backend`.

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
