"""What any planner, schedule or transport must pass: one row for each that comes with the plugin, and bad ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.plan.baselines.stock_chain import uniform_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plugins import PLANNERS, SCHEDULES, TRANSPORTS, Schedule
from gpp_plugin.schedule.orders.gpipe import gpipe_schedule
from gpp_plugin.schedule.orders.kfkb import kfkb_schedule
from gpp_plugin.testing import CheckFailed, check_planner, check_schedule, check_transport, planner_requests


@pytest.mark.parametrize("name", PLANNERS.built_in)
def test_every_planner_passes(name: str) -> None:
    plans = check_planner(name)  # whose plain cases have plans
    always = {"micro-batches of four samples", "one loss unit a rank", "zero 2", "zero 3"}
    assert not always & {case for case, plan in plans.items() if plan is None}
    assert plans["hardly any memory"] is None
    assert {plan.planner for plan in plans.values() if plan is not None} == {name}


@pytest.mark.parametrize("name", SCHEDULES.built_in)
def test_every_schedule_passes(name: str) -> None:
    orders = check_schedule(name)["a chain with one micro-batch"]
    assert [len(order.tasks) for order in orders] == [2] * 4 or name == "zero_bubble"


@pytest.mark.parametrize("name", TRANSPORTS.built_in)
def test_every_transport_passes(name: str) -> None:
    check_transport(name)


# ---- planners that are wrong ---------------------------------------------------------------------------------


def forgetful(request: PlanRequest) -> PipelinePlan:
    """Leave the last block out."""
    plan = uniform_plan(request)
    *others, last = plan.stages
    return dataclasses.replace(plan, stages=(*others, dataclasses.replace(last, blocks=last.blocks[:-1])))


def timid(request: PlanRequest) -> PipelinePlan:
    """Find no plan."""
    raise PlanInfeasible("no plan; try again")


def fickle(request: PlanRequest, seen: list[int] = []) -> PipelinePlan:  # noqa: B006 - remembers on purpose
    """Make another plan at every call."""
    seen.append(0)
    return dataclasses.replace(uniform_plan(request), notes=(f"call {len(seen)}",))


def idle(request: PlanRequest) -> PipelinePlan:
    """Plan for one rank, whatever there are."""
    return uniform_plan(dataclasses.replace(request, num_ranks=1, num_stages=1, data_parallel=None))


@pytest.mark.parametrize(
    ("planner", "words"),
    [
        (idle, "plain chain on two ranks: .*made a plan of 1 ranks where 2 are requested"),
        (forgetful, "plain chain on one rank: .*1 blocks are in no stage"),
        (timid, "plain chain on one rank: finds no plan where there is one: no plan; try again"),
        (lambda request: uniform_plan(request).stages[7], "plain chain on one rank: IndexError"),
        (fickle, "plain chain on one rank: makes another plan of the same request"),
        (lambda request: "a plan", "plain chain on one rank: .*returned a str, not a PipelinePlan"),
    ],
)
def test_a_wrong_planner_is_told_its_case(planner, words: str) -> None:
    with pytest.raises(CheckFailed, match=f"^planner 'checked planner', {words}"):
        check_planner(planner)
    assert "checked planner" not in PLANNERS


def test_requests_differ_in_name_and_content() -> None:
    requests = planner_requests()
    assert len(requests) >= 12
    assert len({str(request) for request in requests.values()}) == len(requests)


# ---- schedules that are wrong --------------------------------------------------------------------------------


class Wrong(Schedule):
    """Orders the tasks of a stage by its index, its micro-batches, and how many may be in flight."""

    def __init__(self, make: Callable[[int, int, int], StageSchedule]) -> None:
        self._make = make

    def order(self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]) -> StageSchedule:
        return self._make(index, plan.num_micro_batches(index), plan.stages[index].in_flight)


def without_the_last(index: int, count: int, held: int) -> StageSchedule:
    whole = kfkb_schedule(index, count, k=1, num_in_flight=held)
    return dataclasses.replace(whole, tasks=whole.tasks[:-1])


def backwards(index: int, count: int, held: int) -> StageSchedule:
    """Run forwards from the last one to the first: stages in a row then wait for each other's gradients."""
    whole = kfkb_schedule(index, count, k=1, num_in_flight=held)
    turned = (dataclasses.replace(task, micro_batch=count - 1 - task.micro_batch) for task in whole.tasks)
    return dataclasses.replace(whole, tasks=tuple(turned)) if index % 2 else whole


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Wrong(without_the_last), "one stage: stage 's0': 6 forwards and 5 backwards of 6 micro-batches"),
        (
            Wrong(lambda index, count, _: gpipe_schedule(index, count)),
            "one stage: holds 6 on 's0', in_flight is 1",
        ),
        (Wrong(backwards), "a chain of four: "),
    ],
)
def test_a_wrong_schedule_is_told_its_case(schedule: Schedule, words: str) -> None:
    with pytest.raises(CheckFailed, match=f"^schedule 'checked schedule', {words}"):
        check_schedule(schedule)
    assert "checked schedule" not in SCHEDULES
