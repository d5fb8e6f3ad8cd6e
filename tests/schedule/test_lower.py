import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.plan import StageEdge
from gpp_plugin.ir.program import Direction, InstructionKind
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.messages import Slicing, edge_overlaps
from tests.schedule.plans import chain_plan, lines, on_rows, proven, simple_plan


def lower(plan, **options):
    return proven(plan, **options)[1]


def messages(programs, direction):
    return {
        (m.src_rank, m.src_micro_batch, m.dst_rank, m.dst_micro_batch, m.samples.first_sample, m.samples.end,
         m.has_whole_tensors)
        for program in programs for m in program.messages(InstructionKind.SEND) if m.direction is direction
    }  # fmt: skip


def two_stage_plan(edge, *, sizes=(6, 6), degrees=(2, 3), mini_batch=6):
    plan = on_rows(simple_plan(sizes, [], mini_batch=mini_batch), degrees)
    plan = plan.with_each(
        in_flight=[mini_batch // size for size in sizes], forward_us=[0.0] * 2, backward_us=[0.0] * 2
    )
    return dataclasses.replace(plan, edges=(edge,))


NO_GRADIENT = StageEdge(src=0, dst=1, batch_tensors=("x",))
BATCH = StageEdge(src=0, dst=1, batch_tensors=("x",), gradient_tensors=("x",))


def test_degrees_that_do_not_divide_each_other():
    programs = lower(two_stage_plan(BATCH))
    assert messages(programs, Direction.ACTIVATION) == {
        (0, 0, 2, 0, 0, 2, False),
        (0, 0, 3, 0, 2, 3, False),
        (1, 0, 3, 0, 3, 4, False),
        (1, 0, 4, 0, 4, 6, False),
    }
    assert messages(programs, Direction.GRADIENT) == {
        (2, 0, 0, 0, 0, 2, False),
        (3, 0, 0, 0, 2, 3, False),
        (3, 0, 1, 0, 3, 4, False),
        (4, 0, 1, 0, 4, 6, False),
    }


def test_whole_tensors_travel_with_the_consumers_first_sample():
    edge = StageEdge(
        src=0, dst=1, batch_tensors=("x",), whole_tensors=("bias",), gradient_tensors=("x", "bias")
    )
    programs = lower(two_stage_plan(edge, sizes=(2, 4), degrees=(1, 1), mini_batch=8))
    whole = {(0, 0, 1, 0, 0, 2, True), (0, 2, 1, 1, 4, 6, True)}
    assert messages(programs, Direction.ACTIVATION) == whole | {
        (0, 1, 1, 0, 2, 4, False),
        (0, 3, 1, 1, 6, 8, False),
    }
    assert {m for m in messages(programs, Direction.GRADIENT) if m[-1]} == {
        (1, 0, 0, 0, 0, 2, True),
        (1, 1, 0, 2, 4, 6, True),
    }


def test_gradients_only_of_messages_that_held_a_tensor_with_gradient():
    edge = StageEdge(
        src=0, dst=1, batch_tensors=("ids",), whole_tensors=("bias",), gradient_tensors=("bias",)
    )
    programs = lower(two_stage_plan(edge, sizes=(2, 4), degrees=(1, 1), mini_batch=8))
    assert len(messages(programs, Direction.ACTIVATION)) == 4
    assert messages(programs, Direction.GRADIENT) == {(1, 0, 0, 0, 0, 2, True), (1, 1, 0, 2, 4, 6, True)}
    assert messages(lower(two_stage_plan(NO_GRADIENT)), Direction.GRADIENT) == set()


def test_edge_without_tensors_is_refused():
    plan = two_stage_plan(StageEdge(src=0, dst=1))
    with pytest.raises(PlanError, match="edge 0 from 's0' to 's1' names no tensors"):
        lower_schedules(plan, build_schedules(plan))


def test_frozen_stage_has_no_backwards_and_gets_no_gradients():
    plan = two_stage_plan(NO_GRADIENT, sizes=(2, 2), degrees=(1, 1))
    first, last = lower(plan)
    assert lines(first) == [
        "0F0",
        "send(act e0 r0.0>r1.0 [0..1])",
        "0F1",
        "send(act e0 r0.1>r1.1 [2..3])",
        "0F2",
        "send(act e0 r0.2>r1.2 [4..5])",
        "step",
    ]
    assert lines(last)[-2:] == ["reduce_data", "step"]


def test_forward_only_stage_with_gradients_is_refused():
    plan = two_stage_plan(BATCH, sizes=(2, 2), degrees=(1, 1))
    schedules = build_schedules(plan, forward_only_stages=frozenset({0}))
    with pytest.raises(
        ScheduleError, match=r"'s0' runs no backwards, but edge 0 .* carries gradients of \['x'\]"
    ):
        lower_schedules(plan, schedules, forward_only_stages=frozenset({0}))
    schedules = build_schedules(two_stage_plan(NO_GRADIENT), forward_only_stages=frozenset())
    with pytest.raises(ScheduleError, match="same forward_only_stages"):
        lower_schedules(two_stage_plan(NO_GRADIENT), schedules)


def test_evaluation_runs_forwards_alone():
    plan = chain_plan(2, 2)
    _, programs = proven(plan, forward_schedules(plan), training=False)
    assert [lines(p) for p in programs] == [
        ["0F0", "send(act e0 r0.0>r1.0 [0..0])", "0F1", "send(act e0 r0.1>r1.1 [1..1])"],
        ["receive(act e0 r0.0>r1.0 [0..0])", "1F0", "receive(act e0 r0.1>r1.1 [1..1])", "1F1"],
    ]
    with pytest.raises(ScheduleError, match="run backwards in evaluation"):
        lower_schedules(plan, build_schedules(plan), training=False)


def test_too_little_in_flight_stops_and_says_which_stage():
    plan = simple_plan([1, 4], [(0, 1)], mini_batch=8)
    tight = plan.with_each(in_flight=[3, plan.stages[1].in_flight])
    with pytest.raises(ScheduleError) as raised:
        lower_schedules(tight, build_schedules(tight))
    head, *grid = str(raised.value).splitlines()
    assert head == (
        "the orders of the stages wait for each other: 0F3 waits for 0B0 waits for 1B0 waits for 1F0 waits for 0F3; "
        "raise in_flight of 's0' (now 3)"
    )
    assert grid[0].split() == [
        "rank", "0", "0F0", "0F1", "0F2", "[0B0]!", "[0F3]!", "0B1", "0F4", "0B2", "0F5", "0B3", "0F6", "0B4",
        "0F7", "0B5", "0B6", "0B7",
    ]  # fmt: skip
    assert grid[1].split() == ["rank", "1", "[1F0]!", "[1B0]!", "1F1", "1B1"]


def test_schedules_must_be_whole():
    plan = chain_plan(2, 2)
    first, last = build_schedules(plan)
    cut = dataclasses.replace(first, tasks=first.tasks[:-1])
    with pytest.raises(ScheduleError, match="2 forwards and 1 backwards of 2 micro-batches"):
        lower_schedules(plan, (cut, last))
    swapped = dataclasses.replace(last, tasks=last.tasks[::-1])
    with pytest.raises(ScheduleError, match=r"1B1 comes before its forward.*\n.*\[1B1\]!"):
        lower_schedules(plan, (first, swapped))
    with pytest.raises(ScheduleError, match="give one for each"):
        lower_schedules(plan, (first,))


def test_costs_affect_the_order_but_never_safety():
    rng = random.Random(0)
    differs = 0
    for seed in range(30):
        plan = random_plan(random.Random(seed))
        schedules = build_schedules(plan)
        usual = lower_schedules(plan, schedules)
        wild = lower_schedules(plan, schedules, costs=lambda *_: 10 ** rng.uniform(-3, 3))
        validate_programs(plan, schedules, wild)
        differs += usual != wild
    assert differs > 5


def test_overlaps_of_halves_and_of_halves_that_leave_together():
    """Two ranks of 4 samples each send in halves, but for micro-batch 1, whose halves leave behind the second."""
    plan = two_stage_plan(BATCH, sizes=(8, 8), degrees=(2, 1), mini_batch=16)
    producer = Slicing(halved=frozenset({0, 1}), joined=frozenset({1}))
    assert list(edge_overlaps(plan, 0, producer=producer)) == [
        (0, 0, 0, 2, False, 0, None),
        (0, 0, 2, 2, False, 1, None),
        (1, 0, 4, 2, False, 0, None),
        (1, 0, 6, 2, False, 1, None),
        (2, 1, 8, 4, False, 1, None),
        (3, 1, 12, 4, False, 1, None),
    ]
    found = list(edge_overlaps(plan, 0, producer=producer, consumer=Slicing(halved=frozenset({0}))))
    assert [overlap[-1] for overlap in found] == [0, 0, 1, 1, None, None]
    wide = two_stage_plan(BATCH, sizes=(8, 8), degrees=(1, 2), mini_batch=16)
    found = list(edge_overlaps(wide, 0, consumer=Slicing(halved=frozenset({1}))))
    assert found == [
        (0, 0, 0, 4, False, None, None),
        (0, 1, 4, 4, False, None, None),
        (1, 2, 8, 2, False, None, 0),
        (1, 2, 10, 2, False, None, 1),
        (1, 3, 12, 2, False, None, 0),
        (1, 3, 14, 2, False, None, 1),
    ]
