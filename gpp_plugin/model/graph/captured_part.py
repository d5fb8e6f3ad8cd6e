"""A captured part: an ordinary module, traced and cut into stages, as a whole model or one part of a stage graph.

A plain model is the part that is alone: its operators, blocks and tensors are known under the module's own names.
In a larger graph they get names of that graph: an output the user's name of it ("vision.hidden"), another tensor
"vision:<operator>", a block, a parameter or a buffer the module's name of it behind the stage's ("vision.layers.0").

Source: this project
Tests: tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.captured_graph import CapturedGraph, LengthCapture
from gpp_plugin.capture.coarsen import coarsen
from gpp_plugin.capture.export import capture_model
from gpp_plugin.capture.mask_values import repeated_operands
from gpp_plugin.capture.recapture import read_values, recapture, recapture_for_lengths
from gpp_plugin.capture.tracing.sample_batches import WholeUnit, count_samples, resize_batch, with_records
from gpp_plugin.capture.tracing.traced import Exported
from gpp_plugin.capture.tracing.values import Recording
from gpp_plugin.errors import CaptureError
from gpp_plugin.integrations.huggingface.model_inputs import has_prepared_inputs
from gpp_plugin.ir.analysis import (
    PREPARED,
    Analysis,
    CarriedState,
    context_of_stage,
    regions_of_stage,
    sequence_of_stage,
)
from gpp_plugin.ir.block_graph import BlockGraph, OpGraph, Parameter, SavedTensor
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.model.graph.describe_graph import PartView, parameter_names, traced_names, view_part
from gpp_plugin.model.graph.module_trial import IDLE, Shapes, named_outputs
from gpp_plugin.model.graph.part_lengths import (
    CodeForLengths,
    Lengths,
    StageAtLengths,
    differing_axes,
    kind_of,
    shapes_of,
)
from gpp_plugin.model.graph.resolve import GraphStage, resolve_module
from gpp_plugin.model.graph.stage_graph import LOSS
from gpp_plugin.model.graph.user_module import describe_tensors
from gpp_plugin.runtime.batches import Batch, shape_key
from gpp_plugin.runtime.context_ranks import cut_graph
from gpp_plugin.runtime.memory.segments import StageOperators
from gpp_plugin.runtime.shard_graph import shard_graph
from gpp_plugin.runtime.stage_module import Reference, StageCode, StageFunction, build_stage_function
from gpp_plugin.runtime.tensor_ranks import TensorLinks

MAX_READINGS = 64
"""Shapes, and readings of a shape, whose guards are stored."""


def owner_of_block(block: str) -> str:
    """Return the stage, as the user gave it, that a block of a graph of several stages is of."""
    return block.partition(".")[0].partition("#")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What a stage of a plan computes of a capture.

    Args:
        nodes: block -> its operators; ``made``: what the graph calls each of them -> what the capture does.
        outputs: as of the stage's function; ``named`` and ``loss`` as of `StageCode`.
    """

    nodes: Mapping[str, tuple[str, ...]]
    made: Mapping[str, str]
    outputs: tuple[str, ...]
    named: Mapping[str, str]
    loss: str | None


