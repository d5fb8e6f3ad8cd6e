"""One stage's part of a pipeline whose frozen branch runs a mini-batch ahead.

Between two calls a stage that trains keeps what came ahead (`Carry`); a stage of the branch keeps nothing. A rank runs
the parts of its stages together (`kept_lanes`).

A stage of the branch runs the programs' tasks on the next mini-batch, at its shapes, and every other stage on the
present one; messages that come ahead have the next one's shapes. So mini-batches of two shapes need no pause between
them: a stage that trains has an executor for each pair.

Source: this project
Tests: tests/integrations/test_frozen_ahead.py, tests/runtime/test_ahead_runner.py
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.timeline import Event
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor
from gpp_plugin.runtime.input_rows import InputRows
from gpp_plugin.runtime.lane import MAX_SHAPES, Lane, ReadyStage, _Compiled
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.messages.mailbox import Carry, WindowPlace
from gpp_plugin.runtime.rank_executor import RankExecutors
from gpp_plugin.schedule.look_ahead import Part, RankAhead, moved_message


@dataclass(slots=True, kw_only=True)
class AheadRunner:
    """Runs the parts of one stage one after the other, in training and in a rehearsal; keeps what stays between two.

    Args:
        plan: of one mini-batch.
        programs: what the rank does for the stage.
        is_trained: it runs backwards.
    """

    plan: PipelinePlan
    programs: RankAhead
    stage: int
    is_trained: bool
    carry: Carry = field(default_factory=Carry)

    def program(self, part: Part) -> RankProgram:
        """Return the program of a part."""
        return self.programs.program(part)

    def place(self, part: Part) -> WindowPlace:
        """Return where a part stands among the others."""
        return WindowPlace(
            carried=() if part == "fill" else self.programs.carried,
            first_micro_batch=self._count if self.programs.is_ahead else 0,
            is_trained=self.is_trained,
            ends_mini_batch=True,
        )

    def run(
        self,
        part: Part,
        executor: StageExecutor,
        inputs: Sequence[Sequence[Tensor]],
        *,
        record: bool = False,
    ) -> MiniBatchResult:
        """Run what was compiled of a part, on a rank that holds no other stage."""
        result = executor.run(inputs, record=record, carry=self.carry)
        self.end(part)
        return result

    def end(self, part: Part) -> None:
        """Number what stays as the next part does."""
        if part != "last":
            self.carry.renumber(lambda message: moved_message(self.plan, message, -1))
            self.carry.sends_of = {m - self._count: held for m, held in self.carry.sends_of.items()}

    def drop(self) -> None:
        """Let go of what came ahead; collective over all ranks, which have the same to let go of."""
        # Every message's ends were posted in the program that sent it, so none waits for what is still to come. They
        # are waited for: what a transport writes into must not be let go of before.
        for pending in [*self.carry.sends, *(pending for _, pending in self.carry.received.values())]:
            pending.wait()
        self.forget()

    def forget(self) -> None:
        """Let go of what came ahead without waiting for it: a part failed."""
        self.carry = Carry()

    @property
    def held_bytes(self) -> int:
        """Return what came ahead and is here."""
        return sum(t.nbytes for buffers, _ in self.carry.received.values() for t in buffers)

    def as_first(self, event: Event) -> Event:
        """Return an event of a fill as the mini-batch that follows numbers it."""
        if event.micro_batch < 0:
            return event
        return dataclasses.replace(event, micro_batch=event.micro_batch - self._count)

    @property
    def _count(self) -> int:
        return self.plan.num_micro_batches(self.stage)


class RankAheadRunner:
    """Runs the parts of all stages of a rank together, in training and in a rehearsal.

    Args:
        programs: the rank's; ``runners`` of its stages, in the programs' order of them.
    """

    def __init__(self, programs: RankAhead, runners: Sequence[AheadRunner], executors: RankExecutors) -> None:
        self._programs = programs
        self._runners = tuple(runners)
        self._executors = executors

    def run(
        self,
        part: Part,
        parts: Sequence[StageExecutor],
        inputs: Sequence[Sequence[Sequence[Tensor]]],
        *,
        record: bool = False,
    ) -> MiniBatchResult:
        """Run what was compiled of a part for each stage on its inputs; what stays is numbered as the next one does."""
        executor = self._executors.of(self._programs.program(part), parts)
        carries = [runner.carry for runner in self._runners]
        result = executor.run(inputs, record=record, carries=carries)
        for runner in self._runners:
            runner.end(part)
        return result

    def drop(self) -> None:
        """Let go of what came ahead; collective over all ranks."""
        for runner in self._runners:
            runner.drop()


class AheadLane(Lane):
    """One stage's pipeline on this rank, whose frozen branch may run ahead; its rank's `KeptAhead` runs it.

    Args:
        ahead: what the rank does for the stage beside its program of the whole mini-batch.
        lane: as of `Lane`.
    """

    def __init__(self, *, ahead: RankAhead, **lane: Any) -> None:
        super().__init__(**lane)
        self.runner = AheadRunner(
            plan=self.plan,
            programs=ahead,
            stage=self.stage_index,
            is_trained=any(
                i.task is not None and i.task.kind is not TaskKind.FORWARD for i in self._program.instructions
            ),
        )
        self.is_ahead = ahead.is_ahead
        self._weights_seen = 0

    @property
    def device(self) -> torch.device:
        """Return where the stage computes."""
        return self._device

    def may_be_cut(self, batch: Batch) -> bool:
        """Return whether a mini-batch has the tasks of programs that run a branch ahead; the same on every rank."""
        return True

    def know(self, batch: Batch) -> None:
        """Make what runs a mini-batch, if there is none at its shape.

        Raises:
            CaptureError, ConfigError: it is refused; on every rank alike.
        """
        self._executor_for(batch)

    # ---- weights ---------------------------------------------------------------------------------------------

    def num_writes(self) -> int:
        """Return how often the stage's parameters and buffers were written; what is frozen never is by training."""
        return sum(tensor._version for tensor in self._tensors.values())

    def note_weights(self) -> None:
        """Take the weights for those that the branch was run ahead with."""
        self._weights_seen = self.num_writes()

    def has_other_weights(self) -> bool:
        """Return whether the branch was run ahead with other weights."""
        return self.is_ahead and self.num_writes() != self._weights_seen

    # ---- parts of a mini-batch -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def part_ready(
        self, part: Part, *, now: Batch, following: Batch | None, count: bool, held: HeldTogether | None
    ) -> Iterator[ReadyStage]:
        """Get the stage ready to run a part while the context lasts; ``count`` and ``held`` as of `ready`.

        Args:
            now: the mini-batch that is trained; ``following`` the one that the branch runs.
        """
        own = following if self.is_ahead and following is not None else now
        compiled = self._executor_for(own)
        executor = self._part_of(compiled, part, following)
        if not any(instruction.task is not None for instruction in self.runner.program(part).instructions):
            yield ReadyStage(executor=executor, inputs=InputRows(()))
            return
        compiled.choose_masks(own)
        with self._rows_of(own, compiled) as inputs:
            yield from self._counted(ReadyStage(executor=executor, inputs=inputs), compiled, count, held)

    def _part_of(self, compiled: _Compiled, part: Part, following: Batch | None) -> StageExecutor:
        """Return what runs a part at the stage's shape, and at the shape of what comes ahead."""
        key = (part, None if following is None else self._shape_of(following))
        parts = compiled.parts
        if key not in parts:
            if len(parts) > 2 * MAX_SHAPES:  # two a shape that may follow, and the last
                parts.popitem(last=False)
            next_specs = None
            if following is not None:
                next_specs = self._executor_for(following).specs
            parts[key] = self._make_executor(
                compiled.code,
                self.runner.program(part),
                compiled.compute,
                self._hooks,
                self.runner.place(part),
                next_specs=next_specs,
                specs=compiled.specs,
            )
        parts.move_to_end(key)
        return parts[key]
