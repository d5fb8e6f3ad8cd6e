"""One rank's part of a model: its modules, what all stages make of which shapes, and the code of its stages.

The engine uses it through `model.model_source`; it needs no DeepSpeed itself.

Source: this project
Tests: tests/stage_graph/test_part.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpp_plugin.capture.eager.trial_run import find_eager_modules
from gpp_plugin.capture.recapture import attributes_read
from gpp_plugin.capture.tracing.sample_batches import (
    WholeUnit,
    as_unit,
    count_samples,
    is_counted,
    rows_per_sample,
)
from gpp_plugin.config.block import LengthsConfig
from gpp_plugin.errors import CaptureError, ConfigError, PlanError, first_line
from gpp_plugin.ir.analysis import Analysis
from gpp_plugin.ir.block_graph import OpGraph, Parameter
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.size_formulas import LengthCosts
from gpp_plugin.model.graph.captured_part import CapturedPart, PartContext, owner_of_block
from gpp_plugin.model.graph.describe_graph import PartView, describe_graph, merged_parameters
from gpp_plugin.model.graph.module_cost import Measuring
from gpp_plugin.model.graph.module_trial import IDLE, Place, Shapes, loss_node, stage_function
from gpp_plugin.model.graph.probe import Prober, Survey
from gpp_plugin.model.graph.resolve import GraphStage, ResolvedGraph, resolve, resolve_module
from gpp_plugin.model.graph.stage_costs import StageCosts, measure_stages
from gpp_plugin.model.graph.stage_graph import StageContext, StageGraph, make_contexts
from gpp_plugin.model.graph.user_module import (
    UserModule,
    check_replicas,
    check_ties,
    describe_tensors,
    make_module,
    tied_names,
)
from gpp_plugin.model.materialize import derive_seed
from gpp_plugin.model.measure_lengths import measure_lengths
from gpp_plugin.model.verification import StartUp, verify_part
from gpp_plugin.runtime.batches import Batch, OwnRows, UnitRule, shape_key
from gpp_plugin.runtime.ranks.collectives import broadcast_result, exchange
from gpp_plugin.runtime.stage_module import Reference, StageCode, make_reference
from gpp_plugin.runtime.tensor_ranks import TensorLinks

logger = logging.getLogger(__name__)

MAX_MET = 64
"""Shapes of batches whose tensors are stored."""

_Pairs = tuple[tuple[str, str], ...]
_PartKey = tuple[str, _Pairs, _Pairs, tuple[str, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """What is known of batches of some keys and shapes in one mode.

    Args:
        parts: captured part -> as it is called for them, and what tracing it so found out.
    """

    shapes: Shapes
    parts: Mapping[str, tuple[CapturedPart, Analysis]]


class GraphJob:
    """Builds and checks a model on all ranks together; a `StageSource` for this rank's runners.

    Construction and every method but `stage_code` are collective over all ranks.

    A plain model is a graph of one captured part, which is traced on rank 0 alone and broadcast to the others; nothing
    is built, nothing runs, and new shapes need no collective, as no rank waits for what another makes of them.

    Args:
        graph: stages that the user made, or a plain model.
        sample_batch: like those to come; its tensors are the graph's possible inputs.
        loss_unit: samples of one loss.
        timeout_s: how long ranks of a stage wait for each other.
        granularity: size of the blocks of captured parts.
        eager: modules of theirs that run as they are; in a graph of several stages "<stage>.<module>".
        seed: what factories draw weights from, with their stage's name.

    Raises:
        ConfigError: the graph is wrong, a factory fails, or a module does not do what the graph says.
        CaptureError: a captured module cannot be exported.
    """

    def __init__(
        self,
        graph: StageGraph | nn.Module,
        sample_batch: Batch,
        *,
        place: Place,
        num_ranks: int,
        loss_unit: int,
        seed: int,
        timeout_s: float,
        granularity: str = "layer",
        eager: Sequence[str] = (),
    ) -> None:
        began = time.monotonic()
        self._model = graph
        self._num_ranks = num_ranks
        self._loss_unit = loss_unit
        # flattened patches of all images beside a row of tokens a sample: the batch is a unit, whatever it holds
        sample_batch = sample_batch if is_counted(sample_batch) else as_unit(sample_batch, loss_unit)
        self._sample = sample_batch
        self._granularity = granularity
        # 1. what reads what, the same on every rank without asking others
        self.resolved: ResolvedGraph = self._resolve(sample_batch)
        self.whole: GraphStage | None = self.resolved.whole
        self._eager = _eager_of(self.resolved, eager)
        if self.whole is None:
            on_ranks = (self.resolved.stages_of_rank(rank) for rank in range(num_ranks))
            stages = tuple(", ".join(stage.name for stage in on_rank) for on_rank in on_ranks)
            place = dataclasses.replace(place, stages=stages)
        self._place = place
        self.links = TensorLinks(place.rank)
        """The tensor ranks of captured stages on this rank."""
        self._stages = self.resolved.stages_of_rank(place.rank)
        self._called = tied_names(self.resolved)
        # 2. this rank's stages; of a plain model nothing is built, and no process groups are made
        self._contexts: dict[str, StageContext] = {}
        self._parts: dict[_PartKey, CapturedPart] = {}
        self._tensors: dict[str, tuple[Parameter, ...]] = {}
        self.owns: dict[str, UserModule | CapturedPart] = (
            self._build(seed, timeout_s) if self.whole is None else {self.whole.name: self._part(self.whole)}
        )
        """This rank's stages by name: their modules, or the captured parts that it runs some of."""
        # 3. one look at every stage, in topological order: captured ones are traced, others run
        tracing = time.monotonic()
        self._survey: Survey = Prober(self.resolved, self.owns, place).survey(sample_batch, loss_unit)
        self._start_up = StartUp(began=began, tracing_s=time.monotonic() - tracing, num_samples=loss_unit)
        # what a module registers later (a cache of masks) is not bound by runners
        self._names = {
            name: frozenset(own.named_tensors())
            for name, own in self.owns.items()
            if isinstance(own, UserModule)
        }
        for name, analysis in self._survey.analyses.items():
            self._tensors[name] = self._part(self.resolved.stage(name)).parameters(analysis.op_graph)
        # 4. what came of it, by the mode and the shapes it is true of
        self._known: OrderedDict[tuple[Any, ...], _Met] = OrderedDict()
        self._current: dict[bool, _Met] = {}
        self._analyses: dict[tuple[bool, _PartKey], Analysis] = {}
        self._lacking: dict[tuple[bool, _PartKey], Reference] = {}
        self._remember(
            self.resolved, sample_batch, self._survey.shapes, self._survey.analyses, is_training=True
        )

    def _resolve(
        self, batch: Batch, *, needs_loss: bool = True, requested: Sequence[str] = ()
    ) -> ResolvedGraph:
        """Return the graph for batches of these keys.

        Args:
            requested: outputs that an evaluation requests.
        """
        if isinstance(self._model, nn.Module):
            # units that lack inputs: one part, whatever the order of theirs
            if batch.keys() < self._sample.keys():
                batch = {key: batch[key] for key in self._sample if key in batch}
            return resolve_module(self._model, batch, num_ranks=self._num_ranks, requested=requested)
        return resolve(
            self._model,
            batch_keys=[key for key, value in batch.items() if isinstance(value, Tensor)],
            num_ranks=self._num_ranks,
            needs_loss=needs_loss,
            constants={key: value for key, value in batch.items() if not isinstance(value, Tensor)},
            requested=requested,
        )

    def _build(self, seed: int, timeout_s: float) -> dict[str, UserModule | CapturedPart]:
        """Make this rank's stages of a graph, and see that what all ranks made fits together."""
        place = self._place
        self._contexts = contexts = make_contexts(
            [stage.spec for stage in self.resolved.stages],
            rank=place.rank,
            device=place.device,
            dtype=place.dtype,
            timeout_s=timeout_s,
            backend=place.backend,
        )
        made: dict[str, nn.Module] = {}

        def build() -> dict[str, tuple[Parameter, ...]]:
            held = {}
            for stage in self._stages:
                if stage.is_captured:
                    held[stage.name] = self._part(stage).tensors()
                    continue
                made[stage.name] = make_module(
                    stage, contexts[stage.name], seed=derive_seed(seed, stage.name)
                )
                held[stage.name] = describe_tensors(stage.name, made[stage.name])
            return held

        tensors = exchange(build, what="building stages", group=place.group, stages=place.stages)
        check_replicas(self.resolved, tensors)
        self._tensors = {s.name: tensors[s.spec.ranks[0]][s.name] for s in self.resolved.stages}
        check_ties(self.resolved, self._tensors)
        return {
            stage.name: self._part(stage)
            if stage.is_captured
            else UserModule(
                stage.name,
                made[stage.name],
                tied={n: c for n, c in self._called.items() if n.partition(".")[0] == stage.name},
            )
            for stage in self._stages
        }

    def owner(self, plan: PipelinePlan, stage: int) -> str:
        """Return the stage as the user gave it that a stage of a plan is, or is a piece of."""
        return self.whole.name if self.whole is not None else owner_of_block(plan.stages[stage].blocks[0])

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters and buffers of all stages, tied ones once."""
        return merged_parameters(self._tensors, self._called)[0]

    def set_timeout(self, timeout_s: float) -> None:
        """Let ranks of a stage wait for each other for so long, now that there is a plan."""
        for context in self._contexts.values():
            context.set_timeout(timeout_s)

    def close(self) -> None:
        """Release the groups that factories received; no stage runs any more."""
        for context in self._contexts.values():
            context.close()

    def views(self, *, is_training: bool) -> dict[str, PartView]:
        """Return the captured parts as the whole graph sees them, for the batch that was met last in this mode."""
        return {name: part.view(found) for name, (part, found) in self._current[is_training].parts.items()}

    def reference(self) -> Reference:
        """Return the graph in training, as planner and engine know models."""
        if self.whole is not None:
            return make_reference(self._survey.analyses[self.whole.name], self._granularity)
        return describe_graph(
            self.resolved,
            self._survey.shapes,
            self._tensors,
            self._called,
            coupled=self._survey.coupled,
            views=self.views(is_training=True),
            is_training=True,
        )

    def measure(self, counts: Mapping[str, Sequence[int]], measuring: Measuring) -> StageCosts:
        """Return what the stages cost; as for `measure_stages`."""
        return measure_stages(
            self.resolved,
            self.owns,
            self._place,
            self._sample,
            self._survey,
            counts=counts,
            measuring=measuring,
        )

    def measure_lengths(
        self, costs: StageCosts, requested: LengthsConfig, *, cache_dir: str | None
    ) -> LengthCosts | None:
        """Return what a plain model costs at any lengths, on every rank; None where it is not known.

        Collective over all ranks; the part's first rank measures.
        """
        whole = self.whole
        if whole is None:
            return None
        source = whole.spec.ranks[0]

        def measure() -> LengthCosts | None:
            if self._place.rank != source:
                return None
            part = self._part(whole)
            analysis = self._survey.analyses[whole.name]
            graph = make_reference(analysis, self._granularity).block_graph
            profile = costs.profile(graph, device="")
            return measure_lengths(part, analysis, self._sample, profile, requested, cache_dir=cache_dir)

        return broadcast_result(
            measure, source=source, what="costs at other lengths", group=self._place.group
        )

    def verify(self, costs: StageCosts) -> None:
        """Hold every capture against its module, each on its part's first rank; collective over all ranks.

        Raises:
            CaptureError: one is not its module; the same on every rank.
        """

        def verify_own() -> list[tuple[bool, str]]:
            return [
                verify_part(
                    own, self._place, self._sample, self._survey, costs.by_stage[name], self._start_up
                )
                for name, own in self.owns.items()
                if isinstance(own, CapturedPart) and self._place.rank == own.stage.spec.ranks[0]
            ]

        what = "comparison of captures with their modules"
        found = exchange(verify_own, what=f"the {what}", group=self._place.group, stages=self._place.stages)
        for is_verified, line in (report for of_rank in found for report in of_rank):
            if self._place.rank == 0:
                logger.log(logging.INFO if is_verified else logging.WARNING, "%s", line)

    def eager_in(self, stage: str) -> tuple[str, ...]:
        """Return the modules of a captured part that run as they are."""
        return self._survey.analyses[stage].eager

    def trace_again(self, stage: str) -> tuple[str, frozenset[tuple[str, str]]]:
        """Trace a captured part as its module is now, on this rank alone.

        Returns:
            All that two traces can differ in, and which attributes of which modules were read.

        Raises:
            CaptureError: it cannot be traced any more.
        """
        part, analysis = self._part(self.resolved.stage(stage)), self._survey.analyses[stage]
        num_samples = analysis.op_graph.num_samples
        arguments = part.arguments(self._sample, self._survey.shapes.tensors, num_samples)
        return attributes_read(part.model, analysis, arguments, device=part.device, call=part.call)

    @property
    def coupled(self) -> frozenset[str]:
        """Return the stages that compute on whole loss units."""
        return self._survey.coupled

    def evaluation(self, batch: Batch, outputs: Sequence[str]) -> Reference:
        """Return the graph in evaluation, without the stages that lack an input and what reads them."""
        resolved = self._resolve(batch, needs_loss=False, requested=outputs)
        if resolved.whole is not None:
            # of what takes whole units, rows can be left out only where each tensor has one a sample
            takes_whole = self._survey.analyses[resolved.whole.name].takes_whole_units
            if not is_counted(batch) or takes_whole and max(rows_per_sample(batch).values()) > 1:
                batch = as_unit(batch, self._loss_unit)
            _, analyses = Prober(
                resolved, {resolved.whole.name: self._part(resolved.whole)}, self._place
            ).shapes_at(batch, self._loss_unit, {}, is_training=False, analyses={})
            return make_reference(analyses[resolved.whole.name], self._granularity)
        self._learn_shapes(resolved, batch, is_training=False)
        return describe_graph(
            resolved,
            self._current[False].shapes,
            {stage.name: self._tensors[stage.name] for stage in resolved.stages},
            self._called,
            coupled=self._survey.coupled,
            views=self.views(is_training=False),
            is_training=False,
            outputs=outputs,
        )

    def lacking(self, reference: Reference, unit: Batch) -> Reference:
        """Return a plain model as it is for loss units of these keys only; collective over all ranks.

        Args:
            reference: of the model with all its inputs, in the mode that is requested.
            unit: of a model whose Python reads values, with what it reads: rank 0 need not have the values.

        Raises:
            CaptureError: it cannot do without the others; the same on every rank.
        """
        is_training, known = reference.analysis.is_training, reference.analysis.op_graph
        resolved = self._resolve(unit, requested=() if is_training else tuple(known.outputs))
        whole = resolved.whole
        assert whole is not None, "units of their own shapes are of plain models"
        key = (is_training, _key(whole))
        if key in self._lacking:
            return self._lacking[key]
        try:
            _, analyses = Prober(resolved, {whole.name: self._part(whole)}, self._place).shapes_at(
                unit, self._loss_unit, {}, is_training=is_training, analyses={}
            )
        except CaptureError as error:
            raise _cannot_do_without(known, unit, error) from error
        analysis = analyses[whole.name]
        if analysis.reads_values and not reference.analysis.reads_values:
            raise CaptureError(
                f"a unit lacks {_lost(known, unit)}, and without them the Python of {known.model} reads values of the "
                "batch, of which it reads none with all inputs; give every unit these keys"
            )
        self._lacking[key] = make_reference(analysis, self._granularity)
        return self._lacking[key]

    def takes_whole_units(self, stage: str) -> bool:
        """Return whether a captured part computes on loss units as they receive."""
        return self._survey.analyses[stage].takes_whole_units

    def unit_rule(self, reference: Reference) -> UnitRule | None:
        """Return how batches become loss units, where the model takes whole ones."""
        analysis = reference.analysis
        if self.whole is None or not analysis.takes_whole_units:
            return None

        def read(unit: WholeUnit) -> tuple[Any, ...] | None:
            # Of units that lack inputs the model reads other things, perhaps nothing: what was met so is a part of its
            # own. All ranks that read inputs find out the same, before the capture exists on any of them.
            try:
                return self._part(self._called_with(reference, unit)).readings(analysis, unit)
            except CaptureError as error:
                if _lost(analysis.op_graph, unit):
                    raise _cannot_do_without(analysis.op_graph, unit, error) from error
                raise

        return UnitRule(num_samples=self._loss_unit, read=read)

    def learn_shapes(self, batch: Batch, *, is_training: bool) -> None:
        """Learn the shapes that come of a batch like this one, unless they are known."""
        if self.whole is None:
            resolved = self.resolved if is_training else self._resolve(batch, needs_loss=False)
            self._learn_shapes(resolved, batch, is_training=is_training)

    def _learn_shapes(self, resolved: ResolvedGraph, batch: Batch, *, is_training: bool) -> None:
        key = (is_training, *shape_key(batch, count_samples(batch)))
        if key not in self._known:
            captured = [stage for stage in resolved.stages if stage.is_captured]
            known = {stage.name: self._analyses.get((is_training, _key(stage))) for stage in captured}
            # a captured part as it is called for these keys
            own = {
                name: self._part(resolved.stage(name))
                if isinstance(part, CapturedPart) and resolved.has(name)
                else part
                for name, part in self.owns.items()
            }
            shapes, analyses = Prober(resolved, own, self._place).shapes_at(
                batch.stand_in() if isinstance(batch, OwnRows) else batch,
                self._loss_unit,
                self._survey.shapes.tensors,
                is_training=is_training,
                analyses={name: analysis for name, analysis in known.items() if analysis is not None},
            )
            self._remember(resolved, batch, shapes, analyses, is_training=is_training)
        # every rank sees the same batches in the same order: all release the same shape
        self._known.move_to_end(key)
        while len(self._known) > MAX_MET:
            self._known.popitem(last=False)
        self._current[is_training] = self._known[key]

    def _remember(
        self,
        resolved: ResolvedGraph,
        batch: Batch,
        shapes: Shapes,
        analyses: Mapping[str, Analysis],
        *,
        is_training: bool,
    ) -> None:
        parts = {}
        for name, analysis in analyses.items():
            stage = resolved.stage(name)
            # a later one, at another shape, has the same structure
            first = self._analyses.setdefault((is_training, _key(stage)), analysis)
            parts[name] = self._part(stage), first
        met = _Met(shapes=shapes, parts=parts)
        self._known[(is_training, *shape_key(batch, count_samples(batch)))] = met
        self._current[is_training] = met

    def _part(self, stage: GraphStage) -> CapturedPart:
        """Return a captured part that is called with what this stage reads."""
        key = _key(stage)
        if key not in self._parts:
            self._parts[key] = CapturedPart(
                stage,
                dtype=self._place.dtype,
                device=self._place.device,
                granularity=self._granularity,
                called=self._called,
                eager=self._eager.get(stage.name, ()),
                links=self.links,
            )
        return self._parts[key]

    def _called_with(self, reference: Reference, batch: Batch) -> GraphStage:
        """Return the whole model as it was traced for batches of these keys."""
        stage = self.whole
        if not reference.analysis.is_training:
            requested = tuple(reference.analysis.op_graph.outputs)
            stage = self._resolve(batch, needs_loss=False, requested=requested).whole
        elif batch.keys() < self._sample.keys():
            stage = self._resolve(batch).whole
        assert stage is not None, "it is a plain model, and has blocks"
        return stage

    def stage_code(
        self, reference: Reference, plan: PipelinePlan, stage: int, batch: Batch, num_samples: int
    ) -> StageCode:
        """Return one of this rank's stages as code, at the shapes that were met last in this mode.

        Raises:
            PlanError: the plan has this rank in another stage.
        """
        is_training = reference.analysis.is_training
        # what is captured for one stage serves the rank's others at the same shapes
        keeps = stage != plan.stages_of_rank(self._place.rank)[-1]
        # a plain model: the reference is the capture itself, and evaluation has one of its own (no labels, outputs)
        if self.whole is not None and (is_training or reference.block_graph.blocks):
            part = self._part(self._called_with(reference, batch))
            return part.stage_code(reference, plan, stage, batch, num_samples, keeps_capture=keeps)
        met, blocks = self._current[is_training], plan.stages[stage].blocks
        shapes = met.shapes
        owners = {owner_of_block(block) for block in blocks}
        if len(owners) > 1 or not owners <= self.owns.keys():
            own = ", ".join(self.owns)
            raise PlanError(
                f"rank {self._place.rank} runs stage {own!r}, and the plan has it in {plan.stages[stage].name!r}"
            )
        if not blocks:  # it lacks an input, in evaluation
            return StageCode(
                function=IDLE, tensors=shapes.tensors, inputs=shapes.inputs, loss=None, outputs={}
            )
        (name,) = owners
        own_stage = self.owns[name]
        if isinstance(own_stage, CapturedPart):
            part, analysis = met.parts[name]
            around = PartContext(analysis=analysis, shapes=shapes)
            return part.stage_code(
                reference, plan, stage, batch, num_samples, within=around, keeps_capture=keeps
            )
        # a user's module: its code is a call of it, and it returns what edges carry, the loss, what is requested
        sent = [n for e in plan.edges if e.src == stage for n in (*e.batch_tensors, *e.whole_tensors)]
        op_graph = reference.analysis.op_graph
        named = {n: node for n, node in op_graph.outputs.items() if node.rpartition(".")[0] == name}
        called = self.resolved.stage(name)
        loss = loss_node(called)
        outputs = dict.fromkeys([*sent, *([] if loss is None else [loss]), *named.values()])
        tensors = {n: t for n, t in own_stage.named_tensors().items() if n in self._names[name]}
        return StageCode(
            function=stage_function(called, own_stage.user_module, tuple(outputs), tensors=tensors),
            tensors=shapes.tensors,
            inputs=shapes.inputs,
            loss=loss,
            outputs=named,
        )


def _eager_of(graph: ResolvedGraph, eager: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return for each captured stage which of its modules run as they are.

    Raises:
        ConfigError: a path names none of them.
    """
    captured = [stage for stage in graph.stages if stage.is_captured]
    known = [stage.prefix for stage in captured]
    for path in eager:
        if not any(path.startswith(prefix) for prefix in known):
            raise ConfigError(
                f"graph_pipeline.eager: {path!r} is of no captured stage; write one of "
                f"{', '.join(repr(prefix + '<module>') for prefix in known) or 'none: no stage is captured'}"
            )
    found: dict[str, tuple[str, ...]] = {}
    for stage in captured:
        own = [path.removeprefix(stage.prefix) for path in eager if path.startswith(stage.prefix)]
        assert isinstance(stage.spec.make, nn.Module), "what is captured is a module"
        found[stage.name] = find_eager_modules(stage.spec.make, own)
    return found


def _lost(known: OpGraph, unit: Batch) -> list[str]:
    """Return the inputs that a loss unit lacks."""
    return sorted({spec.name for spec in known.inputs} - unit.keys())


def _cannot_do_without(known: OpGraph, unit: Batch, error: CaptureError) -> CaptureError:
    """Return the error of a loss unit that lacks what the model needs."""
    return CaptureError(
        f"a unit lacks {_lost(known, unit)}, and {known.model} cannot be captured without: {first_line(error)}; give "
        "every unit these keys"
    )


def _key(stage: GraphStage) -> _PartKey:
    """Return what a captured part is traced for: evaluation may lack labels, and request outputs."""
    return stage.name, stage.batch_inputs, stage.nodes, stage.requested, repr(stage.constants)
