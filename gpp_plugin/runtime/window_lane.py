"""One stage's part of an asynchronous pipeline: windows run one after the other, micro-batches stay in flight.

Between two windows a stage keeps the autograd graphs of the micro-batches in flight (`compute`), their weights
(`weight_versions`) and what it has received for later (`mailbox`). One `AutogradCompute` and one executor a program
serve a shape; a batch of another shape needs an empty pipeline first. A `WindowRunner` knows which program of a stage
is next, in training and in a rehearsal: windows that repeat are one program, whose numbers are shifted. A rank runs the
windows of its stages together (`kept_lanes`).

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3
Tests: tests/runtime/test_weight_versions.py, tests/integrations/test_async.py, tests/rehearse/test_rehearse.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gpp_plugin.errors import RuntimeFailure
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.compute import StageHooks
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor
from gpp_plugin.runtime.input_rows import InputRows
from gpp_plugin.runtime.lane import Lane, _Compiled, _Prepared
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.memory.keeper import NextBackward, Turn
from gpp_plugin.runtime.messages.mailbox import Carry, WindowPlace
from gpp_plugin.runtime.rank_executor import RankExecutors
from gpp_plugin.runtime.weight_versions import MakePlaces, WeightVersions
from gpp_plugin.schedule.orders.async_1f1b import Windows
from gpp_plugin.schedule.windows import RankWindows, shift_message

MakeExecutor = Callable[[RankProgram, WindowPlace], StageExecutor]


def is_trained(programs: RankWindows) -> bool:
    """Return whether a rank runs backwards."""
    tasks = [i.task for i in programs.steps[-1].instructions if i.task is not None]
    return any(task.kind is TaskKind.BACKWARD for task in tasks)


@dataclass(slots=True, kw_only=True)
class WindowRunner:
    """The executors of all windows of one stage on a rank, at one shape.

    Args:
        mini_batch: samples of one window.
        steps, drains: of each window, and of what is left after it; the last ones serve all later windows.
        window: windows run since the pipeline was empty.
    """

    windows: Windows
    mini_batch: int
    steps: tuple[StageExecutor, ...]
    drains: tuple[StageExecutor, ...]
    window: int = 0
    carry: Carry = field(default_factory=Carry)

    @classmethod
    def make(cls, programs: RankWindows, make: MakeExecutor, *, mini_batch: int) -> WindowRunner:
        """Return the runner of a stage's programs, each compiled by ``make``."""
        windows, trained, carried = programs.windows, is_trained(programs), programs.carried

        def place(window: int, behind: int) -> WindowPlace:
            return WindowPlace(
                carried=carried[behind],
                first_micro_batch=(window - 1) * windows.micro_batches,
                is_trained=trained,
            )

        return cls(
            windows=windows,
            mini_batch=mini_batch,
            steps=tuple(make(p, place(w, w - 1)) for w, p in enumerate(programs.steps, start=1)),
            drains=tuple(make(p, place(w, w)) for w, p in enumerate(programs.drains, start=1)),
        )

    @property
    def shift(self) -> int:
        """Return how many micro-batches more the last window's numbers mean than its program says."""
        return (self.window - self.windows.program_of(self.window)) * self.windows.micro_batches

    def next_window(self) -> StageExecutor:
        """Return what runs the next window, with ``carry``."""
        # Of windows 1 and 2 that differ, 2 repeats. Window 3 runs the program of 2, whose micro-batches 2 and 3 mean
        # 4 and 5 (``shift`` 2); what 2 left for "micro-batch 3" the program expects as its 1, so it is renamed by a
        # window.
        self.window += 1
        if self.window > self.windows.first_steady:
            self.carry.renumber(lambda m: shift_message(m, -self.windows.micro_batches, -self.mini_batch))
        self.carry.shift = self.shift
        return self.steps[self.program]

    def next_drain(self) -> StageExecutor:
        """Return what runs the backwards that are left, with ``carry``."""
        return self.drains[self.program]

    def finish(self) -> None:
        """Wait until everything has been sent: the pipeline is empty."""
        for pending in self.carry.sends:
            pending.wait()

    @property
    def program(self) -> int:
        """Return which of the programs the last window was run by."""
        return self.windows.program_of(self.window) - 1

    def empty(self) -> None:
        """Begin anew with an empty pipeline."""
        self.carry = Carry()
        self.window = 0


