"""Proves that lowered programs are whole and cannot stop, independently of how they were made.

What is proven for a plan, its schedules and the programs of all ranks:

1. every rank runs exactly the schedule of each of its stages, in order: each micro-batch's forward, whole or in two
   halves, and its backward, whole or as input and later weight gradient;
2. on every channel (sender, receiver) sends and receives are the same messages of all edges in the same order;
3. a message leaves after the task that makes it; before a task runs it has received the rows of
   exactly its samples, each once, and each tensor without a batch axis once; the same for gradients; of
   tensors that tensor ranks hold as shards, exactly what its rank needs, each part once; what passes between two
   stages of one rank is received right behind its send;
4. no stage holds more micro-batches than the plan's ``in_flight``, from the first forward to the whole
   backward or the weight gradient;
5. reductions and the step come last, in one order on all ranks, which share one step; a stage may also reduce its
   data between tasks, after a backward, at the same place on all its ranks (programs that step after each backward,
   as asynchronous ones do, have a reduction and a step of the stage behind each, before its next task, and nowhere
   else);
6. a stage that its ranks hold in parts (ZeRO 3) is gathered before each of its tasks, on all of them between the same
   two; it is freed before the step, and nothing that is whole anyway is gathered;
7. everything finishes when each rank executes its instructions serially, in order, with rendezvous messages: a send
   or a receive ends when its other end is posted; a gather or a reduction of data when all ranks of the stage have come
   to it, and a task, which has the collectives of tensor parallelism inside, when all tensor ranks of its data position
   have. Then it finishes on any device as well, whichever rank waits for it on the way (`rendezvous`).

Source: this project
Tests: tests/schedule/test_validate.py, tests/schedule/test_gathers.py, tests/schedule/test_async.py,
    tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Sequence

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Instruction, InstructionKind, Message, RankProgram
from gpp_plugin.ir.schedule import StageSchedule, TaskKind
from gpp_plugin.schedule.build_graph import Presence, lengthened
from gpp_plugin.schedule.checks.order_check import Deadlock, execute_serially
from gpp_plugin.schedule.checks.validate_messages import (
    TAIL_ORDER,
    CheckedPrograms,
    check_channels,
    check_local_transfers,
    check_messages,
    check_readiness,
    messages_of,
)
from gpp_plugin.schedule.program_sets import (
    Programs,
    ProgramSet,
    async_name,
    moved_message,
    moved_task,
    repeated_schedules,
    window_schedules,
)
from gpp_plugin.schedule.task_graph import program_grid

# Proves that a stage's parameters are whole wherever one of its tasks runs, and in parts wherever they are stepped.


def check_gathers(checked: CheckedPrograms, part: RankProgram) -> None:
    """Check what a rank does for one of its stages: gathered, its tasks, freed, and so on.

    Raises:
        ScheduleError: a task runs, or a step is taken, while it must not; or there is a gather that nothing needs.
    """
    # ``is_whole`` is what the rank has at an instruction. A stage that it always has whole has no gathers at all.
    #
    #     gather  0F0  0F1  free  ...  gather  0B0  0B1  free  reduce_data  step
    #             whole                        whole           in parts
    stage = checked.plan.stages[part.stage]
    is_sharded = stage.gathered_bytes > 0
    is_whole = not is_sharded
    for position, instruction in enumerate(part.instructions):
        kind = instruction.kind
        if kind in (InstructionKind.GATHER, InstructionKind.FREE):
            is_gather = kind is InstructionKind.GATHER
            if not is_sharded or is_gather is is_whole:
                held = "whole" if is_whole else "in parts"
                raise checked.fail(
                    part, position, f"{instruction}: its parameters are {held} there; lower anew"
                )
            is_whole = is_gather
        elif kind is InstructionKind.COMPUTE and not is_whole:
            what = f"runs {instruction} while its parameters are not gathered; gather them before it"
            raise checked.fail(part, position, what)
        elif kind is InstructionKind.STEP and is_whole and is_sharded:
            what = "steps while its parameters are gathered, and it steps parts of them; free them before"
            raise checked.fail(part, position, what)
    if is_whole and is_sharded:
        raise checked.fail_at_end(
            part, "ends while its parameters are gathered; free them behind its last task"
        )


def validate_programs(
    plan: PipelinePlan,
    schedules: Sequence[StageSchedule],
    programs: Sequence[RankProgram],
    *,
    steps_each_backward: bool = False,
    presence: Presence | None = None,
) -> None:
    """Check the programs of all ranks together.

    Args:
        presence: what there is of each sample, where some lack branches: a rank runs those tasks of the schedule, and
            a task needs those messages, and no others.
        steps_each_backward: stages step after each backward, not once at the end.

    Raises:
        ScheduleError: what is wrong, with which values, the fix, and the grid with the bad cell marked.
    """
    checked = CheckedPrograms(plan, schedules, programs, presence)
    _check_ranks(checked, [program.rank for program in programs])
    for program in checked.programs.values():
        check_local_transfers(checked, program)
    for part in checked.parts:
        _check_tasks(checked, part)
        check_messages(checked, part)
        check_readiness(checked, part)
        _check_in_flight(checked, part)
        check_gathers(checked, part)
    for program in checked.parts if steps_each_backward else checked.programs.values():
        (_check_steps if steps_each_backward else _check_tail)(checked, program)
    _check_collectives_agree(checked, steps_each_backward=steps_each_backward)
    check_channels(checked)
    end = execute_serially(plan, checked.programs)
    if end.stuck:  # a rank still waits
        _raise_deadlock(checked, end)


def _check_ranks(checked: CheckedPrograms, order: Sequence[int]) -> None:
    expected = sorted({rank for stage in checked.plan.stages for rank in stage.ranks})
    if order != expected:
        raise ScheduleError(f"programs of ranks {order} for ranks {expected}; lower one for each, in order")
    if sorted(checked.schedules) != list(range(len(checked.plan.stages))):
        raise ScheduleError(
            f"schedules of stages {sorted(checked.schedules)} for {len(checked.plan.stages)} stages; give one for each"
        )
    for rank, program in checked.programs.items():
        stages = checked.plan.stages_of_rank(rank)
        if program.stages != stages:
            found, wanted = (", ".join(map(str, indices)) for indices in (program.stages, stages))
            raise checked.fail(program, 0, f"its program is of stage {found}; the plan puts it on {wanted}")
        if len(stages) > 1:
            _check_owners(checked, program)


def _check_owners(checked: CheckedPrograms, program: RankProgram) -> None:
    """Every instruction of a rank of several stages is of one of them, or the one step."""
    edges = tuple((edge.src, edge.dst) for edge in checked.plan.edges)
    if program.edges != edges:
        raise checked.fail(
            program, 0, f"its program is of edges {list(program.edges)}, the plan has {list(edges)}"
        )
    for position, instruction in enumerate(program.instructions):
        message = instruction.message
        if message is not None and not 0 <= message.edge < len(edges):
            raise checked.fail(program, position, f"{message}: the plan has {len(edges)} edges")
        stage = program.stage_of(instruction)
        is_step = instruction.kind is InstructionKind.STEP and stage is None
        if stage not in program.stages and not is_step:
            raise checked.fail(program, position, f"{instruction} is of no stage of this rank; lower anew")


def _check_collectives_agree(checked: CheckedPrograms, *, steps_each_backward: bool) -> None:
    """Collective instructions are on every rank that takes part, between the same tasks."""
    places = {(part.rank, part.stage): _collectives(checked, part) for part in checked.parts}
    for part in checked.parts:
        lead = checked.plan.stages[part.stage].ranks[0]
        found, first = places[part.rank, part.stage], places[lead, part.stage]
        if found != first:
            shown = [f"{kind.value} after {count} tasks" for count, kind in found]
            wanted = [f"{kind.value} after {count} tasks" for count, kind in first]
            raise checked.fail_at_end(
                part, f"has {shown}, rank {lead} of its stage {wanted}; they must agree"
            )
    if steps_each_backward:
        return
    steps = {
        rank: any(i.kind is InstructionKind.STEP for i in program.instructions)
        for rank, program in checked.programs.items()
    }
    if len(set(steps.values())) > 1:
        program = checked.programs[next(rank for rank, has_step in steps.items() if not has_step)]
        what = "has no step while other ranks do; all ranks agree on norm and overflow"
        raise checked.fail_at_end(program, what)


def _raise_deadlock(checked: CheckedPrograms, end: Deadlock) -> None:
    waits_for: dict[int, tuple[int, Message | str]] = {}
    for message, rank in end.posted.items():
        waits_for[rank] = (message.dst_rank if rank == message.src_rank else message.src_rank, message)
    for shared, ranks in end.present.items():
        late = next(rank for rank in shared.ranks if rank not in ranks)
        kind = "a gather" if shared.what.kind is InstructionKind.GATHER else "a reduction"
        what = kind if shared.what.task is None else f"their task {shared.what}"
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


def _collectives(checked: CheckedPrograms, program: RankProgram) -> tuple[tuple[int, InstructionKind], ...]:
    """Return (tasks of the schedule that are over, kind) of each collective instruction."""
    # Of a rank that lacks some of the schedule's tasks those before its next one are over: of F0 F1 B0 B1 with B0
    # absent a reduction before B1 has 3 behind it, as on the ranks that run all.
    places: Sequence[int] | None = None
    if checked.presence is not None:
        position = {task: i for i, task in enumerate(checked.schedules[program.stage].tasks)}
        places = [*(position[task] for task in checked.tasks[program.rank, program.stage]), len(position)]
    found: list[tuple[int, InstructionKind]] = []
    num_tasks = 0
    for instruction in program.instructions:
        num_tasks += instruction.task is not None
        if instruction.kind is InstructionKind.GATHER and not num_tasks:
            found.append((0, instruction.kind))  # at the beginning, also of a rank that lacks the first tasks
        elif instruction.kind in (InstructionKind.GATHER, *TAIL_ORDER):
            found.append((num_tasks if places is None else places[num_tasks], instruction.kind))
    return tuple(found)


def _check_tasks(checked: CheckedPrograms, program: RankProgram) -> None:
    """The rank runs its stage's schedule, in order, and every micro-batch whole."""
    due = checked.tasks[program.rank, program.stage]
    ran = [(i, x.task) for i, x in enumerate(program.instructions) if x.kind is InstructionKind.COMPUTE]
    for (position, task), planned in zip(ran, due, strict=False):
        if task != planned:
            raise checked.fail(program, position, f"runs {task} where the schedule has {planned}; lower anew")
    if len(ran) != len(due):
        raise checked.fail_at_end(program, f"runs {len(ran)} tasks of the {len(due)} scheduled; lower anew")
    # That the schedule was followed says nothing of the schedule, so the parts of each micro-batch are checked by
    # themselves: after each task they must begin one of F B, F I W, Fa Fb B and Fa Fb I W (F and Fa Fb where nothing
    # is trained), and at the end be whole. ``2F0a 2F0b 2B0 2F1`` leaves parts {0: [Fa, Fb, B], 1: [F]}: 1 is
    # unfinished.
    parts: dict[int, list[str]] = defaultdict(list)
    for position, task in ran:
        assert task is not None
        parts[task.micro_batch].append(task.kind.value + ("" if task.half is None else "ab"[task.half]))
        if not _may_follow(checked, program.stage, parts[task.micro_batch]):
            run = ", ".join(parts[task.micro_batch][:-1]) or "nothing"
            raise checked.fail(
                program,
                position,
                f"{task} comes after {run} of its micro-batch; run its forward once, whole or in two halves, "
                "then its backward once, whole or as input and weight gradient",
            )
    ends = ("B", "W") if program.stage in checked.trained else ("F", "Fb")
    wanted = {task.micro_batch for task in due}
    if checked.presence is None:
        wanted = set(range(checked.plan.num_micro_batches(program.stage)))
    lacking = [m for m in sorted(wanted) if not parts[m] or parts[m][-1] not in ends]
    if lacking or len(parts) != len(wanted):
        raise checked.fail_at_end(
            program,
            f"runs {len(parts)} micro-batches where {len(wanted)} are due, unfinished {lacking[:4]}; "
            "schedule each once",
        )


