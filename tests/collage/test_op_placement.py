"""Op-level placement against brute force, and what more backends do to it."""

from __future__ import annotations

import random

import pytest

from gpp_plugin.collage.op_placement import OperatorGroup, place_operators
from gpp_plugin.collage.patterns import Operator, OperatorGraph, run_order
from gpp_plugin.errors import PlanInfeasible
from tests.collage.test_patterns import random_graph

EPSILON = 1.5


def random_candidates(graph: OperatorGraph, numbers: random.Random) -> dict[OperatorGroup, float | None]:
    """Every operator on torch, and random convex groups on two others: costs that do not add up, some not measurable."""
    size = len(graph.operators)
    costs: dict[OperatorGroup, float | None] = {
        OperatorGroup("torch", 1 << i): numbers.uniform(1, 9) for i in range(size)
    }
    for _ in range(12):
        mask = graph.mask(f"o{i}" for i in numbers.sample(range(size), numbers.randint(1, min(4, size))))
        if graph.is_convex(mask):
            own = numbers.uniform(0.3, 1.1) * sum(
                costs[OperatorGroup("torch", 1 << i)] for i in range(size) if mask >> i & 1
            )
            costs[OperatorGroup(numbers.choice(["one", "two"]), mask)] = (
                None if numbers.random() < 0.1 else own
            )
    return costs


def brute_force(graph: OperatorGraph, costs: dict[OperatorGroup, float | None]) -> float:
    """The least over every exact cover of the operators whose groups can run in some order."""
    best = float("inf")
    known = [(group.operators, own) for group, own in costs.items() if own is not None]

    def cover(covered: int, groups: list[int], total: float) -> None:
        nonlocal best
        if covered == graph.everything:
            if total < best and len(run_order(graph, groups)) == len(groups):
                best = total
            return
        lowest = ~covered & (covered + 1)
        for mask, own in known:
            if mask & lowest and not mask & covered and total + own + EPSILON < best:
                cover(covered | mask, [*groups, mask], total + own + EPSILON)

    cover(0, [], 0.0)
    return best


def test_it_equals_brute_force_on_two_hundred_small_graphs() -> None:
    mixed = 0
    for seed in range(200):
        numbers = random.Random(seed)
        graph = random_graph(seed, numbers.randint(3, 9))
        costs = random_candidates(graph, numbers)
        asked: list[OperatorGroup] = []

        def measure(group: OperatorGroup, costs=costs, asked=asked) -> float | None:
            asked.append(group)
            return costs[group]

        found = place_operators(graph, list(costs), measure, epsilon_us=EPSILON)
        masks = [group.operators for group in found.groups]
        assert sum(masks) == graph.everything and len(run_order(graph, masks)) == len(masks)
        assert found.cost_us == pytest.approx(brute_force(graph, costs))
        assert found.cost_us == pytest.approx(sum(costs[group] + EPSILON for group in found.groups))
        assert len(asked) == len(set(asked)), "a group is measured once"
        mixed += len(found.backends) > 1
    assert mixed > 100


def test_an_operator_that_no_backend_runs_is_named() -> None:
    graph = OperatorGraph(
        [Operator(key="a", name="gelu", inputs=()), Operator(key="b", name="topk", inputs=("a",))]
    )
    with pytest.raises(
        PlanInfeasible, match=r"no backend runs operator 'b' \(topk\); allow the backend torch"
    ):
        place_operators(graph, [OperatorGroup("one", 0b01)], lambda group: 1.0)


def test_with_few_states_it_still_answers() -> None:
    graph = OperatorGraph([Operator(key=f"o{i}", name="op", inputs=()) for i in range(12)])
    costs = {OperatorGroup("torch", 1 << i): 1.0 for i in range(12)} | {
        OperatorGroup("one", 1 << i | 1 << i + 1): 1.0 for i in range(11)
    }
    found = place_operators(graph, list(costs), costs.__getitem__, most_states=1)
    masks = [group.operators for group in found.groups]
    assert sum(masks) == graph.everything and len(run_order(graph, masks)) == len(masks)
