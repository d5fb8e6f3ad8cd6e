"""What one rank of a stage needs at its peak: the one formula, for numbers and for numpy arrays alike.

    M  =  P / p + (v - 1) G + G / g + O / o + I held all the time
          + P - P / p                           while one of the stage's tasks runs
          + c s                                saved for backward by the micro-batches in flight
          + w + t + r                           beside that, for a moment

Legend, all in bytes of one rank unless said otherwise:

    P, G, O  parameters, gradients and optimizer state of the stage's blocks
    g, o     ranks that share gradients and optimizer state out: 1, or those of data x context (ZeRO 2: both; 1: o)
    p        ranks that share parameters out: 1, or under ZeRO 3 those of data x context. So of one stage a rank needs
             at its peak what it needs under ZeRO 2; of several it holds one whole at a time, the largest (`rank_bytes`)
    v        versions of its weights: older ones are stashed of what is trained, G is as large (mode async)
    I        its part of the mini-batch
    c        micro-batches in flight (a number)
    s        what one micro-batch keeps for backward, less what is swapped or recomputed
    w        tensors back from the host, or made again, while they are used
    t        the most that one block holds while it runs
    r        under ZeRO 2 a backward's gradients are whole until they are reduced behind it. They are made while what
             the same micro-batch saved is freed, so only what they exceed it by comes on top: max(G - s, 0)

Example: P = G = 100, O = 200, two ranks under ZeRO 2, s = 40, c = 3, t = 7, nothing else:

    held 100 + 100 / 2 + 200 / 2 = 250;  in flight 3 x 40 = 120;  r = 100 - 40 = 60;  M = 250 + 120 + 7 + 60 = 437

Callers sum P, G, O, s over their blocks first: a stage's own blocks (`CostModel.stage_memory`), every interval of a
series as a matrix (`StageShapes.free_bytes`), differences of prefix sums (`OperatorChain.memory_bytes`,
`ChainCosts.memory`). All terms but t and r are linear, so the sums may be taken before or after. `memory_breakdown` has
the terms one by one. The validator and the oracles of the benchmarks have formulas of their own, on purpose.

Source of r: ours; what ZeRO shares out: Rajbhandari et al., ZeRO, section 5 (arXiv 1910.02054); v: PipeDream,
section 3.3 (arXiv 1806.03377).

Source: Megatron-LM (arXiv 1909.08053), section 3 (tensor ranks); DeepSpeed-Ulysses (arXiv 2309.14509), section 3.2
(context ranks); the cost: this project
Tests: tests/plan/test_tensor_sizes.py, tests/plan/test_costs.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpp_plugin.errors import PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph, BlockSharding
from gpp_plugin.ir.memory_report import MemoryCounts
from gpp_plugin.ir.plan import (
    MemoryBreakdown,
    ModelGrid,
    PipelinePlan,
    Stage,
    forward_only_stages,
    joined_breakdown,
)
from gpp_plugin.ir.profile import BlockCost, InputCost, Profile
from gpp_plugin.ir.tensors import LayoutKind, TensorSpec
from gpp_plugin.plan.costs.collective_costs import CollectiveCost, CollectiveCosts
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.schedule.build import build_schedules
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.schedule.messages import under_way_bytes
from gpp_plugin.schedule.orders.async_1f1b import windows_of
from gpp_plugin.schedule.program_sets import SYNCHRONOUS, ProgramSet, async_name, lower_async

# What one of t tensor ranks and of c context ranks has of each block: the one formula of times, bytes and sums.
#
# Legend, of a block at tensor size t (`BlockSharding`):
#
#     time     C ((1 - f) + f / t)  +  n all-reduces of S / n bytes (`collective_costs`), and likewise gathers
#     bytes    P ((1 - p) + p / t)      parameters; gradients and optimizer state by the trained share; saved likewise
#
#     C  forward or backward on one device, f the share of its operations that is divided; weight gradients of a whole
#        backward hide its sums (`BlockSharding.beside_share`)
#     n  all-reduces of one task, S bytes they sum at its samples, among the tensor ranks
#
# A layer of 100 us with f = 1 that sums 8 MB twice in a ring (450 GB/s, 3 us): at t = 2 50 + 2 (2 x 3) + 2 x 17.8 us.
#
# At context size c the same holds with a share of its own, but that parameters are whole, and so gradients and
# optimizer state. Both divide what is left by the other: operations C ((1 - f) + f / t) ((1 - g) + g / c). What tensor
# ranks sum is of their positions, and what context ranks exchange is of their heads. Keys and values of fewer groups
# than ranks are exchanged, and saved, by several ranks each.
#
# Blocks without sharding, and explicit stages, whose costs are of one rank already, stay as they are. The sums of a
# backward belong to its input gradient. Saved tensors (`SavedTensor`) shrink as the block that is charged with them.


class GridPrices(NamedTuple):
    """What collectives of a stage's tensor ranks take, and those of its context ranks."""

    tensor: CollectiveCosts = CollectiveCosts(CollectiveCost(((0.0, 0.0),)))
    context: CollectiveCosts = CollectiveCosts(CollectiveCost(((0.0, 0.0),)))