def _may_follow(checked: CheckedPrograms, stage: int, parts: list[str]) -> bool:
    """Return whether these parts of one micro-batch, run in this order, begin a whole order."""
    backwards = [["B"], ["I", "W"]] if stage in checked.trained else [[]]
    orders = [[*forward, *backward] for forward in (["F"], ["Fa", "Fb"]) for backward in backwards]
    return any(parts == order[: len(parts)] for order in orders)


def _check_in_flight(checked: CheckedPrograms, program: RankProgram) -> None:
    """Count what is held: until its backward, or in a forward-only stage until all of it is sent."""
    # A stage that runs backwards holds a micro-batch from its first half to B or W. One that does not holds what it
    # has not sent: ``unsent`` counts the messages left of each micro-batch.
    stage = checked.plan.stages[program.stage]
    limit = min(stage.in_flight, checked.schedules[program.stage].num_in_flight)
    is_trained = program.stage in checked.trained
    unsent: dict[int, int] = defaultdict(int)
    if not is_trained:
        for _, message, is_send in messages_of(program):
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
                raise checked.fail(
                    program,
                    position,
                    f"{task} holds {len(held)} micro-batches, in_flight allows {limit}; raise in_flight or "
                    "run a backward first",
                )
        sent = instruction.message if instruction.kind is InstructionKind.SEND else None
        if sent is not None and not is_trained:
            unsent[sent.src_micro_batch] -= 1
            if not unsent[sent.src_micro_batch]:
                held.discard(sent.src_micro_batch)


