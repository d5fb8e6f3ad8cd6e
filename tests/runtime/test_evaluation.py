"""Evaluation on the training plan's stages: where blocks that only evaluation has run, and mini-batches of any size."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from gpp_plugin.engine.mini_batch_runner import Evaluator
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.runtime.batches import UnitBatch
from gpp_plugin.runtime.rank_programs import evaluation_plan, match_blocks, parts_of, split_evaluation
from tests.plan.graphs import make_graph

HELD = [{"a.w", "tied"}, {"b.w"}, {"c.w", "tied"}]


def plan_of(*sizes: tuple[int, tuple[int, ...], int], mini_batch: int = 48, unit: int = 2) -> PipelinePlan:
    """Return stages a, b, ... of so many samples a micro-batch, on these ranks, of so many tensor ranks each."""
    stages = tuple(
        Stage(
            name=name, blocks=(name,), ranks=ranks, micro_batch_size=size, in_flight=3 - number, tensor=tensor
        )
        for number, (name, (size, ranks, tensor)) in enumerate(zip("abc", sizes, strict=False))
    )
    return PipelinePlan(
        model="", graph="", planner="", mini_batch=mini_batch, loss_unit=unit, stages=stages, edges=()
    )


def graph_of(edges: list[tuple[str, str]], parameters: dict[str, tuple[str, ...]]) -> BlockGraph:
    graph = make_graph(edges)
    blocks = tuple(dataclasses.replace(b, parameters=parameters.get(b.name, ())) for b in graph.blocks)
    return dataclasses.replace(graph, blocks=blocks)


PLAN = plan_of((2, (0,), 1), (2, (1,), 1), (2, (2,), 1))


@pytest.mark.parametrize(
    ("edges", "parameters", "expected"),
    [
        # a head with all that stage b holds; and with a part of it, and a buffer, which no stage need hold
        ([("a", "b"), ("b", "c"), ("a", "head")], {"head": ("b.w",)}, [["a"], ["b", "head"], ["c"]]),
        ([("a", "head")], {"head": ("c.w", "running_mean")}, [["a"], [], ["head"]]),
        # tied: at the first stage that holds it behind what it reads
        ([("a", "b"), ("b", "head")], {"head": ("tied",)}, [["a"], ["b"], ["head"]]),
        ([("a", "head")], {"head": ("tied",)}, [["a", "head"], [], []]),
        # without parameters: beside the last of what it reads
        ([("a", "b"), ("b", "sum"), ("a", "sum")], {}, [["a"], ["b", "sum"], []]),
    ],
    ids=["all", "part", "behind", "first", "none"],
)
def test_new_blocks_go_where_their_parameters_are(
    edges: list[tuple[str, str]], parameters: dict[str, tuple[str, ...]], expected: list[list[str]]
) -> None:
    graph = graph_of(edges, parameters)
    known = {"a.w", "b.w", "c.w", "tied"}
    found = match_blocks(PLAN, graph, parameters=known, held=HELD)
    assert list(map(sorted, found)) == list(map(sorted, expected))
    plan = evaluation_plan(PLAN, graph, parameters=known, held=HELD)
    assert [list(stage.blocks) for stage in plan.stages] == found
    assert plan.graph == fingerprint(graph) and {stage.in_flight for stage in plan.stages} == {1}
    home = {name: number for number, own in enumerate(found) for name in own}
    assert {(e.src, e.dst) for e in plan.edges} == {
        (home[a], home[b]) for a, b in edges if home[a] != home[b]
    }


def test_a_block_whose_parameters_no_stage_holds_is_refused() -> None:
    graph = graph_of([("a", "b"), ("b", "head")], {"head": ("a.w", "b.w")})
    with pytest.raises(
        PlanError, match=r"runs head on stage b, which does not hold \['a.w'\]; ask for other"
    ):
        match_blocks(PLAN, graph, parameters={"a.w", "b.w"}, held=HELD)


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (24, [(0, 24, 2, True)]),
        (21, [(0, 12, 2, True), (12, 8, 2, False), (20, 1, 1, False)]),
        (12, [(0, 12, 2, True)]),
        (11, [(0, 10, 2, False), (10, 1, 1, False)]),
        (1, [(0, 1, 1, False)]),
        (0, []),
    ],
)
def test_a_mini_batch_of_any_size_is_run_in_up_to_three_parts(
    num_samples: int, expected: list[tuple[int, int, int, bool]]
) -> None:
    """Micro-batches of 4 and 6, units of 2; what is no whole micro-batch runs on one data position of each stage."""
    plan = plan_of((4, (0, 1), 1), (6, (2, 3, 4, 5), 2))
    parts = split_evaluation(plan, num_samples)
    assert [
        (p.first_sample, p.plan.mini_batch, p.plan.loss_unit, p.plan.stages == plan.stages) for p in parts
    ] == expected
    for part in parts:
        if part.plan.stages != plan.stages:
            assert [stage.ranks for stage in part.plan.stages] == [(0,), (2, 3)]
            assert {stage.micro_batch_size for stage in part.plan.stages} == {part.plan.loss_unit}


def test_units_are_evaluated_in_their_order_and_none_is_taken_apart() -> None:
    plan = plan_of((4, (0, 1), 1), (2, (2,), 1))  # a mini-batch of units is of whole micro-batches of 2
    units = tuple({"x": torch.full((1, 3 + n), float(n))} for n in range(5))
    parts = parts_of(plan, UnitBatch(units=units))
    assert [part.first_sample for part, _ in parts] == [0, 4]
    assert [list(rows.units) for _, rows in parts] == [list(units[:4]), list(units[4:])]


def test_weights_in_parts_are_gathered_whole_where_a_part_leaves_ranks_idle() -> None:
    evaluator = object.__new__(Evaluator)
    evaluator._plan = plan = plan_of((4, (0, 1), 1), (6, (2, 3, 4, 5), 2))
    evaluator._stages = SimpleNamespace(attached=lambda: "attached", gathered=lambda: "gathered")  # type: ignore[assignment]
    ways = [evaluator._weights_for(part.plan) for part in split_evaluation(plan, 21)]
    assert ways == ["attached", "gathered", "gathered"]
