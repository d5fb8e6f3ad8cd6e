"""What `GraphPipelineEngine` writes and reads: checkpoints, HuggingFace files, state dicts.

Each of them is of the model between two mini-batches: what is under way is finished first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.config.block import CheckpointConfig
from gpp_plugin.engine.checkpoints.load_checkpoint import has_checkpoint, load_checkpoint
from gpp_plugin.engine.checkpoints.save_checkpoint import (
    BackgroundSave,
    SaveOptions,
    place_of,
    save_checkpoint,
)
from gpp_plugin.engine.checkpoints.saved_tensors import cut_shard, join_shards
from gpp_plugin.engine.loading.training_data import TrainingData
from gpp_plugin.engine.rank_engine import RankEngine
from gpp_plugin.engine.stage_engine import StageEngine
from gpp_plugin.engine.stage_groups import is_shard
from gpp_plugin.engine.training_steps import TrainingSteps
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.block_graph import Parameter, is_carried
from gpp_plugin.model.model_source import ModelSource
from gpp_plugin.report.progress import shown_as
from gpp_plugin.runtime.ranks.agreement import WEIGHT, agree, describe_tensor
from gpp_plugin.runtime.ranks.collectives import Collectives, do_together, finish
from gpp_plugin.runtime.ranks.placement_of_ranks import Setting

EXPORT_NAMES = ("model.safetensors", "pytorch_model.bin")


class PipelineFiles:
    """The model's files and states; every method is collective over all ranks.

    Args:
        stages: this rank's.
        steps: drains the pipeline.
        data: what is trained on; checkpoints hold where training is in it.
        source: writes exports, as the user's model has them.
        parameters: of the whole model.
        timeout_s: how long ranks wait for one that writes an export or its part of a checkpoint.
        keeping: how checkpoints are written and retained.
        take_written: makes the stages take what was written to the model since the last step, on this rank.
    """

    def __init__(
        self,
        *,
        stages: RankEngine,
        steps: TrainingSteps,
        data: TrainingData,
        source: ModelSource,
        parameters: Sequence[Parameter],
        setting: Setting,
        collectives: Collectives,
        timeout_s: float,
        keeping: CheckpointConfig,
        take_written: Callable[[], None],
    ) -> None:
        self._take_written = take_written
        self._keeping = keeping
        self._background = BackgroundSave(timeout_s=timeout_s)
        self._stages = stages
        self._steps = steps
        self._data = data
        self._source = source
        self._parameters = parameters
        self._setting = setting
        self._collectives = collectives
        self._timeout_s = timeout_s

    @shown_as("save a checkpoint")
    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
    ) -> None:
        """Write a checkpoint of all stages to ``directory/tag``; ``latest`` is written last.

        Raises:
            CheckpointError: it cannot be written, or the one before, behind the training, could not.
        """
        # Drained first, then named: what was under way counts as done in the tag's number of steps.
        self._drain()
        self.wait()
        for stage in self._stages.stages:
            stage.update.adopt_written()
        with self._stages.gathered():
            save_checkpoint(
                self._stages.stages,
                directory,
                f"global_step{self._stages.global_steps}" if tag is None else str(tag),
                client_state=client_state,
                data=self._data.position(),
                options=SaveOptions(
                    save_latest=save_latest,
                    keep_last=self._keeping.keep_last,
                    keep_every=self._keeping.keep_every,
                    names={parameter.name: parameter.aliases for parameter in self._parameters},
                ),
                background=self._background if self._keeping.async_save else None,
            )

    def _drain(self) -> None:
        """End what is under way, and let the stages have what users have written; collective over all ranks."""
        self._steps.drain()
        do_together(self._take_written, what="a look at the model", group=self._setting.group)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written behind the training; collective where there is one.

        Raises:
            CheckpointError: a rank could not write it.
        """
        self._background.wait(self._stages.stages[0])

    @shown_as("load a checkpoint")
    def load(
        self, directory: str | Path, tag: str | None, *, optimizer: bool, scheduler: bool, weights_only: bool
    ) -> tuple[str, dict[str, Any]]:
        """Read a checkpoint of this model, of any plan; return the directory read and the client state.

        Raises:
            CheckpointError: it is missing, broken, or of another model.
            ConfigError: the ranks' files are not of one checkpoint.
        """
        self._steps.drain()
        self.wait()
        with self._stages.gathered():
            loaded = load_checkpoint(
                self._stages.stages,
                directory,
                tag,
                load_optimizer=optimizer,
                load_scheduler=scheduler,
                weights_only=weights_only,
            )
            if not weights_only:
                self._data.restore(loaded.data)
            facts = loaded_facts(self._stages.stages, loaded.directory.name)
            agree(facts, what="a look at what each rank loaded", group=self._setting.group, is_partial=True)
        return str(loaded.directory), loaded.client_state

    def resume(self, directory: str | Path) -> dict[str, Any] | None:
        """Read the newest whole checkpoint and return its client state; None where there is none; as of `load`."""
        if not has_checkpoint(self._stages.stages[0], Path(directory)):
            return None
        return self.load(directory, None, optimizer=True, scheduler=True, weights_only=False)[1]

    @shown_as("export the model")
    def export(self, directory: str | Path) -> None:
        """Write sharded safetensors under HuggingFace names, one shard a stage.

        Nothing is gathered but what tensor ranks hold in parts, a tensor at a time, where the stage is written.
        """
        self._drain()
        with self._stages.gathered():
            self._source.save_pretrained(
                directory,
                states={
                    stage.stage_index: _without_carried(stage.module.state_dict()) | self._joined(stage)
                    for stage in self._stages.stages
                },
                plan=self._stages.plan,
                group=self._setting.group,
                timeout_s=self._timeout_s,
            )

    def export_as(self, directory: str | Path, filename: str) -> None:
        """Write what `export` does, where ``filename`` is one that users of DeepSpeed pass."""
        if filename not in EXPORT_NAMES:
            raise ConfigError(f"save_16bit_model writes model-*.safetensors, not {filename}")
        self.export(directory)

    def gather(self) -> dict[str, Tensor] | None:
        """Return the whole model's state dict on rank 0 (CPU tensors), None elsewhere.

        Raises:
            ConfigError: a stage of a graph is tensor-parallel: how its shards make a whole is unknown.
        """
        self._drain()
        shared_out = [stage.name for stage in self._stages.plan.stages if stage.tensor > 1]
        if shared_out and not self._source.is_plain:
            raise ConfigError(
                f"gather_state_dict: the tensor ranks of stage {shared_out[0]!r} hold shards of its weights; use "
                "save_pretrained(), which writes a file a tensor rank, or save_checkpoint()"
            )
        own: dict[str, Tensor] = {}
        with self._stages.gathered():
            for stage in self._stages.stages:
                joined = self._joined(stage)
                if stage.stage.ranks[0] == self._setting.rank:  # its replicas hold the same
                    own |= _state_of(stage) | joined
        return gather_state_dict(
            own,
            parameters=self._parameters,
            collectives=self._collectives,
        )

    def _joined(self, stage: StageEngine) -> dict[str, Tensor]:
        """Return what a stage's tensor ranks hold in parts, as whole tensors on its first rank; nothing on others.

        Collective over the ranks of its first data position.
        """
        state: dict[str, Tensor] = {}
        size = stage.stage.tensor
        if size == 1 or not self._source.is_plain or stage.stage.position(stage.rank)[0] > 0:
            return state
        group = stage.groups.tensor[stage.stage_index]
        for name, parameter in stage.module.named_parameters():
            if is_shard(parameter):
                parts = gather_parts(
                    parameter.detach(), size=size, group=group, is_first=stage.tensor_position == 0
                )
                place = place_of(stage, name, parameter)
                if parts:
                    state[name] = join_shards(parts, axis=place.axis, stride=place.stride).cpu()
        return state

    def stage_state(self, *, without_frozen: bool) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers under their HuggingFace names."""
        self._steps.drain()
        state: dict[str, Tensor] = {}
        with self._stages.gathered():
            for stage in self._stages.stages:
                own = _state_of(stage)
                if without_frozen:
                    for name, parameter in stage.module.named_parameters():
                        if not parameter.requires_grad:
                            own.pop(name)
                state |= own
        return state

    def load_stage_state(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Take this rank's tensors from a state dict of the whole model or of its stages.

        Raises:
            ConfigError: ``strict``, and a tensor of a stage is missing.
        """
        self._steps.drain()
        for stage in self._stages.stages:
            missing = sorted(_without_carried(stage.module.state_dict()).keys() - state.keys())
            if strict and missing:
                raise ConfigError(
                    f"load_module_state_dict: the state lacks {missing[0]!r} and {len(missing) - 1} more of stage "
                    f"{stage.stage.name}; give the whole model's state, or strict=False"
                )
        # Of a whole model's state a stage takes its own part. Masters are made anew of what was loaded: the next step
        # would write the old weights back.
        with self._stages.gathered():
            for stage in self._stages.stages:
                own = stage.module.state_dict()
                values = {n: v for n, v in state.items() if n in own}
                for name, parameter in stage.module.named_parameters():
                    if name in values and is_shard(parameter):
                        values[name] = _own_part(stage, name, parameter, values[name])
                stage.module.load_state_dict(values, strict=False)
                stage.refresh_masters()


