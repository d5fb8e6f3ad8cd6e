"""Runs the programs of one stage on one rank.

    code        by shape: of a uniform mini-batch, or of each loss unit
    executor    of each program, for the shapes of a mini-batch together; it has the message buffers
    weights     versions of them in mode async

A uniform mini-batch looks up one entry of the code: all its micro-batches are alike. Of a ragged one every loss unit is
a micro-batch, with an entry of its own:

    units of 2 x 7, 3 x 5, 2 x 7, 1 x 9 tokens      stage 0, rank 0   0F0 0F1 ...      units 0, 2
                                                             rank 1   0F0 0F1 ...      units 1, 3
                                                    stage 1, rank 2   1F0 1F1 1F2 1F3

A unit that lacks a branch has other code (`unit_patterns`). In mode async each entry has versions of the weights.

Programs name samples alone. In a plan of units (`plan_of_units`) a unit is a sample, so that programs are scheduled,
lowered and proved once, each message holds whole tensors, and nothing is cut below a unit. A mini-batch whose units
lack branches has another program.

A stage of a prefetched frozen branch runs the next mini-batch, at its shapes, every other stage the present one. So the
executors of a stage that trains are by pairs of shapes.

Nothing here depends on DeepSpeed. A rank runs its stages together (`rank_runner`).

Source: this project; mode async: PipeDream (SOSP 2019, doi 10.1145/3341301.3359646), section 3.3
Tests: tests/runtime/test_ragged_units.py, tests/integrations/test_units.py, tests/integrations/test_async.py,
    tests/integrations/test_frozen_ahead.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.errors import CaptureError, ConfigError, RuntimeFailure
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import (
    Batch,
    InputLink,
    InputRows,
    lately,
    ones_among,
    shape_key,
    unit_key,
    units_of,
)
from gpp_plugin.runtime.compute import (
    AutogradCompute,
    ComputeByShape,
    HalfForwards,
    StageHooks,
    StageWeights,
    boundary_gradients,
)
from gpp_plugin.runtime.executor import StageExecutor
from gpp_plugin.runtime.memory.activation_policy import (
    KnownSaves,
    Turn,
    backwards_after,
    make_stage_activations,
)
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.runtime.messages.routes import BoundarySpecs, Routes
from gpp_plugin.runtime.messages.transport import Transport
from gpp_plugin.runtime.rank_programs import nothing_of, spec_of_unit
from gpp_plugin.runtime.split import BackwardSplitter
from gpp_plugin.runtime.stage_module import (
    NO_CODE,
    Reference,
    StageCode,
    StageForwards,
    StageFunction,
    StageModule,
    StageSource,
)
from gpp_plugin.runtime.unit_patterns import UnitPattern, UnitPatterns
from gpp_plugin.runtime.weight_versions import MakePlaces, ParameterPlaces, WeightVersions
from gpp_plugin.schedule.gathers import last_backward
from gpp_plugin.schedule.program_sets import ProgramPlace, RankPrograms

logger = logging.getLogger(__name__)

MAX_SHAPES = 16
"""Shapes of uniform mini-batches whose code and executors are kept."""
MAX_UNIT_SHAPES = 64
"""Shapes of units whose code is kept."""
MAX_MINI_BATCHES = 64
"""Executors of ragged mini-batches that are kept, one for the shapes of a rank's units together."""

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerContext:
    """What the stage runners of a rank share.

    Args:
        source: gives the stages' code at each shape.
        reference: what is known of the model in this mode, training or evaluation, and its blocks.
        forwards: runs stages in place of their code; None: their code does.
        sums_losses: the loss of a mini-batch is the sum of its units' losses, each divided by what it is to be divided
            by already; else their mean.
        patterns: where mini-batches are lists of units with shapes of their own; None: they are uniform.
    """

    source: StageSource
    reference: Reference
    transport: Transport | None
    device: torch.device
    dtype: torch.dtype | None = None
    forwards: StageForwards | None = None
    sums_losses: bool = False
    patterns: UnitPatterns | None = None
    local_transfers: LocalTransfers = field(default_factory=LocalTransfers)


