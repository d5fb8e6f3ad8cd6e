"""Plans whose stages and ranks are explicit: what is left to choose are micro-batch sizes, counts in flight, schedules.

Source: this project
Tests: tests/stage_graph/test_equality.py, tests/stage_graph/test_engine.py, tests/plan/test_asynchronous.py,
    tests/simulate/test_asynchronous.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpp_plugin.config.key_names import place_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.batch_rules import BatchRules, batch_rules, blocks_under, coupled_blocks, nearest_names
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.make import StageDraft, build_plan, complete_plan, with_in_flight
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import best_optimized, best_plan
from gpp_plugin.plan.stage_names import find_stage, name_stages, namer_of
from gpp_plugin.plan.validate_request import validate_for
from gpp_plugin.schedule.orders.async_1f1b import asynchronous_in_flight, check_asynchronous

# Micro-batch sizes by the names that a plan gives its stages (``vision_model.0-1``), applied to the finished plan.


def names_a_stage(graph: BlockGraph, key: str) -> bool:
    """Return whether ``key`` can only be a stage's name, or a part of one (``vision_model.0``).

    Raises:
        PlanError: it is neither that, nor a module path, nor ``loss``; the message has the nearest names.
    """
    if key == "*":
        return False
    try:
        blocks_under(graph, key)
    except PlanError:
        if not namer_of(graph).may_name(key):
            raise PlanError(f"no module or stage {key!r} in the model{nearest_names(graph, key)}") from None
        return True
    return False


def stage_sizes(plan: PipelinePlan, graph: BlockGraph, sizes: Mapping[str, int]) -> dict[int, int]:
    """Return the requested sizes by the index of the stage that each key means.

    Raises:
        PlanError: a key means no stage or several, or two keys ask one stage for different sizes.
    """
    requested: dict[int, int] = {}
    for key, size in sizes.items():
        index = find_stage(plan, graph, key)
        if requested.setdefault(index, size) != size:
            raise PlanError(
                f"{key!r} sets {size} samples at a time for stage {plan.stages[index].name!r} and another key sets "
                f"{requested[index]}; remove one of them"
            )
    return requested


def resize_stages(plan: PipelinePlan, request: PlanRequest, sizes: Mapping[str, int]) -> PipelinePlan:
    """Return ``plan`` with micro-batches of ``sizes`` (by stage name), in-flight counts and costs following.

    Raises:
        PlanError: there is no such stage, or its ranks or operators do not allow the size.
        PlanInfeasible: the memory does not suffice.
    """
    # The stages stay and all that follows from sizes is made anew, in this order: times a micro-batch, in-flight
    # counts, memory, and what must be swapped or recomputed for it to fit. Stages a -> b of one rank each with 4
    # samples, b with 8 requested, mini-batches of 32:
    #
    #     micro-batches   a  8 of 4, b  4 of 8       two of a's make one of b's
    #     in flight       a  2 -> 4, b  1            two that b computes on, and two for b's next task
    #
    # Rules are made without ``keep_units``: that a stage takes units is a default, which naming it overrules.
    requested = stage_sizes(plan, request.graph, sizes)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(dataclasses.replace(request, keep_units=False))
    stages = []
    for index, stage in enumerate(plan.stages):
        size = requested.get(index, stage.micro_batch_size)
        if size != stage.micro_batch_size:
            if rules.micro_batch_size(stage.blocks, stage.degree, size) != size:
                unit = request.loss_unit * stage.degree
                is_coupled = not rules.coupled.isdisjoint(stage.blocks)
                why = (
                    f"mixes samples and takes {unit} at a time"
                    if is_coupled
                    else "has as many ranks to share it"
                )
                raise PlanError(
                    f"stage {stage.name!r} of {stage.degree} ranks cannot take {size} samples at a time: it {why}"
                )
        forward, backward = costs.on(stage).stage_times(
            costs.indices(stage.blocks), size / stage.degree, stage.ranks
        )
        stages.append(
            dataclasses.replace(stage, micro_batch_size=size, forward_us=forward, backward_us=backward)
        )
    resized = with_in_flight(dataclasses.replace(plan, stages=tuple(stages)), costs)
    fitter = fitter_for(request, costs)
    if fitter is not None:
        resized = fitter.fitted(resized)
    resized = complete_plan(resized, request.graph, request.profile)
    validate_for(resized, request)
    return resized


# Makes an asynchronous plan of one that was planned to step once a mini-batch.
#
# Stages and ranks stay. Each stage runs 1F1B and holds as many micro-batches as an endless pipeline needs, counted
# from the sinks and not limited by the mini-batch, and with them sets of weights (`PipelinePlan.num_versions`); what
# it swaps and recomputes is chosen anew for that, where the request allows any.


def to_asynchronous(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return ``plan`` for mode async: in-flight counts, memory with stashed weights, and time.

    Raises:
        PlanError: its stages cannot step after every micro-batch, or it counts on its schedule.
    """
    has_memory = any(stage.memory is not None for stage in plan.stages)
    if plan.planner == STOCK or (has_memory and not request.memory_optimization):
        why = (
            "is DeepSpeed's synchronous pipeline; choose another planner"
            if plan.planner == STOCK
            else "swaps or recomputes, which mode async chooses anew and is not allowed to; write "
            f"{setting_of('memory.recompute', 'auto')} or {setting_of('memory.swap', 'auto')}"
        )
        raise PlanError(f"mode async: the plan of {plan.planner!r} {why}")
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    counts = asynchronous_in_flight(plan)
    stages = tuple(
        dataclasses.replace(
            stage, schedule="1f1b", k=1, num_sliced=0, joins_last_slice=False, in_flight=count, memory=None
        )
        for stage, count in zip(plan.stages, counts, strict=True)
    )
    made = dataclasses.replace(plan, stages=stages, mode="async", vertical_sync=request.vertical_sync)
    check_asynchronous(made)
    fitter = fitter_for(request, costs)
    fitted = tuple(_fitted(made, index, costs, fitter) for index in range(len(stages)))
    made = dataclasses.replace(made, stages=fitted)
    return dataclasses.replace(made, iteration_us=evaluate_us(made, costs))


