"""Op-level placement: the groups, each on a backend, whose costs add up to the least (Collage, Algorithm 1).

    C(s + g) = min over s and g of C(s) + M(g) + epsilon

s is what has been placed, g a candidate that can run next, M its measured time, epsilon what going from one group to
the next costs. Visited in the order of how much is placed; the *frontier* of s is its first operator that is not.

The paper takes any group rooted at the frontier. That is too few and too many: a group may need operators behind the
frontier first, and two groups that need each other are no placement. Here s only ever grows by groups whose inputs are
in s, so that every state can run, and:

    a group that holds the frontier can be next      if all that hold it can, one of them is next
    one of them must wait for others                 any group may be next

which reaches every placement that can run (the group of its frontier is next, or waits for some group that is ready).
Deviation: at most ``most_states`` states of each size stay, the cheapest.

The candidates are the groups that backends offer by their patterns and rules.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, sections 2.3, listing 1,
    2.4.2, Algorithm 1, and 2.4.3, figure 2.6)
Tests: tests/collage/test_op_placement.py, tests/collage/test_graph_search.py, tests/collage/test_patterns.py
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpp_plugin.collage.patterns import (
    BasePatternRule,
    OperatorGraph,
    OperatorPattern,
    bits,
    generate_groups,
    match_pattern,
    run_order,
)
from gpp_plugin.errors import ExtensionError, PlanInfeasible
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


def find_candidates(
    graph: OperatorGraph, backends: Iterable[BackendPatterns]
) -> tuple[tuple[OperatorGroup, ...], list[str]]:
    """Return the groups that backends offer on a graph, each once, and the patterns and rules that offer none.

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
    return tuple(groups), unmatched


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


# Op-level placement (Algorithm 1).

MOST_STATES = 4096

Measurer = Callable[[OperatorGroup], float | None]
"""Returns microseconds, or None for a group that the backend cannot run after all."""


@dataclass(slots=True)
class _State:
    cost: float
    before: int  # the state it came from
    group: OperatorGroup | None


def place_operators(
    graph: OperatorGraph,
    candidates: Sequence[OperatorGroup],
    measure: Measurer,
    *,
    epsilon_us: float = 0.0,
    most_states: int = MOST_STATES,
) -> Placement:
    """Return the cheapest placement by the sum of its groups' costs.

    Args:
        measure: called once for each candidate, and only for those that a state can be followed by.
        epsilon_us: what each group costs beside its own time.

    Raises:
        PlanInfeasible: no candidates that can be measured hold some operator.
    """
    # Of the chain a -> b with a and b on torch (3 us each) and {a, b} on another (5 us), epsilon 1:
    #
    #     states   {}: 0      {a}: 4      {a, b}: min(4 + 4, 0 + 6) = 6
    #
    # A state is visited when all smaller ones were, so its cost is final, and each group is measured once.
    costs: dict[OperatorGroup, float | None] = {}
    holding: dict[int, list[OperatorGroup]] = defaultdict(list)
    for group in candidates:
        for i in bits(group.operators):
            holding[i].append(group)
    needs = {group: graph.needs(group.operators) for group in candidates}
    states = {0: _State(0.0, 0, None)}
    followed: dict[int, int] = defaultdict(int)  # states followed so far, by their size
    queue: list[tuple[int, float, int]] = [(0, 0.0, 0)]
    while queue:
        size, cost, placed = heapq.heappop(queue)
        if cost > states[placed].cost or placed == graph.everything:
            continue  # reached more cheaply since it was put there
        followed[size] += 1
        if followed[size] > most_states:
            continue
        for group in _next_groups(graph, candidates, holding, needs, placed):
            if group not in costs:
                costs[group] = measure(group)
            own = costs[group]
            if own is None:
                continue
            grown, total = placed | group.operators, cost + own + epsilon_us
            if grown not in states or total < states[grown].cost:
                states[grown] = _State(total, placed, group)
                heapq.heappush(queue, (grown.bit_count(), total, grown))
    if graph.everything not in states:
        _refuse(graph, holding, costs)
    groups: list[OperatorGroup] = []
    state = states[graph.everything]
    while state.group is not None:
        groups.append(state.group)
        state = states[state.before]
    return Placement(groups=tuple(reversed(groups)), cost_us=states[graph.everything].cost)