class RankWindowRunner:
    """Runs the windows of all stages of a rank together, in training and in a rehearsal.

    Args:
        programs: the rank's; ``runners`` of its stages, in the programs' order of them.
    """

    def __init__(
        self, programs: RankWindows, runners: Sequence[WindowRunner], executors: RankExecutors
    ) -> None:
        self._programs = programs
        self._runners = tuple(runners)
        self._executors = executors

    @property
    def windows(self) -> Windows:
        """Return which tasks each window holds."""
        return self._programs.windows

    @property
    def shift(self) -> int:
        """Return how many micro-batches more the last window's numbers mean than its program says."""
        return self._runners[0].shift

    def run(self, inputs: Sequence[Sequence[Sequence[Tensor]]], *, record: bool = False) -> MiniBatchResult:
        """Run the next window on the inputs of each stage."""
        parts = [runner.next_window() for runner in self._runners]
        return self._run(self._programs.steps, parts, inputs, record)

    def drain(self, *, record: bool = False) -> MiniBatchResult:
        """Run the backwards that are left."""
        parts = [runner.next_drain() for runner in self._runners]
        result = self._run(self._programs.drains, parts, [()] * len(parts), record)
        for runner in self._runners:
            runner.finish()
        return result

    def _run(
        self,
        programs: Sequence[RankProgram],
        parts: Sequence[StageExecutor],
        inputs: Sequence[Sequence[Sequence[Tensor]]],
        record: bool,
    ) -> MiniBatchResult:
        first = self._runners[0]
        executor = self._executors.of(programs[first.program], parts)
        return executor.run(inputs, record=record, carries=[runner.carry for runner in self._runners])

    def empty(self) -> None:
        """Begin anew with an empty pipeline."""
        for runner in self._runners:
            runner.empty()


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompiledWindows(_Compiled):
    """A stage ready to run all windows at one shape; ``executor`` runs those that repeat."""

    runner: WindowRunner
    versions: WeightVersions


class VersionedHooks:
    """A stage's optimizer side, whose updates make a new version of the weights."""

    def __init__(self, hooks: StageHooks, versions: WeightVersions) -> None:
        self._hooks = hooks
        self._versions = versions
        self.accumulate = hooks.accumulate
        self.begin_reduction = hooks.begin_reduction
        self.reduce_data = hooks.reduce_data
        self.reduce_tied = hooks.reduce_tied

    @property
    def loss_scale(self) -> float:
        """Return the factor of every loss's seed gradient."""
        return self._hooks.loss_scale

    def step(self) -> object:
        """Update the newest weights."""
        self._versions.begin_update()
        result = self._hooks.step()
        self._versions.end_update()
        return result


