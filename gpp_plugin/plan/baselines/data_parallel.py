"""Plain data parallelism: the whole model as one stage on all ranks, what every plan is held against.

Nothing is pipelined. Ranks divide the samples, or groups of context and tensor ranks do; ZeRO shares out optimizer
state, gradients and parameters among them. It is the first candidate of every search, and the first row of every
comparison.

A loss over all samples of a mini-batch (CLIP's) has no such plan on several ranks. Its users gather the features of all
ranks instead, and compute the loss of the mini-batch on each (`gathered_features`): that is estimated, not run here.

Source: ZeRO (arXiv 1910.02054), section 5; CLIP (arXiv 2103.00020), section 2.4, on gathered features
Tests: tests/plan/test_data_parallel.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from gpp_plugin.config.key_names import setting_of
from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.tensors import divisors
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us, finished_plan
from gpp_plugin.plan.costs.memory_formula import complete_plan
from gpp_plugin.plan.make import StageDraft, build_plan
from gpp_plugin.plan.refine.refine import Candidate, Refiner
from gpp_plugin.plan.request import (
    BatchRules,
    PlanRequest,
    batch_rules,
    coupled_blocks,
    one_stage_a_rank,
    usual_sizes,
)
from gpp_plugin.plan.selection import best_optimized, best_plan, memory_excess

PLAIN = "plain data parallel"
LEAST_GAIN = 1e-3
"""By which part a plan that the request does not allow must be quicker to be shown."""


def plain_stages(request: PlanRequest, rules: BatchRules) -> Iterator[tuple[StageDraft]]:
    """Yield the ways to run the whole model as one stage: its grids, and micro-batches of all sizes."""
    if request.num_stages not in (None, 1) or request.must_share_ranks:
        return
    blocks = tuple(block.name for block in request.graph.blocks)
    for grid in rules.model.allowed(blocks):
        degree, rest = divmod(request.num_ranks, grid.size)
        if rest or request.data_parallel not in (None, degree):
            continue
        for size in rules.sizes(blocks, degree):
            draft = StageDraft(blocks=blocks, degree=degree, micro_batch_size=size)
            yield (dataclasses.replace(draft, tensor=grid.tensor, context=grid.context),)


def plain_candidates(refiner: Refiner) -> list[Candidate]:
    """Return the best candidate of one stage that fits, if any: with which a search begins."""
    drafts = plain_stages(refiner.request, refiner.rules)
    found = [refiner.from_drafts(each, each[0].micro_batch_size) for each in drafts]
    return sorted((each for each in found if each.score[0] == 0), key=lambda each: each.score)[:1]


def plain_plans(request: PlanRequest) -> list[PipelinePlan]:
    """Return finished plans of one stage that fit: of each ZeRO stage that is open the quickest, best first.

    Where none of a stage fits as it is, it is one that fits by what the request allows for memory.
    """
    # without blocks that mix samples a stage has micro-batches of any size, whatever the loss unit
    units = loss_units(request) if request.is_unit_open else [request.loss_unit]
    found = []
    for stage in zero_stages(request):
        each_closed = [closed(request, stage, unit) for unit in units]
        plans = [plan for each in each_closed if (plan := _plain_plan(each, best_plan)) is not None]
        if not plans and request.memory_optimization:
            plans = [plan for each in each_closed if (plan := _plain_plan(each, best_optimized)) is not None]
        if plans:
            plan = complete_plan(min(plans, key=_order), request.graph, request.profile)
            found.append(finished_plan(plan, settled(request, plan)))
    least_us = min((plan.iteration_us for plan in found), default=0.0)
    # of equals the earlier stage: with one micro-batch a step ZeRO 1 to 3 take as long
    return sorted(found, key=lambda plan: max(plan.iteration_us, least_us * (1 + LEAST_GAIN)))


def _order(plan: PipelinePlan) -> tuple[float, int]:
    return plan.iteration_us, plan.stages[0].memory_bytes


def _plain_plan(request: PlanRequest, choose: Callable[..., PipelinePlan | None]) -> PipelinePlan | None:
    """Return the quickest plan of one stage that fits, as ``choose`` finds it among drafts; None where none does."""
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    return choose(request, costs, plain_stages(request, batch_rules(request)), planner=PLAIN)


def zero_stages(request: PlanRequest) -> tuple[int, ...]:
    """Return the ZeRO stages that a plan may have, the one to begin with first."""
    if not request.is_zero_open:
        return (request.zero_stage,)
    # 1 takes hardly longer than 0 and holds less; on one rank there is nothing to share out
    return (0,) if request.num_ranks == 1 else (1, 0, 2) if request.mode == "async" else (1, 0, 2, 3)


def loss_units(request: PlanRequest) -> list[int]:
    """Return the loss units with which a step's loss is the same: the request's, or all where it may be any.

    A loss without coupled blocks is a sum over samples. One that is a mean over what it is given may have any unit
    where nobody said one.
    """
    if request.is_unit_open or (request.mode == "sync" and not coupled_blocks(request.graph)):
        return usual_sizes(request)
    return [request.loss_unit]


def best_unit(request: PlanRequest) -> int:
    """Return the loss unit that is searched with, where nobody named one: of the quickest chain of equal stages.

    In closed form, with links for reductions alone: p stages of d ranks run m micro-batches of a unit u a rank in
    (m + p - 1) t(u) / p, where t(u) is the whole model's time.
    """
    if not request.is_unit_open:
        return request.loss_unit
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rows = list(range(len(request.graph.blocks)))
    gradients = costs.group_gradient_bytes(rows)
    limit = min(request.rank_limits[: request.num_ranks])
    best = (float("inf"), request.loss_unit)
    for unit, degree in itertools.product(loss_units(request), divisors(request.num_ranks)):
        stages, count = request.num_ranks // degree, request.mini_batch // (unit * degree)
        if request.mini_batch % (unit * degree) or stages > len(rows):
            continue
        if costs.stage_memory(rows, degree=degree, local=unit, in_flight=stages) > limit * stages:
            continue
        us = (count + stages - 1) * sum(costs.stage_times(rows, unit)) / stages
        reduces_us = costs.num_reductions(count) * float(costs.reduction(degree).us(gradients / stages))
        best = min(best, (us + reduces_us, unit))
    return best[1]


def closed(request: PlanRequest, zero_stage: int, loss_unit: int) -> PlanRequest:
    """Return the request with this ZeRO stage and loss unit, neither open."""
    return dataclasses.replace(
        request, zero_stage=zero_stage, loss_unit=loss_unit, is_zero_open=False, is_unit_open=False
    )


def settled(request: PlanRequest, plan: PipelinePlan) -> PlanRequest:
    """Return the request with what it left open as the plan has it."""
    return closed(request, plan.zero_stage, plan.loss_unit)


def best_plain(request: PlanRequest) -> PipelinePlan:
    """Return the quickest plain plan, whatever the request says of stages and micro-batches.

    Of a loss that compares samples across ranks it is the estimate with gathered features.

    Raises:
        PlanInfeasible: the model fits on no rank, or samples cannot be shared out.
    """
    own = dataclasses.replace(
        one_stage_a_rank(request),
        num_stages=None,
        data_parallel=None,
        micro_batch_sizes=None,
        keep_units=False,
        schedule="1f1b",
    )
    under = [dataclasses.replace(own, zero_stage=stage) for stage in zero_stages(own)]
    gathered = [plan for each in under if (plan := gathered_features(each)) is not None]
    fitting = [plan for plan in gathered if memory_excess(request, plan)[0] <= 0]
    found = plain_plans(own)[:1] or fitting or gathered[-1:]
    if not found:
        raise PlanInfeasible(
            f"the whole model under ZeRO {zero_stages(own)[-1]} does not fit on a rank, or {request.num_ranks} ranks "
            f"cannot share out loss units of {request.loss_unit} samples"
        )
    return found[0]


def better_plain(request: PlanRequest, best_us: float) -> tuple[PipelinePlan, str] | None:
    """Return a plain plan quicker than ``best_us`` that the request does not allow, and what would, or None.

    It may be of any ZeRO stage, and recompute by need.
    """
    free = dataclasses.replace(
        request,
        is_zero_open=True,
        memory_optimization=tuple(dict.fromkeys((*request.memory_optimization, "recompute"))),
    )
    try:
        plan = best_plain(free)
    except PlanInfeasible:
        return None
    (stage,) = plan.stages
    if plan.iteration_us >= best_us * (1 - LEAST_GAIN):
        return None
    settings = []
    if not request.is_zero_open and plan.zero_stage != request.zero_stage:
        settings.append(setting_of("zero", plan.zero_stage))
    if stage.memory is not None and "recompute" not in request.memory_optimization:
        settings.append(setting_of("memory.recompute", "auto"))
    return plan, " ".join(settings)


def describe_plain(plan: PipelinePlan) -> str:
    """Return what a plan of one stage is: ``plain data parallel, ZeRO 1, tensor 2, recompute``."""
    (stage,) = plan.stages
    memory = stage.memory
    parts = [
        PLAIN,
        *(["gathered features"] if plan.is_estimate else []),
        f"ZeRO {plan.zero_stage}",
        *([f"context {stage.context}"] if stage.context > 1 else []),
        *([f"tensor {stage.tensor}"] if stage.tensor > 1 else []),
        *(["recompute"] if memory is not None and memory.recomputed else []),
        *(["swap"] if memory is not None and memory.swapped else []),
    ]
    return ", ".join(parts)


def gathered_features(request: PlanRequest) -> PipelinePlan | None:
    """Return an estimate of data parallelism with gathered features; None where the loss compares no samples.

    Each rank runs all blocks but those of the loss on its samples. What these read is gathered from all ranks, and its
    gradients are summed; each rank computes the loss of the whole unit. No plan of this package does so.
    """
    coupled, unit = coupled_blocks(request.graph), request.loss_unit
    if not coupled or request.num_ranks == 1 or unit % request.num_ranks:
        return None
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    blocks = tuple(block.name for block in request.graph.blocks)
    draft = StageDraft(blocks=blocks, degree=request.num_ranks, micro_batch_size=unit)
    plan = build_plan(request, [draft], planner=PLAIN, costs=costs)
    (stage,) = plan.stages
    rows, local = costs.indices(sorted(coupled)), unit / request.num_ranks
    whole, own = costs.stage_times(rows, unit), costs.stage_times(rows, local)
    read = {
        name: request.graph.tensors[name]
        for edge in request.graph.edges
        if edge.dst in coupled and edge.src not in coupled
        for name in edge.tensors
    }
    gathered = sum(spec.bytes_for(unit) for spec in read.values())
    # an all-gather of features there, and a reduce-scatter of their gradients back
    half_us = float(costs.collectives(stage.ranks).gather.us(gathered))
    held = costs.group_saved_bytes(rows, unit) - costs.group_saved_bytes(rows, local) + gathered
    stage = dataclasses.replace(
        stage,
        forward_us=stage.forward_us + whole[0] - own[0] + half_us,
        backward_us=stage.backward_us + whole[1] - own[1] + half_us,
        memory_bytes=stage.memory_bytes + round(held),
    )
    plan = dataclasses.replace(plan, stages=(stage,), is_estimate=True)
    return dataclasses.replace(plan, iteration_us=evaluate_us(plan, costs))
