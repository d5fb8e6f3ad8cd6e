"""Gathers of parameters that a stage's ranks hold in parts (ZeRO 3): where they stand, and that nothing stops there."""

import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import joined_breakdown
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.schedule.build import forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.gathers import gathered_at_once
from gpp_plugin.simulate.predict import simulate_programs
from gpp_plugin.simulate.timeline_metrics import Travel, overlap_of
from tests.schedule.plans import changed, proven, sharded, short, simple_plan, with_all, with_room

GATHER, FREE = InstructionKind.GATHER, InstructionKind.FREE


def simulated(plan):
    """Return schedules and programs of a plan, proven and simulated."""
    schedules, programs = proven(plan, reduce_each_backward=True)
    simulate_programs(plan, programs, mode="rendezvous")
    return schedules, programs


def test_a_rank_of_one_stage_gathers_once():
    plan = sharded(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (2,))
    _, programs = simulated(plan)
    expected = "gather 0F0 0F1 0B0 reduce_data 0B1 free reduce_data step"
    assert [short(program) for program in programs[:2]] == [expected, expected]
    assert short(programs[2]) == "1F0 1B0 1F1 1B1 reduce_data step", "a single rank holds all of it"
    assert gathered_at_once(plan, programs[0]) == 40


def test_ranks_of_several_stages_hold_one_of_them_whole():
    plan = sharded(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (0, 1), num_bytes=100)
    _, programs = simulated(plan)
    assert short(programs[0]) == short(programs[1])
    words = [word for word in short(programs[0]).split() if not word.startswith("reduce")]
    assert " ".join(words) == (
        "gather(0) 0F0 free(0) gather(1) 1F0 1B0 free(1) gather(0) 0F1 0B0 free(0) gather(1) 1F1 1B1 free(1) "
        "gather(0) 0B1 free(0) step"
    )
    assert gathered_at_once(plan, programs[0]) == 50


def three_on_two_ranks(limit):
    chain = simple_plan([2, 2, 2], [(0, 1), (1, 2)], mini_batch=2)
    plan = sharded(chain, (0, 1), (0, 1), (0, 1), num_bytes=100)
    return with_room(plan, limit=limit)


def test_with_room_for_two_a_stage_is_gathered_a_task_ahead():
    plan = three_on_two_ranks(100)
    _, programs = simulated(plan)
    words = [word for word in short(programs[0]).split() if not word.startswith("reduce")]
    assert " ".join(words) == (
        "gather(0) gather(1) 0F0 free(0) gather(2) 1F0 free(1) 2F0 gather(1) 2B0 free(2) gather(0) 1B0 free(1) 0B0 "
        "free(0) step"
    )
    assert gathered_at_once(plan, programs[0]) == 100 == joined_breakdown(plan.memory).gathered
    # a gather of 1 us beside tasks of 1 us: only the first two, which begin together, hide behind nothing
    timeline = simulate_programs(plan, programs, gather_us=dict.fromkeys(range(3), 1.0))
    alone = simulate_programs(plan, programs)
    assert timeline.iteration_us == alone.iteration_us + 1.0
    (hidden,) = overlap_of(
        [
            Travel(kind="gathers", rank=e.rank, start_us=e.start_us, end_us=e.end_us)
            for e in timeline.events
            if e.kind is EventKind.GATHER
        ],
        {r: [(e.start_us, e.end_us) for e in timeline.events if e.rank == r and e.task] for r in (0, 1)},
    )
    assert hidden.share == 0.6


def test_without_room_for_two_none_is_ahead():
    plan = three_on_two_ranks(99)
    _, programs = simulated(plan)
    assert programs == simulated(dataclasses.replace(plan, memory=()))[1]
    assert gathered_at_once(plan, programs[0]) == 50 == joined_breakdown(plan.memory).gathered


def test_random_programs_with_room_finish_and_hold_what_is_planned():
    rng = random.Random(11)
    ahead = 0
    for _ in range(60):
        plan = with_room(sharded(random_plan(rng, most_stages=6, most_ranks=8, shares_ranks=True)))
        _, programs = simulated(plan)
        _, plain = simulated(dataclasses.replace(plan, memory=()))
        ahead += programs != plain
        for program, before in zip(programs, plain, strict=True):
            planned = joined_breakdown([plan.memory[stage] for stage in program.stages]).gathered
            most = max(planned, gathered_at_once(plan, before))
            assert gathered_at_once(plan, program) <= most
    assert ahead >= 10


def test_evaluation_gathers_too():
    plan = sharded(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (2, 3))
    _, programs = proven(plan, forward_schedules(plan), training=False)
    assert short(programs[0]) == "gather 0F0 0F1 free"


@pytest.mark.parametrize("shares_ranks", [False, True])
def test_random_programs_finish(shares_ranks):
    rng = random.Random(7)
    whole = ranks = 0
    for _ in range(60):
        plan = sharded(random_plan(rng, most_stages=6, most_ranks=8, shares_ranks=shares_ranks))
        _, programs = simulated(plan)
        for program in programs:
            largest = max(plan.stages[stage].gathered_bytes for stage in program.stages)
            whole += gathered_at_once(plan, program) == largest
            ranks += 1
    assert whole == ranks if not shares_ranks else whole > 0.8 * ranks, (whole, ranks)


def test_damage_is_found():
    plan = sharded(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (2, 3))
    schedules, programs = simulated(plan)

    def without(kind):
        return lambda own: [each for each in own if each.kind is not kind]

    def late(own):
        at = next(i for i, each in enumerate(own) if each.kind is GATHER)
        return [*own[:at], own[at + 1], own[at], *own[at + 2 :]]

    def at_the_end(own):
        free = next(each for each in own if each.kind is FREE)
        return [*(each for each in own if each is not free), free]

    for change, what in (
        (without(GATHER), "runs 0F0 while its parameters are not gathered"),
        (without(FREE), "steps while its parameters are gathered"),
        (late, "runs 0F0 while its parameters are not gathered"),
        (at_the_end, "come last|steps while its parameters are gathered"),
    ):
        with pytest.raises(ScheduleError, match=what):
            validate_programs(plan, schedules, changed(programs, 0, change))
    held_whole = with_all(plan, sharded_bytes=0)
    with pytest.raises(ScheduleError, match="its parameters are whole there"):
        validate_programs(held_whole, schedules, programs)


def test_ranks_that_gather_at_other_places_are_refused():
    plan = sharded(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (2, 3))
    schedules, programs = simulated(plan)

    def twice(own):
        at = max(i for i, each in enumerate(own) if each.task is not None)
        free, gather = (next(each for each in own if each.kind is kind) for kind in (FREE, GATHER))
        return [*own[:at], free, gather, *own[at:]]

    with pytest.raises(ScheduleError, match="they must agree"):
        validate_programs(plan, schedules, changed(programs, 0, twice))
