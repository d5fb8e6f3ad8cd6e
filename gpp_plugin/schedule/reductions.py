"""Puts a gradient reduction behind every micro-batch's backward, as ZeRO 2 needs: no rank keeps whole gradients.

A reduction is a rendezvous of the stage's ranks, so it can stop programs that finish without it: rank a
reduces before it sends what rank b, by way of other stages, needs for its backward. What is tried first is
one reduction after each backward, behind the messages that follow it and before the next task; then all
programs are executed serially, and a reduction at which they stop is taken out on all ranks of its stage.
That is always allowed, as a reduction takes all gradients that have come together since the last one, and
the one before the step remains.

    rank 0   F0  F1  B0  send  reduce  F2  B1  send  reduce  B2  send  reduce  step
    rank 1   F0  F1  B0  send  reduce  F2  B1  send  reduce  B2  send  reduce  step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.rendezvous import execute_serially

_REDUCE = Instruction(kind=InstructionKind.REDUCE_DATA)
_MAKES_GRADIENTS = (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)


def reduce_after_backwards(
    plan: PipelinePlan, programs: Sequence[RankProgram], stages: Collection[int]
) -> tuple[RankProgram, ...]:
    """Return ``programs`` with a reduction after each backward of ``stages``, as far as they still finish.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution and end with a reduction.
        stages: those to change; a stage of one rank has nothing to reduce.
    """
    wanted = {index for index in stages if plan.stages[index].degree > 1}
    left_out: set[tuple[int, int]] = set()
    while True:
        changed = tuple(
            _with_reductions(program, left_out) if program.stage in wanted else program
            for program in programs
        )
        stuck = _stuck_reductions(plan, changed)
        if not stuck:
            return changed
        left_out |= stuck


def _with_reductions(program: RankProgram, left_out: Collection[tuple[int, int]]) -> RankProgram:
    """Insert a reduction before the first task after each backward; a place is (stage, tasks before it)."""
    body: list[Instruction] = []
    num_tasks = 0
    is_due = False
    for instruction in program.instructions:
        if instruction.task is not None:
            if is_due and (program.stage, num_tasks) not in left_out:
                body.append(_REDUCE)
            num_tasks += 1
            is_due = instruction.task.kind in _MAKES_GRADIENTS
        body.append(instruction)
    return dataclasses.replace(program, instructions=tuple(body))


def _stuck_reductions(plan: PipelinePlan, programs: Sequence[RankProgram]) -> set[tuple[int, int]]:
    """Execute serially with rendezvous messages; return the places of the reductions at which ranks stand."""
    by_rank = {program.rank: program for program in programs}
    places = set()
    for rank, at in execute_serially(plan, by_rank).stuck.items():
        instructions = by_rank[rank].instructions
        if instructions[at].kind is InstructionKind.REDUCE_DATA:
            num_tasks = sum(instruction.task is not None for instruction in instructions[:at])
            total = sum(instruction.task is not None for instruction in instructions)
            if num_tasks < total:  # the last reduction stays; who stands there waits for one that goes
                places.add((by_rank[rank].stage, num_tasks))
    return places
