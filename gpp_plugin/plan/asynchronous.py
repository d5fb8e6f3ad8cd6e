"""Makes an asynchronous plan of one that was planned to step once a mini-batch.

Stages and ranks stay. Each stage runs 1F1B and holds as many micro-batches as an endless pipeline needs, counted
from the sinks and not limited by the mini-batch, and with them as many sets of weights (PipeDream, section 3.3);
what it swaps and recomputes is chosen anew for that, where the request allows any. A
mini-batch takes as many micro-batches as it has times the slowest stage.
"""

from __future__ import annotations

import dataclasses

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.plan.fitting import fitter_for
from gpp_plugin.plan.registry import PlanRequest
from gpp_plugin.plan.stock import STOCK
from gpp_plugin.schedule.async_1f1b import asynchronous_in_flight, check_asynchronous


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
    reduce_us = costs.reduce_times(dataclasses.replace(plan, mini_batch=plan.stages[0].micro_batch_size))
    fitter = fitter_for(request, costs)
    stages, slowest = [], 0.0
    for index, (stage, count) in enumerate(zip(plan.stages, asynchronous_in_flight(plan), strict=True)):
        rows = costs.indices(stage.blocks)
        held = costs.stage_memory(rows, degree=stage.degree, local=stage.local_batch_size, in_flight=count)
        stashed = (count - 1) * round(float(costs.parameter_bytes[rows].sum()))
        stage = dataclasses.replace(
            stage,
            schedule="1f1b",
            k=1,
            num_sliced=0,
            joins_last_slice=False,
            in_flight=count,
            backward_us=costs.stage_times(rows, stage.local_batch_size)[1],
            memory_bytes=held + stashed,
            memory=None,
        )
        stages.append(stage if fitter is None else fitter.fitted_stage(stage, stashed_bytes=stashed))
        stage = stages[-1]
        slowest = max(slowest, stage.forward_us + stage.backward_us + reduce_us[index])
    made = dataclasses.replace(plan, stages=tuple(stages), mode="async")
    check_asynchronous(made)
    return dataclasses.replace(made, iteration_us=made.num_micro_batches(0) * slowest)
