"""The pipelines of a rank that keep something from one call to the next: in mode async, and where a branch runs ahead.

Both run a rank's stages together, as `RankLane` does, by programs of several kinds; what a stage keeps between two is
its lane's (`Carry`).

    KeptWindows   mode async: windows of a pipeline that is never drained but on request (`window_lane`)
    KeptAhead     a frozen branch that runs a mini-batch ahead (`ahead_lane`)

A call of `KeptAhead` runs one or two of four programs (`schedule.look_ahead`): the whole mini-batch as `RankLane` does,
or its branch alone where that has not run (fill), and then the rest of it, with the branch's forwards of the next
mini-batch (steady) or without (last). What was run ahead is of frozen weights and of one mini-batch: `is_stale` says
where either is not so any more, and `drop` lets go of it, on all ranks together.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3; running ahead: this project
Tests: tests/integrations/test_async.py, tests/integrations/test_frozen_ahead.py,
    tests/integrations/test_kept_shared_ranks.py
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.program import Instruction, RankProgram
from gpp_plugin.ir.timeline import Event
from gpp_plugin.runtime.ahead_lane import AheadLane, RankAheadRunner
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.executor import MiniBatchResult, Step
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.memory.recompute import RandomState
from gpp_plugin.runtime.rank_executor import Around, RankExecutors
from gpp_plugin.runtime.rank_lane import RankLane
from gpp_plugin.runtime.weight_versions import MakePlaces
from gpp_plugin.runtime.window_lane import RankWindowRunner, WindowLane
from gpp_plugin.schedule.look_ahead import Part, RankAhead
from gpp_plugin.schedule.windows import RankWindows


class KeptWindows(RankLane):
    """This rank's pipeline, never drained but on request.

    Args:
        programs: the rank's.
        lanes: of its stages.
    """

    def __init__(self, programs: RankWindows, lanes: Sequence[WindowLane]) -> None:
        super().__init__(programs.steps[-1], lanes)
        self._programs = programs
        self._windows = tuple(lanes)
        self._held: HeldTogether | None = None

    @classmethod
    def of(
        cls,
        kind: type[WindowLane],
        *,
        programs: RankWindows,
        make_places: Mapping[int, MakePlaces],
        **lane: Any,
    ) -> KeptWindows:
        """Return the pipeline of a rank.

        Args:
            kind: of its stages' lanes.
            make_places: by stage, as of `WindowLane`.
        """

        def own(stage: int) -> dict[str, Any]:
            return {"programs": programs.of_stage(stage), "make_places": make_places[stage]}

        return cls(programs, cls.make_lanes(kind, program=programs.steps[-1], own=own, **lane))

    @property
    def window(self) -> int:
        """Return how many windows were run since the pipeline was empty."""
        return self._windows[0].window

    def is_another_shape(self, batch: Batch) -> bool:
        """Return whether micro-batches of another shape are in flight, so that the pipeline must be drained."""
        return any(lane.is_another_shape(batch) for lane in self._windows)

    def run(self, batch: Batch, *, record: bool = False, count: bool = False) -> MiniBatchResult:
        """Run the next window; its losses are those of the batch's micro-batches, in order."""
        lanes = self._windows
        if count and not self.window:
            self._held = HeldTogether() if len(lanes) > 1 else None
        with contextlib.ExitStack() as stack:
            begun = [lane.begin(batch, count=count, held=self._held) for lane in lanes]
            inputs = [stack.enter_context(rows) for rows in begun]
            with self._letting_go_on_failure():
                result = self._runner.run(inputs, record=record)
        counts = [lane.end() for lane in lanes]
        self._note_counts(result, counts, self._held if any(counts) else None)
        return result

    def drain(self, *, record: bool = False) -> MiniBatchResult | None:
        """Run the backwards that are left; None where there are none. Collective over all ranks."""
        lanes = self._windows
        if not self.window:
            return None
        for lane in lanes:
            lane.begin_drain()
        with self._letting_go_on_failure():
            result = self._runner.drain(record=record)
        for lane in lanes:
            lane.end_drain()
        return result

    @property
    def _runner(self) -> RankWindowRunner:
        """Return what runs the stages' windows at the shape under way."""
        return RankWindowRunner(self._programs, [lane.runner for lane in self._windows], self._executors)

    @contextlib.contextmanager
    def _letting_go_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for lane in self._windows:
                lane.let_go()
            raise


