import random

import pytest

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.program import Direction, InstructionKind
from gpp_plugin.plan.choose_schedule import choose_slicing
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.orders.slicer import longest_start_up, slice_warm_up
from gpp_plugin.simulate.predict import predict_iteration_us, simulate_plan
from gpp_plugin.simulate.timeline_metrics import peak_in_flight, start_up_us
from tests.schedule.plans import cluster_of, proven, simple_plan, with_split_costs, words

BRANCHES = [(0, 1), (1, 2), (2, 6), (3, 4), (4, 5), (5, 6)]
"""Two branches of three stages and a join."""


def chain(num_stages, micro_batches, *, size=2, **options):
    links = [(i, i + 1) for i in range(num_stages - 1)]
    options = {"forward_us": 1.0, "backward_us": 2.0, **options}
    return simple_plan([size] * num_stages, links, mini_batch=size * micro_batches, **options)


def slices(plan):
    return [stage.num_sliced for stage in plan.stages]


def sent(program):
    return [str(m) for m in program.messages(InstructionKind.SEND) if m.direction is Direction.ACTIVATION]


def test_halves_sent_singly():
    # One column is half a forward.
    # rank 0  F0a F0b F1  F1  F2  F2  F3  F3  .   .   .   .   .   .   .   .   .   B0
    # rank 1  .   F0a F0b .   F1  F1  F2  F2  .   .   .   .   .   B0  B0  B0  B0  F3
    # rank 2  .   .   F0a F0b .   .   F1  F1  .   B0  B0  B0  B0  F2  F2  B1  B1  B1
    # rank 3  .   .   .   F0a F0b B0  B0  B0  B0  F1  F1  B1  B1  B1  B1  F2  F2  B2
    plan = slice_warm_up(chain(4, 8))
    schedules, programs = proven(plan)
    assert [words(s)[:33] for s in schedules] == [
        "F0a F0b F1 F2 F3 B0 F4 B1 F5 B2 F",
        "F0a F0b F1 F2 B0 F3 B1 F4 B2 F5 B",
        "F0a F0b F1 B0 F2 B1 F3 B2 F4 B3 F",
        "F0a F0b B0 F1 B1 F2 B2 F3 B3 F4 B",
    ]
    assert sent(programs[2])[:3] == [
        "act e2 r2.0a>r3.0a [0..0]",
        "act e2 r2.0b>r3.0b [1..1]",
        "act e2 r2.1>r3.1 [2..3]",
    ]
    timeline = simulate_plan(plan)
    assert start_up_us(timeline) == 1.5
    assert timeline.iteration_us == 31.5  # 33 unsliced
    gradients = programs[3].messages(InstructionKind.SEND)
    assert [str(m) for m in gradients[:2]] == ["grad e2 r3.0>r2.0 [0..1]", "grad e2 r3.1>r2.1 [2..3]"]


@pytest.mark.parametrize(("num_stages", "joined"), [(4, 4 / 6), (8, 8 / 14)])
@pytest.mark.parametrize("backward_us", [1.0, 2.0])
def test_start_up_and_iteration(num_stages, joined, backward_us):
    """0.50 of unsliced singly, p / (2 (p - 1)) with the joined last send, and no more in flight."""
    plan = chain(num_stages, 2 * num_stages, backward_us=backward_us)
    before = simulate_plan(plan)
    for joins_last, ratio in ((False, 0.5), (True, joined)):
        sliced = slice_warm_up(plan, joins_last=joins_last)
        timeline = simulate_plan(sliced)
        assert start_up_us(timeline) == pytest.approx(ratio * start_up_us(before))
        saved = (1.0 - ratio) * start_up_us(before)
        assert timeline.iteration_us == pytest.approx(before.iteration_us - saved)
        assert peak_in_flight(timeline) == peak_in_flight(before)


def test_algorithm_2_against_every_count():
    best, worst = 0, 0.0
    for seed in range(80):
        rng = random.Random(seed)
        num_stages, ratio, message_us = rng.randint(3, 8), rng.choice([1, 2]), rng.choice([0.0, 0.2])
        forward_us = [rng.uniform(0.8, 1.25) for _ in range(num_stages)]
        plan = chain(
            num_stages,
            2 * num_stages,
            forward_us=forward_us,
            backward_us=[ratio * us for us in forward_us],
            num_bytes=message_us / 2,
        )
        cluster = cluster_of(num_stages)
        found = predict_iteration_us(slice_warm_up(plan, cluster=cluster), cluster=cluster)
        times = [
            predict_iteration_us(slice_warm_up(plan, num_sliced=n, cluster=cluster), cluster=cluster)
            for n in range(num_stages + 1)
        ]
        assert found < times[0]
        best += found <= min(times) * (1 + 1e-9)
        worst = max(worst, found / min(times))
    assert best >= 70 and worst < 1.01