FREE = GridPrices()
"""Without ranks to divide anything."""


def sharded_by_block(graph: BlockGraph, tensor: int) -> dict[str, BlockSharding]:
    """Return by name the blocks of which ``tensor`` ranks hold a part each."""
    return {each.block: each for each in graph.sharding if tensor in each.degrees} if tensor > 1 else {}


def cut_by_block(graph: BlockGraph, context: int) -> dict[str, BlockSharding]:
    """Return by name the blocks of which ``context`` ranks compute parts of the positions."""
    return {each.block: each for each in graph.context if context in each.degrees} if context > 1 else {}


def part(share: float, ranks: int) -> float:
    """Return what one of so many ranks has of something of which ``share`` is divided.

    >>> part(0.5, 4)
    0.625
    """
    return (1.0 - share) + share / ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one rank has of a block: of its operations, parameters, what is trained, and what is saved."""

    flops: float = 1.0
    parameters: float = 1.0
    trained: float = 1.0
    saved: float = 1.0


def parts_by_block(graph: BlockGraph, grid: ModelGrid) -> dict[str, Parts]:
    """Return by name what one rank of a grid has of each block that it divides."""
    # A block of 100 MB of parameters, 80 of them in matrices that ranks cut, on 4 ranks: 20 + 80 / 4 = 40 MB, a part of
    # 0.4. The share is taken of the block's own bytes and laid on the profile's, which may be of another type. A frozen
    # block has no trained bytes: its share of none is 0, and nothing is divided of what is not there.
    found, tensor = {}, grid.tensor
    sharded, cut = sharded_by_block(graph, tensor), cut_by_block(graph, grid.context)
    for block in graph.blocks:
        own = Parts()
        if (shards := sharded.get(block.name)) is not None:
            own = Parts(
                flops=part(shards.flop_share, tensor),
                parameters=part(shards.parameter_bytes / max(block.parameter_bytes, 1), tensor),
                trained=part(shards.trainable_bytes / max(block.trainable_bytes, 1), tensor),
                saved=part(shards.saved_share, tensor),
            )
        if (each := cut.get(block.name)) is not None:
            own = dataclasses.replace(
                own,
                flops=own.flops * part(each.flop_share, grid.context),
                saved=own.saved
                * kept_of_positions(each, block.saved_bytes, grid.context, 1 if shards is None else tensor),
            )
        if own != WHOLE:
            found[block.name] = own
    return found


def copies_of(cut: BlockSharding, context: int, tensor: int = 1) -> int:
    """Return how many context ranks read each group of keys and values; 1 where their number divides the groups.

    Args:
        tensor: ranks that divide the block's groups first.

    >>> names = ("flop_share", "saved_share", "parameter_bytes", "trainable_bytes", "forward_sums", "backward_sums")
    >>> nothing = dict.fromkeys((*names, "forward_sum_bytes", "backward_sum_bytes"), 0)
    >>> layer = BlockSharding(block="layer", degrees=(2, 4, 8), groups=4, **nothing)
    >>> copies_of(layer, 2), copies_of(layer, 8), copies_of(layer, 4, tensor=2)
    (1, 2, 2)
    """
    return context // math.gcd(context, cut.groups // tensor) if cut.groups else 1


def kept_of_positions(cut: BlockSharding, saved_bytes: int, context: int, tensor: int) -> float:
    """Return what one of so many context ranks keeps for backward, over ``saved_bytes`` of a block that is not cut."""
    # 100 MB, all cut, on 4 ranks: 25 MB; and of 8 MB that are kept by heads and by positions 2 MB more
    more = (copies_of(cut, context, tensor) - 1) * cut.group_bytes + cut.twice_bytes
    return part(cut.saved_share, context) + more / context / max(saved_bytes, 1)


WHOLE = Parts()


def sharded_profile(profile: Profile, graph: BlockGraph, grid: ModelGrid) -> Profile:
    """Return the costs of one rank of a grid, collectives left out; what is not of the graph's blocks stays."""
    # What several blocks hold together is charged to the first of them: a tied embedding is held in
    # as many parts wherever it is, and a storage saved by several layers is as small as where it is made. Inputs of the
    # mini-batch stay: every rank of a data position reads the same samples.
    parts = parts_by_block(graph, grid)
    if not parts:
        return profile
    return dataclasses.replace(
        profile,
        costs=tuple(_cost_of(cost, parts.get(cost.block, WHOLE)) for cost in profile.costs),
        shared=tuple(
            dataclasses.replace(
                storage,
                bytes_per_sample=storage.bytes_per_sample * saved,
                bytes_fixed=storage.bytes_fixed * saved,
            )
            for storage in profile.shared
            for saved in [parts.get(storage.blocks[0], WHOLE).saved]
        ),
        tied=tuple(
            dataclasses.replace(
                tie,
                parameter_bytes=round(tie.parameter_bytes * own.parameters),
                gradient_bytes=round(tie.gradient_bytes * own.trained),
                optimizer_bytes=round(tie.optimizer_bytes * own.trained),
            )
            for tie in profile.tied
            for own in [parts.get(tie.blocks[0], WHOLE)]
        ),
    )