class KeptAhead(RankLane):
    """This rank's pipeline, whose frozen branch may run ahead.

    Args:
        ahead: the rank's programs beside that of the whole mini-batch.
        lanes: of its stages.
    """

    def __init__(self, program: RankProgram, ahead: RankAhead, lanes: Sequence[AheadLane]) -> None:
        self._ahead = ahead
        self._stages = tuple(lanes)
        super().__init__(program, lanes)
        self._carried: Batch | None = None
        self._following: Batch | None = None
        self._most_held = 0
        self.has_peeked = False
        """A whole mini-batch was run, so that `is_stateful` knows."""
        self.is_stateful = False
        """The branch drew random numbers or wrote tensors of its own: run ahead, its results would be others."""

    @classmethod
    def of(
        cls,
        kind: type[AheadLane],
        *,
        program: RankProgram,
        ahead: RankAhead,
        reduces_early: Collection[int] = (),
        **lane: Any,
    ) -> KeptAhead:
        """Return the pipeline of a rank; ``kind`` is of its stages' lanes."""

        def own(stage: int) -> dict[str, Any]:
            return {"ahead": ahead.of_stage(stage)}

        lanes = cls.make_lanes(kind, program=program, reduces_early=reduces_early, own=own, **lane)
        return cls(program, ahead, lanes)

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
        return self._carried is not batch or any(lane.has_other_weights() for lane in self._stages)

    def look_to(self, following: Batch | None) -> None:
        """Let the next `run` run the branch of this mini-batch too; on every rank the same one."""
        self._following = following

    def drop(self) -> None:
        """Let go of what was run ahead; collective over all ranks, which have the same to let go of."""
        self._runner.drop()
        self._carried = None

    def run(self, batch: Batch, *, record: bool = False, count: bool = False) -> MiniBatchResult:
        """Run one mini-batch, and the branch of the one that `look_to` named; arguments as of `RankLane.run`."""
        following, self._following = self._following, None
        first = self._stages[0]
        if following is not None and not (first.may_be_cut(batch) and first.may_be_cut(following)):
            following = None
        # Both shapes are captured before the first message, and one that is refused is refused when its turn comes;
        # capturing draws numbers too.
        self._know(batch)
        if following is None and self._carried is None:
            return self._run_whole(batch, record=record, count=count)
        assert self._carried is None or self._carried is batch, (
            "drop what was run ahead for another mini-batch"
        )
        if following is not None:
            try:
                self._know(following)
            except (CaptureError, ConfigError):  # by every rank alike
                following = None
        try:
            return self._run_parts(batch, following, record=record, count=count)
        except BaseException:
            for lane in self._stages:
                lane.runner.forget()
            self._carried = None
            raise

    def _own(self, stage: int) -> AheadLane:
        return self._stages[self.stages.index(stage)]

    def _know(self, batch: Batch) -> None:
        for lane in self._stages:
            lane.know(batch)

    # ---- whole mini-batches ----------------------------------------------------------------------------------

    def _run_whole(self, batch: Batch, *, record: bool, count: bool) -> MiniBatchResult:
        """Run a mini-batch as any rank does; look whether the branch leaves anything but its results."""
        writes = [lane.num_writes() for lane in self._stages]
        result = self._run_together(batch, record=record, count=count)
        for lane, before in zip(self._stages, writes, strict=True):
            self.is_stateful |= lane.is_ahead and lane.num_writes() != before
        self.has_peeked = True
        return result

    def _make_executors(
        self, step: Callable[[], object] | None, *, around: Around | None = None
    ) -> RankExecutors:
        runners = [lane.runner for lane in self._stages]
        self._runner = RankAheadRunner(self._ahead, runners, super()._make_executors(step))
        return super()._make_executors(step, around=around or self._watched)

    def _watched(self, instruction: Instruction, step: Step) -> Step:
        """Return a step of a whole mini-batch, which looks whether a task of the branch draws random numbers."""
        task = instruction.task
        if task is None or task.stage not in self._ahead.branch:
            return step
        return functools.partial(self._run_watched, self._own(task.stage).device, step)

    def _run_watched(self, device: torch.device, step: Step) -> None:
        if self.is_stateful:
            step()
            return
        before = RandomState.take(device)
        step()
        self.is_stateful |= not before.is_same(RandomState.take(device))

    # ---- parts of a mini-batch -----------------------------------------------------------------------------

    def _run_parts(
        self, batch: Batch, following: Batch | None, *, record: bool, count: bool
    ) -> MiniBatchResult:
        # Calls with mini-batches a, b, c, of which c is the last that is known; the branch's and the others' tasks:
        #
        #     run(a), following b   fill: a | -     steady: b | a
        #     run(b), following c                   steady: c | b
        #     run(c)                                last:   - | c
        filled: list[Event] = []
        if self._carried is None:
            found = self._run_part("fill", now=batch, following=batch, record=record)
            filled = [self._as_first(event) for event in found.events]
        self._carried = batch
        part: Part = "last" if following is None else "steady"
        result = self._run_part(part, now=batch, following=following, record=record, count=count)
        self._carried = following
        for lane in self._stages:
            lane.note_weights()
        self._most_held = max(self._most_held, sum(lane.runner.held_bytes for lane in self._stages))
        result.events[:0] = filled
        return result

    def _as_first(self, event: Event) -> Event:
        """Return an event of a fill as the mini-batch that follows numbers it."""
        return self._own(event.stage).runner.as_first(event)

    def _run_part(
        self, part: Part, *, now: Batch, following: Batch | None, record: bool, count: bool = False
    ) -> MiniBatchResult:
        held = HeldTogether() if count and len(self._stages) > 1 else None
        with contextlib.ExitStack() as stack:
            ready = [
                stack.enter_context(
                    lane.part_ready(part, now=now, following=following, count=count, held=held)
                )
                for lane in self._stages
            ]
            result = self._runner.run(
                part, [one.executor for one in ready], [one.inputs for one in ready], record=record
            )
        self._note_counts(result, [one.counts for one in ready], held)
        return result
