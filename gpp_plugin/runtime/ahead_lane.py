"""One rank's part of a pipeline whose frozen branch runs a mini-batch ahead.

A call runs one or two of four programs (`schedule.look_ahead`): the whole mini-batch as `Lane` does, or its branch
alone where that has not run (fill), and then the rest of it, with the branch's forwards of the next mini-batch (steady)
or without (last). Between two calls a rank that trains keeps what came ahead (`Carry`); a rank of the branch keeps
nothing. What was run ahead is of frozen weights and of one mini-batch: `is_stale` says where either is not so any more,
and `drop` lets go of it, on all ranks together.

A rank of the branch runs the programs' tasks on the next mini-batch, at its shapes, and every other rank on the present
one; messages that come ahead have the next one's shapes. So mini-batches of two shapes need no pause between them: a
rank that trains has an executor for each pair.

Source: this project
Tests: tests/integrations/test_frozen_ahead.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.timeline import Event
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor
from gpp_plugin.runtime.lane import MAX_SHAPES, Lane, _Compiled
from gpp_plugin.runtime.memory.recompute import RandomState
from gpp_plugin.runtime.messages.mailbox import Carry, WindowPlace
from gpp_plugin.schedule.look_ahead import RankAhead, moved_message

Part = Literal["fill", "steady", "last"]


@dataclass(slots=True, kw_only=True)
class AheadRunner:
    """Runs the parts of one rank one after the other, in training and in a rehearsal; keeps what stays between two.

    Args:
        plan: of one mini-batch.
        stage: of the rank; ``is_trained``: it runs backwards.
    """

    plan: PipelinePlan
    programs: RankAhead
    stage: int
    is_trained: bool
    carry: Carry = field(default_factory=Carry)

    def program(self, part: Part) -> RankProgram:
        """Return the program of a part."""
        return {"fill": self.programs.fill, "steady": self.programs.steady, "last": self.programs.last}[part]

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
        """Run what was compiled of a part; what stays is numbered as the next one does."""
        result = executor.run(inputs, record=record, carry=self.carry)
        if part != "last":
            self.carry.renumber(lambda message: moved_message(self.plan, message, -1))
            self.carry.sends_of = {m - self._count: held for m, held in self.carry.sends_of.items()}
        return result

    def drop(self) -> None:
        """Let go of what came ahead; collective over all ranks, which have the same to let go of."""
        # Every message's ends were posted in the program that sent it, so none waits for what is still to come. They
        # are waited for: what a transport writes into must not be let go of before.
        for pending in [*self.carry.sends, *(pending for _, pending in self.carry.received.values())]:
            pending.wait()
        self.carry = Carry()

    def as_first(self, event: Event) -> Event:
        """Return an event of a fill as the mini-batch that follows numbers it."""
        if event.micro_batch < 0:
            return event
        return dataclasses.replace(event, micro_batch=event.micro_batch - self._count)

    @property
    def _count(self) -> int:
        return self.plan.num_micro_batches(self.stage)


class AheadLane(Lane):
    """This rank's pipeline, whose frozen branch may run ahead.

    Args:
        ahead: this rank's programs beside that of the whole mini-batch.
        lane: as of `Lane`.
    """

    def __init__(self, *, ahead: RankAhead, **lane: Any) -> None:
        super().__init__(**lane)
        self._runner = AheadRunner(
            plan=self.plan,
            programs=ahead,
            stage=self.stage_index,
            is_trained=any(
                i.task is not None and i.task.kind is not TaskKind.FORWARD for i in self._program.instructions
            ),
        )
        self._ahead = ahead
        self._carried: Batch | None = None
        self._following: Batch | None = None
        self._weights_seen = 0
        self._most_held = 0
        self.has_peeked = False
        """A whole mini-batch was run, so that `is_stateful` knows."""
        self.is_stateful = False
        """The branch drew random numbers or wrote tensors of its own: run ahead, its results would be others."""

    @property
    def is_ahead(self) -> bool:
        """Return whether something was run ahead and is kept."""
        return self._carried is not None

    @property
    def ahead_bytes(self) -> tuple[int, int]:
        """Return the most bytes that this rank holds of what came ahead as planned, and as found between two calls."""
        return self._ahead.most_bytes, self._most_held

    def is_stale(self, batch: Batch) -> bool:
        """Return whether what was run ahead is of another mini-batch or of other weights, as far as this rank knows."""
        if self._carried is None:
            return False
        has_changed = self._ahead.is_ahead and self._num_writes() != self._weights_seen
        return self._carried is not batch or has_changed

    def look_to(self, following: Batch | None) -> None:
        """Let the next `run` run the branch of this mini-batch too; on every rank the same one."""
        self._following = following

    def drop(self) -> None:
        """Let go of what was run ahead; collective over all ranks, which have the same to let go of."""
        self._runner.drop()
        self._forget()

    def run(self, batch: Batch, *, record: bool = False, count: bool = False) -> MiniBatchResult:
        """Run one mini-batch, and the branch of the one that `look_to` named; ``record``, ``count`` as of `Lane`."""
        following, self._following = self._following, None
        if following is not None and not (self._may_be_cut(batch) and self._may_be_cut(following)):
            following = None
        if following is None and self._carried is None:
            return self._run_whole(batch, record=record, count=count)
        assert self._carried is None or self._carried is batch, (
            "drop what was run ahead for another mini-batch"
        )
        # Both shapes are captured before the first message, and one that is refused is refused when its turn comes.
        self._executor_for(batch)
        if following is not None:
            try:
                self._executor_for(following)
            except (CaptureError, ConfigError):  # by every rank alike
                following = None
        try:
            return self._run_parts(batch, following, record=record, count=count)
        except BaseException:
            self._forget()
            raise

    def _may_be_cut(self, batch: Batch) -> bool:
        """Return whether a mini-batch has the tasks of programs that run a branch ahead; the same on every rank."""
        return True

    # ---- parts of a mini-batch -----------------------------------------------------------------------------

    def _run_whole(self, batch: Batch, *, record: bool, count: bool) -> MiniBatchResult:
        """Run a mini-batch as any lane does; look whether the branch leaves anything but its results."""
        self._executor_for(batch)  # captured before: that draws numbers too
        before = RandomState.take(self._device) if self._ahead.is_ahead else None
        writes = self._num_writes()
        result = super().run(batch, record=record, count=count)
        if before is not None:
            after = RandomState.take(self._device)
            self.is_stateful |= writes != self._num_writes() or not _is_same(before, after)
        self.has_peeked = True
        return result

    def _run_parts(
        self, batch: Batch, following: Batch | None, *, record: bool, count: bool
    ) -> MiniBatchResult:
        # Calls with mini-batches a, b, c, of which c is the last that is known; the branch's and the others' tasks:
        #
        #     run(a), following b   fill: a | -     steady: b | a
        #     run(b), following c                   steady: c | b
        #     run(c)                                last:   - | c
        filled: Sequence[Event] = ()
        if self._carried is None:
            filled = self._run_part("fill", now=batch, following=batch, record=record).events
        self._carried = batch
        part: Part = "last" if following is None else "steady"
        result = self._run_part(part, now=batch, following=following, record=record, count=count)
        self._carried = following
        self._weights_seen = self._num_writes()
        held = sum(t.nbytes for buffers, _ in self._runner.carry.received.values() for t in buffers)
        self._most_held = max(self._most_held, held)
        result.events[:0] = map(self._runner.as_first, filled)
        return result

    def _run_part(
        self, part: Part, *, now: Batch, following: Batch | None, record: bool, count: bool = False
    ) -> MiniBatchResult:
        own = following if self._ahead.is_ahead and following is not None else now
        compiled = self._executor_for(own)
        executor = self._part_of(compiled, part, following)
        if not any(instruction.task is not None for instruction in self._runner.program(part).instructions):
            return self._runner.run(part, executor, (), record=record)
        compiled.choose_masks(own)
        with self._rows_of(own, compiled) as inputs:
            if not count:
                return self._runner.run(part, executor, inputs, record=record)
            compiled.compute.start_counting()
            try:
                result = self._runner.run(part, executor, inputs, record=record)
            finally:
                counts = compiled.compute.stop_counting()
            self.note_counts(result, counts)
            return result

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
                self._runner.program(part),
                compiled.compute,
                self._hooks,
                self._runner.place(part),
                next_specs=next_specs,
                specs=compiled.specs,
            )
        parts.move_to_end(key)
        return parts[key]

    # ---- between two mini-batches --------------------------------------------------------------------------

    def _forget(self) -> None:
        self._runner.carry = Carry()
        self._carried = None

    def _num_writes(self) -> int:
        """Return how often the stage's parameters and buffers were written; what is frozen never is by training."""
        return sum(tensor._version for tensor in self._tensors.values())


def _is_same(one: RandomState, other: RandomState) -> bool:
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(one.cpu, other.cpu), (one.cuda, other.cuda)]
    return all(a is None or (b is not None and torch.equal(a, b)) for a, b in pairs)