def _cost_of(cost: BlockCost, own: Parts) -> BlockCost:
    if own is WHOLE:
        return cost
    return dataclasses.replace(
        cost,
        forward_us=tuple(us * own.flops for us in cost.forward_us),
        backward_us=tuple(us * own.flops for us in cost.backward_us),
        saved_bytes_per_sample=cost.saved_bytes_per_sample * own.saved,
        saved_bytes_fixed=cost.saved_bytes_fixed * own.saved,
        parameter_bytes=round(cost.parameter_bytes * own.parameters),
        gradient_bytes=round(cost.gradient_bytes * own.trained),
        optimizer_bytes=round(cost.optimizer_bytes * own.trained),
        transient_bytes_per_sample=cost.transient_bytes_per_sample * own.saved,
        pending_bytes_per_sample=cost.pending_bytes_per_sample * own.saved,
    )


def sharded_graph(graph: BlockGraph, grid: ModelGrid) -> BlockGraph:
    """Return the graph with the saved tensors as one rank of a grid keeps them."""
    parts = parts_by_block(graph, grid)
    if not parts or not graph.saved:
        return graph
    saved = tuple(
        dataclasses.replace(each, bytes=round(each.bytes * parts.get(each.kept_by[0], WHOLE).saved))
        for each in graph.saved
    )
    return dataclasses.replace(graph, saved=saved)


Floats = npt.NDArray[np.float64]


