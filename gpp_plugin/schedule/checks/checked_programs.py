"""The programs of all ranks while they are validated, and what every check looks up about them.

Source: this project
Tests: tests/schedule/test_validate.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from gpp_plugin.errors import ScheduleError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import InstructionKind, Message, RankProgram
from gpp_plugin.ir.samples import SampleRange
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.schedule.build_graph import Presence, own_tasks
from gpp_plugin.schedule.grid import program_grid

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
        self.trained = {
            schedule.stage
            for schedule in schedules
            if any(task.kind is not TaskKind.FORWARD for task in schedule.tasks)
        }
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
