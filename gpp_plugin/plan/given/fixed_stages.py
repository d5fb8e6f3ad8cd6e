"""Plans whose stages and ranks are given: what is left to choose are micro-batch sizes, counts in flight, schedules.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batch_rules import BatchRules, batch_rules, coupled_blocks
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.given.asynchronous_plan import to_asynchronous
from gpp_plugin.plan.make import StageDraft, build_plan, complete_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import best_optimized, best_plan
from gpp_plugin.plan.stage_names import name_stages
from gpp_plugin.plan.validate_request import validate_for

GIVEN = "given"
"""What such plans name as their planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedStage:
    """A stage that is given.

    Args:
        name: as the user gave it; of a captured part's piece that of the part.
        ranks: its grid, row by row; ``tensor`` of them a data position.
        micro_batch_size: None leaves it to the planner.
        is_piece: one of several stages of a captured part, called after what it holds (``tower.0-1``).
    """

    name: str
    blocks: tuple[str, ...]
    ranks: tuple[int, ...]
    tensor: int = 1
    micro_batch_size: int | None = None
    is_piece: bool = False

    @property
    def degree(self) -> int:
        """Return the data-parallel degree."""
        return len(self.ranks) // self.tensor


def fixed_plan(stages: Sequence[FixedStage], request: PlanRequest) -> PipelinePlan:
    """Return the quickest plan of these stages; those that lack memory swap or recompute where the request allows it.

    Raises:
        PlanError: a micro-batch size is asked for twice, or does not divide the mini-batch.
        PlanInfeasible: a stage has no micro-batch size, or lacks memory.
    """
    stages = _with_names(stages, request.graph)
    rules = _rules(stages, request)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    candidates = [drafts for wish in rules.wishes() if (drafts := _drafts(stages, rules, wish)) is not None]
    if not candidates:
        _explain(stages, rules)
    plan = best_plan(request, costs, candidates, planner=GIVEN)
    if request.mode == "sync":  # async chooses anew what to swap and recompute
        optimized = best_optimized(request, costs, candidates, planner=GIVEN)
        if optimized is not None and (plan is None or optimized.iteration_us < plan.iteration_us):
            plan = optimized
    if plan is None:  # too large: the validator says what for
        plan = build_plan(request, candidates[0], planner=GIVEN, costs=costs)
    if request.mode == "async":
        plan = to_asynchronous(plan, request)
    plan = complete_plan(plan, request.graph, request.profile)
    validate_for(plan, request)
    return plan


def _with_names(stages: Sequence[FixedStage], graph: BlockGraph) -> list[FixedStage]:
    """Return the stages with names of their own for the pieces of captured parts, which begin with the part's."""
    given = [None if stage.is_piece else stage.name for stage in stages]
    names = name_stages(graph, [stage.blocks for stage in stages], given)
    return [
        dataclasses.replace(
            stage,
            name=f"{stage.name}.{name}" if stage.is_piece and not name.startswith(f"{stage.name}.") else name,
        )
        for stage, name in zip(stages, names, strict=True)
    ]


def _rules(stages: Sequence[FixedStage], request: PlanRequest) -> BatchRules:
    rules = batch_rules(request)
    fixed = dict(rules.fixed)
    for stage in stages:
        size = stage.micro_batch_size
        if size is None:
            continue
        asked = {fixed[block] for block in stage.blocks if block in fixed} - {size}
        if asked:
            raise PlanError(
                f"stage {stage.name!r}: micro_batch_size {size} is given with the stage and {asked.pop()} in "
                "graph_pipeline.micro_batch_sizes; remove one of them"
            )
        if rules.mini_batch % size:
            raise PlanError(
                f"stage {stage.name!r}: micro_batch_size {size} does not divide the mini-batch of "
                f"{rules.mini_batch}; choose a divisor"
            )
        fixed.update(dict.fromkeys(stage.blocks, size))
    # a size given for a stage wins over the wish to keep units, never over what mixes samples
    coupled = (rules.coupled - fixed.keys()) | coupled_blocks(request.graph)
    return dataclasses.replace(rules, fixed=fixed, coupled=coupled)


def _drafts(stages: Sequence[FixedStage], rules: BatchRules, wish: int) -> list[StageDraft] | None:
    drafts = []
    for stage in stages:
        size = rules.micro_batch_size(stage.blocks, stage.degree, wish)
        if size is None:
            return None
        drafts.append(
            StageDraft(
                blocks=stage.blocks,
                degree=stage.degree,
                micro_batch_size=size,
                name=stage.name,
                ranks=stage.ranks,
                tensor=stage.tensor,
            )
        )
    return drafts


def _explain(stages: Sequence[FixedStage], rules: BatchRules) -> None:
    """Say which stage has no micro-batch size.

    Raises:
        PlanInfeasible: always.
    """
    for stage in stages:
        if any(rules.micro_batch_size(stage.blocks, stage.degree, wish) for wish in rules.wishes()):
            continue
        unit = rules.loss_unit * stage.degree
        why = (
            f"{stage.degree} data positions must divide a micro-batch and that the mini-batch"
            if rules.coupled.isdisjoint(stage.blocks)
            else f"it computes whole loss units of {rules.loss_unit}, so {unit} at a time"
        )
        given = f" of {stage.micro_batch_size}" if stage.micro_batch_size is not None else ""
        raise PlanInfeasible(
            f"stage {stage.name!r} on {stage.degree} x {stage.tensor} ranks has no micro-batch size{given} for a "
            f"mini-batch of {rules.mini_batch}: {why}; change its ranks or sizes"
        )
    raise PlanInfeasible(
        f"no micro-batch size suits all stages of a mini-batch of {rules.mini_batch} with loss units of "
        f"{rules.loss_unit}; give micro_batch_size per stage"
    )
