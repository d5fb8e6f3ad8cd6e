"""Which stages may begin their reduction in their last backward: those whose ranks come there without each other."""

from __future__ import annotations

import random

import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.order_check import execute_serially
from gpp_plugin.schedule.gathers import last_backward, stages_that_reduce_early
from gpp_plugin.schedule.lower import lower_schedules
from tests.schedule.plans import changed, on_rows, simple_plan
from tests.schedule.test_reductions import wide_plan

REDUCE = InstructionKind.REDUCE_DATA


def lowered(plan, **options):
    return lower_schedules(plan, build_schedules(plan), **options)


def begun(body):
    """Move reductions in front of the last task, as a rank's host may meet them."""
    rest, moved = ([i for i in body if (i.kind is REDUCE) is is_moved] for is_moved in (False, True))
    at = max(index for index, instruction in enumerate(rest) if instruction.task is not None)
    return [*rest[:at], *moved, *rest[at:]]


def finishes(plan, programs, stages):
    for program in programs:
        programs = changed(programs, program.rank, begun) if program.stage in stages else programs
    return not execute_serially(plan, {p.rank: p for p in programs}).stuck


@pytest.mark.parametrize("degrees", [[2, 1], [1, 2], [2, 2]])
def test_a_chain_reduces_early_where_a_stage_has_several_ranks(degrees):
    plan = wide_plan([2, 2], [(0, 1)], degrees, mini_batch=6)
    programs = lowered(plan)
    assert stages_that_reduce_early(plan, programs) == {i for i, degree in enumerate(degrees) if degree > 1}
    assert {last_backward(program) for program in programs} == {2}


def test_random_plans_finish_with_what_is_allowed_and_stop_with_more():
    """A stage is refused where a rank comes to its last backward only by what another one sends behind its own."""
    rng = random.Random(5)
    num_wide = num_early = num_refused = 0
    for _ in range(100):
        plan = random_plan(rng, most_stages=6, most_ranks=8)
        schedules = build_schedules(plan, forward_only_stages=frozenset())
        programs = lower_schedules(plan, schedules, forward_only_stages=frozenset())
        early = stages_that_reduce_early(plan, programs)
        wide = {index for index, stage in enumerate(plan.stages) if stage.degree > 1}
        assert early <= wide and finishes(plan, programs, early)
        if early != wide:
            num_refused += 1
            assert not finishes(plan, programs, wide)
        num_wide += len(wide)
        num_early += len(early)
    assert num_refused > 0, "draw more plans"
    assert 0.9 * num_wide <= num_early < num_wide


def test_what_has_nothing_to_sum_or_sums_more_than_once_does_not():
    plan = wide_plan([2, 2], [(0, 1)], [2, 1], mini_batch=6)
    assert stages_that_reduce_early(plan, lowered(plan, reduce_each_backward=True)) == frozenset()
    forward = lower_schedules(plan, forward_schedules(plan), training=False)
    assert stages_that_reduce_early(plan, forward) == frozenset()
    assert {last_backward(program) for program in forward} == {None}


def test_tensor_ranks_and_split_backwards_do_not():
    grid = on_rows(simple_plan([2, 2], [(0, 1)], mini_batch=6), [2, 1], [2, 1])
    assert grid.stages[0].degree == 2
    assert stages_that_reduce_early(grid, lowered(grid)) == frozenset()
    halves = wide_plan([2, 2], [(0, 1)], [2, 2], mini_batch=6, schedule="zero_bubble")
    programs = lowered(halves)
    last = {p.stage: [i.task.kind for i in p.instructions if i.task is not None][-1] for p in programs}
    assert set(last.values()) == {TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT}
    early = {stage for stage, kind in last.items() if kind is TaskKind.BACKWARD}
    assert stages_that_reduce_early(halves, programs) == early
