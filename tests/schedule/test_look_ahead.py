"""Programs that look ahead: literal orders, random graphs of stages proven, damage found, what is gained."""

import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import forward_only_stages, frozen_branch
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.checks.validate_programs import validate_prefetch
from gpp_plugin.schedule.program_sets import _first_gap, _is_read_by, lower_prefetch, repeated_schedules
from gpp_plugin.simulate.predict import predict_prefetch
from tests.schedule.plans import (
    chain_plan,
    changed,
    freeze,
    lines,
    on_ranks,
    on_shared_ranks,
    simple_plan,
    with_all,
)


def two_stages(*, micro_batches=2, **options):
    return freeze(simple_plan([1, 1], [(0, 1)], mini_batch=micro_batches, num_bytes=8.0, **options), {0})


def tasks(program):
    return " ".join(str(i.task)[1:] for i in program.instructions if i.task is not None)


def test_a_branch_depends_on_the_mini_batch_alone():
    diamond = simple_plan([1] * 4, [(0, 1), (1, 3), (2, 3)], mini_batch=2)
    assert frozen_branch(freeze(diamond, {0, 1})) == {0, 1}
    assert frozen_branch(freeze(diamond, {2})) == {2}
    behind = freeze(diamond, {1})  # trained stage 0 sends it a gradient-free tensor
    behind = dataclasses.replace(
        behind,
        edges=tuple(dataclasses.replace(e, gradient_tensors=()) if e.src == 0 else e for e in behind.edges),
    )
    assert frozen_branch(behind) == {0, 1} and frozen_branch(diamond) == frozenset()


def test_a_forward_only_stage_behind_a_trained_one_is_not_ahead():
    plan = simple_plan([1] * 4, [(0, 1), (0, 3), (1, 2), (2, 3)], mini_batch=2)
    edges = tuple(
        e if (e.src, e.dst) == (0, 3) else dataclasses.replace(e, gradient_tensors=()) for e in plan.edges
    )
    # stage 0 trains by way of 3; 1 and 2 read it without gradients
    plan = dataclasses.replace(plan, edges=edges)
    assert forward_only_stages(plan) == {1, 2} and frozen_branch(plan) == frozenset()


def test_parts_of_two_stages():
    programs = lower_prefetch(two_stages())
    validate_prefetch(two_stages(), programs)
    assert [tasks(p) for p in programs.programs["prologue"]] == ["F2 F3", ""]
    assert [tasks(p) for p in programs.programs["steady"]] == ["F2 F3", "F0 B0 F1 B1"]
    assert [tasks(p) for p in programs.programs["epilogue"]] == ["", "F0 B0 F1 B1"]
    assert lines(programs.programs["epilogue"][0]) == ["step"]
    assert programs.programs["steady"][1].messages(InstructionKind.RECEIVE) == programs.programs["prologue"][
        1
    ].messages(InstructionKind.RECEIVE)
    carried = programs.of_rank(1).carried("steady")
    assert [(m.src_micro_batch, m.dst_micro_batch, m.samples.first_sample) for m in carried] == [
        (0, 0, 0),
        (1, 1, 1),
    ]
    assert programs.of_rank(0).carried("steady") == ()


def test_a_receive_stands_where_its_message_is_due():
    """A frozen forward as long as a trained micro-batch: each arrives behind one of them."""
    programs = lower_prefetch(two_stages(forward_us=[20.0, 10.0], backward_us=[0.0, 10.0]))
    kinds = [
        i.kind.value if i.task is None else str(i.task)[1:]
        for i in programs.programs["steady"][1].instructions
    ]
    assert kinds == ["F0", "B0", "receive", "F1", "B1", "receive", "reduce_data", "step"]
    # as micro-batch 0 is read the first of the next mini-batch has not come: never three, and two at either end
    assert [programs.of_rank(rank).most_bytes for rank in (0, 1)] == [0, 16]


