import dataclasses
import itertools
import random

import pytest

from gpp_benchmarks.published._zero_bubble import RUNS
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.orders.gpipe import forward_only_schedule
from gpp_plugin.schedule.orders.zero_bubble import _ListRun, zero_bubble_schedules
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan
from gpp_plugin.simulate.timeline_metrics import peak_in_flight
from tests.schedule.plans import (
    chain_plan,
    cluster_of,
    freeze,
    proven,
    simple_plan,
    with_all,
    words,
)

DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]


def zero_bubble(plan, **more):
    return with_all(plan, schedule="zero_bubble", k=1, **more)


def test_three_stages():
    """The grid in the module's docstring."""
    plan = zero_bubble(chain_plan(3, 4, forward_us=1.0, backward_us=2.0))
    assert [words(s) for s in build_schedules(plan)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
        "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3",
    ]
    assert simulate_plan(plan).iteration_us == 16.0
    # ZB-H1, which grants the stages behind the first as many micro-batches as the first: what is left is
    # (p - 1)(F + I - W).
    # rank 0  F0  F1  F2  .   .   B0  B0  F3  B1  B1  B2  B2  B3  B3
    # rank 1  .   F0  F1  .   I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
    # rank 2  .   .   F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3
    granted = zero_bubble(plan, in_flight=3)
    assert [words(s) for s in build_schedules(granted)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert simulate_plan(granted).iteration_us == 14.0


@pytest.mark.parametrize(
    ("micro_batches", "one_f_one_b", "equal", "twice", "granted"), [(8, 33, 30, 29, 27), (16, 57, 54, 53, 51)]
)
def test_five_stage_diamond(micro_batches, one_f_one_b, equal, twice, granted):
    """Bubbles of 27, 20, 17 and 11 % at 8 micro-batches, 16, 11, 9 and 6 % at 16.

    Twice the counts cannot do better than 29: the last stage, which starts at 3, must end six weight gradients
    before it may hold its last micro-batch, so that its last input gradient ends at 25; three stages follow,
    the first of them with a whole backward.
    """
    plan = simple_plan([1] * 5, DIAMOND, mini_batch=micro_batches, forward_us=1.0, backward_us=2.0)
    counts = [stage.in_flight for stage in plan.stages]
    assert counts == [4, 3, 3, 2, 1]
    assert simulate_plan(plan).iteration_us == one_f_one_b
    timeline = simulate_plan(zero_bubble(plan))
    assert timeline.iteration_us == equal
    assert timeline.bubble_ratio() <= 0.8 * simulate_plan(plan).bubble_ratio()
    assert [peak_in_flight(timeline)[rank] for rank in range(5)] == counts
    doubled = plan.with_each(in_flight=[2 * count for count in counts])
    assert simulate_plan(zero_bubble(doubled)).iteration_us == twice
    timeline = simulate_plan(zero_bubble(plan, in_flight=4))
    assert timeline.iteration_us == granted == 3 * micro_batches + 3  # only the start-up is left
    assert max(peak_in_flight(timeline).values()) == 4


@pytest.mark.parametrize("run_", RUNS, ids=lambda run_: run_.case)
def test_the_papers_tables_to_four_decimals(run_):
    """Tables 5 and 9 of Zero Bubble (arXiv 2401.10241): 1F1B, and ZB-1p, which holds p micro-batches everywhere."""
    p, (f, b, w) = run_.model.ranks, run_.times
    plan = chain_plan(p, run_.micro_batches, forward_us=f, backward_us=b + w)
    plan = with_all(plan, input_gradient_us=b, weight_gradient_us=w)
    cluster = cluster_of(p, bytes_per_s=1e30, latency_us=run_.message)
    for schedule, made in (("1F1B", plan), ("ZB-1p", zero_bubble(plan, in_flight=p))):
        span = predict_iteration_us(made, cluster=cluster)  # that of the first stage, the longest
        assert round(run_.rate(span), 4) == run_.rates[schedule]


def orders(count, limit, is_split):
    """Every order of one stage's tasks in which micro-batches follow each other and at most ``limit`` are held."""
    last = "W" if is_split else "B"

    def extend(order, done):
        if done[last] == count:
            yield order
        steps = [("F", done["F"] < count and done["F"] - done[last] < limit)]
        if is_split:
            steps += [("I", done["I"] < done["F"]), ("W", done["W"] < done["I"])]
        else:
            steps.append(("B", done["B"] < done["F"]))
        for kind, is_allowed in steps:
            if is_allowed:
                yield from extend([*order, (kind, done[kind])], {**done, kind: done[kind] + 1})

    return list(extend([], dict.fromkeys("FBIW", 0)))


def schedule_of(stage, order, limit):
    tasks = tuple(Task(stage=stage, kind=TaskKind(kind), micro_batch=m) for kind, m in order)
    return StageSchedule(stage=stage, tasks=tasks, num_in_flight=limit)


def test_against_every_order_of_two_stages():
    rng = random.Random(0)
    num_best, cases = 0, 40
    for _ in range(cases):
        count, limits = 3, (rng.choice([2, 3]), rng.choice([1, 2]))
        plan = chain_plan(2, count, forward_us=[rng.randint(1, 4) for _ in range(2)])
        both = [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(2)]
        plan = zero_bubble(plan).with_each(
            in_flight=limits,
            backward_us=[float(i + w) for i, w in both],
            input_gradient_us=[float(i) for i, _ in both],
            weight_gradient_us=[float(w) for _, w in both],
        )
        best = float("inf")
        for first, last in itertools.product(orders(count, limits[0], False), orders(count, limits[1], True)):
            schedules = (schedule_of(0, first, limits[0]), schedule_of(1, last, limits[1]))
            try:
                best = min(best, predict_iteration_us(plan, schedules=schedules))
            except ScheduleError:
                continue
        found = predict_iteration_us(plan)
        assert best <= found <= 1.1 * best
        num_best += found == best
    assert num_best >= 0.9 * cases


def test_never_behind_1f1b_and_never_over_the_limit():
    """Without costs of splitting, on random times."""
    gains = []
    for seed in range(120):
        rng = random.Random(seed)
        links = rng.choice([DIAMOND, [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2), (1, 2), (2, 3), (2, 4)]])
        plan = simple_plan(
            [rng.choice([1, 1, 2]) for _ in range(5)],
            links,
            mini_batch=rng.choice([4, 8, 16]),
            forward_us=[rng.uniform(1, 4) for _ in range(5)],
            backward_us=[rng.uniform(2, 8) for _ in range(5)],
        )
        split = simulate_plan(zero_bubble(plan))
        for rank, held in peak_in_flight(split).items():
            assert held <= plan.stages[rank].in_flight
        gains.append(simulate_plan(plan).iteration_us / split.iteration_us)
    assert min(gains) >= 1.0 - 1e-9
    assert sorted(gains)[60] > 1.03


