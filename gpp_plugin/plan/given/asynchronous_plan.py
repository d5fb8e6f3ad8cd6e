"""Makes an asynchronous plan of one that was planned to step once a mini-batch.

Stages and ranks stay. Each stage runs 1F1B and holds as many micro-batches as an endless pipeline needs, counted
from the sinks and not limited by the mini-batch, and with them sets of weights (`PipelinePlan.num_versions`); what it
swaps and recomputes is chosen anew for that, where the request allows any.

Source: this project
Tests: tests/plan/test_asynchronous.py, tests/simulate/test_asynchronous.py
"""

from __future__ import annotations

import dataclasses

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage
from gpp_plugin.plan.baselines.stock_chain import STOCK
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.judge import judge_us
from gpp_plugin.plan.memory.fitting import StageFitter, fitter_for
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.schedule.orders.async_1f1b import asynchronous_in_flight, check_asynchronous


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
            else "swaps or recomputes, which mode async chooses anew and is not allowed to; set memory.recompute or "
            'memory.swap to "auto"'
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
    return dataclasses.replace(made, iteration_us=judge_us(made, costs))


def _fitted(plan: PipelinePlan, index: int, costs: CostModel, fitter: StageFitter | None) -> Stage:
    """Return a stage with its times and memory, and with what makes it fit."""
    stage = plan.stages[index]
    rows, local = costs.indices(stage.blocks), stage.local_batch_size
    costs = costs.on(stage)
    held = costs.stage_memory(rows, degree=stage.degree, local=local, in_flight=stage.in_flight)
    stashed = costs.stashed_bytes(rows, plan.num_versions(index))
    stage = dataclasses.replace(
        stage, backward_us=costs.stage_times(rows, local, stage.ranks)[1], memory_bytes=held + stashed
    )
    return stage if fitter is None else fitter.fitted_stage(stage, stashed_bytes=stashed)
