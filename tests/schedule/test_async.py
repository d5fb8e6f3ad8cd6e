"""Asynchronous windows: literal orders, random graphs of stages proven, damage found."""

import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import forward_only_of, random_plan
from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.program import InstructionKind
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.runtime.memory.activation_policy import backwards_after
from gpp_plugin.schedule.checks.validate_programs import validate_async
from gpp_plugin.schedule.orders.async_1f1b import (
    Windows,
    asynchronous_in_flight,
    check_asynchronous,
    windows_of,
)
from gpp_plugin.schedule.program_sets import (
    EMPTY,
    PREFETCH,
    SYNCHRONOUS,
    async_policy,
    joined_windows,
    lower_async,
    window_schedules,
)
from tests.schedule.plans import chain_plan, changed, on_ranks, on_shared_ranks, simple_plan, with_all, words


def with_counts(plan, counts):
    return dataclasses.replace(plan.with_each(in_flight=counts), mode="async")


def asynchronous(plan):
    return with_counts(plan, asynchronous_in_flight(plan))


def random_async_plan(rng):
    """Return a random plan of one micro-batch size, its stages on any degrees that divide it."""
    while True:
        plan = random_plan(rng, most_stages=6, most_ranks=12)
        size = rng.choice([4, 12])
        if all(size % stage.degree == 0 for stage in plan.stages):
            break
    plan = with_all(plan, micro_batch_size=size, schedule="1f1b", k=1)
    plan = dataclasses.replace(plan, mini_batch=size * rng.choice([1, 2, 3, 5, 8]))
    extra = rng.choice([0, 0, 1])
    return with_counts(plan, [count + extra for count in asynchronous_in_flight(plan)])


def shared_async_plan(rng):
    """Return a random plan whose ranks hold several stages."""
    while True:
        plan = random_async_plan(rng)
        shared = on_shared_ranks(plan, rng, rng.randint(1, 6))
        if shared.shares_ranks and all(stage.micro_batch_size % stage.degree == 0 for stage in shared.stages):
            return with_counts(shared, [stage.in_flight for stage in plan.stages])


def drains_of(programs):
    """Return what empties the pipeline behind each program of a mini-batch."""
    return [of_name for name, of_name in programs.programs.items() if name.startswith("drain")]


def steps_of(programs):
    """Return the programs of mini-batches, in the order in which they are first run."""
    return [of_name for name, of_name in programs.programs.items() if not name.startswith("drain")]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_graphs_on_shared_ranks_are_proven(first):
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        plan = shared_async_plan(rng)
        frozen = forward_only_of(plan, rng)
        programs = lower_async(plan, forward_only_stages=frozen)
        validate_async(plan, programs, forward_only_stages=frozen)
        for rank in range(plan.num_ranks):
            whole = programs.of_rank(rank)
            assert whole.stages == plan.stages_of_rank(rank)
            for stage in whole.stages:
                own = whole.of_stage(stage)
                for window, (program, drain) in enumerate(
                    zip(steps_of(own), drains_of(own), strict=True), start=1
                ):
                    is_trained = stage not in frozen
                    for part, due in (
                        (program, programs.windows.tasks(stage, window, is_trained=is_trained)),
                        (drain, programs.windows.drain(stage, window, is_trained=is_trained)),
                    ):
                        assert tuple(i.task for i in part.instructions if i.task is not None) == due


def test_two_stages_of_a_rank_step_by_themselves():
    plan = asynchronous(on_ranks(chain_plan(3, 2), 0, 1, 0))
    programs = lower_async(plan)
    validate_async(plan, programs)
    lines = [str(i) for i in programs.programs["steady"][0].instructions if i.message is None]
    for task, stage in (("0B0", 0), ("0B1", 0), ("2B2", 2), ("2B3", 2)):
        at = lines.index(task)
        assert lines[at + 1 : at + 3] == [f"reduce_data({stage})", f"step({stage})"]
    assert [str(m) for m in programs.of_rank(0).of_stage(0).carried("steady")] == ["grad e0 r1.0>r0.0 [0..0]"]
    plan = asynchronous(on_ranks(chain_plan(3, 1), 0, 1, 0))
    programs = lower_async(plan)
    for count in (1, 2, 3):  # joined they are the same tasks in the same order, the shorter drains among them
        joined = joined_windows(plan, count)
        parts = (*steps_of(programs)[:count], drains_of(programs)[count - 1])
        for rank, order in joined.orders.items():
            ran = [joined.task(node) for node in order if node in joined.tasks]
            assert ran == [i.task for part in parts for i in part[rank].instructions if i.task is not None]


