import pytest

from gpp_benchmarks._random_plans import with_in_flight
from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.schedule.build import (
    compute_in_flight,
    forward_schedules,
    in_flight_from_source,
    plan_in_flight,
)
from tests.schedule.plans import freeze, proven, simple_plan


@pytest.mark.parametrize(
    ("row", "k_x", "b_x", "k_y", "b_y", "i_y", "samples"),
    [
        (1, 2, 1, 4, 1, 4, 4 + 2),
        (2, 1, 2, 4, 1, 4, 4 + 2),
        (3, 8, 1, 2, 2, 4, 4 + 8 - 4 + 4),
        (4, 4, 1, 1, 2, 2, 2 + 4),
        (5, 4, 2, 4, 1, 4, 4 + 8 - 4 + 4),
        (6, 4, 2, 2, 1, 2, 2 + 8),
        (7, 1, 1, 1, 1, 3, 3 + 1),
        (8, 2, 1, 2, 1, 4, 4 + 2),
        (9, 1, 1, 1, 4, 4, 4 + 4),
        (10, 1, 4, 1, 1, 2, 2 + 4 - 1 + 4 + 3),  # 9, rounded up to whole micro-batches of 4
    ],
)
def test_every_row_of_table_2(row, k_x, b_x, k_y, b_y, i_y, samples):
    assert compute_in_flight(k_x=k_x, b_x=b_x, k_y=k_y, b_y=b_y, i_y=i_y) == samples


def test_graphpipe_figure_5():
    links = [(0, 1), (1, 2)]
    tailored = simple_plan([1, 2, 4], links, mini_batch=32)
    universal = simple_plan([4, 4, 4], links, mini_batch=32)
    assert plan_in_flight(tailored) == (10 // 1, 8 // 2, 4 // 4)
    assert plan_in_flight(universal) == (12 // 4, 8 // 4, 4 // 4)


def test_thesis_figure_3_5():
    links = [(0, 1), (1, 2)]
    assert plan_in_flight(simple_plan([2, 1, 2], links, mini_batch=16)) == (4, 4, 1)
    assert plan_in_flight(simple_plan([2, 1, 2], links, mini_batch=16, k=[1, 2, 1])) == (3, 4, 1)


def test_groups_that_do_not_divide_each_other():
    # Row 1 gives 5 + 2 = 7. 1B4, after 1F9, frees 0B4, and 0B3 comes before 0F8 and 0F9 can: 0 holds 8.
    assert compute_in_flight(k_x=4, b_x=1, k_y=5, b_y=1, i_y=5) == 8
    plan = simple_plan([1, 1], [(0, 1)], mini_batch=20, k=[4, 5]).with_each(in_flight=[8, 5])
    proven(plan)
    with pytest.raises(ScheduleError, match="raise in_flight of 's0'"):
        proven(plan.with_each(in_flight=[7, 5]))


@pytest.mark.parametrize("length", range(2, 9))
def test_short_branch_beside_a_long_one(length):
    """A chain of ``length`` stages and a branch of one stage meet in a join: the short branch holds 2."""
    join, branch = length + 1, length
    links = [(i, i + 1) for i in range(length - 1)] + [(length - 1, join), (branch, join)]
    counts = plan_in_flight(simple_plan([1] * (join + 1), links, mini_batch=16))
    assert counts[:length] == tuple(range(length + 1, 1, -1))
    assert counts[branch] == 2
    from_source = in_flight_from_source(simple_plan([1] * (join + 1), links, mini_batch=16))
    assert from_source == (*counts[:length], length + 1, 1)  # as much as the longest branch


def test_counted_from_the_source_nothing_is_saved_elsewhere():
    """No chain and no equal branches differ; of other micro-batches all but one are of the largest."""
    equal = [(0, 1), (2, 3), (1, 4), (3, 4)]
    for links, sizes in ((equal, [1] * 5), ([(0, 1), (1, 2)], [2] * 3)):
        plan = simple_plan(sizes, links, mini_batch=16)
        assert in_flight_from_source(plan) == plan_in_flight(plan)
    assert in_flight_from_source(simple_plan([1, 2, 4], [(0, 1), (1, 2)], mini_batch=16)) == (9, 3, 1)


def test_full_batch_loss_makes_everything_before_it_hold_all():
    assert plan_in_flight(simple_plan([2, 4, 16], [(0, 2), (1, 2)], mini_batch=16)) == (8, 4, 1)


def test_gpipe_holds_all_and_so_does_what_feeds_it():
    plan = simple_plan([1, 1, 1], [(0, 1), (1, 2)], mini_batch=6, schedule=["1f1b", "gpipe", "1f1b"])
    assert plan_in_flight(plan) == (6, 6, 1)


def test_frozen_stages_that_feed_two_branches_which_meet_again():
    """0 and 1 are frozen; 4 takes single samples of 1 and of 3, which first gathers eight that come from 0."""
    links = [(0, 1), (0, 2), (1, 4), (2, 3), (3, 4)]
    plan = simple_plan([1, 1, 2, 8, 1], links, mini_batch=16)
    plan = with_in_flight(freeze(plan, {0, 1}))
    proven(plan, forward_only_stages=frozenset({0, 1}))
    proven(plan, forward_schedules(plan), training=False)


def test_circle_of_stages():
    with pytest.raises(PlanError, match="circle"):
        simple_plan([1, 1], [(0, 1), (1, 0)], mini_batch=2)