def sum_times(graph: BlockGraph, grid: ModelGrid, price: CollectiveCosts) -> Floats:
    """Return [line, 7, block] microseconds of collectives: forward a task, forward a sample, backward a task, a sample.

    Then `BlockSharding.beside_share`, and of the backward's a task and a sample what weight gradients may hide. The
    least over the lines of a price is what they take (`CollectiveCost.us`); reduce-scatters and all-gathers are half a
    ring's all-reduce.
    """
    # On 4 ranks in a ring of 3 us and 450 GB/s, 2 sums of 8 MB together at one sample: 2 x 6 x 3 = 36 us a task, and
    # 6 / 4 x 8 MB / 450 GB/s = 26.7 us a sample. The first does not grow with a micro-batch, so that small ones are
    # dear on tensor ranks; the second does not shrink with more ranks, so that large sizes win less and less.
    sharded, cut = sharded_by_block(graph, grid.tensor), cut_by_block(graph, grid.context)
    found = np.zeros((len(price.all_reduce.lines), 7, len(graph.blocks)))
    ((step, of_gather),) = price.gather.lines or ((0.0, 0.0),)
    for i, block in enumerate(graph.blocks):
        own = sharded.get(block.name)
        if own is None:
            continue
        positions = part(cut[block.name].saved_share, grid.context) if block.name in cut else 1.0
        gathered = of_gather * positions / graph.num_samples
        for line, (latency, per_byte) in enumerate(price.all_reduce.lines):
            each = per_byte * positions / graph.num_samples
            sums, more = own.backward_sums * latency, own.backward_sum_bytes * each
            found[line, :, i] = (
                own.forward_sums * latency + own.forward_gathers * step,
                own.forward_sum_bytes * each + own.forward_gather_bytes * gathered,
                sums + own.backward_gathers * step,
                more + own.backward_gather_bytes * gathered,
                own.beside_share,
                sums + own.beside_gathers * step,
                more + own.beside_gather_bytes * gathered,
            )
    return found


def context_times(graph: BlockGraph, grid: ModelGrid, price: CollectiveCosts) -> Floats:
    """Return [line, 4, block] microseconds of collectives of context ranks: `sum_times` without what is hidden."""
    # On 4 ranks (3 us, 450 GB/s) a layer that exchanges q, k, v and attention's result, 8 MB each: 4 x 3 x 3 = 36 us
    # a forward, and 3 / 16 x 32 MB / 450 GB/s = 13.3 us; gathering the same would take 53. At tensor size 2 each rank
    # has half of the heads, and exchanges half of that.
    sharded, cut = sharded_by_block(graph, grid.tensor), cut_by_block(graph, grid.context)
    nothing = ((0.0, 0.0),)  # where numbers of ranks are tried that no link joins
    sums = price.all_reduce.lines or nothing
    ((of_gather, gathered),) = price.gather.lines or nothing
    ((of_exchange, exchanged),) = price.exchange.lines or nothing
    found = np.zeros((len(sums), 4, len(graph.blocks)))
    for i, block in enumerate(graph.blocks):
        own = cut.get(block.name)
        if own is None:
            continue
        heads = grid.tensor if block.name in sharded else 1
        more = (copies_of(own, grid.context, heads) - 1) * own.group_bytes
        for line, (of_sum, summed) in enumerate(sums):
            found[line, :, i] = (
                own.forward_sums * of_sum
                + own.forward_gathers * of_gather
                + own.forward_exchanges * of_exchange,
                own.forward_sum_bytes * summed
                + own.forward_gather_bytes * gathered
                + (own.forward_exchange_bytes + more) / heads * exchanged,
                own.backward_sums * of_sum
                + own.backward_gathers * of_gather
                + own.backward_exchanges * of_exchange,
                own.backward_sum_bytes * summed
                + own.backward_gather_bytes * gathered
                + (own.backward_exchange_bytes + more) / heads * exchanged,
            )
    found[:, 1::2] /= graph.num_samples
    return found