def _fitted(plan: PipelinePlan, index: int, costs: CostModel, fitter: StageFitter | None) -> Stage:
    """Return a stage with its times and memory, and with what makes it fit."""
    stage = plan.stages[index]
    held, rows, local = (
        costs.memory_of(stage, stage.in_flight),
        costs.indices(stage.blocks),
        stage.local_batch_size,
    )
    costs = costs.on(stage)
    stashed = costs.stashed_bytes(rows, plan.num_versions(index))
    stage = dataclasses.replace(
        stage, backward_us=costs.stage_times(rows, local, stage.ranks)[1], memory_bytes=held + stashed
    )
    return stage if fitter is None else fitter.fitted_stage(stage, stashed_bytes=stashed)


EXPLICIT = "given"
"""What such plans name as their planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedStage:
    """A stage that the user defines.

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
        PlanError: a micro-batch size is requested twice, or does not divide the mini-batch.
        PlanInfeasible: a stage has no micro-batch size, or lacks memory.
    """
    stages = _with_names(stages, request.graph)
    rules = _rules(stages, request)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    candidates = [drafts for wish in rules.wishes() if (drafts := _drafts(stages, rules, wish)) is not None]
    if not candidates:
        _explain(stages, rules)
    plan = best_plan(request, costs, candidates, planner=EXPLICIT)
    if request.mode == "sync":  # async chooses anew what to swap and recompute
        optimized = best_optimized(request, costs, candidates, planner=EXPLICIT)
        if optimized is not None and (plan is None or optimized.iteration_us < plan.iteration_us):
            plan = optimized
    if plan is None:  # too large: the validator says what for
        plan = build_plan(request, candidates[0], planner=EXPLICIT, costs=costs)
    return in_mode(plan, request)


def in_mode(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a plan of explicit stages in the request's mode, complete and validated."""
    if request.mode == "async":
        plan = to_asynchronous(plan, request)
    plan = complete_plan(plan, request.graph, request.profile)
    validate_for(plan, request)
    return plan


def _with_names(stages: Sequence[FixedStage], graph: BlockGraph) -> list[FixedStage]:
    """Return the stages with names of their own for the pieces of captured parts, which begin with the part's."""
    explicit = [None if stage.is_piece else stage.name for stage in stages]
    names = name_stages(graph, [stage.blocks for stage in stages], explicit)
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
        requested = {fixed[block] for block in stage.blocks if block in fixed} - {size}
        if requested:
            raise PlanError(
                f"stage {stage.name!r}: micro_batch_size {size} is given with the stage and {requested.pop()} in "
                f"{place_of('micro_batch_sizes')}; remove one of them"
            )
        if rules.mini_batch % size:
            raise PlanError(
                f"stage {stage.name!r}: micro_batch_size {size} does not divide the mini-batch of "
                f"{rules.mini_batch}; choose a divisor"
            )
        fixed.update(dict.fromkeys(stage.blocks, size))
    # an explicit size of a stage wins over the wish to keep units, never over what mixes samples
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
        requested_size = f" of {stage.micro_batch_size}" if stage.micro_batch_size is not None else ""
        raise PlanInfeasible(
            f"stage {stage.name!r} on {stage.degree} x {stage.tensor} ranks has no micro-batch size{requested_size} "
            f"for a mini-batch of {rules.mini_batch}: {why}; change its ranks or sizes"
        )
    raise PlanInfeasible(
        f"no micro-batch size suits all stages of a mini-batch of {rules.mini_batch} with loss units of "
        f"{rules.loss_unit}; give micro_batch_size per stage"
    )
