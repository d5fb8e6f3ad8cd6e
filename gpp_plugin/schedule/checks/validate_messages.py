"""Checks of `validate_programs` on messages: each rank's by themselves, and both ends of every channel.

Source: this project
Tests: tests/schedule/test_validate.py, tests/schedule/test_tensor_grids.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from functools import cached_property

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.ir.tensors import SampleRange
from gpp_plugin.schedule.build_graph import Presence, own_tasks
from gpp_plugin.schedule.checks.order_check import has_backwards
from gpp_plugin.schedule.task_graph import program_grid

TAIL_ORDER = (InstructionKind.REDUCE_DATA, InstructionKind.REDUCE_TIED, InstructionKind.STEP)


class CheckedPrograms:
    """A plan, its schedules by stage and programs by rank; a check raises what `fail` returns.

    Attributes:
        trained: the stages that run backwards.
        halved: stage -> micro-batches whose forward runs in two halves; ``sent_in_halves`` those sent so too.
        in_edges, out_edges: stage -> indices of the plan's edges.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        schedules: Sequence[StageSchedule],
        programs: Sequence[RankProgram],
        presence: Presence | None = None,
    ) -> None:
        self.plan = plan
        self.presence = presence
        self.schedules = {schedule.stage: schedule for schedule in schedules}
        self.programs = {program.rank: program for program in programs}
        self.trained = {schedule.stage for schedule in schedules if has_backwards(schedule)}
        self.halved = {
            schedule.stage: {task.micro_batch for task in schedule.tasks if task.half is not None}
            for schedule in schedules
        }
        self.sent_in_halves = {
            schedule.stage: self.halved[schedule.stage] - set(schedule.joined) for schedule in schedules
        }
        self.in_edges: dict[int, list[int]] = defaultdict(list)
        self.out_edges: dict[int, list[int]] = defaultdict(list)
        for index, edge in enumerate(plan.edges):
            self.in_edges[edge.dst].append(index)
            self.out_edges[edge.src].append(index)

    @cached_property
    def parts(self) -> list[RankProgram]:
        """Return what each rank does for each of its stages, as programs of one stage; of one stage, its program."""
        return [program.of_stage(stage) for program in self.programs.values() for stage in program.stages]

    @cached_property
    def tasks(self) -> dict[tuple[int, int], tuple[Task, ...]]:
        """Return by (rank, stage) the tasks of the stage's schedule it runs: all, unless its samples lack branches."""
        return {
            (part.rank, part.stage): own_tasks(
                self.plan, self.schedules[part.stage].tasks, part.rank, self.presence
            )
            for part in self.parts
        }

    def is_carried(self, edge: int, samples: SampleRange) -> bool:
        """Return whether an edge carries something of some samples."""
        return self.presence is None or edge in self.presence.edges[samples.first_sample]

    def fail_at_end(self, program: RankProgram, what: str) -> ScheduleError:
        """Return the error that says ``what`` is wrong at the last instruction."""
        return self.fail(program, len(program.instructions) - 1, what)

    def fail(self, program: RankProgram, position: int, what: str) -> ScheduleError:
        """Return the error that says ``what`` is wrong at an instruction, with it marked in the grid.

        Args:
            program: a rank's, or one of `parts`.
        """
        names = ", ".join(repr(self.plan.stages[stage].name) for stage in program.stages)
        head = f"rank {program.rank} (stage{'s' * (len(program.stages) > 1)} {names}): {what}"
        whole = self.programs[program.rank]
        if len(whole.stages) > 1 and len(program.stages) == 1:
            (stage,) = program.stages
            own = [i for i, x in enumerate(whole.instructions) if whole.stage_of(x) in (stage, None)]
            position = own[position] if own else 0
        return ScheduleError(
            f"{head}\n{program_grid(self.programs.values(), positions={program.rank: position})}"
        )


def messages_of(program: RankProgram) -> Iterator[tuple[int, Message, bool]]:
    """Yield (instruction index, message, whether it is sent) of each message."""
    for position, instruction in enumerate(program.instructions):
        if instruction.message is not None:
            yield position, instruction.message, instruction.kind is InstructionKind.SEND


_TaskKey = tuple[Direction | None, int, int | None]
"""What a task sends (None: nothing), its micro-batch and its half."""

Due = tuple[SampleRange, bool]
"""Samples of one message, and whether it holds the edge's tensors without a batch axis."""