def boundary_bytes(graph: BlockGraph, blocks: Collection[str], tensor: int) -> tuple[list[int], list[int]]:
    """Return the bytes of each tensor that ``tensor`` ranks of a stage gather at its ends: forward, and backward.

    What leaves the stage in parts is made whole; of what is received the parts' gradients are.
    """
    # Layers 0 to 3 on two stages: the result of layer 1 is gathered in the forward of the first, and its gradient in
    # the backward of the second. Inside of a stage it stays in parts.
    sharded, own = sharded_by_block(graph, tensor), frozenset(blocks)
    known = {each.block: frozenset(each.cut_results) for each in graph.sharding}
    leaving, entering = dict[str, None](), dict[str, None]()
    for edge in graph.edges if sharded else ():
        names = [name for name in edge.tensors if name in known.get(edge.src, ())]
        if edge.src in own and edge.src in sharded and edge.dst not in own:
            leaving.update(dict.fromkeys(names))
        if edge.src not in own and edge.dst in own and edge.dst in sharded:
            entering.update(dict.fromkeys(name for name in names if graph.tensors[name].requires_grad))
    forward, backward = (
        [graph.tensors[name].bytes_for(graph.num_samples) for name in names] for names in (leaving, entering)
    )
    return forward, backward


def boundary_times(
    graph: BlockGraph, rows: Sequence[int], grid: ModelGrid, prices: GridPrices, local: float
) -> tuple[float, float]:
    """Return microseconds of `boundary_bytes` at ``local`` samples: of a forward, and of a backward.

    Args:
        rows: positions of the stage's blocks in the graph.
    """
    # what context ranks have in parts stays so: each sends its own, and gathers its part among its tensor ranks
    share, blocks = local / graph.num_samples, [graph.blocks[row].name for row in rows]
    share /= grid.context if cut_by_block(graph, grid.context) else 1
    forward, backward = (
        float(sum(prices.tensor.gather.us(each * share) for each in found))
        for found in boundary_bytes(graph, blocks, grid.tensor)
    )
    return forward, backward


def shared_out(gradient: Any, optimizer: Any, *, degree: int, zero_stage: int) -> tuple[Any, Any]:
    """Return G / g and O / o: what one of ``degree`` ranks holds of gradients and optimizer state.

    >>> shared_out(100, 200, degree=2, zero_stage=1)
    (100, 100.0)
    """
    return (
        gradient / degree if zero_stage >= 2 else gradient,
        optimizer / degree if zero_stage >= 1 else optimizer,
    )


def held_bytes(parameter: Any, gradient: Any, optimizer: Any, *, degree: int, zero_stage: int) -> Any:
    """Return P + G / g + O / o: what a rank holds of the present weights while a task of the stage runs.

    >>> held_bytes(100, 100, 200, degree=2, zero_stage=2)
    250.0
    """
    own_gradient, own_optimizer = shared_out(gradient, optimizer, degree=degree, zero_stage=zero_stage)
    return parameter + own_gradient + own_optimizer


def sharded_bytes(parameter: Any, *, degree: int, zero_stage: int) -> Any:
    """Return P where the ranks of a stage share its parameters out; 0 where each holds them whole.

    >>> sharded_bytes(100, degree=2, zero_stage=3), sharded_bytes(100, degree=1, zero_stage=3)
    (100, 0)
    """
    return parameter if zero_stage >= 3 and degree > 1 else 0


def stashed_bytes(gradient: Any, num_versions: int) -> Any:
    """Return (v - 1) G: older versions of the weights that are trained (mode async)."""
    return (num_versions - 1) * gradient


def unreduced_bytes(gradient: Any, saved: Any, *, degree: int, zero_stage: int) -> Any:
    """Return r: whole gradients beyond what the backward that makes them frees.

    Args:
        saved: s; 0 where what is saved may be swapped or recomputed, and so frees nothing for them.

    >>> float(unreduced_bytes(100.0, 40.0, degree=2, zero_stage=2))
    60.0
    """
    return np.maximum(gradient - saved, 0.0) if zero_stage >= 2 and degree > 1 else 0.0 * gradient


