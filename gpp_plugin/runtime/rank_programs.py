"""From a plan on a captured model to the programs of its ranks.

Source: this project
Tests: tests/runtime/test_halves.py, tests/runtime/test_ragged_units.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from gpp_plugin.capture.captured_graph import resized
from gpp_plugin.capture.tracing.sample_batches import count_samples
from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge, forward_only_stages
from gpp_plugin.ir.program import InstructionKind, RankProgram
from gpp_plugin.ir.tensors import UNIT, TensorSpec
from gpp_plugin.plan.make import stage_edges
from gpp_plugin.plugins import Channel
from gpp_plugin.runtime.batches import Batch, UnitBatch, take_samples
from gpp_plugin.runtime.stage_module import Reference
from gpp_plugin.schedule.build import build_schedules, forward_schedules
from gpp_plugin.schedule.build_graph import Presence
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules


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
        tied = {stage for stages in tied_stages(plan, reference).values() for stage in stages}
        schedules = build_schedules(plan)
        programs = lower_schedules(
            lowered,
            schedules,
            tied_stages=tuple(sorted(tied)),
            forward_only_stages=forward_only_stages(plan),
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


# Evaluation on the training plan's stages: its own graph, and mini-batches of any size.
#
# The evaluation graph is captured on its own (dropout off, perhaps no labels), so its blocks are matched
# to the training plan's stages by name, and new ones by their parameters and what they read. A mini-batch that
# the plan's micro-batches do not divide is run in up to three parts: whole micro-batches on all ranks,
# then whole loss units and a last smaller unit on the first data position of each stage.


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPart:
    """Some samples of an evaluation mini-batch and the plan that runs them."""

    first_sample: int
    plan: PipelinePlan


def evaluation_plan(
    plan: PipelinePlan, graph: BlockGraph, *, parameters: Set[str], held: Sequence[Set[str]]
) -> PipelinePlan:
    """Return ``plan`` with its stages holding the blocks of an evaluation graph.

    A stage may end up without blocks (the loss stage, when there are no labels).

    Args:
        parameters: names of the model's parameters, without buffers.
        held: those of them that each stage of ``plan`` holds.

    Raises:
        PlanError: no stage holds all the parameters that a block reads in evaluation.
    """
    groups = match_blocks(plan, graph, parameters=parameters, held=held)
    stages = tuple(
        dataclasses.replace(stage, blocks=tuple(blocks), in_flight=1)
        for stage, blocks in zip(plan.stages, groups, strict=True)
    )
    edges = stage_edges(graph, groups, [stage.context for stage in stages])
    return dataclasses.replace(plan, graph=graph.fingerprint, stages=stages, edges=edges)


def match_blocks(
    plan: PipelinePlan, graph: BlockGraph, *, parameters: Set[str], held: Sequence[Set[str]]
) -> list[list[str]]:
    """Return the blocks of another graph of the plan's model that each stage runs.

    Args:
        parameters, held: as of `evaluation_plan`.

    Raises:
        PlanError: no stage holds all the parameters that a block reads.
    """
    stage_of = {block: index for index, stage in enumerate(plan.stages) for block in stage.blocks}
    matched: dict[str, int] = {}
    for block in graph.blocks:
        sources = [matched[edge.src] for edge in graph.edges if edge.dst == block.name]
        earliest = max(sources, default=0)
        needed = parameters & set(block.parameters)
        if block.name in stage_of:
            matched[block.name] = stage_of[block.name]
        else:  # new in evaluation (a head that training skips): where its parameters are, after what it reads
            matched[block.name] = next(
                (stage for stage in range(earliest, len(held)) if needed <= held[stage]), earliest
            )
        if not needed <= held[matched[block.name]]:
            raise PlanError(
                f"evaluation runs {block.name} on stage {plan.stages[matched[block.name]].name}, which does not hold "
                f"{sorted(needed - held[matched[block.name]])[:3]}; ask for other outputs, or evaluate after "
                "save_pretrained with the plain model"
            )
    return [[b.name for b in graph.blocks if matched[b.name] == index] for index in range(len(plan.stages))]


def split_evaluation(plan: PipelinePlan, num_samples: int) -> tuple[EvaluationPart, ...]:
    """Return plans that together run ``num_samples`` samples, each a multiple of what it takes."""
    # Micro-batches of 4 and 8, loss units of 2, 21 samples: 16 in whole micro-batches on all ranks, then 4 as two
    # units, then one unit of 1. A mini-batch that 8 divides is the first part alone.
    step = math.lcm(*(stage.micro_batch_size for stage in plan.stages))
    parts = []
    first = 0
    for size in (step, plan.loss_unit, 0):
        count = (num_samples - first) // size * size if size else num_samples - first
        if count:
            parts.append(EvaluationPart(first_sample=first, plan=_sized(plan, count, whole=size == step)))
            first += count
    return tuple(parts)


MOST_AT_ONCE = 4
"""Batches of an evaluation that one plan runs, a power of two: plans for more take longer to prove than they save."""


def groups_of(num_batches: int) -> Iterator[slice]:
    """Yield which batches run as one: powers of two, so that few plans serve any number.

    >>> [(group.start, group.stop) for group in groups_of(11)]
    [(0, 4), (4, 8), (8, 10), (10, 11)]
    """
    first = 0
    while first < num_batches:
        count = min(MOST_AT_ONCE, 1 << ((num_batches - first).bit_length() - 1))
        yield slice(first, first + count)
        first += count


def parts_of(plan: PipelinePlan, batch: Batch) -> list[tuple[EvaluationPart, Batch]]:
    """Return the plans that together run a batch, each with what it runs of it; units are never taken apart."""
    if isinstance(batch, UnitBatch):  # a unit is the sample of its plan's arithmetic
        units = batch.units
        return [
            (part, UnitBatch(units=units[part.first_sample : part.first_sample + part.plan.mini_batch]))
            for part in split_evaluation(plan_of_units(plan), len(units))
        ]
    count = count_samples(batch)
    return [
        (part, take_samples(batch, part.first_sample, part.plan.mini_batch, count))
        for part in split_evaluation(plan, count)
    ]


def _sized(plan: PipelinePlan, mini_batch: int, *, whole: bool) -> PipelinePlan:
    if whole:
        return dataclasses.replace(plan, mini_batch=mini_batch)
    unit = min(plan.loss_unit, mini_batch)

    def single(stage: Stage) -> Stage:
        # where ranks are idle, weights that all of them hold in parts are gathered before anything runs
        ranks = stage.model_ranks(0)
        sharded_bytes = stage.sharded_bytes if ranks == stage.ranks else 0
        return dataclasses.replace(stage, ranks=ranks, micro_batch_size=unit, sharded_bytes=sharded_bytes)

    return dataclasses.replace(
        plan, mini_batch=mini_batch, loss_unit=unit, stages=tuple(single(stage) for stage in plan.stages)
    )
