"""Orders that are not whole, each refused with what is wrong and where."""

import pytest

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.checks.order_check import check_schedules
from tests.schedule.plans import simple_plan

PLAN = simple_plan([2], [], mini_batch=4)


def check(text, *, num_in_flight=2, joined=(), plan=PLAN):
    tasks = [
        Task(
            stage=0,
            kind=TaskKind(word[0]),
            micro_batch=int(word[1]),
            half="ab".find(word[2]) if word[2:] else None,
        )
        for word in text.split()
    ]
    schedule = StageSchedule(stage=0, tasks=tuple(tasks), num_in_flight=num_in_flight, joined=joined)
    check_schedules(plan, [schedule])


@pytest.mark.parametrize(
    "text",
    [
        "F0 F1 B0 B1",
        "F1 F0 B0 B1",
        "F0a F0b F1 B0 B1",
        "F0a F1a F0b F1b B0 B1",
        "F0 I0 F1 W0 I1 W1",
        "F0 F1 I1 I0 W0 W1",
        "F0a F0b I0 F1 B1 W0",
        "F0 F1",
        "F0a F0b F1a F1b",
    ],
)
def test_whole_orders_pass(text):
    check(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 F0 F1", r"0F0 is there twice; keep one\n.*\[0F0\]!"),
        ("F0a F0a F0b F1", "0F0a is there twice"),
        ("F0 F0a F1", "0F0a is there twice"),
        ("F0a F0 F1", "0F0 comes after half of it; run it whole or in two halves"),
        ("F0b F0a F1", "0F0b comes before the first half"),
        ("F0a B0 F0b F1", "0B0 comes before its forward"),
        ("F0a F1 B1", "1 forwards and 1 backwards of 2 micro-batches; schedule all"),
        ("F0 F2", "0F2 is not a task of stage 0, which runs 2 micro-batches"),
        ("F0 F1 B0 B0 B1", "0B0 is there twice"),
        ("F0 F1 I0 B0 B1", "0B0 comes after its I; keep one"),
        ("F0 F1 B0 I0 B1", "0I0 comes after its B; keep one"),
        ("F0 F1 W0 I0 B1", "0W0 comes before its input gradient"),
        ("F0 F1 B0 W0 B1", "0W0 comes before its input gradient"),
        ("F0 F1 I0 W0 W0 B1", "0W0 is there twice"),
        ("F0 F1 I0 I1 W0", "2 forwards and 1 backwards of 2 micro-batches"),
        ("I0 F0 W0 F1 B1", "0I0 comes before its forward"),
    ],
)
def test_others_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        check(text)


def test_held_from_the_first_half_to_the_weight_gradient():
    check("F0 I0 W0 F1 I1 W1", num_in_flight=1)
    check("F0a F0b B0 F1a F1b B1", num_in_flight=1)
    for text in ("F0 I0 F1 W0 I1 W1", "F0 F1a F1b B0 B1"):
        with pytest.raises(ScheduleError, match=r"0F1a? holds 2 micro-batches, num_in_flight is 1"):
            check(text, num_in_flight=1)


def test_joined_micro_batches_run_in_halves():
    check("F0a F0b F1 B0 B1", joined=(0,))
    with pytest.raises(ScheduleError, match="joins the halves of micro-batch 1, which runs whole"):
        check("F0a F0b F1 B0 B1", joined=(0, 1))


def test_odd_numbers_of_samples_have_no_halves():
    plan = simple_plan([1], [], mini_batch=2)
    with pytest.raises(ScheduleError, match="0F0a is half of 1 samples a rank"):
        check("F0a F0b F1 B0 B1", plan=plan)
