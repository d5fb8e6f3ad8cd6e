"""Mutations of sound programs: each kind of damage is found, and named."""

import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import check_schedule_draws, random_plan
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.program import Direction, Instruction, InstructionKind
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.task_graph import format_grid
from tests.schedule.plans import changed, proven, simple_plan, with_all

COMPUTE, SEND, RECEIVE = InstructionKind.COMPUTE, InstructionKind.SEND, InstructionKind.RECEIVE
PLAN = simple_plan([1, 2, 1, 4], [(0, 1), (0, 2), (1, 3), (2, 3)], mini_batch=8)
SCHEDULES, PROGRAMS = proven(PLAN)


def first_of(instructions, kind):
    return next(i for i, x in enumerate(instructions) if x.kind is kind)


def reject(programs, match, *, plan=PLAN, schedules=SCHEDULES):
    with pytest.raises(ScheduleError, match=match) as raised:
        validate_programs(plan, schedules, programs)
    return str(raised.value)


def test_deleted_receive():
    text = reject(
        changed(PROGRAMS, 1, lambda x: x.pop(first_of(x, RECEIVE))),
        r"1F0 has received samples \[1..1\] over edge 0, it needs \[0..0\], \[1..1\]",
    )
    assert text.splitlines()[0].startswith("rank 1 (stage 's1'): ")
    assert "[1F0]!" in text


def sends_over(instructions, edge):
    return [i for i, x in enumerate(instructions) if x.kind is SEND and x.message.edge == edge]


def test_swapped_sends():
    def swap(instructions):
        first, second = sends_over(instructions, 0)[:2]
        instructions[first], instructions[second] = instructions[second], instructions[first]

    reject(changed(PROGRAMS, 0, swap), r"sends act e\d r0.1>.* before the task that makes it")


def test_swapped_sends_of_finished_tasks():
    def postpone(instructions):
        first, second = sends_over(instructions, 2)[:2]
        instructions.insert(second, instructions.pop(first))

    text = reject(
        changed(PROGRAMS, 1, postpone), "number 0 of its channel, but there the sender sends act e2 r1.1"
    )
    assert text.startswith("rank 3")


def test_message_twice():
    def repeat(instructions):
        at = first_of(instructions, RECEIVE)
        instructions.insert(at, instructions[at])

    reject(changed(PROGRAMS, 3, repeat), "exactly once")


def test_wrong_samples():
    def widen(instructions):
        at = first_of(instructions, SEND)
        message = dataclasses.replace(
            instructions[at].message, samples=SampleRange(first_sample=0, num_samples=2)
        )
        instructions[at] = dataclasses.replace(instructions[at], message=message)

    reject(changed(PROGRAMS, 0, widen), "holds samples that micro-batch 0 of stage 's0' lacks")


def test_receive_after_its_task():
    def postpone(instructions):
        at = first_of(instructions, COMPUTE)
        instructions.insert(0, instructions.pop(at))

    reject(changed(PROGRAMS, 3, postpone), "3F0 has received samples nothing over edge")


def receive_first(plan, programs):
    """Post what each task receives from the task before it on, before what that one sends."""
    early = []
    for program in programs:
        body = []
        receives_at = {i.task: [] for i in program.instructions if i.task is not None}
        received = program.messages(RECEIVE)
        for task, posted in receives_at.items():
            direction = Direction.ACTIVATION if task.kind is TaskKind.FORWARD else Direction.GRADIENT
            key = direction, task.micro_batch, task.half
            posted += [m for m in received if (m.direction, m.dst_micro_batch, m.dst_half) == key]
        tasks = list(receives_at)
        body += [Instruction(kind=RECEIVE, message=m) for m in receives_at[tasks[0]]] if tasks else []
        for instruction in program.instructions:
            if instruction.kind is RECEIVE:
                continue
            body.append(instruction)
            if instruction.task is not None and instruction.task != tasks[-1]:
                after = tasks[tasks.index(instruction.task) + 1]
                body += [Instruction(kind=RECEIVE, message=m) for m in receives_at[after]]
        early.append(dataclasses.replace(program, instructions=tuple(body)))
    return tuple(early)


def test_posting_early_deadlocks_on_most_random_graphs():
    stopped = 0
    for seed in range(60):
        plan = random_plan(random.Random(seed))
        schedules = build_schedules(plan)
        programs = receive_first(plan, lower_schedules(plan, schedules))
        try:
            validate_programs(plan, schedules, programs)
        except ScheduleError as error:
            assert "serial rendezvous" in str(error)
            stopped += 1
    assert stopped > 30


def test_exceeded_in_flight():
    counts = [s.in_flight for s in PLAN.stages]
    plan = PLAN.with_each(in_flight=[counts[0] - 1, *counts[1:]])
    text = reject(PROGRAMS, r"holds 8 micro-batches, in_flight allows 7", plan=plan)
    assert "[0F7]!" in text


def test_other_order_than_the_schedule():
    def swap(instructions):
        tasks = [i for i, x in enumerate(instructions) if x.task is not None]
        instructions[tasks[0]], instructions[tasks[1]] = instructions[tasks[1]], instructions[tasks[0]]

    reject(changed(PROGRAMS, 0, swap), "runs 0F1 where the schedule has 0F0")


def test_missing_rank_and_wrong_stage():
    reject(PROGRAMS[:3], r"programs of ranks \[0, 1, 2\] for ranks \[0, 1, 2, 3\]")
    moved = (*PROGRAMS[:3], dataclasses.replace(PROGRAMS[3], stages=(1,)))
    reject(moved, "its program is of stage 1; the plan puts it on 3")