def _next_groups(
    graph: OperatorGraph,
    candidates: Sequence[OperatorGroup],
    holding: dict[int, list[OperatorGroup]],
    needs: dict[OperatorGroup, int],
    placed: int,
) -> list[OperatorGroup]:
    """Return the groups that may run next: those of the frontier, or any where one of these must wait."""
    # Equal costs are frequent (a state reached by the same groups in two orders); that is why the frontier decides.
    # Of operators side by side, any order of which is the same placement, only the one in the graph's order is made.
    unplaced = graph.everything & ~placed
    frontier = (unplaced & -unplaced).bit_length() - 1
    own = [group for group in holding[frontier] if not group.operators & placed]
    if all(not needs[group] & ~placed for group in own):
        return own
    return [group for group in candidates if not (group.operators & placed or needs[group] & ~placed)]


def _refuse(
    graph: OperatorGraph, holding: dict[int, list[OperatorGroup]], costs: dict[OperatorGroup, float | None]
) -> None:
    # an operator in no measured group is why; if each is in one, the groups wait for each other
    able = [i for i in range(len(graph.operators)) if any(costs.get(g) is not None for g in holding[i])]
    missing = [o for i, o in enumerate(graph.operators) if i not in able] or list(graph.operators)
    raise PlanInfeasible(
        f"no backend runs operator {missing[0].key!r} ({missing[0].name}); allow the backend torch, which runs all"
    )


# Graph-level placement: an evolutionary search over placements that are measured end to end.
#
# Op-level costs are of groups by themselves; a library that optimises a graph as a whole does better on more operators,
# and costs do not add up. So each operator that the op-level placement did not give to such a library has a digit: 0
# leaves it where it is, d gives it to the d-th library; operators of one library that touch become one group::
#
#     op-level       [conv relu]torch [add]torch [norm]torch
#     digits          1    1           0          1               library 1 is onnxruntime
#     placement      [conv relu]onnxruntime [add]torch [norm]onnxruntime
#
# Selection, two-point crossover and mutation make new digits of the fastest; what was measured is not measured again.
#
# Deviation: beside the op-level placement every backend that runs the whole graph by itself is measured first, and the
# fastest of all that were measured is the answer: never slower than the best single backend, by these measurements.


WholeMeasurer = Callable[[Placement], float | None]
"""Returns the microseconds of a placement end to end; None where it cannot be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How long an evolutionary search runs.

    Args:
        population: placements of a generation; ``parents`` of them make the next.
        generations: most of them; ``patience`` is how many may pass without a faster placement.
        mutation: the chance of each digit to become another.
    """

    population: int = 8
    parents: int = 4
    generations: int = 6
    patience: int = 2
    mutation: float = 0.15
    seed: int = 0


def search_placements(
    graph: OperatorGraph,
    op_level: Placement,
    measure: WholeMeasurer,
    *,
    singles: Sequence[str],
    libraries: Sequence[str],
    settings: SearchSettings | None = None,
) -> tuple[Placement, ...]:
    """Return the placements that the search measures end to end, the fastest first.

    Args:
        singles: backends that may run the whole graph, the first one the fallback.
        libraries: backends that operators may run on.

    Raises:
        ValueError: not one of the seeds could be measured.
    """
    settings = settings or SearchSettings()
    numbers = random.Random(settings.seed)
    tried: dict[tuple[OperatorGroup, ...], Placement | None] = {}

    # Groups in the order of their first operators are a placement's name: however digits came to it, it is measured
    # once, and one that cannot be built is not tried again.
    def try_placement(placement: Placement) -> float:
        key = tuple(sorted(placement.groups, key=lambda group: group.operators))
        if key not in tried:
            found = measure(placement)
            tried[key] = None if found is None else replace(placement, cost_us=found)
        known = tried[key]
        return float("inf") if known is None else known.cost_us

    for backend in singles:
        try_placement(Placement(groups=(OperatorGroup(backend, graph.everything),), cost_us=0.0))
    try_placement(op_level)
    # digits of the operators that are free to move, by position
    fixed = {i for g in op_level.groups if g.backend in libraries for i in bits(g.operators)}
    places = [i for i in range(len(graph.operators)) if i not in fixed]

    def time_of(digits: tuple[int, ...]) -> float:
        libraries_of = dict(zip(places, digits, strict=True))
        return try_placement(decode(graph, op_level, libraries_of, libraries))

    if places and libraries:
        _evolve(len(places), len(libraries), time_of, numbers, settings)
    measured = sorted((p for p in tried.values() if p is not None), key=lambda p: p.cost_us)
    if not measured:
        raise ValueError("no placement could be measured, not even of a single backend")
    return tuple(measured)


