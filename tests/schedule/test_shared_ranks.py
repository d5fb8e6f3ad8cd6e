"""Ranks that hold several stages: whose turn it is, what is proven of it, and how long it takes."""

import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import random_plan
from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.program import Instruction, InstructionKind
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.timeline import EventKind
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.gathers import stages_that_reduce_early
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.interleaved import _policies, _Setting, _shortest, _times, in_flight_within
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan, simulate_programs
from tests.schedule.plans import (
    chain_plan,
    changed,
    cluster_of,
    lines,
    on_ranks,
    on_shared_ranks,
    proven,
    simple_plan,
    with_all,
)
from tests.schedule.shortest_order import ShortestOrder


def interleaved(num_ranks, virtual, micro_batches, **options):
    num_stages = num_ranks * virtual
    plan = chain_plan(num_stages, micro_batches, **{"forward_us": 1.0, "backward_us": 2.0, **options})
    return on_ranks(plan, *(stage % num_ranks for stage in range(num_stages)))


def folded(num_ranks, micro_batches, **options):
    """Return a chain in V shape: rank r holds stages r and 2p - 1 - r."""
    last = 2 * num_ranks - 1
    plan = chain_plan(last + 1, micro_batches, forward_us=1.0, backward_us=2.0, **options)
    return on_ranks(plan, *(min(stage, last - stage) for stage in range(last + 1)))


def test_two_stages_of_a_rank_hand_over():
    _, (program,) = proven(on_ranks(chain_plan(2, 1), 0, 0), tied_stages=(0, 1))
    assert lines(program) == [
        "0F0",
        "send(act e0 r0.0>r0.0 [0..0])",
        "receive(act e0 r0.0>r0.0 [0..0])",
        "1F0",
        "1B0",
        "send(grad e0 r0.0>r0.0 [0..0])",
        "receive(grad e0 r0.0>r0.0 [0..0])",
        "0B0",
        "reduce_data(0)",
        "reduce_data(1)",
        "reduce_tied(0)",
        "reduce_tied(1)",
        "step",
    ]
    assert [lines(program.of_stage(stage))[-3:] for stage in (0, 1)] == [
        ["reduce_data(0)", "reduce_tied(0)", "step"],
        ["reduce_data(1)", "reduce_tied(1)", "step"],
    ]


def test_the_documented_order():
    _, programs = proven(interleaved(2, 2, 4, backward_us=1.0))
    tasks = [[str(i) for i in program.instructions if i.task is not None] for program in programs]
    assert " ".join(tasks[0]) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert " ".join(tasks[1]) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


@pytest.mark.parametrize(
    ("num_ranks", "virtual", "micro_batches"),
    [(2, 2, 2), (2, 2, 8), (2, 4, 4), (3, 2, 9), (4, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 6)],
)
@pytest.mark.parametrize("times", [(1.0, 2.0), (3.0, 4.0)])
def test_interleaving_takes_the_published_time(num_ranks, virtual, micro_batches, times):
    forward, backward = times
    plan = interleaved(num_ranks, virtual, micro_batches, forward_us=forward, backward_us=backward)
    expected = (micro_batches * virtual + num_ranks - 1) * (forward + backward)
    assert predict_iteration_us(plan) == pytest.approx(expected)


