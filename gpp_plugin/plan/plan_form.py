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
from gpp_plugin.errors import GppError, PlanError
from gpp_plugin.ir.plan import PipelinePlan, Stage, cost_key
from gpp_plugin.ir.schedule import TaskKind
from gpp_plugin.ir.serialize import from_envelope, load
from gpp_plugin.ir.tensors import DTYPE_BYTES, LayoutKind, TensorSpec
from gpp_plugin.ir.timeline import EventKind, Timeline
from gpp_plugin.plugins import SCHEDULES, k_of
from gpp_plugin.schedule.build import build_schedules

MOST_TASKS = 1_000_000
"""Of all stages in a mini-batch: what a schedule of a thousand ranks has."""


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
    # in the order in which later checks rely on earlier ones
    check_stages(plan)
    _check_ranks(plan)
    _check_batches(plan)
    _check_edges(plan)
    _check_tensors(plan)
    _check_names(plan)
    _check_in_flight(plan)
    _check_progress(plan)


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
        if stage.tensor < 1 or len(stage.ranks) % stage.tensor:
            raise PlanError(
                f"stage {stage.name!r}: a tensor size of {stage.tensor} does not divide its {len(stage.ranks)} ranks"
            )
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
    is_same = (first.ranks, first.tensor) == (second.ranks, second.tensor)
    if max(first.tensor, second.tensor) > 1 and not is_same:
        raise PlanError(
            f"rank {rank} holds stages {first.name!r} (tensor size {first.tensor} on ranks {list(first.ranks)}) and "
            f"{second.name!r} ({second.tensor} on {list(second.ranks)}); stages with tensor ranks share a grid whole: "
            "give both the same ranks and tensor size, or ranks of their own"
        )


def _check_batches(plan: PipelinePlan) -> None:
    if plan.mini_batch % plan.loss_unit:
        raise PlanError(f"loss unit {plan.loss_unit} does not divide the mini-batch of {plan.mini_batch}")
    for index, stage in enumerate(plan.stages):
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
        count = plan.num_micro_batches(index)
        if stage.num_sliced > count or stage.k > count:
            raise PlanError(
                f"stage {stage.name!r}: k is {stage.k} and num_sliced {stage.num_sliced}, of {count} micro-batches; "
                "each is at most all of them"
            )
    num_tasks = 2 * sum(plan.num_micro_batches(index) for index in range(len(plan.stages)))
    if num_tasks > MOST_TASKS:
        raise PlanError(
            f"the stages run {num_tasks} tasks in a mini-batch of {plan.mini_batch}, more than the {MOST_TASKS} that "
            "are simulated or run; take larger micro-batches"
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
    """Refuse shards that are not equal, or lie along the samples' axis.

    Args:
        edge: its name; ``stage``: the one that holds ``tensors`` as shards along ``axis``.

    Raises:
        PlanError: it names the tensor.
    """
    if axis is None or stage.tensor == 1:
        return
    for spec in tensors:
        if not 0 <= axis < len(spec.shape) or spec.shape[axis] % stage.tensor:
            raise PlanError(
                f"edge {edge}: stage {stage.name!r} holds {spec.name!r} of shape "
                f"{spec.shape} as {stage.tensor} shards along axis {axis}, which do not divide it; pad it, or "
                "choose another tensor size"
            )
        if spec.layout.kind is LayoutKind.BATCH and spec.layout.axis == axis:
            raise PlanError(
                f"edge {edge}: axis {axis} of {spec.name!r} holds the samples, which data "
                "positions share out; shard another axis over tensor ranks"
            )


def _check_in_flight(plan: PipelinePlan) -> None:
    """A stage must hold what its successors hold or are about to take, or the pipeline stops."""
    for i, stage in enumerate(plan.stages):
        micro_batches = plan.num_micro_batches(i)
        most = len(plan.stages) if plan.mode == "async" else micro_batches  # async mini-batches overlap
        if not 1 <= stage.in_flight <= most:
            raise PlanError(
                f"stage {stage.name!r}: {stage.in_flight} micro-batches in flight of {most}; "
                "at least one, at most all"
            )
    for edge in plan.edges:
        src, dst = plan.stages[edge.src], plan.stages[edge.dst]
        held, needed = src.in_flight * src.micro_batch_size, dst.micro_batch_size
        if held < needed:
            raise PlanError(
                f"stage {src.name!r} holds at most {held} samples in flight and {dst.name!r} takes {needed} "
                "at a time; the pipeline would stop"
            )


def _check_progress(plan: PipelinePlan) -> None:
    """Play every stage's order without times: with these in-flight counts all tasks must get their turn.

    A forward needs its samples from every producer, a backward its samples' gradients from every consumer that returns
    some.
    """
    totals = [plan.num_micro_batches(i) for i in range(len(plan.stages))]
    done = [[0, 0] for _ in plan.stages]  # forwards and backwards each stage has run
    orders = _forwards_and_backwards(plan)

    def has_samples(way: int, stage: int, other: int) -> bool:
        end = (done[stage][way] + 1) * plan.stages[stage].micro_batch_size
        return done[other][way] * plan.stages[other].micro_batch_size >= end

    feeders: list[tuple[list[int], list[int]]] = [([], []) for _ in plan.stages]
    for edge in plan.edges:
        feeders[edge.dst][0].append(edge.src)
        if edge.gradient_tensors:
            feeders[edge.src][1].append(edge.dst)
    moved = True
    while moved:
        moved = False
        for stage in range(len(plan.stages)):
            while sum(done[stage]) < len(orders[stage]):
                way = orders[stage][sum(done[stage])]
                if not all(has_samples(way, stage, other) for other in feeders[stage][way]):
                    break
                done[stage][way] += 1
                moved = True
    stuck = [stage.name for i, stage in enumerate(plan.stages) if done[i][1] < totals[i]]
    if stuck:
        held = [stage.in_flight for i, stage in enumerate(plan.stages) if done[i][1] < totals[i]]
        raise PlanError(
            f"stages {stuck} would wait for each other with {held} micro-batches in flight; allow the first of "
            f"them more, or give them the same {name_of('micro_batch_sizes')}"
        )


def _forwards_and_backwards(plan: PipelinePlan) -> list[list[int]]:
    """Return each stage's order as 0 for a forward and 1 for a backward.

    Under 1F1B a stage runs ``in_flight`` forwards, then k backwards and k forwards in turn. Every other schedule
    (zero bubble, greedy) has an order of its own for the same counts: a sink of 4 micro-batches of 4 samples in flight
    behind a stage of 2 of 8 runs 0F0 0F1 0F2 0F3 0B0 0B1 under zero bubble. Under 1F1B its fifth forward came between
    the two backwards, and waited for the stage that waits for the second.
    """
    if any(k_of(stage.schedule) is None for stage in plan.stages):
        return [
            [
                int(task.kind is not TaskKind.FORWARD)
                for task in schedule.tasks
                if task.kind is not TaskKind.WEIGHT_GRADIENT and task.half != 0
            ]
            for schedule in build_schedules(plan)
        ]
    orders = []
    for index, stage in enumerate(plan.stages):
        total = plan.num_micro_batches(index)
        order = [0] * min(stage.in_flight, total)
        while len(order) < 2 * total:
            # Before its backward of group g a stage has run in_flight + g k forwards, or all there are.
            order += [1] * min(stage.k, total - order.count(1)) + [0] * min(stage.k, total - order.count(0))
        orders.append(order)
    return orders
