"""A stage's code by shape, and what computes with it once parameters are bound.

A uniform mini-batch looks up one entry: all its micro-batches are alike. Of a ragged one every loss unit is a
micro-batch, with an entry of its own:

    units of 2 x 7, 3 x 5, 2 x 7, 1 x 9 tokens      stage 0, rank 0   0F0 0F1 ...      units 0, 2
                                                             rank 1   0F0 0F1 ...      units 1, 3
                                                    stage 1, rank 2   1F0 1F1 1F2 1F3

A unit that lacks a branch has other code (`unit_patterns`). In mode async each entry has versions of the weights.

Source: this project
Tests: tests/runtime/test_ragged_units.py, tests/integrations/test_units.py
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.plan import Stage
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.batches import Batch, lately, shape_key, unit_key, units_of
from gpp_plugin.runtime.compute import (
    AutogradCompute,
    HalfForwards,
    StageHooks,
    StageWeights,
    VersionedHooks,
    boundary_gradients,
)
from gpp_plugin.runtime.memory.activation_policy import (
    KnownSaves,
    NextBackward,
    StageActivations,
    make_stage_activations,
)
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.messages.mailbox import LocalTransfers
from gpp_plugin.runtime.messages.transport import Transport
from gpp_plugin.runtime.rank_programs import spec_of_unit
from gpp_plugin.runtime.split import BackwardSplitter
from gpp_plugin.runtime.stage_module import Reference, StageCode, StageForwards, StageFunction, StageSource
from gpp_plugin.runtime.unit_patterns import UnitPattern, UnitPatterns
from gpp_plugin.runtime.weight_versions import MakePlaces, WeightVersions
from gpp_plugin.schedule.gathers import last_backward
from gpp_plugin.schedule.program_sets import RankPrograms

MAX_SHAPES = 16
"""Shapes of uniform mini-batches whose code and executors are kept."""
MAX_UNIT_SHAPES = 64
"""Shapes of units whose code is kept."""

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
    hooks: StageHooks | None = None
    versions: WeightVersions | None = None


class CodeByShape:
    """The code of one stage on one rank.

    Args:
        shared: with the other stages of the rank.
        programs: what the rank does for the stage.
        reduces_early: the stage may sum gradients in its last backward (`schedule.gathers`).
        make_places: of mode async: where the stage's trained weights may lie; called when parameters are bound.
        next_backward: which backward is the next task, for what is swapped.
    """

    def __init__(
        self,
        shared: RunnerContext,
        programs: RankPrograms,
        *,
        reduces_early: bool,
        make_places: MakePlaces,
        next_backward: NextBackward,
    ) -> None:
        self._shared = shared
        self._patterns = shared.patterns
        self._programs = programs
        self._plan = programs.plan
        self._index = programs.main.stage
        self._stage: Stage = programs.plan.stages[self._index]
        self._is_trained = programs.is_trained
        self._reduces_early = reduces_early
        self._make_places = make_places
        self._next_backward = next_backward
        self._known: OrderedDict[Key, ShapeCode] = OrderedDict()
        self._first: dict[int, tuple[StageFunction, AutogradCompute]] = {}
        self._tensors: Mapping[str, Tensor] = {}
        self._hooks: StageHooks | None = None
        self._weights: StageWeights | None = None
        self._host_link: SwapLink | None = None
        self._known_saves = KnownSaves()
        self._splitter = BackwardSplitter()

    def bind(
        self, tensors: Mapping[str, Tensor], hooks: StageHooks | None, weights: StageWeights | None
    ) -> None:
        """Compute with these parameters from now on; code stays as it is."""
        self._tensors, self._hooks, self._weights = tensors, hooks, weights
        self._first.clear()
        for code in self._known.values():
            code.compute = code.versions = None

    def prepared(self, batch: Batch) -> ShapeCode:
        """Return the code for a batch like this one, or for one of its units that has all inputs."""
        patterns = self._patterns
        if patterns is None:
            return self._of(batch, shape_key(batch, count_samples(batch)))
        units = units_of(batch)
        unit = next((unit for unit in units if patterns.is_full(unit)), units[0])
        return self._of(unit, unit_key(unit))

    def _of(self, batch: Batch, key: Key) -> ShapeCode:
        """Return the code for a uniform mini-batch, or for a unit."""
        most = MAX_SHAPES if self._patterns is None else MAX_UNIT_SHAPES
        return lately(self._known, key, functools.partial(self._make, batch, key), most=most)

    def _make(self, batch: Batch, key: Key) -> ShapeCode:
        shared, index = self._shared, self._index
        if self._patterns is not None:
            pattern = self._patterns.of(batch)
            code = pattern.named(
                shared.source.stage_code(pattern.reference, pattern.plan, index, batch, key[0])
            )
            tensors = {name: spec_of_unit(spec) for name, spec in code.tensors.items()}
            return ShapeCode(code=code, half=None, tensors=tensors, pattern=pattern)
        local, half = self._stage.local_batch_size, None
        code = shared.source.stage_code(shared.reference, self._plan, index, batch, local)
        if any(i.task is not None and i.task.half is not None for i in self._programs.main.instructions):
            half = shared.source.stage_code(shared.reference, self._plan, index, batch, local // 2).function
            self._check_half(code.function, half)
        return ShapeCode(code=code, half=half, tensors=code.tensors)

    def _check_half(self, whole: StageFunction, half: StageFunction) -> None:
        for what in ("tensors", "batch_inputs", "received", "outputs"):
            if getattr(whole, what) != getattr(half, what):
                stage = self._stage
                raise CaptureError(
                    f"stage {stage.name}: its {what} differ between {stage.local_batch_size} samples and half of "
                    "them; the model's structure depends on the number of samples: set num_sliced to 0"
                )

    # ---- what computes with it ---------------------------------------------------------------------

    def computing(self, batch: Batch, key: Key) -> ShapeCode:
        """Return the code of a uniform mini-batch or a unit, with what computes with it.

        Raises:
            CaptureError: the model's structure depends on the shape of its inputs.
        """
        code = self._of(batch, key)
        if code.compute is not None:
            return code
        function = code.code.function
        if code.pattern is not None:
            self._check_held(function, batch, code.pattern)
        code.hooks, code.versions = self._hooks, None
        if self._programs.windows is not None:
            windows = self._programs.windows
            code.versions = WeightVersions(
                [self._tensors[name] for name in function.tensors],
                most=self._plan.num_versions(self._index),
                lag=windows.staleness(self._index) if windows.vertical_sync else None,
                make_places=self._make_places,
            )
            assert self._hooks is not None, "an asynchronous pipeline trains"
            code.hooks = VersionedHooks(self._hooks, code.versions)
        compute = self._make_compute(code)
        if code.pattern is not None:
            # any two shapes may meet in a later mini-batch, where nothing is new: all are like the first one
            first = self._first.setdefault(code.pattern.index, (function, compute))
            self._check_alike(*first, function, compute)
        code.compute = compute
        return code

    def _make_compute(self, code: ShapeCode) -> AutogradCompute:
        main, pattern = self._programs.main, code.pattern
        if pattern is None or self._patterns is None:
            gradients, stage = boundary_gradients(main, self._plan, code.code.tensors), self._stage
        else:
            gradients = self._patterns.gradients(pattern, code.code, self._index)
            stage = pattern.plan.stages[self._index]
        parameters = [self._tensors[name] for name in code.code.function.tensors]
        function, half = self._with_forwards(code, parameters)
        is_trained = self._is_trained
        # of ragged mini-batches the last backward differs from one to the next: `ComputeByShape` has it
        reduces_in = last_backward(main) if self._reduces_early and self._patterns is None else None
        return AutogradCompute(
            function=function,
            parameters=parameters,
            gradients=gradients,
            hooks=code.hooks if is_trained else None,
            loss=code.code.loss,
            loss_share=self._loss_share(),
            halves=HalfForwards.of(half, inputs=code.code.inputs, tensors=code.tensors) if half else None,
            activations=self._make_activations(code, function, half, stage, gradients.inputs)
            if is_trained
            else None,
            versions=code.versions if is_trained else None,
            reduces_in=reduces_in,
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
            if self._is_trained:
                call = forwards.trained(stage, function, code.code)
            else:
                call = forwards.forward(stage.name, function, parameters)
            return function if call is None else dataclasses.replace(function, call=call)

        return running(code.code.function), None if code.half is None else running(code.half)

    def _loss_share(self) -> float:
        """Return the seed of a loss: what the loss of a step grows by where it grows by one."""
        step_samples = (
            self._plan.mini_batch if self._programs.windows is None else self._stage.micro_batch_size
        )
        return 1.0 if self._shared.sums_losses else self._stage.local_batch_size / step_samples

    def _make_activations(
        self,
        code: ShapeCode,
        function: StageFunction,
        half: StageFunction | None,
        stage: Stage,
        gradient_inputs: tuple[str, ...],
    ) -> StageActivations | None:
        """Return what executes the stage's memory plan, if it has one."""
        if stage.memory is None:
            return None
        if self._host_link is None:
            self._host_link = SwapLink(self._shared.device)
        return make_stage_activations(
            stage=stage.name,
            plan=stage.memory,
            blocks=stage.blocks,
            operators=code.code.operators,
            whole=function,
            half=half,
            gradient_inputs=gradient_inputs,
            link=self._host_link,
            next_backward=self._next_backward,
            known=self._known_saves,
        )

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
