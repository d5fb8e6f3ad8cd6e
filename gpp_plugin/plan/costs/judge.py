"""The simulator as the judge of plans: links shared, reductions after the last backward.

An asynchronous plan is not simulated: its pipeline never runs dry, so it takes its micro-batches times the slowest
stage (PipeDream, section 3.1).

Source: this project
Tests: tests/plan/test_quality.py
"""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import estimate_plan_us
from gpp_plugin.plan.costs.time_formula import us_per_sample
from gpp_plugin.schedule.orders.forward_only import forward_only_stages
from gpp_plugin.simulate.predict import predict_iteration_us

MAX_RANK_TASKS = 60_000
"""Tasks summed over ranks that are simulated one by one; above, the ranks of a stage move as one."""


def judge_us(plan: PipelinePlan, costs: CostModel) -> float:
    """Return the predicted microseconds of one mini-batch of ``plan``.

    Plans of very many ranks are predicted by `estimate`, without contention for links. Not so where a rank holds
    several stages: there each stage would have a clock of its own.
    """
    if plan.mode == "async":
        return _full_pipeline_us(plan, costs)
    tasks = sum(2 * plan.num_micro_batches(i) * stage.degree for i, stage in enumerate(plan.stages))
    if tasks > MAX_RANK_TASKS and not plan.shares_ranks:
        return estimate_plan_us(plan, costs)
    return predict_iteration_us(
        plan,
        cluster=costs.cluster,
        forward_only_stages=forward_only_stages(plan),
        reduce_us=costs.reduce_times(plan),
    )


def _full_pipeline_us(plan: PipelinePlan, costs: CostModel) -> float:
    one = dataclasses.replace(plan, mini_batch=plan.stages[0].micro_batch_size)
    reduce_us = costs.reduce_times(one)
    # Of a micro-batch, where `us_per_sample` says of a sample: every one is followed by its reduction.
    slowest = max(
        us_per_sample(stage.forward_us + stage.backward_us, 1, reduce_us=reduce_us[index])
        for index, stage in enumerate(plan.stages)
    )
    return float(plan.num_micro_batches(0) * slowest)
