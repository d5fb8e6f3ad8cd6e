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
Deviation: at most ``most_states`` states of each size stay, the cheapest; `is_exact` says whether any was dropped.

Source: Collage (PACT 2022, arXiv 2111.00655; here by the thesis, section 2.4.2, Algorithm 1)
Tests: tests/collage/test_op_placement.py
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpp_plugin.collage.candidates import OperatorGroup, Placement
from gpp_plugin.collage.operator_graph import OperatorGraph, bits
from gpp_plugin.errors import PlanInfeasible

MOST_STATES = 4096

Measurer = Callable[[OperatorGroup], float | None]
"""Returns microseconds, or None for a group that the backend cannot run after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """The placement found, and whether nothing cheaper can exist by these costs."""

    placement: Placement
    is_exact: bool


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
) -> OpPlacement:
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
    is_exact = True
    while queue:
        size, cost, placed = heapq.heappop(queue)
        if cost > states[placed].cost or placed == graph.everything:
            continue  # reached more cheaply since it was put there
        followed[size] += 1
        if followed[size] > most_states:
            is_exact = False
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
    return OpPlacement(placement=_followed_back(graph, states), is_exact=is_exact)


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


def _followed_back(graph: OperatorGraph, states: dict[int, _State]) -> Placement:
    groups: list[OperatorGroup] = []
    state = states[graph.everything]
    while state.group is not None:
        groups.append(state.group)
        state = states[state.before]
    return Placement(groups=tuple(reversed(groups)), cost_us=states[graph.everything].cost)


def _refuse(
    graph: OperatorGraph, holding: dict[int, list[OperatorGroup]], costs: dict[OperatorGroup, float | None]
) -> None:
    # an operator in no measured group is why; if each is in one, the groups wait for each other
    able = [i for i in range(len(graph.operators)) if any(costs.get(g) is not None for g in holding[i])]
    missing = [o for i, o in enumerate(graph.operators) if i not in able] or list(graph.operators)
    raise PlanInfeasible(
        f"no backend runs operator {missing[0].key!r} ({missing[0].name}); allow the backend torch, which runs all"
    )