def _check_tail(checked: CheckedPrograms, program: RankProgram) -> None:
    """Reductions and the step come last, in one order; a stage may reduce its data between tasks too."""
    # The tail of a rank of stages 0 and 2: reduce_data(0) reduce_data(2) reduce_tied(2) step, by kind and then stage.
    ends = [
        (i, x, (TAIL_ORDER.index(x.kind), -1 if x.stage is None else x.stage))
        for i, x in enumerate(program.instructions)
        if x.kind in TAIL_ORDER
    ]
    last = max((i for i, x in enumerate(program.instructions) if x.kind not in TAIL_ORDER), default=-1)
    early = [(i, x) for i, x, _ in ends if i < last and x.kind is InstructionKind.REDUCE_DATA]
    tail = [end for end in ends if end[0] > last or end[1].kind is not InstructionKind.REDUCE_DATA]
    places = [place for _, _, place in tail]
    if sorted(set(places)) != places or any(i < last for i, _, _ in tail):
        names = ", ".join(str(x) for _, x, _ in tail)
        raise checked.fail(
            program,
            tail[0][0],
            f"ends with {names}; reductions and the step come last: "
            f"{', '.join(kind.value for kind in TAIL_ORDER)}, each at most once a stage",
        )
    summed = {program.stage_of(x) for _, x, _ in tail if x.kind is InstructionKind.REDUCE_DATA}
    for position, instruction in early:
        stage = program.stage_of(instruction)
        if stage not in checked.trained:
            raise checked.fail(program, position, "reduces without backwards; there are no gradients")
        if stage not in summed:
            raise checked.fail(program, position, "reduces between tasks but not at its end; do both")


