"""Sums of a stage's ranks in predicted steps: where the runtime launches them, and what hides them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.engine.gradient_store import GradientStore
from gpp_plugin.engine.partitioned_gradients import PartitionedGradients
from gpp_plugin.ir.plan import forward_only_stages, stage_task_us
from gpp_plugin.ir.program import Direction, InstructionKind
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.step_cost import Reductions, StageReductions
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.runtime import compute
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.gathers import stages_that_reduce_early
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan, simulate_step
from gpp_plugin.simulate.reductions import early_of_blocks
from gpp_plugin.simulate.timeline_metrics import timeline_overlap
from tests.integrations.engine_jobs import B, config_of, make_engine, steps
from tests.ranks import run_kept_ranks
from tests.runtime.odd_models import build_odd
from tests.schedule.plans import chain_plan, cluster_of, on_ranks, on_shared_ranks, sharded, simple_plan
from tests.schedule.test_reductions import wide_plan
from tests.simulate.reference import reference_times

REDUCE = EventKind.REDUCE


def buckets_of(*each_us: float) -> tuple[tuple[float, float], ...]:
    """Return the points of equal buckets that become final evenly, each of which takes that long."""
    count = len(each_us)
    return early_of_blocks(np.array([float(count)]), np.array([1.0]), 1.0, lambda _: each_us[0])


def whole(plan, **values) -> Reductions:
    """Return reductions of all stages of several data ranks, alike."""
    own = StageReductions(**values)
    return Reductions(stages=tuple(own if s.degree > 1 else StageReductions() for s in plan.stages))


def spans(timeline, kind):
    return sorted({(e.stage, e.start_us, e.end_us) for e in timeline.events if e.kind is kind})


# ---- by hand ---------------------------------------------------------------------------------------------


def test_three_buckets_beside_a_backward():
    """A backward of 6 us from 4 to 10, buckets of 2 us that are final at 6, 8 and 10: one of them is exposed."""
    plan = wide_plan([2], [], [2], mini_batch=2, forward_us=4.0, backward_us=6.0)
    early = buckets_of(2.0, 2.0, 2.0)
    assert early == ((pytest.approx(1 / 3), 6.0), (1.0, 2.0))
    found = simulate_step(plan, reductions=whole(plan, last_us=6.0, early=early))
    assert found.iteration_us == pytest.approx(12.0)
    assert spans(found, REDUCE) == [(0, pytest.approx(6.0), pytest.approx(12.0))]
    # no sum is longer than behind the backward, none shorter than its last bucket behind it, or all behind the first
    for share in (0.0, 0.5, 1.0, 3.0, 100.0):
        each = 2.0 * share
        us = predict_iteration_us(
            plan, reduce_us=whole(plan, last_us=3 * each, early=buckets_of(*[each] * 3))
        )
        assert us == pytest.approx(max(10.0 + each, 6.0 + 3 * each))
        assert 10.0 + each <= us * (1 + 1e-9) and us <= (10.0 + 3 * each) * (1 + 1e-9)
    # one bucket is final no earlier than the backward ends, as is a sum that is not early
    for one in (whole(plan, last_us=6.0, early=buckets_of(6.0)), whole(plan, last_us=6.0), {0: 6.0}):
        assert predict_iteration_us(plan, reduce_us=one) == 16.0


def test_a_bucket_waits_for_the_slowest_rank_and_the_sum_in_front():
    """The ranks of a stage come to their last backwards at 10 and 14 us; a second stage of theirs sums first."""
    plan = wide_plan([2], [], [2], mini_batch=2)
    times = {(0, kind, 0, rank): us for rank in (0, 1) for kind, us in _kinds(4.0 + 4 * rank, 6.0).items()}
    early = buckets_of(2.0, 2.0, 2.0)
    us = predict_iteration_us(plan, durations=times, reduce_us=whole(plan, last_us=6.0, early=early))
    assert us == pytest.approx(14.0 + 2.0)
    both = on_ranks(
        simple_plan([2, 2], [(0, 1)], mini_batch=2, forward_us=2.0, backward_us=3.0), (0, 1), (0, 1)
    )
    sums = whole(both, last_us=9.0, early=buckets_of(3.0, 3.0, 3.0))
    # stage 1's backward runs from 4 to 7 and stage 0's from 7 to 10; sums of 9 us begin at 5 and follow each other
    assert spans(simulate_plan(both, reduce_us=sums), REDUCE) == [
        (0, pytest.approx(14.0), pytest.approx(23.0)),
        (1, pytest.approx(5.0), pytest.approx(14.0)),
    ]
    assert spans(simulate_step(both, reductions=sums), REDUCE) == spans(
        simulate_plan(both, reduce_us=sums), REDUCE
    )


def _kinds(forward_us, backward_us):
    return {TaskKind.FORWARD: forward_us, TaskKind.BACKWARD: backward_us}


def test_a_split_backward_hides_nothing():
    plan = wide_plan([2, 2], [(0, 1)], [2, 2], mini_batch=6, schedule="zero_bubble", backward_us=2.0)
    early = whole(plan, last_us=3.0, early=buckets_of(1.0, 1.0, 1.0))
    last = {
        stage: max((e for e in simulate_plan(plan).events if e.stage == stage), key=lambda e: e.end_us).kind
        for stage in (0, 1)
    }
    found = {stage: start for stage, start, _ in spans(simulate_step(plan, reductions=early), REDUCE)}
    ends = {stage: max(e.end_us for e in simulate_plan(plan).events if e.stage == stage) for stage in (0, 1)}
    for stage in (0, 1):
        assert (found[stage] < ends[stage]) == (last[stage] is EventKind.BACKWARD)
    assert EventKind.WEIGHT_GRADIENT in last.values()


def test_behind_each_backward_behind_the_step_and_ties():
    """ZeRO 2: ranks wait for a sum before their next task, messages leave in front of it; parameters follow the step."""
    plan = wide_plan([2, 2], [(0, 1)], [2, 1], mini_batch=4)
    sums = whole(plan, last_us=0.5, each_us=0.5, step_us=0.25)
    for timeline in (simulate_plan(plan, reduce_us=sums), simulate_step(plan, reductions=sums)):
        # stage 0: 0F0 0-1, 0F1 1-2, 0B0 3-4, sum 4-4.5, 0B1 5-6; stage 1: 1F0 1-2, 1B0 2-3, 1F1 3-4, 1B1 4-5
        assert spans(timeline, REDUCE) == [(0, 4.0, 4.5), (0, 6.0, 6.5), (0, 6.5, 6.75)]
    slow = dataclasses.replace(
        sums, stages=(dataclasses.replace(sums.stages[0], each_us=3.0), sums.stages[1])
    )
    assert predict_iteration_us(plan, reduce_us=slow) == 4.0 + 3.0 + 1.0 + 0.5 + 0.25
    tied = Reductions(stages=(StageReductions(last_us=1.0), StageReductions()), tied=(((0, 1), 2.0),))
    for step_us in ({}, {0: 1.0}):
        us = predict_iteration_us(plan, reduce_us=tied, step_us=step_us)
        assert us == 6.0 + 1.0 + 2.0 + sum(step_us.values())


def test_gathers_of_ranks_of_one_stage_and_of_several():
    alone = sharded(wide_plan([2, 2], [(0, 1)], [2, 2], mini_batch=4))
    sums = whole(alone, gather_us=1.5)
    for timeline in (simulate_plan(alone, reduce_us=sums), simulate_step(alone, reductions=sums)):
        # both stages gather at the beginning; the second one's is through before the first message comes
        assert spans(timeline, EventKind.GATHER) == [(0, 0.0, 1.5), (1, 0.0, 1.5)]
        assert timeline.iteration_us == 6.0 + 1.5
    both = sharded(simple_plan([2, 2], [(0, 1)], mini_batch=4), (0, 1), (0, 1))
    sums = whole(both, gather_us=0.25)
    us = [simulate_plan(both, reduce_us=sums).iteration_us, simulate_step(both, reductions=sums).iteration_us]
    assert us[0] == pytest.approx(us[1]) and us[0] > predict_iteration_us(both)


def test_overlap_has_a_row_of_the_sums():
    plan = wide_plan([2], [], [2], mini_batch=2, forward_us=4.0, backward_us=6.0)
    timeline = simulate_plan(plan, reduce_us=whole(plan, last_us=6.0, early=buckets_of(2.0, 2.0, 2.0)))
    (row,) = timeline_overlap(plan, timeline, cluster_of(2))
    assert (row.kind, row.count) == ("reductions", 2)
    assert (row.travel_us, row.hidden_us) == (pytest.approx(12.0), pytest.approx(8.0))


def test_plans_without_data_parallelism_take_the_same_time():
    rng = random.Random(3)
    for _ in range(20):
        plan = chain_plan(
            rng.randint(2, 5), rng.randint(1, 6), forward_us=rng.random(), backward_us=rng.random()
        )
        plain = predict_iteration_us(plan, cluster=cluster_of(5, bytes_per_s=1e12))
        nothing = Reductions(stages=(StageReductions(),) * len(plan.stages))
        for reduce_us in (nothing, {}, dict.fromkeys(range(len(plan.stages)), 0.0)):
            assert (
                predict_iteration_us(plan, cluster=cluster_of(5, bytes_per_s=1e12), reduce_us=reduce_us)
                == plain
            )


# ---- random plans ----------------------------------------------------------------------------------------


def random_trained(rng, **most):
    """Return a random plan all stages of which run backwards."""
    while True:
        plan = random_plan(rng, **most)
        if not forward_only_stages(plan):
            return plan


def drawn(rng, plan):
    """Return reductions of random buckets, as blocks give them, and the buckets: (share, microseconds) by stage."""
    buckets, stages = {}, []
    for index, stage in enumerate(plan.stages):
        if stage.degree == 1:
            stages.append(StageReductions())
            continue
        count = rng.randint(1, 4)
        sizes = np.array([rng.uniform(0.0, 3.0) for _ in range(count)])
        backward = np.array([rng.uniform(0.1, 1.0) for _ in range(count)])
        rate = rng.uniform(0.1, 2.0) * stage.backward_us
        early = early_of_blocks(sizes, backward, 1.0, lambda size, rate=rate: 0.01 + size * rate)
        stages.append(StageReductions(last_us=0.01 + float(sizes.sum()) * rate, early=early))
        buckets[index] = _cut(sizes[::-1], backward[::-1] / backward.sum(), rate)
    return Reductions(stages=tuple(stages)), buckets


def _cut(sizes, shares, rate):
    """Cut gradients of blocks, last one first, into buckets of 1; a second time, number by number."""
    found, filled, over = [], 0.0, 0.0
    total = float(sizes.sum())
    done = 0.0
    for size, share in zip(sizes, shares, strict=True):
        left = size
        while left > 0:
            part = min(left, 1.0 - filled)
            filled, left, done = filled + part, left - part, done + part
            is_end = done >= total - 1e-9
            if filled >= 1.0 - 1e-12 or is_end:
                found.append([over + share * (size - left) / size, 0.01 + filled * rate])
                filled = 0.0
            if is_end:
                break
        over += share
    if len(found) == 1:
        found[0][0] = 1.0
    return found


def played(plan, schedules, times, buckets):
    """Return when the last sum of each stage is through, bucket by bucket, and all tasks: an event loop of its own."""
    begun = []
    for index, own in buckets.items():
        ranks = plan.stages[index].ranks
        last = schedules[index].tasks[-1]
        where = [times[rank, "B", last.micro_batch] for rank in ranks]
        begun.append((max(s + own[0][0] * (e - s) for s, e in where), index, where))
    free = dict.fromkeys((rank for stage in plan.stages for rank in stage.ranks), 0.0)
    for _, index, where in sorted(begun, key=lambda each: each[:2]):
        now = max(free[rank] for rank in plan.stages[index].ranks)
        for share, us in buckets[index]:
            now = max(now, *(s + share * (e - s) for s, e in where)) + us
        free.update(dict.fromkeys(plan.stages[index].ranks, now))
    return max(*free.values(), *(end for _, end in times.values()))


def test_random_plans_take_what_their_buckets_do_one_by_one():
    rng = random.Random(11)
    num_hidden = num_refused = 0
    for _ in range(60):
        plan = random_trained(rng, most_stages=5, most_ranks=8)
        plan = plan.with_each(
            forward_us=[rng.uniform(1, 3) for _ in plan.stages],
            backward_us=[rng.uniform(1, 6) for _ in plan.stages],
        )
        reductions, buckets = drawn(rng, plan)
        schedules = build_schedules(plan)
        cluster = cluster_of(8, bytes_per_s=10 ** rng.uniform(11, 13), latency_us=rng.random())
        times = reference_times(plan, schedules, cluster=cluster)
        us = predict_iteration_us(plan, cluster=cluster, reduce_us=reductions)
        assert us == pytest.approx(played(plan, schedules, times, buckets), rel=1e-9)
        plain = predict_iteration_us(plan, cluster=cluster)
        behind = predict_iteration_us(plan, cluster=cluster, reduce_us=reductions.with_early(()))
        num_hidden += plain <= us < behind
        # what judges a plan plays its programs: the same where all may be early
        judged = simulate_step(plan, reductions=reductions).iteration_us
        early = stages_that_reduce_early(plan, lower_schedules(plan, schedules))
        if early.issuperset(buckets):
            assert judged == pytest.approx(predict_iteration_us(plan, reduce_us=reductions))
        else:
            num_refused += 1
    assert num_hidden > 15 and num_refused > 0


def play_programs(plan, programs, reductions):
    """Return when every rank has stepped: ranks go on as far as they can, round by round, until all are at their ends.

    Messages take no time. Collectives begin when their last rank has come.
    """
    clock, at = dict.fromkeys((p.rank for p in programs), 0.0), dict.fromkeys((p.rank for p in programs), 0)
    sent, expected, come, begun, num = {}, {p.rank: {} for p in programs}, {}, {}, {}
    before = None
    while any(at[p.rank] < len(p.instructions) for p in programs):
        assert before != at, "the programs stop"
        before = dict(at)
        for program in programs:
            rank = program.rank
            while at[rank] < len(program.instructions):
                each = program.instructions[at[rank]]
                stage, kind, message, task = program.stage_of(each), each.kind, each.message, each.task
                if task is not None:
                    needs = expected[rank].get(
                        (task.stage, task.kind is TaskKind.FORWARD, task.micro_batch, task.half), []
                    )
                    gather = begun.get((rank, task.stage))
                    if task.kind is TaskKind.WEIGHT_GRADIENT:
                        needs = []
                    if any(m not in sent for m in needs) or (
                        gather and len(come[gather]) < plan.stages[task.stage].degree
                    ):
                        break
                    own = reductions.stages[task.stage].gather_us
                    ready = [sent[m] for m in needs] + [
                        max(come[gather].values()) + own for _ in range(gather is not None)
                    ]
                    clock[rank] = max([clock[rank], *ready]) + stage_task_us(
                        plan.stages[task.stage], task.kind, task.half
                    )
                elif message is not None:
                    if kind is InstructionKind.SEND or message.is_local_transfer:
                        sent[message] = clock[rank]
                    if kind is InstructionKind.RECEIVE:
                        edge, is_there = plan.edges[message.edge], message.direction is Direction.ACTIVATION
                        reader = (
                            edge.dst if is_there else edge.src,
                            is_there,
                            message.dst_micro_batch,
                            message.dst_half,
                        )
                        expected[rank].setdefault(reader, []).append(message)
                elif kind in (InstructionKind.REDUCE_DATA, InstructionKind.GATHER, InstructionKind.STEP):
                    whole = kind is InstructionKind.STEP
                    stage = None if whole else stage
                    key = kind, stage, num.get((rank, kind, stage), 0)
                    here = come.setdefault(key, {})
                    here.setdefault(rank, clock[rank])
                    if kind is InstructionKind.GATHER:
                        begun[rank, stage] = key
                    elif len(here) < (len(programs) if whole else plan.stages[stage].degree):
                        break
                    else:
                        own = StageReductions() if whole else reductions.stages[stage]
                        is_last = all(
                            i.kind is not kind or program.stage_of(i) != stage
                            for i in program.instructions[at[rank] + 1 :]
                        )
                        clock[rank] = max(here.values()) + (own.last_us if is_last else own.each_us)
                    num[rank, kind, stage] = num.get((rank, kind, stage), 0) + 1
                at[rank] += 1
    return max(clock.values()) + max(own.step_us for own in reductions.stages)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_random_plans_are_judged_as_their_programs_run(zero):
    rng = random.Random(zero)
    num_shared = num_longer = 0
    for _ in range(40):
        plan = random_trained(rng, most_stages=4, most_ranks=6)
        if rng.random() < 0.5:
            plan = on_shared_ranks(plan, rng, 3)
        plan = plan.with_each(
            forward_us=[rng.uniform(1, 3) for _ in plan.stages],
            backward_us=[rng.uniform(1, 6) for _ in plan.stages],
        )
        if zero == 3:
            plan = sharded(plan)
        each = [
            StageReductions.under(zero, rng.uniform(0.1, 4), (), rng.uniform(0.1, 4)) for _ in plan.stages
        ]
        own = (e if s.degree > 1 else StageReductions() for e, s in zip(each, plan.stages, strict=True))
        reductions = Reductions(stages=tuple(own))
        if not any(stage.last_us for stage in reductions.stages):
            continue
        schedules = build_schedules(plan)
        programs = lower_schedules(plan, schedules, reduce_each_backward=zero > 1)
        us = simulate_step(plan, reductions=reductions).iteration_us
        # parameters that follow the step: a rank of several stages has one after the other
        if zero == 3 or not plan.shares_ranks:
            assert us == pytest.approx(play_programs(plan, programs, reductions))
        num_shared += plan.shares_ranks
        num_longer += us > predict_iteration_us(plan)
    assert num_longer > 20 and num_shared > 5


@pytest.mark.parametrize("way", ["each", "gather"])
def test_what_searches_take_is_near_what_programs_do(way):
    """In front of the last sum ranks of a stage do not wait for each other in searches: that is all that differs."""
    rng = random.Random(5)
    ratios = []
    for _ in range(30):
        plan = random_trained(rng, most_stages=4, most_ranks=6)
        if way == "gather":
            plan = sharded(plan)
        values = {"each_us": 0.3, "last_us": 0.3} if way == "each" else {"gather_us": 0.7}
        sums = whole(plan, **values)
        if sums.is_between_tasks:
            ratios.append(
                predict_iteration_us(plan, reduce_us=sums) / simulate_step(plan, reductions=sums).iteration_us
            )
    assert max(ratios) < 1.02 and 0.9 < sum(ratios) / len(ratios) <= 1.001


# ---- what the runtime does -------------------------------------------------------------------------------

JOBS: dict[str, dict[str, int]] = {
    "buckets": {"reduce_bucket_size": 300},
    "one bucket": {},
    "zero 2": {"stage": 2},
}


def launches() -> dict[str, Any]:
    """Return by job how many backwards of the second mini-batch were over when sums began, and the plan."""
    order: list[str] = []
    send, reduce, run = GradientStore._send, PartitionedGradients._sum, compute.run_backward

    def noting(call, word, is_before):
        def noted(*args):
            order.extend([word] * is_before)
            found = call(*args)
            order.extend([word] * (not is_before))
            return found

        return noted

    found = {}
    GradientStore._send = noting(send, "sum", True)
    PartitionedGradients._sum = noting(reduce, "sum", True)
    compute.run_backward = noting(run, "backward", False)
    try:
        for name, zero in JOBS.items():
            model, make_batch = build_odd("diamond")
            config = config_of(
                zero_optimization={"stage": 0, **zero}, block={"stages": 1, "data_parallel": 2}
            )
            engine = make_engine(model, make_batch(B, 0), config)
            steps(engine, [make_batch(B, 0)])  # the first backward is watched only
            order.clear()
            steps(engine, [make_batch(B, 1)])
            over = [order[:at].count("backward") for at, word in enumerate(order) if word == "sum"]
            found[name] = {"over": sorted(set(over)), "plan": engine.plan, "count": order.count("backward")}
    finally:
        GradientStore._send, PartitionedGradients._sum, compute.run_backward = send, reduce, run
    return found


def test_two_ranks_launch_their_sums_where_the_prediction_has_them():
    """Sums in buckets begin in the last backward; one bucket begins behind it; ZeRO 2 has one behind each."""
    for answer in run_kept_ranks(launches, 2):
        for name, own in answer.items():
            plan = own["plan"].with_each(forward_us=[10.0], backward_us=[20.0])
            early = buckets_of(*[1.0] * (3 if name == "buckets" else 1))
            sums = StageReductions.under(JOBS[name].get("stage", 0), 4.0, early, 0.0)
            timeline = simulate_step(plan, reductions=Reductions(stages=(sums,)))
            events = [event for event in timeline.events if event.rank == plan.stages[0].ranks[0]]
            ends = [event.end_us for event in events if event.kind is EventKind.BACKWARD]
            starts = [event.start_us for event in events if event.kind is REDUCE]
            assert own["count"] == len(ends) == 2
            assert own["over"] == sorted({sum(end <= start for end in ends) for start in starts}), name
        assert [own["over"] for own in answer.values()] == [[1], [2], [1, 2]]
