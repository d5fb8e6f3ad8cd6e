"""Refuses task orders that are not whole (missing, repeated, held too long), and grids and sizes that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.errors import PlanError, ScheduleError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.task_graph import format_grid

# Executes the programs of all ranks serially, in order, with rendezvous: the one definition of what that means.
#
# A send or a receive ends when its other end is posted; a gather or a reduction of data when all ranks of the stage
# have come to it, a task when all ranks of the same samples have, as it contains their collectives;
# everything else ends at once, what passes between two stages of one rank included.
#
# Programs that finish so finish on any device, whatever its queues and whichever rank waits for it on the way: each of
# these adds waits for what a rank has launched before, and here every rank waits for all of that at every instruction.

OF_STAGE = (InstructionKind.GATHER, InstructionKind.REDUCE_DATA)
"""What all ranks of a stage do together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedInstruction:
    """An instruction that some ranks run together.

    Args:
        what: the instruction.
        ranks: who must come to it.
    """

    what: Instruction
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """Where serial execution ended; every rank is through its program where nothing stopped.

    Args:
        stuck: rank -> index of the instruction at which it stands for ever.
        posted: message -> the rank that waits for its other end.
        present: shared instruction -> those of its ranks that wait there.
    """

    stuck: dict[int, int]
    posted: dict[Message, int]
    present: dict[SharedInstruction, list[int]]


def execute_serially(plan: PipelinePlan, programs: Mapping[int, RankProgram]) -> Deadlock:
    """Execute the programs, by rank, as far as they go."""
    # The state: ``position`` of the instruction a rank stands at. What ranks must reach together is stored where the
    # first of them came: a message in ``posted`` with that rank, a collective in ``present`` with all that are there.
    #
    #     rank 0   F0  send x  reduce        rank 0 posts x and stands; rank 1 comes and takes it out again, both go
    #     rank 1   receive x  F0  ...        on; rank 0 reaches its stage's others at ``reduce``
    #
    # Order does not matter: to go on is never undone, so whatever order ready ranks are taken in, the same end comes.
    rows = model_rows(plan)
    collectives = {
        (kind, stage): Instruction(kind=kind, stage=stage)
        for kind in OF_STAGE
        for stage in range(len(plan.stages))
    }
    position = dict.fromkeys(programs, 0)
    posted: dict[Message, int] = {}
    present: dict[SharedInstruction, list[int]] = {}
    ready = list(programs)

    def shared_at(rank: int, instruction: Instruction) -> SharedInstruction | None:
        if instruction.kind in OF_STAGE:
            stage = programs[rank].stage_of(instruction)
            assert stage is not None, "a gather or a reduction is of one stage"
            # a rank that holds that stage alone does not name it
            what = collectives[instruction.kind, stage]
            return SharedInstruction(what=what, ranks=plan.stages[stage].ranks)
        if instruction.kind is InstructionKind.COMPUTE and rank in rows:
            return SharedInstruction(what=instruction, ranks=rows[rank])
        return None

    def move_on(rank: int) -> None:
        position[rank] += 1
        ready.append(rank)

    while ready:
        rank = ready.pop()
        program = programs[rank]
        while position[rank] < len(program.instructions):
            instruction = program.instructions[position[rank]]
            shared = shared_at(rank, instruction)
            if shared is not None:
                here = present.setdefault(shared, [])
                here.append(rank)
                if len(here) < len(shared.ranks):
                    break
                for peer in present.pop(shared)[:-1]:
                    move_on(peer)
            if instruction.message is not None and not instruction.message.is_local_transfer:
                other = posted.pop(instruction.message, None)
                if other is None:
                    posted[instruction.message] = rank
                    break
                move_on(other)
            position[rank] += 1
    stuck = {rank: at for rank, at in position.items() if at < len(programs[rank].instructions)}
    return Deadlock(stuck=stuck, posted=posted, present=present)


