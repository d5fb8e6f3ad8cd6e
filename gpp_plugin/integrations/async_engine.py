"""`AsyncPipelineEngine`: every stage steps after each micro-batch, and the pipeline stays full (PipeDream).

    train_batch    B samples enter; each micro-batch of them is one update of every stage
    flush          what is in flight is finished; nothing else is left to do for a synchronous view of the model

Whatever reads or writes the model as a whole (checkpoints, evaluation, exports, state dicts) flushes first, so it is
collective. What runs is in `schedule.async_1f1b`, weights in `runtime.weight_versions`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpp_plugin.config import BLOCK, GraphPipelineConfig
from gpp_plugin.errors import ConfigError, PlanError
from gpp_plugin.integrations.async_reports import DataAgreement, LossReports
from gpp_plugin.integrations.async_stage import AsyncStageEngine
from gpp_plugin.integrations.engine import LOADING_TIMEOUT_S, GraphPipelineEngine, failure_after
from gpp_plugin.integrations.stage_config import derive_stage_config
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.edge_transports import NATIVE
from gpp_plugin.plan.stock import STOCK
from gpp_plugin.plan.tied_blocks import UNTIE
from gpp_plugin.runtime.pipeline import Lane, channels_of, tied_stages
from gpp_plugin.runtime.recorder import start_clock
from gpp_plugin.runtime.stage_source import Reference
from gpp_plugin.runtime.window_lane import WindowLane
from gpp_plugin.schedule.async_1f1b import windows_of
from gpp_plugin.schedule.forward_only import forward_only_stages
from gpp_plugin.schedule.validate_windows import validate_windows
from gpp_plugin.schedule.windows import lower_windows


def check_asynchronous_config(ds_config: Mapping[str, Any], config: GraphPipelineConfig) -> None:
    """Refuse what cannot be combined with mode async, before anything is captured.

    Raises:
        ConfigError: names the key and what to do.
    """
    where = f"{BLOCK}.mode: async"
    if config.p2p != NATIVE:
        raise ConfigError(f"{where} sends over our own transport only; remove {BLOCK}.p2p")
    if config.planner == STOCK:
        raise ConfigError(
            f"{where} cannot run planner {STOCK}, DeepSpeed's synchronous pipeline; choose another"
        )
    derived = derive_stage_config(ds_config, mini_batch=1, degree=1, device_type="cpu")
    if derived.dtype == "float16":
        raise ConfigError(
            f"{where} cannot agree on a loss scale between stages that step alone; use bf16 or fp32"
        )


def check_asynchronous_model(plan: PipelinePlan, reference: Reference) -> None:
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


class AsyncPipelineEngine(GraphPipelineEngine):
    """Trains a model as a graph of stages, each of which steps after every micro-batch.

    Clipping and gradient norm are per stage and micro-batch. A rank that leaves without `flush` leaves the last
    micro-batches' updates out.
    """

    _stage_engine_type = AsyncStageEngine
    _lane: WindowLane
    stage_engine: AsyncStageEngine

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._windows = windows_of(self.plan)
        loss_stage = next(
            i for i, s in enumerate(self.plan.stages) if self._reference.block_graph.loss_block in s.blocks
        )
        stage = self.plan.stages[loss_stage]
        timeout_s = max(self.config.comm_timeout_s, LOADING_TIMEOUT_S)
        self._losses = LossReports(
            loss_ranks=stage.data_ranks(0),
            rank=self.global_rank,
            num_ranks=self._setting.num_ranks,
            group=self._setting.group,
            stage_group=self._groups.data[loss_stage],
            micro_batch_size=stage.micro_batch_size,
            device=self.device,
            timeout_s=timeout_s,
        )
        self._agreement = DataAgreement(
            group=self._setting.group,
            rank=self.global_rank,
            reads=self._feed.reads_inputs,
            timeout_s=timeout_s,
        )
        self._num_left = 0  # losses of drained micro-batches that no call has returned
        self._has_told_staleness = False

    def _make_lane(self, reference: Reference, plan: PipelinePlan) -> Lane | None:
        if not reference.analysis.is_training:
            return super()._make_lane(reference, plan)
        check_asynchronous_model(plan, reference)
        frozen = forward_only_stages(plan)
        programs = lower_windows(plan, forward_only_stages=frozen)
        validate_windows(plan, programs, forward_only_stages=frozen)
        return WindowLane(
            programs=programs.of_rank(self._setting.rank),
            make_places=lambda parameters: self.stage_engine.weight_places(parameters),
            source=self._source.stages,
            reference=reference,
            plan=plan,
            transport=self._make_transport(plan, reference, channels_of(programs.all)),
            device=self.device,
            dtype=self._setting.dtype,
        )

    @property
    def staleness(self) -> dict[str, int]:
        """Return, by stage, how many updates lie between the weights of a gradient and the update it makes.

        This is what it is while the pipeline is full; after a `flush` the first micro-batches see less.
        """
        frozen = forward_only_stages(self.plan)
        return {
            stage.name: self._windows.staleness(index)
            for index, stage in enumerate(self.plan.stages)
            if index not in frozen
        }

    # ---- training ------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Let ``train_batch_size`` samples enter the pipeline, which is full when this returns.

        Every micro-batch makes one update of every stage; the learning-rate schedule advances once.

        Args:
            data_iter: batches whose samples sum to ``train_batch_size``, the same stream on every rank;
                the engine's own loader (``training_data``) if None.

        Returns:
            The mean of the losses that came out meanwhile, a scalar on this rank's device, the same on every rank.
            They lag behind what enters by the micro-batches in flight. The first call waits for at least one;
            a later one during which none came out (while the pipeline fills, if it holds more micro-batches than a
            call brings) returns the last one again.

        Raises:
            ConfigError: there is no optimizer, no data, or its keys or sizes do not fit.
            StopIteration: ``data_iter`` had ended already.
            CommTimeout, RuntimeFailure: a rank failed, or was given other data in the call before.
        """
        start = time.perf_counter()
        batch = self._next_batch(data_iter)
        clock = start_clock(self._meeting) if self.record_timelines else None
        self._source.meet(self._reference, batch)
        self.module.train()
        self._agreement.post(batch, self.global_steps + 1)
        if self._lane.is_another_shape(batch):
            self._drain()
        result = self._run(self._lane, batch, record=clock is not None)
        with self._ending_on_failure():
            self._agreement.check()
            loss = self._tell_losses(result.losses)
        step = self.stage_engine.end_mini_batch()
        if not self._has_told_staleness:
            self._has_told_staleness = True
            self._metrics.note_staleness(self.staleness, self.global_samples)
        return self._end_call(result.events, clock, loss=loss, step=step, start=start)

    def _tell_losses(self, losses: Sequence[tuple[Tensor, int]]) -> float:
        """Return the mean of the losses that are due: those left by a drain, and those that left the window."""
        self._losses.add(losses)
        window, windows = self._lane.window, self._windows
        before = windows.num_reported(window - 1) if window > 1 else 0
        due = windows.num_reported(window) - before + self._num_left
        self._num_left = 0
        return self._losses.tell(due)

    def flush(self) -> Tensor | None:
        """Finish the micro-batches in flight, so that every stage has made all its updates; collective.

        Returns:
            The mean of the losses that no `train_batch` has returned, the same on every rank; None if there are none.
        """
        self._drain()
        self._num_left = 0
        with self._ending_on_failure():
            loss = self._losses.tell(None)
            self._losses.finish()
        return None if math.isnan(loss) else torch.tensor(loss, dtype=torch.float32, device=self.device)

    def _drain(self) -> None:
        """Empty the pipeline; collective. Losses that are left come out with the next ones.

        Raises:
            RuntimeFailure: an earlier mini-batch failed on its way.
        """
        self._refuse_after_failure()
        window = self._lane.window
        if not window:
            return
        with self._ending_on_failure():
            self._lane.drain()
            self._agreement.check(keep=0)
        self._num_left += window * self._windows.micro_batches - self._windows.num_reported(window)

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """Let nothing more run after a failure that other ranks do not share."""
        try:
            yield
        except BaseException as error:
            self.stage_engine.zero_grad()
            self._failure = failure_after(self.global_steps, error)
            raise

    # ---- what needs an empty pipeline ------------------------------------------------------------

    def destroy(self) -> None:
        """Empty the pipeline and let go of everything (`GraphPipelineEngine.destroy`)."""
        if self._failure is None:
            self.flush()
        super().destroy()

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Empty the pipeline and evaluate (`GraphPipelineEngine.eval_batch`)."""
        self._drain()
        return super().eval_batch(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """Empty the pipeline and write a checkpoint (`GraphPipelineEngine.save_checkpoint`)."""
        self._drain()
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """Empty the pipeline and read a checkpoint (`GraphPipelineEngine.load_checkpoint`)."""
        self._drain()
        return super().load_checkpoint(*args, **kwargs)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Empty the pipeline and write the weights (`GraphPipelineEngine.save_pretrained`)."""
        self._drain()
        super().save_pretrained(save_directory)

    def gather_state_dict(self) -> dict[str, Tensor] | None:
        """Empty the pipeline and gather the weights (`GraphPipelineEngine.gather_state_dict`)."""
        self._drain()
        return super().gather_state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Empty the pipeline, which is collective, and return this stage's parameters and buffers."""
        self._drain()
        return super().module_state_dict(exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Empty the pipeline, which is collective, and take this stage's tensors from a state dict."""
        self._drain()
        super().load_module_state_dict(state_dict, strict)
