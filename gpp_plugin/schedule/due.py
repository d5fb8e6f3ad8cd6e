"""What a task must have received over an edge, worked out from the samples alone: what the validator expects."""

from __future__ import annotations

from collections.abc import Set

from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.ir.samples import SampleRange

Due = tuple[SampleRange, bool]
"""Samples of one message, and whether it holds the edge's tensors without a batch axis."""


def activations_due(
    plan: PipelinePlan, edge: StageEdge, samples: SampleRange, half: int | None, sent_in_halves: Set[int]
) -> list[Due]:
    """Return what a forward must receive: its samples cut where messages of the producer end.

    Args:
        samples, half: of the forward.
        sent_in_halves: the producer's micro-batches whose halves are sent one by one.
    """
    stage = plan.stages[edge.src]
    pieces = []
    for piece in _cut(samples, stage.local_batch_size):
        if piece.first_sample // stage.micro_batch_size in sent_in_halves:
            pieces += _cut(piece, stage.local_batch_size // 2)
        else:
            pieces.append(piece)
    has_whole = bool(edge.whole_tensors) and half != 1
    due = [(piece, has_whole and piece.first_sample == samples.first_sample) for piece in pieces]
    return due if edge.batch_tensors else [(piece, whole) for piece, whole in due if whole]


def gradients_due(plan: PipelinePlan, edge: StageEdge, samples: SampleRange) -> list[Due]:
    """Return what a backward must receive: a gradient for each message with one that its forward sent."""
    consumed = plan.stages[edge.dst].local_batch_size
    gradients = set(edge.gradient_tensors)
    has_batch = not gradients.isdisjoint(edge.batch_tensors)
    has_whole = not gradients.isdisjoint(edge.whole_tensors)
    due = [(piece, has_whole and piece.first_sample % consumed == 0) for piece in _cut(samples, consumed)]
    return due if has_batch else [(piece, whole) for piece, whole in due if whole]


def _cut(samples: SampleRange, size: int) -> list[SampleRange]:
    """Return ``samples`` cut at every multiple of ``size``."""
    pieces = []
    first = samples.first_sample
    while first < samples.end:
        end = min((first // size + 1) * size, samples.end)
        pieces.append(SampleRange(first_sample=first, num_samples=end - first))
        first = end
    return pieces
