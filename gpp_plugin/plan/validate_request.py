"""Checks a plan against the request it is for; `validate_plan` itself needs no request and no planner."""

from __future__ import annotations

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plan.validate_plan import validate_plan


def validate_for(plan: PipelinePlan, request: PlanRequest) -> None:
    """Refuse a plan that is not one of the request's graph, on its cluster, within its memory.

    Raises:
        PlanError, PlanInfeasible: as `validate_plan`.
    """
    validate_plan(
        plan,
        request.graph,
        profile=request.profile,
        cluster=request.cluster,
        memory_limit_bytes=request.memory_limit_bytes,
        zero_stage=request.zero_stage,
    )