def test_stages_on_the_same_two_ranks_are_updated_in_one_order():
    plan = simple_plan([2, 2, 2], [(0, 1), (1, 2)], mini_batch=8, forward_us=[1, 3, 2], backward_us=[5, 1, 2])
    plan = asynchronous(on_ranks(plan, (0, 1), (1, 0), (0, 1)))
    programs = lower_async(plan)
    validate_async(plan, programs)
    for part in programs.programs.values():
        updates = [[str(i) for i in p.instructions if i.kind is InstructionKind.STEP] for p in part]
        assert updates[0] == updates[1]


def test_windows_of_a_chain():
    windows = windows_of(asynchronous(chain_plan(3, 2)))
    assert (windows.in_flight, windows.first_steady) == ((3, 2, 1), 2)
    assert [words(windows.tasks(0, n)) for n in (1, 2, 3)] == ["F0 F1", "F2 B0 F3 B1", "F4 B2 F5 B3"]
    assert [words(windows.tasks(1, n)) for n in (1, 2, 3)] == ["F0 F1 B0", "F2 B1 F3 B2", "F4 B3 F5 B4"]
    assert [words(windows.tasks(2, n)) for n in (1, 2)] == ["F0 B0 F1 B1", "F2 B2 F3 B3"]
    assert [words(windows.drain(stage, 2)) for stage in range(3)] == ["B2 B3", "B3", ""]
    assert [windows.staleness(stage) for stage in range(3)] == [2, 1, 0]
    synced = dataclasses.replace(windows, vertical_sync=True)
    assert [synced.staleness(stage) for stage in range(3)] == [2, 2, 2]


def test_windows_shorter_than_what_is_in_flight():
    windows = Windows(micro_batches=1, in_flight=(4, 3, 2, 1))
    assert windows.first_steady == 4
    assert [words(windows.tasks(0, n)) for n in range(1, 6)] == ["F0", "F1", "F2", "F3 B0", "F4 B1"]
    assert words(windows.drain(0, 2)) == "B0 B1"
    assert [windows.num_reported(n) for n in range(1, 7)] == [1, 1, 1, 1, 2, 3]
    assert [schedule.num_in_flight for schedule in window_schedules(windows, 3)] == [3, 3, 2, 1]
    # a gradient that comes three windows before it is read is carried over each of them
    own = lower_async(with_counts(chain_plan(2, 1), [4, 1])).of_rank(0)
    carried = [
        [message.dst_micro_batch for message in window]
        for window in map(own.carried, ("prologue 1", "prologue 2", "prologue 3", "steady", "drain"))
    ]
    assert carried == [[], [0], [0, 1], [0, 1, 2], [1, 2, 3]]


def calls_of(policy, known):
    """Return the programs of calls in a row, given whether each knows the next mini-batch."""
    last, found = EMPTY, []
    for is_known in known:
        names = policy.calls[last, is_known]
        found.append(" ".join(names))
        last = policy.after(names[-1])
    return found, last


def test_which_program_comes_next():
    assert calls_of(SYNCHRONOUS, [False, False]) == (["whole", "whole"], EMPTY)
    assert calls_of(PREFETCH, [False, True, True, False, True, False]) == (
        ["whole", "prologue steady", "steady", "epilogue", "prologue steady", "epilogue"],
        EMPTY,
    )
    policy = async_policy(Windows(micro_batches=2, in_flight=(5, 3, 1)))
    assert calls_of(policy, [False] * 5) == (["prologue 1", "prologue 2", *["steady"] * 3], "steady")
    assert policy.drains == {"prologue 1": "drain 1", "prologue 2": "drain 2", "steady": "drain"}
    assert {policy.after(drain) for drain in policy.drains.values()} == {EMPTY}
    # numbers count from a new mini-batch where the same program runs again, or the prefetched one is trained
    assert policy.renumbered == {("steady", "steady")}
    assert ("prologue", "steady") in PREFETCH.renumbered and ("steady", "epilogue") in PREFETCH.renumbered
    short = async_policy(Windows(micro_batches=4, in_flight=(1,)))
    assert calls_of(short, [False] * 2) == (["steady", "steady"], "steady")
    assert [p.steps_alone for p in (SYNCHRONOUS, PREFETCH, short)] == [False, False, True]


