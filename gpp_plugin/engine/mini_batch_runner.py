"""This rank's runners: how they are made, how they run a mini-batch, and how batches of any size are evaluated.

    RunnerFactory     makes runners: programs of all ranks for a plan, the transport of their messages, code by shape
    MiniBatchRunner   runs a mini-batch; after one that failed on its way nothing more runs
    Evaluator         `eval_batch`: on the training plan's stages, in the model's evaluation mode

A batch's keys and constants decide which graph is captured for an evaluation; its size decides which plans run it
(`runtime.rank_programs`). Both are kept, the last few of them.

Source: this project
Tests: tests/integrations/test_engine.py, tests/integrations/test_frozen_ahead.py, tests/integrations/test_async.py,
    tests/integrations/test_evaluation.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.memory_watch import MemoryWatch
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.errors import CaptureError, ConfigError, PlanError, RuntimeFailure
from gpp_plugin.integrations.huggingface.model_inputs import join_counted
from gpp_plugin.ir.plan import PipelinePlan, forward_only_stages, frozen_branch, joined_breakdown
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.tensors import LayoutKind
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.tied_blocks import UNTIE
from gpp_plugin.plugins import Channel, Transport, TransportRequest, find_transport
from gpp_plugin.runtime.batches import Batch, UnitBatch, lately, units_of
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.rank_programs import (
    channels_of,
    evaluation_plan,
    groups_of,
    held_tensors,
    make_programs,
    parts_of,
    plan_of_units,
    tied_stages,
)
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.agreement import agree, fingerprint_of
from gpp_plugin.runtime.ranks.collectives import Collectives, do_together, exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.stage_module import Reference, StageForwards, StageModule
from gpp_plugin.runtime.stage_runner import RunnerContext
from gpp_plugin.runtime.unit_patterns import UnitPatterns
from gpp_plugin.runtime.weight_versions import MakePlaces
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_prefetch
from gpp_plugin.schedule.gathers import gathered_at_once, stages_that_reduce_early
from gpp_plugin.schedule.program_sets import (
    SYNCHRONOUS,
    ProgramSet,
    RankPrograms,
    lower_async,
    lower_prefetch,
)

logger = logging.getLogger(__name__)

_NEW_SHAPES = "code for a new shape"
MAX_GRAPHS = 4
MAX_RUNNERS = 8
"""Plans of different sizes that are kept: whole batches, and the parts of a smaller last one."""

_GraphKey = tuple[Any, ...]
_Graph = tuple[Reference, PipelinePlan]
"""The model captured for evaluation with one set of keys, and the training plan's stages on it."""


