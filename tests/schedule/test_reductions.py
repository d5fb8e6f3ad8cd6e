"""Reductions behind each backward (ZeRO 2): where they stand, and that nothing stops because of them."""

import random

import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.program import Instruction, InstructionKind
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules, reduce_after_backwards
from gpp_plugin.simulate.predict import simulate_programs
from tests.schedule.plans import changed, on_rows, proven, short, simple_plan

REDUCE = InstructionKind.REDUCE_DATA


def wide_plan(sizes, links, degrees, **options):
    """Return `simple_plan` with several ranks a stage."""
    return on_rows(simple_plan(sizes, links, **options), degrees)


def test_where_they_stand():
    plan = wide_plan([2, 2], [(0, 1)], [2, 1], mini_batch=6)
    _, programs = proven(plan, reduce_each_backward=True)
    expected = "0F0 0F1 0B0 reduce_data 0F2 0B1 reduce_data 0B2 reduce_data step"
    assert [short(program) for program in programs[:2]] == [expected, expected]
    assert short(programs[2]) == "1F0 1B0 1F1 1B1 1F2 1B2 reduce_data step", "one rank has nothing to reduce"


def test_messages_that_follow_a_backward_leave_before_the_reduction():
    plan = wide_plan([2, 2], [(0, 1)], [1, 2], mini_batch=4)
    _, programs = proven(plan, reduce_each_backward=True)
    kinds = [i.kind.value for i in programs[1].instructions]
    assert kinds[kinds.index("send") : kinds.index("reduce_data")].count("compute") == 0
    assert kinds[: kinds.index("send")].count("compute") == 2


def test_a_reduction_that_stops_the_programs_moves_behind_what_is_sent_or_goes():
    """The second one of stage 2 stops them right before the next task, and before the receives that stand there it does
    not. Those of stage 0 between its first backwards stop them wherever they stand."""
    plan = wide_plan([1, 2, 2], [(0, 2), (1, 2)], [1, 1, 2], mini_batch=8)
    _, programs = proven(plan, reduce_each_backward=True)
    words = [[i.kind.value if i.task is None else str(i.task) for i in p.instructions] for p in programs[2:]]
    first, second = (own[own.index("2B1") : own.index("2F2")] for own in words)
    assert first == ["2B1", "send", "send", "reduce_data", "receive", "receive"]
    assert second == ["2B1", "reduce_data", "receive", "send", "send", "receive", "receive"]
    assert [own.count("reduce_data") for own in words] == [4, 4], "all are kept"
    plan = wide_plan([2, 1], [(0, 1)], [2, 1], mini_batch=8)
    _, programs = proven(plan, reduce_each_backward=True)
    kept = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 reduce_data 0B3 reduce_data step"
    assert [short(program) for program in programs[:2]] == [kept, kept]


def test_random_programs_still_finish_and_keep_nearly_all_reductions():
    rng = random.Random(3)
    kept = asked = 0
    for _ in range(150):
        plan = random_plan(rng)
        _, programs = proven(plan, reduce_each_backward=True)
        simulate_programs(plan, programs, mode="rendezvous")
        for program in programs:
            stage = plan.stages[program.stage]
            if stage.degree > 1 and any(task.kind is TaskKind.BACKWARD for task in program.tasks):
                asked += plan.num_micro_batches(program.stage)
                kept += sum(i.kind is REDUCE for i in program.instructions)
    assert 0.94 * asked <= kept <= asked, (kept, asked)


def test_a_reduction_that_would_stop_the_programs_is_left_out():
    """Rank 1 of the wide stage needs, for its backward, what rank 0 causes only after its own."""
    rng = random.Random(0)
    for _ in range(3000):
        plan = random_plan(rng, most_stages=6, most_ranks=8)
        schedules = build_schedules(plan)
        programs = lower_schedules(plan, schedules)
        everywhere = programs
        for program in programs:
            if plan.stages[program.stage].degree > 1:
                everywhere = changed(everywhere, program.rank, _with_all)
        if everywhere == reduce_after_backwards(plan, programs, range(len(plan.stages))):
            continue
        with pytest.raises(ScheduleError, match="stop under serial rendezvous.*a reduction"):
            validate_programs(plan, schedules, everywhere)
        return
    pytest.skip("no such plan among the draws")


def _with_all(instructions):
    body, is_due = [], False
    for instruction in instructions:
        if instruction.task is not None:
            if is_due:
                body.append(Instruction(kind=REDUCE))
            is_due = instruction.task.kind.value == "B"
        body.append(instruction)
    return body


def test_damage_is_found():
    plan = wide_plan([2, 2], [(0, 1)], [2, 2], mini_batch=6)
    schedules, programs = proven(plan, reduce_each_backward=True)
    without = changed(programs, 1, lambda body: body.remove(next(x for x in body if x.kind is REDUCE)))
    with pytest.raises(ScheduleError, match="they must agree"):
        validate_programs(plan, schedules, without)
    only_early = programs
    for rank in range(len(programs)):
        only_early = changed(only_early, rank, lambda body: body.pop(-2))
    with pytest.raises(ScheduleError, match="not at its end"):
        validate_programs(plan, schedules, only_early)
