"""Where a stage's parameters are made whole for its tasks, if each of its data-parallel ranks holds a part (ZeRO 3).

A stage is gathered before a task, and freed behind it where another stage's task comes next on a rank; between
neighbouring tasks of one stage letting go would only mean to gather again, as its own tasks are what needs most:

    rank 0, stages 0 and 1   gather(0) 0F0 free(0)  gather(1) 1F0 1B0 free(1)  gather(0) 0F1 0B0 free(0)  gather(1) ...

So a rank of several stages holds one of them whole at a time; a rank of one stage gathers it once a mini-batch, which
is what ZeRO 1 and 2 send behind their step. Where the plan says that its ranks have free memory for two
(`plan.memory`), a stage is gathered a task early, and its gather travels beside that task; what would be released for
that task alone
stays:

    rank 0, stages 0, 1, 2   gather(0) gather(1) 0F0 free(0)  gather(2) 1F0 free(1)  2F0 ...

A gather is begun where it stands and waited for by the stage's next task. It is a rendezvous of the stage's ranks,
which come to it between the same two tasks of the stage. Where ranks would have other orders of a stage's gathers and
reductions, or would hold more than two stages, none is prefetched: it is tried right before the task, wherever on any
of its ranks another stage comes between. All programs are executed serially (`checks.rendezvous`); a gather at which
they stop is moved, on all ranks of its stage, from early to right before its task, then before the receives that stand
there, and then before the sends. One at which they still stop is taken out, with the free before it, so that the stage
stays whole between those two tasks; a first one stands at the programs' beginnings instead, where all ranks have those
of their stages in the order of stages, so that no rank waits there for one that waits elsewhere. Then programs finish
as they did without any.

Source: FSDP (Zhao et al., VLDB 2023; arXiv 2304.11277), sections 3.2 and 3.3, with a stage for a unit; its place in
    programs: this project
Tests: tests/schedule/test_gathers.py, tests/schedule/test_early_reductions.py
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set

from gpp_plugin.ir.plan import PipelinePlan, joined_breakdown
from gpp_plugin.ir.program import Instruction, InstructionKind, RankProgram
from gpp_plugin.ir.schedule import Task, TaskKind
from gpp_plugin.schedule.checks.order_check import OF_STAGE, execute_serially, standing_at

# Which stages may begin to sum their gradients in the last backward, before the program's reduction.
#
# A program ends with ``REDUCE_DATA``, behind the messages that follow the last backward. The ranks of a stage may send
# gradients to each other as that backward makes them, and only wait at ``REDUCE_DATA``:
#
#     program    ...  B3  send dx  reduce_data  step
#     early      ...  [begin]  B3  send dx  [wait]  step
#
# Nobody waits where the sums begin, in order. But a host may wait for its device at any time (an allocation, a kernel
# loaded for the first time), and messages that are posted later may stand in one hardware queue behind a sum that has
# begun. Then a rank stands in its last backward until the others of its stage have begun too. At its worst that is a
# program whose reduction comes right before the last backward, as that one needs nothing further of others once it
# runs. So that program is executed serially (`checks.rendezvous`), of all ranks together: where it finishes, so does
# every execution in which some ranks wait there and others later, as more can only happen before a later wait.
#
# Three conditions keep the claim true. All sums have begun on every rank when its last backward has ended (the
# engine's part, `engine.gradient_store.EarlySends`). The backward holds no collectives of tensor ranks,
# among which sums would begin at places that depend on timing. And it is a whole backward: a separate weight gradient
# is made in several passes.
#
#     rank 0 (stage 0)   ...             receive dx0  reduce B0  step      stage 0 on ranks 0 and 1, stage 1 on rank 2:
#     rank 1 (stage 0)   ...             receive dx1  reduce B0  step      neither rank needs anything of the other to
#     rank 2 (stage 1)   B0  send dx0  send dx1  step                      come to its last backward: early


EARLY_BUCKET_ELEMENTS = 1 << 22
"""Most elements of a bucket that is sent while a backward runs: 16 MiB of fp32, one message of a good rate."""


def stages_that_reduce_early(plan: PipelinePlan, programs: Sequence[RankProgram]) -> frozenset[int]:
    """Return the stages whose ranks may begin their reduction in their last backward.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution. The answer is theirs alone, so that
            ranks that have the same programs find the same.
    """
    early = {index for index in range(len(plan.stages)) if _may_begin(plan, programs, index)}
    # Every round takes out at least one stage: as the programs finish without early reductions, somebody who stands
    # still stands at one.
    while early:
        changed = {program.rank: _begun_early(program, early) for program in programs}
        stuck = execute_serially(plan, changed).stuck
        if not stuck:
            break
        standing = ((changed[rank], changed[rank].instructions[at]) for rank, at in stuck.items())
        waiting = {
            program.stage_of(instruction)
            for program, instruction in standing
            if instruction.kind is InstructionKind.REDUCE_DATA
        }
        assert waiting & early, "programs that finish stop only at what was changed"
        early -= waiting
    return frozenset(early)


def last_backward(program: RankProgram) -> int | None:
    """Return the micro-batch of the last task of one stage's program if that is a whole backward."""
    tasks = program.tasks
    return tasks[-1].micro_batch if tasks and tasks[-1].kind is TaskKind.BACKWARD else None