def test_beside_other_schedules_and_frozen_stages():
    plan = simple_plan(
        [1, 2, 1, 4, 1],
        DIAMOND,
        mini_batch=16,
        forward_us=1.0,
        backward_us=2.0,
        schedule=["1f1b", "zero_bubble", "gpipe", "zero_bubble", "zero_bubble"],
    )
    proven(plan)
    schedules, _ = proven(freeze(plan, {0}), forward_only_stages=frozenset({0}))
    assert {t.kind.value for t in schedules[0].tasks} == {"F"}
    assert {t.kind.value for t in schedules[1].tasks} == {"F", "B"}  # nobody waits for its input gradients
    assert {t.kind.value for t in schedules[3].tasks} == {"F", "I", "W"}


@pytest.mark.parametrize(("held", "expected"), [(1, 62.0), (2, 46.0), (3, 46.0)])
def test_a_frozen_stage_is_held_back_until_its_consumer_has_taken_what_it_holds(held, expected):
    """rank 0  F0 .. F1 .. F2         forwards of 10 us; with one held, F1 begins as the consumer's F0 ends
    rank 1  .. F0 B0 F1 B1 F2 B2      backwards of 2 us
    """
    plan = simple_plan([1, 1], [(0, 1)], mini_batch=3, forward_us=10.0, backward_us=2.0)
    plan = freeze(plan, {0})
    others = {0: forward_only_schedule(0, 3, num_in_flight=held)}
    assert _ListRun(zero_bubble(plan), (1,), others).run() == expected


@pytest.mark.parametrize(
    ("sizes", "forward_us", "backward_us", "message_us", "gradient_us", "extra", "expected"),
    [
        # by a stage that waits for what arrives soon; without that 33
        ([2, 2, 2], [2.0, 3.0, 1.0], [5.0, 7.0, 7.0], 2.0, 2.0, 1, 31.0),
        # by the order that is found as if gradients came at once; without that 119.5
        ([1, 4, 4, 2], [5.0, 5.0, 6.0, 2.0], [7.0, 3.0, 6.0, 8.0], 0.0, 4.0, 1, 115.5),
    ],
)
def test_each_choice_that_is_tried_wins_somewhere(
    sizes, forward_us, backward_us, message_us, gradient_us, extra, expected
):
    links = [(i, i + 1) for i in range(len(sizes) - 1)]
    plan = simple_plan(
        sizes, links, mini_batch=2 * max(sizes), forward_us=forward_us, backward_us=backward_us
    )
    edges = tuple(
        dataclasses.replace(edge, message_us=message_us, gradient_us=gradient_us) for edge in plan.edges
    )
    counts = [
        min(stage.in_flight + extra, plan.num_micro_batches(index)) for index, stage in enumerate(plan.stages)
    ]
    plan = dataclasses.replace(zero_bubble(plan).with_each(in_flight=counts), edges=edges)
    found = zero_bubble_schedules(plan, range(len(sizes)), {})
    assert _ListRun(plan, (), found).run() == expected


def test_too_little_memory():
    plan = simple_plan([1, 4], [(0, 1)], mini_batch=8, forward_us=1.0, backward_us=2.0)
    with pytest.raises(
        ScheduleError, match=r"no order can run with these in_flight; raise in_flight of 's0' \(now 3\)"
    ):
        build_schedules(zero_bubble(plan).with_each(in_flight=[3, 1]))