def test_short_and_odd_pipelines_stay_whole():
    for plan in (
        chain(2, 8),
        chain(4, 8, size=1),
        simple_plan([2] * 3, [(0, 2), (1, 2)], mini_batch=8, forward_us=1.0, backward_us=2.0),
    ):
        assert slice_warm_up(plan) == plan == slice_warm_up(plan, joins_last=True)
    assert slices(slice_warm_up(chain(4, 8), whole_stages=[3])) == [1, 1, 1, 0]


def branched(forward_us):
    return simple_plan(
        [2] * 7,
        BRANCHES,
        mini_batch=16,
        forward_us=forward_us,
        backward_us=[2 * us for us in forward_us],
    )


def test_longest_path_and_what_becomes_longest():
    equal = branched([1.0] * 7)
    assert longest_start_up(equal)[0] == 3.0
    assert slices(slice_warm_up(equal)) == [1] * 7
    assert start_up_us(simulate_plan(slice_warm_up(equal))) == 1.5
    slack = branched([1.0, 1.0, 1.0, 0.4, 0.4, 0.4, 1.0])
    assert slices(slice_warm_up(slack)) == [1, 1, 1, 0, 0, 0, 1]  # 1.2 whole is less than 1.5 in halves
    assert start_up_us(simulate_plan(slice_warm_up(slack))) == 1.5
    near = branched([1.0, 1.0, 1.0, 0.8, 0.8, 0.8, 1.0])
    assert slices(slice_warm_up(near, joins_last=True)) == [1, 1, 1, 1, 1, 1, 0]
    assert start_up_us(simulate_plan(slice_warm_up(near, joins_last=True))) == 2.0
    short = simple_plan(  # a branch of one stage beside one of four
        [2] * 6,
        [(0, 1), (1, 2), (2, 3), (3, 5), (4, 5)],
        mini_batch=16,
        forward_us=1.0,
        backward_us=2.0,
    )
    assert slices(slice_warm_up(short)) == [1, 1, 1, 1, 0, 1]


def test_other_micro_batches_and_degrees():
    plan = simple_plan(
        [2, 4, 4, 2],
        [(0, 1), (1, 2), (2, 3)],
        mini_batch=32,
        forward_us=[1.0, 2.0, 2.0, 1.0],
        backward_us=[2.0, 4.0, 4.0, 2.0],
    )
    sliced = slice_warm_up(plan)
    assert slices(sliced) == [2, 1, 1, 1]  # four samples everywhere; the last stage holds only two
    proven(sliced)
    assert start_up_us(simulate_plan(sliced)) < 0.7 * start_up_us(simulate_plan(plan))


def test_auto_takes_the_shortest_and_on_takes_a_sliced_one():
    plan = chain(4, 8)
    singly = choose_slicing(plan)
    assert slices(singly) == [1] * 4 and singly.iteration_us == 31.5
    assert singly.notes == ("warm-up, 1 sliced (halves sent singly)",)
    assert choose_slicing(plan, slicing="off").stages == plan.stages
    # Where a half costs as much as a whole forward there is nothing to gain.
    dear = with_split_costs(plan, half_overhead_us=0.5)
    assert choose_slicing(dear).stages == dear.stages
    forced = choose_slicing(dear, slicing="on")
    assert sum(slices(forced)) > 0 and forced.iteration_us >= choose_slicing(dear).iteration_us
    assert slices(choose_slicing(plan, slicing=2))[0] == 2
    assert slices(choose_slicing(plan, slicing=0)) == [0] * 4
    assert choose_slicing(chain(2, 4), slicing="on").notes == (
        "warm-up, nothing sliced (the longest warm-up has two stages or fewer, or none that can be halved)",
    )
    assert choose_slicing(chain(2, 4)).notes == ()
    for wrong in ("yes", -1, True):
        with pytest.raises(ValueError, match="give auto, on, off or a number"):
            choose_slicing(plan, slicing=wrong)


def test_odd_samples_are_refused():
    plan = chain(3, 4, size=1)
    with pytest.raises(ScheduleError, match="'s0': num_sliced is 1 with 1 samples a rank"):
        build_schedules(plan.with_each(num_sliced=[1, 0, 0]))
