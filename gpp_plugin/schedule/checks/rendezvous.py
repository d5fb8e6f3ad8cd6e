"""Executes the programs of all ranks serially, in order, with rendezvous: the one definition of what that means.

A send or a receive ends when its other end is posted; a gather or a reduction of data when all ranks of the stage have
come to it, a task with tensor ranks when all of its data position have, as it contains their collectives; everything
else ends at once, what passes between two stages of one rank included.

Programs that finish so finish on any device, whatever its queues and whoever waits for it on the way: each of these
adds waits for what a rank has launched before, and here every rank waits for all of that at every instruction.

Source: this project
Tests: tests/schedule/test_validate.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram

OF_STAGE = (InstructionKind.GATHER, InstructionKind.REDUCE_DATA)
"""What all ranks of a stage do together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedInstruction:
    """An instruction that some ranks run together.

    Args:
        what: the instruction.
        ranks: who must come to it.
    """

    what: Instruction
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Where serial execution ended; every rank is through its program where nothing stopped.

    Args:
        stuck: rank -> index of the instruction at which it stands for ever.
        posted: message -> the rank that waits for its other end.
        present: meeting -> those of its ranks that wait there.
    """

    stuck: dict[int, int]
    posted: dict[Message, int]
    present: dict[SharedInstruction, list[int]]


def execute_serially(plan: PipelinePlan, programs: Mapping[int, RankProgram]) -> Standstill:
    """Execute the programs, by rank, as far as they go."""
    # The state: ``position`` of the instruction a rank stands at. What ranks must come to together is kept where the
    # first of them came: a message in ``posted`` with that rank, a collective in ``present`` with all that are there.
    #
    #     rank 0   F0  send x  reduce        rank 0 posts x and stands; rank 1 comes and takes it out again, both go
    #     rank 1   receive x  F0  ...        on; rank 0 meets its stage's others at ``reduce``
    #
    # Order does not matter: to go on is never undone, so whatever order ready ranks are taken in, the same end comes.
    rows = _tensor_rows(plan)
    collectives = {
        (kind, stage): Instruction(kind=kind, stage=stage)
        for kind in OF_STAGE
        for stage in range(len(plan.stages))
    }
    position = dict.fromkeys(programs, 0)
    posted: dict[Message, int] = {}
    present: dict[SharedInstruction, list[int]] = {}
    ready = list(programs)

    def meeting_at(rank: int, instruction: Instruction) -> SharedInstruction | None:
        if instruction.kind in OF_STAGE:
            stage = programs[rank].stage_of(instruction)
            assert stage is not None, "a gather or a reduction is of one stage"
            # a rank that holds that stage alone does not name it
            what = collectives[instruction.kind, stage]
            return SharedInstruction(what=what, ranks=plan.stages[stage].ranks)
        if instruction.kind is InstructionKind.COMPUTE and rank in rows:
            return SharedInstruction(what=instruction, ranks=rows[rank])
        return None

    def move_on(rank: int) -> None:
        position[rank] += 1
        ready.append(rank)

    while ready:
        rank = ready.pop()
        program = programs[rank]
        while position[rank] < len(program.instructions):
            instruction = program.instructions[position[rank]]
            meeting = meeting_at(rank, instruction)
            if meeting is not None:
                here = present.setdefault(meeting, [])
                here.append(rank)
                if len(here) < len(meeting.ranks):
                    break
                for peer in present.pop(meeting)[:-1]:
                    move_on(peer)
            if instruction.message is not None and not instruction.message.is_hand_over:
                other = posted.pop(instruction.message, None)
                if other is None:
                    posted[instruction.message] = rank
                    break
                move_on(other)
            position[rank] += 1
    stuck = {rank: at for rank, at in position.items() if at < len(programs[rank].instructions)}
    return Standstill(stuck=stuck, posted=posted, present=present)


def _tensor_rows(plan: PipelinePlan) -> dict[int, tuple[int, ...]]:
    """Return, by rank of a stage with tensor ranks, those of its data position: {2: (2, 3), 3: (2, 3), ...}."""
    return {
        rank: stage.tensor_ranks(position)
        for stage in plan.stages
        if stage.tensor > 1
        for position in range(stage.degree)
        for rank in stage.tensor_ranks(position)
    }
