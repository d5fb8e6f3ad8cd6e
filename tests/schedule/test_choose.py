import dataclasses

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.plan.choose_schedule import USUAL_SCHEDULES, candidate_schedules, choose_schedule
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan
from gpp_plugin.simulate.timeline_metrics import peak_in_flight
from tests.schedule.plans import chain_plan, cluster_of, proven, simple_plan, with_split_costs


def test_balanced_chain_without_latency_stays_1f1b():
    chosen = choose_schedule(chain_plan(4, 8))
    assert {(s.schedule, s.k) for s in chosen.stages} == {("1f1b", 1)}
    assert [s.in_flight for s in chosen.stages] == [4, 3, 2, 1]
    assert chosen.iteration_us == pytest.approx(22.0)
    assert chosen.notes == ("schedule 1f1b",)


def test_slow_links_get_a_longer_warm_up_where_memory_allows():
    plan = chain_plan(4, 32, forward_us=1.0, backward_us=1.0, num_bytes=1.0)
    cluster = cluster_of(4, bytes_per_s=1e12, latency_us=1.0)
    chosen = choose_schedule(plan, cluster=cluster)
    assert chosen.stages[0].in_flight > 4
    assert chosen.iteration_us < 0.8 * predict_iteration_us(plan, cluster=cluster)
    tight = choose_schedule(plan, cluster=cluster, most_in_flight=[4, 3, 2, 1])
    assert [s.in_flight for s in tight.stages] == [4, 3, 2, 1]


def test_equal_time_with_less_held_wins():
    plan = chain_plan(4, 12, forward_us=[1.0, 1.0, 1.0, 8.0], backward_us=[1.0, 1.0, 1.0, 8.0])
    chosen = choose_schedule(plan)
    assert [s.in_flight for s in chosen.stages] == [2, 2, 2, 1]
    assert {s.schedule for s in chosen.stages} == {"greedy"}


def test_the_choice_is_the_best_candidate():
    for sizes in ([1, 1, 2, 4], [4, 2, 1, 1], [2, 1, 4, 2]):
        plan = simple_plan(
            sizes,
            [(0, 1), (0, 2), (1, 3), (2, 3)],
            mini_batch=16,
            forward_us=[1.0, 2.0, 3.0, 1.0],
            num_bytes=1.0,
        )
        cluster = cluster_of(4, bytes_per_s=1e6, latency_us=0.5)
        times = [predict_iteration_us(c, cluster=cluster) for _, c in candidate_schedules(plan)]
        chosen = choose_schedule(plan, cluster=cluster)
        assert chosen.iteration_us <= min(times) * 1.002
        for rank, held in peak_in_flight(simulate_plan(chosen, cluster=cluster)).items():
            assert held <= chosen.stages[rank].in_flight


def test_nothing_fits():
    with pytest.raises(
        PlanError, match=r"no schedule fits \[1, 1\] micro-batches in flight; .*1f1b \[2, 1\]"
    ):
        choose_schedule(chain_plan(2, 4), most_in_flight=[1, 1])


def test_zero_bubble_only_where_asked_and_where_it_wins():
    plan = chain_plan(4, 8, forward_us=1.0, backward_us=2.0)
    asked = (*USUAL_SCHEDULES, "zero_bubble")
    assert {s.schedule for s in choose_schedule(plan).stages} == {"1f1b"}
    free = choose_schedule(plan, schedules=asked)
    assert {s.schedule for s in free.stages} == {"zero_bubble"}
    assert [s.in_flight for s in free.stages] == [4, 4, 4, 4] and free.iteration_us == 27.0
    equal = choose_schedule(plan, schedules=asked, most_in_flight=[4, 3, 2, 1])
    assert [s.in_flight for s in equal.stages] == [4, 3, 2, 1] and equal.iteration_us == 30.0
    between = choose_schedule(plan, schedules=asked, most_in_flight=[4, 3, 3, 2])
    assert [s.in_flight for s in between.stages] == [4, 3, 3, 2] and 27.0 <= between.iteration_us < 30.0
    # Where input and weight gradient take half again as long as the backward they are not worth it.
    dear = with_split_costs(plan, split_factor=1.5)
    assert {s.schedule for s in choose_schedule(dear, schedules=asked).stages} == {"1f1b"}
    assert {s.schedule for s in choose_schedule(dear, schedules=["zero_bubble"]).stages} == {"zero_bubble"}
    slow = {
        (s, kind, m): {"F": 1.0, "B": 2.0}.get(kind.value, 1.6)
        for s in range(4)
        for kind in TaskKind
        for m in range(8)
    }
    assert {s.schedule for s in choose_schedule(plan, schedules=asked, durations=slow).stages} == {"1f1b"}


def test_the_best_schedule_is_sliced():
    plan = simple_plan([2] * 4, [(0, 1), (1, 2), (2, 3)], mini_batch=16, forward_us=1.0, backward_us=2.0)
    both = choose_schedule(
        plan, schedules=["1f1b", "zero_bubble"], slicing="auto", most_in_flight=[4, 3, 2, 1]
    )
    assert both.notes == ("schedule zero_bubble, 1 sliced (halves sent singly)",)
    assert both.iteration_us == 28.5  # 30 unsliced
    proven(both)
    whole = choose_schedule(plan, slicing="auto", whole_stages=range(4))
    assert [s.num_sliced for s in whole.stages] == [0] * 4
    again = choose_schedule(both, schedules=["1f1b"])
    assert [(s.schedule, s.num_sliced) for s in again.stages] == [("1f1b", 0)] * 4


def test_many_tasks_leave_greedy_out():
    plan = chain_plan(2, 2048)
    assert "greedy" not in [name for name, _ in candidate_schedules(plan)]
    assert "greedy" in [name for name, _ in candidate_schedules(dataclasses.replace(plan, mini_batch=64))]
