"""What fills a stage adds up to the memory its plan claims."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import MemoryPlan, PipelinePlan, RecomputedSegment, Stage, SwappedTensor
from gpp_plugin.ir.profile import BlockCost, InputCost, Profile, SharedStorage, TiedCost
from gpp_plugin.ir.tensors import UNIFORM, TensorSpec, batch_layout
from gpp_plugin.plan.costs.memory_formula import (
    LEAST_BYTES,
    TOLERANCE,
    differences,
    expected_counts,
    memory_breakdown,
    with_breakdown,
    with_inputs,
)
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plugins import PLANNERS
from tests.plan.graphs import chain, make_profile, make_request
from tests.plan.test_dawnpiper import BOTH, tight_request


@pytest.mark.parametrize("mode", ["sync", "async", "vertical"])
@pytest.mark.parametrize("planner", ["dawnpiper", "vpipe"])
def test_parts_add_up(planner, mode):
    is_synced = mode == "vertical"
    request: PlanRequest = tight_request(
        mode="async" if is_synced else mode, vertical_sync=is_synced, memory_optimization=BOTH
    )
    plan = make_plan(planner, request)
    longest = max(stage.in_flight for stage in plan.stages)
    for stage, parts in zip(plan.stages, memory_breakdown(plan, request.profile), strict=True):
        assert parts.total == pytest.approx(stage.memory_bytes, abs=stage.in_flight + 2)
        older = {"sync": 0, "async": stage.in_flight - 1, "vertical": longest - 1}[mode]
        assert parts.stashed_weights == parts.weights * older
        assert (parts.working > 0) == (stage.memory is not None)


def stage_of() -> Stage:
    """Return a stage of two ranks that swaps and recomputes, three micro-batches of four local samples in flight."""
    segment = RecomputedSegment(blocks=("a",), tensors=("x",), bytes=30, held_bytes=6, recompute_us=1.0)
    memory = MemoryPlan(
        swapped=(SwappedTensor(name="y", bytes=12, free_us=0.0),), recomputed=(segment,), working_bytes=50
    )
    return Stage(
        name="s", blocks=("a", "b"), ranks=(0, 1), micro_batch_size=8, in_flight=3, pending=2, memory=memory
    )  # fmt: skip


def cost_of(
    block: str, *, saved: float, fixed: float, held: tuple[int, int, int], more: tuple[float, float]
) -> BlockCost:
    parameter, gradient, optimizer = held
    return BlockCost(
        block=block, samples=(1,), forward_us=(1.0,), backward_us=(2.0,), saved_bytes_per_sample=saved,
        saved_bytes_fixed=fixed, parameter_bytes=parameter, gradient_bytes=gradient, optimizer_bytes=optimizer,
        transient_bytes_per_sample=more[0], pending_bytes_per_sample=more[1],
    )  # fmt: skip


PROFILE = Profile(
    graph="g", device="d", source="measured",
    costs=(
        cost_of("a", saved=10, fixed=7, held=(100, 260, 200), more=(5, 2)),
        cost_of("b", saved=20, fixed=1, held=(50, 40, 100), more=(9, 3)),
        cost_of("c", saved=1000, fixed=1000, held=(1000, 1000, 1000), more=(1000, 1000)),
    ),
    shared=(
        SharedStorage(blocks=("c", "a", "b"), bytes_per_sample=4, bytes_fixed=6),
        SharedStorage(blocks=("a", "b", "c"), bytes_per_sample=400, bytes_fixed=600),
    ),
    tied=(TiedCost(blocks=("a", "b"), parameter_bytes=30, gradient_bytes=20, optimizer_bytes=60),),
    inputs=(
        InputCost(blocks=("b",), bytes=64, is_shared_out=True),
        InputCost(blocks=("a", "c"), bytes=10, is_shared_out=False),
        InputCost(blocks=("c",), bytes=1000, is_shared_out=False),
    ),
)  # fmt: skip


def plan_of(*stages: Stage) -> PipelinePlan:
    named = {"model": "m", "graph": "g", "planner": "p"}
    return PipelinePlan(**named, mini_batch=16, loss_unit=2, stages=stages, edges=())


@pytest.mark.parametrize(
    ("zero_stage", "more_samples", "wanted"),
    [
        # kept: 4 x 6 + 6 of c's, 10 x 6 + 7 and 20 x 6 + 1 of its own, less (12 + 24) x 1.5; 280 - 164 are unreduced
        (3, 1.5, dict(weights=60, gathered=60, gradients=140, optimizer=120, activations=3 * 164, working=75,
                      transient=54 + 116 + 60, inputs=63)),
        (2, 1.0, dict(weights=120, gathered=0, gradients=140, optimizer=120, activations=3 * 114, working=50,
                      transient=36 + 166 + 40, inputs=42)),
        (1, 1.0, dict(weights=120, gathered=0, gradients=280, optimizer=120, activations=3 * 114, working=50,
                      transient=36 + 40, inputs=42)),
        (0, 1.0, dict(weights=120, gathered=0, gradients=280, optimizer=240, activations=3 * 114, working=50,
                      transient=36 + 40, inputs=42)),
    ],
)  # fmt: skip
def test_each_part_of_a_stage_s_memory_by_hand(
    zero_stage: int, more_samples: float, wanted: dict[str, int]
) -> None:
    (found,) = memory_breakdown(
        plan_of(stage_of()), PROFILE, zero_stage=zero_stage, more_samples=more_samples
    )
    assert {name: getattr(found, name) for name in wanted} == wanted and found.stashed_weights == 0
    assert found.total == sum(wanted.values())


def test_a_finished_plan_says_what_ranks_hold_in_parts_and_may_use() -> None:
    request = dataclasses.replace(request_of(limit=10**6), zero_stage=3)
    parted = Stage(name="p", blocks=("layers.0", "layers.1"), ranks=(0, 1), micro_batch_size=4, in_flight=1)
    alone = Stage(name="q", blocks=("layers.2", "layers.3"), ranks=(1,), micro_batch_size=4, in_flight=1)
    found = with_breakdown(plan_of(parted, alone), request)
    assert [stage.sharded_bytes for stage in found.stages] == [2000, 0]
    assert [part.gathered for part in found.memory] == [1000, 0]
    assert [part.limit for part in found.memory] == [10**6] * 2


NOTHING = MemoryCounts(held_bytes=0, swapped_bytes=0, recomputed_bytes=0, peak_held_bytes=0)


def test_counts_differ_from_a_plan_by_more_than_a_share_and_than_single_small_tensors() -> None:
    held = 100_000
    plan = plan_of(stage_of())
    (part,) = memory_breakdown(plan, PROFILE)
    assert expected_counts(plan, 0) is None and differences(plan, 0, NOTHING) == []
    memory = (dataclasses.replace(part, activations=3 * held, stashed_weights=7000),)
    plan = dataclasses.replace(plan, memory=memory)
    planned = expected_counts(plan, 0)
    assert planned == MemoryCounts(
        held_bytes=held, peak_held_bytes=3 * held, swapped_bytes=12, recomputed_bytes=30, stashed_bytes=7000
    )
    most = int(TOLERANCE * held)
    for change, said in (
        ({}, []),
        ({"held_bytes": held + most, "swapped_bytes": 12 + LEAST_BYTES, "stashed_bytes": 7000 - LEAST_BYTES}, []),
        ({"held_bytes": held + most + 1}, ["holds 102001 bytes a micro-batch where 100000 are planned"]),
        ({"held_bytes": held - most, "recomputed_bytes": 30 + LEAST_BYTES}, []),
        ({"swapped_bytes": 13 + LEAST_BYTES}, [f"swaps {13 + LEAST_BYTES} bytes a micro-batch where 12 are planned"]),
        ({"peak_held_bytes": 306_001}, ["holds at most 306001 bytes where 300000 are planned"]),
        ({"recomputed_bytes": 5000}, ["recomputes 5000 bytes a micro-batch where 30 are planned"]),
        ({"stashed_bytes": 9000}, ["stashes 9000 bytes where 7000 are planned"]),
    ):  # fmt: skip
        assert differences(plan, 0, dataclasses.replace(planned, **change)) == said
        assert differences(plan, 0, dataclasses.replace(planned, **change), only_more=True) == said
    less = dataclasses.replace(planned, held_bytes=held - most - 1, peak_held_bytes=1, stashed_bytes=1)
    assert len(differences(plan, 0, less)) == 3 and differences(plan, 0, less, only_more=True) == []
    swaps = MemoryPlan(swapped=(SwappedTensor(name="y", bytes=9000, free_us=0.0),))
    plan = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], memory=swaps),))
    said = differences(
        plan, 0, dataclasses.replace(planned, recomputed_bytes=0, swapped_bytes=0), only_more=True
    )
    assert said == ["swaps 0 bytes a micro-batch where 9000 are planned"], "less swapped is more held"


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
