"""What one call of `train_batch` does on a rank: which lane runs, how often stages step, when a failure ends the job.

    LaneMaker          programs of all ranks for a plan, the transport of their messages, this rank's lanes
    MiniBatchRunner    runs a lane; after a mini-batch that failed on its way nothing more runs
    SynchronousSteps   a mini-batch from its first forward to the one step of all stages
    (look-ahead)       `ahead_steps.LookAheadSteps`: the same, with frozen stages' forwards of the next one in between
    (mode async)       `async_steps.AsynchronousSteps`: windows of a pipeline that stays full

The engine holds one strategy of steps (`StepStrategy`) and knows no difference between them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.guards.agreement import agree, fingerprint_of
from gpp_plugin.engine.job_context import Setting
from gpp_plugin.engine.memory_watch import MemoryWatch
from gpp_plugin.engine.metrics import share_of_loss
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import CaptureError, ConfigError, PlanError, RuntimeFailure
from gpp_plugin.ir.memory_plan import joined_breakdown
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.ir.timeline import Event
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.explicit.tied_blocks import UNTIE
from gpp_plugin.plugins import Channel, Transport, TransportRequest, find_transport
from gpp_plugin.runtime.ahead_lane import AheadLane
from gpp_plugin.runtime.batches import Batch, UnitBatch
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.kept_lanes import KeptAhead, KeptWindows
from gpp_plugin.runtime.lane import Lane, channels_of, make_programs, tied_stages
from gpp_plugin.runtime.rank_lane import RankLane
from gpp_plugin.runtime.ranks.agree import Meeting, do_together, exchange
from gpp_plugin.runtime.stage_module import StageModule
from gpp_plugin.runtime.stage_source import Reference, StageForwards
from gpp_plugin.runtime.unit_lane import AheadUnitLane, UnitLane, WindowUnitLane, plan_of_units
from gpp_plugin.runtime.weight_versions import MakePlaces
from gpp_plugin.runtime.window_lane import WindowLane
from gpp_plugin.schedule.checks.validate_windows import validate_ahead, validate_windows
from gpp_plugin.schedule.gathers import gathered_at_once, stages_that_reduce_early
from gpp_plugin.schedule.look_ahead import AheadPrograms, lower_ahead
from gpp_plugin.schedule.orders.gpipe import forward_only_stages, frozen_branch
from gpp_plugin.schedule.windows import lower_windows

logger = logging.getLogger(__name__)

_NEW_SHAPES = "code for a new shape"

# ---- lanes --------------------------------------------------------------------------------------------------


class LaneMaker:
    """Makes this rank's lanes: for training, and for each size of an evaluation. Every method is collective.

    All lanes share one transport, made with the first of them: they run one after the other, and each communicator
    takes memory of a device.

    Args:
        source: the model, whose stages give lanes their code.
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
        self._source = source
        self._config = config
        self._setting = setting
        self._transport: Transport | None = None

    def make(self, reference: Reference, plan: PipelinePlan, *, looks_ahead: bool = False) -> RankLane | None:
        """Return this rank's lane for a plan, or None where the plan leaves the rank idle.

        Args:
            looks_ahead: let a frozen branch run a mini-batch ahead, where the plan has one and memory allows it.
        """
        reduces_each_backward = self._setting.zero_stage >= 2
        is_of_units = self._config.units is not None or reference.analysis.takes_whole_units
        if is_of_units:
            plan = plan_of_units(plan)
        programs = make_programs(plan, reference, reduce_each_backward=reduces_each_backward)
        # each rank has made those of all: one that made others would wait for messages that nobody sends
        made = {"the plan": fingerprint_of(plan), "the programs": fingerprint_of(programs)}
        agree(made, what="a look at the programs", group=self._setting.group)
        ahead = self._programs_ahead(reference, plan) if looks_ahead else None
        self._compare_gathers(plan, programs)
        # Transports are made by all ranks, also by those that the plan leaves idle: a process group is made so.
        transport = self._transport_for(plan, reference, channels_of(programs))
        early = stages_that_reduce_early(plan, programs)
        for part in () if ahead is None else (ahead.steady, ahead.last):
            early &= stages_that_reduce_early(plan, part)
        program = next((each for each in programs if each.rank == self._setting.rank), None)
        if program is None:
            return None
        common: dict[str, Any] = dict(
            source=self._source.stages,
            reference=reference,
            plan=plan,
            transport=transport,
            device=self._setting.device,
            dtype=self._setting.dtype,
            sums_losses=self._config.loss_mean == "tokens",
            forwards=self._forwards,
        )
        if is_of_units:
            common["reduces_each_backward"] = reduces_each_backward
        if ahead is not None:
            own = ahead.of_rank(program.rank)
            kind: type[AheadLane] = AheadUnitLane if is_of_units else AheadLane
            return KeptAhead.of(kind, program=program, ahead=own, reduces_early=early, **common)
        make: type[Lane] = UnitLane if is_of_units else Lane
        return RankLane.make(make, program=program, reduces_early=early, **common)

    def _compare_gathers(self, plan: PipelinePlan, programs: Sequence[RankProgram]) -> None:
        """Say where ranks hold more stages whole at a time than the plan counts with: one, or two with room."""
        for program in programs if self._setting.rank == 0 else ():
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

    def _programs_ahead(self, reference: Reference, plan: PipelinePlan) -> AheadPrograms | None:
        """Return the programs that run a frozen branch ahead, proven; None without one, or room for its results."""
        branch = frozen_branch(plan)
        if not branch:
            if self._config.look_ahead == 1 and self._setting.rank == 0:
                logger.info(
                    "look_ahead: no stage of the plan is frozen and reads only the data; none runs ahead"
                )
            return None
        tied = {stage for stages in tied_stages(plan, reference).values() for stage in stages}
        programs = lower_ahead(plan, tied_stages=tied, reduce_each_backward=self._setting.zero_stage >= 2)
        validate_ahead(plan, programs)
        names = ", ".join(repr(plan.stages[index].name) for index in sorted(branch))
        for rank in range(plan.num_ranks):
            own = [plan.memory[i] for i in plan.stages_of_rank(rank)] if plan.memory else []
            memory = joined_breakdown(own) if own else None
            carried = programs.of_rank(rank).most_bytes + (memory.messages if memory is not None else 0)
            if memory is not None and 0 < memory.limit < memory.total + carried:
                if self._setting.rank == 0:
                    logger.info(
                        "look_ahead: frozen stages %s do not run ahead: rank %d would hold %d bytes of their results "
                        "beside the %d planned, and may use %d",
                        *(names, rank, carried, memory.total, memory.limit),
                    )
                return None
        if self._setting.rank == 0:
            logger.info("look_ahead: frozen stages %s run the forwards of the next mini-batch", names)
        return programs

    def make_windows(
        self, reference: Reference, plan: PipelinePlan, *, make_places: Callable[[int], MakePlaces]
    ) -> KeptWindows:
        """Return this rank's lane of a pipeline that stays full (mode async).

        Args:
            make_places: where a stage's trained weights may lie; asked when the lane is bound.

        Raises:
            PlanError: a parameter is on two stages, or several stages yield losses.
        """
        _check_stages_step_alone(plan, reference)
        make: type[WindowLane] = WindowLane
        if reference.analysis.takes_whole_units:
            plan, make = plan_of_units(plan), WindowUnitLane
        # A stage that trains nothing, and sends no gradients on, has forwards only; its windows lack the backwards.
        frozen = forward_only_stages(plan)
        programs = lower_windows(plan, forward_only_stages=frozen)
        validate_windows(plan, programs, forward_only_stages=frozen)
        own = programs.of_rank(self._setting.rank)
        return KeptWindows.of(
            make,
            programs=own,
            make_places={stage: make_places(stage) for stage in own.stages},
            source=self._source.stages,
            reference=reference,
            plan=plan,
            transport=self._transport_for(plan, reference, channels_of(programs.all)),
            device=self._setting.device,
            dtype=self._setting.dtype,
            forwards=self._forwards,
        )

    def make_modules(self, lane: RankLane, sample_batch: Batch) -> tuple[StageModule, ...]:
        """Return this rank's stages when every rank has its own: groups made after it wait no longer than messages.

        Raises:
            GppError: a rank could not; the same on every rank.
        """
        plan = lane.plan
        made: list[StageModule] = []

        def make() -> (
            None
        ):  # modules cannot be sent: every rank keeps its own and tells only that it has them
            made.extend(self._source.make_modules(lane, sample_batch))

        stages = [plan.names_on_rank(rank) for rank in range(plan.num_ranks)]
        exchange(make, what="making the stages' modules", group=self._setting.group, stages=stages)
        return tuple(made)

    def close(self) -> None:
        """Let go of the lanes' transport; none of them runs any more."""
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
            device=str(self._setting.device),
            backend=self._setting.placement.backend,
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


