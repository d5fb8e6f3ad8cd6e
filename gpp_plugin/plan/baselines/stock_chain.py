"""The chain that stock DeepSpeed runs: what `PipelineModule` can express, balanced as well as it can be.

DeepSpeed's pipeline is a chain of stages of equal degree; every rank computes one loss unit at a time (its
``train_micro_batch_size_per_gpu``), in 1F1B. Its own ``partition_method="parameters"`` puts the embeddings'
parameters on the scale as if they were compute; to compare with it fairly, the blocks are balanced by their
measured time, with the smallest slowest stage (exact).

Source: DeepSpeed 0.19.8, its PipelineEngine
Tests: tests/integrations/test_stock.py, tests/integrations/test_stock_layer.py, tests/plan/test_stock.py,
    tests/plan/test_uniform.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpp_plugin.config.key_names import name_of, setting_of
from gpp_plugin.errors import PlanError, PlanInfeasible
from gpp_plugin.ir.block_graph import BlockGraph
from gpp_plugin.ir.plan import PipelinePlan, StageEdge
from gpp_plugin.ir.tensors import TensorSpec
from gpp_plugin.plan.baselines.chain_costs import as_sequential, even_stage_counts
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.costs.estimate import evaluate_us
from gpp_plugin.plan.make import (
    StageDraft,
    build_plan,
    layer_bounds,
    linear_order,
    make_drafts,
    split_by_layers,
    split_by_weight,
)
from gpp_plugin.plan.memory.capuchin import StageChoice, StageOptimizer
from gpp_plugin.plan.memory.memory_chain import ChainPlan
from gpp_plugin.plan.memory.operator_chain import TensorChain
from gpp_plugin.plan.refine.degrees import choose_degrees
from gpp_plugin.plan.request import PlanRequest, batch_rules
from gpp_plugin.plan.selection import best_plan, explain_infeasible
from gpp_plugin.plan.validate_plan import finer_advice

# Megatron's partition: a chain of stages with the same number of layers and the same degree each.


def uniform_plan(request: PlanRequest) -> PipelinePlan:
    """Cut the blocks, in a linear order, into stages with the same number of layers.

    Branches follow each other in the chain; edges that skip stages stay real edges. Where the number
    of stages is left open every divisor of the number of ranks is tried (Megatron's sizes), with
    every micro-batch size, and the quickest by prediction is taken. Coupled stages keep whole loss
    units; where equal degrees are impossible with them, ranks are shared out anew.

    Raises:
        PlanInfeasible: no such chain fits; the message says what to change.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    order = linear_order(request.graph)
    counts = [count for count in even_stage_counts(request) if count <= len(order)]
    groupings = [split_by_layers(order, count) for count in counts]
    candidates = []
    for groups, wish in itertools.product(groupings, rules.sizes_to_try):
        degree, rest = divmod(request.num_ranks, len(groups))
        drafts = None if rest else make_drafts(rules, groups, [degree] * len(groups), wish)
        if drafts is None:
            drafts = choose_degrees(request, costs, rules, groups, wish)
        if drafts is not None:
            candidates.append(drafts)
    plan = best_plan(request, costs, candidates, planner="uniform", may_hold_more=True)
    return plan if plan is not None else explain_infeasible(request, costs, rules, groupings)


STOCK = "stock_1f1b"
"""The planner's name: with it `deepspeed.initialize` returns DeepSpeed's own pipeline engine."""


def stock_plan(request: PlanRequest) -> PipelinePlan:
    """Return the chain of equal degrees with the quickest slowest stage; time and memory are a chain's.

    Where the number of stages is left open there are as many as ranks (divided by ``data_parallel``).

    Raises:
        PlanInfeasible: DeepSpeed has no such pipeline; the message says what to change.
    """
    stages, degree = _shape(request)
    size = request.loss_unit * degree
    if request.mini_batch % size:
        raise PlanInfeasible(
            f"{STOCK}: {degree} ranks a stage take {size} samples at a time ({request.loss_unit} each), which does "
            f"not divide the mini-batch of {request.mini_batch}; change "
            f"{name_of('data_parallel')} or {name_of('mini_batch')}"
        )
    if request.schedule != "1f1b":
        raise PlanInfeasible(f"{STOCK}: DeepSpeed's engine runs 1F1B only, not {request.schedule}; remove it")
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    order = linear_order(request.graph)
    forward, backward = costs.block_times(request.loss_unit)
    rows = costs.indices(order)
    weights = [float(forward[row] + backward[row]) for row in rows]
    drafts = [
        StageDraft(blocks=tuple(order[start:stop]), degree=degree, micro_batch_size=size)
        for start, stop in itertools.pairwise(split_by_weight(weights, stages))
    ]
    plan = build_plan(request, drafts, planner=STOCK, costs=costs, notes=_notes(request, size))
    sequential = as_sequential(plan, costs)
    # what a chain holds and takes; the edges stay those of the graph, along which tensors are passed on
    return dataclasses.replace(sequential, edges=plan.edges, iteration_us=evaluate_us(sequential, costs))


def _shape(request: PlanRequest) -> tuple[int, int]:
    """Return the number of stages and the degree of each."""
    ranks, blocks = request.num_ranks, len(request.graph.blocks)
    wanted = request.num_stages or ranks // (request.data_parallel or 1)
    if wanted > blocks:
        possible = max(p for p in range(1, blocks + 1) if ranks % p == 0)
        raise PlanInfeasible(
            f"{STOCK}: {wanted} stages and the model has {blocks} blocks; write "
            f"{setting_of('stages', possible)}{finer_advice(request, wanted)}"
        )
    if ranks % wanted:
        below = max(p for p in range(1, wanted) if ranks % p == 0)
        raise PlanInfeasible(
            f"{STOCK}: DeepSpeed gives every stage the same number of ranks, and {wanted} stages do not divide "
            f"{ranks} ranks; write {setting_of('stages', below)}"
        )
    return wanted, ranks // wanted


def _notes(request: PlanRequest, size: int) -> tuple[str, ...]:
    notes = ["stock DeepSpeed 1F1B: one chain, balanced by the blocks' times"]
    if request.mini_batch == size:
        notes.append(
            "stock DeepSpeed has one micro-batch size for all stages, the loss unit: with one loss a mini-batch it "
            "runs a single micro-batch, and no two stages ever work at the same time"
        )
    wanted = {s for s in (request.micro_batch_sizes or {}).values() if s != size}
    if wanted:
        notes.append(f"micro_batch_sizes has no effect: every stage takes {size} samples at a time")
    return tuple(notes)


# Whole layers as the unit of cutting, swapping and recomputing: what DawnPiper's baselines work with.
#
# Costs are those of `operator_chain`, at operators; these planners only see fewer cuts and coarser choices.
#
#     GPipe (torchgpipe)  stages balanced by time; a stage keeps its input and runs again as a whole
#     PipeDream           stages balanced by the slower of time and communication; no memory optimization
#     vPipe               each layer is saved, swapped or recomputed (`vpipe`)


def balanced_bounds(chain: TensorChain, bounds: Sequence[int], num_stages: int) -> list[int]:
    """Return the layers' bounds between stages whose longest time is shortest (exact).

    Raises:
        PlanError: there are fewer layers than stages.
    """
    if len(bounds) - 1 < num_stages:
        raise PlanError(f"{num_stages} stages of {len(bounds) - 1} layers; lower the number of stages")
    times = np.diff(chain.time[list(bounds)]).tolist()
    return [bounds[cut] for cut in split_by_weight(times, num_stages)]


def partition_gpipe(optimizer: StageOptimizer) -> ChainPlan:
    """Return torchgpipe's stages: balanced by time, checkpointed whole where they do not fit otherwise."""
    chain, shape = optimizer.chain, optimizer.shape
    cuts = balanced_bounds(chain, layer_bounds(chain.names, shape.num_stages), shape.num_stages)
    choices = []
    for stage, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        choice = optimizer.weigh(stage, start, stop)
        if optimizer.can_recompute and choice.excess_bytes > 0:
            whole = optimizer.weigh(stage, start, stop, segments=[(start, stop)])
            choice = min(choice, whole, key=lambda c: c.key)
        choices.append(choice)
    return ChainPlan(cuts=tuple(cuts), stages=tuple(choices), local=chain.local)


def partition_pipedream(optimizer: StageOptimizer) -> ChainPlan:
    """Return PipeDream's stages: the slowest of all stages and links as quick as possible.

    Section 3.1's program for one rank a stage; activations and gradients share a link.
    """
    chain, shape = optimizer.chain, optimizer.shape
    bounds = layer_bounds(chain.names, shape.num_stages)
    num = len(bounds) - 1
    if num < shape.num_stages:
        raise PlanError(f"{shape.num_stages} stages of {num} layers; lower the number of stages")
    time = chain.time[bounds]
    link = 2 * chain.crossing[bounds] / shape.link_bytes_per_s * 1e6
    best = np.where(np.arange(num + 1) > 0, time - time[0], np.inf)
    cut = np.zeros((shape.num_stages, num + 1), dtype=np.int64)
    for stage in range(1, shape.num_stages):
        following = np.full(num + 1, np.inf)
        for stop in range(stage + 1, num + 1):
            starts = np.arange(stage, stop)
            worst = np.maximum(np.maximum(best[starts], link[starts]), time[stop] - time[starts])
            choice = int(worst.argmin())
            following[stop], cut[stage, stop] = worst[choice], starts[choice]
        best = following
    ends = [num]
    for stage in range(shape.num_stages - 1, 0, -1):
        ends.append(int(cut[stage, ends[-1]]))
    cuts = [0, *(bounds[i] for i in reversed(ends))]
    stages: list[StageChoice] = [
        optimizer.weigh(stage, a, b) for stage, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]
    return ChainPlan(cuts=tuple(cuts), stages=tuple(stages), local=chain.local)


# What crosses each cut of a stage graph that is run as a chain: everything made before and read after.
#
# A chain has no skip edges: a tensor that stage 1 makes for stage 4 passes through stages 2 and 3, and so do the
# model inputs of the stages between the first, which loads them, and the last, which loads its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What travels from one stage of the chain to the next.

    Args:
        differentiable: tensors through which a gradient flows back, in the order they were made.
        constant: tensors without a gradient from here on (masks, ids, frozen features).
        inputs: batch keys that stages behind the cut read, the last stage's own left out.
    """

    differentiable: tuple[str, ...]
    constant: tuple[str, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """What one stage of the chain reads and makes.

    Args:
        loads: batch keys it loads itself: the first stage's for all but the last, and the last stage's own.
        reads: batch keys its own blocks read.
        makes: tensors it makes for later stages.
        before, after: the cuts around it; None at the ends of the chain.
    """

    loads: tuple[str, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    before: Cut | None
    after: Cut | None


def linearise(plan: PipelinePlan, graph: BlockGraph) -> tuple[ChainStage, ...]:
    """Return the stages of ``plan``, in its order, as a chain."""
    count = len(plan.stages)
    blocks = {block.name: block for block in graph.blocks}
    reads = [_once(key for name in stage.blocks for key in blocks[name].inputs) for stage in plan.stages]
    cuts: list[Cut | None] = [None, *(_cut(plan, graph, reads, i) for i in range(count - 1)), None]
    chain = []
    for i in range(count):
        loads: tuple[str, ...] = ()
        if i == 0:
            loads = _once(key for keys in reads[: max(count - 1, 1)] for key in keys)
        elif i == count - 1:
            loads = reads[i]
        makes = _once(name for e in plan.edges if e.src == i for name in (*e.batch_tensors, *e.whole_tensors))
        chain.append(ChainStage(loads=loads, reads=reads[i], makes=makes, before=cuts[i], after=cuts[i + 1]))
    return tuple(chain)


def crossing_edges(plan: PipelinePlan, stage: int) -> list[StageEdge]:
    """Return the edges of the graph that cross the cut behind ``stage`` of the chain."""
    return [edge for edge in plan.edges if edge.src <= stage < edge.dst]


def _cut(plan: PipelinePlan, graph: BlockGraph, reads: list[tuple[str, ...]], stage: int) -> Cut:
    """Return what crosses the cut behind ``stage``."""
    crossing = crossing_edges(plan, stage)
    live = {name for edge in crossing for name in (*edge.batch_tensors, *edge.whole_tensors)}
    gradient = {name for edge in crossing for name in edge.gradient_tensors}
    order = [name for name in graph.tensors if name in live]
    return Cut(
        differentiable=tuple(name for name in order if name in gradient),
        constant=tuple(name for name in order if name not in gradient),
        inputs=_once(key for keys in reads[stage + 1 : -1] for key in keys),
    )


def cut_bytes(cut: Cut, specs: Mapping[str, TensorSpec], num_samples: int) -> int:
    """Return what crosses a cut in one micro-batch of ``num_samples`` samples a rank.

    Args:
        specs: tensors by name and inputs by batch key.
    """
    names = (*cut.differentiable, *cut.constant, *cut.inputs)
    return sum(specs[name].bytes_for(num_samples) for name in names)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
