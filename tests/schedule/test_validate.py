"""Mutations of sound programs: each kind of damage is found, and named."""

import dataclasses
import random

import pytest

from gpp_benchmarks._random_plans import check_draw, random_plan
from gpp_benchmarks._random_schedules import check_schedule_draws
from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.program import Instruction, InstructionKind
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.grid import format_grid
from gpp_plugin.schedule.lower import lower_schedules
from tests.schedule.plans import chain_plan, simple_plan

PLAN = simple_plan([1, 2, 1, 4], [(0, 1), (0, 2), (1, 3), (2, 3)], mini_batch=8)
SCHEDULES = build_schedules(PLAN)
PROGRAMS = lower_schedules(PLAN, SCHEDULES)


def change(programs, rank, edit):
    """Return the programs with ``edit`` applied to a list of one rank's instructions."""
    instructions = list(programs[rank].instructions)
    edit(instructions)
    changed = dataclasses.replace(programs[rank], instructions=tuple(instructions))
    return (*programs[:rank], changed, *programs[rank + 1 :])


def first_exchange(instructions, of):
    return next(i for i, x in enumerate(instructions) if getattr(x, of))


def reject(programs, match, *, plan=PLAN, schedules=SCHEDULES):
    with pytest.raises(ScheduleError, match=match) as raised:
        validate_programs(plan, schedules, programs)
    return str(raised.value)


def test_sound_programs_pass():
    validate_programs(PLAN, SCHEDULES, PROGRAMS)


def test_deleted_receive():
    def delete(instructions):
        at = first_exchange(instructions, "receives")
        instructions[at] = dataclasses.replace(instructions[at], receives=instructions[at].receives[1:])

    text = reject(
        change(PROGRAMS, 1, delete),
        r"1F0 has received samples \[1..1\] over edge 0, it needs \[0..0\], \[1..1\]",
    )
    assert text.splitlines()[0].startswith("rank 1 (stage 's1'): ")
    assert "[1F0]!" in text


def test_deleted_send():
    def delete(instructions):
        at = first_exchange(instructions, "sends")
        instructions[at] = dataclasses.replace(instructions[at], sends=instructions[at].sends[1:])

    reject(change(PROGRAMS, 0, delete), "use one order at both ends")


def test_every_single_deletion_is_found():
    for rank, program in enumerate(PROGRAMS):
        for at, instruction in enumerate(program.instructions):
            for field in ("sends", "receives"):
                for index in range(len(getattr(instruction, field))):
                    kept = tuple(m for i, m in enumerate(getattr(instruction, field)) if i != index)
                    less = dataclasses.replace(instruction, **{field: kept})
                    reject(
                        change(PROGRAMS, rank, lambda x, at=at, less=less: x.__setitem__(at, less)), "rank"
                    )
            if instruction.kind is not InstructionKind.REDUCE_DATA:  # one rank a stage may leave it out
                reject(change(PROGRAMS, rank, lambda x, at=at: x.pop(at)), "rank")


def test_swapped_sends():
    def swap(instructions):
        sends = [i for i, x in enumerate(instructions) if any(m.edge == 0 for m in x.sends)][:2]
        one, two = (instructions[i] for i in sends)
        instructions[sends[0]] = dataclasses.replace(one, sends=two.sends)
        instructions[sends[1]] = dataclasses.replace(two, sends=one.sends)

    reject(change(PROGRAMS, 0, swap), r"sends act e\d r0.1>.* before the task that makes it")


def test_swapped_sends_of_finished_tasks():
    def swap(instructions):
        at = next(i for i, x in enumerate(instructions) if len([m for m in x.sends if m.edge == 2]) == 1)
        later = next(i for i, x in enumerate(instructions) if i > at and any(m.edge == 2 for m in x.sends))
        one, two = instructions[at], instructions[later]
        instructions[at] = dataclasses.replace(one, sends=())
        moved = (*two.sends, *one.sends)
        instructions[later] = dataclasses.replace(two, sends=moved)

    text = reject(
        change(PROGRAMS, 1, swap), "number 0 of its channel, but there the sender sends act e2 r1.1"
    )
    assert text.startswith("rank 3")


def test_message_twice():
    def repeat(instructions):
        at = first_exchange(instructions, "receives")
        receives = instructions[at].receives
        instructions[at] = dataclasses.replace(instructions[at], receives=(*receives, receives[0]))

    reject(change(PROGRAMS, 3, repeat), "exactly once")


