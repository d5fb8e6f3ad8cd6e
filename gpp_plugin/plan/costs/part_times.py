"""What parts of a stage's tasks take: half a forward, and a backward in two parts."""

from __future__ import annotations

import dataclasses

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.costs.cost_model import CostModel


def knows_split_times(profile: Profile) -> bool:
    """Return whether the profile says what input and weight gradients take, each by itself."""
    # derived costs always do; measured and given ones where the two parts were timed
    return profile.source == "analytic" or any(
        (cost.split_factor, cost.input_share) != (1.0, 0.5) for cost in profile.costs
    )


def with_part_times(plan: PipelinePlan, costs: CostModel) -> PipelinePlan:
    """Return the plan with what half a forward and a backward in two parts take, as the profile says."""
    stages = []
    for stage in plan.stages:
        blocks, local = costs.indices(stage.blocks), stage.local_batch_size
        input_us, weight_us = costs.split_times(blocks, local, stage.ranks)
        stages.append(
            dataclasses.replace(
                stage,
                half_forward_us=costs.stage_times(blocks, local / 2, stage.ranks)[0],
                input_gradient_us=input_us,
                weight_gradient_us=weight_us,
            )
        )
    return dataclasses.replace(plan, stages=tuple(stages))
