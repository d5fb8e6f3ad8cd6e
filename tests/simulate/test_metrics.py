import dataclasses

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.simulate.predict import simulate_plan
from gpp_plugin.simulate.timeline_metrics import (
    STRAGGLES,
    StageMemory,
    in_flight_over_time,
    memory_over_time,
    peak_in_flight,
    start_up_us,
    times_of_ranks,
)
from tests.schedule.plans import chain_plan, cluster_of, freeze, simple_plan, with_all


def test_in_flight_over_time():
    plan = chain_plan(2, 3)
    assert in_flight_over_time(simulate_plan(plan)) == {
        0: ((0.0, 1), (1.0, 2), (4.0, 2), (6.0, 1), (8.0, 0)),
        1: ((1.0, 1), (3.0, 1), (5.0, 1), (7.0, 0)),
    }
    assert peak_in_flight(simulate_plan(plan)) == {0: 2, 1: 1}


def test_frozen_stage_holds_until_its_messages_have_arrived():
    plan = simple_plan([1, 1], [(0, 1)], mini_batch=4, forward_us=[1.0, 10.0], num_bytes=4.0)
    plan = freeze(plan, {0})
    timeline = simulate_plan(plan, cluster=cluster_of(2))
    assert peak_in_flight(timeline)[0] == 2
    assert in_flight_over_time(timeline)[0][:4] == ((0.0, 1), (1.0, 2), (5.0, 1), (9.0, 0))


def test_memory_over_time():
    plan = simple_plan([2, 2], [(0, 1)], mini_batch=4)
    memory = [
        StageMemory(
            static_bytes=100, saved_bytes_per_sample=5, saved_bytes_fixed=1, transient_bytes_per_sample=2
        ),
        StageMemory(static_bytes=50),
    ]
    steps = memory_over_time(plan, simulate_plan(plan), memory)
    # 0F0 in 0..1, 0F1 in 1..2, 0B0 in 3..4, 0B1 in 5..6: 11 saved for each, 4 more while a task runs.
    assert steps[0] == (
        (0.0, 115), (1.0, 126), (2.0, 122), (3.0, 126), (4.0, 111), (5.0, 115), (6.0, 100)
    )  # fmt: skip
    assert {value for _, value in steps[1]} == {50}
    with pytest.raises(PlanError, match="memory of 1 stages for a plan of 2"):
        memory_over_time(plan, simulate_plan(plan), memory[:1])


def test_a_rank_of_several_stages_holds_what_they_hold_together():
    plan = with_all(simple_plan([2, 2], [(0, 1)], mini_batch=4), ranks=(0,), in_flight=1)
    timeline = simulate_plan(plan)
    # 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1, 1 us each
    assert in_flight_over_time(timeline)[0][:5] == ((0.0, 1), (1.0, 2), (3.0, 1), (4.0, 1), (5.0, 2))
    memory = [
        StageMemory(static_bytes=100, saved_bytes_per_sample=5),
        StageMemory(static_bytes=50, saved_bytes_fixed=1),
    ]
    steps = memory_over_time(plan, timeline, memory)[0]
    assert steps[:5] == ((0.0, 160), (1.0, 161), (2.0, 161), (3.0, 160), (4.0, 160))


def test_start_up():
    assert start_up_us(simulate_plan(chain_plan(4, 8, forward_us=3.0))) == 9.0
    assert start_up_us(Timeline(source="measured", plan="", events=())) == 0.0


def test_halves_and_split_backwards():
    plan = simple_plan([2, 2], [(0, 1)], mini_batch=4, forward_us=2.0, backward_us=4.0)
    plan = with_all(plan, schedule="zero_bubble", num_sliced=1)
    timeline = simulate_plan(plan)
    # rank 0  F0a F0b F1  F1  .   B0  B0  B0  B0  .   .   B1  B1  B1  B1
    # rank 1  .   F0a F0b I0  I0  W0  W0  F1  F1  I1  I1  W1  W1  .   .
    assert in_flight_over_time(timeline) == {
        0: ((0.0, 1), (2.0, 2), (9.0, 1), (15.0, 0)),
        1: ((1.0, 1), (7.0, 1), (13.0, 0)),
    }
    memory = [StageMemory(saved_bytes_per_sample=5, transient_bytes_per_sample=2)] * 2
    # 5 a sample from its half's forward to W, 2 a sample while a task runs.
    assert memory_over_time(plan, timeline, memory)[1] == (
        (0.0, 0.0), (1.0, 7.0), (2.0, 12.0), (3.0, 14.0), (5.0, 14.0), (7.0, 14.0), (9.0, 14.0),
        (11.0, 14.0), (13.0, 0.0),
    )  # fmt: skip


