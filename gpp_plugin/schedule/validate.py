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

from collections.abc import Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule
from gpp_plugin.schedule.checked_programs import TAIL_ORDER, CheckedPrograms
from gpp_plugin.schedule.grid import program_grid
from gpp_plugin.schedule.rendezvous import Standstill, execute_serially
from gpp_plugin.schedule.validate_messages import check_channels, check_messages, check_readiness
from gpp_plugin.schedule.validate_tasks import check_in_flight, check_steps, check_tail, check_tasks


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
    checked = CheckedPrograms(plan, schedules, programs)
    _check_ranks(checked, [program.rank for program in programs])
    for program in checked.programs.values():
        check_tasks(checked, program)
        check_messages(checked, program)
        check_readiness(checked, program)
        check_in_flight(checked, program)
        (check_steps if steps_each_backward else check_tail)(checked, program)
    _check_collectives_agree(checked, steps_each_backward=steps_each_backward)
    check_channels(checked)
    _check_completion(checked)


def _check_ranks(checked: CheckedPrograms, order: Sequence[int]) -> None:
    expected = sorted(rank for stage in checked.plan.stages for rank in stage.ranks)
    if order != expected:
        raise ScheduleError(f"programs of ranks {order} for ranks {expected}; lower one for each, in order")
    if sorted(checked.schedules) != list(range(len(checked.plan.stages))):
        raise ScheduleError(
            f"schedules of stages {sorted(checked.schedules)} for {len(checked.plan.stages)} stages; give one for each"
        )
    for rank, program in checked.programs.items():
        stage = checked.plan.stage_of_rank(rank)
        if program.stage != stage:
            raise checked.fail(
                rank, 0, f"its program is of stage {program.stage}; the plan puts it on {stage}"
            )


def _check_collectives_agree(checked: CheckedPrograms, *, steps_each_backward: bool) -> None:
    """Collective instructions are on every rank that takes part, between the same tasks."""
    places = {rank: _collectives(program) for rank, program in checked.programs.items()}
    tails = {rank: tuple(kind for _, kind in found) for rank, found in places.items()}
    for rank, found in places.items():
        stage = checked.plan.stages[checked.programs[rank].stage]
        first = places[stage.ranks[0]]
        if found != first:
            shown = [f"{kind.value} after {count} tasks" for count, kind in found]
            wanted = [f"{kind.value} after {count} tasks" for count, kind in first]
            raise checked.fail(
                rank,
                len(checked.programs[rank].instructions) - 1,
                f"has {shown}, rank {stage.ranks[0]} of its stage {wanted}; they must agree",
            )
    if steps_each_backward:
        return
    steps = {rank: InstructionKind.STEP in tail for rank, tail in tails.items()}
    if len(set(steps.values())) > 1:
        rank = next(rank for rank, has_step in steps.items() if not has_step)
        end = len(checked.programs[rank].instructions) - 1
        raise checked.fail(
            rank, end, "has no step while other ranks do; all ranks agree on norm and overflow"
        )


def _check_completion(checked: CheckedPrograms) -> None:
    """Execute all programs serially with rendezvous; whoever still waits at the end is stuck."""
    end = execute_serially(checked.plan, checked.programs)
    if end.stuck:
        _raise_deadlock(checked, end)


def _raise_deadlock(checked: CheckedPrograms, end: Standstill) -> None:
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
        + program_grid(checked.programs.values(), positions=marks)
    )


def _collectives(program: RankProgram) -> tuple[tuple[int, InstructionKind], ...]:
    """Return (number of tasks before it, kind) of each collective instruction."""
    found = []
    num_tasks = 0
    for instruction in program.instructions:
        num_tasks += instruction.task is not None
        if instruction.kind in TAIL_ORDER:
            found.append((num_tasks, instruction.kind))
    return tuple(found)
