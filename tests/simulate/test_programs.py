import random

import pytest

from gpp_benchmarks._random_plans import forward_only_of, random_plan
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan, simulate_programs
from tests.schedule.plans import chain_plan, changed, cluster_of, freeze, simple_plan
from tests.simulate.test_engine import times_of


def programs_of(plan, **options):
    return lower_schedules(plan, build_schedules(plan, **options), **options)


@pytest.mark.parametrize("mode", ["asynchronous", "rendezvous"])
def test_chain_of_equal_tasks_loses_nothing(mode):
    plan = chain_plan(4, 8)
    timeline = simulate_programs(plan, programs_of(plan), mode=mode)
    assert timeline.iteration_us == pytest.approx((8 + 3) * 2.0)


def test_rendezvous_makes_the_sender_wait():
    plan = chain_plan(2, 2, forward_us=[1.0, 5.0], backward_us=[1.0, 1.0], num_bytes=1.0)
    programs = programs_of(plan)
    asynchronous = simulate_programs(plan, programs, cluster=cluster_of(2))
    rendezvous = simulate_programs(plan, programs, cluster=cluster_of(2), mode="rendezvous")
    # 0F0 | send 1 us | 0F1: a rendezvous send keeps rank 0 until it has arrived.
    assert times_of(asynchronous)[0, "F", 1] == (1.0, 2.0)
    assert times_of(rendezvous)[0, "F", 1] == (2.0, 3.0)


def test_asynchronous_programs_lose_next_to_nothing_to_their_order():
    """Against tasks that wait only for what they need; short messages beside long tasks."""
    ratios = []
    for seed in range(60):
        rng = random.Random(seed)
        plan = random_plan(rng)
        frozen = forward_only_of(plan, rng)
        cluster = cluster_of(24, bytes_per_s=1e13, latency_us=0.05)
        schedules = build_schedules(plan, forward_only_stages=frozen)
        free = simulate_plan(plan, cluster=cluster, schedules=schedules)
        ordered = simulate_programs(plan, programs_of(plan, forward_only_stages=frozen), cluster=cluster)
        assert {e.rank for e in free.events} == {e.rank for e in ordered.events}
        ratios.append(ordered.iteration_us / free.iteration_us)
    ratios.sort()
    assert ratios[30] <= 1.001
    assert ratios[54] <= 1.02


def test_a_frozen_stage_takes_the_same_in_every_prediction():
    """No backward, no gradient for it in its reader's, and held back until its reader has read: so do planners, the
    simulator, and programs as ranks run them. Not held back, it crowded its reader's link."""
    longer = 0
    for seed in range(20):
        rng = random.Random(seed)
        us = [rng.uniform(1.0, 4.0) for _ in range(4)]
        links, num_bytes = [(0, 2), (1, 2), (2, 3)], rng.uniform(0.5, 1.0)
        plan = simple_plan([2] * 4, links, mini_batch=16, forward_us=us, backward_us=us, num_bytes=num_bytes)
        plan = freeze(plan, {0})
        asked = {"cluster": cluster_of(4)}
        predicted = predict_iteration_us(plan, **asked)
        programs = programs_of(plan)
        for timeline in (simulate_plan(plan, **asked), simulate_programs(plan, programs, **asked)):
            assert timeline.iteration_us == pytest.approx(predicted)
            tasks = {e.rank: [] for e in timeline.events}
            for event in sorted(timeline.events, key=lambda e: e.start_us):
                tasks[event.rank] += [] if event.task is None else [event.task]
            assert tasks == {program.rank: list(program.tasks) for program in programs}
            assert not any(e.kind is EventKind.RECEIVE for e in timeline.events if e.rank == 0)
        everything = build_schedules(plan, forward_only_stages=frozenset())
        longer += predict_iteration_us(plan, schedules=everything, **asked) > 1.01 * predicted
    assert longer


def test_events_are_those_of_the_plan():
    rng = random.Random(4)
    plan = random_plan(rng)
    cluster = cluster_of(24, bytes_per_s=1e12)
    free, ordered = (
        simulate_plan(plan, cluster=cluster),
        simulate_programs(plan, programs_of(plan), cluster=cluster),
    )

    def what(timeline):
        return sorted(
            (e.rank, e.stage, e.kind.value, e.micro_batch, e.edge, e.bytes) for e in timeline.events
        )

    assert what(free) == what(ordered)


def test_programs_that_stop():
    plan = chain_plan(2, 2)
    programs = programs_of(plan)
    without = changed(programs, 0, lambda own: [i for i in own if i.kind is not InstructionKind.SEND])
    with pytest.raises(
        ScheduleError, match=r"ranks wait for each other; rank 0 stands at 0B0; (.*\n)+.*\[1F0\]!"
    ):
        simulate_programs(plan, without)
    with pytest.raises(ValueError, match="choose one of"):
        simulate_programs(plan, programs, mode="eager")
