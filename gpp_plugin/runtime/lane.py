"""One stage's part of a pipeline on a rank: its parameters, and executors compiled for each shape.

A `Lane` is the pipeline in one mode, training or evaluation: a graph of blocks, the plan on it, what this rank does for
the stage, and a bounded cache of executors, one for each shape of the batches. A `StageSource` gives the stage's code
at a shape. The stage's parameters are shared by both lanes. A rank has a lane for each of its stages, which its
`RankLane` runs together. Nothing here depends on DeepSpeed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.errors import CaptureError, PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.runtime.batches import Batch, ones_among, shape_key
from gpp_plugin.runtime.compute import (
    AutogradCompute,
    BoundaryGradients,
    CountedCompute,
    HalfForwards,
    StageCompute,
    StageHooks,
    StageWeights,
    boundary_gradients,
)
from gpp_plugin.runtime.executor import MiniBatchResult, StageExecutor
from gpp_plugin.runtime.input_rows import InputLink, InputRows
from gpp_plugin.runtime.memory.counting import HeldTogether
from gpp_plugin.runtime.memory.keeper import NextBackward, StageKeeper, backwards_after
from gpp_plugin.runtime.memory.module_policies import KnownSaves, make_keeper
from gpp_plugin.runtime.memory.swap import SwapLink
from gpp_plugin.runtime.messages.mailbox import HandOvers, WindowPlace
from gpp_plugin.runtime.messages.routes import Routes
from gpp_plugin.runtime.messages.transport import Channel, Transport
from gpp_plugin.runtime.messages.wires import BoundarySpecs
from gpp_plugin.runtime.split import BackwardSplitter
from gpp_plugin.runtime.stage_module import StageFunction, StageModule
from gpp_plugin.runtime.stage_source import Reference, StageCode, StageForwards, StageSource
from gpp_plugin.runtime.weight_versions import WeightVersions
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.build_graph import Presence
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.gathers import last_backward
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.gpipe import forward_only_stages

logger = logging.getLogger(__name__)

MAX_SHAPES = 16


def tied_stages(plan: PipelinePlan, reference: Reference) -> dict[str, tuple[int, ...]]:
    """Return the trainable parameters used on several stages, parameter name -> stage indices."""
    trainable = {p.name for p in reference.analysis.op_graph.parameters if p.requires_grad}
    stage_of = {block: index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    shared = {}
    for name, blocks in reference.block_graph.tied.items():
        stages = tuple(sorted({stage_of[block] for block in blocks}))
        if len(stages) > 1 and name in trainable:
            shared[name] = stages
    return shared


def held_tensors(plan: PipelinePlan, reference: Reference) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters and buffers each stage holds.

    What no block reads (a head that training does not use) must still be in exports: it rests on the last
    stage.
    """
    blocks = {block.name: block for block in reference.block_graph.blocks}
    used = {name for block in blocks.values() for name in block.parameters}
    unused = [
        p.name
        for p in reference.analysis.op_graph.parameters
        if p.name not in used and (p.is_persistent or not p.is_buffer)
    ]
    held = [[name for block in stage.blocks for name in blocks[block].parameters] for stage in plan.stages]
    held[-1] += unused
    return tuple(tuple(dict.fromkeys(names)) for names in held)


def make_programs(
    plan: PipelinePlan,
    reference: Reference,
    *,
    reduce_each_backward: bool = False,
    edges: Sequence[StageEdge] | None = None,
    presence: Presence | None = None,
) -> tuple[RankProgram, ...]:
    """Schedule, lower and validate ``plan`` in the mode of ``reference``: the programs of all ranks.

    Args:
        reduce_each_backward: as for `lower_schedules`.
        edges: the plan's, and those that only units without a branch have; None: the plan's.
        presence: what there is of each unit where some lack branches.

    Raises:
        PlanError: a stage whose operators couple samples is to run forwards in halves.
        ScheduleError: the programs would deadlock, reorder messages or exceed their in-flight counts.
    """
    lowered = plan if edges is None else dataclasses.replace(plan, edges=tuple(edges))
    if not reference.analysis.is_training:
        schedules = forward_schedules(plan)
        programs = lower_schedules(lowered, schedules, training=False, presence=presence)
    else:
        _refuse_coupled_halves(plan, reference.block_graph)
        frozen = forward_only_stages(plan)
        tied = {stage for stages in tied_stages(plan, reference).values() for stage in stages}
        schedules = build_schedules(plan, forward_only_stages=frozen)
        programs = lower_schedules(
            lowered,
            schedules,
            tied_stages=tuple(sorted(tied)),
            forward_only_stages=frozen,
            reduce_each_backward=reduce_each_backward,
            presence=presence,
        )
    validate_programs(lowered, schedules, programs, presence=presence)
    return programs