def test_counts_come_from_the_sinks():
    short = simple_plan([1] * 5, [(0, 1), (1, 2), (2, 4), (3, 4)], mini_batch=2)
    assert asynchronous_in_flight(short) == (4, 3, 2, 2, 1)


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_are_proven_and_run_every_task_once_in_order(seed):
    rng = random.Random(seed)
    plan = random_async_plan(rng)
    frozen = forward_only_of(plan, rng)
    programs = lower_async(plan, forward_only_stages=frozen)
    validate_async(plan, programs, forward_only_stages=frozen)
    count = plan.num_micro_batches(0)
    for rank in range(plan.num_ranks):
        own = programs.of_rank(rank)
        stage = own.main.stage
        for parts, is_draining in ((steps_of(own), False), (drains_of(own), True)):
            for program in parts:
                for (is_backward, m, half), after in backwards_after(program).items():
                    kind = TaskKind.BACKWARD if is_backward else TaskKind.FORWARD
                    task = Task(stage=stage, kind=kind, micro_batch=m, half=half)
                    assert programs.windows.backward_after(task, is_draining=is_draining) == after
        orders = [
            [i.task for i in p.instructions if i.task is not None]
            for p in (*steps_of(own), own.programs["drain"])
        ]
        ran = [task for order in orders for task in order]
        forwards = [task.micro_batch for task in ran if task.kind is TaskKind.FORWARD]
        backwards = [task.micro_batch for task in ran if task.kind is TaskKind.BACKWARD]
        assert forwards == list(range(len(steps_of(own)) * count))
        assert backwards == ([] if stage in frozen else forwards)
        for order in orders[:-1]:
            for before, task in zip(order, order[1:], strict=False):
                if task.kind is TaskKind.BACKWARD:
                    assert before.micro_batch - task.micro_batch == plan.stages[stage].in_flight - 1
        # what a window takes over is what the one before left, the repeating one's from itself
        shifted = [
            dataclasses.replace(m, dst_micro_batch=m.dst_micro_batch - count) for m in own.carried("drain")
        ]
        assert {m.dst_micro_batch for m in shifted} == {m.dst_micro_batch for m in own.carried("steady")}


def damaged(programs, name, rank, edit):
    """Return the programs with one rank's instructions in one of them changed."""
    found = changed(programs.programs[name], rank, edit)
    return dataclasses.replace(programs, programs={**programs.programs, name: found})


def test_damaged_windows_are_found():
    plan = asynchronous(chain_plan(2, 2))
    programs = lower_async(plan)
    validate_async(plan, programs)

    def without_step(instructions):
        instructions.remove(next(i for i in instructions if i.kind is InstructionKind.STEP))

    def without_last_receive(instructions):
        del instructions[max(n for n, i in enumerate(instructions) if i.kind is InstructionKind.RECEIVE)]

    def early_step(instructions):
        step = next(i for i in instructions if i.kind is InstructionKind.STEP)
        instructions.insert(0, step)

    with pytest.raises(ScheduleError, match="before step|ends without step"):
        validate_async(plan, damaged(programs, "steady", 1, without_step))
    with pytest.raises(ScheduleError, match="a program needs nothing of later ones"):
        validate_async(plan, damaged(programs, "prologue 1", 0, without_last_receive))
    with pytest.raises(ScheduleError, match="a backward is due"):
        validate_async(plan, damaged(programs, "steady", 0, early_step))


def test_plans_that_cannot_run_asynchronously():
    with pytest.raises(PlanError, match="the same number of samples.*'s0' 1, 's1' 2"):
        check_asynchronous(simple_plan([1, 2], [(0, 1)], mini_batch=4))
    with pytest.raises(PlanError, match="schedule 'gpipe'"):
        check_asynchronous(chain_plan(2, 2, schedule="gpipe"))
    with pytest.raises(PlanError, match="raise in_flight of 's0' to 3"):
        check_asynchronous(with_counts(chain_plan(2, 4), [1, 2]))