def test_the_most_bytes_are_those_in_between_where_a_quick_branch_is_early():
    """Six messages of 8 bytes are here; F0 reads two of them, and then three of the quick branch come and one other."""
    plan = simple_plan(
        [1, 1, 1],
        [(0, 2), (1, 2)],
        mini_batch=3,
        num_bytes=8.0,
        forward_us=[40.0, 1.0, 10.0],
        backward_us=[0.0, 0.0, 30.0],
    )
    plan = freeze(plan, {0, 1})
    own = lower_prefetch(plan).of_rank(2)
    assert own.most_bytes == 8 * (6 - 2 + 3 + 1)
    # each sender of a branch of two tensor ranks holds half of what it sends
    edges = (plan.edges[0], dataclasses.replace(plan.edges[1], src_shard_axis=1))
    halved = on_ranks(dataclasses.replace(plan, edges=edges), 0, (1, 3), 2).with_each(tensor=[1, 2, 1])
    assert dataclasses.replace(own, plan=halved).most_bytes == 8 * (3 - 1 + 1) + 4 * (3 - 1 + 3)
    message = next(
        m for m in own.programs["steady"].messages(InstructionKind.RECEIVE) if m.dst_micro_batch == 3
    )
    for half, task_half, is_read in ((None, None, True), (None, 1, True), (1, 1, True), (1, 0, False)):
        task = Task(stage=2, kind=TaskKind.FORWARD, micro_batch=3, half=task_half)
        assert _is_read_by(dataclasses.replace(message, dst_half=half), task) == is_read


@pytest.mark.parametrize(
    ("ready", "us", "begin"),
    [(0.0, 2.0, 0.0), (0.0, 2.5, 3.0), (0.0, 4.5, 9.0), (4.0, 3.0, 4.0), (2.5, 1.0, 3.0), (9.5, 7.0, 9.5)],
)
def test_the_first_gap_that_is_long_enough(ready, us, begin):
    assert _first_gap([(2.0, 3.0), (7.0, 9.0)], ready, us) == begin


def test_sliced_micro_batches_are_joined_in_every_mini_batch():
    plan = simple_plan([2, 2], [(0, 1)], mini_batch=8)
    plan = with_all(plan, num_sliced=2, joins_last_slice=True)
    one, two = (repeated_schedules(plan, count) for count in (1, 2))
    assert any(schedule.joined for schedule in one)
    assert [s.joined for s in two] == [(*s.joined, *(4 + m for m in s.joined)) for s in one]


def may_look_ahead(plan):
    """Return whether some stage runs ahead, and none that runs no backwards is sent gradients."""
    is_whole = not any(e.gradient_tensors and e.dst in forward_only_stages(plan) for e in plan.edges)
    return is_whole and bool(frozen_branch(plan))


def random_frozen_plan(rng):
    """Return a random graph of stages some of which are frozen and run ahead."""
    while True:
        plan = random_plan(rng, most_stages=6, most_ranks=12)
        frozen = {
            i for i in range(len(plan.stages)) if rng.random() < 0.5 and any(e.src == i for e in plan.edges)
        }
        plan = freeze(plan, frozen)
        if may_look_ahead(plan):
            return plan


@pytest.mark.parametrize("shares_ranks", [False, True])
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_graphs_are_proven(first, shares_ranks):
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        plan = random_frozen_plan(rng)
        if shares_ranks:
            plan = on_shared_ranks(plan, rng, rng.randint(1, 6))
        programs = lower_prefetch(plan, reduce_each_backward=rng.random() < 0.5)
        validate_prefetch(plan, programs)
        branch = frozen_branch(plan)
        for rank in range(plan.num_ranks):
            whole = programs.of_rank(rank)
            assert whole.stages == plan.stages_of_rank(rank)
            for stage in whole.stages:
                own = whole.of_stage(stage)
                count = plan.num_micro_batches(stage)
                run = {i.task.micro_batch for i in own.programs["steady"].instructions if i.task is not None}
                assert own.is_prefetched == (stage in branch)
                assert run == set(range(count, 2 * count) if own.is_prefetched else range(count))
                assert not (own.is_prefetched and own.carried("steady"))


