"""Micro-batch sizes by the names that a plan gives its stages (``vision_model.0-1``), applied to the finished plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batch_rules import batch_rules, blocks_under, nearest_names
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.make import complete_plan, with_in_flight
from gpp_plugin.plan.memory.fitting import fitter_for
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.stage_names import find_stage, namer_of
from gpp_plugin.plan.validate_request import validate_for


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
    """Return the sizes asked for by the index of the stage that each key means.

    Raises:
        PlanError: a key means no stage or several, or two keys ask one stage for different sizes.
    """
    asked: dict[int, int] = {}
    for key, size in sizes.items():
        index = find_stage(plan, graph, key)
        if asked.setdefault(index, size) != size:
            raise PlanError(
                f"{key!r} asks stage {plan.stages[index].name!r} for {size} samples at a time and another key for "
                f"{asked[index]}; remove one of them"
            )
    return asked


def resize_stages(plan: PipelinePlan, request: PlanRequest, sizes: Mapping[str, int]) -> PipelinePlan:
    """Return ``plan`` with micro-batches of ``sizes`` (by stage name), in-flight counts and costs following.

    Raises:
        PlanError: there is no such stage, or its ranks or operators do not allow the size.
        PlanInfeasible: the memory does not suffice.
    """
    # The stages stay and all that follows from sizes is made anew, in this order: times a micro-batch, in-flight
    # counts, memory, and what must be swapped or recomputed for it to fit. Stages a -> b of one rank each with 4
    # samples, b asked for 8, mini-batches of 32:
    #
    #     micro-batches   a  8 of 4, b  4 of 8       two of a's make one of b's
    #     in flight       a  2 -> 4, b  1            two that b computes on, and two for b's next task
    #
    # Rules are asked without ``keep_units``: that a stage takes units is a default, which naming it overrules.
    asked = stage_sizes(plan, request.graph, sizes)
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(dataclasses.replace(request, keep_units=False))
    stages = []
    for index, stage in enumerate(plan.stages):
        size = asked.get(index, stage.micro_batch_size)
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
