"""How samples are cut over tasks, and which messages that needs: the one definition of who sends what to whom.

Seen in the order of samples, the tasks of a stage cut the mini-batch into equal parts: part ``a`` is
micro-batch ``a // degree`` on the stage's rank ``a % degree``. A producer's and a consumer's part that
overlap need a message; stages of any two micro-batch sizes and degrees reshard this way. A forward
that runs in halves cuts the activations there too; gradients are of whole micro-batches always.

``rank`` here is a data position of the stage's grid: context x tensor ranks, which all have those samples. Which
of the two positions' ranks send to which, and how much, `tensor_pairs` says: a rank that holds the whole tensor can
serve anyone, so each receiver has one; of parts it has all that hold something of what it needs.

    whole 2 -> whole 3      0>0 1>1 0>2         whole 2 -> parts 2      0>0 1>1, half each
    whole 3 -> whole 2      0>0 1>1             parts 2 -> whole 1      0>0 1>0, half each

Source: this project
Tests: tests/schedule/test_tensor_grids.py, tests/nccl/test_under_way.py
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge, forward_only_stages
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.ir.tensors import SampleRange

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
    # Two cuts of the same line of samples, laid over each other. With 12 samples, a producer of 6 on 2 ranks (parts
    # of 3) and a consumer of 4 on 1 (parts of 4), a message ends wherever one of the two does:
    #
    #     producer   |0 1 2|3 4 5|6 7 8|9 . .|       parts 0, 1 are micro-batch 0 on ranks 0, 1; 2, 3 micro-batch 1
    #     consumer   |0 1 2 3|4 5 6 7|8 9 . .|       part p is micro-batch p
    #     messages   |0 1 2|3|4 5|6 7|8|9 . .|       (0, 0, 0, 3), (1, 0, 3, 1), (1, 1, 4, 2), (2, 1, 6, 2), ...
    #
    # A tensor without a batch axis travels with the messages whose first sample is the consumer part's: 0, 4 and 8.
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


PREFETCHED_BUFFERS = 2
"""How many receives before their place a CUDA device has buffers for (`runtime.messages.mailbox`)."""


def most_sends(program: RankProgram, *, in_flight: int) -> int:
    """Return how many sends of a stage may be under way before one is waited for: those of so many micro-batches.

    A stage begins the forward of micro-batch m + c only when c others are done, so that what it sent for m has been
    read. Of one micro-batch in flight the next one's messages leave beside those of the last.
    """
    forwards = {task.micro_batch for task in program.tasks if task.kind is TaskKind.FORWARD}
    sends = sum(not message.is_local_transfer for message in program.messages(InstructionKind.SEND))
    return max(in_flight, 2) * math.ceil(sends / max(len(forwards), 1))


def gradient_kinds(edge: StageEdge) -> tuple[bool, bool]:
    """Return whether gradients flow back for batch tensors, and for tensors without a batch axis."""
    gradients = frozenset(edge.gradient_tensors)
    return (
        any(name in gradients for name in edge.batch_tensors),
        any(name in gradients for name in edge.whole_tensors),
    )


class TensorPair(NamedTuple):
    """Two ranks of a producer's and a consumer's data position between which a message travels.

    Args:
        sender, receiver: their places among the ranks of the same samples.
        share: of the tensors' bytes.
    """

    sender: int = 0
    receiver: int = 0
    share: float = 1.0


ALONE = (TensorPair(),)
"""The pairs of an edge between stages whose ranks all have samples of their own."""


def tensor_pairs(plan: PipelinePlan, edge_index: int, direction: Direction) -> tuple[TensorPair, ...]:
    """Return who sends to whom between the ranks of two data positions of an edge, receivers in order.

    Of ``t`` ranks that hold the same, the whole tensor or a part, receiver ``l`` has number ``l mod t``: it gets
    nothing twice, and the senders share the work. Shares are of equal parts. Where parts are uneven, a message may be
    a position longer or shorter; all messages of an edge together have as many bytes.
    """
    edge = plan.edges[edge_index]
    src, dst = plan.stages[edge.src], plan.stages[edge.dst]
    if src.model_parallel == dst.model_parallel == 1:
        return ALONE
    ends = [(src, edge.src_shard_axis), (dst, edge.dst_shard_axis)]
    (from_stage, sent_axis), (to_stage, received_axis) = (
        ends if direction is Direction.ACTIVATION else reversed(ends)
    )
    sent, received = from_stage.num_parts(sent_axis), to_stage.num_parts(received_axis)
    copies = from_stage.model_parallel // sent
    pairs = []
    for receiver in range(to_stage.model_parallel):
        wanted = to_stage.part_at(receiver, received_axis)
        for part in range(sent):
            # Parts along two axes cross, so each pair shares 1/sent x 1/received; along the same axis they are
            # ranges of one line of sent x received cells: of 2 and 3, part 1 of 3 has cells 2..3, so one of each.
            cells = 1
            if sent_axis == received_axis:
                cells = min((part + 1) * received, (wanted + 1) * sent) - max(part * received, wanted * sent)
            if cells > 0:
                sender = part * copies + receiver % copies
                pairs.append(TensorPair(sender, receiver, cells / (sent * received)))
    return tuple(pairs)


def message_bytes(plan: PipelinePlan, message: Message) -> float:
    """Return the bytes of a message: of tensors that ranks of the same samples hold in parts, its share."""
    edge, direction = plan.edges[message.edge], message.direction
    is_activation = direction is Direction.ACTIVATION
    count = activation_bytes if is_activation else gradient_bytes
    ends = (edge.src, edge.dst) if is_activation else (edge.dst, edge.src)
    sender, receiver = (
        plan.stages[index].position(rank)[1] for index, rank in zip(ends, message.channel, strict=True)
    )
    pairs = tensor_pairs(plan, message.edge, direction)
    share = next(pair.share for pair in pairs if (pair.sender, pair.receiver) == (sender, receiver))
    return share * count(edge, message.samples.num_samples, message.has_whole_tensors)


def under_way_bytes(plan: PipelinePlan, programs: Sequence[RankProgram]) -> int:
    """Return the most that messages of one stage hold beside what its tasks keep, on a CUDA device.

    Sent ones until they are waited for (`most_sends`), as a host that runs ahead finds none of them done; buffers of
    received ones from when they are made, `PREFETCHED_BUFFERS` receives before their place, until a task reads them.

    Args:
        programs: of the stage, one behind the other. What one leaves is the next one's, which counts micro-batches from
            the next mini-batch where it is the same one again.
    """
    # The last stage of a chain, micro-batches of 10 MB there and back. Buffers are made two receives ahead:
    #
    #     receive 0   made 0 1 2 30     F0  read 0  20
    #     receive 1   made 3     30     B0          20     send 0  30    at most two sends are under way
    #     receive 2   made 4     40     F1  read 1  30 ...
    unread: defaultdict[tuple[bool, int, int | None], float] = defaultdict(float)
    sent: deque[float] = deque()
    held = most = 0.0
    for before, program in zip((None, *programs), programs, strict=False):
        if program is before:
            count = plan.num_micro_batches(program.stage)
            left = {(kind, micro_batch - count, half): n for (kind, micro_batch, half), n in unread.items()}
            unread = defaultdict(float, left)
        received = [m for m in program.messages(InstructionKind.RECEIVE) if not m.is_local_transfer]
        sizes = [message_bytes(plan, message) for message in received]
        for each, size in zip(received, sizes, strict=True):
            unread[each.direction is Direction.ACTIVATION, each.dst_micro_batch, each.dst_half] += size
        limit = most_sends(program, in_flight=plan.stages[program.stage].in_flight)
        num_made, num_posted = 0, 0
        for instruction in program.instructions:
            task, message = instruction.task, instruction.message
            if task is not None and task.kind is not TaskKind.WEIGHT_GRADIENT:
                for half in {None, task.half}:  # what several tasks read is waited for by the first one
                    held -= unread.pop((task.kind is TaskKind.FORWARD, task.micro_batch, half), 0.0)
            if message is None or message.is_local_transfer:
                continue
            if instruction.kind is InstructionKind.RECEIVE:
                num_posted += 1
                held += sum(sizes[num_made : num_posted + PREFETCHED_BUFFERS])
                num_made = num_posted + PREFETCHED_BUFFERS
            else:
                sent.append(message_bytes(plan, message))
                held += sent[-1]
            most = max(most, held)
            while len(sent) > limit:
                held -= sent.popleft()
    return round(most)


def message_of(
    plan: PipelinePlan, edge_index: int, direction: Direction, overlap: Overlap, pair: TensorPair = ALONE[0]
) -> Message:
    """Return the message of one overlap that `edge_overlaps` yields, between the ranks at two places.

    Args:
        overlap: of a gradient, one without slicing.
    """
    producer, consumer, first, num_samples, is_whole, src_half, dst_half = overlap
    edge = plan.edges[edge_index]
    ends = [(plan.stages[edge.src], producer), (plan.stages[edge.dst], consumer)]
    if direction is Direction.GRADIENT:
        ends.reverse()
        is_whole = is_whole and gradient_kinds(edge)[1]
        src_half = dst_half = None
    src_micro_batch, src_rank = _task_of(*ends[0], pair.sender)
    dst_micro_batch, dst_rank = _task_of(*ends[1], pair.receiver)
    return Message(
        edge=edge_index,
        direction=direction,
        src_rank=src_rank,
        dst_rank=dst_rank,
        src_micro_batch=src_micro_batch,
        dst_micro_batch=dst_micro_batch,
        samples=SampleRange(first_sample=first, num_samples=num_samples),
        has_whole_tensors=is_whole,
        src_half=src_half,
        dst_half=dst_half,
    )


def _task_of(stage: Stage, part: int, place: int) -> tuple[int, int]:
    """Return the micro-batch and the rank that has a part of the samples, at a place of its data position."""
    micro_batch, position = divmod(part, stage.degree)
    return micro_batch, stage.model_ranks(position)[place]


def messages_read(program: RankProgram) -> dict[Task, list[Message]]:
    """Return the messages that each task of a program is the first to read."""
    reads = {}
    for stage in program.stages:
        part = program.of_stage(stage)
        received: dict[tuple[Direction, int, int | None], list[Message]] = defaultdict(list)
        for message in part.messages(InstructionKind.RECEIVE):
            received[message.direction, message.dst_micro_batch, message.dst_half].append(message)
        for task in part.tasks:
            if task.kind is not TaskKind.WEIGHT_GRADIENT:
                direction = Direction.ACTIVATION if task.kind is TaskKind.FORWARD else Direction.GRADIENT
                reads[task] = received[direction, task.micro_batch, task.half]
    return reads


def messages_held_back_by(plan: PipelinePlan, program: RankProgram) -> dict[Task, list[Message]]:
    """Return by forward of a stage without backwards the messages that must have been read before it runs.

    Of micro-batch m + k, with k in flight, what was sent of m; other stages are held back by their backwards.
    """
    found: dict[Task, list[Message]] = {}
    for part in map(program.of_stage, forward_only_stages(plan).intersection(program.stages)):
        firsts = [task for task in part.tasks if task.half != 1]
        held = plan.stages[part.stage].in_flight
        later = {task.micro_batch: after for task, after in zip(firsts, firsts[held:], strict=False)}
        for message in part.messages(InstructionKind.SEND):
            if message.src_micro_batch in later:
                found.setdefault(later[message.src_micro_batch], []).append(message)
    return found