def test_wrong_samples():
    def widen(instructions):
        at = first_exchange(instructions, "sends")
        message = dataclasses.replace(
            instructions[at].sends[0], samples=SampleRange(first_sample=0, num_samples=2)
        )
        instructions[at] = dataclasses.replace(instructions[at], sends=(message, *instructions[at].sends[1:]))

    reject(change(PROGRAMS, 0, widen), "holds samples that micro-batch 0 of stage 's0' lacks")


def test_receive_after_its_task():
    def postpone(instructions):
        at = first_exchange(instructions, "receives")
        instructions[at], instructions[at + 1] = instructions[at + 1], instructions[at]

    reject(change(PROGRAMS, 3, postpone), "3F0 has received samples nothing over edge")


def post_everything_early(plan, programs):
    """Post a task's receives before it and its sends after it one by one, receives before all else."""
    changed = []
    for program in programs:
        instructions = []
        for instruction in program.instructions:
            if instruction.kind is not InstructionKind.EXCHANGE:
                instructions.append(instruction)
                continue
            for message in instruction.receives:
                instructions.append(Instruction(kind=InstructionKind.EXCHANGE, receives=(message,)))
            for message in instruction.sends:
                instructions.append(Instruction(kind=InstructionKind.EXCHANGE, sends=(message,)))
        changed.append(dataclasses.replace(program, instructions=tuple(instructions)))
    return tuple(changed)


def test_receives_posted_before_sends_deadlock():
    plan = chain_plan(3, 4)
    schedules = build_schedules(plan)
    programs = post_everything_early(plan, lower_schedules(plan, schedules))
    text = reject(programs, "stop under serial rendezvous execution: rank", plan=plan, schedules=schedules)
    assert "waits for rank 1 at" in text and "]!" in text


def test_posting_early_deadlocks_on_most_random_graphs():
    stopped = 0
    for seed in range(60):
        plan = random_plan(random.Random(seed))
        schedules = build_schedules(plan)
        programs = post_everything_early(plan, lower_schedules(plan, schedules))
        try:
            validate_programs(plan, schedules, programs)
        except ScheduleError as error:
            assert "serial rendezvous" in str(error)
            stopped += 1
    assert stopped > 30


def test_exceeded_in_flight():
    stages = tuple(
        dataclasses.replace(s, in_flight=s.in_flight - (i == 0)) for i, s in enumerate(PLAN.stages)
    )
    plan = dataclasses.replace(PLAN, stages=stages)
    text = reject(PROGRAMS, r"holds 8 micro-batches, in_flight allows 7", plan=plan)
    assert "[0F7]!" in text


def test_other_order_than_the_schedule():
    def swap(instructions):
        tasks = [i for i, x in enumerate(instructions) if x.task is not None]
        instructions[tasks[0]], instructions[tasks[1]] = instructions[tasks[1]], instructions[tasks[0]]

    reject(change(PROGRAMS, 0, swap), "runs 0F1 where the schedule has 0F0")


def test_missing_rank_and_wrong_stage():
    reject(PROGRAMS[:3], r"programs of ranks \[0, 1, 2\] for ranks \[0, 1, 2, 3\]")
    moved = (*PROGRAMS[:3], dataclasses.replace(PROGRAMS[3], stage=1))
    reject(moved, "its program is of stage 1; the plan puts it on 3")


def test_tails():
    step = Instruction(kind=InstructionKind.STEP)
    reject(change(PROGRAMS, 2, lambda x: x.pop()), "has no step while other ranks do")
    reject(change(PROGRAMS, 2, lambda x: x.insert(0, x.pop())), "reductions and the step come last")
    reject(change(PROGRAMS, 2, lambda x: x.append(step)), "each at most once")
    plan = next(p for p in map(random_plan, map(random.Random, range(99))) if p.stages[0].degree > 1)
    stage = plan.stages[0]
    schedules = build_schedules(plan)
    programs = lower_schedules(plan, schedules)
    cut = change(programs, stage.ranks[1], lambda x: x.pop(-2))
    reject(cut, "they must agree", plan=plan, schedules=schedules)


def test_random_plans_are_safe():
    depths = {check_draw(seed).depth for seed in range(150)}
    assert max(depths) >= 5  # the draws are not trivial


def test_grid_cuts_a_window_around_the_bad_cell():
    rows = {f"rank {r}": [f"{r}F{m}" for m in range(40)] for r in range(30)}
    lines = format_grid(rows, bad={(20, 30)}).splitlines()
    assert lines[0] == "..." and len(lines) == 25
    assert "[20F30]!" in "\n".join(lines) and "20F0" not in "\n".join(lines)
    assert format_grid({"a": ["0F0", "0B0"], "b": ["1F10"]}, bad={(1, 0)}) == "a  0F0      0B0\nb  [1F10]!"


