"""The table of planners by name, and the one call that runs any of them and checks its answer."""

from __future__ import annotations

import dataclasses
import difflib
import pkgutil
from collections.abc import Callable

from gpp_plugin.errors import PlanError
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.asynchronous import to_asynchronous
from gpp_plugin.plan.complete import complete_plan
from gpp_plugin.plan.request import PlanRequest, check_request
from gpp_plugin.plan.tied_blocks import joined_request, parted
from gpp_plugin.plan.validate import validate_plan

Planner = Callable[[PlanRequest], PipelinePlan]

# Named as entry points are, so that a planner is loaded when it is first asked for: reading the names imports
# none, and planners that compare others (`auto`) may import this table.
_PLANNERS = {
    "auto": "gpp_plugin.plan.auto:auto_plan",
    "autopipe": "gpp_plugin.plan.autopipe:autopipe_plan",
    "dapple": "gpp_plugin.plan.dapple:dapple_plan",
    "dawnpiper": "gpp_plugin.plan.dawnpiper:dawnpiper_plan",
    "graphpipe": "gpp_plugin.plan.graphpipe:graphpipe_plan",
    "pipedream": "gpp_plugin.plan.pipedream:pipedream_plan",
    "piper": "gpp_plugin.plan.piper:piper_plan",
    "stock_1f1b": "gpp_plugin.plan.stock:stock_plan",
    "uniform": "gpp_plugin.plan.uniform:uniform_plan",
    "vpipe": "gpp_plugin.plan.vpipe:vpipe_plan",
}

_ASYNCHRONOUS = ("dawnpiper", "vpipe")
"""Planners that count weights and activations of an asynchronous pipeline themselves."""


def planner_names() -> tuple[str, ...]:
    """Return the names of all planners, sorted."""
    return tuple(sorted(_PLANNERS))


def make_plan(name: str, request: PlanRequest) -> PipelinePlan:
    """Run the planner called ``name`` and check what it returns.

    Raises:
        PlanError: there is no such planner, or the request contradicts itself.
        PlanInfeasible: no plan meets the request; the message says what to change.
    """
    names = planner_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise PlanError(f"no planner {name!r}{hint} (planners: {', '.join(names)})")
    check_request(request)
    plan = complete_plan(_plan_in_mode(name, request), request.graph, request.profile)
    validate_plan(
        plan,
        request.graph,
        profile=request.profile,
        cluster=request.cluster,
        memory_limit_bytes=request.memory_limit_bytes,
        zero_stage=request.zero_stage,
    )
    assert plan.num_ranks == request.num_ranks, "a planner left ranks idle"
    assert request.num_stages in (None, len(plan.stages)), "a planner made another number of stages"
    assert request.data_parallel is None or {s.degree for s in plan.stages} == {request.data_parallel}
    return plan


def _plan_in_mode(name: str, request: PlanRequest) -> PipelinePlan:
    """Run a planner; where it knows synchronous pipelines only, its stages are made asynchronous afterwards.

    Blocks that share a parameter are then one block to it (`tied_blocks`).
    """
    if request.mode == "sync" or name in _ASYNCHRONOUS:
        return run_planner(name, request)
    joint, joined = joined_request(request)
    plan = run_planner(name, dataclasses.replace(joint, mode="sync", vertical_sync=False))
    return to_asynchronous(parted(plan, request, joined), request)


def run_planner(name: str, request: PlanRequest) -> PipelinePlan:
    """Run a planner on a checked request, without validation; for planners that compare others.

    Raises:
        PlanInfeasible: it finds no plan.
    """
    planner: Planner = pkgutil.resolve_name(_PLANNERS[name])
    return planner(request)
