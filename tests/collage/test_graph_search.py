"""Graph-level search with times that are made up: a mix where that is fastest."""

from __future__ import annotations

import pytest

from gpp_plugin.collage.op_placement import (
    OperatorGroup,
    Placement,
    SearchSettings,
    decode,
    place_operators,
    search_placements,
)
from gpp_plugin.collage.patterns import Operator, OperatorGraph

LIBRARIES = ("one", "two")


def chain(size: int) -> OperatorGraph:
    return OperatorGraph(
        [Operator(key=f"o{i}", name="op", inputs=(f"o{i - 1}",) if i else ("x",)) for i in range(size)]
    )


def op_level_of(graph: OperatorGraph) -> Placement:
    groups = [OperatorGroup("torch", 1 << i) for i in range(len(graph.operators))]
    return place_operators(graph, groups, lambda group: 1.0)


def test_it_finds_a_mix_where_that_is_fastest() -> None:
    """The first half is fast on one library, the second on the other; a change of library costs little."""
    graph = chain(8)

    def measure(placement: Placement) -> float:
        total = 0.0
        for group in placement.groups:
            for i in range(8):
                if group.operators >> i & 1:
                    good = group.backend == ("one" if i < 4 else "two")
                    total += 1.0 if good else 2.0 if group.backend == "torch" else 3.0
            total += 0.2
        return total

    settings = SearchSettings(population=24, parents=8, generations=40, patience=12)
    options = {"singles": ("torch", *LIBRARIES), "libraries": LIBRARIES, "settings": settings}
    found, again = (search_placements(graph, op_level_of(graph), measure, **options) for _ in range(2))
    assert [(g.backend, g.operators) for g in found[0].groups] == [("one", 0x0F), ("two", 0xF0)]
    assert again == found, "the same seed, the same search"


def test_digits_give_operators_to_libraries_and_join_those_that_touch() -> None:
    graph = chain(4)
    op_level = Placement(groups=(OperatorGroup("torch", 0b0011), OperatorGroup("torch", 0b1100)), cost_us=0.0)
    kept = decode(graph, op_level, {}, LIBRARIES)
    assert kept.groups == op_level.groups
    moved = decode(graph, op_level, {1: 1, 2: 1, 3: 2}, LIBRARIES)
    assert moved.groups == (
        OperatorGroup("torch", 0b0001),
        OperatorGroup("one", 0b0110),
        OperatorGroup("two", 0b1000),
    )


def test_nothing_that_can_be_measured_is_said() -> None:
    with pytest.raises(ValueError, match="no placement could be measured"):
        search_placements(
            chain(2), op_level_of(chain(2)), lambda p: None, singles=("torch",), libraries=LIBRARIES
        )