def _refuse_coupled_halves(plan: PipelinePlan, block_graph: BlockGraph) -> None:
    coupled = {block.name for block in block_graph.blocks if block.is_coupled}
    for stage in plan.stages:
        mixing = sorted(coupled & set(stage.blocks))
        if stage.num_sliced and mixing:
            raise PlanError(
                f"stage {stage.name!r}: num_sliced is {stage.num_sliced}, but block {mixing[0]!r} mixes samples and "
                f"computes whole loss units of {plan.loss_unit}; set num_sliced to 0"
            )


def channels_of(programs: Sequence[RankProgram]) -> set[Channel]:
    """Return every channel that the programs of all ranks use; what a rank hands over to itself uses none."""
    return {
        m.channel
        for program in programs
        for m in program.messages(InstructionKind.SEND)
        if not m.is_hand_over
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A stage's code at its local batch, and at half of it where the program runs forwards in halves."""

    code: StageCode
    half: StageFunction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """A stage ready to run at one shape.

    Args:
        half: ``function`` at half the samples, where forwards run in halves.
        inputs: the model's inputs at this shape, by batch key.
        code: what all executors of the shape run, and ``specs`` the boundary tensors that it makes and reads.
        parts: executors of programs beside that of the whole mini-batch (`AheadLane`).
    """

    executor: StageExecutor
    compute: CountedCompute
    function: StageFunction
    half: StageFunction | None
    inputs: Mapping[str, TensorSpec]
    code: StageCode
    specs: BoundarySpecs
    parts: OrderedDict[Any, StageExecutor] = field(default_factory=OrderedDict)

    def choose_masks(self, batch: Batch) -> None:
        """Run the forwards from now on as eager models would on this batch: attention without needless masks.

        The whole mini-batch decides, so that all ranks of a stage run the same code; a rank has the inputs that its
        stage's masks are made of.
        """
        for function in (self.function, self.half):
            if function is not None and function.choice is not None:
                function.choice.use(ones_among(batch, function.choice.inputs))


@dataclass(slots=True, kw_only=True)
class ReadyStage:
    """What runs one mini-batch of a stage, and afterwards what it kept for backward if that was counted."""

    executor: StageExecutor
    inputs: InputRows
    counts: MemoryCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownRoutes:
    """The routes of a program at the shapes it was last compiled for; those at others follow from them."""

    program: RankProgram
    window: WindowPlace | None
    routes: Routes


class Lane:
    """One stage's pipeline on this rank in one mode.

    Args:
        source: gives the stage's code at each shape.
        reference: what is known of the model in this mode, and its blocks.
        plan: on ``reference.block_graph``.
        program: what this rank does for the stage (`RankProgram.of_stage`).
        hand_overs: shared with the lanes of the rank's other stages; None where there are none.
        forwards: runs the stage in place of its code; None: its code does.
        reduces_early: the stage may sum gradients in its last backward (`schedule.early_reductions`).
        sums_losses: the loss of a mini-batch is the sum of its units' losses, each divided by what it is to be divided
            by already; else their mean.
        module: the stage's parameters; None until `bind`.
    """

    def __init__(
        self,
        *,
        source: StageSource,
        reference: Reference,
        plan: PipelinePlan,
        program: RankProgram,
        transport: Transport | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        reduces_early: bool = False,
        sums_losses: bool = False,
        hand_overs: HandOvers | None = None,
        forwards: StageForwards | None = None,
    ) -> None:
        self._forwards = forwards
        self.plan = plan
        self.sums_losses = sums_losses
        self.reduces_early = reduces_early
        self.reference = reference
        self.stage_index = program.stage
        self._source = source
        self._program = program
        self._transport = transport
        self.hand_overs = hand_overs or HandOvers()
        self._device = device
        self._dtype = dtype
        self._tensors: Mapping[str, Tensor] = {}
        self._hooks: StageHooks | None = None
        self._weights: StageWeights | None = None
        self._executors: OrderedDict[tuple[Any, ...], _Compiled] = OrderedDict()
        self._routes: OrderedDict[int, _KnownRoutes] = OrderedDict()
        self._prepared: tuple[tuple[Any, ...], _Prepared] | None = None
        self._has_warned = False
        self._host_link: SwapLink | None = None
        self._known_saves = KnownSaves()
        self._splitter = BackwardSplitter()
        self._input_link = InputLink(device)

    @property
    def is_training(self) -> bool:
        """Return whether the lane was captured in training mode."""
        return self.reference.analysis.is_training

    def prepare(self, batch: Batch) -> StageFunction:
        """Return the stage's code for batches like this one, before parameters are bound."""
        key = shape_key(batch, count_samples(batch))
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = (key, self._prepare(batch))
        return self._prepared[1].code.function

    def code_and_weights(self, batch: Batch) -> tuple[StageCode, list[Tensor]]:
        """Return the stage's code for batches like this one, and the weights that it takes, which are bound."""
        self.prepare(batch)
        code = self._known_code(batch)
        return code, [self._tensors[name] for name in code.function.tensors]

    def gradient_inputs(self, code: StageCode) -> tuple[str, ...]:
        """Return which of the tensors that a stage's code receives take a gradient."""
        return boundary_gradients(self._program, self.plan, code.tensors).inputs

    def _known_code(self, batch: Batch) -> StageCode:
        assert self._prepared is not None, "it was prepared"
        return self._prepared[1].code

    def bind(
        self, module: StageModule, hooks: StageHooks | None, weights: StageWeights | None = None
    ) -> None:
        """Use these parameters and this optimizer side from now on; drops compiled executors.

        Args:
            weights: gathers the parameters where the rank holds a part of them; None: it has them whole.
        """
        self._tensors = module.named_tensors()
        self._hooks = hooks
        self._weights = weights
        self._executors.clear()

    @property
    def has_peaked(self) -> bool:
        """Return whether the mini-batches run since counting began held the most that any hold."""
        return True

    def run(self, batch: Batch, *, record: bool = False, count: bool = False) -> MiniBatchResult:
        """Run one mini-batch of ``plan.mini_batch`` samples, where the rank holds no other stage.

        Args:
            record: whether to note the time of every task and message.
            count: whether to count what is kept for backward (a few microseconds for each saved tensor).
        """
        with self.ready(batch, count=count) as ready:
            result = ready.executor.run(ready.inputs, record=record)
        self.note_counts(result, ready.counts)
        return result

    @contextlib.contextmanager
    def ready(
        self, batch: Batch, *, count: bool = False, held: HeldTogether | None = None
    ) -> Iterator[ReadyStage]:
        """Get the stage ready to run one mini-batch while the context lasts; only this rank's rows are read.

        Args:
            count: whether to count what is kept for backward, together with other stages in ``held``.
        """
        compiled = self._executor_for(batch)
        compiled.choose_masks(batch)
        with self._rows_of(batch, compiled) as inputs:
            ready = ReadyStage(executor=compiled.executor, inputs=inputs)
            yield from self._counted(ready, compiled, count, held)

    def _counted(
        self, ready: ReadyStage, compiled: _Compiled, count: bool, held: HeldTogether | None
    ) -> Iterator[ReadyStage]:
        """Yield what is ready; count meanwhile, where it is asked for, what the stage keeps."""
        if not count:
            yield ready
            return
        compiled.compute.start_counting(held)
        try:
            yield ready
        finally:
            ready.counts = compiled.compute.stop_counting()

    def note_counts(self, result: MiniBatchResult, counts: MemoryCounts | None) -> None:
        """Put into the result of a mini-batch what the stage kept for backward, if that was counted."""
        if counts is not None:
            result.memories[self.stage_index] = counts
            result.most_bytes = counts.most_bytes

    def _rows_of(self, batch: Batch, compiled: _Compiled) -> InputRows:
        """Return the rows of the batch that this rank reads in each micro-batch."""
        return self._input_link.slice_batch(
            batch,
            compiled.function.batch_inputs,
            stage=self.plan.stages[self.stage_index],
            rank=self._program.rank,
            num_micro_batches=self.plan.num_micro_batches(self.stage_index),
            specs=compiled.inputs,
            dtype=self._dtype,
        )

    def _executor_for(self, batch: Batch) -> _Compiled:
        # Least recently used first: a hit moves to the end, and a new shape beyond `MAX_SHAPES` takes the first one's
        # place.
        assert not self.reference.analysis.takes_whole_units, (
            "whole units have a lane that knows their readings"
        )
        key = self._shape_of(batch)
        found = self._executors.get(key)
        if found is not None:
            self._executors.move_to_end(key)
            return found
        if self._prepared is not None and self._prepared[0] == key:
            prepared = self._prepared[1]
        else:
            prepared = self._prepare(batch)
        if len(self._executors) >= MAX_SHAPES:
            self._executors.popitem(last=False)
            if not prepared.code.is_for_lengths and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "more than %d input shapes seen; each new one is captured again (about a second). "
                    "Pad sequences to a few lengths (bucketing) to avoid it",
                    MAX_SHAPES,
                )
        self._prepared = None
        self._executors[key] = self._compile(prepared)
        return self._executors[key]

    def _shape_of(self, batch: Batch) -> tuple[Any, ...]:
        """Return what an executor for a mini-batch depends on."""
        return shape_key(batch, self.plan.mini_batch)

    def _prepare(self, batch: Batch) -> _Prepared:
        local = self.plan.stages[self.stage_index].local_batch_size
        code = self._code_at(batch, local)
        half = None
        if any(i.task is not None and i.task.half is not None for i in self._program.instructions):
            half = self._code_at(batch, local // 2).function
            self._check_half(code.function, half)
        return _Prepared(code=code, half=half)

    def _code_at(self, batch: Batch, num_samples: int) -> StageCode:
        return self._source.stage_code(self.reference, self.plan, self.stage_index, batch, num_samples)

    def _check_half(self, whole: StageFunction, half: StageFunction) -> None:
        for what in ("tensors", "batch_inputs", "received", "outputs"):
            if getattr(whole, what) != getattr(half, what):
                stage = self.plan.stages[self.stage_index]
                raise CaptureError(
                    f"stage {stage.name}: its {what} differ between {stage.local_batch_size} samples and half of "
                    "them; the model's structure depends on the number of samples: set num_sliced to 0"
                )

    def _compile(self, prepared: _Prepared) -> _Compiled:
        code = prepared.code
        compute = self._make_compute(prepared, self._hooks, step_samples=self.plan.mini_batch)
        executor = self._make_executor(code, self._program, compute, self._hooks)
        return _Compiled(
            executor=executor,
            compute=compute,
            function=code.function,
            half=prepared.half,
            inputs=code.inputs,
            code=code,
            specs=code.tensors,
        )

    def _make_compute(
        self,
        prepared: _Prepared,
        hooks: StageHooks | None,
        *,
        step_samples: int,
        versions: WeightVersions | None = None,
        gradients: BoundaryGradients | None = None,
        stage: Stage | None = None,
    ) -> AutogradCompute:
        """Return what does the stage's tasks; the loss of a step is the mean over ``step_samples``.

        Args:
            gradients: those that cross the boundary; None: as the program has it.
            stage: as the code has it; None: the plan's.
        """
        code = prepared.code
        gradients = gradients or boundary_gradients(self._program, self.plan, code.tensors)
        is_trained = any(
            i.task is not None and i.task.kind is not TaskKind.FORWARD for i in self._program.instructions
        )
        parameters = [self._tensors[name] for name in code.function.tensors]
        prepared = self._with_forwards(prepared, parameters, is_trained)
        return AutogradCompute(
            function=prepared.code.function,
            parameters=parameters,
            gradients=gradients,
            hooks=hooks if is_trained else None,
            loss=code.loss,
            loss_share=self._loss_share(step_samples),
            halves=_halves(prepared),
            keeper=self._make_keeper(prepared, gradients, stage) if is_trained else None,
            versions=versions,
            reduces_in=self._reduces_in(),
            splitter=self._splitter,
            weights=self._weights,
        )

    def _with_forwards(
        self, prepared: _Prepared, parameters: Sequence[Tensor], is_trained: bool
    ) -> _Prepared:
        """Return the stage's code with what runs it instead, if anything does."""
        forwards, stage = self._forwards, self.plan.stages[self.stage_index]
        if forwards is None:
            return prepared

        def running(function: StageFunction) -> StageFunction:
            if is_trained:
                call = forwards.trained(stage, function, prepared.code)
            else:
                call = forwards.forward(stage.name, function, parameters)
            return function if call is None else dataclasses.replace(function, call=call)

        return _Prepared(
            code=dataclasses.replace(prepared.code, function=running(prepared.code.function)),
            half=None if prepared.half is None else running(prepared.half),
        )

    def _reduces_in(self) -> int | None:
        """Return the micro-batch in whose backward gradients may be summed; None: in none."""
        return last_backward(self._program) if self.reduces_early else None

    def _loss_share(self, step_samples: int) -> float:
        """Return the seed of a loss: what the loss of a step grows by where it grows by one."""
        return 1.0 if self.sums_losses else self.plan.stages[self.stage_index].local_batch_size / step_samples

    def _make_keeper(
        self, prepared: _Prepared, gradients: BoundaryGradients, stage: Stage | None
    ) -> StageKeeper | None:
        """Return what executes the stage's memory plan, if it has one."""
        stage, code = stage or self.plan.stages[self.stage_index], prepared.code
        if stage.memory is None:
            return None
        if self._host_link is None:
            self._host_link = SwapLink(self._device)
        return make_keeper(
            stage=stage.name,
            plan=stage.memory,
            blocks=stage.blocks,
            operators=code.operators,
            whole=code.function,
            half=prepared.half,
            gradient_inputs=gradients.inputs,
            link=self._host_link,
            next_backward=self._next_backward(),
            known=self._known_saves,
        )

    def _next_backward(self) -> NextBackward:
        return backwards_after(self._program).get

    def _make_executor(
        self,
        code: StageCode,
        program: RankProgram,
        compute: StageCompute,
        hooks: StageHooks | None,
        window: WindowPlace | None = None,
        next_specs: BoundarySpecs | None = None,
        specs: BoundarySpecs | None = None,
        plan: PipelinePlan | None = None,
    ) -> StageExecutor:
        """Return what runs a program.

        Args:
            next_specs: of what is received for the mini-batch behind this one.
            specs: of units of unlike shapes; None: those of ``code`` for all samples.
            plan: that the program is of, where some units have edges of their own; None: the lane's.
        """
        # at other shapes the same messages are made up of the same rows; programs are told apart by identity, and held
        known = self._routes.get(id(program))
        executor = StageExecutor(
            plan=plan or self.plan,
            program=program,
            compute=compute,
            specs=code.tensors if specs is None else specs,
            transport=self._transport,
            hooks=hooks,
            device=self._device,
            loss=code.loss,
            named_outputs=code.outputs,
            is_training=self.is_training,
            window=window,
            next_specs=next_specs,
            known=known.routes if known is not None and known.window == window else None,
            hand_overs=self.hand_overs,
            weights=self._weights,
        )
        self._routes[id(program)] = _KnownRoutes(program=program, window=window, routes=executor.routes)
        if len(self._routes) > MAX_SHAPES:
            self._routes.popitem(last=False)
        return executor


def _halves(prepared: _Prepared) -> HalfForwards | None:
    if prepared.half is None:
        return None
    code = prepared.code
    return HalfForwards(
        function=prepared.half,
        input_axes=tuple(_batch_axis(code.inputs[key]) for key in prepared.half.batch_inputs),
        axes={name: _batch_axis(spec) for name, spec in code.tensors.items()},
    )


def _batch_axis(spec: TensorSpec) -> int:
    return spec.layout.axis if spec.layout.kind is LayoutKind.BATCH else -1
