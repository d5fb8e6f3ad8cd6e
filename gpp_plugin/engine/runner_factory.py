"""Makes this rank's runners: programs of all ranks for a plan, the transport of their messages, code by shape.

Source: this project
Tests: tests/integrations/test_engine.py, tests/integrations/test_frozen_ahead.py, tests/integrations/test_async.py
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.memory_plan import joined_breakdown
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.tied_blocks import UNTIE
from gpp_plugin.plugins import Channel, Transport, TransportRequest, find_transport
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.rank_programs import channels_of, make_programs, plan_of_units, tied_stages
from gpp_plugin.runtime.rank_runner import RankRunner
from gpp_plugin.runtime.ranks.agreement import agree, fingerprint_of
from gpp_plugin.runtime.ranks.collectives import exchange
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.stage_module import Reference, StageForwards, StageModule
from gpp_plugin.runtime.stage_runner import RunnerContext
from gpp_plugin.runtime.unit_patterns import UnitPatterns
from gpp_plugin.runtime.weight_versions import MakePlaces
from gpp_plugin.schedule.checks.validate_programs import validate_async, validate_prefetch
from gpp_plugin.schedule.gathers import gathered_at_once, stages_that_reduce_early
from gpp_plugin.schedule.orders.gpipe import forward_only_stages, frozen_branch
from gpp_plugin.schedule.program_sets import (
    SYNCHRONOUS,
    ProgramSet,
    RankPrograms,
    lower_async,
    lower_prefetch,
)

logger = logging.getLogger(__name__)


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
        self._source = source
        self._config = config
        self._setting = setting
        self._transport: Transport | None = None

    def make(
        self, reference: Reference, plan: PipelinePlan, *, may_prefetch: bool = False
    ) -> RankRunner | None:
        """Return this rank's runner for a plan, or None where the plan leaves the rank idle.

        Args:
            may_prefetch: run a frozen branch on the next mini-batch, where the plan has one and memory allows it.
        """
        reduces_each_backward = self._setting.zero_stage >= 2
        is_of_units = self._config.units is not None or reference.analysis.takes_whole_units
        if is_of_units:
            plan = plan_of_units(plan)
        whole = make_programs(plan, reference, reduce_each_backward=reduces_each_backward)
        # each rank has made those of all: one that made others would wait for messages that nobody sends
        made = {"the plan": fingerprint_of(plan), "the programs": fingerprint_of(whole)}
        agree(made, what="a look at the programs", group=self._setting.group)
        prefetch = self._prefetch_programs(reference, plan) if may_prefetch else None
        self._compare_gathers(plan, whole)
        # Transports are made by all ranks, also by those that the plan leaves idle: a process group is made so.
        transport = self._transport_for(plan, reference, channels_of(whole))
        early = stages_that_reduce_early(plan, whole)
        if prefetch is not None:
            for name in ("steady", "epilogue"):
                early &= stages_that_reduce_early(plan, prefetch.programs[name])
        if all(program.rank != self._setting.rank for program in whole):
            return None
        programs = prefetch or ProgramSet(plan=plan, programs={}, policy=SYNCHRONOUS)
        programs = dataclasses.replace(programs, programs={"whole": whole, **programs.programs})
        own = programs.of_rank(self._setting.rank)
        patterns = None
        if is_of_units:
            patterns = self._patterns(reference, own, transport, early, reduces_each_backward)
        return RankRunner(own, self._context(reference, transport, patterns), reduces_early=early)

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
        own = programs.of_rank(self._setting.rank)
        transport = self._transport_for(plan, reference, channels_of(programs.all))
        patterns = self._patterns(reference, own, transport) if is_of_units else None
        return RankRunner(
            own,
            self._context(reference, transport, patterns),
            make_places={stage: make_places(stage) for stage in own.stages},
        )

    def _context(
        self, reference: Reference, transport: Transport | None, patterns: UnitPatterns | None
    ) -> RunnerContext:
        return RunnerContext(
            source=self._source.stages,
            reference=reference,
            transport=transport,
            device=self._setting.device,
            dtype=self._setting.dtype,
            sums_losses=self._config.loss_mean == "tokens",
            forwards=self._forwards,
            patterns=patterns,
        )

    def _patterns(
        self,
        reference: Reference,
        programs: RankPrograms,
        transport: Transport | None,
        reduces_early: Collection[int] = (),
        reduces_each_backward: bool = False,
    ) -> UnitPatterns:
        """Return the active branches of units that a rank's stages meet, and the programs of their mini-batches."""
        return UnitPatterns(
            programs.plan,
            reference,
            self._source.stages.lacking,
            program=programs.main,
            transport=transport,
            reduces_early=reduces_early,
            reduces_each_backward=reduces_each_backward,
        )

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

    def _prefetch_programs(self, reference: Reference, plan: PipelinePlan) -> ProgramSet | None:
        """Return the programs that prefetch a frozen branch, proven; None without one, or memory for its outputs."""
        branch = frozen_branch(plan)
        if not branch:
            if self._config.frozen_prefetch == 1 and self._setting.rank == 0:
                logger.info(
                    "frozen_prefetch: no stage of the plan is frozen and reads only the data; none is prefetched"
                )
            return None
        tied = {stage for stages in tied_stages(plan, reference).values() for stage in stages}
        programs = lower_prefetch(plan, tied_stages=tied, reduce_each_backward=self._setting.zero_stage >= 2)
        validate_prefetch(plan, programs)
        names = ", ".join(repr(plan.stages[index].name) for index in sorted(branch))
        for rank in range(plan.num_ranks):
            own = [plan.memory[i] for i in plan.stages_of_rank(rank)] if plan.memory else []
            memory = joined_breakdown(own) if own else None
            carried = programs.of_rank(rank).most_bytes + (memory.messages if memory is not None else 0)
            if memory is not None and 0 < memory.limit < memory.total + carried:
                if self._setting.rank == 0:
                    logger.info(
                        "frozen_prefetch: frozen stages %s are not prefetched: rank %d would hold %d bytes of their "
                        "results beside the %d planned, and may use %d",
                        *(names, rank, carried, memory.total, memory.limit),
                    )
                return None
        if self._setting.rank == 0:
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
            made.extend(self._source.make_modules(runner, sample_batch))

        stages = [plan.names_on_rank(rank) for rank in range(plan.num_ranks)]
        exchange(make, what="making the stages' modules", group=self._setting.group, stages=stages)
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