def failure_after(step: int, error: BaseException) -> str:
    """Return what ended a job, for whoever calls the engine again; an interrupt has no text of its own."""
    return f"the mini-batch after step {step} failed ({str(error) or type(error).__name__})"


class RankStep:
    """The step of a rank's program: of all its stages, or in mode async of one; looks at the gradients before it.

    Args:
        stages: steps, when it has been seen what they hold.
    """

    def __init__(self, stages: RankEngine, memory: MemoryWatch) -> None:
        self._stages = stages
        self._memory = memory
        self.keeps_gradients = False
        self.gradients: dict[str, Tensor] | None = None

    def __call__(self) -> StepResult:
        """Keep the gradients where the user asked, and step; collective over the ranks that step together."""
        self._note()
        if self.keeps_gradients:
            self.gradients = self._stages.full_gradients()
        return self._stages.step()

    def alone(self, stage: StageEngine) -> Callable[[], StepResult]:
        """Return the step of one stage by itself (mode async); collective over its ranks."""

        def step() -> StepResult:
            self._note()
            if self.keeps_gradients:
                self.gradients = {**(self.gradients or {}), **stage.full_gradients()}
            return stage.step()

        return step

    def _note(self) -> None:
        self._memory.note_gradients(stage.gradients for stage in self._stages.stages)


