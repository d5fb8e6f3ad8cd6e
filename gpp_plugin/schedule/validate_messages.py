"""Checks of `validate` on messages: each rank's by themselves, and both ends of every channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gpp_plugin.ir.program import Direction, Message, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.checked_programs import CheckedPrograms, messages_of
from gpp_plugin.schedule.due import Due, activations_due, gradients_due
from gpp_plugin.schedule.shards import needed_cells, received_cells

_TaskKey = tuple[Direction | None, int, int | None]
"""What a task sends (None: nothing), its micro-batch and its half."""


def check_messages(checked: CheckedPrograms, program: RankProgram) -> None:
    """Every message is of this rank and of samples that both of its tasks hold."""
    for position, message, is_send in messages_of(program):
        here = message.src_rank if is_send else message.dst_rank
        if here != program.rank:
            raise checked.fail(program.rank, position, f"{message} is not of this rank; lower anew")
        if not 0 <= message.edge < len(checked.plan.edges):
            raise checked.fail(
                program.rank, position, f"{message}: the plan has {len(checked.plan.edges)} edges"
            )
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
                raise checked.fail(program.rank, position, f"{message}: not a task of stage {owner.name!r}")
            if (half is not None) != (is_activation and micro_batch in checked.halved[stage]):
                raise checked.fail(
                    program.rank,
                    position,
                    f"{message}: micro-batch {micro_batch} of stage {owner.name!r} does not run so; lower anew",
                )
            is_joined = half == 1 and stage == edge.src and micro_batch in checked.schedules[stage].joined
            held = owner.samples(micro_batch, rank, None if is_joined else half)
            if held.overlap(message.samples) != message.samples:
                raise checked.fail(
                    program.rank,
                    position,
                    f"{message} holds samples that micro-batch {micro_batch} of stage {owner.name!r} lacks",
                )


def check_readiness(checked: CheckedPrograms, program: RankProgram) -> None:
    """What is sent has been made, what a task needs has been received, exactly once."""
    done: set[_TaskKey] = set()
    got: dict[_TaskKey, list[Message]] = defaultdict(list)
    for position, instruction in enumerate(program.instructions):
        if instruction.task is not None:
            task = instruction.task
            made = _key_of(task)
            _check_inputs(checked, program, position, task, got.pop(made, []))
            done.add(made)
        for message in instruction.sends:
            if (message.direction, message.src_micro_batch, message.src_half) not in done:
                raise checked.fail(program.rank, position, f"sends {message} before the task that makes it")
        for message in instruction.receives:
            key = (message.direction, message.dst_micro_batch, message.dst_half)
            if key in done:
                raise checked.fail(program.rank, position, f"receives {message} after the task that needs it")
            got[key].append(message)
    if got:
        messages = next(iter(got.values()))
        raise checked.fail(
            program.rank,
            len(program.instructions) - 1,
            f"receives {messages[0]} for a task that it never runs",
        )


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
        direction = Direction.ACTIVATION if is_forward else Direction.GRADIENT
        brought = [(m, received_cells(checked.plan, m)) for m in messages]
        for cell in needed_cells(checked.plan, index, direction, program.rank):
            have = sorted((m.samples, m.has_whole_tensors) for m, cells in brought if cell in cells)
            if have != wanted:
                raise checked.fail(
                    program.rank,
                    position,
                    f"{task} has received samples {_text_of(have)} over edge {index}, it needs {_text_of(wanted)} "
                    "exactly once; lower anew",
                )
        for message, cells in brought:
            if not cells:
                raise checked.fail(program.rank, position, f"{task} has received {message}, unasked")
    if by_edge:
        raise checked.fail(
            program.rank, position, f"{task} has received {next(iter(by_edge.values()))[0]}, unasked"
        )


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
                    message.dst_rank,
                    position,
                    f"receives {message} as number {index} of its channel, but there {found}; use one order "
                    "at both ends",
                )
        sent[channel] = departures[len(arrivals) :]
    for departures in sent.values():
        for message in departures:
            program = checked.programs[message.src_rank]
            position = next(i for i, m, is_send in messages_of(program) if is_send and m == message)
            raise checked.fail(message.src_rank, position, f"sends {message}, which nobody receives")


def _key_of(task: Task) -> _TaskKey:
    """Return what a task makes or waits for, as messages name it."""
    if task.kind is TaskKind.FORWARD:
        return Direction.ACTIVATION, task.micro_batch, task.half
    return (
        None if task.kind is TaskKind.WEIGHT_GRADIENT else Direction.GRADIENT,
        task.micro_batch,
        None,
    )


def _text_of(pieces: Sequence[Due]) -> str:
    return ", ".join(f"[{r.first_sample}..{r.end - 1}]{'+whole' * w}" for r, w in pieces) or "nothing"
