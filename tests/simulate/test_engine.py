import random

import pytest

from gpp_benchmarks._random_plans import random_draw
from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan, simulate_programs
from tests.schedule.plans import (
    chain_plan,
    cluster_of,
    freeze,
    proven,
    simple_plan,
    with_all,
    with_split_costs,
)
from tests.simulate.reference import label, reference_times


def times_of(timeline):
    return {(e.rank, label(e.task), e.micro_batch): (e.start_us, e.end_us) for e in timeline.events if e.task}


# ---- closed forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (4, 3), (4, 8), (8, 20)])
def test_chain(schedule, stages, micro_batches):
    plan = chain_plan(stages, micro_batches, forward_us=3.0, backward_us=7.0, schedule=schedule)
    timeline = simulate_plan(plan)
    assert timeline.iteration_us == pytest.approx((micro_batches + stages - 1) * 10.0)
    assert timeline.bubble_ratio() == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert timeline.source == "predicted"


def test_unequal_micro_batches_of_figure_5():
    """Stages of 1, 2 and 4 samples at equal time per sample: earlier starts than 4, 4, 4 (Figure 5)."""
    links = [(0, 1), (1, 2)]
    tailored = simple_plan(
        [1, 2, 4], links, mini_batch=32, forward_us=[1.0, 2.0, 4.0], backward_us=[1.0, 2.0, 4.0]
    )
    universal = simple_plan([4, 4, 4], links, mini_batch=32, forward_us=4.0, backward_us=4.0)
    times = times_of(simulate_plan(tailored))
    assert times[1, "F", 0][0] == 2.0 and times[2, "F", 0][0] == 6.0  # two forwards of 1, then two of 2
    assert simulate_plan(universal).iteration_us == pytest.approx((8 + 2) * 8.0)
    # Start-up 2 + 4 instead of 8 each way, then the last stage is busy: 6 + 32 * 2 + 6.
    assert times[2, "B", 7][1] == pytest.approx(6.0 + 64.0)
    assert simulate_plan(tailored).iteration_us == pytest.approx(76.0)


# ---- links -----------------------------------------------------------------------------------------


def test_messages_of_one_rank_share_its_link():
    plan = simple_plan([1] * 3, [(0, 1), (0, 2)], mini_batch=1, num_bytes=4.0)
    cluster = cluster_of(3, latency_us=1.0)
    shared, free = (
        simulate_plan(plan, cluster=cluster),
        simulate_plan(plan, cluster=cluster, share_links=False),
    )
    assert times_of(free)[2, "F", 0][0] == times_of(free)[1, "F", 0][0] == 1.0 + 4.0 + 1.0
    assert times_of(shared)[1, "F", 0][0] == 6.0
    assert times_of(shared)[2, "F", 0][0] == 10.0
    # Gradients leave at 8 and 12, take 5, and do not meet on the link of rank 0.
    assert times_of(shared)[0, "B", 0][0] == 17.0


def test_message_events_hold_bytes_and_edges():
    timeline = simulate_plan(chain_plan(2, 1, num_bytes=8.0), cluster=cluster_of(2))
    sent = [
        (e.rank, e.edge, e.bytes, e.start_us, e.end_us) for e in timeline.events if e.kind is EventKind.SEND
    ]
    received = [(e.rank, e.edge, e.bytes, e.end_us) for e in timeline.events if e.kind is EventKind.RECEIVE]
    assert sent == [(0, 0, 8, 1.0, 9.0), (1, 0, 8, 11.0, 19.0)]
    assert received == [(1, 0, 8, 9.0), (0, 0, 8, 19.0)]


def test_cluster_that_is_too_small():
    with pytest.raises(PlanError, match="uses rank 2, cluster 'c' has 2 devices"):
        simulate_plan(chain_plan(3, 1), cluster=cluster_of(2))


# ---- arguments -------------------------------------------------------------------------------------


def test_durations_by_mapping_and_function():
    plan = chain_plan(2, 2)
    by_task = {(s, kind, m): 1.0 + s for s in range(2) for kind in TaskKind for m in range(2)}
    assert simulate_plan(plan, durations=by_task).iteration_us == pytest.approx(10.0)
    by_rank = {**by_task, (0, TaskKind.FORWARD, 0, 0): 5.0}
    assert simulate_plan(plan, durations=by_rank).iteration_us == pytest.approx(14.0)
    function = simulate_plan(plan, durations=lambda stage, kind, micro_batch, rank: 1.0 + stage)
    assert function == simulate_plan(plan, durations=by_task)
    with pytest.raises(PlanError, match=r"durations lack \(stage 1, F, micro-batch 0"):
        simulate_plan(plan, durations={k: v for k, v in by_task.items() if k[0] == 0})
    with pytest.raises(PlanError, match="takes -1"):
        simulate_plan(plan, durations=lambda *_: -1.0)