def loaded_facts(stages: Sequence[StageEngine], tag: str) -> dict[str, str]:
    """Return what identifies a checkpoint that was loaded: its tag, counters, and the weights of a rank's stages.

    Counters are compared over all ranks, a stage's weights over its replicas, and over the stages that share them.
    """
    facts = {"the checkpoint": tag}
    for stage in stages:
        facts |= {"global_steps": str(stage.global_steps), "loss_scale": str(stage.loss_scale)}
        where = f" of tensor position {stage.tensor_position}" if stage.stage.tensor > 1 else ""
        for name, parameter in stage.module.named_parameters():
            facts[f"{WEIGHT}{name}{where}"] = describe_tensor(parameter)
    return facts


def _state_of(stage: StageEngine) -> dict[str, Tensor]:
    """Return a stage's state dict; copies, where the weights themselves will not stay whole."""
    state = _without_carried(stage.module.state_dict())
    return state if stage.weights is None else {name: value.clone() for name, value in state.items()}


def _without_carried(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict without attributes of modules, which the user's model has no buffers for."""
    return {name: value for name, value in state.items() if not is_carried(name)}


def _own_part(stage: StageEngine, name: str, parameter: Tensor, values: Tensor) -> Tensor:
    """Return this rank's part of a tensor of a whole model's state; what is a part already as it is."""
    if values.shape == parameter.shape:
        return values
    place = place_of(stage, name, parameter)
    return cut_shard(values, stage.tensor_position, stage.stage.tensor, axis=place.axis, stride=place.stride)


def gather_parts(own: Tensor, *, size: int, group: dist.ProcessGroup | int, is_first: bool) -> list[Tensor]:
    """Return the tensors of all ranks of a group on its first one, in order; none on the others.

    Raises:
        CommTimeout: a rank did not come.
    """
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group"
    part = own.contiguous()
    parts = [torch.empty_like(part) for _ in range(size)] if is_first else []
    work = dist.gather(part, parts or None, group=group, group_dst=0, async_op=True)
    finish(work, part, group=group, what="a weight that tensor ranks hold in parts")
    return parts


def gather_state_dict(
    state: Mapping[str, Tensor], *, parameters: Sequence[Parameter], collectives: Collectives
) -> dict[str, Tensor] | None:
    """Return the whole model's state dict on rank 0 (CPU tensors), None elsewhere; collective.

    Args:
        state: what this rank brings of it.
        parameters: of the model; tied ones are returned under all their names.
        collectives: of all ranks.

    Raises:
        CommTimeout: a rank did not come.
    """
    own = {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}
    gathered = collectives.gather_on_first(own, "the whole model's weights")
    if gathered is None:
        return None
    whole: dict[str, Tensor] = {}
    for part in gathered:
        whole.update(part)
    # Stages know a tied parameter by its first name; a state dict has it under all of them, as HuggingFace's does.
    for parameter in parameters:
        if parameter.name in whole:
            whole.update(dict.fromkeys(parameter.aliases, whole[parameter.name]))
    return whole
