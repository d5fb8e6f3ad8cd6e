"""What the engine asks of the model it is given, whether that is one module to capture or a graph of stages.

`CapturedModel` is the first; `integrations.given_graph.GivenGraph` the second. Beyond this interface the engine,
evaluation and checkpoints know no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.config import GraphPipelineConfig
from gpp_plugin.integrations import pretrained_files
from gpp_plugin.integrations.data import prepare_batch
from gpp_plugin.integrations.module_holder import ModuleHolder
from gpp_plugin.integrations.preparation import Setting, analyse, prepare_plan
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.runtime.batches import Batch
from gpp_plugin.runtime.pipeline import Lane, held_tensors
from gpp_plugin.runtime.stage_module import StageModule
from gpp_plugin.runtime.stage_source import CapturedStages, Reference, StageSource


class ModelSource(Protocol):
    """A model in the form its user gave it."""

    @property
    def stages(self) -> StageSource:
        """Return what gives lanes the code of their stages."""

    def prepare_batch(self, batch: Any) -> dict[str, Any]:
        """Return a batch as the model is called with it."""

    def prepare_plan(self, sample_batch: Batch) -> tuple[Reference, PipelinePlan]:
        """Agree on what the model is and on a plan for it; collective over all ranks."""

    def analyse(self, batch: Batch, outputs: Sequence[str]) -> Reference:
        """Agree on the model in evaluation, for batches of these keys; collective over all ranks."""

    def meet(self, reference: Reference, batch: Batch) -> None:
        """Learn the shapes that come of a batch like this one before a lane runs it; collective over all ranks."""

    def make_module(self, lane: Lane, sample_batch: Batch) -> StageModule:
        """Return this rank's stage and let go of the others."""

    def complete_module(self, module: StageModule, names: Iterable[str]) -> None:
        """Give the stage those tensors of ``names`` that only evaluation reads."""

    def share_weights(self, module: StageModule) -> None:
        """Let the user's model see the weights that training changes, where it can."""

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        state: Mapping[str, Tensor],
        plan: PipelinePlan,
        group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        """Write the weights for use without this package; collective over all ranks.

        Args:
            state: this rank's stage.
        """

    def close(self) -> None:
        """Let go of process groups; the model trains no more."""


class CapturedModel:
    """One module, captured and cut by a planner.

    Args:
        model: after `make_module` it keeps only the parameters of this rank's stage.
    """

    def __init__(self, model: nn.Module, *, config: GraphPipelineConfig, setting: Setting) -> None:
        self._model = model
        self._config = config
        self._setting = setting
        self._holder = ModuleHolder(model, config=config, setting=setting)
        self._stages = CapturedStages(model)
        self.prepare_batch: Callable[[Any], dict[str, Any]] = functools.partial(prepare_batch, model)

    @property
    def stages(self) -> StageSource:
        """Return what captures the model at the shapes of this rank's stage."""
        return self._stages

    def prepare_plan(self, sample_batch: Batch) -> tuple[Reference, PipelinePlan]:
        """Capture, profile and plan on rank 0; collective."""
        return prepare_plan(
            self._model, sample_batch, config=self._config, setting=self._setting, keep=self._stages.keep
        )

    def analyse(self, batch: Batch, outputs: Sequence[str]) -> Reference:
        """Capture for evaluation on rank 0; collective."""
        return analyse(
            self._model,
            batch,
            config=self._config,
            setting=self._setting,
            is_training=False,
            outputs=outputs,
        )

    def meet(self, reference: Reference, batch: Batch) -> None:
        """Do nothing: each rank captures new shapes alone."""

    def make_module(self, lane: Lane, sample_batch: Batch) -> StageModule:
        """Take this stage's parameters from the model and let go of the others."""
        own = held_tensors(lane.plan, lane.reference)[lane.stage_index]
        names = dict.fromkeys((*lane.prepare(sample_batch).tensors, *own))
        return self._holder.make_module(lane.reference, names)

    def complete_module(self, module: StageModule, names: Iterable[str]) -> None:
        """Give the stage what only evaluation reads (a mask's buffer, say)."""
        self._holder.complete_module(module, names)

    def share_weights(self, module: StageModule) -> None:
        """Let the user's model see the stage's weights."""
        self._holder.share_weights(module)

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        state: Mapping[str, Tensor],
        plan: PipelinePlan,
        group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        """Write sharded safetensors under HuggingFace names, one shard a stage, no gather."""
        stage = plan.stage_of_rank(self._setting.rank)
        writes = plan.stages[stage].ranks[0] == self._setting.rank
        pretrained_files.save_pretrained(
            directory,
            model=self._model,
            state=state if writes else {},
            stage_index=stage,
            num_stages=len(plan.stages),
            is_writer=writes,
            group=group,
            timeout=timeout_s,
        )

    def close(self) -> None:
        """Do nothing: it has no process groups."""
