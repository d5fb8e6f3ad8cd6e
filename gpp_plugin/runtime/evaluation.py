"""Evaluation on the training plan's stages: its own graph, and mini-batches of any size.

The evaluation graph is captured on its own (dropout off, perhaps no labels), so its blocks are matched
to the training plan's stages by name, and new ones by their parameters and what they read. A mini-batch that
the plan's micro-batches do not divide is run in up to three parts: whole micro-batches on all ranks,
then whole loss units and a last smaller unit on the first data position of each stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.plan.make import stage_edges


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
    return dataclasses.replace(
        plan, graph=fingerprint(graph), stages=stages, edges=stage_edges(graph, groups)
    )


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


def _sized(plan: PipelinePlan, mini_batch: int, *, whole: bool) -> PipelinePlan:
    if whole:
        return dataclasses.replace(plan, mini_batch=mini_batch)
    unit = min(plan.loss_unit, mini_batch)

    def single(stage: Stage) -> Stage:
        return dataclasses.replace(stage, ranks=stage.tensor_ranks(0), micro_batch_size=unit)

    return dataclasses.replace(
        plan, mini_batch=mini_batch, loss_unit=unit, stages=tuple(single(stage) for stage in plan.stages)
    )