def two_by_two(**changes) -> PipelinePlan:
    """Return two stages on ranks 0 and 1, 2 and 3, of 20 and 10 ms a step on each."""
    stages = tuple(
        Stage(name=name, blocks=(name,), ranks=ranks, micro_batch_size=2, in_flight=1, forward_us=f, backward_us=2 * f)
        for name, ranks, f in (("text", (0, 1), 2e4 / 6), ("image", (2, 3), 1e4 / 6))
    )  # fmt: skip
    plan = PipelinePlan(model="m", graph="", planner="", mini_batch=4, loss_unit=2, stages=stages, edges=())
    return dataclasses.replace(plan, **changes)


def slow(plan: PipelinePlan, *measured_ms: float) -> set[int]:
    times = times_of_ranks(plan, {rank: 1e3 * ms for rank, ms in enumerate(measured_ms)})
    return {rank for rank, time in times.items() if time.slowness > STRAGGLES}


def test_a_straggler_is_slow_beside_its_replicas_or_its_stage_beside_the_plan() -> None:
    plan = two_by_two()
    table = times_of_ranks(
        plan, {0: 3e4, 1: 4.8e4, 2: 1.6e4, 3: 1.6e4}
    )  # the table of the function's comment
    found = [(t.planned_us, t.over_plan, t.over_replicas) for t in table.values()]
    assert found == [
        pytest.approx(row) for row in ((2e4, 1.5 / 1.6, 3 / 4.8), (2e4, 1.5 / 1.6, 1.6), *[(1e4, 1.6 / 1.95, 1.0)] * 2)
    ]  # fmt: skip
    for wrong in (0.1, 1.0, 7.0):  # the plan's times are those of another machine
        ms = [20 * wrong, 20 * wrong, 10 * wrong, 10 * wrong]
        for factor, is_named in ((1.2, False), (1.29, False), (1.31, True), (1.5, True)):
            for rank in range(4):
                measured = [us * factor if each == rank else us for each, us in enumerate(ms)]
                assert slow(plan, *measured) == ({rank} if is_named else set()), "one replica"
            assert slow(plan, ms[0] * factor, ms[1] * factor, *ms[2:]) == ({0, 1} if is_named else set()), (
                "a whole stage"
            )


def test_times_that_are_not_known_name_nobody() -> None:
    free = tuple(dataclasses.replace(s, forward_us=0.0, backward_us=0.0) for s in two_by_two().stages)
    assert slow(two_by_two(stages=free), 20, 20, 900, 900) == set(), "a plan without times"
    assert slow(two_by_two(stages=free), 20, 30, 900, 900) == {1}, "replicas are compared without them"
    assert slow(two_by_two(), 20, 0, 10, 10) == slow(two_by_two(), 20, 20, 0, 0) == set(), "no tasks"
    alone = two_by_two(stages=two_by_two().stages[:1])
    assert slow(alone, 90, 90) == set() and slow(alone, 20, 27) == {1}, "one stage"
    assert slow(alone, 90) == set(), "one rank"


def test_tensor_ranks_wait_for_each_other_and_are_compared_by_their_position() -> None:
    (text, _) = two_by_two().stages
    wide = dataclasses.replace(text, ranks=(0, 1, 2, 3), tensor=2)
    plan = two_by_two(stages=(wide,))
    assert slow(plan, 20, 26, 20, 26) == set(), "shards of unlike sizes"
    assert slow(plan, 20, 26, 30, 36) == {2, 3}
