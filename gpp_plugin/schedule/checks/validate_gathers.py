"""Proves that a stage's parameters are whole wherever one of its tasks runs, and in parts wherever they are stepped.

Source: this project
Tests: tests/schedule/test_gathers.py
"""

from __future__ import annotations

from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.schedule.checks.checked_programs import CheckedPrograms


def check_gathers(checked: CheckedPrograms, part: RankProgram) -> None:
    """Check what a rank does for one of its stages: gathered, its tasks, let go of, and so on.

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
            raise checked.fail(
                part,
                position,
                f"runs {instruction} while its parameters are not gathered; gather them before it",
            )
        elif kind is InstructionKind.STEP and is_whole and is_sharded:
            raise checked.fail(
                part,
                position,
                "steps while its parameters are gathered, and it steps parts of them; free them before",
            )
    if is_whole and is_sharded:
        end = len(part.instructions) - 1
        raise checked.fail(
            part, end, "ends while its parameters are gathered; free them behind its last task"
        )
