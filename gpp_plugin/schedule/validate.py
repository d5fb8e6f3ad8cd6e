"""Proves that lowered programs are whole and cannot stop, independently of how they were made.

What is proven for a plan, its schedules and the programs of all ranks:

1. every rank runs exactly its stage's schedule, in order: each micro-batch's forward, whole or in two
   halves, and its backward, whole or as input and later weight gradient;
2. on every channel (edge, direction, sender, receiver) sends and receives are the same messages in
   the same order;
3. a message leaves after the task that makes it; before a task runs it has received the rows of
   exactly its samples, each once, and each tensor without a batch axis once; the same for gradients; of
   tensors that tensor ranks hold as shards, exactly what its rank needs, each part once;
4. no stage holds more micro-batches than the plan's ``in_flight``, from the first forward to the whole
   backward or the weight gradient;
5. reductions and the step come last, in one order on all ranks; a stage may also reduce its data between
   tasks, after a backward, at the same place on all its ranks (programs that step after each backward, as
   asynchronous ones do, have a reduction and a step behind each, before the next task, and nowhere else);
6. everything finishes when each rank executes its groups serially, in order, with rendezvous
   messages: an exchange posts all its messages together and ends when all of them are posted at
   their other ends; a reduction of data ends when all ranks of the stage have come to it, and a task,
   which has the collectives of tensor parallelism inside, when all tensor ranks of its data position have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Direction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.due import Due, activations_due, gradients_due
from gpp_plugin.schedule.grid import program_grid
from gpp_plugin.schedule.rendezvous import Standstill, execute_serially
from gpp_plugin.schedule.shards import needed_cells, received_cells

_TAIL_ORDER = (InstructionKind.REDUCE_DATA, InstructionKind.REDUCE_TIED, InstructionKind.STEP)
_TaskKey = tuple[Direction | None, int, int | None]
"""What a task sends (None: nothing), its micro-batch and its half."""


def validate_programs(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    programs: Sequence[RankProgram],
    *,
    steps_each_backward: bool = False,
) -> None:
    """Check the programs of all ranks together.

    Args:
        steps_each_backward: stages step after each backward, not once at the end.

    Raises:
        ScheduleError: what is wrong, with which values, the fix, and the grid with the bad cell marked.
    """
    _Validator(plan, schedules, programs, steps_each_backward=steps_each_backward).validate()


class _Validator:
    """Programs under validation; every check raises through `_fail`, which draws the grid."""

    def __init__(
        self,
        plan: PipelinePlan,
        schedules: Sequence[StageSchedule],
        programs: Sequence[RankProgram],
        *,
        steps_each_backward: bool,
    ) -> None:
        self._plan = plan
        self._steps_each_backward = steps_each_backward
        self._schedules = {schedule.stage: schedule for schedule in schedules}
        self._programs = {program.rank: program for program in programs}
        self._order = [program.rank for program in programs]
        self._trained = {
            schedule.stage
            for schedule in schedules
            if any(task.kind is not TaskKind.FORWARD for task in schedule.tasks)
        }
        self._halved = {
            schedule.stage: {task.micro_batch for task in schedule.tasks if task.half is not None}
            for schedule in schedules
        }
        self._sent_in_halves = {
            schedule.stage: self._halved[schedule.stage] - set(schedule.joined) for schedule in schedules
        }
        self._in_edges: dict[int, list[int]] = defaultdict(list)
        self._out_edges: dict[int, list[int]] = defaultdict(list)
        for index, edge in enumerate(plan.edges):
            self._in_edges[edge.dst].append(index)
            self._out_edges[edge.src].append(index)

    def validate(self) -> None:
        self._check_ranks()
        for program in self._programs.values():
            self._check_tasks(program)
            self._check_messages(program)
            self._check_readiness(program)
            self._check_in_flight(program)
            (self._check_steps if self._steps_each_backward else self._check_tail)(program)
        self._check_tails_agree()
        self._check_channels()
        self._check_completion()

    def _fail(self, rank: int, position: int, what: str) -> ScheduleError:
        program = self._programs[rank]
        head = f"rank {rank} (stage {self._plan.stages[program.stage].name!r}): {what}"
        return ScheduleError(f"{head}\n{program_grid(self._programs.values(), positions={rank: position})}")

    # ---- each rank alone -----------------------------------------------------------------------

    def _check_ranks(self) -> None:
        expected = sorted(rank for stage in self._plan.stages for rank in stage.ranks)
        if self._order != expected:
            raise ScheduleError(
                f"programs of ranks {self._order} for ranks {expected}; lower one for each, in order"
            )
        if sorted(self._schedules) != list(range(len(self._plan.stages))):
            raise ScheduleError(
                f"schedules of stages {sorted(self._schedules)} for {len(self._plan.stages)} stages; give one for each"
            )
        for rank, program in self._programs.items():
            stage = self._plan.stage_of_rank(rank)
            if program.stage != stage:
                raise self._fail(
                    rank, 0, f"its program is of stage {program.stage}; the plan puts it on {stage}"
                )

    def _check_tasks(self, program: RankProgram) -> None:
        schedule = self._schedules[program.stage]
        ran = [(i, x.task) for i, x in enumerate(program.instructions) if x.kind is InstructionKind.COMPUTE]
        for (position, task), planned in zip(ran, schedule.tasks, strict=False):
            if task != planned:
                raise self._fail(
                    program.rank, position, f"runs {task} where the schedule has {planned}; lower anew"
                )
        if len(ran) != len(schedule.tasks):
            raise self._fail(
                program.rank,
                len(program.instructions) - 1,
                f"runs {len(ran)} tasks of the {len(schedule.tasks)} scheduled; lower anew",
            )
        parts: dict[int, list[str]] = defaultdict(list)
        for position, task in ran:
            assert task is not None
            parts[task.micro_batch].append(task.kind.value + ("" if task.half is None else "ab"[task.half]))
            if not self._may_follow(program.stage, parts[task.micro_batch]):
                run = ", ".join(parts[task.micro_batch][:-1]) or "nothing"
                raise self._fail(
                    program.rank,
                    position,
                    f"{task} comes after {run} of its micro-batch; run its forward once, whole or in two halves, "
                    "then its backward once, whole or as input and weight gradient",
                )
        ends = ("B", "W") if program.stage in self._trained else ("F", "Fb")
        count = self._plan.num_micro_batches(program.stage)
        lacking = [m for m in range(count) if not parts[m] or parts[m][-1] not in ends]
        if lacking or len(parts) != count:
            raise self._fail(
                program.rank,
                len(program.instructions) - 1,
                f"runs {len(parts)} micro-batches where {count} are due, unfinished {lacking[:4]}; "
                "schedule each once",
            )

    def _may_follow(self, stage: int, parts: list[str]) -> bool:
        """Return whether these parts of one micro-batch, run in this order, begin a whole order."""
        backwards = [["B"], ["I", "W"]] if stage in self._trained else [[]]
        orders = [[*forward, *backward] for forward in (["F"], ["Fa", "Fb"]) for backward in backwards]
        return any(parts == order[: len(parts)] for order in orders)

    def _check_messages(self, program: RankProgram) -> None:
        """Every message is of this rank and of samples that both of its tasks hold."""
        for position, message, is_send in _messages_of(program):
            here = message.src_rank if is_send else message.dst_rank
            if here != program.rank:
                raise self._fail(program.rank, position, f"{message} is not of this rank; lower anew")
            if not 0 <= message.edge < len(self._plan.edges):
                raise self._fail(
                    program.rank, position, f"{message}: the plan has {len(self._plan.edges)} edges"
                )
            edge = self._plan.edges[message.edge]
            is_activation = message.direction is Direction.ACTIVATION
            ends = (edge.src, edge.dst) if is_activation else (edge.dst, edge.src)
            for stage, rank, micro_batch, half in zip(
                ends,
                (message.src_rank, message.dst_rank),
                (message.src_micro_batch, message.dst_micro_batch),
                (message.src_half, message.dst_half),
                strict=True,
            ):
                owner = self._plan.stages[stage]
                if rank not in owner.ranks or not 0 <= micro_batch < self._plan.num_micro_batches(stage):
                    raise self._fail(program.rank, position, f"{message}: not a task of stage {owner.name!r}")
                if (half is not None) != (is_activation and micro_batch in self._halved[stage]):
                    raise self._fail(
                        program.rank,
                        position,
                        f"{message}: micro-batch {micro_batch} of stage {owner.name!r} does not run so; lower anew",
                    )
                is_joined = half == 1 and stage == edge.src and micro_batch in self._schedules[stage].joined
                held = owner.samples(micro_batch, rank, None if is_joined else half)
                if held.overlap(message.samples) != message.samples:
                    raise self._fail(
                        program.rank,
                        position,
                        f"{message} holds samples that micro-batch {micro_batch} of stage {owner.name!r} lacks",
                    )

    def _check_readiness(self, program: RankProgram) -> None:
        """What is sent has been made, what a task needs has been received, exactly once."""
        done: set[_TaskKey] = set()
        got: dict[_TaskKey, list[Message]] = defaultdict(list)
        for position, instruction in enumerate(program.instructions):
            if instruction.task is not None:
                task = instruction.task
                made = _key_of(task)
                self._check_inputs(program, position, task, got.pop(made, []))
                done.add(made)
            for message in instruction.sends:
                if (message.direction, message.src_micro_batch, message.src_half) not in done:
                    raise self._fail(program.rank, position, f"sends {message} before the task that makes it")
            for message in instruction.receives:
                key = (message.direction, message.dst_micro_batch, message.dst_half)
                if key in done:
                    raise self._fail(
                        program.rank, position, f"receives {message} after the task that needs it"
                    )
                got[key].append(message)
        if got:
            messages = next(iter(got.values()))
            raise self._fail(
                program.rank,
                len(program.instructions) - 1,
                f"receives {messages[0]} for a task that it never runs",
            )

    def _check_inputs(self, program: RankProgram, position: int, task: Task, got: list[Message]) -> None:
        by_edge: dict[int, list[Message]] = defaultdict(list)
        for message in got:
            by_edge[message.edge].append(message)
        samples = self._plan.stages[program.stage].samples(task.micro_batch, program.rank, task.half)
        is_forward = task.kind is TaskKind.FORWARD
        edges = self._in_edges[program.stage] if is_forward else self._out_edges[program.stage]
        for index in edges if task.kind is not TaskKind.WEIGHT_GRADIENT else ():
            edge = self._plan.edges[index]
            messages = by_edge.pop(index, [])
            if is_forward:
                wanted = activations_due(self._plan, edge, samples, task.half, self._sent_in_halves[edge.src])
            else:
                wanted = gradients_due(self._plan, edge, samples) if edge.dst in self._trained else []
            direction = Direction.ACTIVATION if is_forward else Direction.GRADIENT
            brought = [(m, received_cells(self._plan, m)) for m in messages]
            for cell in needed_cells(self._plan, index, direction, program.rank):
                have = sorted((m.samples, m.has_whole_tensors) for m, cells in brought if cell in cells)
                if have != wanted:
                    raise self._fail(
                        program.rank,
                        position,
                        f"{task} has received samples {_text_of(have)} over edge {index}, it needs {_text_of(wanted)} "
                        "exactly once; lower anew",
                    )
            for message, cells in brought:
                if not cells:
                    raise self._fail(program.rank, position, f"{task} has received {message}, unasked")
        if by_edge:
            raise self._fail(
                program.rank, position, f"{task} has received {next(iter(by_edge.values()))[0]}, unasked"
            )

    def _check_in_flight(self, program: RankProgram) -> None:
        """Count what is held: until its backward, or in a forward-only stage until all of it is sent."""
        stage = self._plan.stages[program.stage]
        limit = min(stage.in_flight, self._schedules[program.stage].num_in_flight)
        is_trained = program.stage in self._trained
        unsent: dict[int, int] = defaultdict(int)
        if not is_trained:
            for _, message, is_send in _messages_of(program):
                unsent[message.src_micro_batch] += is_send
        held: set[int] = set()
        for position, instruction in enumerate(program.instructions):
            task = instruction.task
            if task is not None:
                if task.kind in (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT):
                    held.discard(task.micro_batch)
                elif is_trained or unsent[task.micro_batch]:
                    held.add(task.micro_batch)
                if len(held) > limit:
                    raise self._fail(
                        program.rank,
                        position,
                        f"{task} holds {len(held)} micro-batches, in_flight allows {limit}; raise in_flight or "
                        "run a backward first",
                    )
            for message in instruction.sends if not is_trained else ():
                unsent[message.src_micro_batch] -= 1
                if not unsent[message.src_micro_batch]:
                    held.discard(message.src_micro_batch)

    def _check_tail(self, program: RankProgram) -> None:
        kinds = [(i, x.kind) for i, x in enumerate(program.instructions) if x.kind in _TAIL_ORDER]
        last = max((i for i, x in enumerate(program.instructions) if x.kind not in _TAIL_ORDER), default=-1)
        early = [i for i, kind in kinds if i < last and kind is InstructionKind.REDUCE_DATA]
        kinds = [(i, kind) for i, kind in kinds if i not in early]
        expected = [kind for kind in _TAIL_ORDER if any(kind is found for _, found in kinds)]
        if [kind for _, kind in kinds] != expected or any(i < last for i, _ in kinds):
            names = ", ".join(kind.value for _, kind in kinds)
            raise self._fail(
                program.rank,
                kinds[0][0],
                f"ends with {names}; reductions and the step come last: "
                f"{', '.join(kind.value for kind in _TAIL_ORDER)}, each at most once",
            )
        if early and InstructionKind.REDUCE_DATA not in expected:
            raise self._fail(program.rank, early[-1], "reduces between tasks but not at its end; do both")
        if early and program.stage not in self._trained:
            raise self._fail(program.rank, early[0], "reduces without backwards; there are no gradients")

    def _check_steps(self, program: RankProgram) -> None:
        """A reduction and a step follow each backward, behind its messages and before the next task."""
        expected: list[InstructionKind] = []
        for position, instruction in enumerate(program.instructions):
            kind = instruction.kind
            if kind in _TAIL_ORDER and (not expected or kind is not expected.pop(0)):
                raise self._fail(
                    program.rank, position, f"{kind.value} does not belong there; a backward is due"
                )
            if kind is InstructionKind.COMPUTE and expected:
                raise self._fail(program.rank, position, f"runs {instruction} before {expected[0].value}")
            if instruction.task is not None and instruction.task.kind is not TaskKind.FORWARD:
                expected = [InstructionKind.REDUCE_DATA, InstructionKind.STEP]
        if expected:
            raise self._fail(program.rank, len(program.instructions) - 1, f"ends without {expected[0].value}")

    # ---- all ranks together --------------------------------------------------------------------

    def _check_tails_agree(self) -> None:
        """Collective instructions are on every rank that takes part, between the same tasks."""
        places = {rank: _collectives(program) for rank, program in self._programs.items()}
        tails = {rank: tuple(kind for _, kind in found) for rank, found in places.items()}
        for rank, found in places.items():
            stage = self._plan.stages[self._programs[rank].stage]
            first = places[stage.ranks[0]]
            if found != first:
                shown = [f"{kind.value} after {count} tasks" for count, kind in found]
                wanted = [f"{kind.value} after {count} tasks" for count, kind in first]
                raise self._fail(
                    rank,
                    len(self._programs[rank].instructions) - 1,
                    f"has {shown}, rank {stage.ranks[0]} of its stage {wanted}; they must agree",
                )
        if self._steps_each_backward:
            return
        steps = {rank: InstructionKind.STEP in tail for rank, tail in tails.items()}
        if len(set(steps.values())) > 1:
            rank = next(rank for rank, has_step in steps.items() if not has_step)
            end = len(self._programs[rank].instructions) - 1
            raise self._fail(
                rank, end, "has no step while other ranks do; all ranks agree on norm and overflow"
            )

    def _check_channels(self) -> None:
        sent: dict[object, list[Message]] = defaultdict(list)
        received: dict[object, list[tuple[int, Message]]] = defaultdict(list)
        for program in self._programs.values():
            for position, message, is_send in _messages_of(program):
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
                    raise self._fail(
                        message.dst_rank,
                        position,
                        f"receives {message} as number {index} of its channel, but there {found}; use one order "
                        "at both ends",
                    )
            sent[channel] = departures[len(arrivals) :]
        for departures in sent.values():
            for message in departures:
                program = self._programs[message.src_rank]
                position = next(i for i, m, is_send in _messages_of(program) if is_send and m == message)
                raise self._fail(message.src_rank, position, f"sends {message}, which nobody receives")

    def _check_completion(self) -> None:
        """Execute all programs serially with rendezvous; whoever still waits at the end is stuck."""
        end = execute_serially(self._plan, self._programs)
        if end.stuck:
            self._raise_deadlock(end)

    def _raise_deadlock(self, end: Standstill) -> None:
        waits_for: dict[int, tuple[int, Message | str]] = {}
        for message, rank in end.posted.items():
            waits_for[rank] = (message.dst_rank if rank == message.src_rank else message.src_rank, message)
        for meeting, ranks in end.present.items():
            late = next(rank for rank in meeting.ranks if rank not in ranks)
            what = "a reduction" if meeting.what.task is None else f"their task {meeting.what}"
            waits_for.update(dict.fromkeys(ranks, (late, what)))
        rank = next(iter(end.stuck))
        path: list[int] = []
        while rank not in path:
            path.append(rank)
            rank = waits_for[rank][0]
        circle = path[path.index(rank) :]
        text = ", ".join(f"rank {r} waits for rank {waits_for[r][0]} at {waits_for[r][1]}" for r in circle)
        marks = {r: end.stuck[r] for r in circle if r in end.stuck}
        raise ScheduleError(
            f"the programs stop under serial rendezvous execution: {text}; take one order of all messages\n"
            + program_grid(self._programs.values(), positions=marks)
        )


def _messages_of(program: RankProgram) -> Iterator[tuple[int, Message, bool]]:
    """Yield (instruction index, message, whether it is sent) of each message."""
    for position, instruction in enumerate(program.instructions):
        for message in instruction.sends:
            yield position, message, True
        for message in instruction.receives:
            yield position, message, False


def _key_of(task: Task) -> _TaskKey:
    """Return what a task makes or waits for, as messages name it."""
    if task.kind is TaskKind.FORWARD:
        return Direction.ACTIVATION, task.micro_batch, task.half
    return (
        None if task.kind is TaskKind.WEIGHT_GRADIENT else Direction.GRADIENT,
        task.micro_batch,
        None,
    )


def _collectives(program: RankProgram) -> tuple[tuple[int, InstructionKind], ...]:
    """Return (number of tasks before it, kind) of each collective instruction."""
    found = []
    num_tasks = 0
    for instruction in program.instructions:
        num_tasks += instruction.task is not None
        if instruction.kind in _TAIL_ORDER:
            found.append((num_tasks, instruction.kind))
    return tuple(found)


def _text_of(pieces: Sequence[Due]) -> str:
    return ", ".join(f"[{r.first_sample}..{r.end - 1}]{'+whole' * w}" for r, w in pieces) or "nothing"