class StepHooks:
    """What a program calls on the optimizer side of one stage.

    Its first four calls are the stage's own, bound once: a program makes one of them for every micro-batch.

    Args:
        step: of all the rank's stages, or of this one alone.
    """

    def __init__(self, stage: StageEngine, step: Callable[[], StepResult]) -> None:
        self._stage = stage
        self.accumulate = stage.accumulate
        self.begin_reduction = stage.begin_reduction
        self.reduce_data = stage.reduce_data
        self.reduce_tied = stage.reduce_tied
        self.step = step

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch."""
        return self._stage.loss_scale


class MiniBatchRunner:
    """Runs lanes on mini-batches; a failure that leaves messages under way ends the job.

    Args:
        stages: whose gradients a failed mini-batch leaves behind.
        memory: counts one mini-batch of training.
        group: of all ranks; None for a single one. Messages of others may still arrive after a failure here.
    """

    def __init__(self, stages: RankEngine, memory: MemoryWatch, *, group: dist.ProcessGroup | None) -> None:
        self._stages = stages
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
        self, lane: RankLane, batch: Batch, *, record: bool = False, count: bool = False
    ) -> MiniBatchResult:
        """Run one mini-batch, and leave nothing of it behind if it fails.

        Args:
            record, count: as of `RankLane.run`.

        Raises:
            RuntimeFailure: an earlier mini-batch failed on its way, so that messages of it may still arrive.
        """
        self.refuse_after_failure()
        try:
            self.learn_shapes(lane, batch)
            if lane.units and lane.is_training:
                self._stages.rest(lane.unread_parameters(batch))
            return lane.run(batch, record=record, count=count)
        except BaseException as error:
            self._stages.zero_grad()
            # What capture or configuration refuse is refused before the first message, by every rank alike.
            if self._group is not None and not isinstance(error, (CaptureError, ConfigError)):
                self.failure = failure_after(self._stages.global_steps, error)
            raise

    def learn_shapes(self, lane: RankLane, batch: Batch) -> None:
        """Make code for units of shapes that were not met lately; collective over all ranks where there are any.

        Raises:
            CaptureError: a rank could not; the same on every rank.
        """
        # A rank makes code for its own units alone: before any message all know whether all could. Ranks that a plan
        # leaves idle have met nothing, and come to every such meeting (`stand_by`), but know no sets of inputs.
        if not lane.units:
            return
        has_idle = lane.plan.num_ranks < self._num_ranks
        if lane.has_new_shapes(batch) or has_idle:
            if not has_idle:
                lane.learn_patterns(batch)
            do_together(lambda: lane.learn_shapes(batch), what=_NEW_SHAPES, group=self._group)
        lane.note_shapes(batch)

    def stand_by(self, batch: Batch) -> None:
        """Do what a rank does while others run a batch on a plan that leaves it idle.

        Raises:
            CaptureError: they have no code for its units.
        """
        if isinstance(batch, UnitBatch):
            do_together(lambda: None, what=_NEW_SHAPES, group=self._group)

    def train(self, lane: RankLane, batch: Batch, *, record: bool) -> MiniBatchResult:
        """Run one mini-batch of training, counted if it is the one to compare with the plan."""
        counts = self._memory.is_due(batch)
        result = self.run(lane, batch, record=record, count=counts)
        # In mode async the first windows fill the pipeline; counting goes on until as much is held as ever will be.
        if counts and lane.has_peaked:
            most, under_way = result.most_bytes, result.message_bytes
            self._memory.compare(result.memories, batch, most_bytes=most, message_bytes=under_way)
        return result

    @contextlib.contextmanager
    def ending_on_failure(self) -> Iterator[None]:
        """Let nothing more run after a failure that other ranks do not share."""
        try:
            yield
        except BaseException as error:
            self._stages.zero_grad()
            self.failure = failure_after(self._stages.global_steps, error)
            raise


# ---- strategies of steps ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCall:
    """What one call of `train_batch` brought: the mean loss, the last step, and what happened when, if recorded."""

    loss: float
    step: StepResult
    events: Sequence[Event]


class StepStrategy(Protocol):
    """How training goes from one mini-batch to the next; every method is collective over all ranks."""

    @property
    def staleness(self) -> dict[str, int]:
        """Return, by stage, how many updates lie between the weights of a gradient and the update it makes."""

    @property
    def looks_ahead(self) -> bool:
        """Return whether `train` has use for the mini-batch that follows."""

    def train(self, batch: Batch, *, following: Batch | None = None, record: bool) -> TrainedCall:
        """Train on one mini-batch.

        Args:
            following: the next call's, where it is known and of use.

        Raises:
            CommTimeout, RuntimeFailure: a rank failed, or was given other data.
        """

    def drain(self) -> None:
        """Finish what is under way; the model is then what a synchronous view of it would be."""

    def flush(self) -> float | None:
        """Drain; return the mean of the losses that no call has returned, None if there are none."""


class SynchronousSteps:
    """A mini-batch from its first forward to the one step of all stages; nothing is under way between calls.

    Args:
        meeting: of all ranks.
        has_peers: there are other ranks to agree with.
    """

    def __init__(
        self,
        lane: RankLane,
        stages: RankEngine,
        runner: MiniBatchRunner,
        *,
        meeting: Meeting,
        has_peers: bool,
    ) -> None:
        self._lane = lane
        self._stages = stages
        self._runner = runner
        self._meeting = meeting
        self._has_peers = has_peers

    @property
    def staleness(self) -> dict[str, int]:
        """Return 0 for every stage that trains: a step is made with gradients of the weights that it updates."""
        plan = self._lane.plan
        frozen = forward_only_stages(plan)
        return {stage.name: 0 for index, stage in enumerate(plan.stages) if index not in frozen}

    @property
    def looks_ahead(self) -> bool:
        """Return False: a mini-batch begins when the one before it has ended."""
        return False

    def train(self, batch: Batch, *, following: Batch | None = None, record: bool) -> TrainedCall:
        """Run one mini-batch and its step; the loss is the mini-batch's own."""
        result = self._runner.train(self._lane, batch, record=record)
        loss = self._agree_on_loss(result)
        return TrainedCall(loss=loss, step=self._stages.end_mini_batch(), events=result.events)

    def drain(self) -> None:
        """Do nothing: nothing is under way."""

    def flush(self) -> None:
        """Return None: every call has returned its loss."""

    def _agree_on_loss(self, result: MiniBatchResult) -> float:
        """Return the mean loss on every rank."""
        lane = self._lane
        mine = share_of_loss(result.losses, lane.plan.mini_batch, is_sum=lane.sums_losses)
        if not self._has_peers:
            return mine
        own = torch.tensor([mine], dtype=torch.float64)
        return float(self._meeting.sum(own, f"the loss of step {self._stages.global_steps}"))


def different_data(step: int, *, checksum: int, rank: int) -> RuntimeFailure:
    """Return the error of ranks that were given different mini-batches."""
    return RuntimeFailure(
        f"step {step}: the ranks were given different mini-batches (checksum {checksum} on rank {rank}); give every "
        "rank the same stream of batches: no DistributedSampler, the same shuffle seed everywhere"
    )
