"""One rank's part of a pipeline: the lanes of its stages, run together in the order of its program.

Each stage has a `Lane` of its own, made from what the rank's program has of it; so parameters, code by shapes, memory
plans and messages are a stage's own affair, wherever it is. What is the rank's: one order, one step, tensors that
stages hand over to each other, and the programs of units that lack branches.

    RankLane   rank 1, stages 1 and 3
      Lane     stage 1    executor at this shape ─┐
      Lane     stage 3    executor at this shape ─┴─► RankExecutor: 1F0 3F0 3B0 1B0 ... step

Source: this project
Tests: tests/runtime/test_rank_lane.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.compute import StageHooks, StageWeights
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.lane import MAX_SHAPES, Lane
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.messages.mailbox import HandOvers
from gpp_plugin.runtime.rank_executor import Around, RankExecutors
from gpp_plugin.runtime.stage_module import StageFunction, StageModule
from gpp_plugin.runtime.unit_lane import MAX_MINI_BATCHES, UnitLane, patterns_of

AnyLane = TypeVar("AnyLane", bound=Lane)


class RankLane:
    """This rank's pipeline in one mode: of one stage, or of several.

    Args:
        program: this rank's, of mini-batches whose units have all inputs.
        lanes: of its stages, in the program's order of them; several share their `HandOvers` (`make`).
    """

    def __init__(self, program: RankProgram, lanes: Sequence[Lane]) -> None:
        assert program.stages == tuple(lane.stage_index for lane in lanes), "a lane for each stage, in order"
        assert len({id(lane.hand_overs) for lane in lanes}) == 1, (
            "the lanes of a rank share what they hand over"
        )
        self.lanes = tuple(lanes)
        self._program = program
        self._hand_overs = lanes[0].hand_overs
        self._executors = self._make_executors(None)

    @classmethod
    def make(
        cls, kind: type[Lane], *, program: RankProgram, reduces_early: Collection[int] = (), **lane: Any
    ) -> RankLane:
        """Return the pipeline of a rank whose stages have lanes of one kind.

        Args:
            program: this rank's.
            reduces_early: stages that may sum gradients in their last backward.
            lane: as of ``kind``, the same for all stages.
        """
        return cls(program, cls.make_lanes(kind, program=program, reduces_early=reduces_early, **lane))

    @staticmethod
    def make_lanes(
        kind: type[AnyLane],
        *,
        program: RankProgram,
        reduces_early: Collection[int] = (),
        own: Callable[[int], dict[str, Any]] = lambda stage: {},
        **lane: Any,
    ) -> list[AnyLane]:
        """Return the lanes of a rank's stages, which share what they hand over.

        Args:
            own: what the lane of a stage is given beside what all are given.
        """
        if issubclass(kind, UnitLane):
            lane["patterns"] = patterns_of(program, reduces_early=reduces_early, **lane)
            lane.pop("reduces_each_backward", None)
        hand_overs = HandOvers()
        return [
            kind(
                program=program.of_stage(stage),
                reduces_early=stage in reduces_early,
                hand_overs=hand_overs,
                **own(stage),
                **lane,
            )
            for stage in program.stages
        ]

    # ---- what it is of -----------------------------------------------------------------------------

    @property
    def plan(self) -> PipelinePlan:
        """Return the plan that is run."""
        return self.lanes[0].plan

    @property
    def rank(self) -> int:
        """Return the rank."""
        return self._program.rank

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the indices of the rank's stages, in the plan's order."""
        return self._program.stages

    @property
    def is_training(self) -> bool:
        """Return whether the lanes were captured in training mode."""
        return self.lanes[0].is_training

    @property
    def sums_losses(self) -> bool:
        """Return whether the loss of a mini-batch is the sum of its units' losses, and not their mean."""
        return self.lanes[0].sums_losses

    @property
    def has_peaked(self) -> bool:
        """Return whether the mini-batches run since counting began held the most that any hold."""
        return all(lane.has_peaked for lane in self.lanes)

    def lane_of(self, stage: int) -> Lane:
        """Return the lane of one of the rank's stages."""
        return self.lanes[self.stages.index(stage)]

    # ---- running -----------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> tuple[StageFunction, ...]:
        """Return the code of each stage for batches like this one, before parameters are bound."""
        return tuple(lane.prepare(batch) for lane in self.lanes)

    def bind(
        self,
        modules: Sequence[StageModule],
        hooks: Sequence[StageHooks] | None,
        step: Callable[[], object] | None = None,
        weights: Sequence[StageWeights | None] | None = None,
    ) -> None:
        """Use these parameters and optimizer sides from now on, one a stage; drops compiled executors.

        Args:
            hooks: None for an evaluation.
            step: of all stages of the rank together; None where it holds one stage, whose hooks step, or takes none.
            weights: of each stage, what gathers its parameters; None: the rank has them whole.
        """
        assert step is None or len(self.lanes) > 1, "the one stage of a rank steps by its hooks"
        self._executors = self._make_executors(step)
        of_stages: Sequence[StageHooks | None] = [None] * len(self.lanes) if hooks is None else hooks
        gathering = [None] * len(self.lanes) if weights is None else weights
        for lane, module, own, held in zip(self.lanes, modules, of_stages, gathering, strict=True):
            lane.bind(module, own, held)

    def _make_executors(
        self, step: Callable[[], object] | None, *, around: Around | None = None
    ) -> RankExecutors:
        most = max(MAX_SHAPES, MAX_MINI_BATCHES)
        return RankExecutors(hand_overs=self._hand_overs, step=step, around=around, most=most)

    def run(self, batch: Batch, *, record: bool = False, count: bool = False) -> MiniBatchResult:
        """Run one mini-batch of ``plan.mini_batch`` samples; only this rank's rows are read.

        Args:
            record: whether to note the time of every task and message.
            count: whether to count what is kept for backward (a few microseconds for each saved tensor).
        """
        if len(self.lanes) == 1:
            return self.lanes[0].run(batch, record=record, count=count)
        return self._run_together(batch, record=record, count=count)

    def _run_together(self, batch: Batch, *, record: bool, count: bool) -> MiniBatchResult:
        held = HeldTogether() if count and len(self.lanes) > 1 else None
        with contextlib.ExitStack() as stack:
            ready = [stack.enter_context(lane.ready(batch, count=count, held=held)) for lane in self.lanes]
            executor = self._executors.of(self._program_of(batch), [one.executor for one in ready])
            result = executor.run([one.inputs for one in ready], record=record)
        self._note_counts(result, [one.counts for one in ready], held)
        return result

    def _note_counts(
        self, result: MiniBatchResult, counts: Sequence[MemoryCounts | None], held: HeldTogether | None
    ) -> None:
        """Put into a result what each stage kept for backward, and what all of them kept together."""
        for lane, own in zip(self.lanes, counts, strict=True):
            lane.note_counts(result, own)
        if held is not None:
            kept = result.memories.values()
            result.most_bytes = held.peak + sum(c.working_bytes + c.stashed_bytes for c in kept)

    def _program_of(self, batch: Batch) -> RankProgram:
        """Return the rank's program for a mini-batch."""
        first = self.lanes[0]
        return first.program_of_rank(batch) if isinstance(first, UnitLane) else self._program

    # ---- units of their own shapes -----------------------------------------------------------------

    @property
    def units(self) -> tuple[UnitLane, ...]:
        """Return the lanes where mini-batches are lists of units; empty where they are not."""
        return tuple(lane for lane in self.lanes if isinstance(lane, UnitLane))

    def has_new_shapes(self, batch: Batch) -> bool:
        """Return whether a unit of this mini-batch has a shape that was not met lately; the same on every rank."""
        return any(lane.has_new_shapes(batch) for lane in self.units)

    def note_shapes(self, batch: Batch) -> None:
        """Take the shapes of a mini-batch for known: every rank has code for those of its units."""
        for lane in self.units:
            lane.note_shapes(batch)

    def learn_patterns(self, batch: Batch) -> None:
        """Learn what there is of units that lack inputs, once for all stages; as of `UnitLane`, collective as there."""
        for lane in self.units[:1]:
            lane.learn_patterns(batch)

    def learn_shapes(self, batch: Batch) -> None:
        """Make the code for this rank's units before any of them runs; as of `UnitLane`."""
        for lane in self.units:
            lane.learn_shapes(batch)

    def unread_parameters(self, batch: Batch) -> frozenset[str]:
        """Return the model's parameters that units with all inputs read, and no unit of a mini-batch does."""
        units = self.units
        return units[0].unread_parameters(batch) if units else frozenset()
