"""Proves the programs of windows, asynchronous or with frozen-branch prefetch: in a row, and each by itself.

Windows that are run one after the other, and the drain after them, are one long program of a longer mini-batch: all
that is proven for programs (`validate_programs`) is proven for that. The windows that repeat are run twice in it, the
second time shifted. Besides, no window may need a later one:

1. the messages of a window (or a drain) are sent and received in it;
2. a window finishes by itself under serial rendezvous execution, whatever ranks do between two of them.

Programs with prefetch (`look_ahead`) are windows too: the branch by itself, mini-batches with the branch's next one,
and one without. They end with a reduction and a step each, which are checked by the window.

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
from gpp_plugin.schedule.grid import program_grid
from gpp_plugin.schedule.look_ahead import AheadPrograms, moved_message, moved_task, repeated_schedules
from gpp_plugin.schedule.windows import (
    Programs,
    WindowPrograms,
    lengthened,
    window_schedules,
)


def validate_windows(
    plan: PipelinePlan, programs: WindowPrograms, *, forward_only_stages: Collection[int] = frozenset()
) -> None:
    """Check the programs of all windows and drains, of all ranks together.

    Raises:
        ScheduleError: what is wrong, with which values, and the grid with the bad cell marked.
    """
    for kind, parts in (("window", programs.steps), ("drain after window", programs.drains)):
        for index, part in enumerate(parts):
            _check_alone(plan, part, f"{kind} {index + 1}")
    # Of two windows that differ: 1 and its drain; 1, 2 and the drain behind 2; 1, 2, 2 moved by one, and that drain
    # moved too. A fourth window would be another 2 behind a 2, which the third run has proven.
    count = len(programs.steps)
    for last in range(1, count + 2):
        shift = last - min(last, count)
        run = [programs.steps[min(i, count - 1)] for i in range(last)]
        shifts = [0] * (last - shift) + [1] * shift
        joined = _join([*run, programs.drains[min(last, count) - 1]], [*shifts, shift], plan)
        validate_programs(
            lengthened(plan, last),
            window_schedules(programs.windows, last, forward_only_stages),
            joined,
            steps_each_backward=True,
        )


def validate_ahead(plan: PipelinePlan, programs: AheadPrograms) -> None:
    """Check the programs of a plan whose frozen branch runs a mini-batch early, of all ranks together.

    Raises:
        ScheduleError: what is wrong, with which values, and the grid with the bad cell marked.
    """
    fill, steady, last = programs.fill, programs.steady, programs.last
    for name, part in (("fill", fill), ("steady", steady), ("last", last)):
        _check_alone(plan, part, f"look-ahead, {name}")
    for part in (steady, last):
        validate_tails(plan, repeated_schedules(plan, 1), part)
    # Three mini-batches, in the numbers of the first: the branch alone on 0, then 0 with the branch on 1, 1 with the
    # branch on 2, and 2. A fourth would be another steady part behind one, which these have proven. Without their ends,
    # which every part has proven by itself.
    bare = [_without_ends(part) for part in (fill, steady, steady, last)]
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
        raise ScheduleError(f"{name}: no rank {lacks} {message} in it; a window needs nothing of later ones")
    end = execute_serially(plan, {program.rank: program for program in programs})
    if end.stuck:
        raise ScheduleError(
            f"{name}: ranks {sorted(end.stuck)} stop under serial rendezvous execution\n"
            + program_grid(programs, positions=end.stuck)
        )


def _join(parts: Sequence[Programs], shifts: Sequence[int], plan: PipelinePlan) -> Programs:
    """Return one program a rank: the parts one after the other, each moved by so many windows."""
    joined = []
    for of_rank in zip(*parts, strict=True):
        instructions = [
            _moved(instruction, plan, shift)
            for program, shift in zip(of_rank, shifts, strict=True)
            for instruction in program.instructions
        ]
        joined.append(dataclasses.replace(of_rank[0], instructions=tuple(instructions)))
    return tuple(joined)


def _moved(instruction: Instruction, plan: PipelinePlan, num_windows: int) -> Instruction:
    if not num_windows:
        return instruction
    task, message = instruction.task, instruction.message
    return dataclasses.replace(
        instruction,
        task=None if task is None else moved_task(task, num_windows * plan.num_micro_batches(task.stage)),
        message=None if message is None else moved_message(plan, message, num_windows),
    )