def test_tails():
    step = Instruction(kind=InstructionKind.STEP)
    reject(changed(PROGRAMS, 2, lambda x: x.pop()), "has no step while other ranks do")
    reject(changed(PROGRAMS, 2, lambda x: x.insert(0, x.pop())), "reductions and the step come last")
    reject(changed(PROGRAMS, 2, lambda x: x.append(step)), "each at most once")
    plan = next(p for p in map(random_plan, map(random.Random, range(99))) if p.stages[0].degree > 1)
    stage = plan.stages[0]
    schedules, programs = proven(plan)
    cut = changed(programs, stage.ranks[1], lambda x: x.pop(-2))
    reject(cut, "they must agree", plan=plan, schedules=schedules)


def test_grid_cuts_a_window_around_the_bad_cell():
    rows = {f"rank {r}": [f"{r}F{m}" for m in range(40)] for r in range(30)}
    lines = format_grid(rows, bad={(20, 30)}).splitlines()
    assert lines[0] == "..." and len(lines) == 25
    assert "[20F30]!" in "\n".join(lines) and "20F0" not in "\n".join(lines)
    assert format_grid({"a": ["0F0", "0B0"], "b": ["1F10"]}, bad={(1, 0)}) == "a  0F0      0B0\nb  [1F10]!"


# ---- halves and split backwards ---------------------------------------------------------------------

SLICED = dataclasses.replace(
    with_all(PLAN, schedule="zero_bubble", num_sliced=2).with_each(
        micro_batch_size=[2, 4, 2, 8], joins_last_slice=[False, True, False, False]
    ),
    mini_batch=16,
)
SLICED_SCHEDULES, SLICED_PROGRAMS = proven(SLICED)


def reject_sliced(programs, match, schedules=SLICED_SCHEDULES):
    return reject(programs, match, plan=SLICED, schedules=schedules)


@pytest.mark.parametrize(
    ("plan", "schedules", "programs"),
    [(PLAN, SCHEDULES, PROGRAMS), (SLICED, SLICED_SCHEDULES, SLICED_PROGRAMS)],
    ids=["whole", "halves and splits"],
)
def test_every_single_deletion_is_found(plan, schedules, programs):
    for rank, program in enumerate(programs):
        for at, instruction in enumerate(program.instructions):
            if instruction.kind is not InstructionKind.REDUCE_DATA:  # one rank a stage may leave it out
                cut = changed(programs, rank, lambda x, at=at: x.pop(at))
                reject(cut, "rank", plan=plan, schedules=schedules)


def position_of(instructions, text):
    return next(i for i, x in enumerate(instructions) if str(x.task) == text)


def swap_tasks(rank, one, two):
    """Return the programs and schedules with two tasks of a stage exchanged on its only rank."""

    def swap(instructions):
        i, j = position_of(instructions, one), position_of(instructions, two)
        instructions[i], instructions[j] = instructions[j], instructions[i]

    tasks = list(SLICED_SCHEDULES[rank].tasks)
    i, j = (next(n for n, t in enumerate(tasks) if str(t) == text) for text in (one, two))
    tasks[i], tasks[j] = tasks[j], tasks[i]
    schedules = list(SLICED_SCHEDULES)
    schedules[rank] = dataclasses.replace(SLICED_SCHEDULES[rank], tasks=tuple(tasks))
    return changed(SLICED_PROGRAMS, rank, swap), schedules


def test_tasks_of_a_micro_batch_in_the_wrong_order():
    reject_sliced(*swap_tasks(1, "1F0a", "1F0b")[:1], "runs 1F0b where the schedule has 1F0a")
    for one, two, after in (
        ("1F0a", "1F0b", "1F0b comes after nothing"),
        ("1I0", "1W0", "1W0 comes after Fa, Fb"),
    ):
        programs, schedules = swap_tasks(1, one, two)
        text = reject_sliced(programs, after, schedules)
        assert "then its backward once, whole or as input and weight gradient" in text


def replace_message(rank, is_wanted, **changes):
    def edit(instructions):
        at = next(i for i, x in enumerate(instructions) if x.message is not None and is_wanted(x.message))
        message = dataclasses.replace(instructions[at].message, **changes)
        instructions[at] = dataclasses.replace(instructions[at], message=message)

    return changed(SLICED_PROGRAMS, rank, edit)


def test_messages_name_halves_that_are_run():
    def is_second_half(message):
        return message.src_half == 1 and message.src_rank == 0

    reject_sliced(replace_message(0, is_second_half, src_half=None), "does not run so")
    reject_sliced(
        replace_message(0, is_second_half, src_half=0), "holds samples that micro-batch 0 of stage 's0' lacks"
    )
    # What stage 1 joins leaves after its second half, so its first half makes nothing to send.
    joined = next(m for m in SLICED_PROGRAMS[1].messages(SEND) if m.src_half == 1 and m.src_micro_batch == 1)
    assert joined.samples == SampleRange(first_sample=4, num_samples=4)


def test_in_flight_ends_with_the_weight_gradient():
    counts = [stage.in_flight for stage in SLICED.stages]
    held = counts[1]
    tight = SLICED.with_each(in_flight=[counts[0], held - 1, *counts[2:]])
    reject(
        SLICED_PROGRAMS,
        f"holds {held} micro-batches, in_flight allows {held - 1}",
        plan=tight,
        schedules=SLICED_SCHEDULES,
    )


def test_random_draws_of_every_family_are_safe():
    passed, failures = check_schedule_draws(range(25))
    assert failures == [] and set(passed.values()) == {25}
