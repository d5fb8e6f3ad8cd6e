"""What every plan is, whatever graph it is for: checked where a plan comes from a file, and by the validator.

Types and sizes of single values are the reader's (`ir.typed_leaves`). Here is how they go together: edges lead to later
stages, ranks are 0..n-1, micro-batches divide the mini-batch, names mean something, and all tasks get their turn.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpp_plugin.config.key_names import name_of
from gpp_plugin.errors import GppError, PlanError, ScheduleError, first_line
from gpp_plugin.ir.plan import PipelinePlan, Stage, cost_key, forward_only_stages
from gpp_plugin.ir.serialize import check_leaves, from_envelope, load, save
from gpp_plugin.ir.tensors import DTYPE_BYTES, LayoutKind, TensorSpec
from gpp_plugin.ir.timeline import EventKind, Timeline
from gpp_plugin.plugins import SCHEDULES
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.build_graph import build_task_graph
from gpp_plugin.schedule.checks.order_check import check_grid
from gpp_plugin.schedule.event_loop import run_task_graph
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.schedule.program_sets import joined_windows

MOST_TASKS = 1_000_000
"""Of all ranks in a mini-batch: what a schedule of a thousand ranks has."""


def read_plan(path: str | Path) -> PipelinePlan:
    """Return the plan in a file.

    Raises:
        GppError: the file is missing, no plan of this release, or its parts do not go together; it names the file.
    """
    plan = load(PipelinePlan, path)
    try:
        check_form(plan)
    except GppError as error:
        raise type(error)(f"{path}: {error}") from error
    return with_own_cost(plan)


def write_plan(plan: PipelinePlan, path: str | Path) -> None:
    """Write a plan that `read_plan` reads: one that it would refuse is not written.

    Raises:
        GppError: as `read_plan`.
    """
    check_leaves(plan)
    check_form(plan)
    save(plan, path)


def plan_of_envelope(plain: Any) -> PipelinePlan:
    """Return the plan that the content of such a file is.

    Raises:
        GppError: as `read_plan`, without a path.
    """
    plan = from_envelope(PipelinePlan, plain)
    check_form(plan)
    return with_own_cost(plan)


def with_own_cost(plan: PipelinePlan) -> PipelinePlan:
    """Return a plan without its step's costs where these are of another one: it was changed since."""
    is_own = plan.cost is None or plan.cost.plan == cost_key(plan)
    return plan if is_own else dataclasses.replace(plan, cost=None)


def check_form(plan: PipelinePlan) -> None:
    """Refuse a plan whose parts do not go together.

    Raises:
        PlanError: it says which, with their values and the fix.
    """
    if plan.is_estimate:
        raise PlanError(
            f"planner {plan.planner!r}: the plan is an estimate, to compare others with; nothing runs it: plan again"
        )
    # in the order in which later checks rely on earlier ones
    check_stages(plan)
    _check_ranks(plan)
    _check_batches(plan)
    _check_edges(plan)
    _check_tensors(plan)
    _check_names(plan)
    _check_programs(plan)


def check_events(timeline: Timeline, plan: PipelinePlan) -> None:
    """Refuse a timeline whose events are of ranks, stages or edges that the plan does not have.

    Raises:
        PlanError: it names the first such event.
    """
    limits = {"rank": plan.num_ranks, "stage": len(plan.stages), "edge": len(plan.edges)}
    limits["peer"] = plan.num_ranks
    for number, event in enumerate(timeline.events):
        for key, limit in limits.items():
            if getattr(event, key) >= limit:
                raise PlanError(
                    f"events[{number}].{key}: {getattr(event, key)} is not in the plan, which has {limit}; give the "
                    "plan that was run"
                )
        is_message = event.kind in (EventKind.SEND, EventKind.RECEIVE)
        if is_message and min(event.edge, event.peer) < 0:
            raise PlanError(
                f"events[{number}]: a {event.kind.value} with edge {event.edge} and peer {event.peer}; both must be in "
                "the plan: record it again"
            )
        if event.end_us < event.start_us:
            raise PlanError(
                f"events[{number}].end_us: {event.end_us:g} is before its start, {event.start_us:g}; record it again"
            )