def model_rows(plan: PipelinePlan) -> dict[int, tuple[int, ...]]:
    """Return, by rank of a stage with context or tensor ranks, those of its samples: {2: (2, 3), 3: (2, 3), ...}."""
    return {
        rank: row
        for stage in plan.stages
        if stage.model_parallel > 1
        for row in map(stage.model_ranks, range(stage.degree))
        for rank in row
    }


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
    check_grid(stage)
    if not stage.ranks or stage.micro_batch_size % stage.degree:
        raise PlanError(
            f"stage {stage.name!r}: {stage.degree} ranks do not divide a micro-batch of "
            f"{stage.micro_batch_size} samples; choose a multiple"
        )


def check_grid(stage: Stage) -> None:
    """Refuse context and tensor sizes that do not divide a stage's ranks.

    Raises:
        PlanError: names the sizes.
    """
    if min(stage.context, stage.tensor) >= 1 and len(stage.ranks) % stage.model_parallel == 0:
        return
    sizes = f"a tensor size of {stage.tensor} does"
    if stage.context != 1:
        sizes = f"a context size of {stage.context} and a tensor size of {stage.tensor} do"
    raise PlanError(
        f"stage {stage.name!r}: {sizes} not divide its {len(stage.ranks)} ranks; give it as many ranks as data x "
        "context x tensor"
    )


