"""Executes the programs of all ranks serially, in order, with rendezvous: the one definition of what that means.

An exchange posts all its messages together and ends when all of them are posted at their other ends; a
reduction of data ends when all ranks of the stage have come to it; everything else ends at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gpp_plugin.ir.program import InstructionKind, Message, RankProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Where serial execution ended; every rank is through its program where nothing stopped.

    Args:
        stuck: rank -> index of the instruction at which it stands for ever.
        posted: message -> the rank that waits for its other end.
        present: stage -> its ranks that wait at a reduction.
    """

    stuck: dict[int, int]
    posted: dict[Message, int]
    present: dict[int, list[int]]


def execute_serially(programs: Mapping[int, RankProgram]) -> Standstill:
    """Execute the programs, by rank, as far as they go."""
    degree = Counter(program.stage for program in programs.values())
    position = dict.fromkeys(programs, 0)
    missing = dict.fromkeys(programs, 0)
    posted: dict[Message, int] = {}
    present: dict[int, list[int]] = defaultdict(list)
    ready = list(programs)

    def move_on(rank: int) -> None:
        position[rank] += 1
        ready.append(rank)

    while ready:
        rank = ready.pop()
        program = programs[rank]
        while position[rank] < len(program.instructions):
            instruction = program.instructions[position[rank]]
            if instruction.kind is InstructionKind.REDUCE_DATA:
                present[program.stage].append(rank)
                if len(present[program.stage]) < degree[program.stage]:
                    break
                for peer in present.pop(program.stage)[:-1]:
                    move_on(peer)
            waits = 0
            for message in (*instruction.sends, *instruction.receives):
                other = posted.pop(message, None)
                if other is None:
                    posted[message] = rank
                    waits += 1
                else:
                    missing[other] -= 1
                    if missing[other] == 0:
                        move_on(other)
            if waits:
                missing[rank] = waits
                break
            position[rank] += 1
    stuck = {rank: at for rank, at in position.items() if at < len(programs[rank].instructions)}
    return Standstill(stuck=stuck, posted=posted, present=present)
