"""One stage's training state: its DeepSpeedEngine, gradients, the graph-wide norm and loss scale, the step.

    runtime, per micro-batch     backward; accumulate()
    runtime, once per mini-batch reduce_data(); reduce_tied()
    all ranks together           step(): norm and overflow agreed -> clip -> optimizer -> learning rates

A stage with trained parameters has a stock `DeepSpeedEngine` behind it, built on the stage's own groups; it
builds the optimizer, casts the module, and partitions state under ZeRO 1 and 2. Its forward, backward and step are
not used: the stage's norm is a part of the graph's, and a step is taken by all stages or by none.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from gpp_plugin.errors import CheckpointError, ConfigError, GppError
from gpp_plugin.integrations.gradients import GradientStore, StageGradients
from gpp_plugin.integrations.inner_engine import make_inner_engine
from gpp_plugin.integrations.learning_rates import (
    LearningRates,
    OptimizerFactory,
    SchedulerFactory,
    StageParameterGroups,
)
from gpp_plugin.integrations.loss_scale import LossScale
from gpp_plugin.integrations.master_weights import MasterWeights
from gpp_plugin.integrations.partitioned_gradients import PartitionedGradients
from gpp_plugin.integrations.reductions import GradientReductions
from gpp_plugin.integrations.stage_config import StageConfig, derive_stage_config
from gpp_plugin.integrations.stage_groups import StageGroups, StageMpu, TiedParameter, make_replicas_equal
from gpp_plugin.integrations.tensor_parallel import duplicates
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.agree import exchange

__all__ = ["StageEngine", "StageGroups", "StepResult", "TiedParameter"]

logger = logging.getLogger(__name__)

_COUNTERS = ("global_steps", "skipped_steps", "global_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did; the same on every rank.

    Args:
        grad_norm: L2 norm of the mini-batch's gradient over the whole model, before clipping; inf on overflow.
        overflow: the gradient was not finite, and no stage stepped.
        learning_rates: of every parameter group of the model, after the step.
        loss_scale: for the next mini-batch.
    """

    grad_norm: float
    overflow: bool
    learning_rates: tuple[float, ...]
    loss_scale: float


