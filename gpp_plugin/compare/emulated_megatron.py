"""Emulated plans on megatron-core's multi-module communicator: each stage a module, each task a delay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.integrations.megatron_peer import MegatronPeer, PeerModule
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.runtime.delay import wait_us
from gpp_plugin.simulate.durations import Durations, duration_reader


class _Delay(torch.autograd.Function):
    """Waits in forward and in backward; makes tensors of the right shapes."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, times_us: tuple[float, float], shape: tuple[int, ...], *inputs: Tensor
    ) -> Tensor:
        ctx.backward_us, ctx.weight_shape = times_us[1], weight.shape
        ctx.input_shapes = [tensor.shape for tensor in inputs]
        wait_us(times_us[0])
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wait_us(ctx.backward_us)
        (gradient,) = gradients
        made = [gradient.new_zeros(shape) for shape in (ctx.weight_shape, *ctx.input_shapes)]
        return made[0], None, None, *made[1:]


def make_megatron_iteration(plan: PipelinePlan, durations: Durations | None) -> Callable[[], None]:
    """Return this rank's part of one iteration of ``plan``; collective over its ranks.

    Args:
        plan: one rank a stage, equal micro-batches, one tensor a stage, and one stage that nothing is sent from.
        durations: of single tasks; the plan's own if None.
    """
    consumers: Mapping[int, list[str]] = {index: [] for index in range(len(plan.stages))}
    for edge in plan.edges:
        consumers[edge.src].append(plan.stages[edge.dst].name)
    modules = [
        PeerModule(
            name=stage.name,
            first_rank=stage.ranks[0],
            stages=1,
            degree=1,
            tensor=1,
            consumers=tuple(consumers[index]),
        )
        for index, stage in enumerate(plan.stages)
    ]
    rank = dist.get_rank()
    index = plan.stage_of_rank(rank)
    samples = plan.stages[index].micro_batch_size
    (rows, columns) = plan.tensors[0].shape_for(samples)
    shape = (rows, 1, columns)  # the communicator's tensors have three dimensions
    peer = MegatronPeer(modules, shape=shape, dtype=torch.float32)
    made = shape if consumers[index] else ()  # the last stage makes a loss
    weight = torch.zeros(1, requires_grad=True)
    read = duration_reader(plan, durations)

    def time_us(kind: TaskKind, micro_batch: int) -> float:
        return read(Task(stage=index, kind=kind, micro_batch=micro_batch), rank)

    def forward(micro_batch: int, received: Mapping[str, Tensor]) -> Tensor:
        times = (time_us(TaskKind.FORWARD, micro_batch), time_us(TaskKind.BACKWARD, micro_batch))
        output: Tensor = _Delay.apply(weight, times, made, *received.values())  # type: ignore[no-untyped-call]
        return output

    def iterate() -> None:
        weight.grad = None
        peer.run(forward, num_micro_batches=plan.num_micro_batches(index))

    return iterate
