import pytest

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.orders.gpipe import forward_only_schedule, gpipe_schedule
from gpp_plugin.schedule.orders.kfkb import kfkb_schedule, one_f_one_b_schedule
from tests.plan.graphs import with_stage
from tests.schedule.plans import chain_plan


def text(schedule):
    return " ".join(map(str, schedule.tasks))


@pytest.mark.parametrize(
    ("num_in_flight", "expected"),
    [
        (1, "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"),
        (2, "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"),
        (3, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"),
        (9, "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"),
    ],
)
def test_one_f_one_b(num_in_flight, expected):
    schedule = one_f_one_b_schedule(0, 4, num_in_flight=num_in_flight)
    assert text(schedule) == expected
    assert schedule.num_in_flight == min(num_in_flight, 4)


@pytest.mark.parametrize(
    ("micro_batches", "k", "num_in_flight", "expected"),
    [
        (4, 2, 2, "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3"),
        (6, 2, 4, "0F0 0F1 0F2 0F3 0B0 0B1 0F4 0F5 0B2 0B3 0B4 0B5"),
        (5, 2, 3, "0F0 0F1 0F2 0B0 0B1 0F3 0F4 0B2 0B3 0B4"),
        (3, 2, 2, "0F0 0F1 0B0 0B1 0F2 0B2"),
        (2, 4, 2, "0F0 0F1 0B0 0B1"),
    ],
)
def test_kfkb(micro_batches, k, num_in_flight, expected):
    assert text(kfkb_schedule(0, micro_batches, k=k, num_in_flight=num_in_flight)) == expected


def test_bad_counts():
    with pytest.raises(ValueError, match="2 micro-batches in flight are too few"):
        kfkb_schedule(0, 8, k=3, num_in_flight=2)
    with pytest.raises(ValueError, match="0 micro-batches in flight are too few"):
        one_f_one_b_schedule(0, 4, num_in_flight=0)
    with pytest.raises(ValueError, match="at least one"):
        gpipe_schedule(0, 0)
    with pytest.raises(ValueError, match="at least 1"):
        forward_only_schedule(0, 4, num_in_flight=0)


def test_build_takes_schedule_k_and_in_flight_of_each_stage():
    plan = chain_plan(3, 4, schedule=["gpipe", "1f1b", "1f1b"], k=[1, 2, 1])
    assert [text(s) for s in build_schedules(plan)] == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert [text(s) for s in build_schedules(plan, forward_only_stages=frozenset({0, 1}))][:2] == [
        "0F0 0F1 0F2 0F3",
        "1F0 1F1 1F2 1F3",
    ]
    assert text(forward_schedules(plan)[2]) == "2F0 2F1 2F2 2F3"


def test_build_refuses_what_does_not_fit():
    plan = chain_plan(2, 4)
    with pytest.raises(ScheduleError, match=r"no schedule '1b1f'; the schedules are \['1f1b', 'gpipe'"):
        build_schedules(with_stage(plan, 0, schedule="1b1f"))
    with pytest.raises(ScheduleError, match="gpipe holds all 4 micro-batches, in_flight allows 2"):
        build_schedules(with_stage(plan, 0, schedule="gpipe"))
    with pytest.raises(ScheduleError, match="stage 's0': .* allow 3 or lower k"):
        build_schedules(with_stage(plan, 0, k=3))
    with pytest.raises(ScheduleError, match="in_flight is 0"):
        build_schedules(with_stage(plan, 0, in_flight=0))
    with pytest.raises(PlanError, match="3 samples do not divide the mini-batch of 4"):
        build_schedules(with_stage(plan, 0, micro_batch_size=3))
    with pytest.raises(PlanError, match="2 ranks do not divide a micro-batch of 1"):
        forward_schedules(with_stage(plan, 0, ranks=(0, 2)))