def peak_bytes(held: Any, saved: Any, in_flight: int, *, transient: Any, working: Any = 0.0) -> Any:
    """Return held + c s + w + t.

    Args:
        held: all that does not grow with what is in flight: held all the time, and r.

    >>> peak_bytes(250 + 60, 40, 3, transient=7)
    437.0
    """
    return held + in_flight * saved + transient + working


# What a plan's memory is predicted to be filled with, stage by stage: the terms of `memory_formula` one by one.
#
# Their sums are the plan's own figures. Beside them: what messages hold on their way (`messages_held`), what stages
# hold of the mini-batch itself (`with_inputs`: every row that one of their tasks will read, from its start to its
# end), and what autograd keeps under a plan, with how far what was counted is from it (`expected_counts`,
# `differences`).
#
# Planners cut a model without messages in mind. Where a plan's ranks have no free memory for them, it is planned again
# with so much less memory (`plan_beside_messages`).

MOST_PLANS = 3
"""Plans that are made of one request so that messages fit beside all else."""


def memory_breakdown(
    plan: PipelinePlan,
    profile: Profile,
    *,
    graph: BlockGraph | None = None,
    zero_stage: int = 0,
    more_samples: float = 1.0,
    messages: Sequence[int] = (),
) -> tuple[MemoryBreakdown, ...]:
    """Return the bytes of one rank of each stage at its peak.

    Args:
        profile: of the graph the plan was made for.
        graph: that graph; None: the ranks of a data position divide nothing of the profile's costs.
        zero_stage: what the ranks of a stage share out among themselves.
        more_samples: samples of a micro-batch over those that are planned, where units have others.
        messages: what those hold, by stage (`messages_held`); none: they are left out.
    """
    of_grid = {
        grid: profile if graph is None else sharded_profile(profile, graph, grid)
        for grid in {stage.grid for stage in plan.stages}
    }
    return tuple(
        dataclasses.replace(
            _of_stage(stage, plan.num_versions(index), of_grid[stage.grid], zero_stage, more_samples),
            messages=messages[index] if messages else 0,
        )
        for index, stage in enumerate(plan.stages)
    )


def messages_held(plan: PipelinePlan) -> list[int]:
    """Return by stage the most that messages hold on one of its ranks, as the plan's programs run.

    Of an asynchronous plan until its windows have repeated so often that as much is under way as there ever is, and in
    the drain behind them. Of a prefetch it is that of a mini-batch by itself.
    """
    if plan.mode == "async":
        programs = lower_async(plan, forward_only_stages=forward_only_stages(plan))
        windows = windows_of(plan)
        last = windows.first_steady
        names = [async_name(min(window, last), last) for window in range(1, last + windows.longest + 1)]
        names.append(async_name(last, last, is_drain=True))
    else:
        lowered = lower_schedules(plan, build_schedules(plan))
        programs, names = ProgramSet(plan=plan, programs={"whole": lowered}, policy=SYNCHRONOUS), ["whole"]
    found = [0] * len(plan.stages)
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            own = programs.of_rank(rank).of_stage(index).programs
            found[index] = max(found[index], under_way_bytes(plan, [own[name] for name in names]))
    return found


def complete_plan(plan: PipelinePlan, graph: BlockGraph, profile: Profile) -> PipelinePlan:
    """Return the plan with the specs of its edges' tensors and the gradient bytes of its stages.

    Args:
        graph, profile: those the plan was made for.
    """
    costs = {
        grid: sharded_profile(profile, graph, grid).by_block()
        for grid in {stage.grid for stage in plan.stages}
    }
    gradients = [sum(costs[s.grid][name].gradient_bytes for name in s.blocks) for s in plan.stages]
    names = dict.fromkeys(name for edge in plan.edges for name in (*edge.batch_tensors, *edge.whole_tensors))
    plan = plan.with_each(gradient_bytes=gradients)
    return dataclasses.replace(plan, tensors=tuple(graph.tensors[name] for name in names))


