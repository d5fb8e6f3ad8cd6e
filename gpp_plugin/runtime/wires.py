"""What each message holds, frozen at compile time: tensor, rows, shape, dtype, slot.

A wire is one tensor of one message as one end sees it. The sender cuts its rows out of the task's
tensor; the receiver puts the pieces of one tensor together in the order of their samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One tensor of one message.

    Args:
        name: node name of the tensor.
        slot: its index among the edge's tensors, the same at both ends and in both directions.
        axis: batch axis, or -1 for a tensor that travels whole.
        first_row, num_rows: the message's rows within the task's tensor at this end.
        shape, dtype: of what travels.
    """

    name: str
    slot: int
    axis: int
    first_row: int
    num_rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes that travel."""
        return math.prod(self.shape) * self.dtype.itemsize


def wires_of(
    message: Message, *, rank: int, plan: PipelinePlan, specs: Mapping[str, TensorSpec]
) -> tuple[Wire, ...]:
    """Return the tensors of ``message`` as ``rank`` (its sender or receiver) sees them.

    Tensors of no elements are left out: nothing travels for them.

    Raises:
        PlanError: the edge names a tensor that was not captured.
    """
    edge = plan.edges[message.edge]
    is_forward = message.direction is Direction.ACTIVATION
    is_producer = (rank == message.src_rank) == is_forward
    stage = plan.stages[edge.src if is_producer else edge.dst]
    micro_batch = message.src_micro_batch if rank == message.src_rank else message.dst_micro_batch
    task = stage.samples(micro_batch, rank)
    gradients = frozenset(edge.gradient_tensors)
    wires = []
    for slot, name in enumerate((*edge.batch_tensors, *edge.whole_tensors)):
        if not is_forward and name not in gradients:
            continue
        spec = specs.get(name)
        if spec is None:
            raise PlanError(
                f"edge {message.edge} sends {name!r}, which the captured graph does not have; plan anew"
            )
        is_batch = spec.layout.kind is LayoutKind.BATCH
        if not is_batch and not message.has_whole_tensors:
            continue
        rows = spec.layout.rows_per_sample
        shape = spec.shape_for(message.samples.num_samples)
        if math.prod(shape) == 0:
            continue
        wires.append(
            Wire(
                name=name,
                slot=slot,
                axis=spec.layout.axis if is_batch else -1,
                first_row=(message.samples.first_sample - task.first_sample) * rows if is_batch else 0,
                num_rows=message.samples.num_samples * rows if is_batch else 0,
                shape=shape,
                dtype=getattr(torch, spec.dtype),
            )
        )
    return tuple(wires)
