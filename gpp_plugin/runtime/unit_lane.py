"""A pipeline whose mini-batches are lists of loss units, each of its own shapes.

A unit is the sample of this pipeline's arithmetic: a plan for 8 units of 4 samples becomes one for 8 samples of a
unit each (`plan_of_units`), every micro-batch of a rank is one unit, and nothing is ever cut below one. So each message
holds whole tensors, whatever their layouts, and programs, which name samples alone, are scheduled, lowered and proved
once:

    units of 2 x 7, 3 x 5, 2 x 7, 1 x 9 tokens      stage 0, rank 0   0F0 0F1 ...      units 0, 2
                                                             rank 1   0F0 0F1 ...      units 1, 3
                                                    stage 1, rank 2   1F0 1F1 1F2 1F3

What differs from unit to unit is code, the shapes of messages and the rows that are read. Code is kept by the shape of
a unit, an executor by the shapes of all units that its rank runs. Units that lack a branch have other code, and their
mini-batches other programs (`unit_patterns`): the rank of a stage that they do not need runs nothing of them.

Source: this project
Tests: tests/runtime/test_unit_lane.py, tests/integrations/test_units.py
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpp_plugin.capture.lengths import resized
from gpp_plugin.errors import CaptureError, ConfigError, PlanError
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.tensors import UNIT, TensorSpec
from gpp_plugin.runtime.ahead_lane import AheadLane
from gpp_plugin.runtime.batches import Batch, ones_among, unit_key, units_of
from gpp_plugin.runtime.compute import AutogradCompute, StageHooks, StageWeights
from gpp_plugin.runtime.input_rows import InputRows
from gpp_plugin.runtime.lane import Lane, _Compiled, _Prepared
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.memory.keeper import NextBackward, Turn, backwards_after
from gpp_plugin.runtime.messages.transport import Transport
from gpp_plugin.runtime.stage_module import StageFunction, StageModule
from gpp_plugin.runtime.stage_source import Reference, StageCode, UnitSource
from gpp_plugin.runtime.unit_patterns import Boundary, PatternProgram, Places, UnitPattern, UnitPatterns
from gpp_plugin.runtime.window_lane import WindowLane

MAX_UNIT_SHAPES = 64
"""Shapes of units whose code is kept."""
MAX_MINI_BATCHES = 64
"""Executors that are kept, one for the shapes of a rank's units together."""

_Key = tuple[Any, ...]


def plan_of_units(plan: PipelinePlan) -> PipelinePlan:
    """Return a plan for units of ``plan.loss_unit`` samples with units in place of samples.

    Of a plan that is one already nothing changes.

    Raises:
        PlanError: a stage would run less or more than one unit a rank at a time.
    """
    unit = plan.loss_unit
    stages = []
    for stage in plan.stages:
        if stage.local_batch_size != unit or stage.num_sliced:
            what = (
                f"slices {stage.num_sliced} forwards"
                if stage.num_sliced
                else f"takes {stage.local_batch_size}"
            )
            raise PlanError(
                f"stage {stage.name!r} {what} samples a rank, but with graph_pipeline.units, or where a model takes "
                f"whole loss units, each rank runs whole units of {unit}; give graph_pipeline.plan micro-batches of "
                f"{unit} samples a rank and no slices"
            )
        stages.append(dataclasses.replace(stage, micro_batch_size=stage.degree))
    edges = tuple(
        dataclasses.replace(
            edge,
            bytes_per_sample=edge.bytes_per_sample * unit,
            gradient_bytes_per_sample=edge.gradient_bytes_per_sample * unit,
        )
        for edge in plan.edges
    )
    return dataclasses.replace(
        plan, mini_batch=plan.mini_batch // unit, loss_unit=1, stages=tuple(stages), edges=edges
    )


def spec_of_unit(spec: TensorSpec) -> TensorSpec:
    """Return a tensor captured on one whole unit with the unit as its only sample: all its rows belong to it."""
    return resized(spec, spec.shape, 1)


