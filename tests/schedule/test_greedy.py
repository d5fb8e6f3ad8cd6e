import random

import pytest

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build import build_schedules, plan_in_flight
from gpp_plugin.schedule.orders import greedy
from gpp_plugin.schedule.orders.greedy import greedy_schedule
from gpp_plugin.simulate.predict import simulate_plan
from tests.schedule.plans import chain_plan, simple_plan
from tests.simulate.test_engine import times_of


def all_orders(count, forward=0, backward=0):
    """Every order of forwards and backwards in which a backward comes after its forward."""
    if backward == count:
        yield []
    if forward < count:
        yield from ([("F", forward), *rest] for rest in all_orders(count, forward + 1, backward))
    if backward < forward:
        yield from ([("B", backward), *rest] for rest in all_orders(count, forward, backward + 1))


def schedule_of(stage, order):
    tasks = tuple(Task(stage=stage, kind=TaskKind(kind), micro_batch=m) for kind, m in order)
    held = max(sum(1 if kind == "F" else -1 for kind, _ in order[: i + 1]) for i in range(len(order)))
    return StageSchedule(stage=stage, tasks=tasks, num_in_flight=held)


def running_us(plan, first, others):
    try:
        times = times_of(simulate_plan(plan, schedules=(first, *others)))
    except ScheduleError:
        return float("inf")
    return max(end for (rank, _, _), (_, end) in times.items() if rank == 0)


def test_fewest_in_flight_of_all_time_optimal_orders():
    """Algorithm 4 against every order of the first stage, successors fixed (Theorem 3.1)."""
    rng = random.Random(0)
    fewer_than_all = 0
    for _ in range(25):
        sizes = [1, rng.choice([1, 2, 3]), rng.choice([1, 2, 3])]
        links = rng.choice([[(0, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 2), (1, 2), (0, 1)]])
        plan = simple_plan(
            sizes,
            links,
            mini_batch=6,
            forward_us=[rng.randint(1, 5) * size for size in sizes],
            backward_us=[rng.randint(1, 5) * size for size in sizes],
        )
        others = build_schedules(plan)[1:]
        found = greedy_schedule(plan, 0, {1: others[0], 2: others[1]})
        results = [
            (running_us(plan, schedule, others), schedule.num_in_flight)
            for schedule in (schedule_of(0, order) for order in all_orders(6))
        ]
        shortest = min(time for time, _ in results)
        assert running_us(plan, found, others) == pytest.approx(shortest)
        assert found.num_in_flight == min(held for time, held in results if time <= shortest + 1e-9)
        fewer_than_all += found.num_in_flight < 6
    assert fewer_than_all >= 8


def test_cap():
    plan = chain_plan(2, 6)
    last = build_schedules(plan)[1]
    assert greedy_schedule(plan, 0, {1: last}).num_in_flight == 2
    capped = greedy_schedule(plan, 0, {1: last}, most_in_flight=1)
    assert " ".join(map(str, capped.tasks[:4])) == "0F0 0B0 0F1 0B1"
    fan = simple_plan([1, 4], [(0, 1)], mini_batch=8)
    with pytest.raises(ScheduleError, match="no order that holds 3 micro-batches"):
        greedy_schedule(fan, 0, {1: build_schedules(fan)[1]}, most_in_flight=3)


def test_an_order_is_searched_once_for_its_count_and_for_its_build():
    """The in-flight counts of a plan come of the orders that are then built; each is one search a stage."""
    plan = chain_plan(4, 6).with_each(
        schedule=["greedy"] * 4, forward_us=[3, 7, 2, 5], backward_us=[6, 13, 5, 9]
    )
    greedy._search.cache_clear()
    counted = plan.with_each(in_flight=plan_in_flight(plan))
    built = build_schedules(counted)
    assert [order.num_in_flight for order in built] == [stage.in_flight for stage in counted.stages]
    assert greedy._search.cache_info().misses == 4
    held = built[0].num_in_flight
    less = greedy_schedule(counted, 0, dict(enumerate(built)), most_in_flight=held - 1)
    assert less.num_in_flight == held - 1 and greedy._search.cache_info().misses == 5