def _may_begin(plan: PipelinePlan, programs: Sequence[RankProgram], stage: int) -> bool:
    """Return whether a stage has something to sum, once, behind a whole backward without collectives."""
    if plan.stages[stage].num_replicas == 1 or plan.stages[stage].model_parallel > 1:
        return False
    mine = [program.of_stage(stage) for program in programs if stage in program.stages]
    return all(
        last_backward(program) is not None
        and sum(i.kind is InstructionKind.REDUCE_DATA for i in program.instructions) == 1
        for program in mine
    )


def _begun_early(program: RankProgram, early: Set[int]) -> RankProgram:
    """Return a program in which the one reduction of each of its early stages stands right before its last task."""
    instructions = list(program.instructions)
    for stage in sorted(early & set(program.stages)):
        (reduction,) = (
            i for i in instructions if i.kind is InstructionKind.REDUCE_DATA and program.stage_of(i) == stage
        )
        instructions = [i for i in instructions if i is not reduction]
        at = max(
            index for index, i in enumerate(instructions) if i.task is not None and i.task.stage == stage
        )
        instructions.insert(at, reduction)
    return dataclasses.replace(program, instructions=tuple(instructions))


_Place = tuple[int, int]
"""A stage, and the number of its task that it is gathered before."""
_PREFETCHED, _BEFORE_TASK, _BEHIND_SENDS, _BEHIND_TASK = range(4)
"""Before the task in front of that task, or where in the gap between the two; in the order in which it is tried."""