class UnitCompute:
    """Computes each micro-batch with the code of its unit's shape.

    Where units lack branches, their code takes and returns less; that of other readings may take the stage's inputs in
    another order, or do without one: a mask that hides nothing. What passes the stage's boundary is then all that any
    of the units has, and each unit's tensors stand at their places among it; the others are of no elements, or None.

    Args:
        computes: of each micro-batch of the rank; the same object where shapes are the same; None where the stage has
            nothing to do for the unit.
        functions: their code.
        reduces_in: the micro-batch in whose backward gradients may be summed over the stage's ranks; None: in none.
        hooks: the optimizer side, which is told so.
    """

    def __init__(
        self,
        computes: Sequence[AutogradCompute | None],
        functions: Sequence[StageFunction | None],
        *,
        reduces_in: int | None = None,
        hooks: StageHooks | None = None,
    ) -> None:
        parts = [
            Boundary(
                keys=function.batch_inputs,
                received=compute.received,
                outputs=compute.outputs,
                gradient_outputs=compute.gradient_outputs,
                gradient_inputs=compute.gradient_inputs,
            )
            if compute is not None and function is not None
            else None
            for compute, function in zip(computes, functions, strict=True)
        ]
        whole = Boundary.joined(list({part: None for part in parts if part is not None}))
        self.keys = whole.keys
        self.is_alike = all(part == whole for part in parts)
        self.received, self.outputs = whole.received, whole.outputs
        self.gradient_outputs, self.gradient_inputs = whole.gradient_outputs, whole.gradient_inputs
        self._places = tuple(None if part is None else Places.within(whole, part) for part in parts)
        self._computes = tuple(computes)
        self._choices = tuple(None if function is None else function.choice for function in functions)
        self._ones: Sequence[frozenset[str]] = ()
        # micro-batches of a mini-batch that is run ahead are numbered behind those of the present one
        self._count = len(computes)
        self._reduces_in = reduces_in
        self._hooks = hooks

    def use_masks(self, units: Sequence[Batch]) -> None:
        """Run each unit from now on as an eager model would run it alone: attention without needless masks."""
        self._ones = [
            frozenset() if choice is None else ones_among(unit, choice.inputs)
            for unit, choice in zip(units, self._choices, strict=True)
        ]

    def _of(self, micro_batch: int) -> AutogradCompute:
        # a backward may run code again (recomputation), as its forward did
        number = micro_batch % self._count
        choice = self._choices[number]
        if choice is not None:
            choice.use(self._ones[number])
        compute = self._computes[number]
        assert compute is not None, "the program has no task for such a unit"
        return compute

    def _back(
        self, run: Callable[..., Sequence[Tensor]], micro_batch: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        """Return the gradients of received tensors that a part of a backward makes of those of outputs."""
        places = self._places[micro_batch % self._count]
        if places is None:
            return run(micro_batch, gradients)
        found = run(micro_batch, [gradients[place] for place in places.gradient_outputs])
        return _spread(found, places.gradient_inputs, len(self.gradient_inputs))

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the outputs of a unit."""
        compute, places = self._of(micro_batch), self._places[micro_batch % self._count]
        if places is None:
            return compute.forward(micro_batch, half, inputs, received)
        made = compute.forward(
            micro_batch,
            half,
            [inputs[place] for place in places.keys],
            [received[place] for place in places.received],
        )
        return _spread(made, places.outputs, len(self.outputs))

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Add up the gradients of parameters and return those of received tensors."""
        if micro_batch == self._reduces_in and self._hooks is not None:
            self._hooks.begin_reduction()
        return self._back(self._of(micro_batch).backward, micro_batch, gradients)

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the gradients of received tensors only."""
        return self._back(self._of(micro_batch).input_gradient, micro_batch, gradients)

    def weight_gradient(self, micro_batch: int) -> None:
        """Add up the gradients of parameters after `input_gradient`."""
        self._of(micro_batch).weight_gradient(micro_batch)

    def clear(self) -> None:
        """Forget all micro-batches."""
        for compute in self._computes:
            if compute is not None:
                compute.clear()

    def start_counting(self, together: HeldTogether | None = None) -> None:
        """Count what is kept; all units have one shape then, that of the sample batch (`MemoryWatch.is_due`)."""
        assert self._computes[0] is not None
        self._computes[0].start_counting(together)

    def stop_counting(self) -> MemoryCounts | None:
        """Count no longer, and return what was counted."""
        assert self._computes[0] is not None
        return self._computes[0].stop_counting()


def _spread(tensors: Sequence[Tensor], places: Sequence[int], count: int) -> Sequence[Tensor]:
    """Return tensors at their places among ``count``; of the others there is nothing, and nobody takes them."""
    found: list[Any] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitCode:
    """A stage's code at one shape of a unit, and what computes with it; None until parameters are bound."""

    prepared: _Prepared
    tensors: Mapping[str, TensorSpec]
    compute: AutogradCompute | None
    pattern: UnitPattern


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompiledUnits(_Compiled):
    """A stage ready to run units of some shapes; ``function`` is that of the first.

    Args:
        own: a mini-batch -> the units of its micro-batches.
        backwards: of the program (`backwards_after`).
    """

    units: UnitCompute
    own: Callable[[Batch], Sequence[Batch]]
    backwards: Mapping[Turn, int]

    def choose_masks(self, batch: Batch) -> None:
        """Look at each unit by itself: another rank's units do not change this one's code."""
        self.units.use_masks(self.own(batch))


def patterns_of(
    program: RankProgram,
    *,
    reduces_early: Collection[int],
    plan: PipelinePlan,
    reference: Reference,
    source: UnitSource,
    transport: Transport | None,
    reduces_each_backward: bool = False,
    **_: Any,
) -> UnitPatterns:
    """Return the patterns of a rank's lanes of units; other arguments of lanes are of no interest here.

    Args:
        program: the rank's.
        reduces_early: its stages that may sum gradients in their last backward.
    """
    return UnitPatterns(
        plan,
        reference,
        source,
        program=program,
        transport=transport,
        reduces_early=reduces_early,
        reduces_each_backward=reduces_each_backward,
    )


class UnitLane(Lane):
    """One stage's pipeline of units on this rank.

    Args:
        plan: of units (`plan_of_units`).
        source: gives code of units that lack inputs, too.
        patterns: shared with the lanes of the rank's other stages; None where there are none.
        reduces_each_backward: as of `make_programs`, of programs for mini-batches with such units.
        lane: as of `Lane`.
    """

    def __init__(
        self,
        *,
        plan: PipelinePlan,
        source: UnitSource,
        patterns: UnitPatterns | None = None,
        reduces_each_backward: bool = False,
        **lane: Any,
    ) -> None:
        super().__init__(plan=plan, source=source, **lane)
        self._patterns = patterns or patterns_of(
            self._program,
            reduces_early=[self.stage_index] if self.reduces_early else [],
            plan=plan,
            reference=self.reference,
            source=source,
            transport=self._transport,
            reduces_each_backward=reduces_each_backward,
        )
        self._backwards: Mapping[Turn, int] = {}
        self._codes: OrderedDict[_Key, _UnitCode] = OrderedDict()
        self._stage: Stage = plan.stages[self.stage_index]
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._first: dict[int, tuple[StageFunction, AutogradCompute]] = {}

    def own_units(self, batch: Batch) -> list[Batch]:
        """Return the units of this rank's micro-batches, in order; of some it may have nothing to run."""
        units = units_of(batch)
        rank, stage = self._program.rank, self._stage
        count = self.plan.num_micro_batches(self.stage_index)
        return [units[stage.samples(micro_batch, rank).first_sample] for micro_batch in range(count)]

    def has_new_shapes(self, batch: Batch) -> bool:
        """Return whether a unit of this mini-batch has a shape that was not met lately; the same on every rank."""
        return any(unit_key(unit) not in self._seen for unit in units_of(batch))

    def note_shapes(self, batch: Batch) -> None:
        """Take the shapes of a mini-batch for known: every rank has code for those of its units."""
        # in the order of units, of which every rank knows all: so all ranks forget the same ones, too
        for unit in units_of(batch):
            key = unit_key(unit)
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_UNIT_SHAPES:
            self._seen.popitem(last=False)

    def learn_patterns(self, batch: Batch) -> None:
        """Learn what there is of units that lack inputs, and lower the mini-batch's programs.

        Collective over all ranks where a set of inputs is new.

        Raises:
            CaptureError: the model cannot do without some inputs; the same on every rank.
        """
        self._patterns.learn(batch)
        self._patterns.program(batch)

    def learn_shapes(self, batch: Batch) -> None:
        """Make the code for this rank's units before any of them runs.

        Raises:
            CaptureError: the model's structure depends on the shape of its inputs.
        """
        for unit in self.own_units(batch):
            if self._is_run(unit):
                self._compute_of(unit, unit_key(unit))

    def unread_parameters(self, batch: Batch) -> frozenset[str]:
        """Return the model's parameters that units with all inputs read, and no unit of a mini-batch does."""
        return self._patterns.unread_parameters(batch)

    def program_of_rank(self, batch: Batch) -> RankProgram:
        """Return what the rank does in a mini-batch for all of its stages."""
        return self._patterns.program(batch)[1].program

    def _is_run(self, unit: Batch) -> bool:
        """Return whether the stage has something to do for a unit."""
        return self.stage_index in self._patterns.of(unit).stages

    def prepare(self, batch: Batch) -> StageFunction:
        """Return the stage's code for a unit like this batch, or like one of a mini-batch that has all inputs."""
        return self._known_code(batch).function

    def _known_code(self, batch: Batch) -> StageCode:
        units = units_of(batch)
        unit = next((unit for unit in units if self._patterns.is_full(unit)), units[0])
        return self._code_of(unit, unit_key(unit)).prepared.code

    def bind(self, module: StageModule, hooks: Any, weights: StageWeights | None = None) -> None:
        """Use these parameters and this optimizer side from now on; code stays as it is."""
        super().bind(module, hooks, weights)
        self._first.clear()
        for key, code in self._codes.items():
            self._codes[key] = dataclasses.replace(code, compute=None)

    def _code_of(self, unit: Batch, key: _Key) -> _UnitCode:
        found = self._codes.get(key)
        if found is None:
            pattern = self._patterns.of(unit)
            code = pattern.named(
                self._source.stage_code(pattern.reference, pattern.plan, self.stage_index, unit, key[0])
            )
            found = _UnitCode(
                prepared=_Prepared(code=code, half=None),
                tensors={name: spec_of_unit(spec) for name, spec in code.tensors.items()},
                compute=None,
                pattern=pattern,
            )
        self._codes[key] = found
        self._codes.move_to_end(key)
        while len(self._codes) > MAX_UNIT_SHAPES:
            self._codes.popitem(last=False)
        return found

    def _compute_of(self, unit: Batch, key: _Key) -> tuple[_UnitCode, AutogradCompute]:
        code = self._code_of(unit, key)
        compute = code.compute
        if compute is None:
            function, pattern = code.prepared.code.function, code.pattern
            self._check_held(function, unit, pattern)
            compute = self._make_compute(
                code.prepared,
                self._hooks,
                step_samples=self.plan.mini_batch,
                gradients=self._patterns.gradients(pattern, code.prepared.code, self.stage_index),
                stage=pattern.plan.stages[self.stage_index],
            )
            # any two shapes may meet in a later mini-batch, where nothing is new: all are like the first one
            first = self._first.setdefault(pattern.index, (function, compute))
            self._check_alike(*first, function, compute)
            code = self._codes[key] = dataclasses.replace(code, compute=compute)
        return code, compute

    def _executor_for(self, batch: Batch) -> _Compiled:
        patterns, program = self._patterns.program(batch)
        shapes = self._shape_of(batch)
        key = (patterns, *shapes)
        found = self._executors.get(key)
        if found is None:
            found = self._executors[key] = self._compile_units(self.own_units(batch), shapes, program)
        self._executors.move_to_end(key)
        while len(self._executors) > MAX_MINI_BATCHES:
            self._executors.popitem(last=False)
        assert isinstance(found, _CompiledUnits)
        self._backwards = found.backwards
        return found

    def _shape_of(self, batch: Batch) -> _Key:
        return tuple(unit_key(unit) for unit in self.own_units(batch))

    def _compile_units(
        self, own: Sequence[Batch], shapes: Sequence[_Key], of_patterns: PatternProgram
    ) -> _CompiledUnits:
        found = [
            self._compute_of(unit, key) if self._is_run(unit) else None
            for unit, key in zip(own, shapes, strict=True)
        ]
        codes = [None if pair is None else pair[0] for pair in found]
        functions = [None if code is None else code.prepared.code.function for code in codes]
        units = UnitCompute(
            [None if pair is None else pair[1] for pair in found],
            functions,
            reduces_in=of_patterns.reduces_in[self.stage_index],
            hooks=self._hooks,
        )
        # of the other units this rank has no tensors, and no messages; what a unit lacks of all is of no elements
        specs: list[Mapping[str, TensorSpec]] = [{}] * self.plan.mini_batch
        lacking = {name: _nothing(name) for name in (*units.received, *units.outputs)}
        for micro_batch, code in enumerate(codes):
            if code is not None:
                tensors = code.tensors if units.is_alike else {**lacking, **code.tensors}
                specs[self._stage.samples(micro_batch, self._program.rank).first_sample] = tensors
        # a rank that runs none of the units reduces and steps with the others
        some = next((code for code in codes if code is not None), None)
        first = some.prepared.code if some is not None else _NO_CODE
        program = of_patterns.parts[self.stage_index]
        return _CompiledUnits(
            executor=self._make_executor(
                first, program, units, self._hooks, specs=specs, plan=of_patterns.plan
            ),
            compute=units,
            function=first.function,
            half=None,
            inputs=first.inputs,
            code=first,
            specs=specs,
            units=units,
            own=self.own_units,
            backwards=backwards_after(program),
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

    def _reduces_in(self) -> int | None:
        # which backward is the last one differs from mini-batch to mini-batch: `UnitCompute` knows
        return None

    def _next_backward(self) -> NextBackward:
        return lambda turn: self._backwards.get(turn)

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
        # what is received may come in another order (`UnitCompute`); what is made has that of the plan's edges
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

    def _loss_share(self, step_samples: int) -> float:
        return 1.0 if self.sums_losses else 1.0 / step_samples

    def _rows_of(self, batch: Batch, compiled: _Compiled) -> InputRows:
        keys = compiled.units.keys if isinstance(compiled, _CompiledUnits) else compiled.function.batch_inputs
        units = [unit if self._is_run(unit) else {} for unit in self.own_units(batch)]
        return self._input_link.bring_units(units, keys, dtype=self._dtype)


_NO_CODE = StageCode(
    function=StageFunction(
        call=lambda: (), tensors=(), constants=(), batch_inputs=(), received=(), outputs=(), code=""
    ),
    tensors={},
    inputs={},
    loss=None,
    outputs={},
)
"""Of a rank that has nothing to run."""


def _nothing(name: str) -> TensorSpec:
    """Return a tensor of no elements: what a unit without a branch has of its tensors."""
    return TensorSpec(name=name, dtype="float32", shape=(0,), num_samples=1, layout=UNIT, requires_grad=False)


class AheadUnitLane(AheadLane, UnitLane):
    """This rank's pipeline of units, whose frozen branch runs those of the next mini-batch.

    Mini-batches with units that lack inputs have programs of their own, and run whole.
    """

    def may_be_cut(self, batch: Batch) -> bool:
        """Return whether all units have all inputs."""
        return all(self._patterns.is_full(unit) for unit in units_of(batch))


class WindowUnitLane(WindowLane, UnitLane):
    """This rank's pipeline of units that is never drained but on request: weights are kept for one code at a time.

    So all units that are in flight together are of one shape, and have all inputs.
    """

    def learn_patterns(self, batch: Batch) -> None:
        """Refuse units that lack inputs: the tasks of windows are those of units that have all of them.

        Raises:
            ConfigError: a unit does; the same on every rank.
        """
        if not all(self._patterns.is_full(unit) for unit in units_of(batch)):
            raise ConfigError(
                "a unit lacks inputs that the sample batch has; in mode async the tasks of all units are the same: "
                'give it these keys, or set mode to "sync"'
            )

    def _executor_for(self, batch: Batch) -> _Compiled:
        self.learn_patterns(batch)  # asked before a mini-batch is run, too: must the pipeline be drained?
        first, *others = (unit_key(unit) for unit in units_of(batch))
        if any(key != first for key in others):
            raise ConfigError(
                "units of one mini-batch differ in shapes or in values that the model's Python reads; in mode async "
                'those in flight together must not: give every mini-batch units of one kind, or set mode to "sync"'
            )
        found = self._executors.get((first,))
        if found is None:
            code = self._code_of(units_of(batch)[0], first)
            found = self._executors[first,] = self._compile(code.prepared)
        self._executors.move_to_end((first,))
        while len(self._executors) > MAX_MINI_BATCHES:
            self._executors.popitem(last=False)
        return found
