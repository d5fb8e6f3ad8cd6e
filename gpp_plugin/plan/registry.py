"""From options to the input of planners, and the one call that runs any planner and checks its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

from gpp_plugin.config.block import GraphPipelineConfig
from gpp_plugin.config.key_names import name_of
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.garbage import paused_collector
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.plan.baselines.data_parallel import best_unit, closed, plain_plans, settled, zero_stages
from gpp_plugin.plan.costs.memory_formula import complete_plan
from gpp_plugin.plan.explicit_plan import to_asynchronous
from gpp_plugin.plan.heterogeneous_devices import best_over_orders, exchange_stages
from gpp_plugin.plan.request import AXES, BAND, Axis, GridRules, PlanRequest, grid_rules, one_stage_a_rank
from gpp_plugin.plan.selection import simplest
from gpp_plugin.plan.tied_blocks import joined_request, parted
from gpp_plugin.plan.validate_plan import check_request, validate_for
from gpp_plugin.plugins import PLANNERS, find_planner, planning_schedule

PLACING = ("auto", "graphpipe")
"""Planners whose stages may be exchanged between nodes; those of papers place them as they do."""
KNOW_GRIDS = ("auto", "graphpipe", "piper")
"""Planners that choose context and tensor sizes; all others give every stage 1."""
TAKE_FOR_ALIKE = ("uniform", "pipedream", "autopipe", "piper", "dapple")
"""Planners of papers that know devices of one speed: they cut a model as if all were the quickest."""


def request_for(
    config: GraphPipelineConfig,
    *,
    graph: BlockGraph,
    profile: Profile,
    cluster: Cluster,
    num_ranks: int,
    mini_batch: int,
    loss_unit: int,
    micro_batch_sizes: dict[str, int] | None,
    zero_stage: int | str,
    smallest_local_batch: int = 1,
    is_unit_open: bool = False,
) -> PlanRequest:
    """Return what the options ask of a planner.

    Args:
        config: its keys; sizes of batches are those beside it.
        micro_batch_sizes: as of `PlanRequest`, without sizes that stages have by their names.
        zero_stage: ``auto`` leaves it open.
        is_unit_open: as of `PlanRequest`, where the mode has one loss for several units.
    """
    # what the user says of stages or their order is what was asked for, however little it gains
    said = (config.planner, config.stages, config.data_parallel, config.schedule)
    is_free = set(said) == {"auto"} and config.virtual_stages in (1, "auto") and config.mode == "sync"
    # "auto" leaves a key to the planner, which sees None
    virtual, limit = config.virtual_stages, config.memory.limit_gb
    return PlanRequest(
        graph=graph,
        profile=profile,
        cluster=cluster,
        num_ranks=num_ranks,
        mini_batch=mini_batch,
        loss_unit=loss_unit,
        num_stages=None if config.stages == "auto" else config.stages,
        granularity=config.granularity,
        micro_batch_sizes=micro_batch_sizes or None,
        schedule=planning_schedule(config.schedule),
        final_schedule=config.schedule,
        memory_limit_bytes=None if limit == "auto" else int(limit * 1e9),
        data_parallel=None if config.data_parallel == "auto" else config.data_parallel,
        zero_stage=zero_stage if isinstance(zero_stage, int) else 0,
        is_zero_open=zero_stage == "auto",
        is_unit_open=is_unit_open and config.mode == "sync",
        # with one loss a mini-batch there is nothing to pipeline unless the other stages take less
        keep_units=config.mode == "sync"
        and config.micro_batch_sizes != "search"
        and (config.units is not None or loss_unit < mini_batch),
        smallest_local_batch=smallest_local_batch,
        mode=config.mode,
        memory_optimization=config.memory.optimization,
        vertical_sync=config.vertical_sync,
        virtual_stages=None if virtual == "auto" else virtual,
        colocate=config.colocate == "auto",
        band=BAND if is_free else 0.0,
        tensor_parallel=None if config.tensor_parallel == "auto" else config.tensor_parallel,
        sequence_parallel=None if config.sequence_parallel == "auto" else config.sequence_parallel,
    )


def plan_open(name: str, request: PlanRequest, make: Callable[[PlanRequest], PipelinePlan]) -> PipelinePlan:
    """Return the finished plan with the shortest step of a request, which may leave its ZeRO stage or loss unit open.

    None is slower than plain data parallelism, and of those within the request's band of the shortest it is the one of
    the fewest stages (`simplest`). Stages are searched under ZeRO 1, which takes hardly longer than 0 and
    holds less, and under that of the best plain plan where it is 0, or quicker; under 2 and 3 too where nothing fits.
    Loss units are searched for plain plans alone; others have that of `best_unit`.

    Args:
        make: makes the finished plan, by planner ``name``, of a request that leaves neither open.

    Raises:
        PlanInfeasible: there is no plan; the message is of the first ZeRO stage.
    """
    check_request(request)
    plain = plain_plans(request)[:1] if name in PLACING and request.mode == "sync" else []
    first, *others = zero_stages(request)
    plans: list[PipelinePlan] = []
    problem: PlanInfeasible | None = None
    # searched once or twice, not once for each stage and unit: a plain plan of another takes next to no time
    wanted = [first, *(plan.zero_stage for plan in plain if plan.zero_stage != first)]
    for stage in dict.fromkeys((*wanted, *(stage for stage in others if stage > first))):
        # nothing is quicker under 2 or 3 but by what fits
        is_behind = stage > first and any(p.iteration_us <= q.iteration_us for p in plans for q in plain)
        if plans and (stage not in wanted or is_behind):
            break
        try:
            own = dataclasses.replace(request, zero_stage=stage)
            plans.append(make(closed(own, stage, best_unit(own))))
        except PlanInfeasible as error:
            problem = problem or error
    for each in plain:
        own, (stage_of_all,) = settled(request, each), each.stages
        bounds = (plan.iteration_us * (1 + request.band * (len(plan.stages) > 1)) for plan in plans)
        if min(bounds, default=math.inf) <= each.iteration_us * (1 + 1e-9):
            continue
        own = dataclasses.replace(
            own,
            num_stages=1,
            micro_batch_sizes={"*": stage_of_all.micro_batch_size},
            tensor_parallel=own.tensor_parallel if stage_of_all.tensor == 1 else stage_of_all.tensor,
            sequence_parallel=own.sequence_parallel if stage_of_all.context == 1 else stage_of_all.context,
        )
        with contextlib.suppress(PlanInfeasible):  # of what else a job says of stages
            plans.append(make(own))
    if not plans:
        assert problem is not None
        raise problem
    return simplest(plans, request.band)


@paused_collector()  # it would walk the model's graphs and every stage tried again and again: they hold no circles
def make_plan(name: str, request: PlanRequest) -> PipelinePlan:
    """Run the planner called ``name`` and check what it returns: a plan whose ranks hold one stage each.

    Where the request is for ranks of several stages it is what these are found from (`share_ranks`).

    Raises:
        PlanError: there is no such planner, or the request contradicts itself.
        PlanInfeasible: no plan fulfils the request; the message says what to change.
    """
    if name not in PLANNERS:
        raise PlanError(
            f"no planner {name!r}{PLANNERS.suggestion(name)} (planners: {', '.join(PLANNERS.names())})"
        )
    check_request(request)
    if request.mode == "async":
        request = dataclasses.replace(request, tensor_parallel=1, sequence_parallel=1)
    wanted = grid_rules(request)
    request = one_stage_a_rank(request)
    plan = _plan_in_mode(name, request)
    if not isinstance(plan, PipelinePlan):
        raise PlanError(
            f"planner {name!r} returned a {type(plan).__name__}, not a PipelinePlan; use another planner"
        )
    if name in PLACING and plan.mode == "sync":
        plan = exchange_stages(plan, request)
    validate_for(plan, request)
    _check_answer(name, plan, request, wanted)
    if name in TAKE_FOR_ALIKE and request.cluster.is_mixed:
        note = f"planner {name} takes devices of several speeds for alike, as the quickest; times are those of each"
        plan = dataclasses.replace(plan, notes=(*plan.notes, note))
    for axis in AXES:
        if axis.wanted(request) is None:
            plan = dataclasses.replace(plan, notes=(*plan.notes, _size_note(axis, name, plan, request)))
    return complete_plan(plan, request.graph, request.profile)


def _check_answer(name: str, plan: PipelinePlan, request: PlanRequest, wanted: GridRules) -> None:
    """Refuse a plan, in itself sound, that is not what was requested.

    Raises:
        PlanError: names the planner.
    """
    degrees = {stage.degree for stage in plan.stages}
    for what, expected, has in (
        ("ranks", request.num_ranks, plan.num_ranks),
        ("stages", request.num_stages, len(plan.stages)),
        ("ranks a stage", request.data_parallel, max(degrees) if len(degrees) == 1 else sorted(degrees)),
        ("samples a mini-batch", request.mini_batch, plan.mini_batch),
        ("samples a loss", request.loss_unit, plan.loss_unit),
        ("as its mode", request.mode, plan.mode),
    ):
        if expected not in (None, has):
            raise PlanError(
                f"planner {name!r} made a plan of {has} {what} where {expected} are requested; use another planner"
            )
    for stage in plan.stages if request.graph.sharding or request.graph.context else ():
        allowed = wanted.allowed(stage.blocks)
        for axis, size, sizes in zip(
            AXES, stage.grid, zip(*allowed, strict=True) if allowed else ((), ()), strict=True
        ):
            if size not in sizes:
                possible = (
                    " or ".join(map(str, dict.fromkeys(sizes))) or "none that all its blocks are to have"
                )
                raise PlanError(
                    f"planner {name!r} gave stage {stage.name!r} a {axis.ranks.split()[0]} size of {size} and "
                    f"{name_of(axis.key)} asks for {possible}; use one of {', '.join(KNOW_GRIDS)}"
                )


def _size_note(axis: Axis, name: str, plan: PipelinePlan, request: PlanRequest) -> str:
    """Return what became of sizes along an axis that were left to the planner, and why where all are 1."""
    size_of = {stage.name: stage.grid[AXES.index(axis)] for stage in plan.stages}
    sizes = sorted(set(size_of.values()))
    known = {block for block, degrees in axis.degrees(request.graph).items() if degrees}
    whole = [block.name for block in request.graph.blocks if block.name not in known]
    some = f"{len(known)} of {len(request.graph.blocks)} blocks can be divided"
    if sizes != [1]:
        each = ", ".join(f"{stage} {size}" for stage, size in size_of.items() if size > 1)
        return f"{axis.key} auto: {each}{' (1 elsewhere)' if 1 in sizes else ''}; {some}"
    if not known:
        reasons = axis.why_whole(request.graph)
        why = next((f"{block!r}: {why}" for block, why in reasons.items()), f"{whole[0]!r}, ...")
        return f"{axis.key} auto: 1, as none of the blocks can be divided among ranks: {why}"
    if name not in KNOW_GRIDS:
        return f"{axis.key} auto: 1, as planner {name} supports no {axis.ranks}"
    return f"{axis.key} auto: 1 for all stages, as nothing larger is quicker and fits; {some}"


def _plan_in_mode(name: str, request: PlanRequest) -> PipelinePlan:
    """Run a planner; where it supports synchronous pipelines only, its stages are made asynchronous afterwards.

    Blocks that share a parameter are then one block to it (`tied_blocks`).
    """
    if request.mode == "sync" or getattr(find_planner(name), "is_asynchronous", False):
        return run_planner(name, request)
    joint, joined = joined_request(request)
    plan = run_planner(name, dataclasses.replace(joint, mode="sync", vertical_sync=False))
    return to_asynchronous(parted(plan, request, joined), request)


def run_planner(name: str, request: PlanRequest) -> PipelinePlan:
    """Run a planner on a checked request, without validation; for planners that compare others.

    Where devices are of several speeds it is run once for each order of their kinds, and the quickest plan is taken.

    Raises:
        PlanInfeasible: it finds no plan.
    """
    return best_over_orders(request, find_planner(name))
