"""The small part of `PipelineEngine`'s public surface: what it answers, hands on, and refuses.

Separate from the engine's work so that the names DeepSpeed's users call are in one place. Nothing here runs
anything: `GraphPipelineEngine` adds what does.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from gpp_plugin.engine.engine_files import PipelineFiles
from gpp_plugin.engine.loading.training_data import TrainingData
from gpp_plugin.engine.rank_engine import RankEngine, StageEngine
from gpp_plugin.engine.stage_step import StepResult
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.stage_module import Reference, joined_module

# Names that DeepSpeed's engines have and a graph of stages has not: why, and what to call instead.
#
# `GraphPipelineEngine` answers the others. Tests hold both to DeepSpeed's classes: each of their public names, those
# that only instances have among them, is either answered or there.
#
# refused_names.json: reason -> lines of names; a name that ends in "*" stands for all that begin so.
_REFUSED: dict[str, list[str]] = json.loads(
    (resources.files(__package__) / "refused_names.json").read_text(encoding="utf-8")
)
_BY_NAME = {name: reason for reason, lines in _REFUSED.items() for line in lines for name in line.split()}


def why_lacking(name: str) -> str | None:
    """Return why the engine has no such name, if DeepSpeed's engines have it.

    >>> why_lacking("set_train_micro_batch_size")
    'the plan is made for one mini-batch; set train_micro_batch_size_per_gpu in the JSON'
    >>> why_lacking("zero_cpu_offload"), why_lacking("frobnicate")
    ('read the block of that name in the JSON', None)
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    starts = [known for known in _BY_NAME if known.endswith("*") and name.startswith(known[:-1])]
    return _BY_NAME[max(starts, key=len)] if starts else None


logger = logging.getLogger(__name__)


def _lack(engine: Any) -> NoReturn:
    """Leave a name to `PipelineSurface.__getattr__`, which says why it is not there."""
    raise AttributeError


