"""From a plan on a captured model to the programs of its ranks.

Source: this project
Tests: tests/runtime/test_halves.py, tests/runtime/test_ragged_units.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpp_plugin.capture.captured_graph import resized
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.tensors import UNIT, TensorSpec
from gpp_plugin.runtime.messages.transport import Channel
from gpp_plugin.runtime.stage_source import Reference
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.build_graph import Presence
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.orders.gpipe import forward_only_stages


def tied_stages(plan: PipelinePlan, reference: Reference) -> dict[str, tuple[int, ...]]:
    """Return the trainable parameters used on several stages, parameter name -> stage indices."""
    trainable = {p.name for p in reference.analysis.op_graph.parameters if p.requires_grad}
    stage_of = {block: index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    shared = {}
    for name, blocks in reference.block_graph.tied.items():
        stages = tuple(sorted({stage_of[block] for block in blocks}))
        if len(stages) > 1 and name in trainable:
            shared[name] = stages
    return shared


def held_tensors(plan: PipelinePlan, reference: Reference) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters and buffers each stage holds.

    What no block reads (a head that training does not use) must still be in exports: it rests on the last
    stage.
    """
    blocks = {block.name: block for block in reference.block_graph.blocks}
    used = {name for block in blocks.values() for name in block.parameters}
    unused = [
        p.name
        for p in reference.analysis.op_graph.parameters
        if p.name not in used and (p.is_persistent or not p.is_buffer)
    ]
    held = [[name for block in stage.blocks for name in blocks[block].parameters] for stage in plan.stages]
    held[-1] += unused
    return tuple(tuple(dict.fromkeys(names)) for names in held)


def make_programs(
    plan: PipelinePlan,
    reference: Reference,
    *,
    reduce_each_backward: bool = False,
    edges: Sequence[StageEdge] | None = None,
    presence: Presence | None = None,
) -> tuple[RankProgram, ...]:
    """Schedule, lower and validate ``plan`` in the mode of ``reference``: the programs of all ranks.

    Args:
        reduce_each_backward: as for `lower_schedules`.
        edges: the plan's, and those that only units without a branch have; None: the plan's.
        presence: the active branches of each unit, where some lack any.

    Raises:
        PlanError: a stage whose operators couple samples is to run forwards in halves.
        ScheduleError: the programs would deadlock, reorder messages or exceed their in-flight counts.
    """
    lowered = plan if edges is None else dataclasses.replace(plan, edges=tuple(edges))
    if not reference.analysis.is_training:
        schedules = forward_schedules(plan)
        programs = lower_schedules(lowered, schedules, training=False, presence=presence)
    else:
        _refuse_coupled_halves(plan, reference.block_graph)
        frozen = forward_only_stages(plan)
        tied = {stage for stages in tied_stages(plan, reference).values() for stage in stages}
        schedules = build_schedules(plan, forward_only_stages=frozen)
        programs = lower_schedules(
            lowered,
            schedules,
            tied_stages=tuple(sorted(tied)),
            forward_only_stages=frozen,
            reduce_each_backward=reduce_each_backward,
            presence=presence,
        )
    validate_programs(lowered, schedules, programs, presence=presence)
    return programs


def _refuse_coupled_halves(plan: PipelinePlan, block_graph: BlockGraph) -> None:
    coupled = {block.name for block in block_graph.blocks if block.is_coupled}
    for stage in plan.stages:
        mixing = sorted(coupled & set(stage.blocks))
        if stage.num_sliced and mixing:
            raise PlanError(
                f"stage {stage.name!r}: num_sliced is {stage.num_sliced}, but block {mixing[0]!r} mixes samples and "
                f"computes whole loss units of {plan.loss_unit}; set num_sliced to 0"
            )


def channels_of(programs: Sequence[RankProgram]) -> set[Channel]:
    """Return every channel that the programs of all ranks use; local transfers use none."""
    return {
        m.channel
        for program in programs
        for m in program.messages(InstructionKind.SEND)
        if not m.is_local_transfer
    }


def plan_of_units(plan: PipelinePlan) -> PipelinePlan:
    """Return a plan for units of ``plan.loss_unit`` samples with units in place of samples.

    Of a plan that is one already nothing changes.

    Raises:
        PlanError: a stage would run less or more than one unit a rank at a time.
    """
    unit = plan.loss_unit
    stages = []
    for stage in plan.stages:
        if stage.local_batch_size != unit or stage.num_sliced:
            what = (
                f"slices {stage.num_sliced} forwards"
                if stage.num_sliced
                else f"takes {stage.local_batch_size}"
            )
            raise PlanError(
                f"stage {stage.name!r} {what} samples a rank, but with graph_pipeline.units, or where a model takes "
                f"whole loss units, each rank runs whole units of {unit}; give graph_pipeline.plan micro-batches of "
                f"{unit} samples a rank and no slices"
            )
        stages.append(dataclasses.replace(stage, micro_batch_size=stage.degree))
    edges = tuple(
        dataclasses.replace(
            edge,
            bytes_per_sample=edge.bytes_per_sample * unit,
            gradient_bytes_per_sample=edge.gradient_bytes_per_sample * unit,
        )
        for edge in plan.edges
    )
    return dataclasses.replace(
        plan, mini_batch=plan.mini_batch // unit, loss_unit=1, stages=tuple(stages), edges=edges
    )


def spec_of_unit(spec: TensorSpec) -> TensorSpec:
    """Return a tensor captured on one whole unit with the unit as its only sample: all its rows belong to it."""
    return resized(spec, spec.shape, 1)


def nothing_of(name: str) -> TensorSpec:
    """Return a tensor of no elements: what a unit without a branch has of its tensors."""
    return TensorSpec(name=name, dtype="float32", shape=(0,), num_samples=1, layout=UNIT, requires_grad=False)
