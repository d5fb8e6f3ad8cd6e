"""What each message holds, frozen at compile time: tensor, rows, shape, dtype, slot.

A payload is one tensor of one message as one end sees it. The sender cuts its rows out of the task's
tensor; the receiver puts the pieces of one tensor together in the order of their samples. Where tensor ranks
hold shards, both do so along the shards' axes as well: a message holds what is in its sender's and in its
receiver's shard.

Source: this project
Tests: tests/runtime/test_tensor_grids.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec

BoundarySpecs = Mapping[str, TensorSpec] | Sequence[Mapping[str, TensorSpec]]
"""Boundary tensors by name: of all samples alike, or of each sample in order where each has shapes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCut:
    """Elements ``first`` to ``first + count`` along ``axis``, of ``size``, of the task's tensor at one end."""

    axis: int
    first: int
    count: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One tensor of one message.

    Args:
        name: node name of the tensor.
        slot: its index among the edge's tensors, the same at both ends and in both directions.
        axis: batch axis, or -1 for a tensor that travels whole.
        first_row, num_rows: the message's rows within the task's tensor at this end.
        shape, dtype: of what travels.
        cuts: its part of the task's tensor along the axes of shards; empty where tensors are held whole.
    """

    name: str
    slot: int
    axis: int
    first_row: int
    num_rows: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[ShardCut, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes that travel."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(specs: BoundarySpecs, samples: SampleRange) -> Mapping[str, TensorSpec]:
    """Return the boundary tensors of some samples; where samples differ in shape a range is one of them.

    Samples of the next mini-batch are numbered behind those of this one, and ``specs`` are then of that one: of four
    samples a mini-batch, 6 is its number 2.
    """
    return specs if isinstance(specs, Mapping) else specs[samples.first_sample % len(specs)]


def payloads_of(
    message: Message, *, is_sender: bool, plan: PipelinePlan, specs: BoundarySpecs
) -> tuple[Payload, ...]:
    """Return the tensors of ``message`` as its sender sees them, or its receiver.

    Tensors of no elements are left out: nothing travels for them.

    Raises:
        PlanError: the edge names a tensor that was not captured.
    """
    # Both ends see the same tensors, shapes and slots, but rows within their own task's tensor. Samples 4..5 of a
    # tensor with 3 rows a sample, from a producer's task on samples 0..5 to a consumer's on 4..7:
    #
    #     sender    first_row 12, num_rows 6        receiver   first_row 0, num_rows 6        shape (6, ...) at both
    #
    # A gradient is sent the other way, so its producer is the edge's consumer. Who the tensors belong to is by the
    # edge, who sends by the message.
    edge = plan.edges[message.edge]
    is_forward = message.direction is Direction.ACTIVATION
    is_producer = is_sender == is_forward
    stage = plan.stages[edge.src if is_producer else edge.dst]
    task = (
        stage.samples(message.src_micro_batch, message.src_rank)
        if is_sender
        else stage.samples(message.dst_micro_batch, message.dst_rank)
    )
    gradients = frozenset(edge.gradient_tensors)
    known = specs_of(specs, message.samples)
    payloads = []
    for slot, name in enumerate((*edge.batch_tensors, *edge.whole_tensors)):
        if not is_forward and name not in gradients:
            continue
        spec = known.get(name)
        if spec is None:
            raise PlanError(
                f"edge {message.edge} sends {name!r}, which the captured graph does not have; plan anew"
            )
        is_batch = spec.layout.kind is LayoutKind.BATCH
        if not is_batch and not message.has_whole_tensors:
            continue
        rows = spec.layout.rows_per_sample
        shape = list(spec.shape_for(message.samples.num_samples))
        cuts = _cuts(message, edge, plan, spec, is_producer=is_producer)
        for cut in cuts:
            shape[cut.axis] = cut.count
        if math.prod(shape) == 0:
            continue
        payloads.append(
            Payload(
                name=name,
                slot=slot,
                axis=spec.layout.axis if is_batch else -1,
                first_row=(message.samples.first_sample - task.first_sample) * rows if is_batch else 0,
                num_rows=message.samples.num_samples * rows if is_batch else 0,
                shape=tuple(shape),
                dtype=getattr(torch, spec.dtype),
                cuts=cuts,
            )
        )
    return tuple(payloads)


def held_shape(spec: TensorSpec, num_samples: int, stage: Stage, shard_axis: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor as a rank of ``stage`` has it for that many samples: its shard, or all.

    Raises:
        PlanError: the tensor cannot be cut into equal shards.
    """
    shape = list(spec.shape_for(num_samples))
    if shard_axis is not None and stage.tensor > 1:
        held = _shard(spec, stage, shard_axis, 0)
        shape[shard_axis] = len(held)
    return tuple(shape)


def _cuts(
    message: Message, edge: StageEdge, plan: PipelinePlan, spec: TensorSpec, *, is_producer: bool
) -> tuple[ShardCut, ...]:
    """Return the part of each shard axis that a message holds, within the tensor of one end."""
    # A tensor of 12 along the axis, held as 2 shards by the producer and 3 by the consumer; what producer 0 (0..5)
    # and consumer 1 (4..7) share is 4..5. The sender cuts its shard at (first 4, count 2, size 6), the receiver puts
    # it into its own at (first 0, count 2, size 4). Along an axis that only one end has cut, the other one holds all
    # of it.
    is_forward = message.direction is Direction.ACTIVATION
    ranks = (message.src_rank, message.dst_rank) if is_forward else (message.dst_rank, message.src_rank)
    stages = plan.stages[edge.src], plan.stages[edge.dst]
    held = [
        {}
        if axis is None or stage.tensor == 1
        else {axis: _shard(spec, stage, axis, stage.position(rank)[1])}
        for stage, rank, axis in zip(stages, ranks, (edge.src_shard_axis, edge.dst_shard_axis), strict=True)
    ]
    cuts = []
    here = held[0] if is_producer else held[1]
    for axis in sorted({*held[0], *held[1]}):
        whole = range(spec.shape[axis])
        first, second = (parts.get(axis, whole) for parts in held)
        own = here.get(axis, whole)
        both = range(max(first.start, second.start), min(first.stop, second.stop))
        cuts.append(ShardCut(axis=axis, first=both.start - own.start, count=len(both), size=len(own)))
    return tuple(cuts)


def _shard(spec: TensorSpec, stage: Stage, axis: int, position: int) -> range:
    """Return the elements along ``axis`` that tensor position ``position`` of ``stage`` holds."""
    is_samples = spec.layout.kind is LayoutKind.BATCH and spec.layout.axis == axis
    if not 0 <= axis < len(spec.shape) or is_samples or spec.shape[axis] % stage.tensor:
        raise PlanError(
            f"stage {stage.name!r} holds {spec.name!r} of shape {spec.shape} as {stage.tensor} equal shards along axis "
            f"{axis}, which cannot be; choose an axis that its tensor size divides and that is not the samples'"
        )
    size = spec.shape[axis] // stage.tensor
    return range(position * size, (position + 1) * size)
