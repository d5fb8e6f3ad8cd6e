"""Swap and recompute of a stage that is a user's module: what is chosen fits, and costs least where that can be told."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from gpp_plugin.ir.profile import ModuleMemory, SavedStorage
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.memory.capuchin import StageChoice, StageOptimizer
from gpp_plugin.plan.memory.fitting import ModuleChain, StageFitter, recompute_modules
from gpp_plugin.plan.memory.operator_chain import PipelineShape
from gpp_plugin.plan.request import PlanRequest
from tests.plan.graphs import chain, costs_of, make_cluster, make_profile, make_request

SIZES = (400, 100, 300, 200)
"""Bytes a sample; the second is received, the last is held by somebody else."""
BOTH = ("recompute", "swap")


def module(block: str) -> ModuleMemory:
    storages = tuple(
        SavedStorage(
            bytes_per_sample=size, bytes_fixed=0.0, last_use=(i + 1) / 5, is_made=i != 1, is_movable=i != 3
        )
        for i, size in enumerate(SIZES)
    )
    return ModuleMemory(
        block=block, storages=storages, dropped_bytes_per_sample=900.0, held_bytes_per_sample=50.0
    )


def request(*, host: float, ways: tuple[str, ...] = BOTH) -> PlanRequest:
    """Two modules behind each other, forwards of 100 us a sample, backwards of 200."""
    graph = chain(2, "")
    profile = make_profile(graph, saved=float(sum(SIZES)))
    profile = dataclasses.replace(profile, modules=tuple(module(block.name) for block in graph.blocks))
    return make_request(graph, profile, ranks=2, cluster=make_cluster(2, host=host), memory_optimization=ways)


def choose(asked: PlanRequest, limit: int, in_flight: int = 2) -> StageChoice:
    costs = costs_of(asked)
    return StageFitter(asked, costs).choose((0,), degree=1, local=1.0, in_flight=in_flight, limit=limit)


def test_a_quick_link_takes_what_is_kept_longest_from_use_and_nothing_that_others_hold() -> None:
    """600 bytes too many, and two buffers of 400: of two micro-batches 700 each must leave."""
    choice = choose(request(host=1e12, ways=("swap",)), 1400)
    assert choice.memory is not None
    assert [tensor.name for tensor in choice.memory.swapped] == ["0:0", "0:2"]
    assert choice.memory_bytes == 2000 - 2 * 700 + 2 * 400
    free = [tensor.free_us for tensor in choice.memory.swapped]
    assert free == sorted(free, reverse=True)
    assert free[0] == pytest.approx((100 + 200) * 4 / 5 + 300, abs=0.1)


def test_the_quicker_way_is_taken() -> None:
    """Running again takes 100 us; the link hides transfers, or takes a second."""
    assert choose(request(host=1e12), 1300).memory.swapped  # type: ignore[union-attr]
    again = choose(request(host=1e3), 1300)
    assert again.memory is not None and not again.memory.swapped
    (segment,) = again.memory.recomputed
    assert (segment.blocks, segment.bytes, segment.held_bytes) == (("0",), 900, 50)
    assert again.memory_bytes == 2000 - 2 * 850 + 900
    assert again.us == pytest.approx(400.0)


def test_one_micro_batch_gains_nothing_by_running_again() -> None:
    choice = choose(request(host=1e3, ways=("recompute",)), 500, in_flight=1)
    assert choice.memory is None and choice.excess_bytes == 500


@pytest.mark.parametrize("limit", [1999, 1700, 1400, 1250, 1210])
@pytest.mark.parametrize("host", [1e12, 4e6, 1e6])
def test_no_set_of_storages_fits_in_less_time(limit: int, host: float) -> None:
    """Against every subset of what can leave, weighed by the same model."""
    asked = request(host=host, ways=("swap",))
    costs = costs_of(asked)
    own = ModuleChain(costs, module("0"), 0, 1.0, degree=1)
    shape = PipelineShape(
        num_stages=1, num_micro_batches=2, limits=(limit,), host_bytes_per_s=host, counts=(2,)
    )
    optimizer = StageOptimizer(own, shape, swap=True)
    rows = range(len(own.tensors.names))
    best = min(
        (
            optimizer.weigh(0, 0, own.num_blocks, swapped=np.array(some, dtype=np.int64))
            for count in range(len(rows) + 1)
            for some in itertools.combinations(rows, count)
        ),
        key=lambda choice: choice.key,
    )
    chosen = choose(asked, limit)
    assert chosen.excess_bytes <= best.excess_bytes
    if host == 1e12:
        assert chosen.us == best.us


def test_full_recompute_leaves_alone_what_gains_nothing() -> None:
    asked = request(host=1e9)
    costs = costs_of(asked)
    drafts = [StageDraft(blocks=(name,), degree=1, micro_batch_size=1, name=name) for name in "01"]
    plan = recompute_modules(build_plan(asked, drafts, planner="given", costs=costs), asked)
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert plan.stages[0].memory is not None and plan.stages[0].memory.recomputed
    assert plan.stages[0].backward_us == pytest.approx(300.0)
    assert plan.stages[1].memory is None