class PipelineSurface(nn.Module):
    """The queries of DeepSpeed's pipeline engine, answered from the rank's stages, the configuration and the files.

    A module, as DeepSpeed's engine is, whose one child is `module`; parameters, buffers and state have the names of
    the whole model all the same. What would move, cast or extend it does not exist.

    Args:
        reference: the model that the stages' plan is on.
        stages: this rank's.
        files: what writes and reads the model.
        ds_config: the whole DeepSpeed configuration.
    """

    _data: TrainingData

    def __init__(
        self,
        *,
        reference: Reference,
        stages: RankEngine,
        files: PipelineFiles,
        ds_config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.plan: PipelinePlan = stages.plan
        self.rank_engine = stages
        self.module = joined_module([stage.module for stage in stages.stages])
        self.global_rank = stages.rank
        self.device = stages.device
        self._files = files
        self._reference = reference
        self._ds_config = dict(ds_config)
        self._last_step: StepResult | None = None
        self.agg_train_loss: Tensor | None = None
        """What `train_batch` returned last; None before its first call."""

    def __getattr__(self, name: str) -> Any:
        # only for what is not there at all; Python and torch request dunders to see what an object is
        if name in self.__dict__.get("_modules", ()):
            return self._modules[name]
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        reason = why_lacking(name)
        if reason is None:
            present = [each for each in dir(type(self)) if not each.startswith("_")]
            near = difflib.get_close_matches(name, present, n=1, cutoff=0.8)
            reason = f"did you mean engine.{near[0]}?" if near else "docs/porting.md lists what it has"
        raise AttributeError(f"engine.{name} does not exist for a graph of stages: {reason}")

    # ---- gradients -----------------------------------------------------------------------------

    def retain_gradients(self, retain: bool = True) -> None:
        """Keep each step's gradients for `gradients`; costs a copy of this rank's gradients.

        Call it on every rank: from ZeRO 1 on the ranks of a stage gather them together.
        """
        self.rank_engine.keeps_gradients = retain

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's unscaled, unclipped fp32 gradients of this rank's parameters, whole ones.

        Raises:
            ConfigError: `retain_gradients` was not called before the step.
        """
        if self.rank_engine.gradients is None:
            raise ConfigError(
                "gradients are not retained; call engine.retain_gradients() before train_batch()"
            )
        return self.rank_engine.gradients

    # ---- data ----------------------------------------------------------------------------------

    @property
    def training_dataloader(self) -> Any:
        """Return what `train_batch` reads when it is called without data; None where there is nothing."""
        return self._data.loader

    def set_dataloader(self, loader: Any) -> None:
        """Use ``loader`` (the same batches on every rank) when `train_batch` is called without data."""
        self._data.use_loader(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to every batch that is loaded or taken from an iterator; it returns a dict of tensors.

        Raises:
            ConfigError: the engine's own loader has begun.
        """
        self._data.apply(fn)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Use ``iterator`` when `train_batch` is called without data."""
        self._data.use_iterator(iterator)

    # ---- this rank's part of the model, under the names of HuggingFace's files -----------------------

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages."""
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages with their names in the whole model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers of this rank's stages."""
        return self.module.buffers(recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this rank's stages with their names in the whole model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Tensor] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Return this rank's part of the model's state dict: `module_state_dict`; `gather_state_dict` has the whole."""
        state = {} if destination is None else destination
        state.update({f"{prefix}{name}": value for name, value in self.module_state_dict().items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:  # type: ignore[override]
        """Take this rank's tensors from a state dict: `load_module_state_dict`."""
        self.load_module_state_dict(state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every `train_batch` begins without gradients and forgets its own behind its step."""

    @property
    def global_steps(self) -> int:
        """Return the optimizer steps so far, skipped ones among them."""
        return self.rank_engine.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Return the samples trained on so far."""
        return self.rank_engine.counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Return the steps that overflow prevented."""
        return self.rank_engine.counters.skipped_steps

    def is_first_stage(self) -> bool:
        """Return whether a stage of this rank has no predecessor in the stage graph."""
        return not set(self.rank_engine.indices) <= {edge.dst for edge in self.plan.edges}

    def is_last_stage(self) -> bool:
        """Return whether a stage of this rank yields the loss."""
        # By blocks and not by name or number: a graph may yield losses in several stages, and none need be the last.
        losses = self._reference.block_graph.loss_blocks
        return not set(losses).isdisjoint(
            b for i in self.rank_engine.indices for b in self.plan.stages[i].blocks
        )

    @property
    def stage_engine(self) -> StageEngine:
        """Return what trains this rank's one stage.

        Raises:
            PlanError: the rank holds several (`stages`).
        """
        return self.rank_engine.only

    @property
    def stage_name(self) -> str:
        """Return the name of this rank's stage; of several, their names with commas between."""
        return self.plan.names_on_rank(self.global_rank)

    @property
    def stage_id(self) -> int:
        """Return the index of this rank's stage in ``plan.stages``; of several, the first one's."""
        return self.rank_engine.indices[0]

    @property
    def optimizer(self) -> Any:
        """Return the stage's optimizer; one over placeholders where the stage trains nothing.

        Of several stages on this rank: their optimizers as one, whose parameter groups are those of all of them.
        """
        return self.rank_engine.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """Return the stage's learning-rate scheduler, if any; of several stages the first one's, and all are alike."""
        return self.rank_engine.stages[0].updater.lr_scheduler

    # ---- numbers that DeepSpeed's engines keep as attributes ------------------------------------------

    @property
    def world_size(self) -> int:
        """Return the ranks of the job."""
        return self.plan.num_ranks

    @property
    def local_rank(self) -> int:
        """Return this rank's number on its host."""
        return int(os.environ.get("LOCAL_RANK", self.global_rank))

    @property
    def num_stages(self) -> int:
        """Return the stages of the plan."""
        return len(self.plan.stages)

    @property
    def dp_world_size(self) -> int:
        """Return the data-parallel degree of this rank's stage; of several, the first one's."""
        return self.plan.stages[self.stage_id].degree

    @property
    def mp_world_size(self) -> int:
        """Return the tensor-parallel degree of this rank's stage; of several, the first one's."""
        return self.plan.stages[self.stage_id].tensor

    @property
    def sequence_parallel_size(self) -> int:
        """Return the context-parallel size of this rank's stage; of several, the first one's."""
        return self.plan.stages[self.stage_id].context

    @property
    def seq_dp_world_size(self) -> int:
        """Return how many ranks hold the same parameters of this rank's stage: data x context."""
        return self.plan.stages[self.stage_id].num_replicas

    @property
    def seq_parallel_group(self) -> Any:
        """Return the process group of this rank's context ranks, which have parts of the positions of one text."""
        return self.rank_engine.groups.context[self.stage_id]

    @property
    def seq_data_parallel_group(self) -> Any:
        """Return the process group of the ranks that hold the same parameters, over which gradients are summed."""
        return self.rank_engine.groups.data[self.stage_id]

    def get_sequence_parallel_group(self) -> Any:
        """Return `seq_parallel_group`."""
        return self.seq_parallel_group

    @property
    def is_pipe_parallel(self) -> bool:
        """Return whether there are several stages."""
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        """Return whether `dp_world_size` is above 1."""
        return self.dp_world_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """Return whether `mp_world_size` is above 1."""
        return self.mp_world_size > 1

    pipeline_parallelism = True

    @property
    def micro_batch_size(self) -> int:
        """Return `train_micro_batch_size_per_gpu()`; micro-batches of a stage are in ``plan.stages``."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def micro_batches(self) -> int:
        """Return `gradient_accumulation_steps()`, the losses of one step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_steps(self) -> int:
        """Return the losses of all steps so far."""
        return self.global_samples // self.train_micro_batch_size_per_gpu()

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """Return the name in the whole model of each parameter of this rank's stages."""
        return {parameter: name for name, parameter in self.named_parameters()}

    def train_batch_size(self) -> int:
        """Return the samples of one optimizer step (B)."""
        return self.plan.mini_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples one rank computes one loss on (u)."""
        return self.plan.loss_unit

    def gradient_accumulation_steps(self) -> int:
        """Return the losses of one step: ``train_batch_size`` / ``train_micro_batch_size_per_gpu``."""
        return self.plan.mini_batch // self.plan.loss_unit

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def was_step_applied(self) -> bool:
        """Return whether the last `train_batch` changed weights: there was one, and no overflow."""
        return self._last_step is not None and not self._last_step.overflow

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True: every `train_batch` ends with a step."""
        return True

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group of this rank's stages."""
        optimizer = self.rank_engine.optimizer
        return [group["lr"] for group in optimizer.param_groups] if optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group of this rank's stages."""
        optimizer = self.rank_engine.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        return [group.get("momentum", group.get("betas")) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the whole model's gradient in the last step, before clipping."""
        return None if self._last_step is None else self._last_step.grad_norm

    @property
    def stage_grad_norms(self) -> dict[str, float]:
        """Return, by stage, what it brings to the norm of the last step's gradient: squares add up to its square.

        Of all stages; in mode async, where each steps alone, of this rank's. Of a stage whose gradient is not finite it
        is not either.
        """
        norms = {} if self._last_step is None else self._last_step.stage_norms
        return {self.plan.stages[index].name: norm for index, norm in norms.items()}

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in force."""
        return self.rank_engine.stages[0].loss_scale

    def get_pipeline_parallel_rank(self) -> int:
        """Return the index of this rank's stage in ``plan.stages``; of several, the first one's."""
        return self.stage_id

    def get_data_parallel_rank(self) -> int:
        """Return this rank's data position in its stage's grid; of several stages, in the first one's."""
        return self.plan.stages[self.stage_id].position(self.global_rank)[0]

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's tensor position in its stage's grid; of several stages, in the first one's."""
        return self.plan.stages[self.stage_id].tensor_position(self.global_rank)

    get_model_parallel_rank = get_tensor_parallel_rank

    def get_additional_losses(self) -> None:
        """Return None: the model's loss is the only one."""

    def mem_status(self, msg: str, print_rank: int = -1) -> None:
        """Log the memory this rank's device holds, on ``print_rank`` (-1: every rank)."""
        if print_rank in (-1, self.global_rank):
            # What torch's allocator gave out; on the CPU nobody counts.
            held = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
            logger.info("%s: rank %d holds %.1f MiB on its device", msg, self.global_rank, held / 2**20)

    def log_for_device(self, *msg: Any) -> None:
        """Log a line with this rank and its stages in front."""
        logger.info("[rank %d stage %s] %s", self.global_rank, self.stage_name, " ".join(map(str, msg)))

    def tput_log(self, *msg: Any) -> None:
        """Log a line on rank 0."""
        if self.global_rank == 0:
            logger.info("%s", " ".join(map(str, msg)))

    # What DeepSpeed's users call for its chain of layers, and a graph of stages does by itself, has no effect.

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: masks are inputs or operators of the graph like any other."""

    def reset_activation_shape(self) -> None:
        """Do nothing: a new shape is noticed by itself."""

    # What would run a part of a mini-batch is refused with what to call instead.

    def train(self, mode: bool = True) -> Self:
        """Note the mode in ``training``; `train_batch` trains and `eval_batch` evaluates in any."""
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a graph of stages runs whole mini-batches."""
        raise ConfigError(
            "engine.forward() does not exist for a pipeline; call train_batch() or eval_batch()"
        )

    __call__ = forward

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: `train_batch` runs forward and backward."""
        raise ConfigError("engine.backward() does not exist for a pipeline; train_batch() runs it")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: `train_batch` steps the optimizer."""
        raise ConfigError("engine.step() does not exist for a pipeline; train_batch() steps the optimizer")

    def no_sync(self) -> NoReturn:
        """Refuse: the program says when gradients are reduced."""
        raise ConfigError(
            "engine.no_sync() does not exist for a pipeline; gradients are reduced once a train_batch()"
        )

    # ---- files and states: collective over all ranks, what is under way is finished first -----------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of all stages to ``save_dir/tag``; collective. ``latest`` is written last.

        Raises:
            ConfigError: ``exclude_frozen_parameters``: a checkpoint holds the whole model.
            ValueError: ``save_dir`` is empty or no path, as in all calls that take a directory; nothing is written.
        """
        check_directory("save_checkpoint", save_dir)
        _refuse_left_out("save_checkpoint", exclude_frozen_parameters)
        self._files.save(save_dir, tag, client_state, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Read a checkpoint of this model, whatever plan it was saved on; collective.

        Without a tag it is the one that `latest` names, or the newest whole one where that is broken.
        Where nothing was ever saved it is ``(None, None)``, with a warning, as of DeepSpeed's.

        Args:
            load_module_only: only the weights: no optimizer, schedule, loss scale, counters or random states.

        Returns:
            The directory read and the client state.

        Raises:
            CheckpointError: it is missing, broken, or of another model or optimizer.
            ConfigError: the ranks' files are not of one checkpoint; or `load_module_strict` is False or
                `custom_load_fn`, which DeepSpeed's engine takes.
        """
        check_directory("load_checkpoint", load_dir)
        if not load_module_strict or custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint takes every tensor of the model, each checked against the manifest: neither "
                "load_module_strict=False nor custom_load_fn; use load_module_state_dict(state_dict, strict=False)"
            )
        found = self._files.load(
            load_dir,
            tag,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            weights_only=load_module_only,
        )
        if found[0] is None and self.global_rank == 0:
            logger.warning("load_checkpoint: no checkpoint is in %s; training starts anew", load_dir)
        return found

    def resume(self, load_dir: str | Path) -> dict[str, Any] | None:
        """Continue from a directory's newest whole checkpoint; where it has none yet, do nothing; collective.

        For scripts that are started again when a rank is gone, on as many ranks or on fewer. Every rank does what
        rank 0 finds.

        Returns:
            The client state that was saved; None where there was no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, and none is whole, or they are of another model or optimizer.
        """
        check_directory("resume", load_dir)
        return self._files.load(load_dir, None, optimizer=True, scheduler=True, weights_only=False)[1]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write sharded safetensors under HuggingFace names, one shard a stage; collective, no gather."""
        check_directory("save_pretrained", save_directory)
        self._files.export(save_directory)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model for inference as `save_pretrained` does; the file names are HuggingFace's."""
        check_directory("save_16bit_model", save_dir)
        _refuse_left_out("save_16bit_model", exclude_frozen_parameters)
        if save_filename not in ("model.safetensors", "pytorch_model.bin"):
            raise ConfigError(f"save_16bit_model writes model-*.safetensors, not {save_filename}")
        self._files.export(save_dir)
        return True

    save_fp16_model = save_16bit_model

    def gather_state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's state dict on rank 0 (CPU tensors), None elsewhere; collective.

        Needs the whole model's bytes in rank 0's memory; `save_pretrained` does not.

        Raises:
            ConfigError: a stage of a stage graph is tensor-parallel: how its shards make a whole is unknown.
        """
        return self._files.gather()

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Hold this rank's parameters whole while the context lasts, and keep what is written there; collective.

        Under ZeRO 3 they have shapes and no values outside of it (they read as not-a-number); below it they are always
        there. All ranks write the same, and none trains within.
        """
        return self.rank_engine.gathered()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers under their HuggingFace names.

        Of what a stage's tensor ranks share out each has its own parts; `gather_state_dict` joins them. Collective
        under ZeRO 3, and in mode async, where the pipeline is emptied first.
        """
        return self._files.stage_state(without_frozen=exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Take this rank's tensors from a state dict of the whole model or of its stages.

        Collective in mode async, where the pipeline is emptied first.

        Raises:
            ConfigError: ``strict``, and a tensor of the stage is missing.
        """
        self._files.load_stage_state(state_dict, strict=strict)

    # ---- what the configuration says, as DeepSpeed's engine answers it ---------------------------
    # Blocks that the configuration lacks, or has as null, mean DeepSpeed's defaults.

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage within each stage's data-parallel group."""
        return self.plan.zero_stage

    def zero_optimization(self) -> bool:
        """Return whether a ZeRO stage above 0 is on."""
        return self.zero_optimization_stage() > 0

    def gradient_clipping(self) -> float:
        """Return the largest global gradient norm; 0 does not clip."""
        return float(self._ds_config.get("gradient_clipping") or 0.0)

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16."""
        return self.rank_engine.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16."""
        return self.rank_engine.dtype == torch.bfloat16

    def steps_per_print(self) -> int | None:
        """Return how many steps lie between two lines of the step log."""
        steps: int | None = self._ds_config.get("steps_per_print", 10)
        return steps

    def wall_clock_breakdown(self) -> bool:
        """Return whether step times are logged."""
        return bool(self._ds_config.get("wall_clock_breakdown", False))

    def optimizer_name(self) -> str | None:
        """Return the type of the JSON's optimizer block."""
        name: str | None = (self._ds_config.get("optimizer") or {}).get("type")
        return name

    def scheduler_name(self) -> str | None:
        """Return the type of the JSON's scheduler block."""
        name: str | None = (self._ds_config.get("scheduler") or {}).get("type")
        return name

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the params of the JSON's optimizer block."""
        params: dict[str, Any] | None = (self._ds_config.get("optimizer") or {}).get("params")
        return params

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the params of the JSON's scheduler block."""
        params: dict[str, Any] | None = (self._ds_config.get("scheduler") or {}).get("params")
        return params

    def dynamic_loss_scale(self) -> bool:
        """Return whether the fp16 loss scale is found while training."""
        return float((self._ds_config.get("fp16") or {}).get("loss_scale", 0) or 0) == 0

    def dataloader_drop_last(self) -> bool:
        """Return whether the JSON requests a last, short batch to be left out."""
        return bool(self._ds_config.get("dataloader_drop_last", False))


for _name in dir(nn.Module):
    if not _name.startswith("_") and why_lacking(_name) is not None:
        setattr(PipelineSurface, _name, property(_lack))


def check_directory(call: str, directory: Any) -> None:
    """Refuse what names no directory, before the other ranks are met.

    Raises:
        ValueError: it is empty, or no path.
    """
    if not isinstance(directory, str | os.PathLike) or not str(directory).strip():
        raise ValueError(
            f"{call}: the directory is {directory!r}; give a path ('.' is the working directory)"
        )


def _refuse_left_out(name: str, exclude_frozen_parameters: bool) -> None:
    if exclude_frozen_parameters:
        raise ConfigError(
            f"{name}(exclude_frozen_parameters=True): what it writes holds the whole model; save_pretrained writes the "
            "adapter of a LoRA model alone, module_state_dict(exclude_frozen_parameters=True) returns this rank's rest"
        )