def check_messages(checked: CheckedPrograms, program: RankProgram) -> None:
    """Every message is of this rank and of samples that both of its tasks hold."""
    # Both ends of a message are checked at each of its ranks, so that a rank that never runs it says nothing wrong
    # about the other. "act e0 r0.2>r1.2 [4..5]" must be of edge 0, from rank 0, whose micro-batch 2 holds samples 4
    # and 5, to rank 1, whose micro-batch 2 does too.
    for position, message, is_send in messages_of(program):
        here = message.src_rank if is_send else message.dst_rank
        if here != program.rank:
            raise checked.fail(program, position, f"{message} is not of this rank; lower anew")
        if not 0 <= message.edge < len(checked.plan.edges):
            raise checked.fail(program, position, f"{message}: the plan has {len(checked.plan.edges)} edges")
        edge = checked.plan.edges[message.edge]
        is_activation = message.direction is Direction.ACTIVATION
        ends = (edge.src, edge.dst) if is_activation else (edge.dst, edge.src)
        for stage, rank, micro_batch, half in zip(
            ends,
            (message.src_rank, message.dst_rank),
            (message.src_micro_batch, message.dst_micro_batch),
            (message.src_half, message.dst_half),
            strict=True,
        ):
            owner = checked.plan.stages[stage]
            if rank not in owner.ranks or not 0 <= micro_batch < checked.plan.num_micro_batches(stage):
                raise checked.fail(program, position, f"{message}: not a task of stage {owner.name!r}")
            if (half is not None) != (is_activation and micro_batch in checked.halved[stage]):
                raise checked.fail(
                    program,
                    position,
                    f"{message}: micro-batch {micro_batch} of stage {owner.name!r} does not run so; lower anew",
                )
            is_joined = half == 1 and stage == edge.src and micro_batch in checked.schedules[stage].joined
            held = owner.samples(micro_batch, rank, None if is_joined else half)
            if held.overlap(message.samples) != message.samples:
                what = f"{message} holds samples that micro-batch {micro_batch} of stage {owner.name!r} lacks"
                raise checked.fail(program, position, what)


def check_readiness(checked: CheckedPrograms, program: RankProgram) -> None:
    """What is sent has been made, what a task needs has been received, exactly once."""
    # ``got`` is what has come for a task that has not run: a task takes its messages out, so what is left at the end
    # was for a task that never ran, and what comes for one in ``done`` came too late.
    done: set[_TaskKey] = set()
    got: dict[_TaskKey, list[Message]] = defaultdict(list)
    for position, instruction in enumerate(program.instructions):
        if instruction.task is not None:
            task = instruction.task
            made = _key_of(task)
            _check_inputs(checked, program, position, task, got.pop(made, []))
            done.add(made)
        message = instruction.message
        if message is not None and instruction.kind is InstructionKind.SEND:
            if (message.direction, message.src_micro_batch, message.src_half) not in done:
                raise checked.fail(program, position, f"sends {message} before the task that makes it")
        elif message is not None:
            key = (message.direction, message.dst_micro_batch, message.dst_half)
            if key in done:
                raise checked.fail(program, position, f"receives {message} after the task that needs it")
            got[key].append(message)
    if got:
        messages = next(iter(got.values()))
        raise checked.fail_at_end(program, f"receives {messages[0]} for a task that it never runs")


def _check_inputs(
    checked: CheckedPrograms, program: RankProgram, position: int, task: Task, got: list[Message]
) -> None:
    by_edge: dict[int, list[Message]] = defaultdict(list)
    for message in got:
        by_edge[message.edge].append(message)
    samples = checked.plan.stages[program.stage].samples(task.micro_batch, program.rank, task.half)
    is_forward = task.kind is TaskKind.FORWARD
    edges = checked.in_edges[program.stage] if is_forward else checked.out_edges[program.stage]
    for index in edges if task.kind is not TaskKind.WEIGHT_GRADIENT else ():
        edge = checked.plan.edges[index]
        messages = by_edge.pop(index, [])
        if is_forward:
            wanted = activations_due(checked.plan, edge, samples, task.half, checked.sent_in_halves[edge.src])
        else:
            wanted = gradients_due(checked.plan, edge, samples) if edge.dst in checked.trained else []
        wanted = [(piece, whole) for piece, whole in wanted if checked.is_carried(index, piece)]
        direction = Direction.ACTIVATION if is_forward else Direction.GRADIENT
        brought = [(m, received_cells(checked.plan, m)) for m in messages]
        for cell in needed_cells(checked.plan, index, direction, program.rank):
            have = sorted((m.samples, m.has_whole_tensors) for m, cells in brought if cell in cells)
            if have != wanted:
                raise checked.fail(
                    program,
                    position,
                    f"{task} has received samples {_text_of(have)} over edge {index}, it needs {_text_of(wanted)} "
                    "exactly once; lower anew",
                )
        for message, cells in brought:
            if not cells:
                raise checked.fail(program, position, f"{task} has received {message}, unasked")
    if by_edge:
        raise checked.fail(
            program, position, f"{task} has received {next(iter(by_edge.values()))[0]}, unasked"
        )


def check_local_transfers(checked: CheckedPrograms, program: RankProgram) -> None:
    """What passes between two stages of a rank is taken where it is made: a send and right behind it its receive."""
    unmatched: Message | None = None
    for position, instruction in enumerate(program.instructions):
        message = (
            instruction.message if instruction.message and instruction.message.is_local_transfer else None
        )
        is_send = instruction.kind is InstructionKind.SEND
        if unmatched is not None and (message != unmatched or is_send):
            raise checked.fail(
                program, position, f"does not receive {unmatched} right behind its send; lower anew"
            )
        if unmatched is None and message is not None and not is_send:
            raise checked.fail(program, position, f"receives {message} before its send; lower anew")
        unmatched = message if is_send else None
    if unmatched is not None:
        raise checked.fail_at_end(program, f"sends {unmatched}, which it never receives")