def with_breakdown(plan: PipelinePlan, request: PlanRequest) -> PipelinePlan:
    """Return a finished plan that says what fills its ranks, so that each can compare what it really holds.

    It says too of which stages the ranks hold parts of the parameters, and under which ZeRO stage, whatever the plan's
    own request was.
    """
    parts = _parts_of(plan, request)
    sharded = [part.weights + part.gathered if part.gathered else 0 for part in parts]
    limits = [min(request.rank_limits[rank] for rank in stage.ranks) for stage in plan.stages]
    memory = tuple(dataclasses.replace(part, limit=limit) for part, limit in zip(parts, limits, strict=True))
    plan = plan.with_each(sharded_bytes=sharded)
    return dataclasses.replace(plan, memory=memory, zero_stage=request.zero_stage)


def plan_beside_messages(request: PlanRequest, make: Callable[[PlanRequest], PipelinePlan]) -> PipelinePlan:
    """Return what is made of a request, or of one with less memory, so that messages under way fit as well.

    Args:
        make: makes a plan, each time of the same stages or of a planner's.
    """
    # A rank of 100 MB, a plan that holds 90 and 25 of messages: 15 too many, so the second one is made for 85 MB. Where
    # that one holds 80, and 30 of messages as it has more edges, 10 are too many, and the third is made for 75.
    plan = first = make(request)
    taken = 0
    for _ in range(MOST_PLANS - 1):
        over = _excess_bytes(plan, request)
        if over <= 0:
            return plan
        taken += over
        ranks = {rank for stage in plan.stages for rank in stage.ranks}
        limit = min(request.rank_limits[rank] for rank in ranks) - taken
        try:
            plan = make(dataclasses.replace(request, memory_limit_bytes=limit))
        except PlanInfeasible:
            break
    if _excess_bytes(plan, request) <= 0:
        return plan
    over = _excess_bytes(first, request)
    note = f"messages on their way may take {over} bytes more than a rank has; lower micro_batch_sizes if it runs out"
    return dataclasses.replace(first, notes=(*first.notes, note))


def _excess_bytes(plan: PipelinePlan, request: PlanRequest) -> int:
    """Return the most bytes by which a rank that fits exceeds its limit with its messages; 0 where none does."""
    parts = _parts_of(plan, request)
    found = 0
    for rank in {rank for stage in plan.stages for rank in stage.ranks}:
        own = joined_breakdown([parts[stage] for stage in plan.stages_of_rank(rank)])
        over = own.total + own.messages - request.rank_limits[rank]
        # a rank that exceeds it without messages is an explicit plan, and is for the validator
        found = max(found, over if over <= own.messages else 0)
    return found


def _parts_of(plan: PipelinePlan, request: PlanRequest) -> tuple[MemoryBreakdown, ...]:
    return memory_breakdown(
        plan,
        request.profile,
        graph=request.graph,
        zero_stage=request.zero_stage,
        messages=messages_held(plan),
    )


