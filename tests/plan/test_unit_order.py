"""The order of units: what is said of it is what the simulator says, and it is the shortest or nearly so."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from gpp_plugin.ir.block_graph import Block, BlockEdge, BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.plan.costs.planned_lengths import (
    MiniBatchTimes,
    UnitCosts,
    UnitOrder,
    _deal,
    _pairs,
    _peak,
    _starts,
    order_units,
    unit_costs,
)
from gpp_plugin.simulate.predict import predict_iteration_us
from tests.schedule.plans import on_ranks, simple_plan


def chain(degrees: list[int], units: int, *, schedule: str = "1f1b", frozen: bool = False) -> PipelinePlan:
    """Return stages one after the other, of so many ranks each, for mini-batches of units."""
    plan = simple_plan(
        degrees,
        [(i, i + 1) for i in range(len(degrees) - 1)],
        mini_batch=units,
        schedule=schedule,
        forward_us=[10.0 * degree for degree in degrees],
        backward_us=[20.0 * degree for degree in degrees],
    )
    firsts = itertools.accumulate(degrees, initial=0)
    plan = on_ranks(plan, *(tuple(range(a, a + degree)) for a, degree in zip(firsts, degrees, strict=False)))
    edges = (dataclasses.replace(e, gradient_tensors=()) if frozen and e.src == 0 else e for e in plan.edges)
    return dataclasses.replace(plan, edges=tuple(edges))


def simulated_us(plan: PipelinePlan, order: tuple[int, ...], factors: Any, **options: Any) -> float:
    def us(index: int, kind: TaskKind, micro_batch: int, rank: int) -> float:
        stage = plan.stages[index]
        unit = order[stage.samples(micro_batch, rank).first_sample]
        typical = {TaskKind.FORWARD: stage.forward_us, TaskKind.BACKWARD: stage.backward_us}
        return typical.get(kind, stage.backward_us / 2) * float(factors[unit, index])

    return predict_iteration_us(plan, durations=us, **options)


@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [([1, 1, 1], "1f1b"), ([2, 2], "gpipe"), ([1, 2, 4], "1f1b"), ([2, 1], "zero_bubble"), ([4], "1f1b")],
)
def test_the_times_of_orders_are_the_simulators(degrees: list[int], schedule: str) -> None:
    plan = chain(degrees, 8, schedule=schedule)
    times = MiniBatchTimes(plan)
    generator = np.random.default_rng(0)
    factors = generator.uniform(0, 4, (8, len(degrees)))
    orders = np.array([generator.permutation(8) for _ in range(5)])
    wanted = [simulated_us(plan, tuple(order), factors) for order in orders.tolist()]
    assert times.of(orders, factors) == pytest.approx(wanted, rel=1e-12)


def test_a_frozen_stage_runs_forwards_alone() -> None:
    plan = chain([1, 1], 4, frozen=True)
    factors = np.random.default_rng(0).uniform(1, 4, (4, 2))
    given = (0, 1, 2, 3)
    wanted = simulated_us(plan, given, factors)
    assert MiniBatchTimes(plan).of(np.array([given]), factors) == pytest.approx([wanted])


@pytest.mark.parametrize("degrees", [[1, 1], [2, 2], [1, 2], [3, 3], [6]])
def test_orders_are_hardly_longer_than_the_best_of_all(degrees: list[int]) -> None:
    plan = chain(degrees, 6)
    times = MiniBatchTimes(plan)
    everything = np.array(list(itertools.permutations(range(6))))
    generator = np.random.default_rng(1)
    ratios, gains = [], []
    for _ in range(8):
        factors = np.repeat(generator.uniform(1, 4, (6, 1)), len(degrees), axis=1)
        order = order_units(times, factors)
        assert sorted(order) == list(range(6))
        (found,) = times.of(np.array([order]), factors)
        ratios.append(found / times.of(everything, factors).min())
        gains.append(times.of(everything[:1], factors)[0] / found)
    assert np.mean(ratios) < 1.02
    assert max(ratios) < 1.06
    assert min(gains) >= 1 - 1e-12
    assert np.mean(gains) > 1.05 or degrees == [6], "one unit a rank leaves nothing to choose"


def test_the_orders_that_are_tried() -> None:
    weights = np.array([8.0, 1, 7, 1, 2, 5])
    assert _deal(weights, 2) == [[0, 4, 1], [2, 5, 3]], (
        "8 2 1 and 7 5 1: each to the rank that has least, and room"
    )
    assert _peak([9, 7, 4, 2, 1]) == [1, 4, 9, 7, 2] and _peak([3]) == [3]
    assert _pairs(4).tolist() == [[0, 1], [1, 2], [2, 3], [0, 2], [1, 3], [0, 3]]
    starts = _starts(MiniBatchTimes(chain([2], 6)), weights[:, None]).tolist()
    assert starts == [
        [0, 1, 2, 3, 4, 5],  # as given; then the costliest first, last and in the middle
        [0, 2, 4, 5, 1, 3],
        [1, 3, 4, 5, 0, 2],
        [1, 3, 0, 2, 4, 5],
    ]
    # stages of 30 and 90 us a unit: a unit weighs what it takes on both
    times = MiniBatchTimes(chain([1, 3], 3))
    assert times.stage_us == pytest.approx([30.0, 90.0]) and times.degrees == (1, 3)
    factors = np.array([[5.0, 1.0], [1.0, 2.0], [2.0, 2.5]])  # 240, 210, 285
    assert _starts(times, factors)[1].tolist() == [2, 0, 1]


def test_exchanges_end_where_none_is_shorter_and_equals_stay_as_given() -> None:
    times = MiniBatchTimes(chain([1, 1], 4))
    pairs = list(itertools.combinations(range(4), 2))
    for seed in range(8):
        factors = np.random.default_rng(seed).integers(1, 5, (4, 2)).astype(float)
        order = list(order_units(times, factors))
        changed = [order]
        for i, j in pairs:
            other = list(order)
            other[i], other[j] = order[j], order[i]
            changed.append(other)
        found = times.of(np.array(changed), factors)
        assert found[0] <= found.min() * (1 + 1e-6)
    alike = np.array([[1.0, 2.0]] * 3 + [[1.0, 2.0 + 1e-12]])
    assert order_units(times, alike) == (0, 1, 2, 3), "what wins less than a millionth is no exchange"


def test_heavy_units_are_shared_out() -> None:
    # two ranks, one stage: 8 and 7 beside each other, or one after the other on one rank
    order = order_units(MiniBatchTimes(chain([2], 6)), np.array([[8.0], [1], [7], [1], [2], [5]]))
    loads = [sum((8, 1, 7, 1, 2, 5)[unit] for unit in order[rank::2]) for rank in range(2)]
    assert sorted(loads) == [11, 13]


def test_equal_units_stay_in_order_and_sizes_alone_decide() -> None:
    costs = UnitCosts(stages=(((1.0, ("x",)),),), typical={"x": 4})
    sizes = [{"x": n} for n in (16, 1, 13, 2, 3, 9)]
    chosen = [UnitOrder(chain([2], 6), costs)(sizes) for _ in range(2)]
    assert chosen[0] == chosen[1] != tuple(range(6))
    again = UnitOrder(chain([2], 6), costs)
    for each in (sizes, sizes[::-1], sizes):
        assert again(each) == UnitOrder(chain([2], 6), costs)(each), "a mini-batch of its own each time"
    assert UnitOrder(chain([2], 6), costs)([{"x": 7}] * 6) == tuple(range(6))
    assert UnitOrder(chain([2], 6), costs)([{"x": 7}, {"x": 8}]) == (0, 1), "an evaluation's own number"


def test_many_units_take_a_bounded_search() -> None:
    times = MiniBatchTimes(chain([2, 4], 64))
    factors = np.repeat(np.random.default_rng(0).uniform(1, 4, (64, 1)), 2, axis=1)
    order = order_units(times, factors)
    assert sorted(order) == list(range(64))
    given, found = times.of(np.array([range(64), order]), factors)
    assert found < given / 1.05


def test_blocks_are_driven_by_what_they_read_or_else_by_what_is_before_them() -> None:
    blocks = (
        Block(name="tower", inputs=("pixels",), flops=30.0),
        Block(name="projector", flops=10.0),
        Block(name="embed", inputs=("ids",), flops=0.0),
        Block(name="layer", flops=60.0),
        Block(name="loss", inputs=("labels", "num_items"), flops=10.0),
    )
    edges = tuple(
        BlockEdge(src=a, dst=b, tensors=(a,))
        for a, b in (("tower", "projector"), ("projector", "embed"), ("embed", "layer"), ("layer", "loss"))
    )
    graph = BlockGraph(
        model="", num_samples=1, blocks=blocks, edges=edges, tensors={}, loss_block="loss", tied={}
    )
    plan = chain([1, 1], 2)
    held = (("tower", "projector", "embed"), ("layer", "loss"))
    stages = [dataclasses.replace(stage, blocks=own) for stage, own in zip(plan.stages, held, strict=True)]
    plan = dataclasses.replace(plan, stages=tuple(stages))
    costs = unit_costs(plan, graph, {"pixels": 100, "ids": 10, "labels": 10, "num_items": 0})
    assert costs.factors({"pixels": 100, "ids": 10, "labels": 10}) == pytest.approx([1, 1])
    assert costs.factors({"pixels": 300, "ids": 20, "labels": 20}) == pytest.approx([3, 2])
    assert costs.factors({"ids": 40, "labels": 10}) == pytest.approx([0, (60 * 4 + 10) / 70])
