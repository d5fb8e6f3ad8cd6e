"""Proves programs that carry something from one to the next (`program_sets`): in a row, and each by itself.

Programs that run one after the other, to the one that empties the pipeline, are one long program of a longer
mini-batch. All that is proven for programs (`validate_programs`) is proven for that. The program that repeats runs
twice in it, the second time with greater numbers. Besides, no program may need a later one:

1. its messages are sent and received in it;
2. it finishes by itself under serial rendezvous execution, whatever ranks do between two programs.

Those of a frozen prefetch end with a reduction and a step each, which are checked program by program.

Source: this project
Tests: tests/schedule/test_async.py, tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind
from gpp_plugin.schedule.checks.checked_programs import TAIL_ORDER
from gpp_plugin.schedule.checks.order_check import execute_serially
from gpp_plugin.schedule.checks.validate_programs import validate_programs, validate_tails
from gpp_plugin.schedule.cut_graph import lengthened
from gpp_plugin.schedule.grid import program_grid
from gpp_plugin.schedule.program_sets import (
    Programs,
    ProgramSet,
    async_name,
    moved_message,
    moved_task,
    repeated_schedules,
    window_schedules,
)


def validate_async(
    plan: PipelinePlan, programs: ProgramSet, *, forward_only_stages: Collection[int] = frozenset()
) -> None:
    """Check the programs of a plan of mode async, of all ranks together.

    Raises:
        ScheduleError: what is wrong, with which values, and the grid with the bad cell marked.
    """
    for name, of_ranks in programs.programs.items():
        _check_alone(plan, of_ranks, name)
    # Of two programs that differ: prologue 1 and its drain; prologue 1, steady and drain; prologue 1, steady, steady
    # of a mini-batch later, and that drain, later too. Another steady would be one behind a steady, which the third
    # run has proven.
    windows = programs.windows
    assert windows is not None, "programs of mode async"
    count = windows.first_steady
    for last in range(1, count + 2):
        shift = last - min(last, count)
        names = [async_name(min(window, count), count) for window in range(1, last + 1)]
        names.append(async_name(min(last, count), count, is_drain=True))
        shifts = [0] * (last - shift) + [1] * shift
        joined = _join([programs.programs[name] for name in names], [*shifts, shift], plan)
        validate_programs(
            lengthened(plan, last),
            window_schedules(windows, last, forward_only_stages),
            joined,
            steps_each_backward=True,
        )


def validate_prefetch(plan: PipelinePlan, programs: ProgramSet) -> None:
    """Check the programs of a plan whose frozen branch is prefetched, of all ranks together.

    Raises:
        ScheduleError: what is wrong, with which values, and the grid with the bad cell marked.
    """
    row = ("prologue", "steady", "steady", "epilogue")
    for name in dict.fromkeys(row):
        _check_alone(plan, programs.programs[name], f"prefetch, {name}")
    for name in ("steady", "epilogue"):
        validate_tails(plan, repeated_schedules(plan, 1), programs.programs[name])
    # Three mini-batches, in the numbers of the first: the branch alone on 0, then 0 with the branch on 1, 1 with the
    # branch on 2, and 2. A fourth would be another steady part behind one, which these have proven. Without their ends,
    # which every part has proven by itself.
    bare = [_without_ends(programs.programs[name]) for name in row]
    joined = _join(bare, (-1, 0, 1, 2), plan)
    validate_programs(lengthened(plan, 3), repeated_schedules(plan, 3), joined)


def _without_ends(programs: Programs) -> Programs:
    return tuple(
        dataclasses.replace(p, instructions=tuple(i for i in p.instructions if i.kind not in TAIL_ORDER))
        for p in programs
    )


def _check_alone(plan: PipelinePlan, programs: Programs, name: str) -> None:
    sent = {m for program in programs for m in program.messages(InstructionKind.SEND)}
    received = {m for program in programs for m in program.messages(InstructionKind.RECEIVE)}
    if sent != received:
        message = next(iter(sent ^ received))
        lacks = "receives" if message in sent else "sends"
        raise ScheduleError(f"{name}: no rank {lacks} {message} in it; a program needs nothing of later ones")
    end = execute_serially(plan, {program.rank: program for program in programs})
    if end.stuck:
        raise ScheduleError(
            f"{name}: ranks {sorted(end.stuck)} stop under serial rendezvous execution\n"
            + program_grid(programs, positions=end.stuck)
        )


def _join(parts: Sequence[Programs], shifts: Sequence[int], plan: PipelinePlan) -> Programs:
    """Return one program a rank: the parts one after the other, each moved by so many mini-batches."""
    joined = []
    for of_rank in zip(*parts, strict=True):
        instructions = [
            _moved(instruction, plan, shift)
            for program, shift in zip(of_rank, shifts, strict=True)
            for instruction in program.instructions
        ]
        joined.append(dataclasses.replace(of_rank[0], instructions=tuple(instructions)))
    return tuple(joined)


def _moved(instruction: Instruction, plan: PipelinePlan, num_mini_batches: int) -> Instruction:
    if not num_mini_batches:
        return instruction
    task, message = instruction.task, instruction.message
    return dataclasses.replace(
        instruction,
        task=None
        if task is None
        else moved_task(task, num_mini_batches * plan.num_micro_batches(task.stage)),
        message=None if message is None else moved_message(plan, message, num_mini_batches),
    )