def _check_steps(checked: CheckedPrograms, program: RankProgram) -> None:
    """A reduction and a step of the stage follow each of its backwards, behind its messages, before its next task."""
    expected: list[InstructionKind] = []
    for position, instruction in enumerate(program.instructions):
        kind = instruction.kind
        if kind in TAIL_ORDER and (not expected or kind is not expected.pop(0)):
            raise checked.fail(program, position, f"{kind.value} does not belong there; a backward is due")
        if kind is InstructionKind.COMPUTE and expected:
            raise checked.fail(program, position, f"runs {instruction} before {expected[0].value}")
        if instruction.task is not None and instruction.task.kind is not TaskKind.FORWARD:
            expected = [InstructionKind.REDUCE_DATA, InstructionKind.STEP]
    if expected:
        raise checked.fail_at_end(program, f"ends without {expected[0].value}")


# Proves programs that carry something from one to the next (`program_sets`): in a row, and each by itself.
#
# Programs that run one after the other, to the one that empties the pipeline, are one long program of a longer
# mini-batch. All that is proven for programs (`validate_programs`) is proven for that. The program that repeats runs
# twice in it, the second time with greater numbers. Besides, no program may need a later one:
#
# 1. its messages are sent and received in it;
# 2. it finishes by itself under serial rendezvous execution, whatever ranks do between two programs.
#
# Those of a frozen prefetch end with a reduction and a step each, which are checked program by program.