class RunnerFactory:
    """Makes this rank's runners: for training, and for each size of an evaluation. Every method is collective.

    All share one transport, made with the first of them: they run one after the other, and each communicator takes
    memory of a device.

    Args:
        source: the model, which gives the stages' code.
        forwards: runs stages without backwards.
    """

    def __init__(
        self,
        *,
        source: ModelSource,
        config: GraphPipelineConfig,
        setting: Setting,
        forwards: StageForwards | None = None,
    ) -> None:
        self._forwards = forwards
        self.source = source
        self._config = config
        self.setting = setting
        self._transport: Transport | None = None

    def make_training(
        self,
        reference: Reference,
        plan: PipelinePlan,
        *,
        has_own_data: bool,
        make_places: Callable[[int], MakePlaces],
    ) -> RankRunner:
        """Return this rank's runner of training.

        Args:
            has_own_data: the engine loads the data itself.
            make_places: as of `make_async`.
        """
        if self._config.mode == "async":
            return self.make_async(reference, plan, make_places=make_places)
        # By default where the engine loads the data itself: it is invisible then that it is loaded one call early.
        prefetch = self._config.frozen_prefetch
        may_prefetch = prefetch == 1 or (prefetch == "auto" and has_own_data)
        runner = self.make(reference, plan, may_prefetch=may_prefetch)
        assert runner is not None, "every rank is in a stage of the training plan"
        return runner

    def make(
        self, reference: Reference, plan: PipelinePlan, *, may_prefetch: bool = False
    ) -> RankRunner | None:
        """Return this rank's runner for a plan, or None where the plan leaves the rank idle.

        Args:
            may_prefetch: run a frozen branch on the next mini-batch, where the plan has one and memory allows it.
        """
        reduces_each_backward = self.setting.zero_stage >= 2
        is_of_units = self._config.units is not None or reference.analysis.takes_whole_units
        if is_of_units:
            plan = plan_of_units(plan)
        whole = make_programs(plan, reference, reduce_each_backward=reduces_each_backward)
        # each rank has made those of all: one that made others would wait for messages that nobody sends
        made = {"the plan": fingerprint_of(plan), "the programs": fingerprint_of(whole)}
        agree(made, what="a look at the programs", group=self.setting.group)
        prefetch = self._prefetch_programs(reference, plan) if may_prefetch else None
        self._compare_gathers(plan, whole)
        # Transports are made by all ranks, also by those that the plan leaves idle: a process group is made so.
        transport = self._transport_for(plan, reference, channels_of(whole))
        early = stages_that_reduce_early(plan, whole)
        if prefetch is not None:
            for name in ("steady", "epilogue"):
                early &= stages_that_reduce_early(plan, prefetch.programs[name])
        if all(program.rank != self.setting.rank for program in whole):
            return None
        programs = prefetch or ProgramSet(plan=plan, programs={}, policy=SYNCHRONOUS)
        programs = dataclasses.replace(programs, programs={"whole": whole, **programs.programs})
        own = programs.of_rank(self.setting.rank)
        context = self._context(
            reference,
            own,
            transport,
            is_of_units=is_of_units,
            reduces_early=early,
            reduces_each_backward=reduces_each_backward,
        )
        return RankRunner(own, context, reduces_early=early)

    def make_async(
        self, reference: Reference, plan: PipelinePlan, *, make_places: Callable[[int], MakePlaces]
    ) -> RankRunner:
        """Return this rank's runner of a pipeline that stays full (mode async).

        Args:
            make_places: where a stage's trained weights may lie; called when parameters are bound.

        Raises:
            PlanError: a parameter is on two stages, or several stages yield losses.
        """
        _check_stages_step_alone(plan, reference)
        is_of_units = reference.analysis.takes_whole_units
        if is_of_units:
            plan = plan_of_units(plan)
        # A stage that trains nothing, and sends no gradients on, has forwards only; its programs lack the backwards.
        frozen = forward_only_stages(plan)
        programs = lower_async(plan, forward_only_stages=frozen)
        validate_async(plan, programs, forward_only_stages=frozen)
        own = programs.of_rank(self.setting.rank)
        transport = self._transport_for(plan, reference, channels_of(programs.all))
        return RankRunner(
            own,
            self._context(reference, own, transport, is_of_units=is_of_units),
            make_places={stage: make_places(stage) for stage in own.stages},
        )

    def _context(
        self,
        reference: Reference,
        programs: RankPrograms,
        transport: Transport | None,
        *,
        is_of_units: bool,
        reduces_early: Collection[int] = (),
        reduces_each_backward: bool = False,
    ) -> RunnerContext:
        patterns = None
        if (
            is_of_units
        ):  # the active branches of units that the stages meet, and the programs of their mini-batches
            patterns = UnitPatterns(
                programs.plan,
                reference,
                self.source.stages.lacking,
                program=programs.main,
                transport=transport,
                reduces_early=reduces_early,
                reduces_each_backward=reduces_each_backward,
            )
        return RunnerContext(
            source=self.source.stages,
            reference=reference,
            transport=transport,
            device=self.setting.device,
            dtype=self.setting.dtype,
            sums_losses=self._config.loss_mean == "tokens",
            forwards=self._forwards,
            patterns=patterns,
        )

    def _compare_gathers(self, plan: PipelinePlan, programs: Sequence[RankProgram]) -> None:
        """Say where ranks hold more stages whole at a time than the plan counts with: one, or two with room."""
        for program in programs if self.setting.rank == 0 else ():
            planned = max(plan.stages[stage].gathered_bytes for stage in program.stages)
            if plan.memory:
                planned = max(planned, joined_breakdown([plan.memory[i] for i in program.stages]).gathered)
            most = gathered_at_once(plan, program)
            if most > planned:
                logger.warning(
                    "memory: rank %d holds %d bytes of gathered weights at a time where %d are planned: its stages' "
                    "ranks need each other between their tasks; put stages that share a rank on the same ranks",
                    *(program.rank, most, planned),
                )

    def _prefetch_programs(self, reference: Reference, plan: PipelinePlan) -> ProgramSet | None:
        """Return the programs that prefetch a frozen branch, proven; None without one, or memory for its outputs."""
        branch = frozen_branch(plan)
        if not branch:
            if self._config.frozen_prefetch == 1 and self.setting.rank == 0:
                logger.info(
                    "frozen_prefetch: no stage of the plan is frozen and reads only the data; none is prefetched"
                )
            return None
        tied = {stage for stages in tied_stages(plan, reference).values() for stage in stages}
        programs = lower_prefetch(plan, tied_stages=tied, reduce_each_backward=self.setting.zero_stage >= 2)
        validate_prefetch(plan, programs)
        names = ", ".join(repr(plan.stages[index].name) for index in sorted(branch))
        for rank in range(plan.num_ranks):
            own = [plan.memory[i] for i in plan.stages_of_rank(rank)] if plan.memory else []
            memory = joined_breakdown(own) if own else None
            carried = programs.of_rank(rank).most_bytes + (memory.messages if memory is not None else 0)
            if memory is not None and 0 < memory.limit < memory.total + carried:
                if self.setting.rank == 0:
                    logger.info(
                        "frozen_prefetch: frozen stages %s are not prefetched: rank %d would hold %d bytes of their "
                        "results beside the %d planned, and may use %d",
                        *(names, rank, carried, memory.total, memory.limit),
                    )
                return None
        if self.setting.rank == 0:
            logger.info("frozen_prefetch: frozen stages %s run the forwards of the next mini-batch", names)
        return programs

    def make_modules(self, runner: RankRunner, sample_batch: Batch) -> tuple[StageModule, ...]:
        """Return this rank's stages when every rank has its own: groups made after it wait no longer than messages.

        Raises:
            GppError: a rank could not; the same on every rank.
        """
        plan = runner.plan
        made: list[StageModule] = []

        def make() -> None:
            # modules cannot be sent: every rank keeps its own and sends only that it has them
            made.extend(self.source.make_modules(runner, sample_batch))

        stages = [plan.names_on_rank(rank) for rank in range(plan.num_ranks)]
        exchange(make, what="making the stages' modules", group=self.setting.group, stages=stages)
        return tuple(made)

    def close(self) -> None:
        """Close the transport; no runner runs any more."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _transport_for(
        self, plan: PipelinePlan, reference: Reference, channels: Collection[Channel]
    ) -> Transport | None:
        """Return what moves the messages of a plan's programs, or None where there are none."""
        if not channels:
            return None
        if self._transport is not None:
            self._transport.open(channels)
            return self._transport
        request = TransportRequest(
            plan=plan,
            specs=reference.block_graph.tensors,
            channels=frozenset(channels),
            device=str(self.setting.device),
            backend=self.setting.placement.backend,
            timeout_s=self._config.comm_timeout_s,
        )
        self._transport = find_transport(self._config.p2p).make(request)
        return self._transport