class WindowLane(Lane):
    """One stage's pipeline on this rank, never drained but on request; its rank's `KeptWindows` runs it.

    Args:
        programs: what the rank does for the stage.
        make_places: where the stage's trained weights may lie; asked when the lane is bound.
        lane: as of `Lane`.
    """

    def __init__(self, *, programs: RankWindows, make_places: MakePlaces, **lane: Any) -> None:
        super().__init__(**lane)
        self._programs = programs
        self._windows = programs.windows
        self._make_places = make_places
        self._active: _CompiledWindows | None = None
        self._is_counting = self._is_draining = False

    @property
    def windows(self) -> Windows:
        """Return which tasks each window holds."""
        return self._windows

    @property
    def window(self) -> int:
        """Return how many windows were run since the pipeline was empty."""
        return 0 if self._active is None else self._active.runner.window

    @property
    def runner(self) -> WindowRunner:
        """Return what knows the next program, while the pipeline is not empty."""
        assert self._active is not None, "windows are under way"
        return self._active.runner

    def is_another_shape(self, batch: Batch) -> bool:
        """Return whether micro-batches of another shape are in flight, so that the pipeline must be drained."""
        return self.window > 0 and self._executor_for(batch) is not self._active

    def begin(self, batch: Batch, *, count: bool, held: HeldTogether | None) -> InputRows:
        """Get ready to run the next window: its program is ``runner``'s next.

        Args:
            count: begin to count what is kept, where the pipeline is empty; ``held`` as of `Lane.ready`.
        """
        compiled = self._executor_for(batch)
        assert isinstance(compiled, _CompiledWindows)
        assert not self.window or compiled is self._active, "drain before batches of another shape"
        if not self.window:
            compiled.versions.start()
        self._active = compiled
        compiled.choose_masks(batch)
        inputs = self._rows_of(batch, compiled)
        if count and not self.window:
            compiled.compute.start_counting(held)
            self._is_counting = True
        return inputs

    def end(self) -> MemoryCounts | None:
        """Note that the window was run; return what was counted, when the stage has held the most it ever does."""
        assert self._active is not None
        self._check_staleness(self._active.versions)
        return self._stop_counting(self._active) if self._is_counting and self.has_peaked else None

    def begin_drain(self) -> None:
        """Get ready to run the backwards that are left."""
        self._is_draining = True

    def end_drain(self) -> None:
        """Note that the pipeline is empty."""
        assert self._active is not None
        self._check_staleness(self._active.versions)
        self._active.versions.settle()
        self._empty()

    def let_go(self) -> None:
        """Let go of everything under way: a window failed."""
        if self._active is not None:
            self._active.versions.forget()
        self._empty()

    @property
    def has_peaked(self) -> bool:
        """Return whether the windows since the pipeline was empty held the most that any hold."""
        return self._windows.has_peaked(self.window)

    def _stop_counting(self, compiled: _CompiledWindows) -> MemoryCounts | None:
        self._is_counting = False
        counts = compiled.compute.stop_counting()
        if counts is None:
            return None
        return dataclasses.replace(counts, stashed_bytes=compiled.versions.stashed_bytes)

    def _empty(self) -> None:
        if self._active is not None:
            if self._is_counting:  # too early: the next windows begin anew
                self._stop_counting(self._active)
            self._active.runner.empty()
        self._active = None
        self._is_draining = False

    def _next_backward(self) -> NextBackward:
        def next_backward(turn: Turn) -> int | None:
            is_backward, micro_batch, _ = turn
            kind = TaskKind.BACKWARD if is_backward else TaskKind.FORWARD
            task = Task(stage=self.stage_index, kind=kind, micro_batch=micro_batch)
            return self._windows.backward_after(task, is_draining=self._is_draining)

        return next_backward

    def _check_staleness(self, versions: WeightVersions) -> None:
        planned = self._windows.staleness(self.stage_index)
        if versions.staleness > planned:
            stage = self.plan.stages[self.stage_index].name
            raise RuntimeFailure(
                f"stage {stage}: a gradient was {versions.staleness} updates old, the plan says {planned}; "
                "this is a bug"
            )

    def _compile(self, prepared: _Prepared) -> _CompiledWindows:
        code = prepared.code
        windows = self._windows
        versions = WeightVersions(
            [self._tensors[name] for name in code.function.tensors],
            most=self.plan.num_versions(self.stage_index),
            lag=windows.staleness(self.stage_index) if windows.vertical_sync else None,
            make_places=self._make_places,
        )
        assert self._hooks is not None, "an asynchronous pipeline trains"
        hooks = VersionedHooks(self._hooks, versions)
        compute = self._make_compute(
            prepared,
            hooks,
            step_samples=self.plan.stages[self.stage_index].micro_batch_size,
            versions=versions if is_trained(self._programs) else None,
        )

        def make(program: RankProgram, place: WindowPlace) -> StageExecutor:
            return self._make_executor(code, program, compute, hooks, place)

        runner = WindowRunner.make(self._programs, make, mini_batch=self.plan.mini_batch)
        return _CompiledWindows(
            executor=runner.steps[-1],
            compute=compute,
            function=code.function,
            half=prepared.half,
            inputs=code.inputs,
            code=code,
            specs=code.tensors,
            runner=runner,
            versions=versions,
        )