# ---- halves and split backwards ---------------------------------------------------------------------

SLICED = dataclasses.replace(
    PLAN,
    mini_batch=16,
    stages=tuple(
        dataclasses.replace(
            stage,
            micro_batch_size=2 * stage.micro_batch_size,
            schedule="zero_bubble",
            num_sliced=2,
            joins_last_slice=index == 1,
        )
        for index, stage in enumerate(PLAN.stages)
    ),
)
SLICED_SCHEDULES = build_schedules(SLICED)
SLICED_PROGRAMS = lower_schedules(SLICED, SLICED_SCHEDULES)


def reject_sliced(programs, match, schedules=SLICED_SCHEDULES):
    return reject(programs, match, plan=SLICED, schedules=schedules)


def test_halves_and_split_backwards_pass():
    validate_programs(SLICED, SLICED_SCHEDULES, SLICED_PROGRAMS)
    tasks = {str(i.task)[1:] for i in SLICED_PROGRAMS[1].instructions if i.task is not None}
    assert {"F0a", "F0b", "F2", "I0", "W0"} <= tasks and "B0" not in tasks


def test_every_deletion_is_found_with_halves_and_splits():
    for rank, program in enumerate(SLICED_PROGRAMS):
        for at, instruction in enumerate(program.instructions):
            for field in ("sends", "receives"):
                for index in range(len(getattr(instruction, field))):
                    kept = tuple(m for i, m in enumerate(getattr(instruction, field)) if i != index)
                    less = dataclasses.replace(instruction, **{field: kept})
                    reject_sliced(
                        change(SLICED_PROGRAMS, rank, lambda x, at=at, less=less: x.__setitem__(at, less)),
                        "rank",
                    )
            if instruction.kind is not InstructionKind.REDUCE_DATA:
                reject_sliced(change(SLICED_PROGRAMS, rank, lambda x, at=at: x.pop(at)), "rank")


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
    return change(SLICED_PROGRAMS, rank, swap), schedules


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
        for at, instruction in enumerate(instructions):
            for field in ("sends", "receives"):
                messages = getattr(instruction, field)
                if any(map(is_wanted, messages)):
                    first = next(m for m in messages if is_wanted(m))
                    new = tuple(dataclasses.replace(m, **changes) if m == first else m for m in messages)
                    instructions[at] = dataclasses.replace(instruction, **{field: new})
                    return

    return change(SLICED_PROGRAMS, rank, edit)


def test_messages_name_halves_that_are_run():
    def is_second_half(message):
        return message.src_half == 1 and message.src_rank == 0

    reject_sliced(replace_message(0, is_second_half, src_half=None), "does not run so")
    reject_sliced(
        replace_message(0, is_second_half, src_half=0), "holds samples that micro-batch 0 of stage 's0' lacks"
    )
    # What stage 1 joins leaves after its second half, so its first half makes nothing to send.
    joined = next(
        m
        for i in SLICED_PROGRAMS[1].instructions
        for m in i.sends
        if m.src_half == 1 and m.src_micro_batch == 1
    )
    assert joined.samples == SampleRange(first_sample=4, num_samples=4)


def test_the_second_half_is_not_sent_before_it_is_made():
    def swap(instructions):
        sends = [
            (i, m)
            for i, x in enumerate(instructions)
            for m in x.sends
            if m.src_micro_batch == 0 and m.edge == 0
        ]
        (i, first), (j, second) = sends[:2]
        for at, old, new in ((i, first, second), (j, second, first)):
            kept = tuple(new if m == old else m for m in instructions[at].sends)
            instructions[at] = dataclasses.replace(instructions[at], sends=kept)

    reject_sliced(change(SLICED_PROGRAMS, 0, swap), "before the task that makes it")


def test_in_flight_ends_with_the_weight_gradient():
    held = SLICED.stages[1].in_flight
    stages = list(SLICED.stages)
    stages[1] = dataclasses.replace(stages[1], in_flight=held - 1)
    reject(
        SLICED_PROGRAMS,
        f"holds {held} micro-batches, in_flight allows {held - 1}",
        plan=dataclasses.replace(SLICED, stages=tuple(stages)),
        schedules=SLICED_SCHEDULES,
    )


def test_random_draws_of_every_family_are_safe():
    passed, failures = check_schedule_draws(range(25))
    assert failures == [] and set(passed.values()) == {25}
