"""Full recompute: every layer of a finished plan runs its forward again before its backward (Chen et al., 2016).

A stage keeps what enters its layers, and for one layer at a time what is inside. That is the classic checkpointing
of activations, which costs about a forward more whatever memory there is; `capuchin` recomputes what must be.

A layer that drops nothing is left alone, and so is the last one of a stage with a single micro-batch in flight:
its backward follows its forward. A stage that is the user's own module runs again as a whole (`recompute_modules`).

Source: Chen et al. 2016 (arXiv 1604.06174)
Tests: tests/plan/test_full_recompute.py, tests/stage_graph/test_captured.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.ir.profile import ModuleMemory
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.costs.memory_formula import memory_breakdown
from gpp_plugin.plan.linear_order import layer_bounds
from gpp_plugin.plan.memory.capuchin import Interval, StageChoice, StageOptimizer
from gpp_plugin.plan.memory.fitting import whole_again
from gpp_plugin.plan.memory.memory_chain import StageChain
from gpp_plugin.plan.memory.operator_chain import GraphTensors, PipelineShape
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.selection import rank_limit, validate_for
from gpp_plugin.plan.split_backwards import pending_bytes, splits_backwards, with_part_times


def recompute_fully(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return the plan with every layer recomputed, and with swaps only where it needs them to fit beside.

    What the plan swapped or recomputed before is replaced.

    Raises:
        PlanError: it is not known what the model keeps for backward.
        PlanInfeasible: a stage does not fit even so.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    everything = GraphTensors(costs)
    modules = request.profile.modules
    if not everything.names and not modules:
        raise PlanError(
            f"full recompute needs the operators of {plan.model!r}, which is not captured; write "
            f"{setting_of('memory.recompute', 'auto')} and let its modules checkpoint themselves"
        )
    stages = tuple(
        stage
        if request.profile.module(stage.blocks) is not None
        else _recomputed(stage, plan.num_versions(index), request, everything)
        for index, stage in enumerate(plan.stages)
    )
    plan = dataclasses.replace(plan, stages=stages)
    if modules:
        return recompute_modules(plan, request)
    if splits_backwards(plan):
        plan = with_part_times(plan, costs)
    return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))


def _recomputed(stage: Stage, num_versions: int, request: PlanRequest, everything: GraphTensors) -> Stage:
    costs = everything.costs.on(stage)
    if costs is not everything.costs:
        everything = GraphTensors(costs)
    rows, local = costs.indices(stage.blocks), stage.local_batch_size
    chain = StageChain(everything, rows, local, degree=stage.degree)
    stash = costs.stashed_bytes(rows, num_versions)
    limit = min(rank_limit(request, rank) for rank in stage.ranks)
    stash += pending_bytes(stage, costs, stage.pending)  # what is held beside all that is saved
    shape = PipelineShape(
        num_stages=1,
        num_micro_batches=stage.in_flight,
        limits=(limit - stash,),
        host_bytes_per_s=min(costs.cluster.devices[rank].host_bytes_per_s for rank in stage.ranks),
        schedule=request.schedule,
        counts=(stage.in_flight,),
    )
    optimizer = StageOptimizer(chain, shape, recompute=True, swap="swap" in request.memory_optimization)
    choice = optimizer.fitted(0, *chain.whole, _layers(optimizer, chain, stage.in_flight))
    if choice.excess_bytes > 0:
        raise PlanInfeasible(_explain(stage, choice, stash, limit, request))
    added = choice.memory.added_us if choice.memory is not None else 0.0
    return dataclasses.replace(
        stage,
        backward_us=costs.stage_times(rows, local, stage.ranks)[1] + added,
        memory_bytes=round(choice.memory_bytes) + stash,
        memory=choice.memory,
    )


def _layers(optimizer: StageOptimizer, chain: StageChain, in_flight: int) -> Sequence[Interval]:
    """Return the layers of a stage that gain something."""
    start, stop = chain.whole
    bounds = [start + bound for bound in layer_bounds(chain.names[start:stop])]
    layers = list(zip(bounds, bounds[1:], strict=False))
    if in_flight == 1:
        layers.pop()
    weighed = optimizer.weigh(0, start, stop, segments=layers).memory
    segments = () if weighed is None else weighed.recomputed
    return [layer for layer, s in zip(layers, segments, strict=True) if s.bytes > s.held_bytes]


def _explain(stage: Stage, choice: StageChoice, stash: int, limit: int, request: PlanRequest) -> str:
    also = " and swapped" if "swap" in request.memory_optimization else ""
    return (
        f"stage {stage.name!r} needs {choice.memory_bytes + stash:.0f} bytes with every layer recomputed{also}, a rank "
        f"of it may use {limit}: {choice.excess_bytes:.0f} too many with {stage.in_flight} micro-batches of "
        f"{stage.local_batch_size} samples in flight; lower {name_of('micro_batch_sizes')}, or add ranks or "
        "stages"
    )


def recompute_modules(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return the plan with all its modules run again, whatever memory there is.

    Those that gain nothing by it stay as they are.

    Raises:
        PlanInfeasible: a stage does not fit even so.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    stages = tuple(_run_again(stage, costs, request.profile.module(stage.blocks)) for stage in plan.stages)
    changed = dataclasses.replace(plan, stages=stages)
    parts = memory_breakdown(changed, request.profile, graph=request.graph, zero_stage=request.zero_stage)
    needs = [
        old.memory_bytes if new is old else part.total
        for old, new, part in zip(plan.stages, stages, parts, strict=True)
    ]
    changed = changed.with_each(memory_bytes=needs)
    changed = dataclasses.replace(changed, iteration_us=evaluate_us(changed, costs))
    validate_for(changed, request)
    return changed


def _run_again(stage: Stage, costs: CostModel, module: ModuleMemory | None) -> Stage:
    if module is None:
        return stage
    local = stage.local_batch_size
    memory = whole_again(module, local=local, in_flight=stage.in_flight, forward_us=stage.forward_us)
    if memory is None:
        return stage
    backward_us = costs.on(stage).stage_times(costs.indices(stage.blocks), local, stage.ranks)[1]
    return dataclasses.replace(stage, memory=memory, backward_us=backward_us + memory.added_us)