def test_parts_of_tasks_take_what_the_plan_says_or_half():
    plan = simple_plan([2, 2, 2], [(0, 1), (1, 2)], mini_batch=4, forward_us=2.0, backward_us=4.0)
    plan = with_all(plan, schedule="zero_bubble", num_sliced=1)

    def spans(**options):
        times = times_of(simulate_plan(options.pop("plan", plan), **options))
        return {key[1:]: end - start for key, (start, end) in times.items() if key[0] == 2}

    halves = {("Fa", 0): 1.0, ("Fb", 0): 1.0, ("F", 1): 2.0}
    plain = {("I", 0): 2.0, ("W", 0): 2.0, ("I", 1): 2.0, ("W", 1): 2.0}
    assert spans() == {**halves, **plain}
    measured = with_split_costs(plan, half_overhead_us=0.5, split_factor=1.25, input_share=0.4)
    assert spans(plan=measured) == {
        ("Fa", 0): 1.5, ("Fb", 0): 1.5, ("F", 1): 2.0,
        ("I", 0): 2.0, ("W", 0): 3.0, ("I", 1): 2.0, ("W", 1): 3.0,
    }  # fmt: skip
    whole = {
        (s, kind, m): {"F": 6.0}.get(kind.value, 10.0)
        for s in range(3)
        for kind in TaskKind
        for m in range(2)
    }
    assert (
        spans(durations=lambda stage, kind, micro_batch, rank: whole[stage, kind, micro_batch])["Fa", 0]
        == 3.0
    )
    only = {key: us for key, us in whole.items() if key[1].value in "FB"}
    parts = {(2, TaskKind.FORWARD, 0, 2, 1): 4.0, (2, TaskKind.WEIGHT_GRADIENT, 1, 2): 7.0}
    assert spans(durations={**only, **parts}) == {
        ("Fa", 0): 3.0, ("Fb", 0): 4.0, ("F", 1): 6.0,
        ("I", 0): 5.0, ("W", 0): 5.0, ("I", 1): 5.0, ("W", 1): 7.0,
    }  # fmt: skip


def test_reductions_and_step():
    plan = chain_plan(2, 2)
    asked = {"reduce_us": {0: 5.0, 1: 1.0}, "step_us": {0: 2.0, 1: 3.0}}
    for timeline in (simulate_plan(plan, **asked), simulate_programs(plan, proven(plan)[1], **asked)):
        tail = [
            (e.rank, e.kind.value, e.start_us, e.end_us)
            for e in timeline.events
            if e.kind in (EventKind.REDUCE, EventKind.STEP)
        ]
        assert sorted(tail) == [
            (0, "reduce", 6.0, 11.0),
            (0, "step", 11.0, 13.0),
            (1, "reduce", 5.0, 6.0),
            (1, "step", 11.0, 14.0),
        ]
    assert predict_iteration_us(plan, **asked) == 14.0


def test_orders_that_wait_for_each_other_show_the_grid():
    plan = simple_plan([1, 4], [(0, 1)], mini_batch=8)
    with pytest.raises(
        ScheduleError, match=r"0F2 waits for 0B0 .*raise in_flight of 's0' \(now 2\)\nrank 0 .*\[0B0\]!"
    ):
        simulate_plan(plan.with_each(in_flight=[2, 1]))


def test_frozen_stage_runs_ahead_no_further_than_its_in_flight():
    plan = simple_plan([1, 1], [(0, 1)], mini_batch=6, forward_us=[1.0, 10.0])
    plan = freeze(plan, {0})
    times = times_of(simulate_plan(plan))
    assert plan.stages[0].in_flight == 2
    assert times[0, "F", 1][1] == 2.0
    assert times[0, "F", 2][0] == times[1, "F", 0][1] == 11.0


# ---- against the independent reference -------------------------------------------------------------


def compare(seed):
    rng = random.Random(seed)
    draw = random_draw(seed, most_stages=6, most_ranks=10)
    plan, schedules = draw.plan, draw.schedules
    if plan.mini_batch > 12:
        return 0
    plan = with_split_costs(
        plan,
        half_overhead_us=rng.random(),
        split_factor=1.0 + rng.random() / 4,
        input_share=rng.uniform(0.3, 0.7),
    )
    cluster = rng.choice(
        [None, cluster_of(10, bytes_per_s=10 ** rng.uniform(11, 13), latency_us=rng.random(), node=4)]
    )
    share_links = rng.random() < 0.7
    timeline = simulate_plan(plan, cluster=cluster, schedules=schedules, share_links=share_links)
    expected = reference_times(plan, schedules, cluster=cluster, share_links=share_links)
    found = times_of(timeline)
    assert found.keys() == expected.keys()
    for task, (start, end) in expected.items():
        assert found[task] == pytest.approx((start, end), rel=1e-9, abs=1e-9), (seed, task)
    return len(found)


def test_agrees_with_the_slow_reference_on_a_thousand_plans():
    compared = [compare(seed) for seed in range(1700)]
    assert sum(count > 0 for count in compared) >= 1000 and sum(compared) > 30_000
