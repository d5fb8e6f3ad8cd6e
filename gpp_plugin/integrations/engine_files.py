"""What `GraphPipelineEngine` writes and reads: checkpoints, HuggingFace files, state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.errors import ConfigError
from gpp_plugin.integrations import checkpoint, pretrained_files
from gpp_plugin.integrations.model_source import ModelSource
from gpp_plugin.integrations.preparation import Setting
from gpp_plugin.integrations.surface import PipelineSurface
from gpp_plugin.runtime.meeting import Meeting


class PipelineFiles(PipelineSurface):
    """The engine's files; it sets these attributes. Every method is collective over all ranks."""

    config: GraphPipelineConfig
    _setting: Setting
    _source: ModelSource
    _meeting: Meeting

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write a checkpoint of all stages to ``save_dir/tag``; collective. ``latest`` is written last."""
        checkpoint.save_checkpoint(
            self.stage_engine,
            save_dir,
            tag or f"global_step{self.global_steps}",
            client_state=dict(client_state or {}),
            save_latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Read a checkpoint written on the same plan; collective.

        Args:
            load_module_only: only the weights: no optimizer, schedule, loss scale, counters or random states.

        Returns:
            The directory read and the client state.

        Raises:
            CheckpointError: it is missing, torn, or of another plan.
        """
        loaded = checkpoint.load_checkpoint(
            self.stage_engine,
            load_dir,
            tag,
            load_optimizer=load_optimizer_states,
            load_scheduler=load_lr_scheduler_states,
            weights_only=load_module_only,
        )
        return str(loaded.directory), loaded.client_state

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write sharded safetensors under HuggingFace names, one shard a stage; collective, no gather."""
        self._source.save_pretrained(
            save_directory,
            state=dict(self.module.state_dict()),
            plan=self.plan,
            group=self._setting.group,
            timeout_s=max(self.config.comm_timeout_s, 600.0),
        )

    def _is_first_of_stage(self) -> bool:
        return self.plan.stages[self._lane.stage_index].ranks[0] == self.global_rank

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> bool:
        """Write the model for inference as `save_pretrained` does; the file names are HuggingFace's."""
        if save_filename not in ("model.safetensors", "pytorch_model.bin"):
            raise ConfigError(f"save_16bit_model writes model-*.safetensors, not {save_filename}")
        self.save_pretrained(save_dir)
        return True

    def gather_state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's state dict on rank 0 (CPU tensors), None elsewhere; collective.

        Needs the whole model's bytes in rank 0's memory; `save_pretrained` does not.

        Raises:
            ConfigError: a stage is tensor-parallel: no rank knows how its shards make a whole.
        """
        shared_out = [stage.name for stage in self.plan.stages if stage.tensor > 1]
        if shared_out:
            raise ConfigError(
                f"gather_state_dict: the tensor ranks of stage {shared_out[0]!r} hold shards of its weights; use "
                "save_pretrained(), which writes a file a tensor rank, or save_checkpoint()"
            )
        return pretrained_files.gather_state_dict(
            dict(self.module.state_dict()) if self._is_first_of_stage() else {},
            parameters=self._reference.analysis.op_graph.parameters,
            meeting=self._meeting,
        )
