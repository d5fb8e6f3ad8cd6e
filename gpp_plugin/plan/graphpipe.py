"""GraphPipe's partitioner: a graph of stages, degrees and micro-batch sizes (section 5, Algorithm 1).

Legend: t is the bottleneck time a sample (the paper's TPS), B the mini-batch, b the micro-batch size,
level the in-flight of a stage in micro-batches (depth from the sink).

Deviations, each with its reason:

- Devices are the value of the DP and (level, t) its bounds (`stage_search`): the paper's c_f and c_b
  cannot both mean what Algorithm 2 and the top-level call say.
- t is bisected over the finite set of stage times, so that the result is exact.
- The whole frontier of (t, depth) is kept and ranked by (B + (depth - 1) b) t, then by prediction: the
  bottleneck alone ignores bubbles.
- Branches are grouped by bin packing (the paper leaves ParallelDecompose open), a join's or fork's
  stage may own parts of branches, and `refine` moves blocks across branches.
- Ranks left over by the DP are shared out (`degrees`): a plan uses all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.plan.batches import BatchRules, batch_rules
from gpp_plugin.plan.components import decompose
from gpp_plugin.plan.costs import CostModel, link_for_span, ring_us
from gpp_plugin.plan.intervals import Series, build_series
from gpp_plugin.plan.judge import judge_us
from gpp_plugin.plan.refine import Candidate, Refiner
from gpp_plugin.plan.registry import PlanRequest, register_planner
from gpp_plugin.plan.selection import explain_infeasible
from gpp_plugin.plan.stage_search import StageSearch
from gpp_plugin.plan.stage_table import StageShapes, TableMaker
from gpp_plugin.plan.stages import build_plan

SLACK = 1.1
"""Partitions whose (B + (depth - 1) b) t is within this factor of the best are predicted exactly."""
OPTIMISM = 1.3
"""First only plans within this factor of perfectly shared work are searched; then, if none, all."""
MAX_FINALISTS = 20
REFINE_BUDGET = 40_000
"""Simulated tasks, on 8 ranks and more: at most a tenth of a second; fewer on fewer ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A point of the frontier: stages that meet a time with a depth, at one micro-batch size."""

    groups: tuple[tuple[str, ...], ...]
    micro_batch_size: int
    us_per_sample: float
    levels: int
    score: float


@register_planner("graphpipe")
def graphpipe_plan(request: PlanRequest) -> PipelinePlan:
    """Partition the model into a graph of stages.

    Raises:
        PlanInfeasible: no plan fits; the message names stage, need, limit and knob.
    """
    costs = CostModel(request.graph, request.profile, request.cluster, zero_stage=request.zero_stage)
    rules = batch_rules(request)
    best = search_stages(request, costs, rules, budget=REFINE_BUDGET * min(request.num_ranks, 8) ** 2 // 64)[
        :1
    ]
    if not best or best[0].score[0] > 0:
        names = [block.name for block in request.graph.blocks]
        found = [[draft.blocks for draft in candidate.drafts] for candidate in best]
        explain_infeasible(request, costs, rules, [*found, [[name] for name in names], [names]])
    plan = build_plan(request, best[0].drafts, planner="graphpipe", costs=costs)
    return dataclasses.replace(plan, iteration_us=judge_us(plan, costs))


def search_stages(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    *,
    budget: int,
    num_refined: int = 2,
    is_thorough: bool = False,
) -> list[Candidate]:
    """Return candidates, best first: the frontier's partitions with all ranks shared out, then refined.

    Args:
        budget: tasks that may be predicted in the refinement.
        num_refined: how many of the best are refined.
        is_thorough: also start from plans for every number of stages.
    """
    refiner = Refiner(request, costs, rules, budget=budget)
    counts = _stage_counts(request)
    candidates: list[Candidate] = []
    if counts is None:
        partitions = find_partitions(request, costs, rules)
        for partition in sorted(partitions, key=lambda p: p.score)[:MAX_FINALISTS]:
            for slack in (0.0, 1.0):
                found = refiner.candidate(partition.groups, partition.micro_batch_size, slack=slack)
                if found is not None:
                    candidates.append(found)
    if is_thorough or not any(candidate.score[0] == 0 for candidate in candidates):
        candidates.extend(_with_counts(request, costs, rules, refiner, counts))
    candidates.sort(key=lambda candidate: candidate.score)
    refined = []
    for candidate in candidates[:num_refined]:
        if refiner.budget <= 0:
            refined.append(candidate)
            continue
        refined.append(refiner.improve(candidate))
        refined.append(refiner.improve(refiner.balance(candidate)))
    return sorted([*refined, *candidates[num_refined:]], key=lambda candidate: candidate.score)


def _stage_counts(request: PlanRequest) -> list[int] | None:
    """Return the numbers of stages that the request leaves open, or None where it leaves all."""
    if request.num_stages is not None:
        return [request.num_stages]
    if request.data_parallel is not None:
        return [request.num_ranks // request.data_parallel]
    return None


def _with_counts(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    refiner: Refiner,
    counts: Sequence[int] | None,
) -> Iterator[Candidate]:
    """Yield candidates with given numbers of stages: planned on that many ranks, one a stage."""
    largest = min(request.num_ranks, len(request.graph.blocks))
    # Any number may be the one whose degrees add up or whose stages fit: powers of two, then all ranks.
    open_counts = sorted({1 << n for n in range(largest.bit_length())} | {largest, (largest + 1) // 2})
    sizes = sorted(rules.wishes(), key=lambda size: _lower_bound(request, costs, rules, size))
    for count in counts if counts is not None else open_counts:
        if count > len(request.graph.blocks):
            continue
        smaller = dataclasses.replace(
            request,
            num_ranks=count,
            data_parallel=1,
            num_stages=None,
            micro_batch_sizes=None,
            loss_unit=request.loss_unit,
        )
        partitions = find_partitions(smaller, costs, batch_rules(smaller))
        groupings = {partition.groups for partition in sorted(partitions, key=lambda p: p.score)[:6]}
        groupings.add((tuple(block.name for block in request.graph.blocks),))
        for groups in sorted(groupings):
            masks = refiner.reshape(groups, count)
            for wish in sizes if masks is not None else ():
                assert masks is not None
                found = refiner.with_masks(masks, wish)
                if found is not None:
                    yield found


def find_partitions(request: PlanRequest, costs: CostModel, rules: BatchRules) -> list[Partition]:
    """Return the frontiers of (time a sample, depth) over all micro-batch sizes that may win."""
    names = [block.name for block in request.graph.blocks]
    dependencies = nx.relabel_nodes(request.graph.dependencies(), {name: i for i, name in enumerate(names)})
    tree = decompose(dependencies)
    root = build_series(request.graph, costs, rules, tree)
    longest = int(nx.dag_longest_path_length(dependencies, weight=None, default_weight=1)) + 1
    bounds = {wish: _lower_bound(request, costs, rules, wish) for wish in rules.wishes()}
    shapes: dict[int, StageShapes] = {}
    for factor in (OPTIMISM, float("inf")):
        best = min(bounds.values()) * factor / SLACK
        found: list[Partition] = []
        for wish in sorted(bounds, key=bounds.__getitem__):
            if bounds[wish] > best * SLACK:
                continue
            # Levels at which even perfectly shared work would take too long are not searched.
            spare = (best * SLACK / bounds[wish] - 1) * request.mini_batch / wish if bounds[wish] > 0 else 0.0
            deepest = longest if spare > longest else 1 + int(spare)
            search = make_search(request, costs, rules, root, wish, deepest, shapes)
            for t, levels, score in _frontier(request, search, wish, best, bounds[wish]):
                best = min(best, score)
                groups = search.groups(levels)
                found.append(
                    Partition(
                        groups=tuple(tuple(names[i] for i in sorted(group)) for group in groups),
                        micro_batch_size=wish,
                        us_per_sample=t,
                        levels=levels,
                        score=score,
                    )
                )
        if found:
            return [partition for partition in found if partition.score <= best * SLACK]
    return []


def _lower_bound(request: PlanRequest, costs: CostModel, rules: BatchRules, wish: int) -> float:
    """Return a time no plan at this micro-batch size goes below: all work, shared out perfectly."""
    is_fixed = np.array(
        [block.name in rules.coupled or block.name in rules.fixed for block in request.graph.blocks]
    )
    unit = np.add(*costs.block_times(request.loss_unit))[is_fixed] / request.loss_unit
    sizes = {wish, wish / min(wish, request.num_ranks)}
    free = min(float((np.add(*costs.block_times(local))[~is_fixed] / local).sum()) for local in sizes)
    # What the user fixes may be quicker than at one loss unit: no bound from it.
    total = free + (float(unit.sum()) if not rules.fixed else 0.0)
    return total * request.mini_batch / request.num_ranks


def make_search(
    request: PlanRequest,
    costs: CostModel,
    rules: BatchRules,
    root: Series,
    wish: int,
    longest: int,
    shapes: dict[int, StageShapes] | None = None,
) -> StageSearch:
    """Return the search at one micro-batch size.

    Args:
        longest: most stages on a path.
        shapes: kept from one micro-batch size of the same tree to the next (`TableMaker`).
    """
    cluster = request.cluster
    degrees = rules.degrees()
    limit = float(max(device.memory_bytes for device in cluster.devices[: request.num_ranks]))
    if request.memory_limit_bytes is not None:
        limit = min(limit, request.memory_limit_bytes)
    maker = TableMaker(
        request.graph,
        costs,
        rules,
        wish=wish,
        memory_limit=limit,
        link_us_per_byte=1e6 / link_for_span(cluster, request.num_ranks).bytes_per_s,
        is_gpipe=request.schedule == "gpipe",
        reduce_us_per_byte=[ring_us(1e9, d, link_for_span(cluster, d)) / 1e9 for d in degrees],
        degrees=degrees,
        shapes={} if shapes is None else shapes,
    )
    largest = max([request.loss_unit * degrees[-1] if rules.coupled else 1, *rules.fixed.values()])
    extra = -(-2 * min(largest, request.mini_batch) // wish) if largest > wish else 0
    top = min(longest, request.num_ranks) + min(extra, request.mini_batch // wish + 1, 2 * longest + 16)
    return StageSearch(root, maker, top)


def _frontier(
    request: PlanRequest, search: StageSearch, wish: int, best: float, bound_us: float
) -> Iterator[tuple[float, int, float]]:
    """Yield (t, levels, score) of ever shallower solutions that may be among the best.

    Args:
        bound_us: a step is never shorter.
    """
    times = search.times()
    ranks, mini_batch = request.num_ranks, request.mini_batch

    solved: tuple[int, int | None] = -1, None

    def levels_at(index: int) -> int | None:
        nonlocal solved
        if solved[0] != index:
            fewest = search.fewest_devices(float(times[index]))
            allowed = (fewest <= ranks).nonzero()[0]
            solved = index, int(allowed[0]) if allowed.size else None
        return solved[1]

    low = int(times.searchsorted(bound_us * (1 - 1e-9) / mini_batch))
    high = min(len(times) - 1, int(times.searchsorted(best * SLACK / mini_batch, side="right")) - 1)
    cap: int | None = None
    while high >= low:
        if cap is not None:
            if cap < 1:
                return
            # A shallower solution may be slower a sample, up to this time.
            bound = best * SLACK / (mini_batch + (cap - 1) * wish)
            high = int(times.searchsorted(bound, side="right")) - 1
            if high < low:
                return
        levels = levels_at(high)
        if levels is None or (cap is not None and levels > cap):
            return
        while low < high:
            middle = (low + high) // 2
            found = levels_at(middle)
            if found is not None and (cap is None or found <= cap):
                high = middle
            else:
                low = middle + 1
        found = levels_at(high)
        assert found is not None
        score = float(times[high]) * (mini_batch + (found - 1) * wish)
        best = min(best, score)
        yield float(times[high]), found, score
        # Of deep solutions only some depths are kept: neighbours differ by less than the prediction errs.
        cap = found - max(1, found // 6)