def check_stages(plan: PipelinePlan) -> None:
    """Refuse stages that hold nothing or the same blocks, and names that mean nothing.

    Raises:
        PlanError: it says which.
    """
    if not plan.stages:
        raise PlanError("the plan has no stages; make it anew with gpp plan --out")
    names = [stage.name for stage in plan.stages]
    if len(set(names)) < len(names):
        raise PlanError(f"stage names repeat: {names}; give each stage its own")
    seen: dict[str, str] = {}
    for stage in plan.stages:
        if not stage.blocks:
            raise PlanError(f"stage {stage.name!r} has no blocks; remove it")
        if stage.schedule not in SCHEDULES:
            raise PlanError(
                f"stage {stage.name!r}: no schedule {stage.schedule!r}; give one of {', '.join(SCHEDULES.names())}"
            )
        for block in stage.blocks:
            if block in seen:
                raise PlanError(f"block {block!r} is in stages {seen[block]!r} and {stage.name!r}; keep one")
            seen[block] = stage.name
        for segment in stage.memory.recomputed if stage.memory is not None else ():
            foreign = [block for block in segment.blocks if seen.get(block) != stage.name]
            if foreign or not segment.blocks:
                raise PlanError(
                    f"stage {stage.name!r}: recomputes blocks {foreign[:3]} that it does not hold; plan again"
                )


def _check_names(plan: PipelinePlan) -> None:
    names = [stage.name for stage in plan.stages]
    for name in plan.losses:
        if name not in names:
            raise PlanError(f"losses: there is no stage {name!r}; the stages are {names}")
    for part in plan.memory:
        if part.stage not in names:
            raise PlanError(f"memory: there is no stage {part.stage!r}; the stages are {names}")


def _check_ranks(plan: PipelinePlan) -> None:
    owners: dict[int, list[Stage]] = {}
    for stage in plan.stages:
        if not stage.ranks:
            raise PlanError(f"stage {stage.name!r} has no ranks")
        check_grid(stage)
        twice = [rank for rank, count in Counter(stage.ranks).items() if count > 1]
        if twice:
            raise PlanError(f"stage {stage.name!r} lists rank {twice[0]} twice; keep one")
        for rank in stage.ranks:
            for other in owners.setdefault(rank, []):
                _check_grids(rank, other, stage)
            owners[rank].append(stage)
    if set(owners) != set(range(len(owners))):
        ranks = sorted(owners)
        odd = next(rank for place, rank in enumerate(ranks) if rank != place)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        raise PlanError(
            f"the plan's ranks are {shown}; they must be 0..{len(ranks) - 1} (look at rank {odd})"
        )


def _check_grids(rank: int, first: Stage, second: Stage) -> None:
    """Collectives inside tasks must come in one order on all ranks of a grid: shared whole, or of single ranks."""
    grids = [(stage.ranks, stage.context, stage.tensor) for stage in (first, second)]
    if max(first.model_parallel, second.model_parallel) > 1 and grids[0] != grids[1]:
        texts = [
            f"{stage.name!r} (context x tensor of {stage.context} x {stage.tensor} on ranks {list(stage.ranks)})"
            for stage in (first, second)
        ]
        raise PlanError(
            f"rank {rank} holds stages {texts[0]} and {texts[1]}; stages with context or tensor ranks share a grid "
            "whole: give both the same ranks and sizes, or ranks of their own"
        )


def _check_batches(plan: PipelinePlan) -> None:
    if plan.mini_batch % plan.loss_unit:
        raise PlanError(f"loss unit {plan.loss_unit} does not divide the mini-batch of {plan.mini_batch}")
    for stage in plan.stages:
        size, degree = stage.micro_batch_size, stage.degree
        if size < 1 or plan.mini_batch % size:
            raise PlanError(
                f"stage {stage.name!r}: micro-batches of {size} do not divide the mini-batch of "
                f"{plan.mini_batch}; choose a divisor"
            )
        if size % degree:
            raise PlanError(
                f"stage {stage.name!r}: {degree} ranks do not divide a micro-batch of {size} samples; "
                f"change {name_of('micro_batch_sizes')} or the number of ranks"
            )


def _check_edges(plan: PipelinePlan) -> None:
    found: set[tuple[object, ...]] = set()
    for number, edge in enumerate(plan.edges):
        if not 0 <= edge.src < edge.dst < len(plan.stages):
            raise PlanError(
                f"edges[{number}] runs from stage {edge.src} to stage {edge.dst} of {len(plan.stages)}; data flows to "
                "a later stage of the plan"
            )
        key = (edge.src, edge.dst, edge.src_shard_axis, edge.dst_shard_axis)
        if key in found:
            raise PlanError(
                f"two edges join the same pair of stages, {plan.edge_name(number)}; make one of them"
            )
        found.add(key)
        names = (*edge.batch_tensors, *edge.whole_tensors)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise PlanError(f"edge {plan.edge_name(number)} lists {twice[0]!r} twice; keep one")
        foreign = set(edge.gradient_tensors) - set(names)
        if foreign:
            raise PlanError(
                f"edge {plan.edge_name(number)} returns gradients of {sorted(foreign)[:3]}, which it does not send; "
                "plan again"
            )