def gather_around_tasks(plan: PipelinePlan, programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    """Return ``programs`` with gathers and frees of the stages that hold their parameters in parts.

    Args:
        programs: of all ranks; they finish under serial rendezvous execution.
    """
    sharded = {index for index in range(len(plan.stages)) if plan.stages[index].gathered_bytes > 0}
    if not sharded:
        return tuple(programs)
    # Stages leave ``prefetched`` and never come back: at last none is left, and gathers are where they always were.
    # With stages 0 to 2 allowed and stage 1's ranks disagreeing on an order, the next round has 0 and 2.
    prefetched = may_prefetch(plan, sharded)
    while prefetched:
        changed, late = _gathered(plan, programs, sharded, prefetched)
        if changed is not None and not (late := _stages_in_the_way(plan, changed)) & prefetched:
            return changed
        prefetched -= late
    placed, _ = _gathered(plan, programs, sharded, prefetched)
    assert placed is not None, "without prefetched gathers there is always an order"
    return placed


def _gathered(
    plan: PipelinePlan, programs: Sequence[RankProgram], sharded: Collection[int], prefetched: Collection[int]
) -> tuple[tuple[RankProgram, ...] | None, set[int]]:
    """Return programs with gathers at which nothing stops; or None, and the stages that must not be prefetched."""
    attempts, at_start = _first_attempts(programs, sharded, prefetched)
    while True:
        changed = tuple(_with_gathers(program, attempts, at_start) for program in programs)
        stuck = {(stage, over) for stage, over, _ in standing_at(plan, changed, InstructionKind.GATHER)}
        if not stuck:
            return changed, set()
        # A place at which a stage was to stay whole has no gather to move; then nothing of that stage is prefetched.
        held = {stage for stage, _ in stuck - attempts.keys()}
        if held:
            return None, held & set(prefetched) or set(prefetched)
        # every round takes a place one attempt further, and after the last one there is none: it ends
        for place in stuck:
            attempts[place] += 1
            if attempts[place] > _BEHIND_TASK:
                del attempts[place]
                if not place[1]:
                    at_start.add(place[0])


def may_prefetch(plan: PipelinePlan, sharded: Collection[int]) -> set[int]:
    """Return the stages whose ranks all have free memory for another one whole beside the largest."""
    if not plan.memory:
        return set()
    # One crowded rank is enough: a stage's ranks gather it together, so all of them would hold it early. Ranks of one
    # stage say nothing, as they have it whole from their first task to their last.
    together: set[int] = set()
    crowded: set[int] = set()
    for rank in {rank for stage in plan.stages for rank in stage.ranks}:
        own = plan.stages_of_rank(rank)
        if len(own) > 1:
            fits = _most_at_once(plan, own) > max(plan.stages[stage].gathered_bytes for stage in own)
            (together if fits else crowded).update(own)
    return together.intersection(sharded) - crowded


def _most_at_once(plan: PipelinePlan, stages: Sequence[int]) -> int:
    return joined_breakdown([plan.memory[stage] for stage in stages]).gathered


def _stages_in_the_way(plan: PipelinePlan, programs: Sequence[RankProgram]) -> set[int]:
    """Return stages whose ranks disagree on the order of what they do together, or hold too much at a time."""
    found: set[int] = set()
    orders: dict[int, set[tuple[object, ...]]] = defaultdict(set)
    for program in programs:
        if len(program.stages) > 1 and gathered_at_once(plan, program) > _most_at_once(plan, program.stages):
            found |= set(program.stages)
        for stage in program.stages:
            orders[stage].add(_together(program, stage))
    return found | {stage for stage, each in orders.items() if len(each) > 1}


def _together(program: RankProgram, stage: int) -> tuple[object, ...]:
    """Return what a rank does together with the stage's others, in order, each behind how many of its tasks."""
    found, tasks = [], 0
    for instruction in program.instructions:
        if program.stage_of(instruction) == stage:
            tasks += instruction.task is not None
            if instruction.kind in OF_STAGE:
                found.append((tasks, instruction.kind))
    return tuple(found)


def gathered_at_once(plan: PipelinePlan, program: RankProgram) -> int:
    """Return the most bytes that a rank holds beside its parts of parameters: of stages that are whole at a time."""
    most = now = 0
    for instruction in program.instructions:
        if instruction.kind in (InstructionKind.GATHER, InstructionKind.FREE):
            stage = program.stage_of(instruction)
            assert stage is not None, "a gather is of one stage"
            num_bytes = plan.stages[stage].gathered_bytes
            now += num_bytes if instruction.kind is InstructionKind.GATHER else -num_bytes
            most = max(most, now)
    return most


def _first_attempts(
    programs: Sequence[RankProgram], sharded: Collection[int], prefetched: Collection[int]
) -> tuple[dict[_Place, int], set[int]]:
    """Return where stages are to be gathered, and which of them at the beginning of the programs."""
    # Between tasks k - 1 and k of a stage it is freed if on any rank of it another stage comes between. With stage 0 on
    # ranks 0 and 1, and stage 1 on rank 0 as well, both free stage 0 at its task 1, as they gather it together:
    #
    #     rank 0   0F0 1F0 1B0 0F1 0B0      places (0, 0), (0, 1), (1, 0)
    #     rank 1   0F0         0F1 0B0
    places = {(stage, 0) for stage in sharded}
    tasks: dict[int, set[tuple[Task, ...]]] = defaultdict(set)
    between: dict[_Place, int] = defaultdict(int)  # most tasks of others, on any rank
    for program in programs:
        done: dict[int, list[Task]] = {stage: [] for stage in program.stages}
        last: dict[int, int] = {}
        for number, task in enumerate(program.tasks):
            own = done[task.stage]
            others = number - last.get(task.stage, number) - 1
            if task.stage in sharded and own and others:
                places.add((task.stage, len(own)))
                between[task.stage, len(own)] = max(between[task.stage, len(own)], others)
            own.append(task)
            last[task.stage] = number
        for stage, own in done.items():
            tasks[stage].add(tuple(own))
    # Ranks of a stage that run different tasks, as their units lack other branches, have no place in common but that
    # one.
    mixed = {stage for stage in sharded if len(tasks[stage]) > 1}
    attempts = {}
    for place in places:
        is_prefetched = place[0] in prefetched
        if place[0] in mixed or (is_prefetched and place[1] and between[place] == 1):
            continue  # prefetched it would be released and gathered again at once: it stays
        attempts[place] = _PREFETCHED if is_prefetched else _BEFORE_TASK
    return attempts, mixed


def _with_gathers(
    program: RankProgram, attempts: Mapping[_Place, int], at_start: Collection[int]
) -> RankProgram:
    """Insert the gathers of a rank's stages before tasks, and frees right behind them.

    Args:
        at_start: stages whose first gather is at the program's beginning, in the order of stages.
    """
    totals = dict.fromkeys(program.stages, 0)
    for each in program.tasks:
        totals[each.stage] += 1
    body: list[Instruction] = []
    for stage in program.stages:
        if stage in at_start:
            body.append(program.instruction(InstructionKind.GATHER, stage))
            if not totals[stage]:  # nothing here needs it, but the others do not gather without this rank
                body.append(program.instruction(InstructionKind.FREE, stage))
    done = dict.fromkeys(program.stages, 0)
    sharded = {stage for stage, _ in attempts}.union(at_start)
    gap: list[Instruction] = []  # what stands between two tasks
    previous: int | None = None  # where in ``body`` the last task is
    for instruction in program.instructions:
        task = instruction.task
        if task is None:
            gap.append(instruction)
            continue
        attempt = attempts.get((task.stage, done[task.stage]))
        if attempt is not None:
            gather = program.instruction(InstructionKind.GATHER, task.stage)
            # the stage's own task in front is not behind a gather of it: the next place is right behind that task
            if (
                attempt == _PREFETCHED
                and previous is not None
                and program.stage_of(body[previous]) != task.stage
            ):
                body.insert(previous, gather)
            else:
                gap.insert(_in_gap(gap, _BEHIND_TASK if attempt == _PREFETCHED else attempt), gather)
        body += [*gap, instruction]
        previous = len(body) - 1
        gap = []
        done[task.stage] += 1
        is_last = done[task.stage] == totals[task.stage]
        if task.stage in sharded and (is_last or (task.stage, done[task.stage]) in attempts):
            body.append(program.instruction(InstructionKind.FREE, task.stage))
    return dataclasses.replace(program, instructions=(*body, *gap))


def _in_gap(gap: Sequence[Instruction], attempt: int) -> int:
    """Return the place of a gather among what stands between two tasks; a local transfer stays in one piece."""
    # gap: send x, receive y, gather before the task: [send x, receive y, .], behind sends: [send x, ., receive y],
    # behind the task before: [., send x, receive y]
    if attempt == _BEFORE_TASK:
        return len(gap)
    sent = [
        at + 1
        for at, each in enumerate(gap)
        if each.message is not None and (each.kind is InstructionKind.SEND or each.message.is_local_transfer)
    ]
    return max(sent, default=0) if attempt == _BEHIND_SENDS else 0