@dataclass(slots=True, kw_only=True)
class _OpenRecording:
    """What Python read of a batch, and along which axes other batches may differ and be read by the same operations.

    Args:
        shapes: of the batch; ``axes``: batch key -> those axes.
    """

    recording: Recording
    shapes: Mapping[str, tuple[int, ...]]
    axes: dict[str, set[int]] = field(default_factory=dict)

    def open(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take note of a batch of which the same operations made the same readings."""
        for key, axes in differing_axes(self.shapes, shapes).items():
            self.axes.setdefault(key, set()).update(axes)

    def covers(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a batch differs along such axes only."""
        differing = differing_axes(self.shapes, shapes)
        return all(self.axes.get(key, set()).issuperset(axes) for key, axes in differing.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContext:
    """What a part of a larger graph must know to make code: what tracing it found out, and the graph's tensors."""

    analysis: Analysis
    shapes: Shapes


class CapturedPart:
    """Traces a stage's module; nothing of it runs but what its generated code does.

    One that is alone is a `StageSource` and needs no context.

    Args:
        dtype: what floating parameters become before tracing; None leaves them.
        granularity: size of the blocks.
        called: "stage.parameter" of a parameter tied to another stage's -> what it is called on every stage.
        eager: its modules that run as they are, as of `capture_model`.
        links: the tensor ranks of this rank's stages; None where no stage is shared out.
    """

    def __init__(
        self,
        stage: GraphStage,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        granularity: str,
        called: Mapping[str, str],
        eager: Sequence[str] = (),
        links: TensorLinks | None = None,
    ) -> None:
        assert isinstance(stage.spec.make, nn.Module), "what is captured is a module"
        self.stage = stage
        self.model: nn.Module = stage.spec.make
        self._dtype = dtype
        self.device = device
        self.granularity = granularity
        self._called = called
        self._eager = tuple(eager)
        self._links = links
        self._carried: tuple[CarriedState, ...] = ()
        self._capture: tuple[tuple[object, ...], CapturedGraph] | None = None
        self._trials: dict[tuple[object, ...], Exported] = {}
        self._recordings: OrderedDict[tuple[object, ...], list[Recording]] = OrderedDict()
        self._open_recordings: OrderedDict[tuple[object, ...], list[_OpenRecording]] = OrderedDict()
        self._lengths = CodeForLengths(type(self.model).__name__)
        self._outputs_at = CodeForLengths(type(self.model).__name__)
        self._for_lengths: tuple[tuple[object, ...], LengthCapture] | None = None
        self._analyses: OrderedDict[tuple[object, ...], Analysis] = OrderedDict()

    def clone(self) -> CapturedPart:
        """Return the part with what it has captured, to try stages of it, which leaves nothing behind in this one."""
        copied = CapturedPart(
            self.stage,
            dtype=self._dtype,
            device=self.device,
            granularity=self.granularity,
            called=self._called,
            eager=self._eager,
            links=self._links,
        )
        copied._capture, copied._trials = self._capture, dict(self._trials)
        return copied

    @property
    def called(self) -> dict[str, str]:
        """Return its parameters that other stages have too, as "<stage>.<name>" -> what the graph calls them."""
        own = self.stage.prefix
        return {
            p.name: self._called[name]
            for p in self.tensors()
            for name in (p.name, *p.aliases)
            if name in self._called and name.startswith(own)
        }

    def tensors(self) -> tuple[Parameter, ...]:
        """Return its parameters and buffers under "<stage>.<name>", as they will train."""
        dtype = str(self._dtype).removeprefix("torch.")
        return tuple(
            p
            if p.is_buffer or not p.dtype.startswith(("float", "bfloat"))
            else dataclasses.replace(p, dtype=dtype)
            for p in describe_tensors(self.stage.name, self.model)
        )

    # ---- tracing -------------------------------------------------------------------------------

    def capture(self, arguments: Batch, *, is_training: bool) -> CapturedGraph:
        """Trace the module for `arguments`; in training, keep that for the stage that runs at these shapes first.

        Raises:
            CaptureError: it cannot be exported; names module, line and remedy.
        """
        names = traced_names(self.stage)
        try:
            captured = capture_model(
                self.model,
                arguments,
                training=is_training,
                outputs=self._outputs(),
                received={
                    names[keyword]: arguments[names[keyword]].requires_grad
                    for keyword, _ in self.stage.received
                },
                dtype=self._dtype,
                device=self.device,
                call=self.call,
                eager=self._eager,
                carried=self._carried,
            )
        except CaptureError as error:
            if self.stage.is_alone:
                raise
            raise CaptureError(f"stage {self.stage.name!r}: {error}") from error
        if self.stage.is_alone and has_prepared_inputs(self.model, arguments):
            means = (PREPARED, *captured.analysis.means)
            captured = dataclasses.replace(
                captured, analysis=dataclasses.replace(captured.analysis, means=means)
            )
        if is_training:
            self._carried = captured.analysis.carried
            self._capture = (_shapes(arguments), captured)
            # what other stages make was traced as rows of one tensor there, and is a tensor of its own here
            trials = list(captured.trials.items()) if not self.stage.received else []
            self._trials = {_shapes(resize_batch(arguments, count)): trial for count, trial in trials}
            captured.trials.clear()  # they go with their use
        self._outputs_at.learn(arguments, count_samples(arguments), (captured.analysis,))
        return captured

    def capture_again(self, analysis: Analysis, arguments: Batch) -> CapturedGraph:
        """Return the module traced at another shape; the stored capture, where it is of that shape."""
        return self._known(analysis, arguments) or recapture(
            self.model,
            analysis,
            arguments,
            device=self.device,
            call=self.call,
            granularity=self.granularity,
            exported=self._trial(analysis, arguments),
        )

    def _trial(self, analysis: Analysis, arguments: Batch) -> Exported | None:
        """Return the export of these shapes that the analysis was made of, if there is one; no second time."""
        if self._capture is None or self._capture[1].analysis != analysis:
            return None
        return self._trials.pop(_shapes(arguments), None)

    def _known(self, analysis: Analysis, arguments: Batch) -> CapturedGraph | None:
        capture = self._capture
        if capture is None or capture[0] != _shapes(arguments) or capture[1].analysis != analysis:
            return None
        recording = capture[1].recording
        if recording is None:
            return capture[1]
        readings = arguments.readings if isinstance(arguments, WholeUnit) else None
        is_same = recording.matches(arguments) if readings is None else recording.values == readings
        return capture[1] if is_same else None

    def readings(self, analysis: Analysis, unit: WholeUnit) -> tuple[Any, ...] | None:
        """Return what the module's Python reads of a loss unit; None where it reads nothing.

        Runs what led to the readings of earlier units of the same shapes, some operations on integers; where none
        of them had the same readings, the module on fake tensors.
        """
        if not analysis.reads_values:
            return None
        arguments = self.arguments(unit, {}, unit.num_samples)
        key = (analysis.is_training, *_shapes(arguments))
        known = self._recordings.setdefault(key, [])
        self._recordings.move_to_end(key)
        for recording in known:
            if recording.matches(arguments):
                return recording.values
        kind, shapes = (analysis.is_training, *kind_of(arguments)), shapes_of(arguments)
        of_kind = self._open_recordings.setdefault(kind, [])
        for met in of_kind:
            if met.covers(shapes) and met.recording.holds_for(arguments):
                return met.recording.values
        found = read_values(self.model, analysis, arguments, device=self.device, call=self.call)
        known.append(found)
        # at a second length the same operations led to the same readings: so they do at others
        alike = next((met for met in of_kind if met.recording.is_made_as(found)), None)
        if alike is None:
            of_kind.append(_OpenRecording(recording=found, shapes=shapes))
        else:
            alike.open(shapes)
        for readings in (known, of_kind):
            del readings[:-MAX_READINGS]
        while len(self._recordings) > MAX_READINGS:
            self._recordings.popitem(last=False)
        return found.values

    def _outputs(self) -> list[str]:
        """Return what is traced beside the loss: what others may read, or, with no others, what is requested."""
        if self.stage.is_alone:
            return list(self.stage.requested)
        return [node for _, node in self.stage.nodes if (node,) != self.stage.losses]

    def call(self, module: nn.Module, by_name: Mapping[str, Any]) -> Any:
        """Call the module with what is traced, and return its loss and its outputs by their names in the graph."""
        arguments = {keyword: by_name[name] for keyword, name in traced_names(self.stage).items()}
        arguments |= {keyword: by_name[keyword] for keyword, _ in self.stage.constants}
        returned: Any = module(**with_records(arguments))
        if not self.stage.nodes:
            return returned
        if not isinstance(returned, (Tensor, Mapping, tuple, list)):
            returned = {field: getattr(returned, field, None) for field, _ in self.stage.nodes}
        found = named_outputs(self.stage.name, self.stage.nodes, returned)
        if self.stage.losses:
            first, *others = (found[node] for node in self.stage.losses)
            found[LOSS] = sum(others, start=first)  # one loss is traced as it is: no sum with a zero
        return found

    def arguments(self, batch: Batch, shapes: Mapping[str, TensorSpec], num_samples: int) -> dict[str, Any]:
        """Return what is traced at ``num_samples`` samples: rows of the batch, constants, empty received tensors.

        Args:
            shapes: of what other stages make.
        """
        rows = resize_batch(batch, num_samples)
        names = traced_names(self.stage)
        found: dict[str, Any] = {key: rows[key] for _, key in self.stage.batch_inputs}
        for keyword, node in self.stage.received:
            spec = shapes[node]
            empty = torch.empty(spec.shape_for(num_samples), dtype=getattr(torch, spec.dtype), device="meta")
            found[names[keyword]] = empty.requires_grad_(spec.requires_grad)
        found |= dict(self.stage.constants)
        if not self.stage.nodes:  # called with the batch as it is: a later one may have other constants
            found |= {key: rows[key] for key, _ in self.stage.constants if key in rows}
        if isinstance(rows, WholeUnit):
            return WholeUnit(found, num_samples=num_samples, readings=rows.readings)
        return found

    def as_traced(self, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the module is called with, by keyword, under the names it is traced by."""
        return {name: arguments[keyword] for keyword, name in traced_names(self.stage).items()}

    # ---- names ---------------------------------------------------------------------------------

    def local_graph(self, captured: CapturedGraph | Analysis) -> BlockGraph:
        """Return a capture's blocks under its own names."""
        return coarsen(captured, granularity=self.granularity)

    def view(self, captured: CapturedGraph | Analysis) -> PartView:
        """Return a capture as the whole graph sees it.

        Raises:
            ConfigError: an output is no operator's result, or two are the same.
        """
        return view_part(self.stage, captured, self.local_graph(captured), self._called)

    def parameters(self, op_graph: OpGraph) -> tuple[Parameter, ...]:
        """Return a capture's parameters and buffers under "<stage>.<name>"."""
        prefix = self.stage.prefix
        return tuple(
            dataclasses.replace(p, name=prefix + p.name, aliases=tuple(prefix + alias for alias in p.aliases))
            for p in op_graph.parameters
        )

    # ---- code ----------------------------------------------------------------------------------

    def stage_code(
        self,
        reference: Reference,
        plan: PipelinePlan,
        stage: int,
        batch: Batch,
        num_samples: int,
        *,
        within: PartContext | None = None,
        keeps_capture: bool = False,
    ) -> StageCode:
        """Trace the module at ``num_samples`` samples and return the code of a stage of its blocks.

        Args:
            reference: of the whole graph, in the mode the code is for.
            within: of a part of a larger graph.
            keeps_capture: another stage of it runs here, whose code is made next, at these shapes perhaps.

        Raises:
            CaptureError: the module's structure depends on its input shapes.
        """
        # alone, the reference is the part's own; within a graph it speaks of stages and their outputs only
        analysis = reference.analysis if within is None else within.analysis
        known: Mapping[str, TensorSpec] = {} if within is None else within.shapes.tensors
        arguments = self.arguments(batch, known, num_samples)

        def for_lengths(shapes: Batch, lengths: Lengths) -> StageAtLengths:
            # of other readings the operators may be others: as they were at the first shape of this kind
            of_kind = self._analyses.get((analysis.is_training, kind_of(shapes)), analysis)
            return self._stage_for_lengths(reference, plan, stage, of_kind, shapes, lengths)

        found = self._lengths.code(arguments, num_samples, (reference, plan, stage), for_lengths)
        if found is not None:
            if within is None:
                return found
            return dataclasses.replace(found, tensors={**known, **found.tensors}, inputs=within.shapes.inputs)
        captured = self.capture_again(analysis, arguments)
        if captured.analysis is not analysis and analysis.takes_whole_units:
            self._analyses[analysis.is_training, kind_of(arguments)] = captured.analysis
            if len(self._analyses) > MAX_READINGS:
                self._analyses.popitem(last=False)
        # the last stage that runs here has its code now
        self._capture = (_shapes(arguments), captured) if keeps_capture else None
        if not keeps_capture:
            self._trials.clear()
        if plan.stages[stage].memory is not None and captured.analysis.nodes != analysis.nodes:
            raise CaptureError(
                f"stage {plan.stages[stage].name}: its graph changed with values of its inputs, and its memory plan "
                'names operators; set graph_pipeline.memory.recompute and swap to "off"'
            )
        view = self.view(captured)
        cut = self._cut(reference, plan, stage, view, captured)
        op_graph = captured.op_graph
        captured, nodes, outputs = self._shared_out(captured, cut, view, reference, plan, stage)
        function = build_stage_function(captured, [n for own in nodes.values() for n in own], outputs)
        return StageCode(
            function=self._in_graph(function, view.names, op_graph, cut.outputs),
            tensors={**known, **view.blocks.tensors, **view.outputs},
            inputs={spec.name: spec for spec in op_graph.inputs} if within is None else within.shapes.inputs,
            loss=cut.loss,
            outputs=cut.named,
            operators=_operators(captured, nodes, view.names, reference.block_graph.saved),
        )

    def _shared_out(
        self,
        captured: CapturedGraph,
        cut: _Cut,
        view: PartView,
        reference: Reference,
        plan: PipelinePlan,
        index: int,
    ) -> tuple[CapturedGraph, Mapping[str, tuple[str, ...]], list[str]]:
        """Return a capture as this rank computes it where a stage's ranks share it out, its blocks' operators, outputs.

        Args:
            cut: what the stage computes.
        """
        stage, blocks = plan.stages[index], cut.nodes
        outputs = tuple(cut.made[name] for name in cut.outputs)
        if stage.model_parallel == 1:
            return captured, blocks, list(outputs)
        assert self._links is not None, "a rank of a job has its place"
        graph, sharding = reference.block_graph, captured.analysis.sharding
        beside = {name: block for block, names in blocks.items() for name in names}
        regions = regions_of_stage(graph, sharding.regions, plan, index) if stage.tensor > 1 else ()
        # positions first: of what is then a rank's, its tensor ranks have their shards
        context = None
        if stage.context > 1:
            context = self._links.of(stage, "context")
            arriving, leaving = dict[str, int](), dict[str, int]()
            for edge in plan.edges:
                for known, end, axis in (
                    (arriving, edge.dst, edge.dst_shard_axis),
                    (leaving, edge.src, edge.src_shard_axis),
                ):
                    if end == index and axis is not None:
                        crossing = (*edge.batch_tensors, *edge.whole_tensors)
                        known |= {view.local_names.get(name, name): axis for name in crossing}
            captured, neighbours, outputs = cut_graph(
                captured,
                context_of_stage(graph, sharding, plan, index),
                context,
                list(beside),
                outputs=outputs,
                arriving=arriving,
                leaving=leaving,
                regions=regions,
                tensor=stage.tensor,
            )
            beside |= {name: beside[neighbour] for name, neighbour in neighbours.items()}
        captured, neighbours, outputs = shard_graph(
            captured,
            regions,
            self._links.of(stage),
            list(beside),
            sequence=sequence_of_stage(graph, sharding, plan, index) if stage.tensor > 1 else (),
            outputs=outputs,
            context=context,
            together=self._links.of(stage, "model"),
        )
        beside |= {name: beside[neighbour] for name, neighbour in neighbours.items()}
        found: dict[str, list[str]] = {block: [] for block in blocks}
        for name, block in beside.items():
            found[block].append(name)
        return captured, {block: tuple(names) for block, names in found.items()}, list(outputs)

    def _cut(
        self,
        reference: Reference,
        plan: PipelinePlan,
        stage: int,
        view: PartView,
        captured: CapturedGraph,
    ) -> _Cut:
        """Return what a stage of a plan computes, of a capture at any shapes."""
        nodes = self._nodes_of(plan, stage, view, captured)
        # graph's name -> the capture's, of all that this stage computes; its outputs are among them, in the order
        # in which the runtime hands them on: what edges carry, the loss, what an evaluation requests
        made = {view.names[node]: node for of_block in nodes.values() for node in of_block}
        sent = [n for e in plan.edges if e.src == stage for n in (*e.batch_tensors, *e.whole_tensors)]
        named = {n: node for n, node in reference.analysis.op_graph.outputs.items() if node in made}
        losses = [view.loss] if view.loss is not None and view.loss in made else []
        outputs = tuple(dict.fromkeys([*sent, *losses, *named.values()]))
        return _Cut(nodes=nodes, made=made, outputs=outputs, named=named, loss=losses[0] if losses else None)

    def _stage_for_lengths(
        self,
        reference: Reference,
        plan: PipelinePlan,
        stage: int,
        analysis: Analysis,
        arguments: Batch,
        lengths: Lengths,
    ) -> StageAtLengths:
        """Trace the module once more, for batches of many lengths, and return a stage of it."""
        whole = self.capture_for_lengths(analysis, arguments, lengths)
        view = self.view(analysis)
        cut = self._cut(reference, plan, stage, view, whole.captured)
        captured, own, outputs = self._shared_out(whole.captured, cut, view, reference, plan, stage)
        capture = dataclasses.replace(whole, captured=captured)
        op_graph = analysis.op_graph
        # at every new length the tensors that pass this stage's boundary are described anew, and no others
        carried = (
            n for e in plan.edges if stage in (e.src, e.dst) for n in (*e.batch_tensors, *e.whole_tensors)
        )
        crossing = {*carried, *cut.outputs}
        code = StageCode(
            function=IDLE,
            tensors={n: s for n, s in {**view.blocks.tensors, **view.outputs}.items() if n in crossing},
            # of a graph, what its stages read of the batch is known to all of them
            inputs={spec.name: spec for spec in op_graph.inputs} if self.stage.is_alone else {},
            loss=cut.loss,
            outputs=cut.named,
            operators=_operators(captured, own, view.names, reference.block_graph.saved),
            is_for_lengths=True,
        )
        nodes = [n for of in own.values() for n in of]
        return StageAtLengths(
            capture,
            code,
            nodes,
            outputs,
            names=view.local_names,
            whole=whole,
            finish=lambda function: self._in_graph(function, view.names, op_graph, cut.outputs),
        )

    def outputs_at(self, analysis: Analysis, arguments: Batch) -> dict[str, TensorSpec]:
        """Return what the part makes of such arguments, by its names in the graph.

        Raises:
            CaptureError: as `capture_again`.
        """

        def for_lengths(shapes: Batch, lengths: Lengths) -> StageAtLengths:
            capture, view = self.capture_for_lengths(analysis, shapes, lengths), self.view(analysis)
            names = view.local_names
            code = StageCode(
                function=IDLE,
                tensors=view.outputs,
                inputs={},
                loss=None,
                outputs={},
                operators=StageOperators(blocks={}, storage_of={}),
                is_for_lengths=True,
            )
            nodes = [node.name for node in analysis.op_graph.nodes]
            return StageAtLengths(capture, code, nodes, [names[name] for name in view.outputs], names=names)

        found = self._outputs_at.code(arguments, count_samples(arguments), (analysis,), for_lengths)
        return dict(
            self.view(self.capture_again(analysis, arguments)).outputs if found is None else found.tensors
        )

    def capture_for_lengths(self, analysis: Analysis, arguments: Batch, lengths: Lengths) -> LengthCapture:
        """Trace the module for batches of many lengths; what was traced last, where it is that.

        The rank that broadcasts what the part makes runs a stage of it too.
        """
        key = (analysis, _shapes(arguments), {key: tuple(axes) for key, axes in lengths.items()})
        if self._for_lengths is None or self._for_lengths[0] != key:
            capture = recapture_for_lengths(
                self.model, analysis, arguments, lengths, device=self.device, call=self.call
            )
            self._for_lengths = key, capture
        return self._for_lengths[1]

    def _nodes_of(
        self, plan: PipelinePlan, stage: int, view: PartView, captured: CapturedGraph
    ) -> dict[str, tuple[str, ...]]:
        """Return a stage's blocks -> their operators, as the capture calls them.

        Raises:
            CaptureError: the graph lacks one of the stage's blocks.
        """
        blocks = plan.stages[stage].blocks
        missing = [name for name in blocks if name not in view.local_blocks]
        if missing:
            raise CaptureError(
                f"stage {plan.stages[stage].name}: blocks {missing[:3]} are gone from the graph captured at "
                f"{captured.op_graph.num_samples} samples; the model's structure depends on its input shapes"
            )
        local = view.local_names
        by_name = {block.name: block for block in view.blocks.blocks}
        return {name: tuple(local[node] for node in by_name[name].nodes) for name in blocks}

    def names_held(
        self, reference: Reference, plan: PipelinePlan, stage: int, function: StageFunction
    ) -> tuple[str, ...]:
        """Return what a stage of the part holds on this rank.

        What no block of the part reads must still be in files: it rests on the part's last stage.
        """
        graph, op_graph = reference.block_graph, reference.analysis.op_graph
        own = set(plan.stages[stage].blocks)
        names = [*function.tensors]
        names += [n for block in graph.blocks if block.name in own for n in block.parameters]
        is_alone, name = self.stage.is_alone, self.stage.name
        mine = {block.name for block in graph.blocks if is_alone or owner_of_block(block.name) == name}
        last = max(i for i, other in enumerate(plan.stages) if not mine.isdisjoint(other.blocks))
        if last == stage:
            used = {n for block in graph.blocks for n in block.parameters}
            names += [
                p.name
                for p in op_graph.parameters
                if p.name.startswith(self.stage.prefix)
                and p.name not in used
                and (p.is_persistent or not p.is_buffer)
            ]
        return tuple(dict.fromkeys(names))

    def _in_graph(
        self, function: StageFunction, names: Mapping[str, str], op_graph: OpGraph, outputs: tuple[str, ...]
    ) -> StageFunction:
        """Return code with everything under the whole graph's names; batch keys have theirs."""
        parameters = parameter_names(self.stage, op_graph, self._called)
        return dataclasses.replace(
            function,
            tensors=tuple(parameters[name] for name in function.tensors),
            received=tuple(names[name] for name in function.received),
            outputs=outputs,
        )


def whole_part(model: nn.Module, batch: Batch) -> CapturedPart:
    """Return a plain model as the part that is all there is: the `StageSource` of a reference captured elsewhere."""
    resolved = resolve_module(model, batch, num_ranks=1)
    return CapturedPart(
        resolved.stages[0], dtype=None, device=torch.device("cpu"), granularity="layer", called={}
    )


def _shapes(batch: Batch) -> tuple[object, ...]:
    # separate readings: two units of one shape may be of several
    plain = WholeUnit(batch, num_samples=batch.num_samples) if isinstance(batch, WholeUnit) else batch
    count = count_samples(plain)
    return (count, *shape_key(plain, count))


def _operators(
    captured: CapturedGraph,
    blocks: Mapping[str, Sequence[str]],
    names: Mapping[str, str],
    saved: Iterable[SavedTensor],
) -> StageOperators:
    """Return what a stage of a captured part is made of.

    Args:
        blocks: of the stage -> their operators, as the capture calls them.
        names: as of `PartView`.
        saved: of the whole graph: what another stage keeps too has the name that its maker gives it.
    """
    op_graph = captured.op_graph
    root = {name: tensor.name for tensor in saved for name in (tensor.name, *tensor.views)}
    received = {name: root.get(names[name], names[name]) for name in op_graph.received}
    storage_of = {
        node.name: received.get(node.storage, node.storage) for node in op_graph.nodes if node.storage
    }
    return StageOperators(
        blocks={block: tuple(nodes) for block, nodes in blocks.items()},
        storage_of={**storage_of, **received},
        local={names[node.name]: node.name for node in op_graph.nodes if node.name in names},
        repeated=repeated_operands(captured.graph, frozenset(captured.masks)),
    )
