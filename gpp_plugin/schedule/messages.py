"""How samples are cut over tasks, and which messages that needs: the one definition of who sends what to whom.

Seen in the order of samples, the tasks of a stage cut the mini-batch into equal parts: part ``a`` is
micro-batch ``a // degree`` on the stage's rank ``a % degree``. A producer's and a consumer's part that
overlap need a message; stages of any two micro-batch sizes and degrees reshard this way.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import Direction, Message
from gpp_plugin.ir.samples import SampleRange


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


def edge_overlaps(plan: PipelinePlan, edge_index: int) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield (producer part, consumer part, first sample, samples, has whole tensors) of each activation message.

    The edge's tensors without a batch axis travel once for each consumer part, with its first sample;
    a message that would hold nothing is left out.

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
    first = 0
    while first < plan.mini_batch:
        producer, consumer = first // produced, first // consumed
        end = min((producer + 1) * produced, (consumer + 1) * consumed)
        is_whole = has_whole and first == consumer * consumed
        if has_batch or is_whole:
            yield producer, consumer, first, end - first, is_whole
        first = end


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


def activation_message(
    plan: PipelinePlan, edge_index: int, overlap: tuple[int, int, int, int, bool]
) -> Message:
    """Return the message of one overlap that `edge_overlaps` yields."""
    producer, consumer, first, num_samples, is_whole = overlap
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
    )


def gradient_message(
    plan: PipelinePlan, edge_index: int, overlap: tuple[int, int, int, int, bool]
) -> Message:
    """Return the gradient message that answers the activation message of one overlap."""
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
