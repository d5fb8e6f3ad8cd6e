"""How samples are cut over tasks, and which messages that needs: the one definition of who sends what to whom.

Seen in the order of samples, the tasks of a stage cut the mini-batch into equal parts: part ``a`` is
micro-batch ``a // degree`` on the stage's rank ``a % degree``. A producer's and a consumer's part that
overlap need a message; stages of any two micro-batch sizes and degrees reshard this way. A forward
that runs in halves cuts the activations there too; gradients are of whole micro-batches always.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.schedule import StageSchedule

Overlap = tuple[int, int, int, int, bool, int | None, int | None]
"""Producer part, consumer part, first sample, samples, has whole tensors, producer's and consumer's half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """Which micro-batches of a stage run their forward in halves.

    Args:
        halved: those micro-batches.
        joined: those of them whose outputs leave together, after the second half.
    """

    halved: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()


WHOLE = Slicing()
"""No forward runs in halves."""


def slicing_of(schedule: StageSchedule) -> Slicing:
    """Return which micro-batches run in halves under this schedule."""
    halved = frozenset(task.micro_batch for task in schedule.tasks if task.half is not None)
    return Slicing(halved=halved, joined=frozenset(schedule.joined)) if halved else WHOLE


def check_divisibility(plan: PipelinePlan, index: int) -> None:
    """Refuse a stage whose micro-batches or ranks do not divide evenly.

    Raises:
        PlanError: says which number does not divide which.
    """
    stage = plan.stages[index]
    if stage.micro_batch_size < 1 or plan.mini_batch % stage.micro_batch_size:
        raise PlanError(
            f"stage {stage.name!r}: micro-batches of {stage.micro_batch_size} samples do not divide the "
            f"mini-batch of {plan.mini_batch}; choose a divisor"
        )
    if not stage.ranks or stage.micro_batch_size % stage.degree:
        raise PlanError(
            f"stage {stage.name!r}: {stage.degree} ranks do not divide a micro-batch of "
            f"{stage.micro_batch_size} samples; choose a multiple"
        )


def edge_overlaps(
    plan: PipelinePlan, edge_index: int, *, producer: Slicing = WHOLE, consumer: Slicing = WHOLE
) -> Iterator[Overlap]:
    """Yield an `Overlap` for each activation message of an edge, in the order of samples.

    The edge's tensors without a batch axis travel once for each consumer part, with its first sample;
    a message that would hold nothing is left out. Without slicing these are the gradient messages too.

    Args:
        producer, consumer: which forwards run in halves at either end. A message is cut where any of
            their tasks ends, except that what a joined micro-batch made leaves after its second half.

    Raises:
        PlanError: the edge names no tensors.
    """
    edge = plan.edges[edge_index]
    has_batch, has_whole = bool(edge.batch_tensors), bool(edge.whole_tensors)
    if not has_batch and not has_whole:
        raise PlanError(
            f"edge {edge_index} from {plan.stages[edge.src].name!r} to {plan.stages[edge.dst].name!r} names no "
            "tensors; name what it holds or leave it out"
        )
    produced, consumed = plan.stages[edge.src].local_batch_size, plan.stages[edge.dst].local_batch_size
    src_degree, dst_degree = plan.stages[edge.src].degree, plan.stages[edge.dst].degree
    is_sliced = bool(producer.halved or consumer.halved)
    src_half = dst_half = None
    first = 0
    while first < plan.mini_batch:
        src_part, dst_part = first // produced, first // consumed
        end = min((src_part + 1) * produced, (dst_part + 1) * consumed)
        if is_sliced:
            src_half = dst_half = None
            if src_part // src_degree in producer.joined:
                src_half = 1
            elif src_part // src_degree in producer.halved:
                src_half, end = _half_at(first, end, src_part * produced + produced // 2)
            if dst_part // dst_degree in consumer.halved:
                dst_half, end = _half_at(first, end, dst_part * consumed + consumed // 2)
        is_whole = has_whole and first == dst_part * consumed
        if has_batch or is_whole:
            yield src_part, dst_part, first, end - first, is_whole, src_half, dst_half
        first = end


def _half_at(first: int, end: int, middle: int) -> tuple[int, int]:
    """Return the half that sample ``first`` lies in, and where a range from there to ``end`` is cut."""
    return (0, min(end, middle)) if first < middle else (1, end)


def activation_bytes(edge: StageEdge, num_samples: int, has_whole_tensors: bool) -> float:
    """Return the bytes of an activation message."""
    return edge.bytes_per_sample * num_samples + (edge.bytes_fixed if has_whole_tensors else 0.0)


def gradient_bytes(edge: StageEdge, num_samples: int, has_whole_tensors: bool) -> float:
    """Return the bytes of the gradient message that answers an activation message."""
    fixed = edge.gradient_bytes_fixed if has_whole_tensors else 0.0
    return edge.gradient_bytes_per_sample * num_samples + fixed


def gradient_kinds(edge: StageEdge) -> tuple[bool, bool]:
    """Return whether gradients flow back for batch tensors, and for tensors without a batch axis."""
    gradients = frozenset(edge.gradient_tensors)
    return (
        any(name in gradients for name in edge.batch_tensors),
        any(name in gradients for name in edge.whole_tensors),
    )


def activation_message(plan: PipelinePlan, edge_index: int, overlap: Overlap) -> Message:
    """Return the message of one overlap that `edge_overlaps` yields."""
    producer, consumer, first, num_samples, is_whole, src_half, dst_half = overlap
    edge = plan.edges[edge_index]
    src_micro_batch, src_rank = _task_of(plan.stages[edge.src], producer)
    dst_micro_batch, dst_rank = _task_of(plan.stages[edge.dst], consumer)
    return Message(
        edge=edge_index,
        direction=Direction.ACTIVATION,
        src_rank=src_rank,
        dst_rank=dst_rank,
        src_micro_batch=src_micro_batch,
        dst_micro_batch=dst_micro_batch,
        samples=SampleRange(first_sample=first, num_samples=num_samples),
        has_whole_tensors=is_whole,
        src_half=src_half,
        dst_half=dst_half,
    )


def gradient_message(plan: PipelinePlan, edge_index: int, overlap: Overlap) -> Message:
    """Return the gradient message that answers the activation message of one overlap without slicing."""
    asked = activation_message(plan, edge_index, overlap)
    return Message(
        edge=edge_index,
        direction=Direction.GRADIENT,
        src_rank=asked.dst_rank,
        dst_rank=asked.src_rank,
        src_micro_batch=asked.dst_micro_batch,
        dst_micro_batch=asked.src_micro_batch,
        samples=asked.samples,
        has_whole_tensors=asked.has_whole_tensors and gradient_kinds(plan.edges[edge_index])[1],
    )


def _task_of(stage: Stage, part: int) -> tuple[int, int]:
    micro_batch, position = divmod(part, len(stage.ranks))
    return micro_batch, stage.ranks[position]