def colocated(num_ranks, micro_batches, tower_us):
    """Return a chain on so many ranks, and a frozen tower before it that is data-parallel over all of them."""
    count = micro_batches // num_ranks
    plan = simple_plan(
        [num_ranks, *[1] * num_ranks],
        [(i, i + 1) for i in range(num_ranks)],
        mini_batch=micro_batches,
        forward_us=[tower_us / count, *[1.0] * num_ranks],
        backward_us=[0.0, *[2.0] * num_ranks],
    )
    return freeze(on_ranks(plan, tuple(range(num_ranks)), *range(num_ranks)), {0})


@pytest.mark.parametrize(("num_ranks", "micro_batches", "tower_us"), [(2, 4, 2.0), (4, 8, 2.0), (4, 16, 4.0)])
def test_a_tower_runs_where_the_ranks_of_others_idle(num_ranks, micro_batches, tower_us):
    plan = colocated(num_ranks, micro_batches, tower_us)
    validate_prefetch(plan, lower_prefetch(plan))
    found = predict_prefetch(plan)
    # 1F1B of the chain alone: no micro-second of the tower is seen
    assert found.steady_us == pytest.approx(3.0 * (micro_batches + num_ranks - 1))
    assert found.whole_us > found.steady_us


def test_what_a_rank_hands_over_to_itself_is_kept_until_its_turn():
    plan = freeze(on_ranks(chain_plan(3, 2, num_bytes=8.0), 0, 1, 0), {0})
    own = lower_prefetch(plan).of_rank(0)
    assert own.stages == (0, 2) and own.carried("steady") == ()
    plan = freeze(on_ranks(simple_plan([1, 1], [(0, 1)], mini_batch=2, num_bytes=8.0), 0, 0), {0})
    own = lower_prefetch(plan).of_rank(0)
    assert [m.is_local_transfer for m in own.carried("steady")] == [True, True] and own.most_bytes >= 16
    assert (
        own.of_stage(1).carried("steady") == own.carried("steady") and own.of_stage(0).carried("steady") == ()
    )


def test_damage_is_found():
    plan = two_stages()
    programs = lower_prefetch(plan)

    def damaged(part, rank, change):
        found = changed(programs.programs[part], rank, change)
        return dataclasses.replace(programs, programs={**programs.programs, part: found})

    def without_receives(instructions):
        return [i for i in instructions if i.kind is not InstructionKind.RECEIVE]

    with pytest.raises(ScheduleError, match="no rank receives"):
        validate_prefetch(plan, damaged("steady", 1, without_receives))
    with pytest.raises(ScheduleError, match="has no step"):
        validate_prefetch(plan, damaged("epilogue", 0, lambda i: i[:-1]))
    with pytest.raises(ScheduleError, match="stop under serial rendezvous"):
        validate_prefetch(plan, damaged("prologue", 0, lambda i: i[2:] + i[:2]))
    with pytest.raises(ScheduleError, match="runs 1F5 where the schedule has 1F4"):
        validate_prefetch(plan, damaged("epilogue", 1, lambda i: i[2:4] + i[:2] + i[4:]))


def test_what_is_gained_is_predicted():
    """The frozen stage's first forward is no start-up any more: 4 x 20 us of trained tasks instead of 10 + 4 x 20."""
    plan = two_stages(micro_batches=4, forward_us=[10.0, 10.0], backward_us=[0.0, 10.0])
    found = predict_prefetch(plan)
    assert (found.stages, found.whole_us, found.steady_us) == (("s0",), 90.0, 80.0)
    long = two_stages(micro_batches=4, forward_us=[30.0, 10.0], backward_us=[0.0, 10.0])
    found = predict_prefetch(long)  # the frozen stage is the slower one: the trained one hides behind it
    assert (found.whole_us, found.steady_us) == (140.0, 120.0)
    assert predict_prefetch(simple_plan([1, 1], [(0, 1)], mini_batch=2)) is None
