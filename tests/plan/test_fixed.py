"""Plans of given stages: schedules that are tried, and what stages do that lack memory."""

from __future__ import annotations

import dataclasses

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.profile import ModuleMemory, SavedStorage
from gpp_plugin.plan.choose_schedule import schedule_plan
from gpp_plugin.plan.explicit_plan import FixedStage, fixed_plan
from gpp_plugin.plan.request import PlanRequest
from tests.plan.graphs import chain, make_cluster, make_graph, make_profile, make_request

STAGES = [FixedStage(name=str(i), blocks=(str(i),), ranks=(i,)) for i in range(4)]


def request(
    *, split_factor: float = 1.0, swaps: bool = True, limit: int | None = None, **changes: object
) -> PlanRequest:
    """Four modules behind each other that keep 100 bytes a sample each and receive nothing they read again."""
    graph = chain(4, "")
    profile = make_profile(graph, saved=100.0)
    storage = SavedStorage(
        bytes_per_sample=100.0, bytes_fixed=0.0, last_use=0.5, is_made=True, is_movable=swaps
    )
    modules = tuple(
        ModuleMemory(block=block.name, storages=(storage,), dropped_bytes_per_sample=100.0)
        for block in graph.blocks
    )
    costs = tuple(dataclasses.replace(cost, split_factor=split_factor) for cost in profile.costs)
    profile = dataclasses.replace(profile, costs=costs, modules=modules)
    return make_request(
        graph, profile, cluster=make_cluster(4, host=1e12), memory_limit_bytes=limit,
        **{"keep_units": True, "memory_optimization": ("recompute", "swap"), **changes},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("split_factor", "is_split"), [(1.0, False), (1.02, True), (1.5, False), (2e6, False)]
)
def test_auto_splits_backwards_where_that_was_measured_and_pays(split_factor: float, is_split: bool) -> None:
    asked = request(split_factor=split_factor)
    plan = schedule_plan(fixed_plan(STAGES, asked), asked, slicing="off")
    assert {stage.schedule == "zero_bubble" for stage in plan.stages} == {is_split}
    usual = schedule_plan(fixed_plan(STAGES, asked), asked, schedule="1f1b", slicing="off")
    assert (plan.iteration_us < usual.iteration_us) == is_split


def test_only_the_stage_that_lacks_memory_does_something_about_it() -> None:
    """400 bytes on the first stage, 300 on the second: with two buffers of 100 a swap leaves 200."""
    plan = fixed_plan(STAGES, request(limit=320))
    assert [stage.memory is not None for stage in plan.stages] == [True, False, False, False]
    assert plan.stages[0].memory is not None and plan.stages[0].memory.swapped
    assert plan.stages[0].memory_bytes == 200
    again = fixed_plan(STAGES, request(limit=320, memory_optimization=("recompute",)))
    assert again.stages[0].memory is not None and again.stages[0].memory.recomputed
    assert again.iteration_us > plan.iteration_us, "a forward more of the first stage"


def test_a_plan_that_swaps_competes_with_smaller_micro_batches() -> None:
    """Where sizes may be searched, one sample at a time would fit as it is, and twice as many tasks take longer."""
    slow = {"keep_units": False, "loss_unit": 4}
    asked = request(limit=1000, **slow)
    costs = tuple(dataclasses.replace(c, samples=(1, 4), forward_us=(90.0, 100.0), backward_us=(190.0, 200.0)) for c in asked.profile.costs)  # fmt: skip
    asked = dataclasses.replace(asked, profile=dataclasses.replace(asked.profile, costs=costs))
    plain = fixed_plan(STAGES, dataclasses.replace(asked, memory_optimization=()))
    plan = fixed_plan(STAGES, asked)
    assert plan.iteration_us < plain.iteration_us
    assert any(stage.memory is not None for stage in plan.stages)


def test_what_nothing_makes_fit_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match="stage '0' needs"):
        fixed_plan(STAGES, request(limit=90))
    with pytest.raises(PlanInfeasible, match="stage '0' needs"):
        fixed_plan(STAGES, request(limit=320, swaps=False, memory_optimization=("swap",)))


def test_pieces_of_a_captured_part_are_called_after_what_they_hold():
    names = [
        "words",
        "tower.embed",
        "tower.layers.0",
        "tower.layers.1",
        "tower.layers.2",
        "tower.norm",
        "end",
    ]
    graph = make_graph(list(zip(names, names[1:], strict=False)), names=names, loss="end")
    stages = [
        FixedStage(name="words", blocks=("words",), ranks=(0,)),
        FixedStage(name="tower", blocks=tuple(names[1:3]), ranks=(1,), is_piece=True),
        FixedStage(name="tower", blocks=tuple(names[3:6]), ranks=(2,), is_piece=True),
        FixedStage(name="end", blocks=("end",), ranks=(3,)),
    ]
    plan = fixed_plan(stages, make_request(graph, ranks=4))
    assert [stage.name for stage in plan.stages] == ["words", "tower.0", "tower.1-2", "end"]
    assert plan.losses == ("end",)