def _evolve(
    length: int,
    num_libraries: int,
    time_of: Callable[[tuple[int, ...]], float],
    numbers: random.Random,
    settings: SearchSettings,
) -> None:
    """Make generation after generation until none is faster than the one before."""
    digits = range(num_libraries + 1)

    def mutated(genome: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers.choice(digits) if numbers.random() < settings.mutation else d for d in genome)

    def crossed(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
        # two points: the stretch between them is b's
        first, last = sorted(numbers.randrange(length + 1) for _ in range(2))
        return (*a[:first], *b[first:last], *a[last:])

    def made_of(parents: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        a, b = numbers.choice(parents), numbers.choice(parents)
        return mutated(crossed(a, b))

    # seeds: all as the op-level placement has it, and all on each library
    population = [(d,) * length for d in digits]
    population += [mutated((0,) * length) for _ in range(settings.population - len(population))]
    best, idle = float("inf"), 0
    for _ in range(settings.generations):
        ranked = sorted(dict.fromkeys(population), key=time_of)
        fastest = time_of(ranked[0])
        idle = 0 if fastest < best else idle + 1
        best = min(best, fastest)
        if idle > settings.patience:
            return
        parents = ranked[: settings.parents]
        population = [*parents, *(made_of(parents) for _ in range(settings.population - len(parents)))]


def decode(
    graph: OperatorGraph, op_level: Placement, digits: dict[int, int], libraries: Sequence[str]
) -> Placement:
    """Return the placement that digits stand for: by position of an operator, 0 or the number of its library.

    What is left of a group of the op-level placement runs where it ran, operator by operator where others went out of
    its middle; operators of one library that touch become one group as long as it is convex and all groups can run.
    """
    # [conv relu]torch with digits conv: 1, relu: 0 becomes [conv]one and [relu]torch. A group of which nothing moves
    # stays whole: it may be a pattern's, whose operators the backend cannot run one by one.
    groups: list[OperatorGroup] = []
    for group in op_level.groups:
        moved = [i for i in bits(group.operators) if digits.get(i)]
        groups += [OperatorGroup(libraries[digits[i] - 1], 1 << i) for i in moved]
        rest = group.operators & ~sum(1 << i for i in moved)
        if rest and not moved:
            groups.append(group)
        else:
            groups += [OperatorGroup(group.backend, 1 << i) for i in bits(rest)]
    groups = _merged(graph, groups, libraries)
    order = run_order(graph, [group.operators for group in groups])
    assert len(order) == len(groups), "groups wait for each other"
    return Placement(groups=tuple(groups[i] for i in order), cost_us=0.0)


def _merged(
    graph: OperatorGraph, groups: list[OperatorGroup], libraries: Sequence[str]
) -> list[OperatorGroup]:
    """Join groups of one library that touch, in the graph's order, where what comes of it can run."""
    # Greedy, in the graph's order: each group joins the first earlier one of its library that it reads from. Whether
    # all groups still have an order is checked each time, as two joins that are right alone may wait for each other.
    groups = sorted(groups, key=lambda group: group.operators & -group.operators)
    merged: list[OperatorGroup] = []
    for index, group in enumerate(groups):
        rest = groups[index + 1 :]
        for place, other in enumerate(merged):
            joined = OperatorGroup(group.backend, group.operators | other.operators)
            if group.backend not in libraries or other.backend != group.backend:
                continue
            touches = graph.needs(group.operators) & other.operators
            if not touches or not graph.is_convex(joined.operators):
                continue
            trial = [*merged[:place], joined, *merged[place + 1 :]]
            masks = [each.operators for each in (*trial, *rest)]
            if len(run_order(graph, masks)) == len(masks):
                merged = trial
                break
        else:
            merged.append(group)
    return merged