def validate_async(
    plan: PipelinePlan, programs: ProgramSet, *, forward_only_stages: Collection[int] = frozenset()
) -> None:
    """Check the programs of a plan of mode async, of all ranks together.

    Raises:
        ScheduleError: what is wrong, with which values, and the grid with the bad cell marked.
    """
    for name, of_ranks in programs.programs.items():
        _check_alone(plan, of_ranks, name)
    # Of two programs that differ: prologue 1 and its drain; prologue 1, steady and drain; prologue 1, steady, steady
    # of a mini-batch later, and that drain, later too. Another steady would be one behind a steady, which the third
    # run has proven.
    windows = programs.windows
    assert windows is not None, "programs of mode async"
    count = windows.first_steady
    for last in range(1, count + 2):
        shift = last - min(last, count)
        names = [async_name(min(window, count), count) for window in range(1, last + 1)]
        names.append(async_name(min(last, count), count, is_drain=True))
        shifts = [0] * (last - shift) + [1] * shift
        joined = _join([programs.programs[name] for name in names], [*shifts, shift], plan)
        validate_programs(
            lengthened(plan, last),
            window_schedules(windows, last, forward_only_stages),
            joined,
            steps_each_backward=True,
        )


def validate_prefetch(plan: PipelinePlan, programs: ProgramSet) -> None:
    """Check the programs of a plan whose frozen branch is prefetched, of all ranks together.

    Raises:
        ScheduleError: what is wrong, with which values, and the grid with the bad cell marked.
    """
    row = ("prologue", "steady", "steady", "epilogue")
    for name in dict.fromkeys(row):
        _check_alone(plan, programs.programs[name], f"prefetch, {name}")
    for name in (
        "steady",
        "epilogue",
    ):  # gathers, reductions and steps alone (claims 5 and 6): each is but a part
        checked = CheckedPrograms(plan, repeated_schedules(plan, 1), programs.programs[name])
        for program in programs.programs[name]:
            _check_tail(checked, program)
        for part in checked.parts:
            check_gathers(checked, part)
        _check_collectives_agree(checked, steps_each_backward=False)
    # Three mini-batches, in the numbers of the first: the branch alone on 0, then 0 with the branch on 1, 1 with the
    # branch on 2, and 2. A fourth would be another steady part behind one, which these have proven. Without their ends,
    # which every part has proven by itself.
    bare = [
        tuple(
            dataclasses.replace(p, instructions=tuple(i for i in p.instructions if i.kind not in TAIL_ORDER))
            for p in programs.programs[name]
        )
        for name in row
    ]
    joined = _join(bare, (-1, 0, 1, 2), plan)
    validate_programs(lengthened(plan, 3), repeated_schedules(plan, 3), joined)


def _check_alone(plan: PipelinePlan, programs: Programs, name: str) -> None:
    sent = {m for program in programs for m in program.messages(InstructionKind.SEND)}
    received = {m for program in programs for m in program.messages(InstructionKind.RECEIVE)}
    if sent != received:
        message = next(iter(sent ^ received))
        lacks = "receives" if message in sent else "sends"
        raise ScheduleError(f"{name}: no rank {lacks} {message} in it; a program needs nothing of later ones")
    end = execute_serially(plan, {program.rank: program for program in programs})
    if end.stuck:
        raise ScheduleError(
            f"{name}: ranks {sorted(end.stuck)} stop under serial rendezvous execution\n"
            + program_grid(programs, positions=end.stuck)
        )


def _join(parts: Sequence[Programs], shifts: Sequence[int], plan: PipelinePlan) -> Programs:
    """Return one program a rank: the parts one after the other, each moved by so many mini-batches."""
    joined = []
    for of_rank in zip(*parts, strict=True):
        instructions = [
            _moved(instruction, plan, shift)
            for program, shift in zip(of_rank, shifts, strict=True)
            for instruction in program.instructions
        ]
        joined.append(dataclasses.replace(of_rank[0], instructions=tuple(instructions)))
    return tuple(joined)


def _moved(instruction: Instruction, plan: PipelinePlan, num_mini_batches: int) -> Instruction:
    if not num_mini_batches:
        return instruction
    task, message = instruction.task, instruction.message
    return dataclasses.replace(
        instruction,
        task=None
        if task is None
        else moved_task(task, num_mini_batches * plan.num_micro_batches(task.stage)),
        message=None if message is None else moved_message(plan, message, num_mini_batches),
    )
