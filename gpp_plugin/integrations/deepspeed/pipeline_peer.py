"""DeepSpeed's own `PipelineEngine` on a list of layers, its optimizer step separate: what benchmarks compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from gpp_plugin.integrations.deepspeed.stage_optimizer import without_shared_memory_op

# DeepSpeed's schedule ends with these three instructions; they run by themselves in `step`, so that a
# benchmark can time the pipeline without them.
_STEP = (ds_schedule.ReduceTiedGrads, ds_schedule.ReduceGrads, ds_schedule.OptimizerStep)


class _TrainSchedule(ds_schedule.TrainSchedule):
    """DeepSpeed's 1F1B up to the last backward."""

    def steps(self) -> Iterator[list[Any]]:
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, _STEP)]


class _StepSchedule(ds_schedule.TrainSchedule):
    """What DeepSpeed does after the last backward."""

    def steps(self) -> Iterator[list[Any]]:
        yield [command() for command in _STEP]


def join_ranks() -> None:
    """Join the process group that the launcher's variables describe, on gloo."""
    with without_shared_memory_op():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


class PipelinePeer:
    """Stock DeepSpeed running a chain, one layer a rank.

    Args:
        layers: one a stage, the same on every rank; each rank keeps its own.
        loss: from the last layer's output and the labels.
        micro_batch_size, num_micro_batches: of one mini-batch.
        make_optimizer: from parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        micro_batch_size: int,
        num_micro_batches: int,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        module = PipelineModule(
            layers=list(layers), num_stages=len(layers), loss_fn=loss, partition_method="uniform"
        )
        config = {
            "train_batch_size": micro_batch_size * num_micro_batches,
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": num_micro_batches,
            "steps_per_print": 1_000_000,
        }
        optimizer = make_optimizer(module.parameters())
        self.engine, *_ = deepspeed.initialize(model=module, config=config, optimizer=optimizer)
        sizes = {
            "micro_batches": num_micro_batches,
            "stages": len(layers),
            "stage_id": self.engine.stage_id,
        }
        self._train, self._step = _TrainSchedule(**sizes), _StepSchedule(**sizes)

    def run(self, micro_batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Run all forwards, backwards and messages of one mini-batch (as `train_batch`, without the step)."""
        engine = self.engine
        engine.set_dataiterator(micro_batches)
        engine.module.train()
        # What `train_batch` sets before it runs its schedule (DeepSpeed 0.19:
        # ``PipelineEngine.train_batch``).
        engine.total_loss = engine.total_additional_losses = None
        engine._compute_loss = True
        engine._exec_schedule(self._train)

    def step(self) -> None:
        """Reduce gradients and step the optimizer."""
        self.engine._exec_schedule(self._step)
