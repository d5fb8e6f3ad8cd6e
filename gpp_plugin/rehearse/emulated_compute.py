"""Stands for a stage's compute and optimizer: delays of the planned durations, tensors of the right shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.runtime.compute import BoundaryGradients
from gpp_plugin.runtime.messages.wires import held_shape
from gpp_plugin.runtime.ranks.waiting import begin_all_gather

CPU = torch.device("cpu")
SPIN_US = 200.0
"""The end of a delay is awaited by looking at the clock: a sleeping process is woken late."""


def wait_us(duration_us: float) -> None:
    """Return ``duration_us`` microseconds after the call, by sleeping and then a short spin."""
    end = time.perf_counter() + duration_us * 1e-6
    if duration_us > SPIN_US:
        time.sleep((duration_us - SPIN_US) * 1e-6)
    while time.perf_counter() < end:
        pass


FLOAT_BYTES = 4
BUCKET_FLOATS = 1 << 23
"""Gradients are reduced in pieces, so that a rank needs no second copy of all of them."""

TaskMicroseconds = Callable[[TaskKind, int | None, int], float]
"""From (kind, half, micro-batch) to the duration of one task."""


class EmulatedCompute:
    """A `StageCompute` that waits for each task's duration.

    The tensors it returns are the same ones every time and hold zeros: nothing but their shapes and dtypes
    matters to a message. Tensor ranks begin each task together, as their collectives make them.

    Args:
        specs: every tensor on the plan's edges.
        gradients: which of them have gradients that this rank receives and sends.
        task_us: microseconds of the stage's tasks.
        tensor_group: the group of this rank's data position; None for a single rank.
        device: where the tensors lie.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        stage: int,
        *,
        specs: Mapping[str, TensorSpec],
        gradients: BoundaryGradients,
        task_us: TaskMicroseconds,
        tensor_group: dist.ProcessGroup | None = None,
        device: torch.device = CPU,
    ) -> None:
        # A stage with one rank of 4 samples, an output of hidden [samples, 8, 16] holds
        #
        #   _made       {4: [zeros [4, 8, 16]], 2: [zeros [2, 8, 16]]}  of a whole and of half a forward
        #   _gradients  [zeros [4, 8, 16]]                                 in the order of gradient_inputs
        #
        # and no others: messages are only read while they travel, so the same tensor may be
        # sent many times at once.
        self.received = _names(edge for edge in plan.edges if edge.dst == stage)
        self.outputs = _names(edge for edge in plan.edges if edge.src == stage)
        self.gradient_outputs = gradients.outputs
        self.gradient_inputs = gradients.inputs
        self._task_us = task_us
        self._tensor_group = tensor_group
        self._meeting = torch.zeros(1, device=device)
        own = plan.stages[stage]
        # The axis along which a stage's tensor ranks hold shards of a tensor; the two ends of an
        # edge may differ in it.
        axes = {
            name: edge.src_shard_axis if edge.src == stage else edge.dst_shard_axis
            for edge in plan.edges
            if stage in (edge.src, edge.dst)
            for name in (*edge.batch_tensors, *edge.whole_tensors)
        }

        def zeros(name: str, num_samples: int) -> Tensor:
            spec = specs[name]
            shape = held_shape(spec, num_samples, own, axes[name])
            return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

        self._local = own.local_batch_size
        self._made = {
            rows: [zeros(name, rows) for name in self.outputs]
            for rows in {self._local, self._local // 2}
            if rows
        }
        self._gradients = [zeros(name, self._local) for name in self.gradient_inputs]

    def forward(
        self, micro_batch: int, half: int | None, inputs: Sequence[Tensor], received: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Wait for the forward's duration and return tensors of the outputs' shapes."""
        self._run(TaskKind.FORWARD, micro_batch, half)
        return self._made[self._local if half is None else self._local // 2]

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Wait for the backward's duration and return tensors of the received ones' shapes."""
        self._run(TaskKind.BACKWARD, micro_batch)
        return self._gradients

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Wait for the duration of the gradients that are sent, and return tensors of their shapes."""
        self._run(TaskKind.INPUT_GRADIENT, micro_batch)
        return self._gradients

    def weight_gradient(self, micro_batch: int) -> None:
        """Wait for the duration of the weights' gradients."""
        self._run(TaskKind.WEIGHT_GRADIENT, micro_batch)

    def clear(self) -> None:
        """Forget nothing: nothing is kept."""

    def _run(self, kind: TaskKind, micro_batch: int, half: int | None = None) -> None:
        # Before the delay, not after: real tensor ranks meet in the first collective of a task.
        if self._tensor_group is not None:
            dist.all_reduce(self._meeting, group=self._tensor_group)
        wait_us(self._task_us(kind, half, micro_batch))


class EmulatedHooks:
    """The optimizer side: gradients are reduced at their real (scaled) size, the step updates nothing.

    Args:
        data_group: the group of the ranks that this one reduces with; None for a single one.
        gradient_bytes: what the stage reduces in one mini-batch, as 4-byte floats.
        world_group: the group of all ranks, which agree on the norm before a step.
        device: where the gradients lie.
    """

    loss_scale = 1.0

    def __init__(
        self,
        *,
        data_group: dist.ProcessGroup | None,
        gradient_bytes: float,
        world_group: dist.ProcessGroup | None,
        device: torch.device = CPU,
    ) -> None:
        self.data_group = data_group
        self._world_group = world_group
        # The whole size is held, if only once: sending one small piece repeatedly would stay in a
        # cache and look faster.
        floats = round(gradient_bytes / FLOAT_BYTES) if data_group is not None else 0
        self._gradients = torch.zeros(floats, device=device)
        self._norm = torch.zeros(1, device=device)

    def accumulate(self) -> None:
        """Do nothing: there are no gradients to take up."""

    def begin_reduction(self) -> None:
        """Do nothing: backwards are slept through, and nothing is final before they end."""

    def reduce_data(self) -> None:
        """Sum as many bytes as the stage has gradients over its data-parallel ranks."""
        for piece in self._gradients.split(BUCKET_FLOATS) if self._gradients.numel() else ():
            dist.all_reduce(piece, group=self.data_group)

    def reduce_tied(self) -> None:
        """Do nothing: a plan does not say what is tied, and its programs ask for no such sum."""

    def step(self) -> None:
        """Agree with all ranks, as they do on the gradients' norm; no parameter is there to update."""
        if self._world_group is not None:
            dist.all_reduce(self._norm, group=self._world_group)


class EmulatedWeights:
    """The stage's parameters where its ranks hold parts of them: gathered at their real (scaled) size.

    Args:
        data_group: of the ranks that hold the other parts.
        num_bytes: of all of them.
    """

    def __init__(
        self, *, data_group: dist.ProcessGroup, num_bytes: float, device: torch.device = CPU
    ) -> None:
        self._group = data_group
        self._part = torch.zeros(
            max(1, round(num_bytes / data_group.size())), dtype=torch.uint8, device=device
        )
        self._whole = torch.zeros(self._part.numel() * data_group.size(), dtype=torch.uint8, device=device)

    @classmethod
    def of(
        cls, stage: Stage, data_group: dist.ProcessGroup | None, scale_bytes: float, device: torch.device
    ) -> EmulatedWeights | None:
        """Return those of a stage on one of its ranks; None where each rank holds them whole."""
        if not stage.gathered_bytes or data_group is None:
            return None
        num_bytes = stage.sharded_bytes * scale_bytes
        return cls(data_group=data_group, num_bytes=num_bytes, device=device)

    def gather(self) -> Callable[[], None]:
        """Begin to bring the parts together."""
        return begin_all_gather(self._whole, self._part, group=self._group, what="a rehearsed gather")

    def free(self) -> None:
        """Keep the memory: the next gather needs it."""

    def apart(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs: nothing that is computed is a view of these."""
        return outputs


def _names(edges: Iterable[StageEdge]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for edge in edges for name in (*edge.batch_tensors, *edge.whole_tensors)))