def _check_tensors(plan: PipelinePlan) -> None:
    specs = {spec.name: spec for spec in plan.tensors}
    if len(specs) < len(plan.tensors):
        raise PlanError("two of the plan's tensors have one name; plan again")
    for spec in plan.tensors:
        if spec.dtype not in DTYPE_BYTES:
            raise PlanError(
                f"tensor {spec.name!r} has dtype {spec.dtype!r}; the dtypes are {', '.join(DTYPE_BYTES)}"
            )
        if spec.layout.kind is LayoutKind.BATCH and spec.layout.axis >= len(spec.shape):
            raise PlanError(
                f"tensor {spec.name!r} of shape {spec.shape} has its samples along axis {spec.layout.axis}, which it "
                "does not have; plan again"
            )
    for number, edge in enumerate(plan.edges):
        for is_batch, names in ((True, edge.batch_tensors), (False, edge.whole_tensors)):
            for name in names:
                known = specs.get(name)
                if known is not None and (known.layout.kind is LayoutKind.BATCH) is not is_batch:
                    kind = "batch" if is_batch else "whole"
                    raise PlanError(
                        f"edge {plan.edge_name(number)} lists {name!r}, whose layout is {known.layout.kind.value}, "
                        f"as a {kind} tensor; plan again"
                    )
        for index, axis in ((edge.src, edge.src_shard_axis), (edge.dst, edge.dst_shard_axis)):
            own = [specs[name] for name in (*edge.batch_tensors, *edge.whole_tensors) if name in specs]
            check_shards(plan.edge_name(number), plan.stages[index], axis, own)


def check_shards(edge: str, stage: Stage, axis: int | None, tensors: Iterable[TensorSpec]) -> None:
    """Refuse tensor ranks' shards that are not equal, and parts along no axis or the samples'.

    Args:
        edge: its name; ``stage``: the one that holds ``tensors`` in parts along ``axis``.

    Raises:
        PlanError: it names the tensor.
    """
    if axis is None or stage.model_parallel == 1:
        return
    for spec in tensors:
        if stage.context > 1 and not 0 <= axis < len(spec.shape):
            raise PlanError(
                f"edge {edge}: stage {stage.name!r} holds {spec.name!r} of shape {spec.shape} in {stage.context} parts "
                f"along axis {axis}, which it does not have; plan again"
            )
        if stage.context == 1 and (not 0 <= axis < len(spec.shape) or spec.shape[axis] % stage.tensor):
            raise PlanError(
                f"edge {edge}: stage {stage.name!r} holds {spec.name!r} of shape "
                f"{spec.shape} as {stage.tensor} shards along axis {axis}, which do not divide it; pad it, or "
                "choose another tensor size"
            )
        if spec.layout.kind is LayoutKind.BATCH and spec.layout.axis == axis:
            raise PlanError(
                f"edge {edge}: axis {axis} of {spec.name!r} holds the samples, which data "
                "positions share out; cut another axis for ranks of the same samples"
            )


def _check_programs(plan: PipelinePlan) -> None:
    """Refuse a plan whose tasks do not all get their turn: its task graph is made and played as lowering does.

    So what is accepted here is what lowering makes programs of, whatever the schedules, frozen stages and shared ranks.
    """
    try:
        windows = windows_of(plan).first_steady if plan.mode == "async" else 1
        num_tasks = plan.num_rank_tasks * windows
        if num_tasks > MOST_TASKS:
            raise PlanError(
                f"the ranks run {num_tasks} tasks in a mini-batch of {plan.mini_batch}, more than the {MOST_TASKS} "
                "that are simulated or run; take larger micro-batches"
            )
        if plan.mode == "async":
            graph = joined_windows(plan, windows, forward_only_stages=forward_only_stages(plan))
        else:
            graph = build_task_graph(plan, build_schedules(plan))
        run_task_graph(graph, [0.0] * len(graph.stage))
    except ScheduleError as error:
        raise PlanError(first_line(error)) from error
