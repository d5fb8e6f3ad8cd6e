"""Micro-batch sizes by the names that a plan gives its stages (``vision_model.0``), applied to the finished plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batches import batch_rules, blocks_under, nearest_names
from gpp_plugin.plan.complete import complete_plan
from gpp_plugin.plan.costs import CostModel
from gpp_plugin.plan.fitting import fitter_for
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.stages import with_in_flight
from gpp_plugin.plan.validate import validate_plan


def names_a_stage(graph: BlockGraph, key: str) -> bool:
    """Return whether ``key`` can only be a stage's name: a module's with a number that no module has.

    Raises:
        PlanError: it is neither that, nor a module path, nor ``loss``; the message has the nearest names.
    """
    if key == "*":
        return False
    try:
        blocks_under(graph, key)
    except PlanError:
        numbered = re.fullmatch(r"(.+)\.\d+", key)
        if numbered is None:
            raise PlanError(f"no module or stage {key!r} in the model{nearest_names(graph, key)}") from None
        blocks_under(graph, numbered[1])
        return True
    return False


def resize_stages(plan: PipelinePlan, request: PlanRequest, sizes: Mapping[str, int]) -> PipelinePlan:
    """Return ``plan`` with micro-batches of ``sizes`` (by stage name), in-flight counts and costs following.

    Raises:
        PlanError: there is no such stage, or its ranks or operators do not allow the size.
        PlanInfeasible: the memory does not suffice.
    """
    names = [stage.name for stage in plan.stages]
    unknown = sorted(set(sizes) - set(names))
    if unknown:
        raise PlanError(f"the plan has no stage {unknown[0]!r}; its stages are {', '.join(names)}")
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(dataclasses.replace(request, keep_units=False))
    stages = []
    for stage in plan.stages:
        size = sizes.get(stage.name, stage.micro_batch_size)
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
        forward, backward = costs.stage_times(costs.indices(stage.blocks), size / stage.degree)
        stages.append(
            dataclasses.replace(stage, micro_batch_size=size, forward_us=forward, backward_us=backward)
        )
    resized = with_in_flight(dataclasses.replace(plan, stages=tuple(stages)), costs)
    fitter = fitter_for(request, costs)
    if fitter is not None:
        resized = fitter.fitted(resized)
    resized = complete_plan(resized, request.graph, request.profile)
    validate_plan(
        resized,
        request.graph,
        profile=request.profile,
        cluster=request.cluster,
        memory_limit_bytes=request.memory_limit_bytes,
        zero_stage=request.zero_stage,
    )
    return resized