def _check_stages_step_alone(plan: PipelinePlan, reference: Reference) -> None:
    """Refuse stages that cannot step alone.

    Raises:
        PlanError: a parameter is on two stages, or several stages yield losses.
    """
    for name, stages in tied_stages(plan, reference).items():
        names = " and ".join(repr(plan.stages[index].name) for index in stages)
        raise PlanError(
            f"mode async: parameter {name!r} is on the stages {names}, which step at different times; {UNTIE}, or put "
            "the blocks that share it, and all between them, into one stage"
        )
    if len(plan.losses) > 1:
        raise PlanError(
            f"mode async: stages {list(plan.losses)} yield losses and only one may: a micro-batch has one loss to "
            'tell; add them up in one stage, or set mode to "sync"'
        )


# ---- running them -------------------------------------------------------------------------------------------


def share_of_loss(losses: Sequence[tuple[Tensor, int]], num_samples: int, *, is_sum: bool) -> float:
    """Return what losses add to that of a batch; reads the device once.

    Args:
        losses: each with the samples that it is of.
        num_samples: of the whole batch.
        is_sum: the batch's loss is the sum of all losses; else their mean by samples.
    """
    if not losses:
        return 0.0
    values = torch.stack([loss.reshape(()) for loss, _ in losses]).tolist()
    if is_sum:
        return sum(values)
    return sum(value * count for value, (_, count) in zip(values, losses, strict=True)) / num_samples


