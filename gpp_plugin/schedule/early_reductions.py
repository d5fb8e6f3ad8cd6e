"""Which stages may begin to sum their gradients in the last backward, ahead of the program's reduction.

A program ends with ``REDUCE_DATA``, behind the messages that follow the last backward. The ranks of a stage may send
gradients to each other as that backward makes them, and only wait at ``REDUCE_DATA``:

    program    ...  B3  send dx  reduce_data  step
    early      ...  [begin]  B3  send dx  [wait]  step

Nobody waits where the sums begin, in order. But a host may wait for its device at any time (an allocation, a kernel
loaded for the first time), and messages that are posted later may stand in one hardware queue behind a sum that has
begun. Then a rank stands in its last backward until the others of its stage have begun too. At its worst that is a
program whose reduction comes right before the last backward, as that one needs nothing further of others once it runs.
So that program is executed serially (`checks.rendezvous`), of all ranks together: where it finishes, so does every
execution in which some ranks wait there and others later, for waiting later only lets more happen before.

Three conditions keep the claim true. All sums have begun on every rank when its last backward has ended (the engine's
part, `engine.gradients.gradient_store.EarlySends`). The backward holds no collectives of tensor ranks, among which sums
would begin at places that depend on timing. And it is a whole backward: a separate weight gradient is made in several
passes.

    rank 0 (stage 0)   ...             receive dx0  reduce B0  step      stage 0 on ranks 0 and 1, stage 1 on rank 2:
    rank 1 (stage 0)   ...             receive dx1  reduce B0  step      neither rank needs anything of the other to
    rank 2 (stage 1)   B0  send dx0  send dx1  step                      come to its last backward: early

Source: this project
Tests: tests/schedule/test_early_reductions.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.checks.rendezvous import execute_serially


def stages_that_reduce_early(plan: PipelinePlan, programs: Sequence[RankProgram]) -> frozenset[int]:
    """Return the stages whose ranks may begin their reduction in their last backward.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution. The answer is theirs alone, so that
            ranks that have the same programs find the same.
    """
    early = {index for index in range(len(plan.stages)) if _may_begin(plan, programs, index)}
    # Every round takes out at least one stage: as the programs finish without early reductions, somebody who stands
    # still stands at one.
    while early:
        changed = {program.rank: _begun_early(program, early) for program in programs}
        stuck = execute_serially(plan, changed).stuck
        if not stuck:
            break
        standing = ((changed[rank], changed[rank].instructions[at]) for rank, at in stuck.items())
        waiting = {
            program.stage_of(instruction)
            for program, instruction in standing
            if instruction.kind is InstructionKind.REDUCE_DATA
        }
        assert waiting & early, "programs that finish stop only at what was changed"
        early -= waiting
    return frozenset(early)


def last_backward(program: RankProgram) -> int | None:
    """Return the micro-batch of the last task of one stage's program if that is a whole backward."""
    tasks = [instruction.task for instruction in program.instructions if instruction.task is not None]
    return tasks[-1].micro_batch if tasks and tasks[-1].kind is TaskKind.BACKWARD else None


def _may_begin(plan: PipelinePlan, programs: Sequence[RankProgram], stage: int) -> bool:
    """Return whether a stage has something to sum, once, behind a whole backward without collectives."""
    if plan.stages[stage].degree == 1 or plan.stages[stage].tensor > 1:
        return False
    mine = [program.of_stage(stage) for program in programs if stage in program.stages]
    return all(
        last_backward(program) is not None
        and sum(i.kind is InstructionKind.REDUCE_DATA for i in program.instructions) == 1
        for program in mine
    )


def _begun_early(program: RankProgram, early: Set[int]) -> RankProgram:
    """Return a program in which the one reduction of each of its early stages stands right before its last task."""
    instructions = list(program.instructions)
    for stage in sorted(early & set(program.stages)):
        (reduction,) = (
            i for i in instructions if i.kind is InstructionKind.REDUCE_DATA and program.stage_of(i) == stage
        )
        instructions = [i for i in instructions if i is not reduction]
        at = max(
            index for index, i in enumerate(instructions) if i.task is not None and i.task.stage == stage
        )
        instructions.insert(at, reduction)
    return dataclasses.replace(program, instructions=tuple(instructions))
