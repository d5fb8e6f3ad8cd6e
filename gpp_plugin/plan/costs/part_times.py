"""What parts of a stage's tasks take: half a forward, and a backward in two parts.

Where a stage swaps or recomputes, each part of its backward asks for what was saved, so segments run again in both, and
what is on the host comes back twice: for the input gradient ahead, as for a whole backward, and for the weight gradient
when it is read, with nothing to hide behind.

    whole    B      = backward + again + what of the transfers does not hide
    parts    I, W   = input + again + the same,  weight + again + the transfer back
"""

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
        own = costs.on(stage)
        input_us, weight_us = own.split_times(blocks, local, stage.ranks)
        if stage.memory is not None:
            rate = min(costs.cluster.devices[rank].host_bytes_per_s for rank in stage.ranks)
            input_us += stage.memory.added_us
            weight_us += stage.memory.recompute_us + stage.memory.swapped_bytes / rate * 1e6
        stages.append(
            dataclasses.replace(
                stage,
                half_forward_us=own.stage_times(blocks, local / 2, stage.ranks)[0],
                input_gradient_us=input_us,
                weight_gradient_us=weight_us,
            )
        )
    return dataclasses.replace(plan, stages=tuple(stages))
