"""A stage holds its part of the mini-batch: in every planner's account of memory, and once."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.profile import InputCost
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.plan.costs.memory_formula import memory_breakdown, with_inputs
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plugins import PLANNERS
from tests.plan.graphs import chain, make_profile, make_request

MINI_BATCH, IMAGE, TABLE = 16, 1000, 400
READS = {"layers.0": ("image",), "layers.2": ("image", "table")}


def request_of(*, limit: int | None = None) -> PlanRequest:
    """Return a chain of four layers, the first and third of which read an image."""
    graph = chain(4)
    blocks = tuple(dataclasses.replace(b, inputs=READS.get(b.name, ())) for b in graph.blocks)
    graph = dataclasses.replace(graph, blocks=blocks)
    specs = [
        TensorSpec(name="image", dtype="float64", shape=(2, IMAGE), num_samples=2, layout=batch_layout()),
        TensorSpec(name="table", dtype="int32", shape=(TABLE,), num_samples=2, layout=UNIFORM),
        TensorSpec(name="unread", dtype="int32", shape=(TABLE,), num_samples=2, layout=UNIFORM),
    ]
    profile = make_profile(graph, saved=100.0, parameter=1000)
    request = make_request(graph, profile, ranks=2, mini_batch=MINI_BATCH)
    profile = with_inputs(request.profile, graph, specs, mini_batch=MINI_BATCH, dtype="bfloat16")
    return dataclasses.replace(request, profile=profile, memory_limit_bytes=limit)


def expected(blocks: tuple[str, ...], degree: int) -> int:
    image = 2 * IMAGE * MINI_BATCH // degree if {"layers.0", "layers.2"} & set(blocks) else 0
    return image + (4 * TABLE if "layers.2" in blocks else 0)


def test_entries_that_are_read_by_whom_and_how_large() -> None:
    assert request_of().profile.inputs == (
        InputCost(blocks=("layers.0", "layers.2"), bytes=2 * IMAGE * MINI_BATCH, is_shared_out=True),
        InputCost(blocks=("layers.2",), bytes=4 * TABLE, is_shared_out=False),
    )


@pytest.mark.parametrize("planner", [name for name in PLANNERS.names() if name != "stock"])
def test_every_planner_makes_room_for_the_batch(planner: str) -> None:
    """The least memory in which it finds a plan is that of the plan, with the batch."""
    free = make_plan(planner, request_of())
    for stage, part in zip(free.stages, memory_breakdown(free, request_of().profile), strict=True):
        assert part.inputs == expected(stage.blocks, stage.degree)
        assert part.total == stage.memory_bytes
    most = max(stage.memory_bytes for stage in free.stages)
    tight = make_plan(planner, request_of(limit=most))
    assert max(stage.memory_bytes for stage in tight.stages) <= most
    with pytest.raises(PlanInfeasible):
        make_plan(planner, request_of(limit=2 * IMAGE * MINI_BATCH // 2))
