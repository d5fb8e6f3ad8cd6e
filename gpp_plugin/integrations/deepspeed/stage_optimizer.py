"""DeepSpeed as the optimizer of one stage: a stock `DeepSpeedEngine` behind it, its masters, schedule, loss scale.

The stock engine is built on the stage's own groups. It builds the optimizer, casts the module, and partitions state
under ZeRO 1 and 2. Its forward, backward and step are not used: the stage's norm is a part of the graph's, and a step
is taken by all stages or by none (`stage_step`). A stage that trains nothing has none; it is cast as that would.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.optimizer_pieces import OptimizerPieces, check_saved
from gpp_plugin.engine.checkpoints.saved_tensors import StageOptimizerState
from gpp_plugin.engine.framework import StageReplica, StepCounters
from gpp_plugin.engine.partitioned_gradients import FlatGroup
from gpp_plugin.engine.sharded_weights import FlatWeights
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations.deepspeed.config_values import NO_OPTIMIZER, StageConfig, derive_stage_config
from gpp_plugin.integrations.deepspeed.learning_rates import (
    LearningRates,
    LossScale,
    OptimizerFactory,
    SchedulerFactory,
    StageParameterGroups,
)
from gpp_plugin.integrations.deepspeed.master_weights import MasterWeights, require_attributes
from gpp_plugin.integrations.deepspeed.optimizer_bytes import saying_what_compiles
from gpp_plugin.runtime.weight_versions import WeightPlaces

logger = logging.getLogger(__name__)

FRAMEWORK = f"DeepSpeed {deepspeed.__version__}"


class DeepSpeedOptimizer:
    """What updates one stage's weights (`framework.WeightUpdater`), as DeepSpeed's configuration has it.

    Args:
        module: the stage's, its replicas equal; cast to the configured type.
        config: the user's DeepSpeed JSON, with numbers where it may say ``auto``.
        optimizer: makes the optimizer from parameters or groups; None: the configuration's block.
        lr_scheduler: makes the scheduler from an optimizer; None: the configuration's block.
        parameter_groups: groups of the whole model, ``{"params": [names], **options}``; None: one group.

    Raises:
        ConfigError: the configuration requests what a stage cannot do, or what DeepSpeed lacks here.
    """

    versions: Mapping[str, str] = {"deepspeed": deepspeed.__version__}

    def __init__(
        self,
        module: nn.Module,
        replica: StageReplica,
        *,
        config: Mapping[str, Any],
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        parameter_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.config: StageConfig = derive_stage_config(
            config,
            mini_batch=replica.mini_batch,
            degree=len(replica.data_ranks),
            device_type=replica.device.type,
            zero_stage=replica.zero_stage,
        )
        self._dtype: torch.dtype = getattr(torch, self.config.dtype)
        self._prepare_context(replica)
        # Parameters without elements (an embedding of size 0, a shard that fell to nobody) break flat buffers.
        trainable = {
            name: p
            for name, p in module.named_parameters(remove_duplicate=False)
            if p.requires_grad and p.numel() > 0
        }
        groups = StageParameterGroups(trainable, parameter_groups)
        # Every rank schedules all groups of the model, also where its stage trains none of them: rates in logs and
        # checkpoints are then the same everywhere.
        self._rates = LearningRates(groups, config, optimizer=optimizer, scheduler=lr_scheduler)
        self._has_optimizer = optimizer is not None or bool(config.get("optimizer"))
        # Explicit groups say what is trained, in their order; what they leave out rests. Without groups all of it is.
        names = groups.names() if groups.is_explicit else list(dict(module.named_parameters()))
        self.trained: dict[str, nn.Parameter] = (
            {name: trainable[name] for name in names if name in trainable} if self._has_optimizer else {}
        )
        self._engine: DeepSpeedEngine | None = None
        data_group: Any = replica.data_group
        if self.trained:
            assert isinstance(data_group, dist.ProcessGroup), "this rank is in its stage's group"
            self._engine = _make_inner_engine(
                module,
                optimizer=optimizer,
                parameters=groups.optimizer_input(trainable),
                mpu=_stage_mpu(replica, data_group),
                settings=self.config.deepspeed,
                device=replica.device,
            )
        else:
            _cast(module, self._dtype)
        wrapper = None if self._engine is None else self._engine.optimizer
        self._masters = MasterWeights(wrapper, self.trained, data_group=data_group)
        self.layout: tuple[FlatGroup, ...] = self._masters.layout
        self.norm_precision = torch.float64 if get_accelerator().is_fp64_supported() else torch.float32
        self._scale = LossScale(config, self._dtype)
        self._publish_loss_scale()
        self._rates.publish(self._masters.optimizer)

    def _prepare_context(self, replica: StageReplica) -> None:
        """Check what DeepSpeed needs around it, set what it reads, and log what was changed."""
        device = replica.device
        if not deepspeed.comm.is_initialized():
            raise ConfigError("deepspeed.comm is not initialised; call deepspeed.init_distributed() first")
        os.environ.setdefault("LOCAL_RANK", str(replica.rank if device.index is None else device.index))
        if replica.rank == 0:
            for note in self.config.notes:
                logger.info("%s", note)

    # ---- stepping ------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """Return DeepSpeed's optimizer; the mirror over placeholders where the stage trains nothing."""
        return self._rates.mirror if self._engine is None else self._engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """Return the learning-rate scheduler, if any."""
        return self._rates.scheduler

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch; the same on every rank."""
        return self._scale.value

    def require(self) -> None:
        """Refuse to train where the job has no optimizer.

        Raises:
            ConfigError: says what to add.
        """
        if not self._has_optimizer:
            raise ConfigError(NO_OPTIMIZER)

    def apply(
        self,
        gradients: Mapping[str, Tensor | None] | Sequence[Tensor],
        *,
        coefficient: float,
        resting: Collection[str],
    ) -> None:
        """Step the masters with ``coefficient`` times the gradients and publish them to the parameters."""
        # Partitions lie as DeepSpeed's masters do, so that they are stepped as they are; whole gradients are cut up by
        # the masters' fragments.
        if isinstance(gradients, Mapping):
            self._masters.step(gradients, coefficient=coefficient, resting=resting)
        else:
            self._masters.step_partitions(gradients, coefficient=coefficient, resting=resting)

    def advance_rates(self) -> None:
        """Advance the learning-rate schedule by one step."""
        self._rates.step()
        self._rates.publish(self._masters.optimizer)

    def rates(self) -> tuple[float, ...]:
        """Return the learning rate of every parameter group of the model."""
        return self._rates.current(self._masters.optimizer)

    def count(self, counters: StepCounters, *, overflow: bool) -> None:
        """Let the stock engine know what was counted, and choose the loss scale of the next mini-batch.

        Raises:
            RuntimeFailure: it cannot sink any further.
        """
        # Users, and DeepSpeed's own helpers, read these of the stock engine; nothing of ours does.
        if self._engine is not None:
            self._engine.global_steps = counters.global_steps
            self._engine.global_samples = counters.global_samples
            self._engine.skipped_steps = counters.skipped_steps
        self._scale.update(overflow, step=counters.global_steps)
        self._publish_loss_scale()

    def _publish_loss_scale(self) -> None:
        if self._dtype == torch.float16:
            self._masters.publish_loss_scale(self.loss_scale)

    # ---- weights and state -----------------------------------------------------------------------------------

    def places(self, parameters: Sequence[nn.Parameter]) -> WeightPlaces:
        """Return where these trained parameters may lie."""
        return self._masters.places(parameters)

    def flat_weights(self) -> tuple[FlatWeights, ...]:
        """Return the buffers in which trained parameters lie, each cut into the ranks' partitions (ZeRO)."""
        return self._masters.flat_weights()

    def publish_to(self, parts: Sequence[Tensor]) -> None:
        """Write stepped weights to this rank's parts of `flat_weights` from now on, and not to the parameters."""
        self._masters.publish_to(parts)

    def master(self, name: str) -> Tensor:
        """Return an fp32 copy of a trained parameter's master; collective over the stage's ranks from ZeRO 1 on."""
        return self._masters.full(name)

    def refresh_masters(self) -> None:
        """Take master weights anew after the parameters were written from outside."""
        self._masters.refresh()

    def written(self) -> Tensor | None:
        """Return how many sampled elements were written since the last step, on the device; None without masters."""
        return self._masters.written()

    def adopt_written(self) -> None:
        """Take into the masters what was written to parameters since the last step."""
        self._masters.adopt_written()

    def own_tensors(self) -> list[Tensor]:
        """Return what the inner optimizer steps and its state; of Adam two tensors of each parameter's size."""
        optimizer = self._masters.optimizer
        if optimizer is None:
            return []
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        return [*stepped, *state]

    def pieces(self, foreign: Collection[str]) -> OptimizerPieces:
        """Return optimizer state and masters by parameter, this rank's part from ZeRO 1 on."""
        return self._masters.pieces(foreign, group_numbers=self._rates.local_groups)

    def spans(self) -> dict[str, list[tuple[int, int]]]:
        """Return the elements of each trained parameter that this rank steps: first one, and how many."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in self.trained}
        for name, fragment in self._masters.fragments.items():
            spans[name].append((fragment.start, fragment.num_elements))
        return spans

    def check_saved(self, saved: StageOptimizerState) -> None:
        """Refuse the state of another optimizer, and one that no optimizer has.

        Raises:
            CheckpointError: names both, or what is wrong.
        """
        check_saved(self._masters.optimizer, self._masters.fragments, saved)

    def restore(self, saved: StageOptimizerState) -> None:
        """Restore masters and optimizer state from those of any plan."""
        self._masters.restore(saved)
        self._publish_loss_scale()

    def shared_state(self) -> dict[str, Any]:
        """Return the state of schedule and loss scaler: the same on every rank."""
        return {"learning_rates": self._rates.state_dict(), "loss_scaler": self._scale.state_dict()}

    def check_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool) -> None:
        """Refuse what `load_shared_state` could not restore; nothing changes.

        Raises:
            GppError: says what is wrong.
        """
        if load_scheduler and "learning_rates" in state:
            self._rates.check(state["learning_rates"])
        self._scale.check(state.get("loss_scaler", {}))

    def load_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool) -> None:
        """Restore what `shared_state` returned, the schedule if ``load_scheduler``."""
        # a checkpoint that one process wrote has neither
        if load_scheduler and "learning_rates" in state:
            self._rates.load_state_dict(state["learning_rates"])
            self._rates.publish(self._masters.optimizer)
        self._scale.load_state_dict(state.get("loss_scaler", {}))
        self._publish_loss_scale()

    def close(self) -> None:
        """Let the stock engine go."""
        if self._engine is not None:
            self._engine.destroy()


# ---- what of DeepSpeed is used as it is ----------------------------------------------------------------------


class _InnerEngine(DeepSpeedEngine):
    """The stock engine, but for its broadcast, which fails on parameters without dimensions."""

    def _broadcast_model(self) -> None:
        """Leave it to the stage, which has already made its replicas equal."""


def _make_inner_engine(
    module: nn.Module,
    *,
    optimizer: OptimizerFactory | None,
    parameters: list[Any],
    mpu: Any,
    settings: Mapping[str, Any],
    device: torch.device,
) -> DeepSpeedEngine:
    """Return an engine that builds the optimizer, casts the module and partitions state; nothing else of it is used.

    Args:
        optimizer: makes the optimizer; None: the block in ``settings``.
        parameters: what the optimizer is made from: parameters, or groups of them.
        settings: the stage's DeepSpeed configuration.
        device: the rank's.
    """
    require_attributes(DeepSpeedEngine, "_broadcast_model")
    with saying_what_compiles():
        engine = _InnerEngine(
            args=device_arguments(device),
            model=module,
            optimizer=optimizer,
            model_parameters=parameters,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dont_change_device=True,
        )
    require_attributes(engine, "module_forward_pre_hook", "module_forward_post_hook")
    # Its timers and counters belong to its own forward; the runtime calls the module many times a step.
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    # With an offloaded optimizer ZeRO watches gradients whatever its settings say; the stage hands them over itself.
    for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
        hook.remove()
    return engine


def device_arguments(device: torch.device) -> argparse.Namespace:
    """Return the command line that makes DeepSpeed's engine compute on ``device``.

    Without one it makes the device of LOCAL_RANK the current one, which is not there where ranks share a device or
    each of them sees only its own.
    """
    return argparse.Namespace(device_rank=device.index or 0)


def _stage_mpu(replica: StageReplica, data_group: dist.ProcessGroup) -> SimpleNamespace:
    """Return the model-parallel unit that DeepSpeed takes its groups of: data-parallel inside one stage, else alone.

    Every method is DeepSpeed's: it looks for these names and takes a missing one for a model-parallel size of 1.
    """
    answers: dict[str, Any] = {
        "data_parallel_group": data_group,  # of this rank's tensor position
        "data_parallel_group_ranks": list(replica.data_ranks),
        "data_parallel_world_size": len(replica.data_ranks),
        "data_parallel_rank": dist.get_group_rank(data_group, replica.rank),
    }
    for kind in ("", "tensor_", "pipeline_"):  # norm and overflow are the graph's, tensor ranks included
        answers[f"{kind}model_parallel_group"] = replica.single_group
        answers |= {f"{kind}model_parallel_world_size": 1, f"{kind}model_parallel_rank": 0}
    return SimpleNamespace(**{f"get_{name}": functools.partial(_same, it) for name, it in answers.items()})


def _same(value: Any) -> Any:
    return value


@torch.no_grad()
def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a stage that no DeepSpeedEngine casts, as that would: parameters, not buffers."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """Let `deepspeed.init_distributed` skip its CPU all-reduce operator within the block.

    DeepSpeed compiles it with the C++ compiler when it joins the ranks, about a minute the first time on a
    machine, and uses it only for `inference_all_reduce`.
    """
    compatible = deepspeed.ops.__compatible_ops__
    before = compatible.get("deepspeed_shm_comm")
    compatible["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        if before is None:
            del compatible["deepspeed_shm_comm"]
        else:
            compatible["deepspeed_shm_comm"] = before
