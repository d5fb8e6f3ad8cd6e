"""`GraphPipelineEngine`: DeepSpeed's pipeline engine, for a graph of stages.

It has the public surface of `deepspeed.runtime.pipe.engine.PipelineEngine`; what differs is said where
it does. It is composed of parts, each of which receives what it needs:

    steps          what a call of `train_batch` does, from one mini-batch to the next
    runner         runs a mini-batch, and ends the job when one fails on its way
    rank_runner    this rank's programs, its stages' code by shape, their messages
    rank_engine    gradients, optimizers and counters of this rank's stages
    data, source   mini-batches
    files          checkpoints, exports, state dicts
    evaluator      `eval_batch`
    generator      `generate`, made when it is first called
    metrics        what users see of training
    memory         what ranks hold, against the plan

No file here depends on a framework: the engine is given what makes optimizers and monitors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.backends.measured_backends import BackendLog
from gpp_plugin.backends.stage_backends import (
    StageBackends,
    check_backends_installed,
    choose_backends,
    compile_stages,
    with_backends,
)
from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.engine.compatibility import PipelineSurface
from gpp_plugin.engine.engine_files import PipelineFiles
from gpp_plugin.engine.framework import Monitor, StageReplica, WeightUpdater
from gpp_plugin.engine.loading.batch_source import (
    LOADING_TIMEOUT_S,
    check_axes,
    inputs_read,
)
from gpp_plugin.engine.loading.row_loader import make_row_loader
from gpp_plugin.engine.loading.training_data import TrainingData, make_batch_source, sample_unit
from gpp_plugin.engine.memory_watch import MemoryWatch
from gpp_plugin.engine.metrics import Metrics, NanLocator, SkippedSteps, first_found, keep_timeline
from gpp_plugin.engine.mini_batch_runner import Evaluator, MiniBatchRunner, RunnerFactory
from gpp_plugin.engine.model_watch import ModelWatch
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.sharded_weights import check_sharding
from gpp_plugin.engine.stage_groups import StageGroups, tied_parameters
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.engine.training_steps import TrainingSteps
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.memory_report import CacheReport, MemoryReport
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import StageBackend
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.model.generation.generator import NOTHING_GENERATED, Generator
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.plan.edge_transports import note_edge_transports
from gpp_plugin.plugins import find_transport
from gpp_plugin.report.progress import step
from gpp_plugin.runtime.batches import Batch, without_keys
from gpp_plugin.runtime.random_streams import (
    MODEL_STREAMS,
    are_same_on_host,
    host_streams,
    set_host_streams,
)
from gpp_plugin.runtime.rank_programs import tied_stages
from gpp_plugin.runtime.ranks.agreement import agree
from gpp_plugin.runtime.ranks.collectives import Collectives, collective_timeout_s, do_together
from gpp_plugin.runtime.ranks.failure_board import HERE
from gpp_plugin.runtime.ranks.job_board import watched_calls
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting
from gpp_plugin.runtime.recorder import start_clock
from gpp_plugin.runtime.stage_module import Reference, Shell, StageModule

logger = logging.getLogger(__name__)

NO_LOSS = ("labels", "return_loss", "num_items_in_batch")
"""What a batch lacks where no loss is requested."""
EXPORT_TIMEOUT_S = 600.0
"""How long ranks wait, at least, for one that writes its part of an export."""


@watched_calls(
    "train_batch",
    "eval_batch",
    "flush",
    "memory_report",
    "generate",
    "set_train_batch_size",
    "cache_report",
    "save_checkpoint",
    "load_checkpoint",
    "resume",
    "save_pretrained",
    "gather_state_dict",
    "destroy",
)
class GraphPipelineEngine(PipelineSurface):
    """Trains a model as a graph of pipeline stages; made by `deepspeed.initialize`.

    Args:
        source: the user's model, or graph of stages; after construction it keeps only this rank's stages.
        framework: which one this is and its release, for errors.
        make_optimizer: returns what updates a stage's weights, once its replicas are equal; casts the module.
        check_shared_out: refuses captured stages on tensor ranks where weights cannot be stepped in parts.
        make_monitor: returns what writes events where the configuration requests them.
        ds_config: the whole DeepSpeed configuration as a dict.
        config: its checked ``graph_pipeline`` block.
        setting: ranks, device, precision and batch sizes.
        sample_batch: what the model is captured and profiled with.
        training_data: a dataset that the engine loads itself, collated by ``collate_fn``.

    Raises:
        GppError: model, configuration or data do not fit; the same on every rank.
    """

    def __init__(
        self,
        *,
        source: ModelSource,
        framework: str,
        make_optimizer: Callable[[nn.Module, StageReplica], WeightUpdater],
        check_shared_out: Callable[[PipelinePlan], None],
        make_monitor: Callable[[], Monitor],
        ds_config: Mapping[str, Any],
        config: GraphPipelineConfig,
        setting: Setting,
        sample_batch: Batch,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.config = config
        self.last_timeline: Timeline | None = None
        self.record_timelines = config.trace_path is not None
        self._skipped = SkippedSteps(config.max_skipped_steps)
        self._locator = NanLocator() if config.locate_nan else None
        self._setting = setting
        self._source = source
        self._is_destroyed = False
        self._generator: Generator | None = None
        find_transport(config.p2p).check(str(setting.device))
        check_backends_installed(config.backends)
        check_sharding(setting.zero_stage, mode=config.mode, backends=config.backends)
        user_batch, sample_batch = sample_batch, sample_unit(sample_batch, source, config, setting)
        # What follows is in the order of the ranks' meetings: each call is collective, and needs the one before.
        reference, plan = source.prepare_plan(sample_batch)
        check_sharding(plan.zero_stage, mode=config.mode, backends=config.backends)
        self._setting = setting = dataclasses.replace(setting, zero_stage=plan.zero_stage)
        if source.is_plain:
            check_shared_out(plan)
        self._plan = plan = note_edge_transports(plan, config.p2p)
        self._rule = source.unit_rule(reference)
        if self._rule is not None:
            sample_batch = self._rule.sample(sample_batch)
        elif config.units is None:
            check_axes(user_batch, setting.sizes.mini_batch)
        self._backends = StageBackends()
        self._runners = RunnerFactory(source=source, config=config, setting=setting, forwards=self._backends)
        # Where weights lie is the optimizer's to say, which is made for a module, which is made for this runner.
        self._make_runner = functools.partial(
            self._runners.make_training,
            reference,
            has_own_data=training_data is not None,
            make_places=lambda stage: (
                lambda parameters: self.rank_engine.of(stage).updater.places(parameters)
            ),
        )
        self._rank_runner = self._make_runner(plan)
        modules = self._runners.make_modules(self._rank_runner, sample_batch)
        tied = tied_parameters(tied_stages(plan, reference), whole=source.whole_parameters(plan, reference))
        HERE.stage = name = plan.names_on_rank(setting.rank)
        limit_s = collective_timeout_s(plan, config.comm_timeout_s)
        self._wait_s = max(limit_s, LOADING_TIMEOUT_S)
        self._collectives = Collectives(
            group=setting.group, who=f"rank {setting.rank}, stage {name!r}", timeout_s=self._wait_s
        )
        self._groups = StageGroups.create(plan, tied, timeout_s=limit_s, backend=setting.placement.backend)
        groups = self._groups
        source.join_groups(
            plan, reference, {"tensor": groups.tensor, "context": groups.context, "model": groups.model}
        )
        stages = RankEngine(
            modules=modules,
            plan=plan,
            rank=setting.rank,
            groups=self._groups,
            tied=tied,
            make_optimizer=make_optimizer,
            framework=framework,
            device=setting.device,
            steps_alone=self._rank_runner.policy.steps_alone,
            reduces_early=[own.stage_index for own in self._rank_runner.stage_runners if own.reduces_early],
        )
        source.share_weights(modules)
        self._make_data(reference, sample_batch, training_data, collate_fn)
        self.monitor = do_together(make_monitor, what="making the monitors", group=setting.group)
        self._metrics = Metrics(
            ds_config, setting, reference, plan, monitor=self.monitor, collectives=self._collectives
        )
        self._sample_unit = sample_batch
        self._join(stages, modules, reference, sample_batch)
        files = PipelineFiles(
            stages=stages,
            steps=self._steps,
            data=self._data,
            source=source,
            parameters=reference.analysis.op_graph.parameters,
            setting=setting,
            collectives=self._collectives,
            timeout_s=max(config.comm_timeout_s, EXPORT_TIMEOUT_S),
            keeping=config.checkpoint,
            take_written=lambda: self._watch.take_written(),
        )
        super().__init__(reference=reference, stages=stages, files=files, ds_config=ds_config)
        self._watch = self._watch_model(stages, modules)
        self.plan = with_backends(plan, self.backends)

    # ---- construction --------------------------------------------------------------------------

    def _choose_backends(self, sample_batch: Batch) -> None:
        """Choose what stages without gradients run on; collective."""
        if self.config.backends == "off":
            return
        with step("measure backends"):
            self._backends.choices = choose_backends(
                self.config.backends,
                self._rank_runner,
                sample_batch,
                log=BackendLog(self.config.profile_dir),
                group=self._setting.group,
                device=self._setting.device,
            )

    @property
    def backends(self) -> dict[str, StageBackend]:
        """Return what each stage without gradients runs on, by its name; empty where backends are off.

        A stage of this rank whose backend failed, or gave something else, runs on torch and says why.
        """
        return self._backends.in_use()

    def _make_data(
        self,
        reference: Reference,
        sample_batch: Batch,
        training_data: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        """Make what gives this rank its mini-batches: the ranks that read none learn shapes from one that does."""
        plan = self._plan
        self._batch_source = make_batch_source(
            self._source,
            plan,
            reference,
            sample_batch,
            config=self.config,
            setting=self._setting,
            timeout_s=self._wait_s,
        )
        self._make_rows = functools.partial(
            make_row_loader,
            training_data,
            self._batch_source,
            config=self.config,
            setting=self._setting,
            collate_fn=collate_fn,
            reads=inputs_read(plan, reference.block_graph, self._rank_runner.stages),
        )
        own = None if training_data is None else self._make_rows(plan=plan)
        peeks = self.config.frozen_prefetch == 1
        self._data = TrainingData(self._batch_source, own, peeks_at_iterators=peeks)

    def _join(
        self,
        stages: RankEngine,
        modules: Sequence[StageModule],
        reference: Reference,
        sample_batch: Batch,
    ) -> None:
        """Bind the rank runner to the stages, and create what runs training and evaluation, with their counters."""
        plan, setting = self._plan, self._setting
        self._memory = MemoryWatch(
            plan,
            config=self.config,
            setting=setting,
            sample_batch=sample_batch,
            reads=[inputs_read(plan, reference.block_graph, [index]) for index in stages.indices],
            collectives=self._collectives,
            sized=self._source.sized_plan(reference, plan),
        )
        self._runner = MiniBatchRunner(stages, self._memory, group=setting.group)
        is_alone = self._rank_runner.policy.steps_alone
        self._rank_runner.bind(
            modules,
            stages.stages,
            stages.step if len(stages.stages) > 1 and not is_alone else None,
            [stage.weights for stage in stages.stages],
        )
        self._choose_backends(sample_batch)
        compile_stages(
            self._backends.compiled,
            self._rank_runner,
            sample_batch,
            whole=stages.gathered(),
            group=setting.group,
            device=setting.device,
        )
        self._evaluator = Evaluator(
            self._runners,
            self._runner,
            plan=plan,
            reference=reference,
            modules=dict(zip(stages.indices, modules, strict=True)),
            collectives=self._collectives,
        )
        self._steps = TrainingSteps(
            self._rank_runner,
            self._runner,
            setting=setting,
            collectives=self._collectives,
            reads_inputs=self._batch_source.reads_inputs,
            learn_shapes=lambda batch: self._source.learn_shapes(reference, batch),
            metrics=self._metrics,
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Train on mini-batches of so many samples from the next call on; collective.

        The same stages are planned again. The loss unit stays: a step is what one process makes of so many samples.

        Raises:
            ConfigError: it is no multiple of the loss unit, or is fixed (mode async, ``units``).
            PlanError, PlanInfeasible: these stages have no such plan; nothing has changed.
        """
        before, reference, number = self._plan, self._reference, train_batch_size
        agree({"train_batch_size": repr(number)}, what="set_train_batch_size", group=self._setting.group)
        if type(number) is not int or number < 1 or number % before.loss_unit:
            raise ConfigError(
                f"set_train_batch_size: {number!r} is no multiple of train_micro_batch_size_per_gpu, "
                f"{before.loss_unit}; give one, or set that in the JSON"
            )
        if number == before.mini_batch:
            return
        if self.config.mode == "async" or self.config.units is not None:
            key = '"mode": "async"' if self.config.mode == "async" else '"units"'
            raise ConfigError(
                f"set_train_batch_size: graph_pipeline has {key}, which fixes it; start anew from a checkpoint"
            )
        self._runner.refuse_after_failure()
        self._steps.drain()
        sizes = self._setting.sizes._replace(mini_batch=number, gradient_accumulation_steps=None)
        setting = dataclasses.replace(self._setting, sizes=sizes)
        plan = note_edge_transports(self._source.plan_again(reference, before, setting), self.config.p2p)
        runner, stages = self._make_runner(plan), self.rank_engine
        modules = cast(list[StageModule], [stage.module for stage in stages.stages])
        for module, code in zip(modules, runner.prepare(self._sample_unit), strict=True):
            self._source.complete_module(module, code.tensors)
        for new, old in zip(runner.stage_runners, self._rank_runner.stage_runners, strict=True):
            new.reduces_early &= old.reduces_early  # gradients' buckets are made for it
        self._data.resize(number, functools.partial(self._make_rows, plan=plan))
        self._rank_runner, self._plan, self._setting = runner, plan, setting
        stages.use_plan(plan)
        self._metrics.use_plan(plan)
        self._evaluator.close()
        self._join(stages, modules, reference, self._sample_unit)
        self._watch.num_units = number // plan.loss_unit
        self.plan = with_backends(plan, self.backends)

    def _watch_model(self, stages: RankEngine, modules: Sequence[StageModule]) -> ModelWatch:
        """Return what looks for changes of the model between steps; what it refuses now is refused on all ranks."""
        for module in (*modules, self.module):
            if isinstance(module, Shell):
                module.refuse_hooks()
        sizes = self._setting.sizes
        units = self.config.units or sizes.mini_batch // sizes.loss_unit
        return do_together(
            lambda: ModelWatch(self._source.watched(), stages, units),
            what="a look at the model",
            group=self._setting.group,
        )

    # ---- training ------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on ``train_batch_size`` samples, or on the loss units of a mini-batch, and return the mean loss.

        One optimizer step of all stages. In mode async the samples enter the pipeline, which is full when this
        returns: each micro-batch of them is one update of every stage, and the learning-rate schedule advances once.

        Args:
            data_iter: batches whose samples sum to ``train_batch_size``, or as many loss units as
                ``graph_pipeline.units`` says, the same stream on every rank; the engine's own loader
                (``training_data``) if None.

        Returns:
            The mean loss of the mini-batch, a scalar on this rank's device, the same on every rank. In mode async of
            the losses that came out meanwhile, which lag behind what enters by the micro-batches in flight.

        Raises:
            ConfigError: there is no optimizer, no data, or its keys or sizes do not fit.
            StopIteration: ``data_iter`` had ended, here or on another rank; nothing has run, and the next call is fine.
            BatchRefused: the mini-batch is too long for the plan or a rank's memory; nothing of it has run, and the
                next call continues with the next one.
            CommTimeout, RuntimeFailure: a rank failed (names rank, stage, edge and micro-batch), or received other
                data, which is found out before anything runs; in mode async in the next call.
        """
        try:
            self.agg_train_loss = loss = self._train_batch(data_iter)
            return loss
        except BaseException:
            if self._runner.failure is not None:  # nothing more will be trained on
                self._data.close()
            raise

    def _train_batch(self, data_iter: Iterator[Any] | None) -> Tensor:
        # Nothing is sent before it is certain that this rank can continue, has an optimizer, and received data.
        start = time.perf_counter()
        self._runner.refuse_after_failure()
        self.rank_engine.refuse_without_optimizer()
        self.rank_engine.refuse_while_gathered()
        refusal = self._look_at_model()
        counters = self.rank_engine.counters
        batch = self._data.next(data_iter, step=counters.global_steps + 1, refusal=refusal)
        self._memory.check(batch)
        following = self._data.peek(data_iter) if self._steps.can_prefetch else None
        if following is not None and self._memory.refusal(following):
            following = None  # nothing of it runs early; it is refused in its own turn
        clock = start_clock(self._collectives) if self.record_timelines else None
        watching = contextlib.nullcontext() if self._locator is None else self._locator.watching()
        with MODEL_STREAMS.drawing(), watching, self._watch.as_captured(), self.rank_engine.attached():
            self._source.learn_shapes(self._reference, batch)
            loss, stepped, result = self._steps.train(
                batch, following=following, record=clock is not None or self._metrics.needs_events
            )
        self._watch.note()
        self._last_step = stepped
        if clock is not None:
            self.last_timeline = keep_timeline(
                result.events,
                clock,
                plan=self.plan,
                collectives=self._collectives,
                path=self.config.trace_path,
                step=counters.global_steps,
            )
        self._metrics.after_step(
            loss=loss,
            step=stepped,
            result=result,
            batch=batch,
            global_steps=counters.global_steps,
            global_samples=counters.global_samples,
            seconds=time.perf_counter() - start,
        )
        self._count_skipped(stepped, counters.global_steps)
        return torch.full((), loss, dtype=torch.float32, device=self.device)

    def _look_at_model(self, *, is_training: bool = True) -> Exception | None:
        """Honour what the user has changed on the model; return why that cannot be, for all ranks to hear of."""
        try:
            with MODEL_STREAMS.drawing():
                self._watch.look(is_training=is_training)
        except Exception as error:  # users' hooks are tried, and may raise whatever they like
            return error
        return None

    def _count_skipped(self, stepped: StepResult, number: int) -> None:
        """Say where the numbers of a skipped step were not finite; end a job that skips them all.

        Stages that step alone skip alone, so in mode async nothing is agreed, and nothing ended.
        """
        if self.config.mode == "async":
            return
        where = ""
        if stepped.overflow and self._locator is not None:
            where = first_found(self._locator.found, self._collectives)
            if self.global_rank == 0:
                logger.warning(
                    "step %d skipped, gradients are not finite: %s",
                    number,
                    where or "no operator was seen",
                )
        self._skipped.count(stepped, number=number, where=where)

    def flush(self) -> Tensor | None:
        """Finish the micro-batches in flight, so that every stage has made all its updates; collective.

        Returns:
            The mean of the losses that no `train_batch` has returned, the same on every rank; None if there are none,
            as always but in mode async.
        """
        loss = self._steps.flush()
        return None if loss is None else torch.tensor(loss, dtype=torch.float32, device=self.device)

    @property
    def staleness(self) -> dict[str, int]:
        """Return, by stage, how many updates lie between the weights of a gradient and the update it makes.

        None lie there but in mode async. There this is what it is while the pipeline is full; after a `flush` the
        first micro-batches see less.
        """
        return self._steps.staleness

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
        """Evaluate one batch from ``data_iter`` (of any size, or the units of a mini-batch) and return its mean loss.

        Dropout is off and no gradient is computed. The loss is the mean over loss units, a smaller last one
        weighted by its samples; every rank gets it. What is under way is finished first.

        Args:
            num_micro_batches: so many batches (or units) of ``data_iter`` as one; None: one, or the units.
            return_logits: also return the named ``outputs`` of the model, samples in order, on every rank.
            compute_loss: False evaluates without labels and returns the outputs only.

        Returns:
            The loss; with ``return_logits`` the pair of loss and outputs (one tensor, or a dict where several were
            requested; of units that are given, a list of tensors in place of each); with ``compute_loss=False``
            the outputs.
        """
        self.rank_engine.refuse_while_gathered()
        self._steps.drain()
        # The other arguments of DeepSpeed's have one value that means something here.
        if reduce_output not in ("avg", None) or not bcast_loss:
            raise ConfigError(
                "eval_batch: only reduce_output='avg' and bcast_loss=True are supported; the mean loss is returned on "
                "every rank"
            )
        if num_micro_batches is not None and num_micro_batches < 1:
            raise ConfigError(f"eval_batch: num_micro_batches is {num_micro_batches}; give a positive number")
        wanted = tuple(outputs) if return_logits or not compute_loss else ()
        refusal = self._look_at_model(is_training=False)
        batch = self._data.take(data_iter, count=num_micro_batches, refusal=refusal)
        return self._evaluated([batch], wanted, needs_loss=compute_loss)[0]

    def eval_batches(
        self, batches: Sequence[Any], *, outputs: Sequence[str] = (), compute_loss: bool = True
    ) -> list[Any]:
        """Evaluate batches of one shape, or loss units of any, as `eval_batch` each; the pipeline stays full meanwhile.

        Args:
            outputs, compute_loss: as of `eval_batch`; without ``outputs`` the losses alone are returned.

        Raises:
            ConfigError: the batches have different shapes, and are no loss units.
        """
        self.rank_engine.refuse_while_gathered()
        self._steps.drain()
        taken = self._data.take_each(batches, refusal=self._look_at_model(is_training=False))
        return self._evaluated(taken, tuple(outputs), needs_loss=compute_loss)

    def _evaluated(self, batches: Sequence[Batch], wanted: tuple[str, ...], *, needs_loss: bool) -> list[Any]:
        if not needs_loss:
            batches = [without_keys(batch, NO_LOSS) for batch in batches]
        answers: list[Any] = []
        with MODEL_STREAMS.drawing():
            evaluated = self._evaluator.evaluate(batches, outputs=wanted, needs_loss=needs_loss)
        for loss, found in evaluated:
            value = torch.tensor(loss, dtype=torch.float32, device=self.device)
            answer = found[wanted[0]] if len(wanted) == 1 else found
            answers.append((value, answer) if wanted and needs_loss else answer if wanted else value)
        return answers

    # ---- generation ----------------------------------------------------------------------------

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """Generate with the weights in training: what the model's own `generate` returns, on every rank; collective.

        HuggingFace's `generate` runs on all ranks, each of which computes what its stages hold; caches lie there. All
        ranks give the same prompts and arguments, and sample with rank 0's random state. What is under way is finished
        first. Dropout is off.

        Args:
            inputs, kwargs: as of HuggingFace's `generate`: ``input_ids``, ``attention_mask``, ``max_new_tokens``,
                ``num_beams``, ``do_sample``, processors, stopping criteria, a streamer (rank 0's streams), ...

        Returns:
            The tokens, or what ``return_dict_in_generate`` requests.

        Raises:
            ConfigError: the model cannot generate, an argument is not supported or not the same on all ranks, or
                `generate` refuses it; the same on every rank, and training may continue.
            CommTimeout, RuntimeFailure: a rank failed or is gone.
        """
        # Made at the first call: most jobs never generate, and its groups have threads that wake up.
        self._runner.refuse_after_failure()
        self._steps.drain()
        arguments = kwargs if inputs is None else {"inputs": inputs, **kwargs}
        with self.rank_engine.gathered():
            if self._generator is None:
                self._generator = self._source.make_generator(
                    self._plan,
                    self._reference,
                    [stage.module for stage in self.rank_engine.stages],
                    collectives=self._collectives,
                    free_bytes=lambda: self._memory.free_for_caches(self.rank_engine),
                )
            before = host_streams()
            try:
                found = self._generator.generate(arguments)
            except BaseException as error:
                if self._generator.is_broken and self._setting.group is not None:
                    self._runner.failure = f"a generation failed ({str(error) or type(error).__name__})"
                raise
            # what sampling draws on a CPU a program of one process would have drawn: all ranks go on behind it
            after = self._collectives.broadcast(
                host_streams(), source=0, what="the generators after a generation"
            )
            if not are_same_on_host(after, before):
                set_host_streams(after)
            return found

    def cache_report(self) -> CacheReport:
        """Return what the caches of the last `generate` took on each rank, predicted and counted; collective.

        Raises:
            ConfigError: nothing has been generated.
        """
        if self._generator is None:
            raise ConfigError(NOTHING_GENERATED)
        return self._generator.cache_report()

    # ---- memory --------------------------------------------------------------------------------

    def memory_report(self) -> MemoryReport:
        """Return predicted and measured memory of every rank, what fills it, and what to change to fit; collective.

        Measured is what the first mini-batch of the sample batch's shape held (on CUDA, the allocator's peak since
        construction); with ``lengths``, what the longest of the first ones held, and predicted is what it should hold.
        `report.memory_text.format_memory_report` makes a table of it.
        """
        return self._memory.report(self.rank_engine, ahead=self._rank_runner.prefetched_bytes)

    @property
    def has_failed(self) -> bool:
        """Return whether a mini-batch failed on its way, so that nothing more can be trained on."""
        return self._runner.failure is not None

    # ---- the end -------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Release process groups, transports and optimizer; the engine trains no more; collective.

        In mode async the pipeline is emptied first. A process that ends anyway need not call it. One that makes
        another engine should: every group has threads that wake up a hundred times a second.
        """
        if self._is_destroyed:
            return
        self._data.close()
        if self._runner.failure is None:
            self._steps.flush()
            self._files.wait()
        self._is_destroyed = True
        self._runner.failure = "its engine was destroyed"
        self._collectives.barrier("the end")  # what others still send arrives before its group is destroyed
        self._evaluator.close()
        if self._generator is not None:
            self._generator.close()
        self._runners.close()
        self.rank_engine.close()
        self._groups.close()
        self._source.close()
        if self._setting.group is not None:
            dist.destroy_process_group(self._setting.group)