class StageEngine:
    """Owns the training state of one rank's stage.

    Construction, `step` and `parameter_state` are collective: over all ranks, all ranks and the stage's ranks.

    Args:
        module: the stage's module, parameters under their HuggingFace names; moved to ``device``, cast to the
            configured type, and made equal on the stage's ranks.
        config: the user's DeepSpeed JSON, with numbers where it may say ``auto``.
        plan: the plan in force.
        rank: this global rank.
        groups: the process groups of ``plan`` and ``tied``.
        tied: the parameters that several stages hold, the same list on every rank.
        optimizer: makes the optimizer from parameters or groups; None: the configuration's block.
        lr_scheduler: makes the scheduler from an optimizer; None: the configuration's block.
        parameter_groups: groups of the whole model, ``{"params": [names], **options}``; None: one group.
        device: where the module lives.

    Raises:
        ConfigError: the configuration asks for what a stage cannot do, or DeepSpeed refuses it on any rank.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        config: Mapping[str, Any],
        plan: PipelinePlan,
        rank: int,
        groups: StageGroups,
        tied: Sequence[TiedParameter] = (),
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        parameter_groups: Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.module = module
        self.plan = plan
        self.rank = rank
        self.groups = groups
        self.device = torch.device(device)
        self.stage_index = plan.stage_of_rank(rank)
        self.stage = plan.stages[self.stage_index]
        self.tensor_position = self.stage.position(rank)[1]
        self._data_ranks = sorted(self.stage.data_ranks(self.tensor_position))
        self.position = self._data_ranks.index(rank)  # in the data-parallel group
        self.config: StageConfig = derive_stage_config(
            config, mini_batch=plan.mini_batch, degree=self.stage.degree, device_type=self.device.type
        )
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self.tied = tuple(tie for tie in tied if self.stage_index in tie.stages)
        self.global_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self.deepspeed: DeepSpeedEngine | None = None
        self._masters: MasterWeights | None = None
        self._has_compared = False
        self._log_notes()
        self._agree(lambda: self._build(config, optimizer, lr_scheduler, parameter_groups), "construction")

    # ---- construction ------------------------------------------------------------------------------------

    def _build(
        self,
        config: Mapping[str, Any],
        optimizer: OptimizerFactory | None,
        lr_scheduler: SchedulerFactory | None,
        parameter_groups: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._check_surroundings()
        self.module.to(self.device)
        make_replicas_equal(
            self.module, plan=self.plan, stage=self.stage_index, groups=self.groups, tied=self.tied
        )
        trainable = {
            name: p
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if p.requires_grad and p.numel() > 0
        }
        groups = StageParameterGroups(trainable, parameter_groups)
        self._rates = LearningRates(
            groups,
            optimizer=optimizer,
            optimizer_block=config.get("optimizer"),
            scheduler=lr_scheduler,
            scheduler_block=config.get("scheduler"),
        )
        self.lr_scheduler = self._rates.scheduler
        has_optimizer = optimizer is not None or bool(config.get("optimizer"))
        names = groups.names() if parameter_groups is not None else list(dict(self.module.named_parameters()))
        trained = {name: trainable[name] for name in names if name in trainable} if has_optimizer else {}
        if trained:
            self._build_deepspeed(optimizer, groups.optimizer_input(trainable), trained)
        else:
            self._cast_module()
        self.gradients: StageGradients = self._make_gradients(trained)
        self._reductions = GradientReductions(
            self.gradients,
            stage=self.stage,
            stage_index=self.stage_index,
            groups=self.groups,
            tied=self.tied,
            device=self.device,
        )
        self.optimizer = self._rates.mirror if self.deepspeed is None else self.deepspeed.optimizer
        self._scale = LossScale(config, self.dtype)
        self._publish_loss_scale()
        self._rates.publish(self._inner_optimizer)

    def _make_gradients(self, trained: dict[str, nn.Parameter]) -> StageGradients:
        wire = self.config.communication_dtype
        common: dict[str, Any] = {
            "dtype": getattr(torch, self.config.accumulation_dtype),
            "group": self.groups.data[self.stage_index],
            "position": self.position,
            "degree": self.stage.degree,
            "communication_dtype": None if wire is None else getattr(torch, wire),
            "bucket_elements": self.config.bucket_elements,
        }
        if self._masters is None or not self._masters.partitioned:
            return GradientStore(trained, **common)
        return PartitionedGradients(
            trained, self._masters.layout, is_reduced_often=self.config.zero_stage >= 2, **common
        )

    def _check_surroundings(self) -> None:
        if not deepspeed.comm.is_initialized():
            raise ConfigError("deepspeed.comm is not initialised; call deepspeed.init_distributed() first")
        if self.dtype == torch.float16 and not get_accelerator().is_fp16_supported():
            raise ConfigError(f"fp16.enabled: this device ({self.device.type}) computes no fp16; use bf16")
        missing = [tie.name for tie in self.tied if tie.name not in dict(self._all_names())]
        if missing:
            raise ConfigError(f"stage {self.stage.name!r} lacks its tied parameters {missing}")
        os.environ.setdefault(
            "LOCAL_RANK", str(self.rank if self.device.index is None else self.device.index)
        )

    def _all_names(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def _cast_module(self) -> None:
        """Cast a stage that no DeepSpeedEngine casts, as that would: parameters, not buffers."""
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)

    def _build_deepspeed(
        self, optimizer: OptimizerFactory | None, optimizer_input: list[Any], trained: dict[str, nn.Parameter]
    ) -> None:
        data_group = self.groups.data[self.stage_index]
        assert isinstance(data_group, dist.ProcessGroup)
        mpu = StageMpu(
            data_ranks=self._data_ranks,
            rank=self.rank,
            data_group=data_group,
            single_group=self.groups.single,
        )
        self.deepspeed = make_inner_engine(
            self.module,
            optimizer=optimizer,
            parameters=optimizer_input,
            mpu=mpu,
            settings=self.config.deepspeed,
        )
        self._masters = MasterWeights(self.deepspeed.optimizer, trained, data_group=data_group)

    def _log_notes(self) -> None:
        if self.rank == 0:
            for note in self.config.notes:
                logger.info("%s", note)

    def _agree(self, action: Callable[[], None], what: str) -> None:
        """Run ``action`` and fail on every rank if it fails on any, so that none waits for a dead one."""

        def attempt() -> None:
            try:
                action()
            except GppError:
                raise
            except Exception as error:  # whatever DeepSpeed or the user's factory raises
                raise ConfigError(
                    f"{what} failed on rank {self.rank} (stage {self.stage.name!r}, DeepSpeed "
                    f"{deepspeed.__version__}): {type(error).__name__}: {error}"
                ) from error

        # On the default group, whose timeout is the job's: a rank may be compiling an optimizer meanwhile.
        exchange(attempt, what=what, group=dist.group.WORLD)

    # ---- one mini-batch ----------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch; the same on every rank."""
        return self._scale.value

    def accumulate(self) -> None:
        """Add a micro-batch's gradients to the mini-batch's, where they are held in another type."""
        self._reductions.accumulate()

    def reduce_data(self) -> None:
        """Sum the gradients over the stage's ranks; collective over them.

        Once a mini-batch, after its last backward; under ZeRO 2 as often as the program says.
        """
        self._reductions.reduce_data()

    def reduce_tied(self) -> None:
        """Sum tied parameters' gradients over their stages, after `reduce_data`; collective over those stages."""
        self._reductions.reduce_tied()

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the mini-batch's gradients, fp32 and unscaled, between reduction and step.

        Parameters that no loss reached are left out. With tensor parallelism, and under ZeRO 1 and 2, collective
        over the stage's ranks.
        """
        self._reductions.sum_tensor()
        return {name: gradient.div_(self.loss_scale) for name, gradient in self.gradients.gather().items()}

    def step(self) -> StepResult:
        """Take the optimizer step of all stages, or of none; collective over all ranks.

        Raises:
            RuntimeFailure: gradients were not reduced, or the loss scale cannot sink any further.
            ConfigError: tensor ranks have unlike gradients of what they hold alike; seen at the first step.
        """
        if not self._has_compared and any(stage.tensor > 1 for stage in self.plan.stages):
            self._agree(self._reductions.compare_duplicates, "the first step")
        self._has_compared = True
        norm, overflow = self._update()
        if not overflow:
            self._advance_rates()
        self._count(overflow)
        return self._result(norm, overflow)

    def _update(self) -> tuple[float, bool]:
        """Step the optimizer with the reduced gradients; return their norm, and whether it kept the step away."""
        self._reductions.finish(is_partitioned=self.is_partitioned)
        norm = self._global_norm() / self.loss_scale
        overflow = self.config.check_overflow and not math.isfinite(norm)
        if not overflow:
            self._apply(norm)
        self.zero_grad()
        return norm, overflow

    def _result(self, norm: float, overflow: bool) -> StepResult:
        return StepResult(
            grad_norm=math.inf if overflow else norm,
            overflow=overflow,
            learning_rates=self._rates.current(self._inner_optimizer),
            loss_scale=self.loss_scale,
        )

    def _advance_rates(self) -> None:
        self._rates.step()
        self._rates.publish(self._inner_optimizer)

    def zero_grad(self) -> None:
        """Forget the mini-batch's gradients."""
        self._reductions.clear()
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    def _global_norm(self) -> float:
        """Return the L2 norm of the whole model's scaled gradient; not finite where any element is not.

        Data-parallel ranks share their parameters out; a tied one is its owner's, and one that the tensor ranks
        hold alike is the first one's.
        """
        foreign = {tie.name for tie in self.tied if tie.owner != self.stage_index}
        if self.tensor_position > 0:
            foreign.update(duplicates(self.gradients.parameters))
        precision = torch.float64 if get_accelerator().is_fp64_supported() else torch.float32
        total = self.gradients.squared_norm(without=foreign, precision=precision).to(self.device)
        dist.all_reduce(total, group=self._norm_group)
        return math.sqrt(value) if (value := total.item()) >= 0 else math.nan

    @property
    def _norm_group(self) -> Any:
        """Return the ranks whose gradients make up the norm that clips."""
        return self.groups.world

    def _apply(self, norm: float) -> None:
        coefficient = 1.0 / self.loss_scale
        if self.config.gradient_clipping > 0:
            # As torch.nn.utils.clip_grad_norm_ and DeepSpeed do.
            coefficient *= min(1.0, self.config.gradient_clipping / (norm + 1e-6))
        if isinstance(self.gradients, PartitionedGradients):
            assert self._masters is not None, "partitions are of masters"
            self._masters.step_partitions(self.gradients.partitions, coefficient=coefficient)
        elif self._masters is not None:
            assert isinstance(self.gradients, GradientStore)
            gradients = {name: self.gradients.get(name) for name in self.gradients.parameters}
            self._masters.step(gradients, coefficient=coefficient)

    def _count(self, overflow: bool) -> None:
        self.global_steps += 1
        self.global_samples += self.plan.mini_batch
        self.skipped_steps += int(overflow)
        if self.deepspeed is not None:
            self.deepspeed.global_steps = self.global_steps
            self.deepspeed.global_samples = self.global_samples
            self.deepspeed.skipped_steps = self.skipped_steps
        self._scale.update(overflow, step=self.global_steps)
        self._publish_loss_scale()

    def _publish_loss_scale(self) -> None:
        if self.dtype == torch.float16 and self._masters is not None:
            self._masters.publish_loss_scale(self.loss_scale)

    @property
    def _inner_optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._masters is None else self._masters.optimizer

    @property
    def is_partitioned(self) -> bool:
        """Return whether optimizer state and masters are partitioned over the stage's ranks (ZeRO 1 and 2)."""
        return self._masters is not None and self._masters.partitioned

    # ---- weights -----------------------------------------------------------------------------------------

    def parameter_state(self) -> dict[str, Tensor]:
        """Return the stage's parameters as fp32 copies, the masters where there are any.

        Collective over the stage's ranks under ZeRO 1 and 2.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if self._masters is not None and name in self.gradients.parameters:
                state[name] = self._masters.full(name)
            else:
                state[name] = parameter.detach().float().clone()
        return state

    def refresh_masters(self) -> None:
        """Take master weights anew after the module's parameters were written from outside."""
        if self._masters is not None:
            self._masters.refresh()

    # ---- state, as checkpoint files hold it ----------------------------------------------------------------

    def model_state(self) -> dict[str, Tensor]:
        """Return copies of parameters and persistent buffers in host memory, each tie only on its owner."""
        foreign = {tie.name for tie in self.tied if tie.owner != self.stage_index}
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._saved_tensors().items()
            if name not in foreign
        }

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Write parameters and persistent buffers; masters follow with `load_optimizer_state` or `refresh_masters`.

        Raises:
            CheckpointError: a name or shape does not fit.
        """
        tensors = self._saved_tensors()
        wrong = sorted(set(tensors) ^ set(state)) or sorted(
            name for name, tensor in tensors.items() if tensor.shape != state[name].shape
        )
        if wrong:
            raise CheckpointError(
                f"stage {self.stage.name!r}: {wrong} differ in name or shape from the checkpoint's"
            )
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    def _saved_tensors(self) -> dict[str, Tensor]:
        persistent = set(self.module.state_dict(keep_vars=True))
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors.update((name, b) for name, b in self.module.named_buffers() if name in persistent)
        return tensors

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return DeepSpeed's state of optimizer and masters, this rank's part under ZeRO 1 and 2; None if untrained."""
        return None if self._masters is None else self._masters.state_dict()

    def load_optimizer_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `optimizer_state` returned on this rank."""
        if self._masters is not None and state is not None:
            self._masters.load_state_dict(state)
            self._publish_loss_scale()

    def shared_state(self) -> dict[str, Any]:
        """Return schedule, loss scaler and counters: the same on every rank."""
        return {
            "learning_rates": self._rates.state_dict(),
            "loss_scaler": self._scale.state_dict(),
            "counters": {name: getattr(self, name) for name in _COUNTERS},
        }

    def load_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool = True) -> None:
        """Restore what `shared_state` returned, the schedule if ``load_scheduler``."""
        if load_scheduler:
            self._rates.load_state_dict(state["learning_rates"])
            self._rates.publish(self._inner_optimizer)
        self._scale.load_state_dict(state["loss_scaler"])
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])
        self._publish_loss_scale()