def check_channels(checked: CheckedPrograms) -> None:
    """What is sent on a channel is received on it, in the same order."""
    sent: dict[object, list[Message]] = defaultdict(list)
    received: dict[object, list[tuple[int, Message]]] = defaultdict(list)
    for program in checked.programs.values():
        for position, message, is_send in messages_of(program):
            if is_send:
                sent[message.channel].append(message)
            else:
                received[message.channel].append((position, message))
    for channel, arrivals in received.items():
        departures = sent.pop(channel, [])
        for index, (position, message) in enumerate(arrivals):
            other = departures[index] if index < len(departures) else None
            if other != message:
                found = f"the sender sends {other}" if other is not None else "nothing more is sent"
                raise checked.fail(
                    checked.programs[message.dst_rank],
                    position,
                    f"receives {message} as number {index} of its channel, but there {found}; use one order "
                    "at both ends",
                )
        sent[channel] = departures[len(arrivals) :]
    for departures in sent.values():
        for message in departures:
            program = checked.programs[message.src_rank]
            position = next(i for i, m, is_send in messages_of(program) if is_send and m == message)
            raise checked.fail(program, position, f"sends {message}, which no rank receives")


def _key_of(task: Task) -> _TaskKey:
    """Return what a task makes or waits for, as messages name it."""
    if task.kind is TaskKind.FORWARD:
        return Direction.ACTIVATION, task.micro_batch, task.half
    direction = None if task.kind is TaskKind.WEIGHT_GRADIENT else Direction.GRADIENT
    return direction, task.micro_batch, None


def _text_of(pieces: Sequence[Due]) -> str:
    return ", ".join(f"[{r.first_sample}..{r.end - 1}]{'+whole' * w}" for r, w in pieces) or "nothing"


# What a task must have received over an edge, worked out from the samples alone: nothing here is shared with
# `messages`, which cuts the samples for lowering.
#
#     producer, 3 samples a task   |0 1 2|3 4 5|6 7 8|...       forward on 4..7 needs [4..5] and [6..7]
#     consumer, 4 samples a task   |0 1 2 3|4 5 6 7|...         backward on 3..5 needs [3..3] and [4..5]


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


# Which part of a tensor a message brings to a rank, and which parts that rank needs. A tensor that the sender's row
# holds in parts is cut into cells along that axis: the parts themselves, or, where the receiver's row has parts along
# the same axis, so many that both ends' parts are whole cells. A tensor that every sender has whole is one cell.
#
#     2 parts sent, 3 received   cells      0 1 2 3 4 5
#                                sent       0 0 0 1 1 1
#                                received   0 0 1 1 2 2     part 1 is cell 2 of part 0 and cell 3 of part 1
#
# Context x tensor ranks of 2 x 2 have part 0 at places 0 and 1, and part 1 at 2 and 3: cells come from either place.


def needed_cells(plan: PipelinePlan, edge_index: int, direction: Direction, rank: int) -> range:
    """Return the cells that a receiving rank needs of each tensor that a message of an edge holds."""
    (sender, sent_axis), (receiver, received_axis) = _ends(plan, edge_index, direction)
    sent = _parts_of(sender, sent_axis)
    if sent_axis != received_axis:
        return range(sent)
    part = _part_of(receiver, rank, received_axis)
    return range(part * sent, (part + 1) * sent)


def received_cells(plan: PipelinePlan, message: Message) -> range:
    """Return those of them that a message brings; none where its sender has nothing of them."""
    (sender, sent_axis), (receiver, received_axis) = _ends(plan, message.edge, message.direction)
    needed = needed_cells(plan, message.edge, message.direction, message.dst_rank)
    part = _part_of(sender, message.src_rank, sent_axis)
    count = _parts_of(receiver, received_axis) if sent_axis == received_axis else 1
    return range(max(needed.start, part * count), min(needed.stop, (part + 1) * count))


_End = tuple[Stage, int | None]
"""A stage and the axis along which its ranks hold parts; None where each has the whole."""


def _ends(plan: PipelinePlan, edge_index: int, direction: Direction) -> tuple[_End, _End]:
    """Return the sending and the receiving end of an edge's messages."""
    edge = plan.edges[edge_index]
    src, dst = plan.stages[edge.src], plan.stages[edge.dst]
    ends = [(src, edge.src_shard_axis), (dst, edge.dst_shard_axis)]
    producer, consumer = ((stage, axis if stage.model_parallel > 1 else None) for stage, axis in ends)
    return (producer, consumer) if direction is Direction.ACTIVATION else (consumer, producer)


def _parts_of(stage: Stage, axis: int | None) -> int:
    """Return how many parts a stage's row holds: as many as it has context ranks, or else tensor ranks."""
    if axis is None:
        return 1
    return stage.context if stage.context > 1 else stage.tensor


def _part_of(stage: Stage, rank: int, axis: int | None) -> int:
    """Return which of them a rank has."""
    if axis is None:
        return 0
    return stage.context_position(rank) if stage.context > 1 else stage.tensor_position(rank)
