"""From a saved plan to the programs of its ranks, without the model it was made for."""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import RankProgram
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.checks.validate_windows import validate_ahead, validate_windows
from gpp_plugin.schedule.look_ahead import AheadPrograms, lower_ahead
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.forward_only import forward_only_stages
from gpp_plugin.schedule.windows import WindowPrograms, lower_windows


def programs_of_plan(plan: PipelinePlan, *, validate: bool = True) -> tuple[RankProgram, ...]:
    """Return the programs of all ranks, as the engine lowers them.

    Raises:
        ScheduleError: they would deadlock, reorder messages or exceed their in-flight counts.
    """
    # The parent validates once, before a process starts; each of its ranks lowers again, to the same
    # programs, without repeating the proof.
    frozen = forward_only_stages(plan)
    schedules = build_schedules(plan, forward_only_stages=frozen)
    programs = lower_schedules(plan, schedules, forward_only_stages=frozen)
    if validate:
        validate_programs(plan, schedules, programs)
    return programs


def make_windows(plan: PipelinePlan, *, validate: bool = True) -> WindowPrograms:
    """Return the windows of an asynchronous plan, as the engine lowers them.

    Raises:
        PlanError: the plan cannot run so.
        ScheduleError: they are unsafe.
    """
    frozen = forward_only_stages(plan)
    programs = lower_windows(plan, forward_only_stages=frozen)
    if validate:
        validate_windows(plan, programs, forward_only_stages=frozen)
    return programs


def make_ahead(plan: PipelinePlan, *, validate: bool = True) -> AheadPrograms:
    """Return the programs of a plan whose frozen branch runs a mini-batch ahead, as the engine lowers them.

    Raises:
        ScheduleError: they are unsafe.
    """
    programs = lower_ahead(plan)
    if validate:
        validate_ahead(plan, programs)
    return programs


def scale_times(plan: PipelinePlan, factor: float) -> PipelinePlan:
    """Return the plan with every task ``factor`` times as long."""
    if factor == 1.0:
        return plan
    # 0 stays 0, which means "not measured" for halves and split backwards (`stage_task_us`).
    names = ("forward_us", "backward_us", "half_forward_us", "input_gradient_us", "weight_gradient_us")
    stages = tuple(
        dataclasses.replace(stage, **{name: getattr(stage, name) * factor for name in names})
        for stage in plan.stages
    )
    # what orders reckon with for messages as well, or they would be other orders
    edges = tuple(
        dataclasses.replace(edge, message_us=edge.message_us * factor, gradient_us=edge.gradient_us * factor)
        for edge in plan.edges
    )
    return dataclasses.replace(plan, stages=stages, edges=edges, iteration_us=plan.iteration_us * factor)
