"""Times read off a timeline: of simulated ones, where they are known."""

import dataclasses

import pytest

from gpp_benchmarks._emulated_graphs import branch_links, chain_links, emulated_plan, with_in_flight
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.rehearse.rehearsal import fit_link, measure_times, predict_from
from gpp_plugin.simulate.predict import simulate_plan
from tests.schedule.plans import cluster_of, freeze, on_ranks

F, B = TaskKind.FORWARD, TaskKind.BACKWARD


def mixed_plan():
    """A fan-in with a stage of two ranks, unequal micro-batches and a stage that runs no backward."""
    plan = emulated_plan(
        "mixed",
        [(0, 2), (1, 2), (2, 3)],
        num_micro_batches=4,
        forward_us=[9e3, 7e3, 5e3, 4e3],
        backward_us=[19e3, 0.0, 11e3, 8e3],
        degrees={2: 2},
        sizes={0: 4},
    )
    return freeze(plan, {1})


def tensor_plan():
    """The same with two tensor ranks in place of two data-parallel ones."""
    plan = dataclasses.replace(mixed_plan(), model="tensor")
    stages = tuple(dataclasses.replace(s, tensor=2) if len(s.ranks) == 2 else s for s in plan.stages)
    return with_in_flight(dataclasses.replace(plan, stages=stages))


PLANS = [
    emulated_plan("chain", chain_links(4), num_micro_batches=6),
    emulated_plan("branches", branch_links(2, 2, has_own_join=True), num_micro_batches=4),
    mixed_plan(),
    tensor_plan(),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.model)
@pytest.mark.parametrize("latency_us", [0.0, 150.0])
def test_a_simulated_timeline_gives_back_its_times_and_its_length(plan, latency_us):
    steps = {"reduce_us": {2: 700.0}, "step_us": dict.fromkeys(range(len(plan.stages)), 30.0)}
    timeline = simulate_plan(
        plan,
        cluster=cluster_of(8, bytes_per_s=float("inf"), latency_us=latency_us),
        **steps,
    )
    times = measure_times(plan, [timeline])
    assert times.message_us == pytest.approx(latency_us, abs=1e-6)
    assert set(times.host_us.values()) == {0.0}
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            assert times.task_us[rank, index, F, None] == pytest.approx(stage.forward_us)
            assert times.task_us.get((rank, index, B, None), 0.0) == pytest.approx(stage.backward_us)
    assert times.reduce_us == ({2: pytest.approx(700.0)} if plan.stages[2].degree > 1 else {})
    assert times.step_us == pytest.approx(30.0)
    # A reduction on one rank is not there to be measured: leave it out of what is compared.
    wanted = timeline
    if plan.stages[2].degree == 1:
        steps["reduce_us"] = {}
        wanted = simulate_plan(
            plan,
            cluster=cluster_of(8, bytes_per_s=float("inf"), latency_us=latency_us),
            **steps,
        )
    assert predict_from(plan, [timeline]) == pytest.approx(wanted.iteration_us)


@pytest.mark.parametrize("latency_us", [0.0, 150.0])
def test_times_of_ranks_that_hold_several_stages_are_told_apart(latency_us):
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1, and a tower of other times on both."""
    plan = emulated_plan(
        "shared",
        [(0, 1), (1, 2), (2, 3), (3, 5), (4, 5)],
        num_micro_batches=4,
        forward_us=[1000.0, 1100.0, 1200.0, 1300.0, 700.0, 500.0],
        degrees={4: 2},
    )
    plan = with_in_flight(on_ranks(plan, 0, 1, 0, 1, (0, 1), 0))
    timeline = simulate_plan(plan, cluster=cluster_of(8, bytes_per_s=float("inf"), latency_us=latency_us))
    times = measure_times(plan, [timeline])
    assert times.message_us == pytest.approx(latency_us, abs=1e-6)
    assert set(times.host_us.values()) == {0.0}
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            assert times.task_us[rank, index, F, None] == pytest.approx(stage.forward_us)
            assert times.task_us[rank, index, B, None] == pytest.approx(stage.backward_us)
    assert predict_from(plan, [timeline]) == pytest.approx(timeline.iteration_us)


def test_host_time_between_tasks_is_not_taken_for_messages():
    """Every task 100 us later than the one before it ended, as an executor that posts messages in between."""
    plan = PLANS[0]
    slow = {
        (i, kind, m): (s.forward_us if kind is F else s.backward_us) + 100.0
        for i, s in enumerate(plan.stages)
        for kind in (F, B)
        for m in range(plan.num_micro_batches(i))
    }
    timeline = simulate_plan(
        plan, cluster=cluster_of(8, bytes_per_s=float("inf"), latency_us=50.0), durations=slow
    )
    events = tuple(
        dataclasses.replace(e, end_us=e.end_us - 100.0) if e.task is not None else e for e in timeline.events
    )
    shortened = dataclasses.replace(timeline, events=events)
    times = measure_times(plan, [shortened])
    assert times.task_us[0, 0, F, None] == pytest.approx(plan.stages[0].forward_us)
    assert list(times.host_us.values()) == pytest.approx([100.0] * 4)
    assert times.message_us == pytest.approx(50.0)
    assert predict_from(plan, [shortened]) == pytest.approx(timeline.iteration_us)


def test_a_line_is_fitted_only_through_messages_of_different_sizes():
    assert fit_link([]) == (0.0, float("inf"))
    assert fit_link([(100.0, 7.0), (100.0, 9.0), (150.0, 8.0)]) == (8.0, float("inf"))
    latency, bandwidth = fit_link([(100.0, 20.0), (100.0, 20.0), (400.0, 50.0)])
    assert (latency, bandwidth) == (pytest.approx(10.0), pytest.approx(1e7))  # 0.1 us a byte
    assert fit_link([(100.0, 20.0), (400.0, 10.0)]) == (15.0, float("inf"))  # larger ones were not slower