def failure_after(step: int, error: BaseException) -> str:
    """Return what ended a job, for whoever calls the engine again; an interrupt has no text of its own."""
    return f"the mini-batch after step {step} failed ({str(error) or type(error).__name__})"


class MiniBatchRunner:
    """Runs mini-batches; a failure that leaves messages under way ends the job.

    Args:
        stages: whose gradients a failed mini-batch leaves behind.
        memory: counts one mini-batch of training.
        group: of all ranks; None for a single one. Messages of others may still arrive after a failure here.
    """

    def __init__(self, stages: RankEngine, memory: MemoryWatch, *, group: dist.ProcessGroup | None) -> None:
        self.stages = stages
        self._memory = memory
        self._group = group
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self.failure: str | None = None

    def refuse_after_failure(self) -> None:
        """Refuse to go on where an earlier mini-batch failed on its way.

        Raises:
            RuntimeFailure: says which, and what to do.
        """
        if self.failure is not None:
            raise RuntimeFailure(f"this job cannot go on: {self.failure}; start it anew from a checkpoint")

    def run(
        self,
        runner: RankRunner,
        batch: Batch,
        *,
        following: Batch | None = None,
        record: bool = False,
        count: bool = False,
    ) -> MiniBatchResult:
        """Run one mini-batch, and leave nothing of it behind if it fails.

        Args:
            following, record, count: as of `RankRunner.run`.

        Raises:
            RuntimeFailure: an earlier mini-batch failed on its way, so that messages of it may still arrive.
        """
        self.refuse_after_failure()
        try:
            self.learn_shapes(runner, batch)
            if runner.has_ragged_units and runner.is_training:
                self.stages.rest(runner.unread_parameters(batch))
            return runner.run(batch, following=following, record=record, count=count)
        except BaseException as error:
            self.stages.zero_grad()
            # What capture or configuration refuse is refused before the first message, by every rank alike.
            if self._group is not None and not isinstance(error, (CaptureError, ConfigError)):
                self.failure = failure_after(self.stages.counters.global_steps, error)
            raise

    def learn_shapes(self, runner: RankRunner, batch: Batch) -> None:
        """Make code for units of shapes that were not met lately; collective over all ranks where there are any.

        Raises:
            CaptureError: a rank could not; the same on every rank.
        """
        # A rank makes code for its own units alone: before any message all know whether all could. Ranks that a plan
        # leaves idle have met nothing, and come to every such collectives (`stand_by`), but know no sets of inputs.
        if not runner.has_ragged_units:
            return
        has_idle = runner.plan.num_ranks < self._num_ranks
        if runner.has_new_shapes(batch) or has_idle:
            if not has_idle:
                runner.learn_branches(batch)
            do_together(lambda: runner.make_code(batch), what=_NEW_SHAPES, group=self._group)
        runner.note_shapes(batch)

    def stand_by(self, batch: Batch) -> None:
        """Do what a rank does while others run a batch on a plan that leaves it idle.

        Raises:
            CaptureError: they have no code for its units.
        """
        if isinstance(batch, UnitBatch):
            do_together(lambda: None, what=_NEW_SHAPES, group=self._group)

    def train(
        self, runner: RankRunner, batch: Batch, *, following: Batch | None = None, record: bool
    ) -> MiniBatchResult:
        """Run one mini-batch of training, counted if it is the one to compare with the plan."""
        counts = self._memory.is_due(batch)
        result = self.run(runner, batch, following=following, record=record, count=counts)
        # In mode async the pipeline fills first; counting goes on until as much is held as ever will be.
        if counts and runner.has_peaked:
            most, under_way = result.most_bytes, result.message_bytes
            self._memory.compare(result.memories, batch, most_bytes=most, message_bytes=under_way)
            self.stages.measures_gradients = False
        return result

    @contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Let nothing more run after a failure that other ranks do not share."""
        try:
            yield
        except BaseException as error:
            self.stages.zero_grad()
            self.failure = failure_after(self.stages.counters.global_steps, error)
            raise


# ---- evaluation ---------------------------------------------------------------------------------------------


class Evaluator:
    """Evaluates batches on the stages of a training plan; every method is collective over all ranks.

    Args:
        factory: makes this rank's runners; ``runner`` runs batches on them.
        plan, reference: of training.
        modules: the parameters of this rank's stages, by their index in the plan.
        collectives: of all ranks; those that a plan leaves idle wait here for the others.
    """

    def __init__(
        self,
        factory: RunnerFactory,
        runner: MiniBatchRunner,
        *,
        plan: PipelinePlan,
        reference: Reference,
        modules: Mapping[int, StageModule],
        collectives: Collectives,
    ) -> None:
        self._factory = factory
        self._runner = runner
        self._source = factory.source
        self._device = factory.setting.device
        self._stages = runner.stages
        self._collectives = collectives
        self._plan = plan
        self._reference = reference
        self._modules = dict(modules)
        self._graphs: OrderedDict[_GraphKey, _Graph] = OrderedDict()
        self._runners: OrderedDict[tuple[_GraphKey, int, Any], RankRunner | None] = OrderedDict()

    @torch.no_grad()
    def evaluate(
        self, batches: Sequence[Batch], *, outputs: tuple[str, ...], needs_loss: bool
    ) -> list[tuple[float, dict[str, Any]]]:
        """Return the mean loss of each batch and the named outputs of all its samples, on every rank.

        Args:
            batches: of one shape, or each one loss unit; they run as one, so that the pipeline stays full.

        Raises:
            ConfigError: ``needs_loss``, and the model returns none for such a batch.
            CommTimeout: a rank did not finish.
        """
        with _in_evaluation(self._modules.values()):
            return self._evaluate(batches, outputs=outputs, needs_loss=needs_loss)

    def _evaluate(
        self, batches: Sequence[Batch], *, outputs: tuple[str, ...], needs_loss: bool
    ) -> list[tuple[float, dict[str, Any]]]:
        batch, num_batches = batches[0], len(batches)
        # units may lack inputs that others have
        typical = max((unit for each in batches for unit in units_of(each)), key=len)
        # the captured graph depends on entries that are no tensors as well
        constants = {name: None if isinstance(v, Tensor) else repr(v) for name, v in typical.items()}
        key = (outputs, *sorted(constants.items(), key=lambda item: item[0]))
        reference, plan = self._graph(key, typical, outputs)
        if needs_loss and reference.analysis.op_graph.loss is None:
            raise ConfigError(
                f"eval_batch: the model returns no loss for a batch of {sorted(batch)}; give labels, or pass "
                "compute_loss=False"
            )
        rule = self._source.unit_rule(reference)
        given_in_units = [isinstance(each, UnitBatch) for each in batches]
        if rule is not None:
            batches = [
                rule.units(each) if isinstance(each, UnitBatch) else rule.evaluated(each) for each in batches
            ]
        self._source.learn_shapes(reference, typical)
        split = [parts_of(plan, each) for each in batches]
        totals = [0.0] * num_batches
        collected: list[dict[str, list[tuple[int, Tensor]]]] = [
            {name: [] for name in outputs} for _ in batches
        ]
        # Training's micro-batches do not divide any batch: with ones of 8 and a loss unit of 4, 21 samples run as 16, 4
        # and 1. Each part has a plan, and so a runner, of its own; ranks that a part leaves idle go on to the next.
        # Of three such batches the parts are 48, 12 and 3: no micro-batch has samples of two of them.
        # Nothing is agreed between one group of batches and the next, so a rank that has done its tasks of one begins
        # with the next: with 11 batches as 4, 4, 2 and 1 the pipeline fills once, not four times.
        groups = [(n, *parts) for n in groups_of(num_batches) for parts in zip(*split[n], strict=True)]
        for numbers, *parts in groups:
            part, (rows, counts) = parts[0][0], join_counted([own for _, own in parts])
            size = part.plan.mini_batch
            whole = dataclasses.replace(part.plan, mini_batch=size * len(parts))
            with self._weights_for(whole):
                runner = self._runner_for(key, reference, whole, rows)
                if runner is None:
                    self._runner.stand_by(rows)
                    continue
                result = self._runner.run(runner, rows)
            each = len(result.losses) // len(parts)
            for local, (number, factor) in enumerate(zip(range(num_batches)[numbers], counts, strict=True)):
                own = result.losses[local * each : (local + 1) * each]
                totals[number] += factor * share_of_loss(
                    own, _count(batches[number]), is_sum=runner.sums_losses
                )
            for name, pieces in result.outputs.items():
                for first, piece in pieces:
                    number, local = divmod(first, size)
                    of_batch = collected[numbers.start + number][name]
                    of_batch.append((part.first_sample + local, piece))
        # Losses come weighted by their samples of all: the sum over parts and ranks is the batch's.
        losses = self._collectives.sum(
            torch.tensor(totals, dtype=torch.float64), "the loss of an evaluation"
        ).tolist()
        found = self._gather(collected, reference, batches, given_in_units)
        return list(zip(losses, found, strict=True))

    def close(self) -> None:
        """Release all runners."""
        self._runners.clear()

    def _weights_for(self, plan: PipelinePlan) -> AbstractContextManager[None]:
        """Let a plan's programs gather weights that ranks hold in parts; where it leaves some idle, gather all."""
        is_whole = all(own.ranks == of.ranks for own, of in zip(plan.stages, self._plan.stages, strict=True))
        return self._stages.attached() if is_whole else self._stages.gathered()

    def _graph(self, key: _GraphKey, batch: Batch, outputs: tuple[str, ...]) -> _Graph:
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
            return found
        reference = self._source.analyse(batch, outputs)
        parameters = {p.name for p in reference.analysis.op_graph.parameters if not p.is_buffer}
        held = [parameters.intersection(names) for names in held_tensors(self._plan, self._reference)]
        # Evaluation may read what training skips: blocks that no stage has go where their parameters are held.
        plan = evaluation_plan(self._plan, reference.block_graph, parameters=parameters, held=held)
        if len(self._graphs) >= MAX_GRAPHS:
            oldest, _ = self._graphs.popitem(last=False)
            for runner_key in [other for other in self._runners if other[0] == oldest]:
                del self._runners[runner_key]
        self._graphs[key] = reference, plan
        return self._graphs[key]

    def _runner_for(
        self, key: _GraphKey, reference: Reference, plan: PipelinePlan, batch: Batch
    ) -> RankRunner | None:
        def make() -> RankRunner | None:
            runner = self._factory.make(reference, plan)
            if runner is not None:
                for (graph, *_), other in self._runners.items():
                    if other is not None and graph == key and other.plan.stages == runner.plan.stages:
                        runner.adopt_code(other)
                        break
                # of a smaller part the first data positions run alone, and of this rank's stages perhaps not all
                modules = [self._modules[stage] for stage in runner.stages]
                for module, function in zip(modules, runner.prepare(batch), strict=True):
                    self._source.complete_module(module, function.tensors)
                runner.bind(
                    modules, None, weights=[self._stages.of(stage).weights for stage in runner.stages]
                )
            return runner

        # two small parts and one larger may be as many samples, on other ranks and in other micro-batches
        sizes = tuple((stage.micro_batch_size, stage.ranks) for stage in plan.stages)
        return lately(self._runners, (key, plan.mini_batch, sizes), make, most=MAX_RUNNERS)

    def _gather(
        self,
        collected: Sequence[Mapping[str, list[tuple[int, Tensor]]]],
        reference: Reference,
        batches: Sequence[Batch],
        given_in_units: Sequence[bool],
    ) -> list[dict[str, Any]]:
        """Return the named outputs of all samples of each batch on every rank, in the order of samples.

        Those with a batch axis are joined along it; what is the same for every sample is returned once; what
        each loss unit has one of is joined along axis 0, or stacked where it has no axes. Of units that the user gave,
        with shapes of their own, nothing is joined: they are a list, in that order. Those that one batch was cut into
        are joined, unless their shapes differ.
        """
        if not collected[0]:
            return [{} for _ in batches]
        # Each rank brings pieces with the number of their first sample; sorted by it they are the batch again.
        own = [
            {name: [(first, piece.cpu()) for first, piece in pieces] for name, pieces in each.items()}
            for each in collected
        ]
        slots = self._collectives.gather(own, "the outputs of an evaluation")
        layouts = {node.name: node.output.layout for node in reference.analysis.op_graph.nodes if node.output}

        def join(number: int, name: str) -> Any:
            layout = layouts[reference.analysis.op_graph.outputs[name]]
            pieces = sorted((pair for slot in slots for pair in slot[number][name]), key=lambda pair: pair[0])
            tensors = [piece for _, piece in pieces]
            units = batches[number]
            if isinstance(units, UnitBatch):
                given = units.given or range(len(tensors))
                by_number = dict(zip(given, tensors, strict=True))
                tensors = [by_number[n].to(self._device) for n in range(len(tensors))]
                if given_in_units[number] or len({tensor.shape[1:] for tensor in tensors}) > 1:
                    return tensors
            if layout.kind is LayoutKind.UNIFORM:
                whole = tensors[0]
            elif layout.kind is LayoutKind.BATCH:
                whole = torch.cat(tensors, dim=layout.axis)
            else:
                whole = torch.cat(tensors) if tensors[0].ndim else torch.stack(tensors)
            return whole.to(self._device)

        return [{name: join(number, name) for name in collected[0]} for number in range(len(batches))]


@contextmanager
def _in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put stages in evaluation while the context lasts: users' modules run as they are; then each mode is as before."""
    stages = list(modules)
    before = [(part, part.training) for module in stages for part in module.modules()]
    try:
        for module in stages:
            module.eval()
        yield
    finally:
        for part, training in before:
            part.training = training


def _count(batch: Batch) -> int:
    """Return what a batch's loss is the mean over, losses being of so many: its samples, or its units."""
    return len(batch.units) if isinstance(batch, UnitBatch) else count_samples(batch)
