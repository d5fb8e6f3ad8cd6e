"""`GraphPipelineEngine`: DeepSpeed's pipeline engine, for a graph of stages.

It has the public surface of `deepspeed.runtime.pipe.engine.PipelineEngine`; what differs is said where
it does. The engine owns the loop over mini-batches; the stage's optimizer side is a `StageEngine`, the
stage's code and messages a `Lane`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.doors import Channel, Transport, TransportRequest
from gpp_plugin.errors import CaptureError, ConfigError, RuntimeFailure
from gpp_plugin.extensions import find_transport
from gpp_plugin.integrations.data import Feed, make_loader, repeat
from gpp_plugin.integrations.engine_files import PipelineFiles
from gpp_plugin.integrations.evaluation import Evaluator
from gpp_plugin.integrations.memory import MemoryWatch
from gpp_plugin.integrations.metrics import Metrics, keep_timeline
from gpp_plugin.integrations.model_source import ModelSource
from gpp_plugin.integrations.preparation import Setting
from gpp_plugin.integrations.stage_config import NO_OPTIMIZER
from gpp_plugin.integrations.stage_engine import StageEngine, StepResult, TiedParameter
from gpp_plugin.integrations.stage_groups import StageGroups
from gpp_plugin.ir.memory_report import MemoryReport
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.timeline import Event, Timeline
from gpp_plugin.plan.edge_transports import note_edge_transports
from gpp_plugin.runtime.agree import exchange
from gpp_plugin.runtime.batches import Batch, batch_checksum
from gpp_plugin.runtime.executor import MiniBatchResult
from gpp_plugin.runtime.meeting import Meeting
from gpp_plugin.runtime.pipeline import (
    Lane,
    Reference,
    channels_of,
    make_programs,
    tied_stages,
)
from gpp_plugin.runtime.recorder import Clock, start_clock
from gpp_plugin.runtime.stage_module import StageModule
from gpp_plugin.stage_graph.graph import StageGraph

logger = logging.getLogger(__name__)

LOADING_TIMEOUT_S = 600.0
"""How long ranks wait for one that loads data; a failure they hear of at once."""


def failure_after(step: int, error: BaseException) -> str:
    """Return what ended a job, for whoever calls the engine again; an interrupt has no text of its own."""
    return f"the mini-batch after step {step} failed ({str(error) or type(error).__name__})"


class GraphPipelineEngine(PipelineFiles):
    """Trains a model as a graph of pipeline stages; made by `deepspeed.initialize`.

    Args:
        model: the user's model, or graph of stages; after construction it keeps only this rank's stage.
        ds_config: the whole DeepSpeed configuration as a dict.
        config: its checked ``graph_pipeline`` block.
        setting: ranks, device, precision and batch sizes.
        sample_batch: what the model is captured and profiled with.
        optimizer: a callable from parameter groups to an optimizer, or None for the JSON's block.
        parameter_groups: optimizer groups by parameter name, or None for one group of all.
        lr_scheduler: a callable from an optimizer to a scheduler, or None for the JSON's block.

    Raises:
        GppError: model, configuration or data do not fit; the same on every rank.
    """

    _stage_engine_type: type[StageEngine] = StageEngine

    def __init__(
        self,
        *,
        model: nn.Module | StageGraph,
        ds_config: Mapping[str, Any],
        config: GraphPipelineConfig,
        setting: Setting,
        sample_batch: Batch,
        optimizer: Callable[..., Any] | None = None,
        parameter_groups: Sequence[Mapping[str, Any]] | None = None,
        lr_scheduler: Callable[..., Any] | None = None,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.config = config
        self.device = setting.device
        self.global_rank = setting.rank
        self.last_timeline: Timeline | None = None
        self.record_timelines = config.trace_path is not None
        self._ds_config = dict(ds_config)
        self._setting = setting
        self._source = ModelSource(model, config=config, setting=setting)
        find_transport(config.p2p).check(str(setting.device))
        self._reference, plan = self._source.prepare_plan(sample_batch)
        self.plan = note_edge_transports(plan, config.p2p)
        lane = self._make_lane(self._reference, self.plan)
        assert lane is not None, "every rank is in a stage of the training plan"
        self._lane: Lane = lane
        self.module = self._make_module(sample_batch)
        self._tied = tuple(
            TiedParameter(name=name, stages=stages, owner=stages[0])
            for name, stages in tied_stages(self.plan, self._reference).items()
        )
        timeout_s = max(config.comm_timeout_s, LOADING_TIMEOUT_S)
        self._meeting = Meeting(
            group=setting.group, who=f"rank {setting.rank}, stage {self.stage_name!r}", timeout_s=timeout_s
        )
        self._groups = StageGroups.create(self.plan, self._tied, timeout_s=config.comm_timeout_s)
        self.stage_engine = self._stage_engine_type(
            module=self.module,
            config=self._ds_config,
            plan=self.plan,
            rank=setting.rank,
            groups=self._groups,
            tied=self._tied,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            parameter_groups=parameter_groups,
            device=setting.device,
        )
        self._can_step = optimizer is not None or bool(self._ds_config.get("optimizer"))
        self._source.share_weights(self.module)
        self._last_step: StepResult | None = None
        self._failure: str | None = None
        self._is_destroyed = False
        self._gradients: dict[str, Tensor] | None = None
        self._keeps_gradients = False
        self._lane.bind(self.module, _Hooks(self))
        self._feed = self._make_feed(sample_batch, timeout_s)
        self.training_dataloader: Any = None
        self._data_iterator: Iterator[Any] | None = None
        self._owns_loader = training_data is not None
        if self._owns_loader:
            self.training_dataloader = make_loader(
                training_data, mini_batch=self.plan.mini_batch, collate_fn=collate_fn, seed=config.seed
            )
        self._make_watchers(sample_batch)

    # ---- construction --------------------------------------------------------------------------

    def _make_lane(self, reference: Reference, plan: PipelinePlan) -> Lane | None:
        """Return this rank's lane for a plan, or None where the plan leaves the rank idle; collective."""
        programs = make_programs(plan, reference, reduce_each_backward=self._setting.zero_stage >= 2)
        transport = self._make_transport(plan, reference, channels_of(programs))
        for program in programs:
            if program.rank == self._setting.rank:
                return Lane(
                    source=self._source.stages,
                    reference=reference,
                    plan=plan,
                    program=program,
                    transport=transport,
                    device=self.device,
                    dtype=self._setting.dtype,
                )
        return None

    def _make_module(self, sample_batch: Batch) -> StageModule:
        """Return this rank's stage when every rank has made its own: groups made after it wait no longer than messages.

        Raises:
            GppError: a rank could not; the same on every rank.
        """
        made: list[StageModule] = []

        def make() -> None:
            made.append(self._source.make_module(self._lane, sample_batch))

        stages = [self.plan.stages[self.plan.stage_of_rank(r)].name for r in range(self.plan.num_ranks)]
        exchange(make, what="making the stages' modules", group=self._setting.group, stages=stages)
        return made[0]

    def _make_transport(
        self, plan: PipelinePlan, reference: Reference, channels: Collection[Channel]
    ) -> Transport | None:
        """Return what moves the messages of a plan's programs, or None where there are none; collective."""
        if not channels:
            return None
        request = TransportRequest(
            plan=plan,
            specs=reference.block_graph.tensors,
            channels=frozenset(channels),
            device=str(self.device),
            timeout_s=self.config.comm_timeout_s,
        )
        return find_transport(self.config.p2p).make(request)

    def _make_feed(self, sample_batch: Batch, timeout_s: float) -> Feed:
        """Return what gives this rank its mini-batches.

        Args:
            timeout_s: how long this rank waits for one that loads.
        """
        reading = self._ranks_that_read()
        return Feed(
            prepare=self._source.prepare_batch,
            mini_batch=self.plan.mini_batch,
            reads_inputs=self.global_rank in reading,
            source=min(reading),
            group=self._setting.group,
            keys=sample_batch,
            timeout_s=timeout_s,
            loads_ahead=self.config.mode == "async",
        )

    def _make_watchers(self, sample_batch: Batch) -> None:
        """Make what evaluates, and what reports on training and memory."""
        self._evaluator = Evaluator(
            source=self._source,
            setting=self._setting,
            plan=self.plan,
            reference=self._reference,
            module=self.module,
            make_lane=self._make_lane,
            run=self._run,
            meeting=self._meeting,
        )
        self._metrics = Metrics(self._ds_config, self._setting, self._reference, self.plan)
        self._memory = MemoryWatch(
            self.plan,
            config=self.config,
            setting=self._setting,
            sample_batch=sample_batch,
            reads=self._inputs_read(),
            meeting=self._meeting,
        )

    def _ranks_that_read(self) -> set[int]:
        """Return the ranks whose stages read model inputs."""
        blocks = {block.name: block for block in self._reference.block_graph.blocks}
        return {
            rank
            for stage in self.plan.stages
            for rank in stage.ranks
            if any(blocks[name].inputs for name in stage.blocks)
        }

    def _inputs_read(self) -> set[str]:
        """Return the keys of the batch that this rank's stage reads."""
        own = set(self.plan.stages[self._lane.stage_index].blocks)
        blocks = self._reference.block_graph.blocks
        return {key for block in blocks if block.name in own for key in block.inputs}

    # ---- training ------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step on ``train_batch_size`` samples and return the mean loss.

        Args:
            data_iter: batches whose samples sum to ``train_batch_size``, the same stream on every rank;
                the engine's own loader (``training_data``) if None.

        Returns:
            The mean loss of the mini-batch, a scalar on this rank's device, the same on every rank.

        Raises:
            ConfigError: there is no optimizer, no data, or its keys or sizes do not fit.
            StopIteration: ``data_iter`` had ended already.
            CommTimeout, RuntimeFailure: a rank failed; names rank, stage, edge and micro-batch.
        """
        start = time.perf_counter()
        batch = self._next_batch(data_iter)
        clock = start_clock(self._meeting) if self.record_timelines else None
        self._source.meet(self._reference, batch)
        self.module.train()
        result = self._run(self._lane, batch, record=clock is not None)
        loss = self._agree_on_loss(result, batch)
        step = result.step_result
        assert isinstance(step, StepResult)
        return self._end_call(result.events, clock, loss=loss, step=step, start=start)

    def _end_call(
        self,
        events: Sequence[Event],
        clock: Clock | None,
        *,
        loss: float,
        step: StepResult,
        start: float,
    ) -> Tensor:
        """Keep the timeline, tell the metrics, and return the loss as `train_batch` does.

        Args:
            clock: started with the mini-batch; None where no timeline is recorded.
            start: when the call began, by `time.perf_counter`.
        """
        self._last_step = step
        if clock is not None:
            self.last_timeline = keep_timeline(
                events,
                clock,
                plan=self.plan,
                meeting=self._meeting,
                path=self.config.trace_path,
                step=self.global_steps,
            )
        self._metrics.after_step(
            loss=loss,
            step=step,
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            seconds=time.perf_counter() - start,
        )
        return torch.tensor(loss, dtype=torch.float32, device=self.device)

    def _run(self, lane: Lane, batch: Batch, *, record: bool = False) -> MiniBatchResult:
        """Run one mini-batch, and leave nothing of it behind if it fails.

        Raises:
            RuntimeFailure: an earlier mini-batch failed on its way, so that messages of it may still arrive.
        """
        self._refuse_after_failure()
        counts = lane is self._lane and self._memory.is_due(batch)
        try:
            result = lane.run(batch, record=record, count=counts)
        except BaseException as error:
            self.stage_engine.zero_grad()
            if self._setting.group is not None and not isinstance(error, (CaptureError, ConfigError)):
                self._failure = failure_after(self.global_steps, error)
            raise
        if counts and lane.has_peaked:
            self._memory.compare(result.memory, batch)
        return result

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeFailure(f"this job cannot go on: {self._failure}; start it anew from a checkpoint")

    def _next_batch(self, data_iter: Iterator[Any] | None) -> dict[str, Any]:
        self._refuse_after_failure()
        if not self._can_step:
            raise ConfigError(NO_OPTIMIZER)
        if data_iter is None and self._data_iterator is None and self.training_dataloader is not None:
            self._data_iterator = repeat(self.training_dataloader)
        return self._feed.mini_batch(data_iter, self._data_iterator, is_own=self._owns_loader)

    def _agree_on_loss(self, result: MiniBatchResult, batch: Batch) -> float:
        """Return the mean loss on every rank, and refuse ranks that were given different data."""
        mine = sum(float(loss) * count for loss, count in result.losses) / self.plan.mini_batch
        if self._setting.group is None:
            return mine
        reads = self._feed.reads_inputs
        checksum = float(batch_checksum(batch)) if reads else 0.0
        own = torch.tensor([mine, checksum, checksum * checksum, float(reads)], dtype=torch.float64)
        facts = self._meeting.sum(own, f"the loss of step {self.global_steps}")
        loss, total, squares, readers = facts.tolist()
        if squares * readers != total * total:
            raise RuntimeFailure(
                f"step {self.global_steps}: the ranks were given different mini-batches (checksum "
                f"{int(checksum)} on rank {self.global_rank}); give every rank the same stream of batches: no "
                "DistributedSampler, the same shuffle seed everywhere"
            )
        return float(loss)

    # ---- evaluation ----------------------------------------------------------------------------

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        outputs: Sequence[str] = ("logits",),
    ) -> Any:
        """Evaluate one batch from ``data_iter`` (of any size) and return its mean loss.

        Dropout is off and no gradient is kept. The loss is the mean over loss units, a smaller last one
        weighted by its samples; every rank gets it.

        Args:
            return_logits: also return the named ``outputs`` of the model, samples in order, on every rank.
            compute_loss: False evaluates without labels and returns the outputs only.

        Returns:
            The loss; with ``return_logits`` the pair of loss and outputs (one tensor, or a dict where
            several were asked for); with ``compute_loss=False`` the outputs.
        """
        if reduce_output not in ("avg", None) or num_micro_batches is not None or not bcast_loss:
            raise ConfigError(
                "eval_batch: only reduce_output='avg', bcast_loss=True and num_micro_batches=None are supported; "
                "the mean loss is returned on every rank and the batch decides how many micro-batches run"
            )
        batch = self._feed.take(data_iter)
        wanted = tuple(outputs) if return_logits or not compute_loss else ()
        if not compute_loss:
            batch = {key: value for key, value in batch.items() if key not in ("labels", "return_loss")}
        loss, found = self._evaluator.evaluate(batch, outputs=wanted, needs_loss=compute_loss)
        value = torch.tensor(loss, dtype=torch.float32, device=self.device)
        if not wanted:
            return value
        answer = found[wanted[0]] if len(wanted) == 1 else found
        return (value, answer) if compute_loss else answer

    # ---- data ----------------------------------------------------------------------------------

    def set_dataloader(self, loader: Any) -> None:
        """Use ``loader`` (the same batches on every rank) when `train_batch` is called without data."""
        self.training_dataloader = loader
        self._data_iterator = None
        self._owns_loader = False

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch that is taken from an iterator; it returns a dict of tensors."""
        self._feed.batch_fn = fn

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Use ``iterator`` when `train_batch` is called without data."""
        self._data_iterator = iterator
        self._owns_loader = False

    # ---- gradients -----------------------------------------------------------------------------

    def retain_gradients(self, retain: bool = True) -> None:
        """Keep each step's gradients for `gradients`; costs a copy of this stage's gradients.

        Call it on every rank: under ZeRO 1 and 2 the ranks of a stage gather them together.
        """
        self._keeps_gradients = retain

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's unscaled, unclipped fp32 gradients of this stage's parameters, whole ones.

        Raises:
            ConfigError: `retain_gradients` was not called before the step.
        """
        if self._gradients is None:
            raise ConfigError("gradients are not kept; call engine.retain_gradients() before train_batch()")
        return self._gradients

    # ---- the end -------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Let go of process groups, transports and optimizer; the engine trains no more; collective.

        A process that ends anyway need not call it. One that makes another engine should: every group has threads
        that wake up a hundred times a second.
        """
        if self._is_destroyed:
            return
        self._is_destroyed = True
        self._failure = "its engine was destroyed"
        group = self._setting.group
        self._meeting.meet("the end")  # what others still send arrives before its group goes
        self._evaluator.close()
        self._lane.close()
        if self.stage_engine.deepspeed is not None:
            self.stage_engine.deepspeed.destroy()
        self._groups.close()
        self._source.close()
        if group is not None:
            dist.destroy_process_group(group)

    # ---- memory --------------------------------------------------------------------------------

    def memory_report(self) -> MemoryReport:
        """Return predicted and measured memory of every rank, what fills it, and what to change to fit; collective.

        Measured is what the first mini-batch of the sample batch's shape held (on CUDA, the allocator's peak since
        construction). `report.memory_text.format_memory_report` makes a table of it.
        """
        return self._memory.report(self.stage_engine)


class _Hooks:
    """What the executor calls on the optimizer side; keeps gradients where the user asked."""

    def __init__(self, engine: GraphPipelineEngine) -> None:
        self._engine = engine
        self._stage = engine.stage_engine
        self.accumulate = self._stage.accumulate
        self.reduce_data = self._stage.reduce_data
        self.reduce_tied = self._stage.reduce_tied

    @property
    def loss_scale(self) -> float:
        return self._stage.loss_scale

    def step(self) -> StepResult:
        self._engine._memory.note_gradients(self._stage.gradients)
        if self._engine._keeps_gradients:
            self._engine._gradients = self._stage.full_gradients()
        return self._stage.step()
