"""Runs what a rank does for all of its stages, in the order of the rank's program.

Each stage's part is compiled by itself (`executor`); here their steps are put into one list, once for each set of
shapes. What one stage hands over to another lies between two neighbouring steps (`mailbox.HandOvers`).

    rank's program    0F0  send 0>2  receive 0>2  2F0  2B0  send 2>0  receive 2>0  0B0  reduce(0)  reduce(2)  step
    of stage 0        x    x                                          x            x    x                     (x)
    of stage 2                       x            x    x    x                                      x          (x)

A step of all stages is in each part's program and is run once, for all of them. A failure in one part lets go of
everything of all parts.

Source: this project
Tests: tests/runtime/test_rank_lane.py
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from gpp_plugin.ir.program import Instruction, RankProgram
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor, Step, empty_result, run_steps
from gpp_plugin.runtime.messages.mailbox import Carry, HandOvers

Around = Callable[[Instruction, Step], Step]


class RankExecutor:
    """Runs the program of a rank that holds several stages, at one shape.

    Args:
        program: the rank's.
        parts: of its stages, in the program's order of them; made with the same ``hand_overs``.
        step: of all stages of the rank; None where the program has none.
        around: what is run in the place of a stage's step; None: the step itself.
    """

    def __init__(
        self,
        program: RankProgram,
        parts: Sequence[StageExecutor],
        *,
        hand_overs: HandOvers,
        step: Callable[[], object] | None = None,
        around: Around | None = None,
    ) -> None:
        self._program = program
        self._parts = tuple(parts)
        self._hand_overs = hand_overs
        self._steps = self._merged(program, step, around or (lambda instruction, compiled: compiled))

    def _merged(
        self, program: RankProgram, step: Callable[[], object] | None, around: Around
    ) -> list[tuple[Instruction, Step]]:
        """Return what each instruction of the rank's program does: its stage's next step, or the step of all."""
        own = {stage: iter(part.steps) for stage, part in zip(program.stages, self._parts, strict=True)}
        merged: list[tuple[Instruction, Step]] = []
        for instruction in program.instructions:
            stage = program.stage_of(instruction)
            if stage is None:
                assert step is not None, "a program with a step of all stages needs one"
                merged.append((instruction, functools.partial(self._step, step)))
                for steps in own.values():
                    next(steps)  # each stage's program has that step too
                continue
            found, compiled = next(own[stage])
            assert found == instruction, "stages run what the rank's program has of theirs"
            merged.append((instruction, around(instruction, compiled)))
        return merged

    def _step(self, step: Callable[[], object]) -> None:
        for part in self._parts:
            part.finish_sends()
        self._parts[0].step(step)

    def run(
        self,
        inputs: Sequence[Sequence[Sequence[Tensor]]],
        *,
        record: bool = False,
        carries: Sequence[Carry | None] | None = None,
    ) -> MiniBatchResult:
        """Run the program once; arguments as of `StageExecutor.run`, one a stage."""
        try:
            run_steps(
                self._program,
                self._steps,
                self._parts,
                inputs,
                record=record,
                carries=carries or (None,) * len(self._parts),
            )
        finally:
            self._hand_overs.clear()
        return _joined([part.result for part in self._parts])


class RankExecutors:
    """The executors of a rank, one for each program and set of executors of its stages; the last used are kept.

    Args:
        hand_overs: of the rank; ``step`` and ``around`` as of `RankExecutor`.
        most: how many are kept.
    """

    def __init__(
        self,
        *,
        hand_overs: HandOvers,
        step: Callable[[], object] | None = None,
        around: Around | None = None,
        most: int,
    ) -> None:
        self._hand_overs = hand_overs
        self._step = step
        self._around = around
        self._most = most
        self._found: OrderedDict[tuple[int, ...], tuple[tuple[object, ...], RankExecutor]] = OrderedDict()

    def of(self, program: RankProgram, parts: Sequence[StageExecutor]) -> RankExecutor:
        """Return what runs a program by these executors of its stages."""
        # told apart by identity, and held so that no other takes the place of one
        key = tuple(map(id, (program, *parts)))
        if key not in self._found:
            made = RankExecutor(
                program, parts, hand_overs=self._hand_overs, step=self._step, around=self._around
            )
            self._found[key] = (program, *parts), made
            if len(self._found) > self._most:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return self._found[key][1]


def _joined(results: Sequence[MiniBatchResult]) -> MiniBatchResult:
    """Return what several stages of a rank have, as one: losses and outputs stage by stage, events by their time."""
    joined = empty_result()
    for result in results:
        joined.losses += result.losses
        joined.outputs |= result.outputs
        joined.events += result.events
        joined.message_bytes += result.message_bytes
        joined.step_result = joined.step_result if result.step_result is None else result.step_result
    joined.events.sort(key=lambda event: event.start_us)
    return joined