GRADIENT_KINDS = (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
"""Tasks that receive gradients and send them on."""
LAST_KINDS = (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)
"""Tasks after which a micro-batch is no longer held."""


def standing_at(
    plan: PipelinePlan, programs: Sequence[RankProgram], kind: InstructionKind
) -> Iterator[tuple[int, int, int]]:
    """Execute serially; where ranks stand at such an instruction, yield (stage, tasks of it over, tasks left)."""
    by_rank = {program.rank: program for program in programs}
    for rank, at in execute_serially(plan, by_rank).stuck.items():
        program = by_rank[rank]
        instructions = program.instructions
        stage = program.stage_of(instructions[at])
        if instructions[at].kind is kind and stage is not None:
            over, left = (
                sum(i.task is not None and i.task.stage == stage for i in part)
                for part in (instructions[:at], instructions[at:])
            )
            yield stage, over, left


def has_backwards(schedule: StageSchedule) -> bool:
    """Return whether a stage runs backwards, whole or split, under this schedule."""
    return any(task.kind in GRADIENT_KINDS for task in schedule.tasks)


def check_schedules(plan: PipelinePlan, schedules: Sequence[StageSchedule]) -> None:
    """Refuse schedules that are not one whole order of tasks for each stage.

    Raises:
        ScheduleError: a task is missing, repeated or foreign, a backward precedes its forward, or
            more is held than ``num_in_flight``.
    """
    if [schedule.stage for schedule in schedules] != list(range(len(plan.stages))):
        raise ScheduleError(
            f"schedules of stages {[s.stage for s in schedules]} for a plan of {len(plan.stages)} stages; "
            "give one for each, in stage order"
        )
    for schedule in schedules:
        _ScheduleCheck(plan, schedule).check()


def check_gradient_edges(plan: PipelinePlan, backward_stages: Iterable[int]) -> None:
    """Refuse an edge with gradients between a stage that runs backwards and one that does not.

    Raises:
        ScheduleError: names the edge and the stage.
    """
    trained = frozenset(backward_stages)
    if not trained:
        return
    for index, edge in enumerate(plan.edges):
        for stage in (edge.src, edge.dst):
            if edge.gradient_tensors and stage not in trained:
                raise ScheduleError(
                    f"stage {plan.stages[stage].name!r} runs no backwards, but edge {index} from "
                    f"{plan.stages[edge.src].name!r} to {plan.stages[edge.dst].name!r} carries gradients of "
                    f"{list(edge.gradient_tensors)}; leave it out of forward_only_stages"
                )


class _ScheduleCheck:
    """One schedule under check, task by task; keeps what each micro-batch has behind it."""

    def __init__(self, plan: PipelinePlan, schedule: StageSchedule) -> None:
        self._schedule = schedule
        self._name = plan.stages[schedule.stage].name
        self._samples = plan.stages[schedule.stage].local_batch_size
        self._count = plan.num_micro_batches(schedule.stage)
        self._is_trained = has_backwards(schedule)
        self._halves: dict[int, int] = {}
        self._forwards: set[int] = set()
        self._gradients: dict[int, TaskKind] = {}
        self._done: set[int] = set()

    def check(self) -> None:
        # The state of a micro-batch is which sets it is in; of 0 under ``F0a F0b F1 I0 W0``, task by task:
        #
        #     halves {0}   forwards {0}   forwards {0, 1}   gradients {0: I}   done {0}
        #
        # It is held from its first half (or forward) until it is done.
        count = self._count
        for position, task in enumerate(self._schedule.tasks):
            if task.stage != self._schedule.stage or not 0 <= task.micro_batch < count:
                raise self._fail(
                    position,
                    f"{task} is not a task of stage {self._schedule.stage}, which runs {count} micro-batches",
                )
            if task.kind is TaskKind.FORWARD:
                self._check_forward(position, task)
            else:
                self._check_backward(position, task)
        if len(self._forwards) < count or (self._is_trained and len(self._done) < count):
            raise self._fail(
                len(self._schedule.tasks) - 1,
                f"{len(self._forwards)} forwards and {len(self._done)} backwards of {count} micro-batches; "
                "schedule all",
            )
        strangers = set(self._schedule.joined) - self._halves.keys()
        if strangers:
            raise self._fail(
                0, f"joins the halves of micro-batch {min(strangers)}, which runs whole; leave it out"
            )

    def _fail(self, position: int, what: str) -> ScheduleError:
        rows = {f"stage {self._schedule.stage}": [str(task) for task in self._schedule.tasks]}
        return ScheduleError(f"stage {self._name!r}: {what}\n{format_grid(rows, bad={(0, position)})}")

    def _check_forward(self, position: int, task: Task) -> None:
        micro_batch = task.micro_batch
        if micro_batch in self._forwards or (task.half == 0 and micro_batch in self._halves):
            raise self._fail(position, f"{task} is there twice; keep one")
        if task.half is None and micro_batch in self._halves:
            raise self._fail(position, f"{task} comes after half of it; run it whole or in two halves")
        if task.half is not None and self._samples % 2:
            raise self._fail(
                position, f"{task} is half of {self._samples} samples a rank; only even numbers run in halves"
            )
        if task.half == 1 and micro_batch not in self._halves:
            raise self._fail(position, f"{task} comes before the first half; move it behind")
        if task.half == 0:
            self._halves[micro_batch] = position
        else:
            self._forwards.add(micro_batch)
        held = len(self._forwards | self._halves.keys()) - len(self._done)
        if held > self._schedule.num_in_flight and self._is_trained:
            raise self._fail(
                position,
                f"{task} holds {held} micro-batches, num_in_flight is {self._schedule.num_in_flight}",
            )

    def _check_backward(self, position: int, task: Task) -> None:
        micro_batch = task.micro_batch
        if micro_batch not in self._forwards:
            raise self._fail(position, f"{task} comes before its forward; move it behind")
        before = self._gradients.get(micro_batch)
        if task.kind is TaskKind.WEIGHT_GRADIENT:
            if before is not TaskKind.INPUT_GRADIENT:
                raise self._fail(position, f"{task} comes before its input gradient; move it behind")
            if micro_batch in self._done:
                raise self._fail(position, f"{task} is there twice; keep one")
        elif before is not None:
            what = "is there twice" if before is task.kind else f"comes after its {before.value}"
            raise self._fail(position, f"{task} {what}; keep one")
        else:
            self._gradients[micro_batch] = task.kind
        if task.kind in LAST_KINDS:
            self._done.add(micro_batch)


def check_shared_rows(plan: PipelinePlan) -> None:
    """Refuse a plan that puts a rank into different model rows: all of a row's ranks must run the same tasks together.

    Raises:
        PlanError: names two stages and the rank.
    """
    # row and stage by rank
    found: dict[int, tuple[tuple[int, ...], str]] = {}
    for stage in plan.stages:
        for row in map(stage.model_ranks, range(stage.degree)):
            for rank in row:
                other, name = found.setdefault(rank, (row, stage.name))
                if other != row:
                    raise PlanError(
                        f"stages {name!r} and {stage.name!r} share rank {rank}, but run their tasks together on "
                        f"ranks {list(other)} and {list(row)}; give them the same context and tensor ranks, or ranks "
                        "of their own"
                    )
