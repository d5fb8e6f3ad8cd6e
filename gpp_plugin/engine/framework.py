"""What the engine needs of a framework: each stage's optimizer.

The engine imports no framework; `integrations` has what a DeepSpeed configuration stands for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpp_plugin.engine.checkpoints.optimizer_pieces import OptimizerPieces
from gpp_plugin.engine.checkpoints.saved_tensors import StageOptimizerState
from gpp_plugin.engine.partitioned_gradients import FlatGroup
from gpp_plugin.engine.sharded_weights import FlatWeights
from gpp_plugin.ir.typed_leaves import Bytes
from gpp_plugin.runtime.weight_versions import WeightPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReplica:
    """One of a stage's ranks that hold the same parameters, as the stage's optimizer is made for it.

    Args:
        data_ranks: the global ranks of these in order, of all data and context positions; ``rank`` is one of them.
        data_group, single_group: process groups of those ranks, and of this rank alone.
        mini_batch: samples of one optimizer step over the whole graph.
        zero_stage: the plan's.
    """

    # Rank 3 of a stage on ranks 1 2 / 3 4 (a row a data position) is in column {1, 3}: data_ranks (1, 3).
    rank: int
    data_ranks: tuple[int, ...]
    data_group: dist.ProcessGroup | int
    single_group: dist.ProcessGroup
    mini_batch: int
    device: torch.device
    zero_stage: int


class Monitor(Protocol):
    """What writes to the monitors of a configuration, on rank 0; DeepSpeed's `MonitorMaster` is one."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Write events: name, value, samples so far."""


@dataclass(slots=True)
class StepCounters:
    """What was done so far, in mini-batches and samples."""

    global_steps: Bytes = 0
    skipped_steps: Bytes = 0
    global_samples: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What of a job's configuration decides about gradients and steps; types by torch's names.

    Args:
        dtype: of the parameters (``float32``, ``bfloat16``, ``float16``).
        accumulation_dtype: in which micro-batches' gradients are added up.
        communication_dtype: gradients are sent in; None sends them as they are.
        bucket_elements: most elements of one message of gradients.
        zero_stage: 0 to 3.
        gradient_clipping: largest global L2 norm of a step; 0 does not clip.
        check_overflow: skip the step when the norm is not finite.
    """

    dtype: str
    accumulation_dtype: str
    communication_dtype: str | None
    bucket_elements: int
    zero_stage: int
    gradient_clipping: float
    check_overflow: bool


class WeightUpdater(Protocol):
    """What updates one stage's weights, as a framework makes it: optimizer, masters, schedule, loss scale.

    The engine sums gradients over ranks, agrees on their norm and decides; this one steps. Collective calls say so.
    """

    @property
    def versions(self) -> Mapping[str, str]:
        """Return the releases that a checkpoint's manifest names."""

    @property
    def config(self) -> StepSettings:
        """Return what the job's configuration decides about gradients and steps."""

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters it steps, by name, in the same order on every rank of the stage."""

    @property
    def layout(self) -> Sequence[FlatGroup]:
        """Return how these lie in the ranks' partitions (ZeRO 1 and 2); nothing where every rank steps all of them."""

    @property
    def norm_precision(self) -> torch.dtype:
        """Return the type in which norms are added up: double, where the device computes it."""

    @property
    def optimizer(self) -> Any:
        """Return the optimizer as users see it; one over placeholders where the stage trains nothing."""

    @property
    def lr_scheduler(self) -> Any:
        """Return the learning-rate scheduler, if any."""

    @property
    def loss_scale(self) -> float:
        """Return the factor on every loss of this mini-batch; the same on every rank."""

    def require(self) -> None:
        """Refuse to train where the job has no optimizer.

        Raises:
            ConfigError: says what to add.
        """

    def apply(
        self,
        gradients: Mapping[str, Tensor | None] | Sequence[Tensor],
        *,
        coefficient: float,
        resting: Collection[str],
    ) -> None:
        """Step with ``coefficient`` times the gradients; collective over the stage's ranks where partitioned.

        Args:
            gradients: whole ones by name, None where there is none, or this rank's partitions, one for each group.
            resting: parameters that are left as they are.
        """

    def advance_rates(self) -> None:
        """Advance the learning-rate schedule by one step."""

    def rates(self) -> tuple[float, ...]:
        """Return the learning rate of every parameter group of the model."""

    def count(self, counters: StepCounters, *, overflow: bool) -> None:
        """Take up what was counted, and choose the loss scale of the next mini-batch.

        Raises:
            RuntimeFailure: it cannot sink any further.
        """

    def places(self, parameters: Sequence[nn.Parameter]) -> WeightPlaces:
        """Return where these trained parameters may lie."""

    def master(self, name: str) -> Tensor:
        """Return an fp32 copy of a trained parameter's master; collective over the stage's ranks where partitioned."""

    def flat_weights(self) -> Sequence[FlatWeights]:
        """Return the buffers in which trained parameters lie, each cut into the ranks' partitions (`layout`)."""

    def publish_to(self, parts: Sequence[Tensor]) -> None:
        """Write stepped weights to this rank's parts of `flat_weights` from now on, and not to the parameters."""

    def refresh_masters(self) -> None:
        """Take master weights anew after the parameters were written from outside."""

    def written(self) -> Tensor | None:
        """Return how many elements of a sample were written since the last step, on the device.

        None where parameters are their own masters: what is written to them counts as it is.
        """

    def adopt_written(self) -> None:
        """Take into the masters what was written to parameters since the last step."""

    def own_tensors(self) -> list[Tensor]:
        """Return masters and optimizer state, parameters that are their own masters among them."""

    def pieces(self, foreign: Collection[str]) -> OptimizerPieces:
        """Return optimizer state and masters by parameter, this rank's part where partitioned.

        Args:
            foreign: parameters that another stage saves.
        """

    def spans(self) -> dict[str, list[tuple[int, int]]]:
        """Return the elements of each trained parameter that this rank steps: first one, and how many."""

    def check_saved(self, saved: StageOptimizerState) -> None:
        """Refuse the state of another optimizer, and one that no optimizer has.

        Raises:
            CheckpointError: names both, or what is wrong.
        """

    def restore(self, saved: StageOptimizerState) -> None:
        """Restore masters and optimizer state from those of any plan.

        Raises:
            CheckpointError: what was saved cannot be cut as this rank holds it.
        """

    def shared_state(self) -> dict[str, Any]:
        """Return the state of schedule and loss scale, which is the same on every rank."""

    def check_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool) -> None:
        """Refuse what `load_shared_state` could not restore; nothing changes.

        Raises:
            GppError: says what is wrong.
        """

    def load_shared_state(self, state: Mapping[str, Any], *, load_scheduler: bool) -> None:
        """Restore what `shared_state` returned, the schedule if ``load_scheduler``."""

    def close(self) -> None:
        """Release what the framework holds."""