@dataclass(slots=True, kw_only=True, eq=False)
class ShapeCode:
    """A stage's code at one shape, and what computes with it.

    Args:
        half: the code at half the samples, where forwards run in halves.
        tensors: those that cross the stage's boundary, at this shape.
        pattern: of the unit; None of a uniform mini-batch.
        compute: None until parameters are bound; ``versions`` those of them in mode async.
    """

    code: StageCode
    half: StageFunction | None
    tensors: Mapping[str, TensorSpec]
    pattern: UnitPattern | None = None
    compute: AutogradCompute | None = None
    versions: WeightVersions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """A stage ready to run mini-batches of some shapes.

    Args:
        code: of the first micro-batch.
        specs: the boundary tensors that the code makes and reads.
        plan: with the edges of units that lack branches.
        whole: the stage's program of a mini-batch by itself; ``backwards`` of it (`backwards_after`).
        executors: (program's name, shapes of the prefetched mini-batch) -> what runs it.
    """

    code: ShapeCode
    compute: AutogradCompute | ComputeByShape
    specs: BoundarySpecs
    plan: PipelinePlan
    whole: RankProgram
    backwards: Mapping[Turn, int]
    executors: OrderedDict[tuple[str, Key | None], StageExecutor] = field(default_factory=OrderedDict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the inputs of the model that are read, by batch key."""
        own = self.compute
        return own.keys if isinstance(own, ComputeByShape) else self.code.code.function.batch_inputs


ReadyStage = tuple[StageExecutor, InputRows]
"""What runs one program of a stage: its executor, and the rows that each micro-batch reads."""

_KnownRoutes = tuple[RankProgram, ProgramPlace | None, Routes]
"""The routes of a program and place at the shapes it was last compiled for; those at others follow from them."""


class StageRunner:
    """Runs the programs of one stage on one rank.

    Args:
        shared: with the other stages of the rank.
        programs: what the rank does for the stage, by name.
        reduces_early: the stage may sum gradients in its last backward (`schedule.gathers`).
        make_places: of mode async: where the stage's trained weights may lie; called when parameters are bound.
    """

    def __init__(
        self,
        shared: RunnerContext,
        programs: RankPrograms,
        *,
        reduces_early: bool = False,
        make_places: MakePlaces = ParameterPlaces,
    ) -> None:
        self.plan = programs.plan
        self.stage_index = programs.main.stage
        self.reduces_early = reduces_early
        self.is_prefetched = programs.is_prefetched
        self._shared = shared
        self._patterns = shared.patterns
        self._programs = programs
        self._windows = programs.windows
        self._stage: Stage = self.plan.stages[self.stage_index]
        rank, count = programs.main.rank, self.plan.num_micro_batches(self.stage_index)
        self._samples = [self._stage.samples(micro_batch, rank) for micro_batch in range(count)]
        if self._patterns is None:
            assert not shared.reference.analysis.takes_whole_units, "whole units have patterns"
        self._make_places = make_places
        self._tensors: Mapping[str, Tensor] = {}
        self._hooks: StageHooks | None = None
        self._weights: StageWeights | None = None
        self._codes: OrderedDict[Key, ShapeCode] = OrderedDict()
        self._first: dict[int, tuple[StageFunction, AutogradCompute]] = {}
        self._host_link: SwapLink | None = None
        self._known_saves = KnownSaves()
        self._splitter = BackwardSplitter()
        self._compiled: OrderedDict[Key, _Compiled] = OrderedDict()
        self._routes: OrderedDict[int, _KnownRoutes] = OrderedDict()
        self._has_warned = False
        self._input_link = InputLink(shared.device)
        self._active: _Compiled | None = None
        self._counted: _Compiled | None = None
        self._is_draining = False

    # ---- code --------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> StageFunction:
        """Return the stage's code for a batch like this one, or for one of its units that has all inputs."""
        return self._prepared(batch).code.function

    def adopt_code(self, other: StageRunner) -> None:
        """Take over code of the same stage and micro-batches, of a mini-batch of another size."""
        for key, code in other._codes.items():
            self._codes[key] = dataclasses.replace(code, compute=None, versions=None)

    def code_and_weights(self, batch: Batch) -> tuple[StageCode, list[Tensor]]:
        """Return the stage's code as of `prepare`, and the weights that it takes, which are bound."""
        code = self._prepared(batch).code
        return code, [self._tensors[name] for name in code.function.tensors]

    def gradient_inputs(self, code: StageCode) -> tuple[str, ...]:
        """Return which of the tensors that a stage's code receives take a gradient."""
        return boundary_gradients(self._programs.main, self.plan, code.tensors).inputs

    def bind(
        self, module: StageModule, hooks: StageHooks | None, weights: StageWeights | None = None
    ) -> None:
        """Use these parameters and this optimizer side from now on; code stays as it is.

        Args:
            weights: gathers the parameters where the rank holds a part of them; None: it has them whole.
        """
        self._tensors = module.named_tensors()
        self._hooks = hooks
        self._weights = weights
        self._compiled.clear()
        self._first.clear()
        for code in self._codes.values():
            code.compute = code.versions = None

    def make_code(self, batch: Batch) -> None:
        """Make the code for this rank's units before any of them runs.

        Raises:
            CaptureError: the model's structure depends on the shape of its inputs.
        """
        for unit in self.own_units(batch):
            if self._is_run(unit):
                self._computing(unit, unit_key(unit))

    def own_units(self, batch: Batch) -> list[Batch]:
        """Return the units of this rank's micro-batches, in order; of some it may have nothing to run."""
        units = units_of(batch)
        return [units[samples.first_sample] for samples in self._samples]

    def num_writes(self) -> int:
        """Return how often the stage's parameters and buffers were written; what is frozen never is by training."""
        return sum(tensor._version for tensor in self._tensors.values())

    def _is_run(self, unit: Batch) -> bool:
        """Return whether the stage has something to do for a unit."""
        assert self._patterns is not None
        return self.stage_index in self._patterns.of(unit).stages

    def _next_backward(self, turn: Turn) -> int | None:
        """Return the micro-batch whose backward is the next task; None where that is a forward."""
        if self._windows is None:
            return None if self._active is None else self._active.backwards.get(turn)
        is_backward, micro_batch, _ = turn
        kind = TaskKind.BACKWARD if is_backward else TaskKind.FORWARD
        task = Task(stage=self.stage_index, kind=kind, micro_batch=micro_batch)
        return self._windows.backward_after(task, is_draining=self._is_draining)

    def _prepared(self, batch: Batch) -> ShapeCode:
        """Return the code for a batch like this one, or for one of its units that has all inputs."""
        patterns = self._patterns
        if patterns is None:
            return self._code_of(batch, shape_key(batch, count_samples(batch)))
        units = units_of(batch)
        unit = next((unit for unit in units if patterns.is_full(unit)), units[0])
        return self._code_of(unit, unit_key(unit))

    def _code_of(self, batch: Batch, key: Key) -> ShapeCode:
        """Return the code for a uniform mini-batch, or for a unit."""
        most = MAX_SHAPES if self._patterns is None else MAX_UNIT_SHAPES
        return lately(self._codes, key, functools.partial(self._make_code, batch, key), most=most)

    def _make_code(self, batch: Batch, key: Key) -> ShapeCode:
        shared, stage, index = self._shared, self._stage, self.stage_index
        if self._patterns is not None:
            pattern = self._patterns.of(batch)
            code = pattern.named(
                shared.source.stage_code(pattern.reference, pattern.plan, index, batch, key[0])
            )
            tensors = {name: spec_of_unit(spec) for name, spec in code.tensors.items()}
            return ShapeCode(code=code, half=None, tensors=tensors, pattern=pattern)
        local, half = stage.local_batch_size, None
        code = shared.source.stage_code(shared.reference, self.plan, index, batch, local)
        if any(i.task is not None and i.task.half is not None for i in self._programs.main.instructions):
            half = shared.source.stage_code(shared.reference, self.plan, index, batch, local // 2).function
            for what in ("tensors", "batch_inputs", "received", "outputs"):
                if getattr(code.function, what) != getattr(half, what):
                    raise CaptureError(
                        f"stage {stage.name}: its {what} differ between {local} samples and half of them; the model's "
                        "structure depends on the number of samples: set num_sliced to 0"
                    )
        return ShapeCode(code=code, half=half, tensors=code.tensors)

    # ---- what computes with it ---------------------------------------------------------------------

    def _computing(self, batch: Batch, key: Key) -> ShapeCode:
        """Return the code of a uniform mini-batch or a unit, with what computes with it.

        Raises:
            CaptureError: the model's structure depends on the shape of its inputs.
        """
        code = self._code_of(batch, key)
        if code.compute is not None:
            return code
        function = code.code.function
        if code.pattern is not None:
            self._check_held(function, batch, code.pattern)
        code.versions, windows = None, self._windows
        if windows is not None:
            code.versions = WeightVersions(
                [self._tensors[name] for name in function.tensors],
                most=self.plan.num_versions(self.stage_index),
                lag=windows.staleness(self.stage_index) if windows.vertical_sync else None,
                make_places=self._make_places,
            )
        compute = self._make_compute(code)
        if code.pattern is not None:
            # any two shapes may meet in a later mini-batch, where nothing is new: all are like the first one
            first = self._first.setdefault(code.pattern.index, (function, compute))
            self._check_alike(*first, function, compute)
        code.compute = compute
        return code

    def _make_compute(self, code: ShapeCode) -> AutogradCompute:
        main, pattern, shared = self._programs.main, code.pattern, self._shared
        if pattern is None or self._patterns is None:
            gradients, stage = boundary_gradients(main, self.plan, code.code.tensors), self._stage
        else:
            gradients = self._patterns.gradients(pattern, code.code, self.stage_index)
            stage = pattern.plan.stages[self.stage_index]
        parameters = [self._tensors[name] for name in code.code.function.tensors]
        function, half = self._with_forwards(code, parameters)
        is_trained = self._programs.is_trained
        activations = None
        if is_trained and stage.memory is not None:
            self._host_link = self._host_link or SwapLink(shared.device)
            activations = make_stage_activations(
                stage=stage.name,
                plan=stage.memory,
                blocks=stage.blocks,
                operators=code.code.operators,
                whole=function,
                half=half,
                gradient_inputs=gradients.inputs,
                link=self._host_link,
                next_backward=self._next_backward,
                known=self._known_saves,
            )
        # the seed of a loss: what the loss of a step grows by where it grows by one
        step_samples = self.plan.mini_batch if self._windows is None else self._stage.micro_batch_size
        return AutogradCompute(
            function=function,
            parameters=parameters,
            gradients=gradients,
            hooks=self._hooks if is_trained else None,
            loss=code.code.loss,
            loss_share=1.0 if shared.sums_losses else self._stage.local_batch_size / step_samples,
            halves=HalfForwards.of(half, inputs=code.code.inputs, tensors=code.tensors) if half else None,
            activations=activations,
            versions=code.versions if is_trained else None,
            # of ragged mini-batches the last backward differs from one to the next: `ComputeByShape` has it
            reduces_in=last_backward(main) if self.reduces_early and self._patterns is None else None,
            splitter=self._splitter,
            weights=self._weights,
        )

    def _with_forwards(
        self, code: ShapeCode, parameters: Sequence[Tensor]
    ) -> tuple[StageFunction, StageFunction | None]:
        """Return the stage's code and that of half its samples, with what runs them instead, if anything does."""
        forwards, stage = self._shared.forwards, self._stage

        def running(function: StageFunction) -> StageFunction:
            if forwards is None:
                return function
            if self._programs.is_trained:
                call = forwards.trained(stage, function, code.code)
            else:
                call = forwards.forward(stage.name, function, parameters)
            return function if call is None else dataclasses.replace(function, call=call)

        return running(code.code.function), None if code.half is None else running(code.half)

    def _check_held(self, function: StageFunction, unit: Batch, pattern: UnitPattern) -> None:
        """Refuse code of units that lack inputs if it reads what this rank does not have.

        Raises:
            CaptureError: names it.
        """
        odd = [name for name in function.tensors if name not in self._tensors]
        odd += [key for key in function.batch_inputs if unit[key].is_meta]
        if odd and pattern.lacks:
            raise CaptureError(
                f"stage {self._stage.name} reads {odd[:3]} of units without {list(pattern.lacks)}, and not of units "
                "that have all inputs: it does not have them; give every unit these keys"
            )

    def _check_alike(
        self,
        function: StageFunction,
        compute: AutogradCompute,
        other: StageFunction,
        of_other: AutogradCompute,
    ) -> None:
        """Refuse units whose shapes change what crosses the stage's boundary.

        Raises:
            CaptureError: says what differs.
        """
        # what is received may come in another order (`ComputeByShape`); what is made has that of the plan's edges
        for what, order in (("received", sorted), ("outputs", tuple)):
            if order(getattr(function, what)) != order(getattr(other, what)):
                raise CaptureError(
                    f"stage {self._stage.name}: its {what} differ between units; the model's "
                    "structure depends on the shape of its inputs: pad units alike"
                )
        for what in ("gradient_outputs", "gradient_inputs"):
            if getattr(compute, what) != getattr(of_other, what):
                raise CaptureError(
                    f"stage {self._stage.name}: its {what} differ between units: a tensor between "
                    "stages is empty in some of them; give every unit at least one of each input"
                )

    # ---- executors ---------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> _Compiled:
        """Return what runs a mini-batch, made if there is none at its shape.

        Raises:
            CaptureError, ConfigError: it is refused; on every rank alike.
        """
        key = self._key_of(batch)

        def make() -> _Compiled:
            # in mode async weights have versions for one code alone, which serves all micro-batches
            is_uniform = self._patterns is None or self._windows is not None
            return self._compile_uniform(batch, key) if is_uniform else self._compile_ragged(batch)

        most = MAX_SHAPES if self._patterns is None else MAX_MINI_BATCHES
        return lately(self._compiled, key, make, most=most)

    def has_shape(self, batch: Batch) -> bool:
        """Return whether a mini-batch has the shape of the one that runs, or ran last."""
        return self.compile(batch) is self._active

    def _key_of(self, batch: Batch) -> Key:
        """Return what executors for a mini-batch depend on."""
        if self._patterns is None:
            return shape_key(batch, self.plan.mini_batch)
        if self._windows is None:
            patterns, _ = self._patterns.program(batch)
            return (patterns, *(unit_key(unit) for unit in self.own_units(batch)))
        self.refuse_unlike_units(batch)
        return unit_key(units_of(batch)[0])

    def refuse_unlike_units(self, batch: Batch) -> None:
        """Refuse units of mode async that lack inputs or differ from each other: in flight together they must not.

        Raises:
            ConfigError: some do; the same on every rank.
        """
        patterns, units = self._patterns, units_of(batch)
        if patterns is None or self._windows is None:
            return
        if not all(map(patterns.is_full, units)):
            raise ConfigError(
                "a unit lacks inputs that the sample batch has; in mode async the tasks of all units are the same: "
                'give it these keys, or set mode to "sync"'
            )
        if len({unit_key(unit) for unit in units}) > 1:
            raise ConfigError(
                "units of one mini-batch differ in shapes or in values that the model's Python reads; in mode async "
                'those in flight together must not: give every mini-batch units of one kind, or set mode to "sync"'
            )

    def _compile_uniform(self, batch: Batch, key: Key) -> _Compiled:
        unit = batch if self._patterns is None else units_of(batch)[0]
        code = self._computing(unit, key)
        is_full = self._patterns is None and len(self._compiled) >= MAX_SHAPES
        if is_full and not code.code.is_for_lengths and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "more than %d input shapes seen; each new one is captured again (about a second). "
                "Pad sequences to a few lengths (bucketing) to avoid it",
                MAX_SHAPES,
            )
        assert code.compute is not None
        main = self._programs.main
        return _Compiled(
            code=code,
            compute=code.compute,
            specs=code.code.tensors,
            plan=self.plan,
            whole=main,
            backwards=backwards_after(main),
        )

    def _compile_ragged(self, batch: Batch) -> _Compiled:
        assert self._patterns is not None
        _, of_patterns = self._patterns.program(batch)
        codes = [
            self._computing(unit, unit_key(unit)) if self._is_run(unit) else None
            for unit in self.own_units(batch)
        ]
        compute = ComputeByShape(
            [None if code is None else code.compute for code in codes],
            [None if code is None else code.code.function for code in codes],
            reduces_in=of_patterns.reduces_in[self.stage_index],
            hooks=self._hooks,
        )
        # of the other units this rank has no tensors, and no messages; what a unit lacks of all is of no elements
        specs: list[Mapping[str, TensorSpec]] = [{}] * self.plan.mini_batch
        lacking = {name: nothing_of(name) for name in (*compute.received, *compute.outputs)}
        for samples, code in zip(self._samples, codes, strict=True):
            if code is not None:
                tensors = code.tensors if compute.is_alike else {**lacking, **code.tensors}
                specs[samples.first_sample] = tensors
        # a rank that runs none of the units reduces and steps with the others
        nothing = ShapeCode(code=NO_CODE, half=None, tensors={})
        program = of_patterns.parts[self.stage_index]
        return _Compiled(
            code=next((code for code in codes if code is not None), nothing),
            compute=compute,
            specs=specs,
            plan=of_patterns.plan,
            whole=program,
            backwards=backwards_after(program),
        )

    def _make_executor(self, compiled: _Compiled, name: str, following: Batch | None) -> StageExecutor:
        shared, code = self._shared, compiled.code.code
        program = compiled.whole if name == "whole" else self._programs.programs[name]
        place = self._programs.place(name)
        # at other shapes the same messages are made up of the same rows; programs are told apart by identity, and held
        known = self._routes.get(id(program))
        executor = StageExecutor(
            plan=compiled.plan,
            program=program,
            compute=compiled.compute,
            specs=compiled.specs,
            transport=shared.transport,
            hooks=self._hooks,
            device=shared.device,
            loss=code.loss,
            named_outputs=code.outputs,
            is_training=shared.reference.analysis.is_training,
            place=place,
            next_specs=None if following is None else self.compile(following).specs,
            known=known[2] if known is not None and known[1] == place else None,
            local_transfers=shared.local_transfers,
            weights=self._weights,
            versions=compiled.code.versions,
        )
        self._routes[id(program)] = program, place, executor.routes
        if len(self._routes) > MAX_SHAPES:
            self._routes.popitem(last=False)
        return executor

    # ---- running -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ready(self, name: str, batch: Batch | None, following: Batch | None = None) -> Iterator[ReadyStage]:
        """Get ready to run a program while the context lasts; only this rank's rows are read.

        Args:
            batch: the mini-batch that is trained; None: the one that runs goes on, to its end.
            following: the one that a frozen branch runs.
        """
        own = following if self.is_prefetched and following is not None else batch
        if own is not None:
            self._active = self.compile(own)
        assert self._active is not None, "nothing is in flight"
        compiled, self._is_draining = self._active, batch is None
        key = (name, None if following is None else self._key_of(following))
        make = functools.partial(self._make_executor, compiled, name, following)
        most = 2 * MAX_SHAPES + len(self._programs.programs)
        executor = lately(compiled.executors, key, make, most=most)
        if own is None or not (executor.forwards or name == "whole"):
            yield executor, InputRows(())
            return
        # The forwards run as eager models would on this batch: attention without needless masks. A uniform mini-batch
        # decides as a whole, so that all ranks of a stage run the same code. A unit decides by itself: another rank's
        # units do not change this one's code.
        if isinstance(compiled.compute, ComputeByShape):
            compiled.compute.use_masks(self.own_units(own))
        else:
            for function in (compiled.code.code.function, compiled.code.half):
                if function is not None and function.choice is not None:
                    function.choice.use(ones_among(own, function.choice.inputs))
        with self._rows_of(own, compiled) as inputs:
            yield executor, inputs

    def _rows_of(self, batch: Batch, compiled: _Compiled) -> InputRows:
        """Return the rows of the batch that this rank reads in each micro-batch."""
        if self._patterns is not None:
            units = [unit if self._is_run(unit) else {} for unit in self.own_units(batch)]
            return self._input_link.bring_units(units, compiled.keys, dtype=self._shared.dtype)
        return self._input_link.slice_batch(
            batch,
            compiled.keys,
            samples=self._samples,
            specs=compiled.code.code.inputs,
            dtype=self._shared.dtype,
        )

    def start_counting(self, held: HeldTogether | None) -> None:
        """Count what the stage that is ready keeps for backward, together with other stages in ``held``."""
        assert self._active is not None
        self._counted = self._active
        # all units have one shape then, that of the sample batch (`MemoryWatch.is_due`)
        compute = self._active.code.compute
        assert compute is not None
        compute.start_counting(held)

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer; return what was counted, if anything was."""
        counted, self._counted = self._counted, None
        if counted is None or counted.code.compute is None:
            return None
        counts, versions = counted.code.compute.stop_counting(), counted.code.versions
        if counts is None or versions is None:
            return counts
        return dataclasses.replace(counts, stashed_bytes=versions.stashed_bytes)

    # ---- weight versions ---------------------------------------------------------------------------

    @property
    def versions(self) -> WeightVersions | None:
        """Return the versions of the stage's weights in mode async, at the shape that is in flight."""
        return None if self._active is None else self._active.code.versions

    def check_staleness(self) -> None:
        """Refuse gradients that are older than planned.

        Raises:
            RuntimeFailure: says how old.
        """
        versions = self.versions
        if self._windows is None or versions is None:
            return
        planned = self._windows.staleness(self.stage_index)
        if versions.staleness > planned:
            raise RuntimeFailure(
                f"stage {self._stage.name}: a gradient was {versions.staleness} updates old, the plan says {planned}; "
                "this is a bug"
            )

    def release(self, *, has_failed: bool) -> None:
        """Note that nothing of the stage is in flight any more."""
        if self.versions is not None:
            if has_failed:
                self.versions.forget()
            else:
                self.versions.settle()
        self.stop_counting()
        self._active = None
