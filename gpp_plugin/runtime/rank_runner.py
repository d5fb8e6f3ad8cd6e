"""Runs all stages of one rank in the order of the rank's program.

Each stage has a `StageRunner`, made from what the rank's programs have of it: parameters, code by shape, memory plans
and messages are a stage's own. What is the rank's: one order, one step, tensors that stages transfer locally, and what
is carried from one call to the next.

    RankRunner      rank 1, stages 1 and 3
      StageRunner   stage 1    executor at this shape ─┐
      StageRunner   stage 3    executor at this shape ─┴─► RankExecutor: 1F0 3F0 3B0 1B0 ... step

A call runs the programs that the table of its `StepPolicy` names:

    synchronous       whole
    frozen prefetch   whole; prologue, steady; steady; epilogue
    mode async        prologue 1, ..., steady, steady, ...; drain

What was prefetched is of frozen weights and of one mini-batch. `is_stale` says where either is no longer so, and `drop`
releases it, on all ranks together.

Source: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3; frozen prefetch: this project
Tests: tests/runtime/test_rank_runner.py, tests/integrations/test_async.py, tests/integrations/test_frozen_ahead.py,
    tests/integrations/test_kept_shared_ranks.py
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from gpp_plugin.errors import CaptureError, ConfigError
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.program import Instruction, RankProgram
from gpp_plugin.ir.timeline import Event
from gpp_plugin.runtime.batches import Batch, unit_key, units_of
from gpp_plugin.runtime.compute import StageHooks, StageWeights
from gpp_plugin.runtime.executor import Around, MiniBatchResult, RankExecutor, Step
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.random_streams import are_same, streams_of
from gpp_plugin.runtime.recorder import Moment
from gpp_plugin.runtime.stage_module import StageFunction, StageModule
from gpp_plugin.runtime.stage_runner import MAX_UNIT_SHAPES, RunnerContext, StageRunner
from gpp_plugin.runtime.weight_versions import MakePlaces, ParameterPlaces
from gpp_plugin.schedule.program_sets import EMPTY, RankPrograms


class RankRunner:
    """Runs all stages of one rank in one mode, training or evaluation.

    Args:
        programs: the rank's, by name.
        shared: by its stages.
        reduces_early: stages that may sum gradients in their last backward.
        make_places: of mode async, by stage: where trained weights may lie, as of `StageRunner`.

    Attributes:
        policy: which programs a call runs.
        reference: what is known of the model in this mode.
        program: the one that has every task of a mini-batch.
        stages: indices of the rank's stages, in the plan's order.
        is_training: the model was captured in training mode.
        sums_losses: the loss of a mini-batch is the sum of its units' losses, and not their mean.
        has_ragged_units: mini-batches are lists of units with shapes of their own.
        num_running: how many mini-batches entered the pipeline of mode async since it was empty.
    """

    def __init__(
        self,
        programs: RankPrograms,
        shared: RunnerContext,
        *,
        reduces_early: Collection[int] = (),
        make_places: Mapping[int, MakePlaces] | None = None,
    ) -> None:
        self.stage_runners = tuple(
            StageRunner(
                shared,
                programs.of_stage(stage),
                reduces_early=stage in reduces_early,
                make_places=(make_places or {}).get(stage, ParameterPlaces),
            )
            for stage in programs.stages
        )
        self.plan = programs.plan
        self.policy = programs.policy
        self.program = programs.main
        self.rank, self.stages = self.program.rank, self.program.stages
        self.reference = shared.reference
        self.is_training = self.reference.analysis.is_training
        self.sums_losses = shared.sums_losses
        self.has_ragged_units = shared.patterns is not None
        self._programs = programs
        self._shared = shared
        self._executor = RankExecutor(programs, local_transfers=shared.local_transfers)
        self._seen: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self.num_running = 0
        self._held: HeldTogether | None = None
        self._prefetched: Batch | None = None
        self._num_writes: list[int] = []
        self._most_prefetched = 0
        self.has_peeked = False
        """A whole mini-batch was run, so that `is_stateful` is known."""
        self.is_stateful = False
        """The frozen branch drew random numbers or wrote tensors of its own: prefetched, its outputs would differ."""

    # ---- what it is of -----------------------------------------------------------------------------

    @property
    def has_peaked(self) -> bool:
        """Return whether the mini-batches run since counting began held the most that any hold."""
        windows = self._programs.windows
        return windows is None or windows.has_peaked(self.num_running)

    def runner_of(self, stage: int) -> StageRunner:
        """Return the runner of one of the rank's stages."""
        return self.stage_runners[self.stages.index(stage)]

    # ---- code and weights --------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> tuple[StageFunction, ...]:
        """Return the code of each stage for batches like this one, before parameters are bound."""
        return tuple(runner.prepare(batch) for runner in self.stage_runners)

    def adopt_code(self, other: RankRunner) -> None:
        """Take over the code of a runner of the same stages, for mini-batches of another size; not that of units."""
        if not self.has_ragged_units:
            for own, known in zip(self.stage_runners, other.stage_runners, strict=True):
                own.adopt_code(known)

    def bind(
        self,
        modules: Sequence[StageModule],
        hooks: Sequence[StageHooks] | None,
        step: Callable[[], object] | None = None,
        weights: Sequence[StageWeights | None] | None = None,
    ) -> None:
        """Use these parameters and optimizer sides from now on, one a stage.

        Args:
            hooks: None for an evaluation.
            step: of all stages of the rank together; None where it holds one stage, whose hooks step, or takes none.
            weights: of each stage, what gathers its parameters; None: the rank has them whole.
        """
        count = len(self.stage_runners)
        assert step is None or count > 1, "the one stage of a rank steps by its hooks"
        self._executor = RankExecutor(self._programs, local_transfers=self._shared.local_transfers, step=step)
        of_stages: Sequence[StageHooks | None] = [None] * count if hooks is None else hooks
        gathering = [None] * count if weights is None else weights
        for runner, module, own, held in zip(self.stage_runners, modules, of_stages, gathering, strict=True):
            runner.bind(module, own, held)

    def has_new_shapes(self, batch: Batch) -> bool:
        """Return whether a unit of a mini-batch has a shape that was not met lately; the same on every rank."""
        return self.has_ragged_units and any(unit_key(unit) not in self._seen for unit in units_of(batch))

    def note_shapes(self, batch: Batch) -> None:
        """Take the shapes of a mini-batch for known: every rank has code for those of its units."""
        # in the order of units, of which every rank knows all: so all ranks forget the same ones, too
        for unit in units_of(batch) if self.has_ragged_units else ():
            key = unit_key(unit)
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_UNIT_SHAPES:
            self._seen.popitem(last=False)

    def learn_branches(self, batch: Batch) -> None:
        """Find out which branches are active in units that lack inputs, and lower the mini-batch's programs.

        Collective over all ranks where a set of inputs is new.

        Raises:
            CaptureError: the model cannot do without some inputs; the same on every rank.
            ConfigError: units differ in mode async, where the tasks of all are the same; likewise.
        """
        patterns = self._shared.patterns
        if patterns is None:
            return
        self.stage_runners[0].refuse_unlike_units(batch)
        patterns.learn(batch)
        patterns.program(batch)

    def make_code(self, batch: Batch) -> None:
        """Make the code for this rank's units before any of them runs; as of `StageRunner`."""
        for runner in self.stage_runners if self.has_ragged_units else ():
            runner.make_code(batch)

    def unread_parameters(self, batch: Batch) -> frozenset[str]:
        """Return the model's parameters that units with all inputs read, and no unit of a mini-batch does."""
        patterns = self._shared.patterns
        return frozenset() if patterns is None else patterns.unread_parameters(batch)

    def _is_full(self, batch: Batch) -> bool:
        """Return whether all units have all inputs; the same on every rank."""
        patterns = self._shared.patterns
        return patterns is None or all(map(patterns.is_full, units_of(batch)))

    # ---- running -----------------------------------------------------------------------------------

    def run(
        self, batch: Batch, *, following: Batch | None = None, record: bool = False, count: bool = False
    ) -> MiniBatchResult:
        """Run one mini-batch of ``plan.mini_batch`` samples; only this rank's rows are read.

        Args:
            following: the next one, whose frozen branch may run now; on every rank the same one.
            record: whether to note the time of every task and message.
            count: whether to count what is kept for backward (a few microseconds for each saved tensor).
        """
        following = self._runnable(batch, following)
        assert self._prefetched is None or self._prefetched is batch, "drop what was prefetched for another"
        filled: list[Event] = []
        tasks: list[tuple[Moment, Moment]] = []
        with self._releasing_on_failure():
            *first, last = self.policy.calls[self._executor.last, following is not None]
            for name in first:
                found = self._run_program(name, batch, batch, record=record)
                filled += map(self._as_first, found.events)
                tasks += found.tasks
            result = self._run_program(last, batch, following, record=record, count=count)
            for runner in self.stage_runners:
                runner.check_staleness()
        if self.policy.can_prefetch:
            self._note_prefetched(following, is_whole=last == "whole")
        result.events[:0], result.tasks[:0] = filled, tasks
        return result

    def _run_program(
        self, name: str, batch: Batch, following: Batch | None, *, record: bool, count: bool = False
    ) -> MiniBatchResult:
        runners, patterns = self.stage_runners, self._shared.patterns
        program: RankProgram | None = None
        if name == "whole":
            program = self.program if patterns is None else patterns.program(batch)[1].program
        # in mode async counting begins in an empty pipeline, and goes on until as much is held as ever will be
        is_begun = self.policy.steps_alone and self._executor.last != EMPTY
        with contextlib.ExitStack() as stack:
            ready = [stack.enter_context(runner.ready(name, batch, following)) for runner in runners]
            if self.policy.steps_alone and not is_begun:
                for runner in runners:
                    if runner.versions is not None:
                        runner.versions.start()
            if count and not is_begun:
                self._held = HeldTogether() if len(runners) > 1 else None
                for runner in runners:
                    runner.start_counting(self._held)
            try:
                result = self._executor.run(
                    name,
                    [executor for executor, _ in ready],
                    [inputs for _, inputs in ready],
                    record=record,
                    program=program,
                    around=self._peeking() if name == "whole" else None,
                )
                self.num_running += self.policy.steps_alone
            finally:
                counts = [runner.stop_counting() for runner in runners] if self.has_peaked else []
        self._note_counts(result, counts)
        return result

    def _note_counts(self, result: MiniBatchResult, counts: Sequence[MemoryCounts | None]) -> None:
        """Put into a result what each stage kept for backward, and what all of them kept together."""
        for stage, own in zip(self.stages, counts, strict=False):
            if own is not None:
                result.memories[stage] = own
                result.most_bytes = own.most_bytes
        if self._held is not None and result.memories:
            kept = result.memories.values()
            result.most_bytes = self._held.peak + sum(c.working_bytes + c.stashed_bytes for c in kept)

    @contextlib.contextmanager
    def _releasing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._executor.forget()
            self._release(has_failed=True)
            raise

    def _release(self, *, has_failed: bool = False) -> None:
        for runner in self.stage_runners:
            runner.release(has_failed=has_failed)
        self.num_running, self._prefetched = 0, None

    # ---- mode async --------------------------------------------------------------------------------

    def is_another_shape(self, batch: Batch) -> bool:
        """Return whether micro-batches of another shape are in flight, so that the pipeline must be drained first."""
        if not (self.policy.steps_alone and self.num_running):
            return False
        return not all([runner.has_shape(batch) for runner in self.stage_runners])

    def drain(self, *, record: bool = False) -> MiniBatchResult | None:
        """Run the backwards that are left; None where there are none. Collective over all ranks."""
        name = self.policy.drains.get(self._executor.last)
        if name is None:
            return None
        with self._releasing_on_failure(), contextlib.ExitStack() as stack:
            ready = [stack.enter_context(runner.ready(name, None)) for runner in self.stage_runners]
            parts, inputs = [executor for executor, _ in ready], [inputs for _, inputs in ready]
            result = self._executor.run(name, parts, inputs, record=record)
            for runner in self.stage_runners:
                runner.check_staleness()
        self._release()
        return result

    # ---- frozen prefetch ---------------------------------------------------------------------------

    @property
    def has_prefetched(self) -> bool:
        """Return whether outputs of the frozen branch are carried."""
        return self._prefetched is not None

    @property
    def prefetched_bytes(self) -> tuple[int, int]:
        """Return the most bytes of prefetched outputs on this rank as planned, and as found between two calls."""
        planned = self._programs.most_bytes if self.policy.can_prefetch else 0
        return planned, self._most_prefetched

    def is_stale(self, batch: Batch) -> bool:
        """Return whether what was prefetched is of another mini-batch or other weights, as far as this rank knows."""
        if self._prefetched is None:
            return False
        return self._prefetched is not batch or self._writes() != self._num_writes

    def drop(self) -> None:
        """Release what was prefetched; collective over all ranks, which have the same to release."""
        self._executor.drop()
        self._prefetched = None

    def _runnable(self, batch: Batch, following: Batch | None) -> Batch | None:
        """Return the next mini-batch if its branch can run now.

        Both shapes are captured before the first message: capturing draws random numbers, and a mini-batch that is
        refused is refused when its turn comes. With units that lack inputs, mini-batches run whole.
        """
        if not self.policy.can_prefetch:
            return None
        if following is not None and not (self._is_full(batch) and self._is_full(following)):
            following = None
        self._compile(batch)
        if following is not None:
            try:
                self._compile(following)
            except (CaptureError, ConfigError):  # by every rank alike
                following = None
        return following

    def _compile(self, batch: Batch) -> None:
        for runner in self.stage_runners:
            runner.compile(batch)

    def _writes(self) -> list[int]:
        """Return how often the weights of the frozen branch were written."""
        return [runner.num_writes() for runner in self.stage_runners if runner.is_prefetched]

    def _note_prefetched(self, following: Batch | None, *, is_whole: bool) -> None:
        """Note of which mini-batch, and of which weights, the carried outputs are."""
        if is_whole:
            self.has_peeked = True
            self.is_stateful |= self._writes() != self._num_writes
        self._prefetched, self._num_writes = following, self._writes()
        self._most_prefetched = max(self._most_prefetched, self._executor.carried_bytes)

    def _as_first(self, event: Event) -> Event:
        """Return an event of a prologue as the mini-batch that follows numbers it."""
        if event.micro_batch < 0:
            return event
        count = self.plan.num_micro_batches(event.stage)
        return dataclasses.replace(event, micro_batch=event.micro_batch - count)

    def _peeking(self) -> Around | None:
        """Return what watches for random numbers that tasks of the frozen branch draw; None without such a branch."""
        if not self.policy.can_prefetch:
            return None
        self._num_writes = self._writes()

        def around(instruction: Instruction, step: Step) -> Step:
            task = instruction.task
            if task is None or task.stage not in self._programs.prefetched:
                return step

            def watched() -> None:
                before = None if self.is_stateful else streams_of(self._shared.device)
                step()
                if before is not None:
                    self.is_stateful |= not are_same(before, streams_of(self._shared.device))

            return watched

        return around