def test_interleaving_holds_what_table_2_gives_stages_of_their_own():
    # Megatron's warm-up on rank r is 2 (p - r - 1) + (v - 1) p forwards and one more is held behind it
    plan = interleaved(4, 2, 16)
    assert [stage.in_flight for stage in plan.stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    peaks = {rank: 0 for rank in range(4)}
    _, programs = proven(plan)
    for program in programs:
        held = 0
        for task in (i.task for i in program.instructions if i.task is not None):
            held += 1 if task.kind.value == "F" else -1
            peaks[program.rank] = max(peaks[program.rank], held)
    assert all(peaks[r] <= 2 * (4 - r - 1) + 4 + 1 for r in peaks)


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(4, 8), (4, 16)])
def test_v_shapes_under_a_limit_of_the_rank(num_ranks, micro_batches):
    # Controllable Memory (arXiv 2405.15362): V-Min holds (p + 4) // 3 micro-batches and idles 2 p / 3 of F + I + W,
    # V-Half (p + 2) // 2 and p / 2; here a micro-batch is held in two stages of a rank, and F, I and W take 1 each
    plan = folded(num_ranks, micro_batches, schedule="zero_bubble")
    work = 6.0 * micro_batches
    for held, idle in (((num_ranks + 4) // 3, 4.0 * num_ranks), ((num_ranks + 2) // 2, 3.0 * num_ranks)):
        counts = in_flight_within(plan, dict.fromkeys(range(num_ranks), 2 * held))
        limited = plan.with_each(in_flight=counts)
        schedules, _ = proven(limited)
        assert predict_iteration_us(limited, schedules=schedules) <= work + idle
        # stages reach their most at different times
        totals = [counts[r] + counts[2 * num_ranks - 1 - r] for r in range(num_ranks)]
        assert max(totals) <= 2 * held + 3
    # with 1F1B's memory it idles little more than no rank can avoid: the last one starts after p - 1 forwards
    counts = in_flight_within(plan, dict.fromkeys(range(num_ranks), 2 * num_ranks))
    assert predict_iteration_us(plan.with_each(in_flight=counts)) <= work + (num_ranks - 1) + 2


def test_what_the_simulations_of_orders_know():
    """Four stages on ranks 0, 1, 1 and 0, in micro-batches of 2 samples; a message takes 5 us, but not on one rank."""
    plan = simple_plan(
        [2] * 4, [(0, 1), (1, 2), (2, 3)], mini_batch=16, forward_us=3.0, backward_us=12.0,
        schedule=["1f1b", "zero_bubble", "1f1b", "1f1b"],
    )  # fmt: skip
    edges = tuple(dataclasses.replace(edge, message_us=5.0, gradient_us=7.0) for edge in plan.edges)
    plan = on_ranks(dataclasses.replace(plan, edges=edges), 0, 1, 1, 0)
    schedules = build_schedules(on_ranks(plan, 0, 1, 2, 3))
    setting = _Setting(plan, schedules, set(range(4)))
    late = [us for others in setting.late for _, us in others]
    assert sorted(late) == [5.0] * 16 + [7.0] * 16, "two edges, eight micro-batches, both ways"
    assert {policy.group for policy in _policies(setting)} == {4, 2, 16}
    assert [times[TaskKind.FORWARD] for times in _times(plan, setting.templates, are_equal=True)] == [
        7.5, 5.0, 7.5, 7.5,
    ]  # fmt: skip
    uneven, even = (
        [dataclasses.replace(s, num_in_flight=n) for s, n in zip(schedules, counts, strict=True)]
        for counts in ((4, 1, 1, 4), (3, 3, 3, 3))
    )
    assert _shortest(plan, [(10.0, uneven), (10.0, even)]) is even, "the fullest rank holds 6, not 8"
    assert _shortest(plan, [(10.0, uneven), (10.1, even)]) is uneven


def test_no_order_under_a_limit_that_is_too_low():
    assert in_flight_within(interleaved(2, 2, 4), {0: 1, 1: 1}) is None


def drawn_plan(seed):
    rng = random.Random(seed)
    plan = on_shared_ranks(random_plan(rng, most_stages=6, most_ranks=10), rng, rng.randint(1, 6))
    stages = []
    # beside greedy stages, which hold fewer micro-batches than Table 2 says, zero bubble may find no order
    may_split = all(stage.schedule != "greedy" for stage in plan.stages)
    for stage in plan.stages:
        if may_split and stage.schedule == "1f1b" and stage.k == 1 and rng.random() < 0.6:
            stage = dataclasses.replace(stage, schedule="zero_bubble")
        if stage.local_batch_size % 2 == 0 and rng.random() < 0.3:
            stage = dataclasses.replace(stage, num_sliced=rng.randint(1, 2))
        stages.append(stage)
    return rng, dataclasses.replace(plan, stages=tuple(stages))


def kept_orders(plan, schedules, programs):
    for program in programs:
        for stage in program.stages:
            tasks = [i.task for i in program.of_stage(stage).instructions if i.task is not None]
            assert tasks == list(schedules[stage].tasks)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_plans(first):
    num_shared = 0
    for seed in range(first, first + 10):
        rng, plan = drawn_plan(seed)
        num_shared += plan.shares_ranks
        tied = rng.sample(range(len(plan.stages)), 2)
        schedules, programs = proven(plan, tied_stages=tied)
        kept_orders(plan, schedules, programs)
        assert [p.stages for p in programs] == [plan.stages_of_rank(p.rank) for p in programs]
        assert all(i.stage is None for p in programs for i in p.instructions if len(p.stages) == 1)
        end = simulate_plan(plan, schedules=schedules).iteration_us
        assert simulate_programs(plan, programs).iteration_us == pytest.approx(end)
        simulate_programs(plan, programs, mode="rendezvous")
        assert stages_that_reduce_early(plan, programs) <= set(range(len(plan.stages)))
        # of each backward as ZeRO 2 reduces, where the programs finish even so
        _, each = proven(plan, schedules, tied_stages=tied, reduce_each_backward=True)
        kept_orders(plan, schedules, each)
        simulate_programs(plan, each)
        forwards = forward_schedules(plan)
        limits = [schedule.num_in_flight for schedule in forwards]
        evaluation = lower_schedules(plan, forwards, training=False)
        validate_programs(plan.with_each(in_flight=limits), forwards, evaluation)
    assert num_shared >= 5


def test_hand_overs_take_no_link():
    cluster = cluster_of(2, bytes_per_s=1e3, latency_us=100.0)
    plan = chain_plan(3, 2, num_bytes=10.0)
    alone = on_ranks(plan, 0, 0, 0)
    timeline = simulate_plan(alone, cluster=cluster)
    assert timeline.iteration_us == pytest.approx(12.0)
    assert not [e for e in timeline.events if e.kind in (EventKind.SEND, EventKind.RECEIVE)]
    both = on_ranks(plan, 0, 0, 1)
    _, programs = proven(both)
    timelines = simulate_plan(both, cluster=cluster), simulate_programs(both, programs, cluster=cluster)
    assert all({e.edge for e in t.events if e.kind is EventKind.SEND} == {1} for t in timelines)


def test_reductions_and_steps_of_a_rank_follow_each_other():
    plan = on_ranks(chain_plan(2, 2), 0, 0)
    schedules, programs = proven(plan, tied_stages=(0, 1))
    asked = {"reduce_us": {0: 1.0, 1: 2.0}, "step_us": {0: 4.0, 1: 8.0}}
    for timeline in (
        simulate_plan(plan, schedules=schedules, **asked),
        simulate_programs(plan, programs, **asked),
    ):
        assert timeline.iteration_us == pytest.approx(8.0 + 15.0)
        steps = [(e.stage, e.start_us, e.end_us) for e in timeline.events if e.kind is EventKind.STEP]
        assert steps == [(0, 11.0, 15.0), (1, 15.0, 23.0)]


def test_the_proof_refuses_what_is_wrong():
    plan = on_ranks(chain_plan(3, 2), 0, 1, 0)
    schedules, programs = proven(plan)
    alone = on_ranks(chain_plan(2, 2), 0, 0)
    own_schedules, own = proven(alone)

    def reject(change, match, of=(plan, schedules, programs)):
        with pytest.raises(ScheduleError, match=match):
            validate_programs(of[0], of[1], changed(of[2], 0, change))

    def turn_round(instructions):
        at = next(i for i, x in enumerate(instructions) if x.message is not None)
        instructions[at : at + 2] = instructions[at + 1], instructions[at]

    def part(instructions):
        # the last hand-over's receive, a gradient's, moves behind the task of the other stage before it is read
        at = next(i for i, x in enumerate(instructions) if str(x) == "0F1")
        before = max(i for i, x in enumerate(instructions[:at]) if x.message is not None)
        instructions.insert(before, instructions.pop(at))

    here = (alone, own_schedules, own)
    reject(turn_round, "before its send", here)
    reject(part, "right behind its send", here)
    reduction = Instruction(kind=InstructionKind.REDUCE_DATA)
    reject(lambda x: x.insert(len(x) - 1, reduction), "of no stage of this rank", here)
    late = Instruction(kind=InstructionKind.REDUCE_DATA, stage=1)
    reject(lambda x: x.insert(len(x) - 1, late), "at most once a stage", here)
    reject(lambda x: x.insert(0, x.pop(1)), "receives|sends|runs")
    with pytest.raises(ScheduleError, match="of edges"):
        validate_programs(alone, own_schedules, [dataclasses.replace(own[0], edges=())])
    with pytest.raises(ScheduleError, match="the plan puts it on 0, 2"):
        validate_programs(plan, schedules, [dataclasses.replace(programs[0], stages=(0,)), programs[1]])


def test_refusals():
    plan = with_all(on_ranks(chain_plan(2, 4), (0, 1), (1, 2)), micro_batch_size=2, tensor=2)
    plan = dataclasses.replace(plan, mini_batch=8)
    with pytest.raises(
        PlanError, match=r"share rank 1, but run their tasks together on ranks \[0, 1\] and \[1, 2\]"
    ):
        build_schedules(plan)
    short = on_ranks(simple_plan([1, 2], [(0, 1)], mini_batch=4), 0, 0).with_each(in_flight=(1, 1))
    with pytest.raises(ScheduleError, match="raise in_flight of 's0'"):
        lower_schedules(short, build_schedules(short))


def test_same_rows_of_tensor_ranks_may_be_shared():
    plan = on_ranks(with_all(chain_plan(4, 4), tensor=2), (0, 1), (2, 3), (0, 1), (2, 3))
    _, programs = proven(plan)
    rows = [[str(i) for i in program.instructions if i.task is not None] for program in programs]
    assert rows[0] == rows[1] and rows[2] == rows[3]


def small_plan(seed):
    """Return three or four stages on two ranks, two or three micro-batches, whole times; half of them two towers."""
    rng = random.Random(seed)
    count = rng.choice([3, 4])
    if rng.random() < 0.5:
        links = [(0, count - 1), (1, count - 1), *([(1, 2), (2, 3)] if count == 4 else [])]
    else:
        links = [(rng.randrange(stage), stage) for stage in range(1, count)]
        links += [(src, dst) for dst in range(count) for src in range(dst) if rng.random() < 0.25]
    plan = simple_plan(
        [1] * count,
        sorted(set(links)),
        mini_batch=rng.choice([2, 3]),
        forward_us=[float(rng.randint(1, 4)) for _ in range(count)],
        backward_us=[float(rng.randint(1, 6)) for _ in range(count)],
    )
    ranks = [0, 1, *(rng.randrange(2) for _ in range(count - 2))]
    rng.shuffle(ranks)
    return on_ranks(plan, *ranks)


def test_small_plans_against_all_orders():
    ratios = []
    for seed in range(20):
        plan = small_plan(seed)
        length = predict_iteration_us(plan)
        ratios.append(length / ShortestOrder(plan).length(length))
    assert sum(ratio < 1.0 + 1e-9 for ratio in ratios) >= 19
    assert max(ratios) < 1.05