def _of_stage(
    stage: Stage, num_versions: int, profile: Profile, zero_stage: int, more_samples: float
) -> MemoryBreakdown:
    by_block = profile.by_block()
    costs = [by_block[name] for name in stage.blocks]
    local = stage.local_batch_size * more_samples
    again = profile.counted_again(stage.blocks)
    weights = sum(c.parameter_bytes for c in costs) - again[0]
    shared, shared_fixed = profile.saved_with_others(stage.blocks)
    saved_bytes = shared * local + shared_fixed
    saved_bytes += sum(c.saved_bytes_per_sample * local + c.saved_bytes_fixed for c in costs)
    working = 0
    if stage.memory is not None:
        saved_bytes -= (stage.memory.swapped_bytes + stage.memory.recomputed_bytes) * more_samples
        working = round(stage.memory.working_bytes * more_samples)
    gradients = sum(c.gradient_bytes for c in costs) - again[1]
    optimizer = sum(c.optimizer_bytes for c in costs) - again[2]
    transient = max((c.transient_bytes_per_sample * local for c in costs), default=0.0)
    # What is saved is what the stage's own memory plan leaves: whole gradients reuse that much.
    transient += unreduced_bytes(gradients, saved_bytes, degree=stage.num_replicas, zero_stage=zero_stage)
    transient += stage.pending * sum(c.pending_bytes_per_sample * local for c in costs)
    own_gradients, own_optimizer = shared_out(
        gradients, optimizer, degree=stage.num_replicas, zero_stage=zero_stage
    )
    sharded = sharded_bytes(weights, degree=stage.num_replicas, zero_stage=zero_stage)
    gathered = dataclasses.replace(stage, sharded_bytes=sharded).gathered_bytes
    return MemoryBreakdown(
        stage=stage.name,
        weights=weights - gathered,
        gathered=gathered,
        stashed_weights=stashed_bytes(gradients, num_versions),
        gradients=int(own_gradients),
        optimizer=int(own_optimizer),
        activations=round(stage.in_flight * saved_bytes),
        working=working,
        transient=round(transient),
        inputs=round(profile.input_bytes(stage.blocks, stage.degree) * more_samples),
    )


def with_inputs(
    profile: Profile, graph: BlockGraph, inputs: Iterable[TensorSpec], *, mini_batch: int, dtype: str
) -> Profile:
    """Return a profile with the batches which plans are made for.

    Args:
        inputs: the model's, by batch key.
        mini_batch: samples of a step.
        dtype: floats are cast to it.
    """
    found = []
    for spec in inputs:
        if spec.dtype.startswith(("float", "bfloat")):
            spec = dataclasses.replace(spec, dtype=dtype)
        readers = tuple(block.name for block in graph.blocks if spec.name in block.inputs)
        if readers:
            has_samples = spec.layout.kind is LayoutKind.BATCH
            found.append(
                InputCost(blocks=readers, bytes=spec.bytes_for(mini_batch), is_shared_out=has_samples)
            )
    return dataclasses.replace(profile, inputs=tuple(found))


TOLERANCE = 0.02
LEAST_BYTES = 1024
"""Differences below this are of single small tensors, whatever share of a small stage they are."""


def expected_counts(plan: PipelinePlan, stage: int) -> MemoryCounts | None:
    """Return what one rank of a stage keeps, swaps and recomputes; None where the plan predicts nothing."""
    if not plan.memory:
        return None
    memory, in_flight = plan.stages[stage].memory, plan.stages[stage].in_flight
    activations = plan.memory[stage].activations
    return MemoryCounts(
        held_bytes=round(activations / in_flight),
        swapped_bytes=memory.swapped_bytes if memory is not None else 0,
        recomputed_bytes=sum(segment.bytes for segment in memory.recomputed) if memory is not None else 0,
        peak_held_bytes=activations,
        stashed_bytes=plan.memory[stage].stashed_weights,
    )


def differences(
    plan: PipelinePlan, stage: int, counted: MemoryCounts, *, only_more: bool = False
) -> list[str]:
    """Return a phrase for every count that is off by more than `TOLERANCE`; none where nothing is predicted.

    Args:
        only_more: leave out what holds less memory than is planned.
    """
    expected = expected_counts(plan, stage)
    if expected is None:
        return []
    found = []
    for name, what in (
        ("held_bytes", "holds"),
        ("swapped_bytes", "swaps"),
        ("recomputed_bytes", "recomputes"),
        ("peak_held_bytes", "holds at most"),
        ("stashed_bytes", "stashes"),
    ):
        planned, seen = getattr(expected, name), getattr(counted, name)
        if abs(seen - planned) > max(TOLERANCE * planned, LEAST_BYTES):
            if only_more and seen < planned and name in ("held_bytes", "peak_held_bytes", "stashed_bytes"):
                continue
            of = "" if name in ("peak_held_bytes", "stashed_bytes") else " a micro-batch"
            found.append(f"{what} {seen} bytes{of} where {planned} are planned")
    return found
