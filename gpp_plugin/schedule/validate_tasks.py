"""Checks of `validate` on the tasks and collective instructions of each rank's program by itself."""

from __future__ import annotations

from collections import defaultdict

from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.schedule.checked_programs import TAIL_ORDER, CheckedPrograms, messages_of


def check_tasks(checked: CheckedPrograms, program: RankProgram) -> None:
    """The rank runs its stage's schedule, in order, and every micro-batch whole."""
    schedule = checked.schedules[program.stage]
    ran = [(i, x.task) for i, x in enumerate(program.instructions) if x.kind is InstructionKind.COMPUTE]
    for (position, task), planned in zip(ran, schedule.tasks, strict=False):
        if task != planned:
            raise checked.fail(
                program.rank, position, f"runs {task} where the schedule has {planned}; lower anew"
            )
    if len(ran) != len(schedule.tasks):
        raise checked.fail(
            program.rank,
            len(program.instructions) - 1,
            f"runs {len(ran)} tasks of the {len(schedule.tasks)} scheduled; lower anew",
        )
    parts: dict[int, list[str]] = defaultdict(list)
    for position, task in ran:
        assert task is not None
        parts[task.micro_batch].append(task.kind.value + ("" if task.half is None else "ab"[task.half]))
        if not _may_follow(checked, program.stage, parts[task.micro_batch]):
            run = ", ".join(parts[task.micro_batch][:-1]) or "nothing"
            raise checked.fail(
                program.rank,
                position,
                f"{task} comes after {run} of its micro-batch; run its forward once, whole or in two halves, "
                "then its backward once, whole or as input and weight gradient",
            )
    ends = ("B", "W") if program.stage in checked.trained else ("F", "Fb")
    count = checked.plan.num_micro_batches(program.stage)
    lacking = [m for m in range(count) if not parts[m] or parts[m][-1] not in ends]
    if lacking or len(parts) != count:
        raise checked.fail(
            program.rank,
            len(program.instructions) - 1,
            f"runs {len(parts)} micro-batches where {count} are due, unfinished {lacking[:4]}; "
            "schedule each once",
        )


def _may_follow(checked: CheckedPrograms, stage: int, parts: list[str]) -> bool:
    """Return whether these parts of one micro-batch, run in this order, begin a whole order."""
    backwards = [["B"], ["I", "W"]] if stage in checked.trained else [[]]
    orders = [[*forward, *backward] for forward in (["F"], ["Fa", "Fb"]) for backward in backwards]
    return any(parts == order[: len(parts)] for order in orders)


def check_in_flight(checked: CheckedPrograms, program: RankProgram) -> None:
    """Count what is held: until its backward, or in a forward-only stage until all of it is sent."""
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
                    program.rank,
                    position,
                    f"{task} holds {len(held)} micro-batches, in_flight allows {limit}; raise in_flight or "
                    "run a backward first",
                )
        for message in instruction.sends if not is_trained else ():
            unsent[message.src_micro_batch] -= 1
            if not unsent[message.src_micro_batch]:
                held.discard(message.src_micro_batch)


def check_tail(checked: CheckedPrograms, program: RankProgram) -> None:
    """Reductions and the step come last, in one order; the stage may reduce its data between tasks too."""
    kinds = [(i, x.kind) for i, x in enumerate(program.instructions) if x.kind in TAIL_ORDER]
    last = max((i for i, x in enumerate(program.instructions) if x.kind not in TAIL_ORDER), default=-1)
    early = [i for i, kind in kinds if i < last and kind is InstructionKind.REDUCE_DATA]
    kinds = [(i, kind) for i, kind in kinds if i not in early]
    expected = [kind for kind in TAIL_ORDER if any(kind is found for _, found in kinds)]
    if [kind for _, kind in kinds] != expected or any(i < last for i, _ in kinds):
        names = ", ".join(kind.value for _, kind in kinds)
        raise checked.fail(
            program.rank,
            kinds[0][0],
            f"ends with {names}; reductions and the step come last: "
            f"{', '.join(kind.value for kind in TAIL_ORDER)}, each at most once",
        )
    if early and InstructionKind.REDUCE_DATA not in expected:
        raise checked.fail(program.rank, early[-1], "reduces between tasks but not at its end; do both")
    if early and program.stage not in checked.trained:
        raise checked.fail(program.rank, early[0], "reduces without backwards; there are no gradients")


def check_steps(checked: CheckedPrograms, program: RankProgram) -> None:
    """A reduction and a step follow each backward, behind its messages and before the next task."""
    expected: list[InstructionKind] = []
    for position, instruction in enumerate(program.instructions):
        kind = instruction.kind
        if kind in TAIL_ORDER and (not expected or kind is not expected.pop(0)):
            raise checked.fail(
                program.rank, position, f"{kind.value} does not belong there; a backward is due"
            )
        if kind is InstructionKind.COMPUTE and expected:
            raise checked.fail(program.rank, position, f"runs {instruction} before {expected[0].value}")
        if instruction.task is not None and instruction.task.kind is not TaskKind.FORWARD:
            expected = [InstructionKind.REDUCE_DATA, InstructionKind.STEP]
    if expected:
        raise checked.fail(program.rank, len(program.instructions) - 1, f"ends without {expected[0].value}")
